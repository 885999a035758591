"""The state that a run ends with is written before anybody is told that it is over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer import run_leader
from peer.run_leader import LeaderProcess
from swarm.sim.virtual_time import run

HASHES = [{"w": "2:" + "0" * 64}]


class Checkpoints:
    """A checkpointer: how many tries fail, and whether it has the state already."""

    def __init__(self, failing: int = 0, has: bool = False) -> None:
        self.failing, self.has_it, self.tries = failing, has, 0

    def has(self, leader: Any) -> bool:
        return self.has_it

    async def take(self, leader: Any) -> Path | None:
        self.tries += 1
        return None if self.tries <= self.failing else Path("step-5")


def save_last(
    taking: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    *,
    wished: bool = False,
    deadline_s: float | None = None,
) -> list[str]:
    """The reasons that the status has had whenever the leader looked for the holders again."""

    async def hashes(leader: Any) -> list[dict[str, str]]:
        return HASHES

    async def until_held() -> None:
        seen.append(process.status.reason)

    async def main() -> None:
        assert await LeaderProcess._save_last(process, leader, taking) == HASHES

    monkeypatch.setattr(run_leader, "held_hashes", hashes)
    monkeypatch.setattr(run_leader, "take_wish", lambda run_dir: wished)
    seen: list[str] = []
    status = SimpleNamespace(state="training", reason="")
    process: Any = SimpleNamespace(status=status, run_dir=Path(), deadline_s=deadline_s)
    leader: Any = SimpleNamespace(restoring=SimpleNamespace(until_held=until_held))
    run(main(), limit_s=1000)
    return seen


def test_it_is_tried_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Checkpoints(failing=3)
    assert save_last(taking, monkeypatch) == [""] * 3  # a stage that is lost meanwhile is told of
    assert taking.tries == 4


def test_it_is_not_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Checkpoints(has=True)
    save_last(taking, monkeypatch)
    assert taking.tries == 0


def test_who_has_asked_for_one_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Checkpoints(has=True)
    save_last(taking, monkeypatch, wished=True)
    assert taking.tries == 1


def test_a_run_with_a_deadline_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Checkpoints(failing=3)
    save_last(taking, monkeypatch, deadline_s=60.0)
    assert taking.tries == 1
