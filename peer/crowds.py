"""How many calls of one microbatch may be in progress here at once: each holds its tensors.

A leader tries a microbatch anew before it knows what became of the try before, and whoever has the
link can send the same call a thousand times; so where there are too many, the oldest try gives way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from swarm.errors import RefusedError
from swarm.tasks import TaskSet
from swarm.terms import Term

T = TypeVar("T")
Place = tuple[int, int]  # step and index of a microbatch
Try = tuple[Term, int]  # later leaders count theirs anew


class Crowds:
    """At most `most` calls at each place, which run as `tasks`."""

    def __init__(self, most: int, tasks: TaskSet) -> None:
        self.most, self._tasks = most, tasks
        self.at: dict[Place, list[tuple[Try, asyncio.Task[Any]]]] = {}

    async def run(self, place: Place, try_: Try, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` gives. Raises RefusedError: it is not the newest, or a newer try came."""
        here = self.at.setdefault(place, [])
        if len(here) >= self.most:
            oldest = min(here, key=lambda each: each[0])  # of equal ones the first
            if oldest[0] > try_:
                raise RefusedError(f"try {oldest[0][1]} has overtaken try {try_[1]}")
            here.remove(oldest)
            oldest[1].cancel()
        task = self._tasks.spawn(work())
        here.append((try_, task))
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            raise RefusedError("given up here for a newer try") from None
        finally:
            here[:] = [each for each in here if each[1] is not task]
            if not here and self.at.get(place) is here:
                del self.at[place]
