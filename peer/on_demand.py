"""`swarm checkpoint`: have the leader save the run when a person asks, not only every k steps.

Leader and asker are two processes of one machine that share the run's directory, so the wish is a
file in it and the answer is the event that tells of every checkpoint. A wish that nobody takes back
(its asker was killed) costs one checkpoint too many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from peer.status import STALE_S
from swarm.errors import DataError, StorageError
from swarm.events import EventTail, read_status
from swarm.words import number

WISH = "checkpoint.wanted"
POLL_S = 0.1


def take_wish(run_dir: Path) -> bool:
    """Whether somebody wants a checkpoint; whoever asks has to write it."""
    try:
        (run_dir / WISH).unlink()
    except OSError:
        return False
    return True


def save_now(run_dir: Path, say: Callable[[str], None] = print) -> Path:
    """Have the leader of `run_dir` write a checkpoint after the step it is in, and wait for it.

    Raises DataError when no leader trains there (any more), StorageError when the wish or the
    checkpoint cannot be written. Interrupted, it takes the wish back.
    """
    if (refusal := _nobody_leads(run_dir)) is not None:
        raise refusal
    told = EventTail(run_dir / "events.jsonl", from_end=True)
    try:
        (run_dir / WISH).touch()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StorageError(
            f"cannot write into {run_dir}: {reason}", "ask as the user who leads the run"
        ) from None
    say("asked for a checkpoint; it is written after the present step")
    try:
        return _answer(run_dir, told)
    except BaseException:
        take_wish(run_dir)
        raise


def _answer(run_dir: Path, told: EventTail) -> Path:
    """Where in `run_dir` the checkpoint lies that was begun after the leader took the wish.

    What is told while a wish stands was begun before it: by then somebody else may have asked, too.
    Raises as `save_now`.
    """
    while True:
        refusal = _nobody_leads(run_dir)  # looked at first: its last words come before its end
        events = told.read()
        if not (run_dir / WISH).exists():
            for event in events:
                if event["event"] == "checkpoint" and "path" in event:
                    # Not that path: it may be cut, and it is from where the leader was started.
                    return run_dir / "checkpoints" / f"step-{event.get('step')}"
                if event["event"] == "checkpoint":
                    reason = str(event.get("reason"))
                    raise StorageError(f"no checkpoint of step {event.get('step')}: {reason}")
        if refusal is not None:
            raise refusal
        time.sleep(POLL_S)


def _nobody_leads(run_dir: Path) -> DataError | None:
    """Why nobody would answer; None if somebody will."""
    status = read_status(run_dir / "status.json")
    leads = "name the run directory of a leader that trains"
    if status is None:
        return DataError(f"{run_dir} is no run directory with a status", leads)
    state = str(status.get("state"))
    if state in ("finished", "failed"):
        return DataError(f"the run in {run_dir} has {state}", leads)
    if state == "standing by":
        return DataError("another trainer leads this run", "ask on that trainer's machine")
    if time.time() - number(status.get("updated_at")) > STALE_S:
        return DataError(f"the leader of {run_dir} does not run now", "start it, then ask again")
    return None
