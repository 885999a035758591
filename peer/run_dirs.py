"""What a run's directory has: its checkpoints, which of them count, which may go.

`RUN_DIR/run.json` says whose it is, `RUN_DIR/checkpoints/step-N/` are its checkpoints (what one
holds is `peer.checkpoints`). A checkpoint that is torn, or of another run, is passed over. All of
it blocks: call it from a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peer.checkpoints import MANIFEST, load_manifest, remove
from swarm.config import run_id_of
from swarm.errors import ConfigError, DataError
from swarm.terms import Record

_STEP = re.compile(r"step-(\d{1,15})")


def run_dir_of(source: str | Path) -> Path:
    """The run directory a person means: itself, its `checkpoints`, or a checkpoint in it; resolved.

    Its `checkpoints` may be a link to another disk. A checkpoint that was copied elsewhere stands
    for itself. Raises ConfigError when there is no such directory.
    """
    if not Path(source).is_dir():
        there = os.path.lexists(source)
        what = f"{source} is no directory" if there else f"no directory {source}"
        raise ConfigError(what, "give a run directory, as runs/NAME-ID")
    resolved = real(source)
    # As it was named first: what a link leads to need not lie in the run.
    for found in (resolved if ".." in Path(source).parts else Path(source).absolute(), resolved):
        if _is_run(found):
            return real(found)  # also where it is called "checkpoints" itself
        if found.name == "checkpoints":
            return real(found.parent)
        if found.parent.name == "checkpoints":
            return real(found.parent.parent)
    return resolved


def real(path: str | Path) -> Path:
    """Without links. `Path.resolve` raises RuntimeError at links that lead to each other."""
    return Path(os.path.realpath(path))


def _is_run(directory: Path) -> bool:
    return (directory / "run.json").exists() or os.path.lexists(directory / "checkpoints")


def run_id_in(run_dir: Path) -> str | None:
    """Whose directory it is; None: it does not say, or no longer."""
    try:
        config = (run_dir / "run.json").read_bytes()
        json.loads(config)  # what is torn has a hash too, of no run
    except (OSError, ValueError, RecursionError):
        return None
    return run_id_of(config)


def is_checkpoint(source: str | Path) -> bool:
    """Whether a person names one checkpoint, complete or not, rather than a run. Raises ConfigError
    when there is no such directory."""
    root = real(run_dir_of(source) / "checkpoints")
    lies_in = [real(source).parent]
    if ".." not in Path(source).parts:
        lies_in.append(real(Path(source).absolute().parent))  # it may be a link itself
    return root in lies_in or (Path(source) / MANIFEST).is_file()


def has_any(run_dir: str | Path) -> bool:
    """Whether there are checkpoints, be they complete or not. Raises DataError when they cannot be
    looked for."""
    return bool(_directories(Path(run_dir) / "checkpoints"))


def newest_first(
    run_dir: str | Path, say: Callable[[str], None] = lambda line: None, run_id: str | None = None
) -> list[Path]:
    """The complete checkpoints of a run: those of later epochs first, then of later steps. `say`
    gets a line for each that is not complete, or not of `run_id`. Raises DataError when there is no
    looking."""
    complete = []
    for path in _directories(Path(run_dir) / "checkpoints"):
        try:
            manifest = load_manifest(path)
            if manifest["step"] != _step_of(path):
                raise DataError(f"{path} holds step {manifest['step']}")
            if run_id not in (None, manifest.get("run_id")):
                raise DataError(f"{path} is of another run")
        except DataError as error:
            say(passed_over(path, error))
        else:
            complete.append(((int(manifest.get("epoch", 0)), _step_of(path)), path))
    return [path for _, path in sorted(complete, reverse=True)]


def passed_through(
    run_dir: str | Path,
    run_id: str,
    record: Record | None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """The complete checkpoints in a run's directory, newest first. With the run's newest `record`
    those that it has passed through, by step: it may have gone back, and forth again."""
    found = newest_first(run_dir, say, run_id)
    if record is None:
        return found
    manifests = {path: load_manifest(path) for path in found}
    passed = [path for path in found if _on_the_way(manifests[path], record)]
    return sorted(passed, key=lambda path: int(manifests[path]["step"]), reverse=True)


def _on_the_way(manifest: Mapping[str, Any], record: Record) -> bool:
    """Whether the run whose newest record is `record` has passed through this checkpoint; one of
    a later step was brought here, and the record is from before it."""
    epoch, step = int(manifest.get("epoch", 0)), int(manifest["step"])
    return epoch >= record.epoch or step <= record.base


def highest_epoch(run_dir: str | Path) -> int:
    """Of the complete checkpoints; 0 without any. Raises DataError when there is no looking."""
    newest = next(iter(newest_first(run_dir)), None)
    return 0 if newest is None else int(load_manifest(newest).get("epoch", 0))


def passed_over(path: Path, error: DataError) -> str:
    """A line for people about a checkpoint that cannot be used."""
    return f"passed over checkpoint {path.name}: {error.message}"


def prune(run_dir: str | Path, keep: int, run_id: str, record: Record | None = None) -> list[Path]:
    """Delete a run's complete checkpoints but the `keep` (at least 1) newest, and as many of those
    that it has passed through with its newest `record`; returns what went. Those it has left
    behind, going back, are newer than what it went back to, and no state of it any more.

    A directory that cannot be deleted stays, without an error. Torn ones older than those kept go
    as well; what is of another run stays.
    """
    whole, readable = newest_first(run_dir, run_id=run_id), newest_first(run_dir)
    passed, keep = passed_through(run_dir, run_id, record), max(keep, 1)
    kept, gone = {*whole[:keep], *passed[:keep]}, []
    if kept:
        oldest = min(_step_of(path) for path in kept)
        for path in _directories(Path(run_dir) / "checkpoints"):
            torn_and_old = path not in readable and _step_of(path) < oldest
            if path not in kept and (path in whole or torn_and_old):
                with contextlib.suppress(OSError):
                    remove(path)
                    gone.append(path)
    return gone


def _directories(root: Path) -> list[Path]:
    if not os.path.lexists(root):
        return []
    try:
        found = [path for path in root.iterdir() if _STEP.fullmatch(path.name)]
    except OSError as error:  # a link to a disk that is away: none to be seen, yet not none
        what = f"cannot read {root}: {error.strerror or error}"
        raise DataError(what, "mount the disk it is on, or make it readable") from None
    return sorted(found, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1
