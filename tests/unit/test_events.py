"""Events and status: what is written is read back, and no disk or reader trouble reaches a run."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from swarm.events import KINDS, EventLog, EventTail, read_status, tail_events, write_status
from swarm.names import ADJECTIVES, ANIMALS, friendly_name


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_log(path: Path, **more: Any) -> tuple[EventLog, Clock]:
    clock = Clock()
    return EventLog(path, clock=clock, **more), clock


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events]


def test_events_come_back_in_order_with_their_facts(tmp_path: Path) -> None:
    log, clock = a_log(tmp_path / "run" / "events.jsonl")
    with log:
        log.emit("joined", replica="a#1", stage=0)
        clock.now += 1
        log.emit("step", step=0, loss=float("nan"), wall_s=0.5)
    events = tail_events(log.path)
    assert events == [
        {"t": 1000.0, "event": "joined", "replica": "a#1", "stage": 0},
        {"t": 1001.0, "event": "step", "step": 0, "loss": None, "wall_s": 0.5},
    ]
    assert tail_events(log.path, since=1000.0) == events[1:]


def test_the_first_event_is_there_at_once_and_a_burst_is_buffered(tmp_path: Path) -> None:
    log, clock = a_log(tmp_path / "events.jsonl")
    log.emit("joined")
    assert kinds(tail_events(log.path)) == ["joined"]
    log.emit("step", step=1)
    assert kinds(tail_events(log.path)) == ["joined"]
    clock.now += 0.6
    log.emit("step", step=2)
    assert kinds(tail_events(log.path)) == ["joined", "step", "step"]
    log.emit("left")
    log.flush()
    assert kinds(tail_events(log.path))[-1] == "left"
    log.emit("step", step=3)
    log.emit("checkpoint", step=4, path="step-4")  # or it would answer who asks for the next
    assert kinds(tail_events(log.path))[-2:] == ["step", "checkpoint"]
    log.close()


def test_two_files_of_bounded_size_hold_the_newest(tmp_path: Path) -> None:
    log, _ = a_log(tmp_path / "events.jsonl", max_bytes=2000)
    tail = EventTail(log.path)
    followed = []
    for step in range(200):
        log.emit("step", step=step)
        log.flush()
        followed += tail.read()
    log.close()
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    steps = [event["step"] for event in tail_events(log.path)]
    assert steps == list(range(steps[0], 200))
    assert len(steps) > 40
    assert [event["step"] for event in followed] == list(range(200))


def test_readers_skip_what_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = b'{"t": 1, "event": "joined"}\n'
    path.write_bytes(whole + b"\xff\n[1]\n{}\n" + b"[" * 100_000 + b"\n" + whole + b'{"t": 2, "ev')
    assert kinds(tail_events(path)) == ["joined", "joined"]
    tail = EventTail(path)
    assert len(tail.read()) == 2
    with path.open("ab") as file:
        file.write(b'ent": "left"}\n')
    assert kinds(tail.read()) == ["left"]
    assert tail.read() == []
    later = EventTail(path, from_end=True)
    with path.open("ab") as file:
        file.write(b'{"t": 3, "event": "finished"}\n')
    assert kinds(later.read()) == ["finished"]
    assert EventTail(tmp_path / "none").read() == tail_events(tmp_path / "none") == []


def test_a_log_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t": 1, "event": "joined"}\n{"t": 2, "event": "st')
    with EventLog(path) as log:
        log.emit("left")
    assert kinds(tail_events(path)) == ["joined", "left"]


def test_a_full_disk_costs_one_warning_and_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, _ = a_log(tmp_path / "events.jsonl")
    real, free = os.write, 60  # bytes left on the disk

    def write(descriptor: int, data: Any) -> int:
        nonlocal free
        if descriptor != log._fd:
            return real(descriptor, data)
        if not free:
            raise OSError(28, "No space left on device")
        written = real(descriptor, bytes(data[:free]))
        free -= written
        return written

    monkeypatch.setattr(os, "write", write)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            log.emit("step", step=step)
            log.flush()
    assert [record.getMessage() for record in caplog.records] == [
        f"events are not being written to {log.path}: No space left on device"
    ]
    free = 10**6
    log.emit("left")
    log.close()
    events = tail_events(log.path)
    assert kinds(events) == ["step", "dropped", "left"]
    assert events[1]["count"] == log.dropped == 4


def test_an_unwritable_place_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with EventLog(tmp_path / "file" / "events.jsonl") as log:
        log.emit("joined")
    assert log.dropped == 1
    assert write_status(tmp_path / "file" / "status.json", {}) is False


def test_facts_are_bounded_and_made_plain(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("left", reason="x" * 10_000, where=tmp_path, hashes=(1, 2))
        log.emit("left", many=["y" * 400] * 100)
    first, second = tail_events(log.path)
    assert len(first["reason"]) == 500
    assert first["where"] == str(tmp_path)
    assert first["hashes"] == [1, 2]
    assert second["truncated"] is True


def test_probe_takes_a_leaders_points_under_the_schemas_names(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.probe("issue", step=1, index=2)
        log.probe("failed", step=1, index=2, suspect="a#1", why="gone")
    (event,) = tail_events(log.path)
    assert (event["replica"], event["reason"]) == ("a#1", "gone")


def test_status_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_status(path) is None
    assert write_status(path, {"step": 1, "loss": float("inf"), "text": "é" * 1000})
    assert write_status(path, {"step": 2, "replicas": [{"replica": "a"}]})
    assert read_status(path) == {"step": 2, "replicas": [{"replica": "a"}]}
    assert os.listdir(tmp_path) == ["status.json"]
    path.write_text("[1]")
    assert read_status(path) is None
    path.write_text(json.dumps({"step": 2})[:-3])
    assert read_status(path) is None


def test_the_schema_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    assert {kind for kind in KINDS if f"| `{kind}` |" not in text} == set()


def test_a_name_belongs_to_the_peer_whatever_its_life() -> None:
    assert len(set(ADJECTIVES)) == len(set(ANIMALS)) == 128
    assert friendly_name("12D3KooWabc#1234") == friendly_name("12D3KooWabc") == "jovial-okapi"
    names = {friendly_name(str(number)) for number in range(200)}
    assert len(names) > 190
    assert max(map(len, names)) <= 15
