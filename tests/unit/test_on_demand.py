"""`swarm checkpoint`: what is said, and that no wish is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from peer import on_demand
from peer.on_demand import WISH, save_now, take_wish
from swarm.errors import DataError, StorageError
from swarm.events import EventLog, write_status


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tell(tmp_path, "training")
    return tmp_path


def tell(run_dir: Path, state: str, at: float | None = None) -> None:
    write_status(run_dir / "status.json", {"state": state, "updated_at": at or time.time()})


def leader(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], object]) -> list[bool]:
    """While the asker sleeps the leader finds the wish, and answers once. What it found."""
    found: list[bool] = []

    def sleep(seconds: float) -> None:
        found.append((where[0] / WISH).exists())
        if len(found) == 2:
            answer()

    where: list[Path] = []
    touch = Path.touch
    monkeypatch.setattr(Path, "touch", lambda path: (where.append(path.parent), touch(path))[1])
    monkeypatch.setattr(on_demand.time, "sleep", sleep)
    return found


def test_it_waits_for_the_leader_to_say_that_it_is_written(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(run_dir / "events.jsonl")
    log.emit("checkpoint", step=3, path="an old one")
    log.flush()

    def answer() -> None:
        assert take_wish(run_dir)
        log.emit("checkpoint", step=5, path="from/where/the/leader/is/checkpoints/step-5")
        log.flush()
        tell(run_dir, "finished")  # with its last step, and gone before the asker looks

    found = leader(monkeypatch, answer)
    said: list[str] = []
    assert save_now(run_dir, said.append) == run_dir / "checkpoints/step-5"
    assert found == [True, True]
    assert len(said) == 1
    assert not take_wish(run_dir)


def test_the_wish_of_who_asks_a_moment_later_stands(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written then answers neither of them: it was begun before the later one asked."""
    log = EventLog(run_dir / "events.jsonl")

    def write(step: int) -> None:
        log.emit("checkpoint", step=step, path=f"step-{step}")
        log.flush()

    def sleep(seconds: float) -> None:
        slept.append(take_wish(run_dir))
        write(len(slept))
        if len(slept) == 1:
            (run_dir / WISH).touch()  # somebody else asks

    slept: list[bool] = []
    monkeypatch.setattr(on_demand.time, "sleep", sleep)
    assert save_now(run_dir, lambda line: None) == run_dir / "checkpoints/step-2"
    assert slept == [True, True]


def test_what_could_not_be_written_is_said(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(run_dir / "events.jsonl")

    def answer() -> None:
        assert take_wish(run_dir)
        log.emit("checkpoint", step=5, reason="the disk is full")
        log.flush()

    leader(monkeypatch, answer)
    with pytest.raises(StorageError, match="no checkpoint of step 5: the disk is full"):
        save_now(run_dir, lambda line: None)
    assert not take_wish(run_dir)


def test_a_leader_that_goes_away_is_not_waited_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader(monkeypatch, lambda: tell(run_dir, "training", time.time() - 60.0))
    with pytest.raises(DataError, match="does not run now"):
        save_now(run_dir, lambda line: None)
    assert not take_wish(run_dir)


@pytest.mark.parametrize(
    ("state", "why"), [("finished", "has finished"), ("standing by", "another trainer leads")]
)
def test_nobody_is_asked_who_cannot_answer(run_dir: Path, state: str, why: str) -> None:
    tell(run_dir, state)
    with pytest.raises(DataError, match=why):
        save_now(run_dir)
    with pytest.raises(DataError, match="no run directory"):
        save_now(run_dir / "elsewhere")
    assert not take_wish(run_dir)
