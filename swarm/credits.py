"""How many microbatches may be under way, so that nobody waits for work. Pure.

To keep n replicas busy takes n microbatches, and as many again as are on their way over the wires
meanwhile: rate x transit time (Little's law; what window control calls the bandwidth-delay
product). All of them are held by each stage, so a stage with few replicas holds more at each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence

SPARE = 2  # per replica, for what is uneven
RECENT, LONG = 128, 1024  # microbatches
USUAL, LEAST = 0.9, 0.1  # of them
MOST = 1.5  # times what the least take


class Transit:
    """How long microbatches are on their way, computing and waiting aside: what nine of ten take.

    Where packets are lost some take half as long again as others, and with no more under way than
    the lucky ones need, devices run out of work (docs/decisions/under-way.md). But at most half
    as much again as one of ten of the last `LONG`: what queues behind others in a line that is full
    takes longer, and more under way would only make the queue longer (BBR's minimal round trip,
    for the same reason).
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LONG)
        self.seconds = 0.0  # while nothing is known

    def note(self, elapsed_s: float, timings: Sequence[tuple[float, float, float]]) -> None:
        """A microbatch was answered in `elapsed_s`; per hop, seconds of forward, backward and
        waiting for a commit, a slot and the device, as its replica says."""
        self._last.append(max(0.0, elapsed_s - math.fsum(map(math.fsum, timings))))
        recent = list(self._last)[-RECENT:]
        self.seconds = min(_quantile(recent, USUAL), MOST * _quantile(self._last, LEAST))


def _quantile(values: Collection[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


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
