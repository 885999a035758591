"""A run as it was: from the lines of `events.jsonl` to pictures that the page can show. Pure.

The recorded events are folded into what a leader would have told at a moment, and a `Board` makes
its picture of that, as it does of a live run. What events do not hold (queues, service times,
traffic) is not in the pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import DataError
from web.board import Board, feed_line
from web.intake import Observation, Replica, read_event, text, whole
from web.store import Store

MAX_FRAMES = 240
MIN_FRAMES = 30
MAX_CELLS = 40_000  # replicas in all frames together
MAX_FEED = 2000
NEEDS = {"joined": {"replica", "stage"}, "step": {"step"}}  # what tells of a run, and must say so
_LIFE = "0"


@dataclass(slots=True)
class Recording:
    """What a report holds: `frames` of (time, picture), the `feed` they share, and the series."""

    frames: list[dict[str, Any]]
    feed: list[dict[str, Any]]
    series: dict[str, Any]

    @property
    def last(self) -> dict[str, Any]:
        """The picture at the end, complete."""
        picture: dict[str, Any] = {**self.frames[-1]["picture"], "feed": self.feed[-60:]}
        return picture


@dataclass(slots=True)
class _Fold:
    """The run's state after some events."""

    num_steps: int
    state: str = "waiting"
    step: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    replicas: dict[str, Replica] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        who = event.get("replica")
        match event["event"]:
            case "joined":
                self.replicas[event["replica"]] = Replica(
                    event["replica"], int(event["stage"]), "joining", 0, "", 0, "", None, 0, 0.0
                )
            case "admitted":
                self._stand(who, "serving")
                self.state = "training"
            case "expelled":
                self._stand(who, "expelled", event.get("reason", ""))
            case "diverged":
                self._stand(who, "joining")
            case "epoch":
                self.step = int(event.get("step", self.step))
            case "left":
                self.replicas.pop(str(who), None)
            case "step":
                self.step, self.state = int(event["step"]) + 1, "training"
                self.loss = event.get("loss", self.loss)
                self.validation_loss = event.get("validation_loss", self.validation_loss)
            case "validation":
                self.validation_loss = event.get("loss", self.validation_loss)
            case "finished":
                self.state = "finished"

    def _stand(self, who: object, standing: str, reason: str = "") -> None:
        old = self.replicas.get(str(who))
        if old is not None:
            self.replicas[old.incarnation] = Replica(
                old.incarnation, old.stage, standing, self.step, "", 0, reason, None, 0, 0.0
            )

    def observation(
        self, name: str, num_stages: int, now: float, events: Sequence[Mapping[str, Any]]
    ) -> Observation:
        return Observation(
            life=_LIFE, after=0, version="", name=name, state=self.state, reason="",
            step=self.step, num_steps=self.num_steps, loss=self.loss,
            validation_loss=self.validation_loss, tokens=0, tokens_per_s=_rate(events),
            in_flight=0, done=0, of=0, num_stages=num_stages,
            replicas=tuple(self.replicas.values()), boundaries=(), started_at=now, updated_at=now,
            epoch=0, term=0, events=tuple(events), samples=(),
        )  # fmt: skip


def record(
    lines: Sequence[Mapping[str, Any]], status: Mapping[str, Any] | None, now: float
) -> Recording:
    """A run's recorded lines, oldest first, as pictures; `status` is its last, if there is one.

    Raises DataError when the lines tell of no run.
    """
    found = [event for line in lines if (event := read_event(line, now)) is not None]
    events = [event for event in found if event.keys() >= NEEDS.get(event["event"], set())]
    events.sort(key=lambda event: event["t"])
    status = status or {}
    run = status.get("run") if isinstance(status.get("run"), Mapping) else {}
    first = next((line for line in lines if line.get("event") == "run"), {})
    name = text(run.get("name") or first.get("name"), 80)  # type: ignore[union-attr]
    run_id = text(run.get("id") or first.get("id"), 40)  # type: ignore[union-attr]
    stages = [int(event.get("stage", 0)) for event in events]
    num_stages = min(whole(status.get("num_stages"), 256) or max(stages, default=0) + 1, 256)
    events = [event for event in events if 0 <= event.get("stage", 0) < num_stages]
    if not any(event["event"] in NEEDS for event in events):
        raise DataError("these events tell of no run", "name a directory of a run that has begun")
    steps = [int(event["step"]) + 1 for event in events if event["event"] == "step"]
    fold = _Fold(whole(status.get("num_steps")) or max(steps, default=0))
    store = Store(":memory:")
    try:
        return _frames(Board(store, run_id), fold, events, name, num_stages)
    finally:
        store.close()


def _frames(
    board: Board,
    fold: _Fold,
    events: Sequence[Mapping[str, Any]],
    name: str,
    num_stages: int,
) -> Recording:
    begin, end = events[0]["t"], events[-1]["t"]
    present = len({event["replica"] for event in events if event["event"] == "joined"})
    count = max(MIN_FRAMES, min(MAX_FRAMES, MAX_CELLS // max(present, 1)))
    pace = max((end - begin) / count, 0.5)
    frames, taken, t = [], 0, begin
    while taken < len(events):
        t = min(t + pace, end)
        new = []
        while taken < len(events) and events[taken]["t"] <= t:
            fold.take(events[taken])
            new.append(events[taken])
            taken += 1
        board.leader(fold.observation(name, num_stages, t, new), t)
        frames.append({"t": round(t, 1), "picture": _slim(board.snapshot(t))})
    series = board.store.series("all", end)
    lines = [feed_line(event) for event in reversed(board.store.events(limit=MAX_FEED))]
    return Recording(
        frames,
        [line for line in lines if line is not None],
        {**series, "marks": board.marks(begin)},
    )


def _slim(picture: dict[str, Any]) -> dict[str, Any]:
    """Without what all frames share."""
    lines = picture.pop("feed")
    picture["upto"] = lines[-1]["n"] if lines else 0
    return picture


def _rate(events: Sequence[Mapping[str, Any]]) -> float:
    steps = [event for event in events if event["event"] == "step" and event.get("wall_s")]
    seconds = sum(event["wall_s"] for event in steps)
    return sum(event.get("tokens", 0) for event in steps) / seconds if seconds > 0 else 0.0
