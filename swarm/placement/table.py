"""What is known of stages and peers, and the throughput that follows from it.

The model: a stage's rate is the sum of its replicas' rates, and the swarm's is that of its slowest
stage, because every microbatch passes every stage. A peer that serves several stages shares its
time between them, as the router does: the stage that lags gets it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SHARING_ROUNDS = 64  # of settling the time of peers that serve several stages
_SHARING_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class StageNeed:
    """What a stage asks of a peer.

    `cost`: seconds a device of speed 1 takes for one microbatch, forward and backward.
    `memory_bytes`: on the device (`estimate_memory`). `download_bytes`: of its snapshot.
    """

    cost: float = 1.0
    memory_bytes: int = 0
    download_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """What is known of one peer. Times are seconds on the caller's clock.

    `stages`: served now. One that keeps serving while it downloads stays in its old stage.
    `arriving`: the stage it downloads, as joiner or mover, or has reserved; it counts as present
    there for whoever plans, until `reserved_until_s`, so that two never fill one gap.
    `arrives_s`: when it is expected to serve there.
    `second`: a stage whose state it holds besides, ready to serve it (`chain`); `fetching`: one it
    is to hold so. Rates leave both out: they say what a plan balances.
    `rates`: measured, in microbatches/s with all of its time on that stage; where there is none,
    `speed / cost` of the stage, and where there is no speed, the speed its measured rates imply.
    `memory_bytes`: of its device; None: not known, anything fits.
    `pinned`: the volunteer chose the stage; it is never moved.
    `moved_s`, `left_stage`: when it last changed stage, and from which.
    `leaves_s`: when it goes, if that is known (a preemption notice, a polite leave).
    `lifetime_s`: how much longer it is expected to serve.
    """

    peer: str
    stages: tuple[int, ...] = ()
    arriving: int | None = None
    arrives_s: float = 0.0
    reserved_until_s: float = math.inf
    rates: Mapping[int, float] = field(default_factory=dict)
    speed: float | None = None
    memory_bytes: int | None = None
    download_bytes_per_s: float = math.inf
    pinned: bool = False
    moved_s: float = -math.inf
    left_stage: int | None = None
    leaves_s: float = math.inf
    lifetime_s: float = math.inf
    second: int | None = None
    fetching: int | None = None


@dataclass(frozen=True, slots=True)
class LoadTable:
    """All stages in order, and all peers: serving, arriving, or leaving."""

    stages: tuple[StageNeed, ...]
    peers: tuple[PeerLoad, ...] = ()

    def speed(self, peer: PeerLoad) -> float:
        """Its speed in units of cost per second; 0 where nothing is known."""
        if peer.speed is not None:
            return peer.speed
        implied = [
            rate * self.stages[stage].cost
            for stage, rate in sorted(peer.rates.items())
            if 0 <= stage < len(self.stages)
        ]
        return sum(implied) / len(implied) if implied else 0.0

    def rate(self, peer: PeerLoad, stage: int) -> float:
        """Microbatches/s it does, or would do, with all of its time on `stage`."""
        measured = peer.rates.get(stage)
        return self.speed(peer) / self.stages[stage].cost if measured is None else measured

    def fits(self, peer: PeerLoad, *stages: int) -> bool:
        """Whether its device can hold these stages together."""
        if peer.memory_bytes is None:
            return True
        return sum(self.stages[each].memory_bytes for each in stages) <= peer.memory_bytes

    def download_s(self, peer: PeerLoad, stage: int) -> float:
        """How long it takes to fetch the state of `stage`."""
        return self.stages[stage].download_bytes / peer.download_bytes_per_s

    def present_rates(self, now_s: float) -> list[float]:
        """Per stage, microbatches/s by those who serve now (those with a notice included)."""
        return self._rates([(p, p.stages) for p in self.peers if p.leaves_s > now_s and p.stages])

    def settled_rates(self, now_s: float) -> list[float]:
        """Per stage, microbatches/s once every arrival has arrived and whoever has given notice
        has gone. Plans aim at these."""
        return self._rates([(p, settled_stages(p, now_s)) for p in self.peers])

    def replicas(self) -> list[int]:
        """Per stage, how many serve it now and have not said that they go."""
        present = [0] * len(self.stages)
        for peer in self.peers:
            if peer.leaves_s == math.inf:
                for stage in peer.stages:
                    present[stage] += 1
        return present

    def throughput(self, now_s: float) -> float:
        """Microbatches/s of the swarm now."""
        return min(self.present_rates(now_s), default=0.0)

    def _rates(self, serving: Sequence[tuple[PeerLoad, tuple[int, ...]]]) -> list[float]:
        totals = [0.0] * len(self.stages)
        sharing: list[tuple[tuple[int, ...], list[float]]] = []
        for peer, stages in serving:
            if len(stages) == 1:
                totals[stages[0]] += self.rate(peer, stages[0])
            elif stages:
                sharing.append((stages, [self.rate(peer, stage) for stage in stages]))
        return share(totals, sharing) if sharing else totals


def settled_stages(peer: PeerLoad, now_s: float) -> tuple[int, ...]:
    """What it serves once everything under way is done; nothing if it has said that it goes."""
    if peer.leaves_s < math.inf:
        return ()
    if peer.arriving is not None and peer.reserved_until_s > now_s:
        return (peer.arriving,)
    return peer.stages


def share(
    totals: Sequence[float], sharing: Sequence[tuple[tuple[int, ...], list[float]]]
) -> list[float]:
    """Rates per stage when each `(stages, full rates)` divides its time where its stages lag.

    Each in turn pours its time into its lowest stages, until nothing changes. For rates of the
    form speed / cost this is the max-min fair division; for others one that can be reached, so the
    result is never too high.
    """
    levels = list(totals)
    given = [[0.0] * len(stages) for stages, _ in sharing]
    for _ in range(_SHARING_ROUNDS):
        change = 0.0
        for number, (stages, full) in enumerate(sharing):
            base = [levels[s] - g for s, g in zip(stages, given[number], strict=True)]
            poured = _pour(base, full)
            for stage, low, old, new in zip(stages, base, given[number], poured, strict=True):
                change = max(change, abs(new - old))
                levels[stage] = low + new
            given[number] = poured
        if change <= _SHARING_EPSILON * max(1.0, max(levels, default=0.0)):
            break
    return levels


def _pour(base: Sequence[float], full: Sequence[float]) -> list[float]:
    """What one peer adds to each of its stages: its time raises the lowest to a common level."""
    order = sorted((level, at) for at, level in enumerate(base) if full[at] > 0)
    poured = [0.0] * len(base)
    weight = spent = 0.0  # time per unit of level, and time to bring those taken to level 0
    level = 0.0
    taken: list[int] = []
    for low, at in order:
        if taken and level <= low:
            break
        weight += 1 / full[at]
        spent += low / full[at]
        taken.append(at)
        level = (1.0 + spent) / weight
    for at in taken:
        poured[at] = max(0.0, level - base[at])
    return poured
