"""Checkpoints on disk as states to go on from: read, checked, and cut as the present run is cut.

A checkpoint stores parameters and optimizer state by the names of the whole model, so any cut can
be made of it (`peer.checkpointing`). What is read is hashed each time; a checkpoint that cannot be
read gives one line, and the one before it is taken.

A run that goes on from a checkpoint of another one (a changed file, or only another cut) copies it
into its own directory first, cut anew, and keeps in `parent.json` where it comes from: from then on
it needs nothing of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peer import checkpoints
from peer.checkpointing import SEPARATOR, split_state, stage_layout, write_state
from peer.disk import write_durably
from peer.inquiries import snapshot_mark
from peer.restoring import Origin
from peer.snapshots import Snapshot
from swarm.averaging.policy import POLICIES
from swarm.config import RunConfig, canonical_bytes, run_id_of
from swarm.delayed_state import PREVIOUS
from swarm.errors import DataError
from swarm.model import ModelPipeline
from swarm.optim import OptimizerSettings, make_optimizer
from swarm.terms import Record

PARENT = "parent.json"
SAME_MODEL = "resume with the [model] it was trained with; its cut may differ"


class CheckpointReader:
    """One complete checkpoint, cut as `pipeline` is. All methods block.

    For a policy with two steps in flight a state has two versions of the parameters. Written by a
    run with another policy, it has one, which serves for both as the first weights do.

    Raises DataError when it is not complete, or not of this model.
    """

    def __init__(
        self,
        directory: Path,
        pipeline: ModelPipeline,
        optimizer: OptimizerSettings,
        steps_in_flight: int = 1,
    ) -> None:
        self.directory, self.pipeline, self.optimizer = directory, pipeline, optimizer
        self.steps_in_flight = steps_in_flight
        self.manifest = checkpoints.load_manifest(directory)
        self.sha256 = hashlib.sha256((directory / checkpoints.MANIFEST).read_bytes()).hexdigest()
        try:
            self.run_id = str(self.manifest["run_id"])
            self._updates = [int(entry["meta"]["updates"]) for entry in self.manifest["stages"]]
        except (KeyError, TypeError, ValueError) as error:
            what = f"checkpoint {directory} is damaged: {error!r} in its manifest"
            raise DataError(what, "choose another") from None
        self._where: dict[str, int] = {}
        for entry in self.manifest["stages"]:
            for name in self._names_in(directory / entry["file"]):
                self._where[name] = entry["stage"]
        self._part: tuple[int, dict[str, Tensor], dict[str, Tensor]] | None = None

    @property
    def step(self) -> int:
        step: int = self.manifest["step"]
        return step

    @staticmethod
    def _names_in(path: Path) -> list[str]:
        try:
            with safe_open(path, "pt") as file:
                return list(file.keys())
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot read {path}: {error}", "use another checkpoint") from None

    def origin(self) -> Origin:
        """What an epoch that begins with it names; every file is read and checked."""
        stages = range(self.pipeline.num_stages)
        marks = {stage: self.snapshot(stage).fingerprint for stage in stages}
        return Origin(self.step, self.sha256, marks)

    def snapshot(self, stage: int) -> Snapshot:
        """The state of a stage of `pipeline`. Raises DataError."""
        layout = stage_layout(self.pipeline, stage)
        wanted = make_optimizer(self.optimizer, layout, "meta").state()
        if lacking := [name for name in layout.names if name not in self._where]:
            raise DataError(
                f"{self.directory} is of another model: it lacks {lacking[0]}", SAME_MODEL
            )
        tensors = {"parameters": torch.zeros(layout.total)}
        for name, like in wanted.items():
            tensors[f"optimizer.{name}"] = torch.zeros(like.shape)
        if self.steps_in_flight > 1:
            tensors[PREVIOUS] = torch.zeros(layout.total)
        updates = set()
        for source in sorted({self._where[name] for name in layout.names}):
            parameters, states = self._read(source)
            updates.add(self._updates[source])
            for name, view in layout.slices(tensors["parameters"]).items():
                if name in parameters:
                    self._copy(name, parameters[name], view)
            if PREVIOUS in tensors:
                for name, view in layout.slices(tensors[PREVIOUS]).items():
                    if name in parameters:
                        older = states.get(f"{PREVIOUS}{SEPARATOR}{name}", parameters[name])
                        self._copy(name, older, view)
            kinds = {name.split(SEPARATOR, 1)[0] for name in states} - {PREVIOUS}
            if kinds != wanted.keys():
                raise DataError(
                    f"{self.directory} holds the state of another optimizer",
                    "resume with the [optimizer] name and momentum it was trained with",
                )
            for kind in wanted:
                for name, view in split_state(layout, kind, tensors[f"optimizer.{kind}"]).items():
                    if name in states:
                        self._copy(name, states[name], view)
                    elif SEPARATOR not in name or name.split(SEPARATOR, 1)[1] in parameters:
                        raise DataError(
                            f"{self.directory}: the state of this optimizer cannot be cut anew",
                            "resume with the cut it was trained with",
                        )
        if len(updates) != 1:
            raise DataError(f"the stages of {self.directory} do not belong together")
        snapshot = Snapshot(self.step, updates.pop(), "", None, tensors)
        snapshot.fingerprint = snapshot_mark(snapshot)
        return snapshot

    def _copy(self, name: str, source: Tensor, target: Tensor) -> None:
        if source.shape != target.shape or source.dtype != target.dtype:
            shapes = f"{tuple(source.shape)} instead of {tuple(target.shape)}"
            raise DataError(f"{self.directory} is of another model: {name} is {shapes}", SAME_MODEL)
        target.copy_(source)

    def _read(self, source: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A stage as it was written, hashed. The last one is kept: the next may need it too."""
        if self._part is None or self._part[0] != source:
            self._part = None
            parameters = checkpoints.read_stage_parameters(self.directory, source)
            states = checkpoints.read_stage_optimizer(self.directory, source)
            self._part = (source, parameters, states)
        return self._part[1], self._part[2]


def reader_of(path: Path, config: RunConfig, pipeline: ModelPipeline) -> CheckpointReader:
    """A checkpoint as a run of `config` reads it. Raises DataError."""
    steps_in_flight = POLICIES[config.update.policy].steps_in_flight
    return CheckpointReader(path, pipeline, config.optimizer, steps_in_flight)


class SavedStates:
    """The checkpoints in a run's directory, for its leader (`peer.restoring.Saved`).

    `say` gets a line for each that is passed over.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        pipeline: ModelPipeline,
        *,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.run_dir, self.config, self.pipeline, self.say = run_dir, config, pipeline, say
        self._alone = len(config.run.trainers) <= 1
        self._reader: CheckpointReader | None = None
        self._said: list[str] = []  # at the last look; while a run waits there is one a second

    async def newest(self, record: Record | None) -> Origin:
        return await asyncio.to_thread(self._newest, record)

    async def state(self, record: Record, stage: int) -> Snapshot:
        return await asyncio.to_thread(self._state, record, stage)

    def _newest(self, record: Record | None) -> Origin:
        notes: list[str] = []
        before, self._said = self._said, notes
        self._reader = None  # what could not be read may have been replaced since

        def note(line: str) -> None:
            notes.append(line)
            if line not in before:
                self.say(line)

        for path in checkpoints.newest_first(self.run_dir, note, self.config.run_id):
            try:
                reader = self._open(path)
                if record is None or on_the_way(reader.manifest, record):
                    origin = reader.origin()
                    self._must_be_newest(origin.step, record)
                    return replace(origin, epoch=self._epoch(), notes=tuple(notes))
            except DamagedError:
                raise
            except DataError as error:
                note(checkpoints.passed_over(path, error))
        self._must_be_newest(0, record)
        if notes or (self.run_dir / PARENT).exists():  # not over what may yet be mended
            raise DataError(f"no checkpoint in {self.run_dir} can be read")
        return Origin(0, epoch=self._epoch(), notes=tuple(notes))

    def _epoch(self) -> int:
        return checkpoints.highest_epoch(self.run_dir)

    def _must_be_newest(self, step: int, record: Record | None) -> None:
        """Another trainer may have led when the newest checkpoint was written."""
        saved = record.saved if record else 0
        here = (self.run_dir / "checkpoints" / f"step-{saved}").exists()
        if step < saved and not here and not (self._alone and step):
            where = "not here any more" if self._alone else "with another trainer"
            raise DamagedError(
                f"the newest checkpoint, of step {saved}, is {where}",
                "bring it back, or resume from an older one with --resume",
            )

    def _state(self, record: Record, stage: int) -> Snapshot:
        last = self._reader  # `newest` may look meanwhile, in another thread
        if last is not None and last.sha256 == record.checkpoint:
            return last.snapshot(stage)
        for path in checkpoints.newest_first(self.run_dir):
            try:
                reader = self._open(path)
            except DataError:  # a damaged one, named when it was passed over
                continue
            if reader.sha256 == record.checkpoint:
                return reader.snapshot(stage)
        raise DataError(f"the checkpoint of step {record.step + 1} is not in {self.run_dir}")

    def _open(self, path: Path) -> CheckpointReader:
        reader = self._reader
        if reader is None or reader.directory != path:
            self._reader = reader = reader_of(path, self.config, self.pipeline)
        return reader


class DamagedError(DataError):
    """There is no going back with what is here, and an older checkpoint would be no remedy."""


def on_the_way(manifest: Mapping[str, Any], record: Record) -> bool:
    """Whether the run whose newest record is `record` has passed through this checkpoint."""
    epoch, step = int(manifest.get("epoch", 0)), int(manifest["step"])
    if epoch == record.epoch:
        return step <= record.step + 1
    return epoch < record.epoch and step <= record.base


def take_over(
    source: Path,
    run_dir: Path,
    config: RunConfig,
    pipeline: ModelPipeline,
    say: Callable[[str], None] = lambda line: None,
) -> Origin:
    """Make `source` (a run directory or a checkpoint) the state that the run in `run_dir` goes on
    from; of a directory, its newest complete checkpoint. Blocking.

    A run that never wrote one begins with its first weights. One that went on from `source` before
    goes on with its own: the same command a second time does not mean to begin again. One with
    checkpoints that did not come of `source` takes none from there, so that those in a directory
    are all of one training. Raises ConfigError, DataError, StorageError.
    """
    mine = checkpoints.run_dir_of(source) == checkpoints.real(run_dir)
    own = checkpoints.has_any(run_dir)
    if own and not mine:
        if not _came_from(source, run_dir):
            raise DataError(
                f"{run_dir} has checkpoints of its own",
                f"go on with them by --resume {run_dir}, or begin elsewhere with --dir",
            )
        source, mine = run_dir, True
    try:
        reader, origin = read_newest(source, config, pipeline, say, mine=mine)
    except DataError:
        begun = (run_dir / "run.json").exists() and not (run_dir / PARENT).exists()
        if mine and begun and not own:
            return Origin(0)
        if mine and not own and (parent := parent_of(run_dir)) is not None:
            what = f"{run_dir} has not got the state it was to go on from"
            raise DataError(what, f"give --resume {parent.get('path')} again") from None
        raise
    if checkpoints.real(reader.directory.parent) != checkpoints.real(run_dir / "checkpoints"):
        return _adopt(reader, run_dir, config)
    origin = replace(origin, epoch=checkpoints.highest_epoch(run_dir))
    if reader.run_id != config.run_id:  # it was named
        raise DataError(f"{reader.directory} is of another run", "name one of this run")
    return origin


def read_newest(
    source: Path,
    config: RunConfig,
    pipeline: ModelPipeline,
    say: Callable[[str], None] = lambda line: None,
    *,
    mine: bool = False,
) -> tuple[CheckpointReader, Origin]:
    """A checkpoint; of a run directory, the newest that can be read, whole. Blocking.

    `say` gets a line for each that is passed over. `mine`: those of another run are. Raises
    ConfigError, DataError.
    """
    if checkpoints.is_checkpoint(source):
        reader = reader_of(source, config, pipeline)
        return reader, reader.origin()
    run_dir = checkpoints.run_dir_of(source)
    refused: DataError | None = None
    for path in checkpoints.newest_first(run_dir, say, config.run_id if mine else None):
        try:
            reader = reader_of(path, config, pipeline)
            return reader, reader.origin()
        except DataError as error:
            say(checkpoints.passed_over(path, error))
            refused = error
    if refused is not None:
        raise DataError(f"cannot go on from {source}: {refused.message}", refused.remedy)
    remedy = "set [checkpoint] every, or start from the file"
    if checkpoints.has_any(run_dir):
        remedy = "restore them, use the version that wrote them, or move them away"
    raise DataError(f"{source} holds no complete checkpoint", remedy)


def _came_from(source: Path, run_dir: Path) -> bool:
    """Whether `parent.json` says that the run in `run_dir` went on from just that."""
    parent, theirs = parent_of(run_dir), checkpoints.run_dir_of(source)
    if parent is None or parent.get("path") != str(theirs):
        return False
    if checkpoints.is_checkpoint(source):
        with contextlib.suppress(OSError):  # a torn one
            data = (source / checkpoints.MANIFEST).read_bytes()
            return hashlib.sha256(data).hexdigest() == parent.get("checkpoint")
        return False
    return _run_id_in(theirs) in (None, parent.get("run_id"))


def _run_id_in(run_dir: Path) -> str | None:
    try:
        return run_id_of((run_dir / "run.json").read_bytes())
    except OSError:
        return None


def parent_of(run_dir: Path) -> dict[str, Any] | None:
    """What `parent.json` says: `run_id`, `step`, `checkpoint`, `path`. None: there is no parent."""
    try:
        value = json.loads((run_dir / PARENT).read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _adopt(reader: CheckpointReader, run_dir: Path, config: RunConfig) -> Origin:
    """Copy a checkpoint into the run's own directory, cut as it is cut."""
    parent = {
        "run_id": reader.run_id,
        "step": reader.step,
        "checkpoint": reader.sha256,
        "path": str(checkpoints.run_dir_of(reader.directory)),
    }
    former = (run_dir / PARENT).read_bytes() if (run_dir / PARENT).exists() else None
    staging = checkpoints.begin(run_dir, reader.step)
    try:
        entries = [
            write_state(staging, reader.pipeline, stage, reader.snapshot(stage))
            for stage in range(reader.pipeline.num_stages)
        ]
        manifest: dict[str, Any] = {
            "step": reader.step,
            "run_id": config.run_id,
            "config": json.loads(canonical_bytes(config)),
            "stages": entries,
            "epoch": 0,
        }
        if parent["run_id"] != config.run_id:
            manifest["parent"] = parent
            write_durably(run_dir / PARENT, json.dumps(parent, indent=1).encode())
        path = checkpoints.complete(staging, manifest, _Tokenizer.of(reader))
    except BaseException:
        checkpoints.abandon(staging)
        if former is None:
            (run_dir / PARENT).unlink(missing_ok=True)
        else:
            write_durably(run_dir / PARENT, former)
        raise
    return reader_of(path, config, reader.pipeline).origin()


class _Tokenizer:
    """The tokenizer a checkpoint has beside its weights, for the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, reader: CheckpointReader) -> _Tokenizer | None:
        has_one = "tokenizer" in reader.manifest
        return cls(reader.directory / checkpoints.TOKENIZER) if has_one else None

    def save_tokenizer(self, directory: Path) -> None:
        shutil.copyfile(self._path, directory / checkpoints.TOKENIZER)
