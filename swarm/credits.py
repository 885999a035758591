"""How many microbatches may be under way, so that nobody waits for work. Pure.

To keep n replicas busy takes n microbatches, and as many again as are on their way over the wires
meanwhile: rate x transit time (Little's law; what window control calls the bandwidth-delay
product). All of them are held by each stage, so a stage with few replicas holds more at each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SPARE = 2  # per replica, for what is uneven
USUAL = 0.9  # of the microbatches
MOST = 2.0  # times the least


class Transit:
    """How long microbatches are on their way in all, when nothing else is: what nine of ten take.

    Where packets are lost some take half as long again as others, and with no more under way than
    those need that are lucky, devices run out of work. But at most twice the least of two steps:
    what queues behind others in a line that is full takes longer, and more under way would not
    make it faster (BBR's minimal round trip, for the same reason).
    """

    def __init__(self) -> None:
        self._noted: list[float] = []  # in this step
        self._usual: float | None = None  # of the step before
        self._before = self._now = math.inf  # the least

    def begin_step(self) -> None:
        """What was noted longer ago than this and the last step is forgotten."""
        if self._noted:
            ascending = sorted(self._noted)
            self._usual = ascending[math.ceil(USUAL * len(ascending)) - 1]
            self._noted.clear()
            self._before, self._now = self._now, math.inf

    def note(self, elapsed_s: float, timings: Sequence[tuple[float, float, float]]) -> None:
        """A microbatch was answered in `elapsed_s`; per hop, seconds of forward, backward and
        waiting for the device, as its replica says."""
        seconds = max(0.0, elapsed_s - math.fsum(map(math.fsum, timings)))
        self._noted.append(seconds)
        self._now = min(self._now, seconds)

    @property
    def seconds(self) -> float:
        """0 while nothing is known; in the first step the least."""
        least = min(self._before, self._now)
        if self._usual is None:
            return least if least < math.inf else 0.0
        return min(self._usual, MOST * least)


def slots(held: Sequence[Sequence[int]], rate: float, transit_s: float, least: int) -> list[int]:
    """Per stage, how many microbatches may be outstanding at each of its replicas.

    `held` says per stage how many each replica can hold, `rate` how many microbatches the slowest
    stage serves in a second, `least` is given wherever it can be held. Never more than the stage's
    replicas can hold, so a slow stage does not fill the memory of those before it.
    """
    busy, on_the_way = sum(map(len, held)), rate * transit_s
    given = []
    for there in held:
        if not there:
            given.append(least)
            continue
        needed = math.ceil(busy / len(there)) + round(on_the_way / len(there)) + SPARE
        given.append(min(max(least, needed), *there))
    return given
