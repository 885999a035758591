"""Taking a checkpoint of a running swarm: what cannot be had is told, and training goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer import checkpointing, checkpoints
from peer.checkpointing import Checkpointer
from peer.snapshots import Snapshot
from swarm.config import parse_config
from swarm.errors import RefusedError, StorageError
from swarm.model import build_pipeline
from swarm.terms import Ballot, Record, Term

Break = Callable[[pytest.MonkeyPatch], None]


class Taking:
    """A checkpointer that keeps two, and a leader at a step of which there are states."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = parse_config(
            {
                "run": {"name": "tiny"},
                "model": {"pipeline": "swarm_digits:pipeline", "stages": 2},
                "data": {"source": "pipeline"},
                "batch": {"microbatches": 2, "microbatch_size": 1},
                "optimizer": {"name": "sgd", "lr": 0.1},
                "schedule": {"steps": 9},
                "checkpoint": {"keep": 2},
            }
        )
        self.pipeline, self.root = build_pipeline(config), run_dir / "checkpoints"
        self.noted: list[dict[str, Any]] = []
        self.leader: Any = SimpleNamespace(
            term=Term(0, 1, "a"), next_step=0, record=None, saved_step=0
        )
        self.checkpointer = Checkpointer(
            config, self.pipeline, run_dir, note=lambda **facts: self.noted.append(facts)
        )
        monkeypatch.setattr(checkpointing, "fetch_states", self.states)

    async def states(self, leader: Any) -> list[Snapshot]:
        step = leader.next_step
        layouts = [self.pipeline.layout(k) for k in range(self.pipeline.num_stages)]
        return [
            Snapshot(step, step, "", None, {"parameters": torch.full((each.total,), float(step))})
            for each in layouts
        ]

    def take(self, step: int) -> Path | None:
        self.leader.next_step = step
        return asyncio.run(self.checkpointer.take(self.leader))


@pytest.fixture
def taking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Taking:
    return Taking(tmp_path, monkeypatch)


def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(leader: Any) -> list[Snapshot]:
        raise RefusedError("stage 1 has no replica")

    monkeypatch.setattr(checkpointing, "fetch_states", fetch)


def no_room(name: str) -> Break:
    def fail(monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*args: Any) -> Any:
            raise StorageError("cannot write: No space left on device", "free some space")

        monkeypatch.setattr(checkpoints, name, full)

    return fail


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(leader: Any) -> list[Snapshot]:
        raise RuntimeError("not enough memory")  # as torch says it on a CPU

    monkeypatch.setattr(checkpointing, "fetch_states", fetch)


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (no_memory, "not enough memory"),
        (refused, "stage 1 has no replica"),
        (no_room("begin"), "cannot write: No space left on device - free some space"),
        (no_room("write_stage"), "cannot write: No space left on device - free some space"),
    ],
    ids=["no memory", "a stage without a replica", "no room to begin", "no room for a stage"],
)
def test_what_cannot_be_had_is_told_and_the_next_one_is_taken(
    taking: Taking, fail: Break, reason: str
) -> None:
    assert taking.take(3) == taking.root / "step-3"
    with pytest.MonkeyPatch.context() as broken:
        fail(broken)
        assert taking.take(6) is None
    assert taking.noted[1:] == [{"step": 6, "reason": reason}]
    assert taking.leader.saved_step == 3  # what a run would go back to
    assert os.listdir(taking.root) == ["step-3"]  # nothing half written beside it
    assert taking.take(9) == taking.root / "step-9"
    assert taking.leader.saved_step == 9
    assert taking.noted[2:] == [{"step": 9, "path": str(taking.root / "step-9")}]
    assert checkpoints.load_manifest(taking.root / "step-9")["step"] == 9
    assert sorted(os.listdir(taking.root)) == ["step-3", "step-9"]


def test_a_commit_is_written_where_it_was_taken_in_this_term(taking: Taking) -> None:
    assert not taking.checkpointer.has(taking.leader)
    taking.take(3)
    assert taking.checkpointer.has(taking.leader)
    taking.leader.term = Term(0, 2, "a")  # the next leader's may have gone another way
    assert not taking.checkpointer.has(taking.leader)
    taking.take(3)
    taking.leader.next_step = 4
    assert not taking.checkpointer.has(taking.leader)


def test_as_many_are_kept_as_the_run_says(taking: Taking) -> None:
    for step in (3, 6, 9, 12):
        assert taking.take(step) is not None
    assert sorted(os.listdir(taking.root)) == ["step-12", "step-9"]


def test_what_the_run_went_back_to_stays_beside_what_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a damaged one would be the only one on its way."""
    taking = Taking(tmp_path, monkeypatch)
    for step in (8, 12):
        taking.take(step)
    term = Term(1, 1, "a")
    taking.leader.record = Record(
        Ballot(term, 9, 1), "", {}, {}, 0.0, 1.0, 0.0, "applied", 0.0, 0, base=8, saved=8
    )
    taking.take(10)
    assert sorted(os.listdir(taking.root)) == ["step-10", "step-12", "step-8"]
