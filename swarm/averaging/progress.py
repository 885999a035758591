"""What a member of an averaging round knows of the others: how far each is, and how fast."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from swarm.net.transport import Stream

MIN_MEASURED_BYTES = 1 << 18
MAX_RATE = 1 << 39


class Rates(NamedTuple):
    """Bytes per second of one member in one round, 0 where it was too short to tell. A link is
    seldom all that a round waits for, so these are what it can do at least."""

    sent: int = 0
    received: int = 0


class Meter:
    """Bytes that crossed in one direction, from the beginning of the first to the end of the
    last."""

    def __init__(self) -> None:
        self._bytes, self._first, self._last = 0, math.inf, 0.0

    def add(self, num_bytes: int, began: float, ended: float) -> None:
        self._bytes += num_bytes
        self._first, self._last = min(self._first, began), max(self._last, ended)

    def rate(self) -> int:
        seconds = self._last - self._first
        if self._bytes < MIN_MEASURED_BYTES or not 0 < seconds < math.inf:
            return 0
        return min(int(self._bytes / seconds), MAX_RATE)


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
    num_sent: int = 0  # sends to it that have completed
    contributed: bool = False  # it has taken all that I have for its part
    collected: bool = False  # I have all sums of its part
    replied: bool = False  # it has taken all sums of my part
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # its stream is no longer served
    seen: tuple[int, ...] = ()
    active_at: float = 0.0
    buffers: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))

    @property
    def complete(self) -> bool:
        return self.contributed and self.collected and self.replied

    def signs_of_life(self) -> tuple[int, ...]:
        received = (s.received_bytes for s in (self.dialled, self.incoming) if s is not None)
        return (*received, self.num_in.value, self.num_sent)
