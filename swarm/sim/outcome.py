"""What a simulated run amounted to, and the optimum it is measured against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.placement import optimum

RECOVERED = 0.95  # of the optimum
BINS = 600
EXACT_PEERS = 500  # also the most that are simulated microbatch by microbatch


class Reach:
    """The most that the peers added could do together, as they come and go.

    Exact for equal speeds, else the bound of `swarm.placement.optimum` up to 500 peers, and above
    that the sum of speeds over the sum of costs, which bounds it too. `divisible`: that sum in any
    case, for it also bounds peers that divide their time between stages.
    """

    def __init__(self, costs: Sequence[float], *, divisible: bool = False) -> None:
        self.costs = list(costs)
        self.divisible = divisible
        self.speeds: Counter[float] = Counter()
        self.count = 0
        self.sum = 0.0
        self._known: dict[tuple[float, int], float] = {}
        self._value: float | None = 0.0

    def add(self, speed: float) -> None:
        self.speeds[speed] += 1
        self.count += 1
        self.sum += speed
        self._value = None

    def remove(self, speed: float) -> None:
        self.speeds[speed] -= 1
        if not self.speeds[speed]:
            del self.speeds[speed]
        self.count -= 1
        self.sum = self.sum - speed if self.count else 0.0
        self._value = None

    @property
    def value(self) -> float:
        """Microbatches/s."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    def _compute(self) -> float:
        if self.divisible:
            return self.sum / sum(self.costs)
        if self.count < len(self.costs):
            return 0.0
        if len(self.speeds) == 1:
            key = (next(iter(self.speeds)), self.count)
            if key not in self._known:
                self._known[key] = optimum(self.costs, [key[0]] * self.count)
            return self._known[key]
        if self.count <= EXACT_PEERS:
            return optimum(self.costs, list(self.speeds.elements()))
        return self.sum / sum(self.costs)


@dataclass(slots=True)
class Outcome:
    """Integrals over a run; throughputs are microbatches/s, bins are equal parts of the run.

    `optimum`: for the peers alive; `reachable`: for those that could have downloaded a stage since
    they came, which also bounds whoever knows the future. `stalled_s`: with a stage that nobody
    serves. `spells_s`: every time below 95 % of the optimum, in seconds.
    """

    policy: str
    seed: int
    seconds: float
    work: float = 0.0
    optimum_work: float = 0.0
    reachable_work: float = 0.0
    redone: float = 0.0
    stalled_s: float = 0.0
    moves: int = 0
    seconds_fetched: int = 0  # second stages
    joins: int = 0
    leaves: int = 0
    peer_seconds: float = 0.0
    spells_s: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=lambda: [0.0] * BINS)
    possible: list[float] = field(default_factory=lambda: [0.0] * BINS)
    _below_since: float | None = None

    @property
    def relative(self) -> float:
        """Throughput relative to the optimum for the peers alive."""
        return self.work / self.optimum_work if self.optimum_work else 0.0

    @property
    def bound(self) -> float:
        """The same of the clairvoyant bound."""
        return self.reachable_work / self.optimum_work if self.optimum_work else 0.0

    def pass_time(
        self, start: float, end: float, rate: float, best: float, reachable: float, peers: int
    ) -> None:
        """From `start` to `end` these held; `rate` is what the swarm was able to do."""
        span = end - start
        self.optimum_work += best * span
        self.reachable_work += reachable * span
        self.peer_seconds += peers * span
        if rate <= 0 < best:
            self.stalled_s += span
        if rate < RECOVERED * best:
            if self._below_since is None:
                self._below_since = start
        elif self._below_since is not None:
            self.spells_s.append(start - self._below_since)
            self._below_since = None
        self._spread(self.possible, start, end, best)

    def did(self, start: float, end: float, work: float) -> None:
        """So many microbatches were done from `start` to `end`, which may be one moment."""
        self.work += work
        if end > start:
            self._spread(self.done, start, end, work / (end - start))
        else:
            self.done[self._bin(end)] += work * BINS / self.seconds

    def _spread(self, bins: list[float], start: float, end: float, rate: float) -> None:
        width = self.seconds / BINS
        while start < end:
            at = self._bin(start)
            until = min(end, (at + 1) * width) if at < BINS - 1 else end
            bins[at] += rate * (until - start) / width
            start = until

    def _bin(self, time_s: float) -> int:
        return min(int(time_s * BINS / self.seconds + 1e-9), BINS - 1)

    def finish(self, now_s: float) -> None:
        if self._below_since is not None:
            self.spells_s.append(now_s - self._below_since)
            self._below_since = None
