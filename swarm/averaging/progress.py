"""What a member of an averaging round knows of the others: how far each is, and how fast."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np

from swarm.net.transport import Stream

MIN_MEASURED_BYTES = 1 << 18
MAX_RATE = 1 << 25  # of one stream; beyond, it is the machine that is measured and not its line

Rates = tuple[int, ...]  # of a round's members, in their order: bytes/s that came in; 0 unknown


class Meter:
    """How fast a member's contributions come in while they are waited for.

    Who is ahead of the others is not read for a while, and then found in a buffer: that counts as
    fast, which it is beside those. What the slowest is worth, everybody waits for, so it is
    measured as it is. (At the sender, bytes are gone as soon as a buffer has them.)
    """

    def __init__(self) -> None:
        self._bytes, self._seconds = 0, 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self._bytes += num_bytes
        self._seconds += seconds

    def rate(self) -> int:
        if self._bytes < MIN_MEASURED_BYTES:
            return 0
        return min(int(self._bytes / max(self._seconds, 1e-9)), MAX_RATE)


class Count:
    """A number that grows until the round ends, and tasks that wait for it to."""

    def __init__(self) -> None:
        self.value = 0
        self._stopped = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    async def reach(self, value: int) -> None:
        """Return once the number is `value`, or the round has ended."""
        if self.value < value and not self._stopped:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (value, next(self._order), future))
            await future

    def advance(self) -> None:
        self.value += 1
        self._wake(self.value)

    def stop(self) -> None:
        self._stopped = True
        while self._waiting:
            self._wake(self._waiting[0][0])

    def _wake(self, value: int) -> None:
        while self._waiting and self._waiting[0][0] <= value:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)


@dataclass(eq=False)
class Link:
    """Another member, and how far the exchange with it is."""

    index: int
    member: str
    dialled: Stream | None = None
    incoming: Stream | None = None
    reply: asyncio.Task[None] | None = None
    num_in: Count = field(default_factory=Count)  # chunks of my part that have come from it
    contributed: bool = False  # it has taken all that I have for its part
    received: bool = False  # all that it has for my part has come in
    collected: bool = False  # I have all sums of its part
    taken: bool = False  # of a direct round: it has said that it has all
    replied: bool = False  # it has taken all sums of my part
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # its stream is no longer served
    seen: tuple[int, ...] = ()
    active_at: float = 0.0
    meter: Meter = field(default_factory=Meter)
    buffers: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))

    @property
    def complete(self) -> bool:
        return self.contributed and self.received and self.collected and self.replied

    def signs_of_life(self) -> tuple[int, ...]:
        streams = [each for each in (self.dialled, self.incoming) if each is not None]
        passed = (count for each in streams for count in (each.received_bytes, each.sent_bytes))
        return (len(streams), self.num_in.value, *passed)
