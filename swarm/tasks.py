"""Background tasks that belong to one object and end with it; calls made at once; work that an
event ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class TaskSet:
    """Owns tasks: nothing it started outlives `aclose` or `abort`, and no failure goes unseen."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.closed = False

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Start a task. Failures nobody awaits are logged when it ends."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name or None)
        if self.closed:
            task.cancel()
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("task %s failed: %s", task.get_name(), error, exc_info=error)

    def __len__(self) -> int:
        return len(self._tasks)

    def abort(self) -> None:
        """Cancel everything without waiting, as the end of a process would."""
        self.closed = True
        for task in list(self._tasks):
            task.cancel()

    async def aclose(self) -> None:
        """Cancel everything and wait until it has ended (the calling task excepted)."""
        self.abort()
        current = asyncio.current_task()
        await asyncio.gather(
            *(task for task in list(self._tasks) if task is not current), return_exceptions=True
        )


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> asyncio.Task[T] | None:
    """Work until `event` is set: the task if it ended first, whose error is raised, else None.

    Nothing of it goes on afterwards, also when this is cancelled; what it returns or raises while
    it is being ended is lost.
    """
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return None
        await working
        return working
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def as_answered(
    calls: Iterable[Coroutine[Any, Any, T]], patience_s: float
) -> AsyncGenerator[asyncio.Task[T], None]:
    """Make calls at once; their tasks in the order in which they end.

    After each the others have `patience_s` seconds more. What has not ended by then, or when the
    generator is closed, is cancelled.
    """
    waiting = [asyncio.create_task(call) for call in calls]
    timeout = None
    try:
        while waiting:
            await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in waiting if task.done()]
            if not ended:
                return
            for task in ended:
                waiting.remove(task)
                yield task
            timeout = patience_s
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
