"""What is known of a run, and the one picture of it that every viewer gets.

Fed with what `web.intake` has cleaned; no network, no clock of its own. The picture (`snapshot`) is
plain JSON in display units: words, order and judgement are made here once, not in every browser.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarm.errors import StorageError
from swarm.names import friendly_name
from swarm.words import count_text, duration_text, event_text
from web.health import Health, Stage, bottleneck, counts_text, judge, neediest
from web.intake import Notes, Observation, PeerReport, Replica, Wanted, whole
from web.store import Store

RECENT_S = 60.0
NUM_FEED = 60
NUM_CONTRIBUTORS = 20
NUM_SAMPLES = 24
NUM_LIVES = 64  # of leaders, whose last event is remembered
MARKS = ("joined", "left", "expelled", "moved", "paused", "epoch")
NEWS = frozenset({"step", "failed", "validation", "hold"})  # too many to keep one by one
SIGNS = {
    "joined": "+", "admitted": "●", "leaving": "↗", "left": "−", "expelled": "✕", "moved": "→",
    "move": "→", "second": "⇉", "move_refused": "↛", "suspected": "?", "paused": "‖", "epoch": "↶",
    "damaged": "!", "checkpoint": "◆", "finished": "✓", "diverged": "≠", "round_failed": "↻",
    "bad_chunk": "!",
}  # fmt: skip


Event = Mapping[str, Any]
log = logging.getLogger(__name__)


class Board:
    """The state of one run. `join_line` is what a volunteer types; empty keeps it private."""

    def __init__(self, store: Store, run_id: str, *, join_line: str = "") -> None:
        self.store, self.run_id, self.join_line = store, run_id, join_line
        self.notes = Notes()
        self.observation: Observation | None = None
        self.heard_at = 0.0
        self._reports: dict[str, PeerReport] = {}  # by incarnation
        self._shares: dict[str, tuple[float, ...]] = {}  # of the last interval, by activity
        self._announced: dict[str, tuple[str, str]] = {}  # peer -> version, name
        self._stages: dict[str, int] = {}  # incarnation -> stage, as last known
        self._lost: deque[tuple[float, int | None, str]] = deque(maxlen=50)
        self._steps: deque[tuple[float, float]] = deque(maxlen=32)  # committed at, seconds
        self._traffic: list[tuple[float, float]] = []  # raw, wire bytes a second, per boundary
        self._totals: tuple[str, float, tuple[tuple[int, int], ...]] | None = None
        self._feed: deque[dict[str, Any]] = deque(maxlen=NUM_FEED)
        self._newest = 0  # number of the last event
        self._refused = ""  # what the disk last said
        self._contributors = self._top()
        self._cursors = _cursors(store.get("cursors"))  # life -> after, the last heard at the end
        self._counted_at = 0.0
        self._pruned_at = 0.0
        for event in reversed(store.events(limit=NUM_FEED * 4)):
            self._remember(event)

    # ---- what comes in --------------------------------------------------------------------------

    @property
    def cursor(self) -> dict[str, Any]:
        """What to ask the leader for: the `after` and `life` of its last answer."""
        life = next(reversed(self._cursors), "")
        return {"after": self._cursors.get(life, 0), "life": life}

    def leader(self, seen: Observation, now: float) -> None:
        """A leader has answered at `now`. What the disk refuses is shown, and not kept."""
        after = self._cursors.get(seen.life)
        if after is not None and seen.life != self.cursor["life"]:
            # A trainer that leads again was asked of another's life, so it tells its events from
            # the first on; from the next answer on it is asked for those that are new.
            seen = replace(seen, events=(), after=after)
        self._cursors.pop(seen.life, None)
        self._cursors[seen.life] = seen.after
        if len(self._cursors) > NUM_LIVES:
            del self._cursors[next(iter(self._cursors))]
        self.observation, self.heard_at = seen, now
        self._traffic_of(seen, now)
        for row in seen.replicas:
            self._stages[row.incarnation] = row.stage
        events = [self._placed(event) for event in seen.events if event["event"] != "run"]
        news = [event for event in events if event["event"] not in NEWS]
        try:
            news = self._keep(seen, events, news, now)
            self._refused = ""
        except StorageError as error:
            self._gap(error)
        for event in news:
            self._remember(event)
        for event in events:
            if event["event"] == "step" and event.get("wall_s"):
                self._steps.append((event["t"], float(event["wall_s"])))
        present = {row.incarnation for row in seen.replicas}
        for known in (self._reports, self._shares, self._stages):
            for name in [name for name in known if name not in present]:
                del known[name]

    def _keep(
        self, seen: Observation, events: Sequence[Event], news: Sequence[Event], now: float
    ) -> list[Event]:
        """Add an answer to the history, as a whole or not at all; returns the news with their
        numbers. Raises StorageError."""
        store = self.store
        for event in events:
            if event["event"] == "step":
                store.add(event["t"], {"loss": event.get("loss"), "tokens_per_s": _rate(event)})
            elif event["event"] == "validation" and "loss" in event:
                store.add(event["t"], {"validation_loss": event["loss"]})
        kept = store.add_events(news)
        traffic = [sum(each) for each in zip(*self._traffic, strict=True)] or [None, None]
        serving = sum(row.standing == "serving" for row in seen.replicas)
        store.add(
            now,
            {
                "raw_bps": traffic[0],
                "wire_bps": traffic[1],
                "peers": serving,
                "utilisation": self._utilisation(),
            },
        )
        for row in seen.replicas:
            store.count(seen.life, row.incarnation, row.counted, now)
        store.put("cursors", self._cursors)
        self._commit(now)
        if now - self._counted_at > 5.0:
            self._counted_at = now
            self._contributors = self._top()
        return [*kept]

    def _commit(self, now: float) -> None:
        """Keep what was added, and forget what is old. Raises StorageError."""
        if now - self._pruned_at > 60.0:
            self._pruned_at = now
            self.store.prune(now)
        self.store.commit()

    def _gap(self, error: StorageError) -> None:
        self.store.forget()
        if error.message != self._refused:
            self._refused = error.message
            log.error("the history has a gap from now on: %s", error)

    def tick(self, now: float) -> None:
        """Replicas tell of themselves while the leader is silent: keep that too. Call it every
        second or so."""
        try:
            self._commit(now)
        except StorageError as error:
            self._gap(error)

    def peer(self, incarnation: str, report: PeerReport, now: float) -> None:
        """A replica has told of itself. One that the leader does not list is not believed."""
        if incarnation not in self._stages:
            self.notes.add("a report of somebody who is not in the run")
            return
        before = self._reports.get(incarnation)
        self._reports[incarnation] = report
        peer = incarnation.partition("#")[0]
        self._name(peer, report.version, report.name)
        if before is None:
            return
        spent = [b - a for a, b in zip(before.seconds, report.seconds, strict=True)]
        total = sum(spent)
        if min(spent) < 0 or not 0 < total < 600:
            return
        self._shares[incarnation] = tuple(round(each / total, 2) for each in spent)
        with contextlib.suppress(StorageError):  # the next look at the file says so
            self.store.add_activity(now, peer, spent)

    def announced(self, peer: str, version: str, name: str) -> None:
        """The directory's record of a peer, cleaned: what it runs, how it wants to be named."""
        if any(who.partition("#")[0] == peer for who in self._stages):
            self._name(peer, version, name)

    def _name(self, peer: str, version: str, name: str) -> None:
        if self._announced.get(peer) != (version, name):
            if len(self._announced) > 4096:
                self._announced.clear()
            self._announced[peer] = (version, name)
        # Each time: it may come before the peer's first count, or the disk may have refused it.
        with contextlib.suppress(StorageError):
            self.store.name(peer, name)

    def _placed(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the stage of its replica, as far as that is known."""
        who = event.get("replica")
        if "stage" in event:
            if who is not None:
                self._stages.setdefault(who, int(event["stage"]))
        elif who in self._stages:
            return {**event, "stage": self._stages[who]}
        return event

    def _remember(self, event: Mapping[str, Any]) -> None:
        """An event for the feed, and for the judgement of the next minute."""
        if event["event"] in ("expelled", "left"):
            self._lost.append((event["t"], event.get("stage"), str(event.get("reason", ""))))
        self._newest = max(event.get("n", 0), self._newest + 1)  # some may have none: not kept
        line = feed_line({**event, "n": self._newest})
        if line is not None:
            self._feed.append(line)

    def _traffic_of(self, seen: Observation, now: float) -> None:
        before, self._totals = self._totals, (seen.life, now, seen.boundaries)
        if before is None or before[0] != seen.life or len(before[2]) != len(seen.boundaries):
            self._traffic = []  # not known before the second look
            return
        # Totals arrive with commits, so a rate is over the last seconds, not since the last look.
        seconds = max(now - before[1], 1e-3)
        new = [
            (max(raw - raw_0, 0) / seconds, max(wire - wire_0, 0) / seconds)
            for (raw, wire), (raw_0, wire_0) in zip(seen.boundaries, before[2], strict=True)
        ]
        keep = math.exp(-seconds / 10.0)
        self._traffic = [
            (keep * old[0] + (1 - keep) * now_[0], keep * old[1] + (1 - keep) * now_[1])
            for old, now_ in zip(self._traffic or new, new, strict=True)
        ]

    def _utilisation(self) -> float | None:
        shares = [share[0] for share in self._shares.values()]
        return sum(shares) / len(shares) if shares else None

    def _top(self) -> list[dict[str, Any]]:
        return [contributor_row(row) for row in self.store.contributors(NUM_CONTRIBUTORS)]

    # ---- what goes out --------------------------------------------------------------------------

    def health(self, now: float) -> Health:
        """See `web.health`."""
        seen = self.observation
        if seen is None:
            return judge(
                state="", reason="", silent_s=0.0, since_step_s=None, step_times=(), stages=(),
                asked=False,
            )  # fmt: skip
        return judge(
            state=seen.state,
            reason=seen.reason,
            silent_s=now - self.heard_at,
            since_step_s=now - self._steps[-1][0] if self._steps else None,
            step_times=[seconds for _, seconds in self._steps],
            stages=self._stage_facts(seen),
            lost=[(stage, why) for t, stage, why in reversed(self._lost) if now - t < RECENT_S],
        )

    @staticmethod
    def _stage_facts(seen: Observation) -> list[Stage]:
        facts = []
        for number in range(seen.num_stages):
            rows = [row for row in seen.replicas if row.stage == number]
            serving = [row for row in rows if row.standing == "serving"]
            rates = [1.0 / row.service_s for row in serving if row.service_s]
            rate = sum(rates) if rates and len(rates) == len(serving) else None
            facts.append(Stage(len(serving), len(rows) - len(serving), rate))
        return facts

    def snapshot(self, now: float) -> dict[str, Any]:
        """Everything the page shows, at `now`. JSON, with keys that stay."""
        seen, health = self.observation, self.health(now)
        head: dict[str, Any] = {
            "state": health.state,
            "word": health.word,
            "reason": health.reason,
            "run_id": self.run_id,
            "heard_at": round(self.heard_at, 1) or None,
            "notes": self.notes.total,
        }
        if seen is None:
            return {
                "head": {**head, "name": "", "step": 0, "num_steps": 0},
                "stages": [], "flows": [], "replicas": {}, "feed": list(self._feed),
                "samples": [], "contributors": self._contributors, "help": self._help(None, ()),
            }  # fmt: skip
        facts = self._stage_facts(seen)
        slow = bottleneck(facts)
        head |= {
            "name": seen.name,
            "step": seen.step,
            "num_steps": seen.num_steps,
            "loss": _digits(seen.loss),
            "validation_loss": _digits(seen.validation_loss),
            "tokens_per_s": _digits(seen.tokens_per_s, 3),
            "eta_s": self._eta_s(seen),
            "serving": sum(stage.serving for stage in facts),
            "peers": len(seen.replicas),
            "done": seen.done,
            "of": seen.of,
            "epoch": seen.epoch,
            "term": seen.term,
            "version": seen.version,
            "utilisation": _digits(self._utilisation(), 2),
            "raw_bps": _digits(sum(raw for raw, _ in self._traffic), 3),
            "wire_bps": _digits(sum(wire for _, wire in self._traffic), 3),
        }
        return {
            "head": head,
            "stages": [
                self._stage(number, seen, stage, slow) for number, stage in enumerate(facts)
            ],
            "flows": self._flows(slow),
            "replicas": {key_of(row.incarnation): self._row(row) for row in seen.replicas},
            "feed": list(self._feed),
            "samples": [
                {
                    "t": round(sample.t, 2),
                    "s": round(sample.wall_s, 3),
                    "r": [key_of(each) for each in sample.route],
                }
                for sample in seen.samples[-NUM_SAMPLES:]
            ],
            "contributors": self._contributors,
            "help": self._help(seen.wanted, facts),
        }

    def _eta_s(self, seen: Observation) -> int | None:
        """Seconds to the last step at the speed of the last steps."""
        left = seen.num_steps - seen.step
        if seen.state != "training" or left <= 0 or len(self._steps) < 2:
            return None
        steps = list(self._steps)
        seconds = (steps[-1][0] - steps[0][0]) / (len(steps) - 1)
        return int(left * seconds) if 0 < seconds < 1e6 else None

    def _stage(
        self, number: int, seen: Observation, stage: Stage, slow: int | None
    ) -> dict[str, Any]:
        counts = dict.fromkeys(("serving", "ready", "joining", "expelled"), 0)
        for row in seen.replicas:
            if row.stage == number:
                counts[row.standing] += 1
        return {
            "stage": number,
            "serving": stage.serving,
            "text": counts_text(counts),
            "rate": _digits(stage.rate, 3),
            "bottleneck": number == slow,
            "empty": not stage.serving,
        }

    def _flows(self, slow: int | None) -> list[dict[str, Any]]:
        most = max((wire for _, wire in self._traffic), default=0.0)
        return [
            {
                "boundary": number,
                "raw_bps": _digits(raw, 3),
                "wire_bps": _digits(wire, 3),
                "level": round(wire / most, 2) if most else 0.0,
                "bottleneck": slow is not None and number + 1 == slow,
            }
            for number, (raw, wire) in enumerate(self._traffic)
        ]

    def _row(self, row: Replica) -> dict[str, Any]:
        version, name = self._announced.get(row.peer, ("", ""))
        return {
            "stage": row.stage,
            "peer": row.peer,
            "name": friendly_name(row.peer),
            "label": name,
            "state": row.standing,
            "queue": row.queue,
            "service_s": _digits(row.service_s, 3),
            "share": round(row.share, 2),
            "counted": row.counted,
            "step": row.step,
            "device": row.device,
            "version": version,
            "reason": row.reason,
            "activity": list(self._shares.get(row.incarnation, ())),
        }

    def _help(self, wanted: Wanted | None, facts: Sequence[Stage]) -> dict[str, Any]:
        """Where one more peer helps most: where the leader would send it; where it does not say,
        as far as can be told from here."""
        stage: int | None = None
        why = ""
        if wanted is not None:
            stage, why = wanted.stage, wanted.reason
            if why.startswith(name := f"stage {stage} "):
                why = f"it {why.removeprefix(name)}"
        elif facts:
            stage, why = neediest(facts)
        return {"line": self.join_line, "stage": stage, "why": why}

    def marks(self, since: float) -> list[dict[str, Any]]:
        """Who came, went, moved or was expelled, for the charts."""
        marks = []
        for event in self.store.marks(MARKS, since):
            line = feed_line(event)
            if line is not None:
                marks.append({key: line[key] for key in ("t", "kind", "sign", "text")})
        return marks


def _cursors(kept: Any) -> dict[str, int]:
    found = kept if isinstance(kept, dict) else {}
    return {life: whole(after) or 0 for life, after in found.items()}


def key_of(incarnation: str) -> str:
    """A short name of one life of a peer, for the picture: the ends of both its parts."""
    peer, _, life = incarnation.partition("#")
    return f"{peer[-10:]}.{life[:6]}"


def feed_line(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """An event in words; None for those that are no news."""
    kind = event["event"]
    if kind in NEWS:
        return None
    words = event_text(event)
    if words is None:
        return None
    who = event.get("replica")
    return {
        "n": event["n"],
        "t": event["t"],
        "kind": kind,
        "sign": SIGNS.get(kind, "·"),
        "text": words,
        "peer": who.partition("#")[0] if isinstance(who, str) else None,
    }


def contributor_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A contributor as shown."""
    return {
        "peer": row["peer"],
        "name": friendly_name(row["peer"]),
        "label": row["name"],
        "counted": row["counted"],
        "first": round(row["first"]),
        "last": round(row["last"]),
    }


def headline(snapshot: Mapping[str, Any]) -> str:
    """The page's title: what can be read on a tab."""
    head = snapshot["head"]
    return f"{head['word']} · step {head['step']} · {head.get('name') or 'swarm'}"


def summary(snapshot: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts of the status line, as (what, words), for a page that is not alive."""
    head = snapshot["head"]
    loss, validation = head.get("loss"), head.get("validation_loss")
    rate, eta = head.get("tokens_per_s"), head.get("eta_s")
    return [
        ("Step", f"{head['step']} of {head['num_steps']}"),
        ("Loss", "–" if loss is None else f"{loss:.4f}"),
        ("Validation", "–" if validation is None else f"{validation:.4f}"),
        ("Tokens/s", count_text(rate) if rate else "–"),
        ("Peers", f"{head.get('serving', 0)} of {head.get('peers', 0)}"),
        ("Time left", duration_text(eta) if eta else "–"),
    ]


def _rate(step: Mapping[str, Any]) -> float | None:
    """Tokens per second of a committed step."""
    wall_s, tokens = step.get("wall_s"), step.get("tokens")
    return tokens / wall_s if wall_s and tokens and wall_s > 0 else None


def _digits(value: float | None, digits: int = 5) -> float | None:
    """So many significant digits: what is not shown need not be sent again."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")
