"""Which replica of each stage a microbatch goes to, and why. Pure: no I/O, time is an argument.

Stochastic wiring (SWARM, arXiv 2301.11913, section 3.2 and appendix): per stage an interleaved
weighted round robin over measured service rates. Every replica has a virtual time, the work it has
been given so far in seconds of its own; a microbatch goes to the one that would finish it first,
and that one's virtual time advances by its service time. So a replica ten times slower gets a tenth
of the work: slow is not dead. Ties fall by a hash of the seed, so pairings of neighbours vary, and
the same seed and the same calls give the same routes.

Where this differs from the published code, and why:
- the released balancer adds its expected time when the *lowest* load is popped; here the earliest
  *finish* wins, which keeps a slow replica from being handed the last microbatch of a step early;
- it drops a replica on an error for as long as its announcement lives, and does nothing on a
  time-out. Here both double a penalty on the replica's time, which fades with time and with each
  success: a replica that fails loses work at once, a healthy one gets it back without a new join;
- it measures the whole round trip. The caller here passes the service time alone, without queueing
  and without what lies downstream, or a fast replica in front of a slow stage would look slow;
- what is outstanding at a replica is bounded by credits, so a slow stage does not fill its memory;
- shares alone notice a replica that slows down only when it answers, late. So what is outstanding
  counts too: whoever would finish its queue much later than another of its stage comes last until
  it has caught up, and what it missed meanwhile is not owed to it;
- a replica at its limit is waited for where it is due and would be done sooner than the others, or
  a slow twin would be filled up whenever the fast one is; but not by what has a part of its route
  behind it, for that may hold the slot which the work of that replica waits for;
- a device may serve several stages. It has one virtual time: what it is given in one stage counts
  in all, so its time goes where the others of its stage are busiest, as it should.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarm.reach import Reach

FailureKind = Literal["error", "timeout"]

_SMOOTHING = 0.25  # weight of a new measurement in the average
_SURPRISE = 2.0  # two in a row that are off by this factor to the same side replace the average
_QUEUE_SLACK = 2.0  # services by which a replica's queue may end later than the shortest one
_HALF_LIFE_S = 20.0  # a penalty fades to half in this time
_MAX_PENALTY = 6.0  # a failing replica never falls below 1/64 of its rate
_PROBE_AFTER_S = 30.0  # a replica left out that long is tried once, whatever its average says
_PROBE_SERVICES = 10.0  # but never more than about a tenth of its own time
_PROBE_DRAWS = 16  # and only when that many microbatches went elsewhere meanwhile
_MIN_SERVICE_S = 1e-6
_GUESS_S = 1.0  # of a stage where nobody has been measured yet
_PENALTY: dict[str, float] = {"error": 1.0, "timeout": 1.0}


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica for one hop, and the reason in a few words for logs and dashboard."""

    replica: str
    reason: str


@dataclass(slots=True)
class _Device:
    """What serves a replica, or several: its time is given away once."""

    virtual_s: float
    replicas: list[_Replica] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Replica:
    name: str
    stage: int
    service_s: float | None  # average; None where nothing is known
    device: _Device
    measured: int = 0  # measurements in `service_s`; with none it is an estimate, if anything
    surprise_s: float | None = None  # the last measurement, if it was far off
    probe: bool = True  # entered and not drawn yet
    lagging: bool = False  # sat out a draw: at its credit limit, or its queue was too long
    outstanding: int = 0
    penalty: float = 0.0  # doublings of the service time, as of `penalty_at`
    penalty_at: float = 0.0
    drawn_at: float | None = None
    drawn_as: int = 0  # the stage's draw counter then

    @property
    def virtual_s(self) -> float:
        return self.device.virtual_s

    @virtual_s.setter
    def virtual_s(self, seconds: float) -> None:
        self.device.virtual_s = seconds

    def learn(self, service_s: float) -> None:
        """A measurement. One that is far off may be an accident; two are a new speed."""
        self.measured += 1
        if self.service_s is None:
            self.service_s = service_s
        before, ratio = self.surprise_s, service_s / self.service_s
        far = ratio > _SURPRISE or ratio < 1 / _SURPRISE
        self.surprise_s = service_s if far else None
        if far and before is not None and (before > self.service_s) == (ratio > 1):
            self.service_s, self.surprise_s = (before + service_s) / 2, None
        else:
            self.service_s += _SMOOTHING * (service_s - self.service_s)


@dataclass(slots=True)
class _Stage:
    replicas: dict[str, _Replica] = field(default_factory=dict)
    draws: int = 0


class Router:
    """Routes over the replicas it has been told of.

    `credits` is the most microbatches outstanding at one replica (None: no bound; `grant` gives a
    stage another number), counted by `started` and `finished`; a choice alone counts nothing, so a
    route that is drawn and then dropped costs a replica its turn and no more. Replicas whose names
    differ only behind the first "#" are on one device, and share its time.
    """

    def __init__(self, seed: int = 0, credits: int | None = None) -> None:
        self._seed = seed
        self._credits = credits
        self._granted: dict[int, int] = {}  # by stage, instead
        self._replicas: dict[str, _Replica] = {}
        self._stages: dict[int, _Stage] = {}
        self._devices: dict[str, _Device] = {}
        self._reach = Reach()

    # ---- what the caller has learned ----------------------------------------------------------

    def add(self, replica: str, stage: int, service_s: float | None = None) -> None:
        """A replica serves `stage`. It is probed at once: the stage's next draw goes to it.

        `service_s` is a first guess, if there is one. Adding a replica again in the same stage
        changes nothing; in another stage it moves and starts anew.
        """
        known = self._replicas.get(replica)
        if known is not None:
            if known.stage == stage:
                return
            self.remove(replica)
        peers = self._stages.setdefault(stage, _Stage())
        virtual_s = min((other.virtual_s for other in peers.replicas.values()), default=0.0)
        service_s = None if service_s is None else _checked(service_s)
        device = self._devices.setdefault(_device_of(replica), _Device(virtual_s))
        entry = _Replica(replica, stage, service_s, device)
        device.replicas.append(entry)
        peers.replicas[replica] = self._replicas[replica] = entry

    def grant(self, stage: int, credits: int) -> None:
        """So many microbatches may be outstanding at each replica of `stage` from now on."""
        self._granted[stage] = credits

    def remove(self, replica: str) -> None:
        """It left, died or was expelled. Unknown names are ignored."""
        entry = self._replicas.pop(replica, None)
        if entry is None:
            return
        del self._stages[entry.stage].replicas[replica]
        entry.device.replicas.remove(entry)
        if not entry.device.replicas:
            del self._devices[_device_of(replica)]
        self._reach.forget(replica)

    def observe(self, replica: str, service_s: float) -> None:
        """It served a microbatch in `service_s` (its own compute; no queueing, nothing downstream).

        A success also halves what is left of its penalty.
        """
        entry = self._replicas.get(replica)
        if entry is None:
            return
        service_s = _checked(service_s)
        peers = self._stages[entry.stage].replicas.values()
        if entry.service_s is None and all(each.service_s is None for each in peers):
            # All draws so far were charged with a guess: now it is known what they cost.
            for each in peers:
                each.virtual_s *= service_s / _GUESS_S
        entry.learn(service_s)
        entry.penalty /= 2

    def failed(self, replica: str, kind: FailureKind, now: float) -> None:
        """A call to it ended in an error or a time-out: its score halves, then recovers in time."""
        entry = self._replicas.get(replica)
        if entry is None:
            return
        entry.penalty = min(_MAX_PENALTY, self._penalty(entry, now) + _PENALTY[kind])
        entry.penalty_at = now

    def started(self, replica: str) -> None:
        """One more microbatch is outstanding there."""
        if replica in self._replicas:
            self._replicas[replica].outstanding += 1

    def finished(self, replica: str) -> None:
        """One fewer: answered, failed or given up."""
        if replica in self._replicas:
            entry = self._replicas[replica]
            entry.outstanding = max(0, entry.outstanding - 1)

    def avoid_pair(self, a: str, b: str, until: float) -> None:
        """These two cannot reach each other: no route puts them side by side until `until`."""
        self._reach.part(a, b, until)

    def apart(self, a: str, b: str, now: float) -> bool:
        """Whether the two are kept from being neighbours at present."""
        return self._reach.apart(a, b, now)

    def begin_step(self) -> None:
        """A step begins, and all of it must end before the next one: what was given to whom before
        is forgotten, or one that was ahead then would be short of work now, and everybody wait."""
        for device in self._devices.values():
            device.virtual_s = 0.0

    # ---- choices ------------------------------------------------------------------------------

    def choose(
        self,
        stage: int,
        exclude: Collection[str] = (),
        now: float = 0.0,
        beside: Collection[str] = (),
    ) -> Choice | None:
        """One replica of `stage`, not in `exclude` and not apart from any of `beside`.

        None when there is none; `explain` says why.
        """
        ranked = self._ranked(stage, exclude, now, beside)
        return self._draw(ranked[0], now) if ranked else None

    def route(
        self,
        stages: Sequence[int],
        exclude: Collection[str] = (),
        now: float = 0.0,
        fixed: Mapping[int, str] | None = None,
        *,
        reluctantly: bool = False,
        patient: bool = True,
    ) -> list[Choice] | None:
        """One replica per stage, neighbours within reach of each other.

        `fixed` keeps the surviving hops of an earlier route: those are neither excluded nor
        counted as drawn. None when no such route exists now; then nothing is drawn. `reluctantly`
        takes neighbours that were out of each other's reach as well. Who is not `patient` waits for
        nobody at its limit, and goes there if all are: what a replica is full of may wait for him.
        """
        fixed = fixed or {}
        candidates: list[list[str]] = []
        for stage in stages:
            if stage in fixed:
                candidates.append([fixed[stage]])
            else:
                ranked = self._ranked(stage, exclude, now, (), patient=patient)
                candidates.append([each.name for each in ranked])
        path = self._reach.path(candidates, math.inf if reluctantly else now)
        if path is None:
            return None
        return [
            Choice(name, "kept") if stage in fixed else self._draw(self._replicas[name], now)
            for stage, name in zip(stages, path, strict=True)
        ]

    def explain(
        self,
        stage: int,
        exclude: Collection[str] = (),
        now: float = 0.0,
        beside: Collection[str] = (),
    ) -> dict[str, str]:
        """Per replica of the stage, why it cannot be chosen now, or "" where it can."""
        entries = self._stages.get(stage, _Stage()).replicas.values()
        reasons = {e.name: self._blocked(e, exclude, now, beside) for e in entries}
        full = [
            e for e in entries
            if self._used_up(e) and not self._blocked(e, exclude, now, beside, full_is_fine=True)
        ]  # fmt: skip
        for entry in entries:
            if not reasons[entry.name] and (other := self._sooner(entry, full, now)):
                reasons[entry.name] = f"{other} is due, and sooner done"
        return reasons

    def shares(self, stage: int, now: float = 0.0) -> dict[str, float]:
        """The share of the stage's work each replica is due at present rates and scores."""
        entries = self._stages.get(stage, _Stage()).replicas
        rates = {name: 1.0 / self._cost(entry, now) for name, entry in entries.items()}
        total = sum(rates.values())
        return {name: rate / total for name, rate in rates.items()}

    def rate(self, stage: int) -> float:
        """Microbatches per second that those of the stage serve who have been measured, in all."""
        there = self._stages.get(stage, _Stage()).replicas.values()
        return sum(1.0 / e.service_s for e in there if e.measured and e.service_s is not None)

    def score(self, replica: str, now: float) -> float:
        """1 for a replica without recent failures, down to 1/64."""
        return 2.0 ** -self._penalty(self._replicas[replica], now)

    def service_s(self, replica: str) -> float | None:
        """Average measured service time, None before the first measurement."""
        return self._replicas[replica].service_s

    def outstanding(self, replica: str) -> int:
        return self._replicas[replica].outstanding

    def outstanding_of(self, replica: str) -> int:
        """As `outstanding`; 0 for names that are not known."""
        entry = self._replicas.get(replica)
        return entry.outstanding if entry is not None else 0

    def measured_s(self, replica: str, least: int = 1) -> float | None:
        """As `service_s`, but no estimate: None before `least` measurements, and for names that
        are not known."""
        entry = self._replicas.get(replica)
        return entry.service_s if entry is not None and entry.measured >= least else None

    def measured(self) -> dict[str, tuple[int, float]]:
        """Stage and average service time of those that have been measured."""
        return {
            name: (entry.stage, entry.service_s)
            for name, entry in self._replicas.items()
            if entry.service_s is not None and entry.measured
        }

    def replicas(self, stage: int) -> list[str]:
        """Names in the stage, in the order they were added."""
        return list(self._stages.get(stage, _Stage()).replicas)

    # ---- how ----------------------------------------------------------------------------------

    def _ranked(
        self,
        stage: int,
        exclude: Collection[str],
        now: float,
        beside: Collection[str],
        *,
        patient: bool = True,
    ) -> list[_Replica]:
        """Who may be chosen, best first. Changes only who is known to lag."""
        entries = self._stages.setdefault(stage, _Stage())
        free, full = [], []
        for entry in entries.replicas.values():
            if self._used_up(entry):
                entry.lagging = True
                full.append(entry)
            else:
                free.append(entry)
        late = self._late(free, now)
        # A replica that sat out is slower than measured: what it missed is not owed to it, or it
        # would come back to a burst.
        floor = min((e.virtual_s for e in free if not e.lagging), default=None)
        for entry in free:
            if entry.name in late:
                entry.lagging = True
            elif entry.lagging:
                entry.lagging = False
                if floor is not None:
                    entry.virtual_s = max(entry.virtual_s, floor)

        def rank(entry: _Replica) -> tuple[bool, bool, float, bytes]:
            tie = f"{self._seed}/{stage}/{entries.draws}/{entry.name}".encode()
            return (
                entry.name in late,
                not (entry.probe or self._stale(entry, now)),
                entry.virtual_s + self._cost(entry, now),
                hashlib.blake2b(tie, digest_size=8).digest(),
            )

        allowed = [entry for entry in free if not self._blocked(entry, exclude, now, beside)]
        usable = [e for e in full if not self._blocked(e, exclude, now, beside, full_is_fine=True)]
        if not patient:
            return sorted(allowed or usable, key=rank)
        return sorted((e for e in allowed if not self._sooner(e, usable, now)), key=rank)

    def _sooner(self, entry: _Replica, full: Collection[_Replica], now: float) -> str:
        """Who of those at their limit is due before `entry` and would be done before it, or ""."""
        if not full or entry.probe or self._stale(entry, now):
            return ""
        cost = self._cost(entry, now)
        due, done = entry.virtual_s + cost, (entry.outstanding + 1) * cost
        for other in full:
            cost = self._cost(other, now)
            if other.virtual_s + cost < due and (other.outstanding + 1) * cost < done:
                return other.name
        return ""

    def _late(self, free: Collection[_Replica], now: float) -> set[str]:
        """Those whose queue would end much later than the shortest one of the stage.

        Queues are compared by the seconds of own work in them, one more included: what lies
        downstream delays the answers of all alike, in proportion to the rates. A device's queue is
        that of all its replicas.
        """
        ends = {
            e.name: (e.outstanding + 1) * self._cost(e, now)
            + sum(o.outstanding * self._cost(o, now) for o in e.device.replicas if o is not e)
            for e in free
        }
        shortest = min(ends.values(), default=0.0)
        return {
            e.name
            for e in free
            if any(each.outstanding for each in e.device.replicas)
            and ends[e.name] > shortest + _QUEUE_SLACK * self._cost(e, now)
        }

    def _draw(self, entry: _Replica, now: float) -> Choice:
        if entry.probe:
            reason = "probe: new here"
        elif self._stale(entry, now):
            reason = f"probe: not used for {now - (entry.drawn_at or 0.0):.0f} s"
        elif self._penalty(entry, now) > 0.1:
            reason = f"finishes first, at a score of {self.score(entry.name, now):.2f}"
        else:
            reason = "finishes first"
        stale = self._stale(entry, now) and not entry.probe
        stage = self._stages[entry.stage]
        stage.draws += 1
        entry.probe = False
        entry.drawn_at = now
        entry.drawn_as = stage.draws
        if stale:  # a probe is extra: it must not push the replica further back
            others = [e.virtual_s for e in stage.replicas.values() if e is not entry]
            entry.virtual_s = min([entry.virtual_s, *others])
        entry.virtual_s += self._cost(entry, now)
        return Choice(entry.name, reason)

    def _blocked(
        self,
        entry: _Replica,
        exclude: Collection[str],
        now: float,
        beside: Collection[str],
        *,
        full_is_fine: bool = False,
    ) -> str:
        if entry.name in exclude:
            return "excluded"
        if self._used_up(entry) and not full_is_fine:
            return f"at its limit of {self._limit(entry)} outstanding"
        for neighbour in beside:
            if self._reach.apart(entry.name, neighbour, now):
                return f"cannot reach {neighbour}"
        return ""

    def _limit(self, entry: _Replica) -> int | None:
        return self._granted.get(entry.stage, self._credits)

    def _used_up(self, entry: _Replica) -> bool:
        limit = self._limit(entry)
        return limit is not None and entry.outstanding >= limit

    def _cost(self, entry: _Replica, now: float) -> float:
        service_s = entry.service_s
        if service_s is None:  # as fast as its peers until it shows otherwise
            peers = self._stages[entry.stage].replicas.values()
            known = [e.service_s for e in peers if e.service_s is not None]
            service_s = sum(known) / len(known) if known else _GUESS_S
        return service_s * 2.0 ** self._penalty(entry, now)

    def _penalty(self, entry: _Replica, now: float) -> float:
        if not entry.penalty:
            return 0.0
        return float(entry.penalty * 0.5 ** (max(0.0, now - entry.penalty_at) / _HALF_LIFE_S))

    def _stale(self, entry: _Replica, now: float) -> bool:
        if entry.drawn_at is None:
            return False
        if self._stages[entry.stage].draws - entry.drawn_as < _PROBE_DRAWS:
            return False
        return now - entry.drawn_at > max(
            _PROBE_AFTER_S, _PROBE_SERVICES * (entry.service_s or 0.0)
        )


def _checked(service_s: float) -> float:
    if not math.isfinite(service_s) or service_s < 0:
        raise ValueError(f"service time of {service_s} s")
    return max(service_s, _MIN_SERVICE_S)


def _device_of(replica: str) -> str:
    return replica.partition("#")[0]
