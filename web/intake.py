"""What a leader or a replica says, read as hostile: typed, capped, and free of addresses.

Everything shown in public passes through here. A value of the wrong kind or size counts as missing
and is noted; what is left is plain text, finite numbers and bounded lists. Texts lose what could
steer a screen and any network address: a dashboard is public, and where volunteers live is not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.names import friendly_name
from swarm.net.identity import is_peer_id
from swarm.words import clean

MAX_STAGES = 256
MAX_REPLICAS = 1500
MAX_EVENTS = 256
MAX_SAMPLES = 64
MAX_NAME = 40
MAX_REASON = 200
MAX_COUNT = 1 << 53
STANDINGS = ("serving", "ready", "joining", "expelled")
STATES = ("waiting", "training", "validating", "saving", "finished", "failed", "standing by")
ACTIVITIES = ("compute", "average", "move", "transfer", "wait")
_EVENT_NUMBERS = ("step", "stage", "loss", "grad_norm", "tokens", "wall_s", "validation_loss",
                  "steps", "count", "index", "source", "target", "epoch")  # fmt: skip
_ADDRESS = re.compile(
    r"/(?:ip4|ip6|dns4?|dns6|dnsaddr)/\S+"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}(?![\w:])"
    r"|(?<![\w:])[0-9a-fA-F:]*::[0-9a-fA-F:]*"
)
_PEER_ID = re.compile(r"\b[1-9A-HJ-NP-Za-km-z]{40,}\b")
_LINK = re.compile(r"swarm://\S+")


@dataclass(frozen=True, slots=True)
class Replica:
    """A row of the leader's table."""

    incarnation: str
    stage: int
    standing: str
    step: int
    device: str
    counted: int
    reason: str
    service_s: float | None
    queue: int
    share: float

    @property
    def peer(self) -> str:
        return self.incarnation.partition("#")[0]


@dataclass(frozen=True, slots=True)
class Sample:
    """One microbatch that was really computed: when, how long, and by whom."""

    t: float
    wall_s: float
    step: int
    route: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The stage to which the leader would send one more peer, and why."""

    stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What a leader told, cleaned. `events` are mappings with `t` and `event` at least."""

    life: str
    after: int
    version: str
    name: str
    state: str
    reason: str
    step: int
    num_steps: int
    loss: float | None
    validation_loss: float | None
    tokens: int
    tokens_per_s: float
    in_flight: int
    done: int
    of: int
    num_stages: int
    replicas: tuple[Replica, ...]
    boundaries: tuple[tuple[int, int], ...]  # (raw, wire) bytes so far
    started_at: float
    updated_at: float
    epoch: int
    term: int
    events: tuple[Mapping[str, Any], ...]
    samples: tuple[Sample, ...]
    wanted: Wanted | None = None  # None: the leader does not say


@dataclass(frozen=True, slots=True)
class PeerReport:
    """What a replica told of itself, cleaned. `seconds` in the order of `ACTIVITIES`."""

    version: str
    name: str
    seconds: tuple[float, ...]


@dataclass(slots=True)
class Notes:
    """What did not make sense, and how often; bounded."""

    limit: int = 50
    counts: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def add(self, what: str) -> None:
        """Note it. Of too many kinds only the number is kept."""
        self.total += 1
        what = text(what, MAX_REASON)
        if what in self.counts or len(self.counts) < self.limit:
            self.counts[what] = self.counts.get(what, 0) + 1


def text(value: object, limit: int = MAX_REASON) -> str:
    """One printable line without addresses, peers by their two words; empty for what is no text."""
    if not isinstance(value, str):
        return ""
    line = clean(value[: 8 * limit], 4 * limit)
    line = _PEER_ID.sub(lambda found: friendly_name(found[0]), line)
    line = _ADDRESS.sub("(address)", _LINK.sub("(link)", line))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def real(value: object, low: float = 0.0, high: float = 1e18) -> float | None:
    """A finite number within bounds, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and low <= number <= high else None


def whole(value: object, high: int = MAX_COUNT) -> int | None:
    """A count, or None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= high else None


def incarnation(value: object) -> str:
    """`PEER_ID#HEX`, or empty."""
    if not isinstance(value, str) or len(value) > 160:
        return ""
    peer, mark, life = value.partition("#")
    if not mark or not is_peer_id(peer) or not re.fullmatch(r"[0-9A-Za-z]{1,64}", life):
        return ""
    return value


def read_observation(body: object, now: float, notes: Notes) -> Observation | None:
    """A leader's answer to `observe`; None when it is not one. `now` is unix time."""
    if not isinstance(body, Mapping):
        notes.add("the leader's answer is no map")
        return None
    life, status = body.get("life"), body.get("status")
    num_stages = whole(status.get("num_stages"), MAX_STAGES) if isinstance(status, Mapping) else 0
    if not isinstance(life, str) or not re.fullmatch(r"[0-9a-f]{1,64}", life):
        notes.add("the leader's answer does not say of which life")
        return None
    if not isinstance(status, Mapping) or not num_stages:
        notes.add("the leader's status makes no sense")
        return None
    state = status.get("state")
    microbatches = _map(status.get("microbatches"))
    updated = real(status.get("updated_at"), 1.0, now + 60.0)
    return Observation(
        life=life,
        after=whole(body.get("after")) or 0,
        version=text(body.get("version"), 20),
        name=text(_map(status.get("run")).get("name"), 80),
        state=state if state in STATES else "waiting",
        reason=text(status.get("reason")),
        step=whole(status.get("step")) or 0,
        num_steps=whole(status.get("num_steps")) or 0,
        loss=real(status.get("loss"), -1e9, 1e9),
        validation_loss=real(status.get("validation_loss"), -1e9, 1e9),
        tokens=whole(status.get("tokens")) or 0,
        tokens_per_s=real(status.get("tokens_per_s")) or 0.0,
        in_flight=whole(status.get("in_flight")) or 0,
        done=whole(microbatches.get("done")) or 0,
        of=whole(microbatches.get("of")) or 0,
        num_stages=num_stages,
        replicas=_replicas(status.get("replicas"), num_stages, notes),
        boundaries=_boundaries(_map(status.get("bytes")).get("boundaries"), num_stages),
        started_at=real(status.get("started_at"), 1.0, now + 60.0) or now,
        updated_at=updated or now,
        epoch=whole(status.get("epoch")) or 0,
        term=whole(status.get("term")) or 0,
        events=read_events(body.get("events"), now, notes),
        samples=_samples(body.get("samples"), num_stages, now),
        wanted=_wanted(_map(status.get("placement")).get("help"), num_stages, notes),
    )


def read_events(value: object, now: float, notes: Notes) -> tuple[Mapping[str, Any], ...]:
    """Events as they may be kept and shown; those that make no sense are noted."""
    found = []
    for each in _list(value, MAX_EVENTS):
        event = read_event(each, now)
        if event is None:
            notes.add("an event that makes no sense")
        else:
            found.append(event)
    return tuple(found)


def read_event(value: object, now: float) -> dict[str, Any] | None:
    """One event, with known keys only; None when it is none. Paths and links stay private."""
    if not isinstance(value, Mapping):
        return None
    t, kind = real(value.get("t"), 1.0, now + 60.0), value.get("event")
    if t is None or not isinstance(kind, str) or not re.fullmatch(r"[a-z_]{1,40}", kind):
        return None
    event: dict[str, Any] = {"t": t, "event": kind}
    for key in ("replica", "by"):
        if (who := incarnation(value.get(key))) != "":
            event[key] = who
    for key in _EVENT_NUMBERS:
        number = real(value.get(key), -1e18)
        if number is not None:
            event[key] = int(number) if isinstance(value[key], int) else number
    if value.get("reason"):
        event["reason"] = text(value["reason"])
    sha256 = value.get("sha256")
    if isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256):
        event["sha256"] = sha256
    return event


def read_peer(body: object, notes: Notes, who: str) -> PeerReport | None:
    """A replica's answer to `observe`; None when it is not one."""
    if not isinstance(body, Mapping) or not isinstance(body.get("seconds"), Mapping):
        notes.add(f"a report of {who[-8:]} makes no sense")
        return None
    seconds = [real(body["seconds"].get(key), 0.0, 1e9) for key in ACTIVITIES]
    if any(each is None for each in seconds):
        notes.add(f"a report of {who[-8:]} makes no sense")
        return None
    return PeerReport(
        text(body.get("version"), 20),
        text(body.get("name"), MAX_NAME),
        tuple(each for each in seconds if each is not None),
    )


def _replicas(value: object, num_stages: int, notes: Notes) -> tuple[Replica, ...]:
    found: dict[str, Replica] = {}
    for row in _list(value, MAX_REPLICAS):
        row = _map(row)
        who, stage = incarnation(row.get("replica")), whole(row.get("stage"))
        standing = row.get("standing")
        if not who or stage is None or stage >= num_stages or standing not in STANDINGS:
            notes.add("a replica that makes no sense")
            continue
        found[who] = Replica(
            who,
            stage,
            str(standing),
            whole(row.get("step")) or 0,
            text(row.get("device"), 20),
            whole(row.get("counted")) or 0,
            text(row.get("reason")),
            real(row.get("service_s"), 0.0, 1e6),
            whole(row.get("outstanding")) or 0,
            real(row.get("share"), 0.0, 1.0) or 0.0,
        )
    return tuple(found.values())


def _wanted(value: object, num_stages: int, notes: Notes) -> Wanted | None:
    if value is None:
        return None
    stage, reason = whole(_map(value).get("stage")), text(_map(value).get("reason"))
    if stage is None or stage >= num_stages or not reason:
        notes.add("where the leader wants help makes no sense")
        return None
    return Wanted(stage, reason)


def _boundaries(value: object, num_stages: int) -> tuple[tuple[int, int], ...]:
    totals = [(0, 0)] * (num_stages - 1)
    for row in _list(value, MAX_STAGES):
        row = _map(row)
        boundary = whole(row.get("boundary"))
        if boundary is not None and boundary < len(totals):
            raw, wire = whole(row.get("raw_bytes")), whole(row.get("wire_bytes"))
            totals[boundary] = (raw or 0, wire or 0)
    return tuple(totals)


def _samples(value: object, num_stages: int, now: float) -> tuple[Sample, ...]:
    found = []
    for row in _list(value, MAX_SAMPLES):
        row = _map(row)
        t, wall_s = real(row.get("t"), 1.0, now + 60.0), real(row.get("wall_s"), 0.0, 1e6)
        route = tuple(incarnation(each) for each in _list(row.get("route"), num_stages))
        if t is not None and wall_s is not None and len(route) == num_stages and all(route):
            found.append(Sample(t, wall_s, whole(row.get("step")) or 0, route))
    return tuple(found)


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object, limit: int) -> Sequence[Any]:
    return value[:limit] if isinstance(value, list | tuple) else ()
