"""Which state a run's directory goes on from: its own newest checkpoint, or another run's.

A run that goes on from a checkpoint of another one (a changed file, or only another cut) copies it
into its own directory first, cut anew, and keeps in `parent.json` where it comes from: from then on
it needs nothing of the other.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer import checkpoints, run_dirs
from peer.checkpointing import write_state
from peer.cli.command_line import command_line
from peer.disk import write_durably
from peer.restoring import Order, Origin, Saved
from peer.resume import PARENT, RESTORE, CheckpointReader, reader_of
from swarm.config import RunConfig, canonical_bytes
from swarm.data.tokenizer import Tokenizer, load_tokenizer_file
from swarm.errors import DataError
from swarm.model import ModelPipeline
from swarm.terms import Record

PUT_THERE = "copy it into checkpoints/ there, or begin elsewhere with --dir"


def source_of(
    resume: Path | None, record: Record | None, run_dir: Path, *, alone: bool
) -> Path | None:
    """What the run in `run_dir` goes on from when it is told `resume`, and its trainer's disk has
    `record`; None: from nothing on disk. `alone`: no other trainer has to be heard, for there is
    none or its losses are accepted.

    A disk that knows of no step where checkpoints are was killed before anybody was told of the
    first, or lost. Raises DataError.
    """
    if resume is not None:
        lacks = record is not None and record.saved and not run_dirs.has_any(run_dir)
        if record is not None and lacks and not run_dirs.is_checkpoint(resume):
            raise DataError(
                f"the run has a checkpoint of step {record.saved}, which is not in {run_dir}",
                PUT_THERE,
            )
        parent = parent_of(run_dir)
        if record is not None and parent is not None and not alone:
            begun = record.saved >= parent["step"]
            if begun and _came_from(resume, run_dir):
                return None  # the same command again, while the others may have gone on
        return resume
    if record is not None:
        return None
    adopted = (run_dir / PARENT).exists()
    if alone:
        return run_dir if adopted or run_dirs.has_any(run_dir) else None
    if adopted and not run_dirs.highest_epoch(run_dir):
        raise DataError(  # the others may have begun without this one, or wait for it
            f"{run_dir} was to go on from another run, and may not have begun to",
            f"give {command_line(resume=run_dir)}, or remove its parent.json and checkpoints/ to "
            "join",
        )
    return None


def parent_of(run_dir: Path) -> dict[str, Any] | None:
    """What `parent.json` says: `run_id`, `step`, `checkpoint`, `path`; None: nothing of sense."""
    try:
        value = json.loads((run_dir / PARENT).read_bytes())
    except (OSError, ValueError):
        return None
    sense = isinstance(value, dict) and type(value.get("step")) is int
    return value if sense else None


def take_over(
    source: Path,
    run_dir: Path,
    config: RunConfig,
    pipeline: ModelPipeline,
    saved: Saved,
    say: Callable[[str], None] = lambda line: None,
    record: Record | None = None,
    *,
    alone: bool = True,
    tokenizer: Tokenizer | None,
) -> Order:
    """What the run in `run_dir` is to go back to when told `source`, a run directory or a
    checkpoint, which is copied there, to the name of its step, if need be. Blocking. `saved` are
    the run's own, `record` is the newest that this trainer's disk has, `alone` as for `source_of`;
    `tokenizer` is the run's, if it trains on text.

    A run that never wrote a checkpoint begins with its first weights. One that went on from
    `source` before goes on with its own: the same command a second time does not mean to begin
    again. One with checkpoints that did not come of `source` takes none from there, so that those
    in a directory are all of one training. Raises ConfigError, DataError, StorageError.
    """
    mine = run_dirs.run_dir_of(source) == run_dirs.real(run_dir)
    own = run_dirs.has_any(run_dir)
    if own and not mine:
        if not _came_from(source, run_dir):
            raise DataError(
                f"{run_dir} has checkpoints of its own",
                f"go on with them by {command_line(resume=run_dir)}, or begin elsewhere with "
                f"--dir; what is of this same run may be copied into {run_dir / 'checkpoints'}",
            )
        return saved.newest
    named = run_dirs.is_checkpoint(source)
    if mine and not named:
        if not own:
            _must_begin(run_dir)
        return saved.newest
    reader, origin = read_newest(source, config, pipeline, tokenizer, say)
    wanted = named and reader.run_id == config.run_id  # whatever there is
    step = reader.step  # an order is kept, and the reader holds a stage's tensors

    def weigh(newest: Record | None) -> None:
        if wanted or newest is None or newest.saved <= step:
            return
        what = f"the run has a checkpoint of step {newest.saved}"
        if alone:
            raise DataError(f"{what}, which is not in {run_dir}", PUT_THERE)
        raise DataError(f"{what} by now", "start without --resume to go on with it")

    lies_in = run_dirs.real(reader.directory.absolute().parent)
    if lies_in == run_dirs.real(run_dir / "checkpoints") and not wanted:
        raise DataError(f"{reader.directory} is of another run", "name one of this run")
    weigh(record)
    place = run_dir / "checkpoints" / f"step-{step}"  # by another name it is not found again
    if run_dirs.real(reader.directory) != run_dirs.real(place):
        there = checkpoints.is_complete(place)
        if there and not _same_state(reader.directory, place):
            raise DataError(
                f"{place} is there already, with another state than {reader.directory}",
                f"move it out of {place.parent}, or name another",
            )
        found = _whole(place, config, pipeline) if there else None  # records may name just that one
        origin = found or _adopt(reader, run_dir, config)

    async def order(newest: Record | None) -> Origin:
        weigh(newest)
        return origin

    return order


def _whole(place: Path, config: RunConfig, pipeline: ModelPipeline) -> Origin | None:
    """What a checkpoint holds, if all of it can be read."""
    try:
        return reader_of(place, config, pipeline).origin()
    except DataError:
        return None


def _must_begin(run_dir: Path) -> None:
    """A directory without checkpoints is to begin with the first weights. Raises DataError."""
    if (parent := parent_of(run_dir)) is not None:
        state = f"{parent.get('path')}/checkpoints/step-{parent.get('step')}"
        raise DataError(
            f"{run_dir} has not got the state it was to go on from",
            f"give {command_line(resume=state)} again, or begin elsewhere with --dir",
        )
    if (run_dir / PARENT).exists() or not (run_dir / "run.json").exists():
        remedy = "set [checkpoint] every, or start from the file"
        raise DataError(f"{run_dir} holds no complete checkpoint", remedy)


def read_newest(
    source: Path,
    config: RunConfig,
    pipeline: ModelPipeline,
    tokenizer: Tokenizer | None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[CheckpointReader, Origin]:
    """A checkpoint; of a run directory, the newest that can be read, whole. Blocking.

    `say` gets a line for each that is passed over, as are those of another run than the
    directory's. Raises ConfigError, DataError; so where it was not trained with `tokenizer`, the
    run's.
    """
    if run_dirs.is_checkpoint(source):
        reader = reader_of(source, config, pipeline)
        _refuse_other_tokens(reader, config, tokenizer)
        return reader, reader.origin()
    run_dir = run_dirs.run_dir_of(source)
    refused: DataError | None = None
    for path in run_dirs.newest_first(run_dir, say, run_dirs.run_id_in(run_dir)):
        try:
            reader = reader_of(path, config, pipeline)
            origin = reader.origin()
        except DataError as error:
            say(run_dirs.passed_over(path, error))
            refused = error
        else:
            _refuse_other_tokens(reader, config, tokenizer)
            return reader, origin
    if refused is not None:
        raise DataError(f"cannot go on from {source}: {refused.message}", refused.remedy)
    remedy = "set [checkpoint] every, or start from the file"
    if run_dirs.has_any(run_dir):
        remedy = f"{RESTORE}, or move them away"
    raise DataError(f"{source} holds no complete checkpoint", remedy)


def _came_from(source: Path, run_dir: Path) -> bool:
    """Whether `parent.json` says that the run in `run_dir` went on from just that."""
    parent, theirs = parent_of(run_dir), run_dirs.run_dir_of(source)
    if parent is None or parent.get("path") != str(theirs):
        return False
    if run_dirs.is_checkpoint(source):
        with contextlib.suppress(OSError):  # a torn one
            return checkpoints.manifest_sha256(source) == parent.get("checkpoint")
        return False
    return run_dirs.run_id_in(theirs) in (None, parent.get("run_id"))


def _refuse_other_tokens(
    reader: CheckpointReader, config: RunConfig, tokenizer: Tokenizer | None
) -> None:
    """Raises DataError where a checkpoint of another run was trained on other ids of the same text:
    it has the shapes of this run, whose BPE has as many tokens, and means others by them."""
    if tokenizer is None or "tokenizer" not in reader.manifest or reader.run_id == config.run_id:
        return
    path = reader.directory / checkpoints.TOKENIZER
    try:
        theirs = load_tokenizer_file(path, tokenizer.vocab_size)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}", "use another checkpoint") from None
    if not tokenizer.encodes_as(theirs):
        raise DataError(
            f"{reader.directory} was trained with another tokenizer than this run's",
            "resume with the data and tokenizer it had, or begin a new model without --resume",
        )


def _same_state(one: Path, other: Path) -> bool:
    """Whether two complete checkpoints of a run hold the state of the same commit."""
    first, second = map(checkpoints.load_manifest, (one, other))
    same_commit = all(first.get(name, 0) == second.get(name, 0) for name in ("step", "epoch"))
    hashes = [[entry["sha256"] for entry in each["stages"]] for each in (first, second)]
    return same_commit and hashes[0] == hashes[1]


def _adopt(reader: CheckpointReader, run_dir: Path, config: RunConfig) -> Origin:
    """Copy a checkpoint into the run's own directory, cut as it is cut."""
    parent = {
        "run_id": reader.run_id,
        "step": reader.step,
        "checkpoint": reader.sha256,
        "path": str(run_dirs.run_dir_of(reader.directory)),
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
            "epoch": int(reader.manifest.get("epoch", 0)),
        }
        if "parent" in reader.manifest:
            manifest["parent"] = reader.manifest["parent"]
        if parent["run_id"] != config.run_id:
            manifest |= {"epoch": 0, "parent": parent}
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
