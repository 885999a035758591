"""At most so many microbatches between forward and backward at one replica: 1F1B's memory bound.

How many: at least what every replica can hold, more where memory allows (`swarm.placement.memory`).
The replica tells its leader, whose credits never exceed what it holds (`swarm.credits`).
"""

from __future__ import annotations

import asyncio
from collections import deque

from peer.calls import count
from swarm.errors import WireError

MAX_SLOTS = 1024  # that a replica says it has; one without a limit says so many


def read_slots(value: object) -> int:
    """How many a replica says that it has. Raises WireError."""
    number = count(value)
    if not 1 <= number <= MAX_SLOTS:
        raise WireError(f"slots are 1 to {MAX_SLOTS}")
    return number


class Slots:
    """A counting semaphore, first come first served, that a replay may exceed.

    A replay must not wait: the slots it would wait for can be held by microbatches that themselves
    wait for it further down the pipeline. `None` slots means no limit (AFAB).
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.held = 0
        self.most_held = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self, *, replay: bool = False) -> None:
        if self.limit is not None and self.held >= self.limit and not replay:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn  # the slot is handed over by `release`, so `held` does not change
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.release()
                raise
            return
        self.held += 1
        self.most_held = max(self.most_held, self.held)

    def release(self) -> None:
        while self._waiting and (self.limit is None or self.held <= self.limit):
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.held -= 1
