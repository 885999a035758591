"""How many calls of one kind may be in progress here at once: each holds its tensors.

A leader tries a microbatch anew before all have heard that it gave up the try before, and whoever
has the link can send the same call a thousand times; so where there are too many, the oldest try
gives way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from swarm.errors import RefusedError
from swarm.tasks import TaskSet
from swarm.terms import Term

T = TypeVar("T")
Place = TypeVar("Place")
Try = tuple[Term, int]  # later leaders count theirs anew


class Crowds(Generic[Place]):
    """At most `most` calls at each place, which run as `tasks`."""

    def __init__(self, most: int, tasks: TaskSet) -> None:
        self.most, self.tasks = most, tasks
        self.at: dict[Place, dict[asyncio.Task[Any], Try]] = {}

    async def run(self, place: Place, try_: Try, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` gives. Raises RefusedError: it is not the newest, or a newer try came."""
        here = self.at.setdefault(place, {})
        if len(here) >= self.most:
            oldest = min(here, key=here.__getitem__)  # of equal ones the first
            if here[oldest] > try_:
                raise RefusedError(f"try {here[oldest][1]} has overtaken try {try_[1]}")
            del here[oldest]
            oldest.cancel()
        task = self.tasks.spawn(work())
        here[task] = try_
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            what = "given up here" if task in here else "given up here for a newer try"
            raise RefusedError(what) from None
        finally:
            here.pop(task, None)
            if not here and self.at.get(place) is here:
                del self.at[place]
