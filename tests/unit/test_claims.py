"""When a run that has trained all its steps is over on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from peer import checkpoints
from peer.claims import is_over
from swarm.consensus import Vote
from swarm.events import write_status
from swarm.terms import Ballot, Record, Term

STEPS = 5


def known(epoch: int = 0) -> Vote:
    ballot = Ballot(Term(epoch, 1, "a"), STEPS - 1, 0)
    return Vote(committed=Record(ballot, "", {}, {}, 1.0, 1.0, 0.1, "applied", 2.0, 64))


def checkpoint(run_dir: Path, epoch: int = 0) -> Path:
    staging = checkpoints.begin(run_dir, STEPS)
    stage = checkpoints.write_stage(staging, 0, {"w": torch.zeros(2)}, {})
    manifest = {"step": STEPS, "epoch": epoch, "run_id": "r", "config": {}, "stages": [stage]}
    return checkpoints.complete(staging, manifest)


@pytest.mark.parametrize(
    ("state", "step", "over"),
    [
        ("finished", STEPS, True),
        ("finished", STEPS - 1, False),  # a status that could not be replaced since
        ("standing by", STEPS, False),  # it was not told of an end
        ("training", STEPS, False),
        ("failed", STEPS, False),
    ],
)
def test_what_the_status_says(tmp_path: Path, state: str, step: int, over: bool) -> None:
    write_status(tmp_path / "status.json", {"state": state, "step": step})
    assert is_over(tmp_path, known()) is over


def test_what_is_on_disk(tmp_path: Path) -> None:
    assert not is_over(tmp_path, known())
    path = checkpoint(tmp_path)
    assert is_over(tmp_path, known())
    assert not is_over(tmp_path, known(epoch=1)), "the run went back, and came here another way"
    manifest = json.loads((path / checkpoints.MANIFEST).read_text())
    (path / manifest["stages"][0]["file"]).write_bytes(b"")
    assert not is_over(tmp_path, known()), "it is damaged"
