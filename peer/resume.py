"""Checkpoints on disk as states to go on from: read, checked, and cut as the present run is cut.

A checkpoint stores parameters and optimizer state by the names of the whole model, so any cut can
be made of it (`peer.checkpointing`). What is read is hashed each time; a checkpoint that cannot be
read gives one line, and the one before it is taken.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peer import checkpoints, run_dirs
from peer.checkpointing import SEPARATOR, split_state
from peer.inquiries import snapshot_mark
from peer.restoring import AwayError, Origin
from peer.snapshots import Snapshot
from swarm.config import RunConfig
from swarm.delayed_state import PREVIOUS
from swarm.errors import ConfigError, DataError
from swarm.model import ModelPipeline
from swarm.optim import OptimizerSettings, make_optimizer
from swarm.terms import Record

PARENT = "parent.json"
BRING_BACK = "bring it back, go on from another with --resume, or begin elsewhere with --dir"
RESTORE = "restore them, use the version that wrote them, name another with --resume"
SAME_MODEL = (
    "resume with the [model], and with a subspace the run.seed, that it was trained with; its cut "
    "may differ"
)


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
        self.sha256 = checkpoints.manifest_sha256(directory)
        try:
            self.run_id = str(self.manifest["run_id"])
            updates = {int(entry["meta"]["updates"]) for entry in self.manifest["stages"]}
            why = pipeline.differs_from(self.manifest["config"])
        except ConfigError as error:
            what = f"checkpoint {directory} is damaged: {error.message}"
            raise DataError(what, "choose another") from None
        except (KeyError, TypeError, ValueError) as error:
            what = f"checkpoint {directory} is damaged: {error!r} in its manifest"
            raise DataError(what, "choose another") from None
        if why:
            raise DataError(f"{directory} is of another model: {why}", SAME_MODEL)
        if len(updates) != 1:
            what = f"the stages of {directory} do not belong together"
            raise DataError(what, "use another checkpoint")
        (self._updates,) = updates
        self._where: dict[str, int] = {}
        for entry in self.manifest["stages"]:
            for name in self._names_in(directory / entry["file"]):
                self._where[name] = entry["stage"]
        self._part: tuple[int, dict[str, Tensor], dict[str, Tensor]] | None = None
        self._reading = threading.Lock()

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
        layout = self.pipeline.layout(stage)
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
        for source in sorted({self._where[name] for name in layout.names}):
            parameters, states = self._read(source)
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
            same = parameters.keys() == set(layout.names)  # as of a stage of the same cut
            for kind in wanted:
                for name, view in split_state(layout, kind, tensors[f"optimizer.{kind}"]).items():
                    parameter = name.partition(SEPARATOR)[2]  # "" if of the whole stage
                    if name in states and (parameter or same):
                        self._copy(name, states[name], view)
                    elif not parameter or parameter in parameters:
                        raise DataError(
                            f"{self.directory}: the state of this optimizer cannot be cut anew",
                            "resume in a swarm with the cut it was trained with",
                        )
        snapshot = Snapshot(self.step, self._updates, "", None, tensors)
        snapshot.fingerprint = snapshot_mark(snapshot)
        return snapshot

    def _copy(self, name: str, source: Tensor, target: Tensor) -> None:
        if source.numel() == target.numel() == 1:  # of a parameter of one, or one of a parameter
            source = source.reshape(target.shape)
        if source.shape != target.shape or source.dtype != target.dtype:
            shapes = f"{tuple(source.shape)} instead of {tuple(target.shape)}"
            raise DataError(f"{self.directory} is of another model: {name} is {shapes}", SAME_MODEL)
        target.copy_(source)

    def _read(self, source: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A stage as it was written, hashed. The last one is kept: the next may need it too."""
        with self._reading:  # joiners of several stages ask at once, each in a thread of its own
            if self._part is None or self._part[0] != source:
                self._part = None
                parameters = checkpoints.read_stage_parameters(self.directory, source)
                states = checkpoints.read_stage_optimizer(self.directory, source)
                self._part = (source, parameters, states)
            return self._part[1], self._part[2]


def reader_of(path: Path, config: RunConfig, pipeline: ModelPipeline) -> CheckpointReader:
    """A checkpoint as a run of `config` reads it. Raises DataError."""
    return CheckpointReader(path, pipeline, config.optimizer, config.ahead.steps_in_flight)


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
        self._read: dict[str, Origin] = {}  # by the sha256 of a manifest: what was read, whole
        self._said: list[str] = []  # at the last look; while a run waits there is one a second

    async def newest(self, record: Record | None) -> Origin:
        return await asyncio.to_thread(self._newest, record)

    async def highest_epoch(self) -> int:
        return await asyncio.to_thread(run_dirs.highest_epoch, self.run_dir)

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

        saved, unreadable = record.saved if record else 0, set[str]()
        for path in run_dirs.passed_through(self.run_dir, self.config.run_id, record, note):
            try:
                reader = self._open(path)
                # After an election nobody hears of this trainer until it has looked, so what was
                # read before is not read again; what is handed out is checked.
                origin = self._read.get(reader.sha256) or reader.origin()
                self._read[reader.sha256] = origin
            except DataError as error:
                unreadable.add(path.name)
                note(run_dirs.passed_over(path, error))
                continue
            self._must_be_newest(origin.step, saved, unreadable)
            return replace(origin, notes=tuple(notes))
        self._must_be_newest(0, saved, unreadable)
        if notes or saved or (self.run_dir / PARENT).exists():  # not over what may yet be mended
            what = f"{self.run_dir} holds no complete checkpoint that the run can go back to"
            raise DataError(what, f"{RESTORE}, or begin elsewhere with --dir")
        return Origin(0)

    def _must_be_newest(self, step: int, saved: int, unreadable: set[str]) -> None:
        """The newest checkpoint, of step `saved`, may be with the trainer that led then. One that
        is here and damaged gives way to the one before."""
        path = self.run_dir / "checkpoints" / f"step-{saved}"
        damaged = path.name in unreadable or (path.exists() and not checkpoints.is_complete(path))
        if step < saved and not damaged and not (self._alone and step):
            where = "not here any more" if self._alone else "with another trainer"
            raise AwayError(f"the newest checkpoint, of step {saved}, is {where}", BRING_BACK)

    def _state(self, record: Record, stage: int) -> Snapshot:
        try:
            return self._reader_at(record).snapshot(stage)
        except DataError:  # went bad since it was read: the next look reads it again
            self._read.pop(record.checkpoint, None)
            raise

    def _reader_at(self, record: Record) -> CheckpointReader:
        last = self._reader  # `newest` may look meanwhile, in another thread
        if last is not None and last.sha256 == record.checkpoint:
            return last
        for path in run_dirs.newest_first(self.run_dir):
            try:
                reader = self._open(path)
            except DataError:  # a damaged one, named when it was passed over
                continue
            if reader.sha256 == record.checkpoint:
                return reader
        raise DataError(f"the checkpoint of step {record.step + 1} is not in {self.run_dir}")

    def _open(self, path: Path) -> CheckpointReader:
        reader = self._reader
        if reader is None or reader.directory != path:
            self._reader = reader = reader_of(path, self.config, self.pipeline)
        return reader
