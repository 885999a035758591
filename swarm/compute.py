"""The device executor: one kernel at a time, backward before forward (DESIGN, "The path", 5).

The order of the queue *is* the pipeline schedule. Backward first, together with at most `slots`
microbatches between their forward and their backward per replica, gives 1F1B (PipeDream, arXiv
1806.03377) without any global plan; forward first without a limit gives AFAB (GPipe, arXiv
1811.06965). The event loop never runs a kernel: `ThreadCompute` has one thread per device. Under
virtual time `InlineCompute` runs the same queue on the loop and lets kernels take scripted time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

from swarm.errors import StageFailedError

T = TypeVar("T")


class Kind(IntEnum):
    """What a task computes; its value is its place in the 1F1B queue (lower first)."""

    UPDATE = 0  # optimizer, averaging, hashing: all wait for it
    BACKWARD = 1
    FORWARD = 2
    BACKGROUND = 3


AFAB = {Kind.UPDATE: 0, Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKGROUND: 3}


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What a task returned, and the seconds the device spent on it (waiting excluded)."""

    value: T
    seconds: float


class Compute(Protocol):
    """Runs functions on one device, one at a time. `counts` says how many of each kind ran."""

    counts: Counter[Kind]

    async def run(self, kind: Kind, task: Callable[[], T]) -> Timed[T]:
        """Queue `task` and wait. A cancelled caller takes a task that has not begun off the
        queue; one that has begun completes unseen. An exception of the task is raised as
        StageFailedError with its text."""

    async def aclose(self) -> None:
        """Finish the running task, drop the others. Idempotent."""


class ThreadCompute:
    """One worker thread. `afab` runs forwards before backwards."""

    def __init__(self, *, afab: bool = False, name: str = "compute") -> None:
        self.counts: Counter[Kind] = Counter()
        self.busy_s = 0.0
        self._order = AFAB if afab else {kind: int(kind) for kind in Kind}
        self._queue: list[tuple[int, int, _Job]] = []
        self._sequence = itertools.count()
        self._wake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, kind: Kind, task: Callable[[], T]) -> Timed[T]:
        loop = asyncio.get_running_loop()
        job = _Job(kind, task, loop.create_future(), loop)
        with self._wake:
            if self._stopped:
                raise StageFailedError("the device executor has stopped")
            heapq.heappush(self._queue, (self._order[kind], next(self._sequence), job))
            self._wake.notify()
        return await job.future

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._stopped:
                    self._wake.wait()
                if self._stopped:
                    return
                _, _, job = heapq.heappop(self._queue)
            if job.future.cancelled():
                continue
            began = time.perf_counter()
            try:
                value, error = job.task(), None
            except Exception as caught:
                value, error = None, _as_stage_failure(caught)
            seconds = time.perf_counter() - began
            self.busy_s += seconds
            self.counts[job.kind] += 1
            try:
                job.loop.call_soon_threadsafe(job.finish, value, seconds, error)
            except RuntimeError:  # the loop has been closed: nobody waits any more
                return
            del job, value, error

    async def aclose(self) -> None:
        with self._wake:
            self._stopped = True
            for _, _, job in self._queue:
                job.future.cancel()
            self._queue.clear()
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)


class _Job:
    __slots__ = ("future", "kind", "loop", "task")

    def __init__(
        self,
        kind: Kind,
        task: Callable[[], object],
        future: asyncio.Future,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.kind, self.task, self.future, self.loop = kind, task, future, loop

    def finish(self, value: object, seconds: float, error: Exception | None) -> None:
        if self.future.cancelled():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(Timed(value, seconds))


class InlineCompute:
    """The same queue on the event loop. `seconds_of(kind)` is the virtual time a task takes, if
    whoever runs it does not say."""

    def __init__(
        self, seconds_of: Callable[[Kind], float] = lambda kind: 0.0, *, afab: bool = False
    ) -> None:
        self.counts: Counter[Kind] = Counter()
        self.busy_s = 0.0
        self._seconds_of = seconds_of
        self._order = AFAB if afab else {kind: int(kind) for kind in Kind}
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._sequence = itertools.count()
        self._busy = False

    async def run(
        self, kind: Kind, task: Callable[[], T], seconds: float | None = None
    ) -> Timed[T]:
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (self._order[kind], next(self._sequence), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # the turn was ours already: pass it on
                raise
        self._busy = True
        try:
            seconds = self._seconds_of(kind) if seconds is None else seconds
            if seconds > 0:
                await asyncio.sleep(seconds)
            self.busy_s += seconds
            self.counts[kind] += 1
            try:
                return Timed(task(), seconds)
            except Exception as caught:
                raise _as_stage_failure(caught) from caught
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

    async def aclose(self) -> None:
        for _, _, turn in self._waiting:
            turn.cancel()


class WatchedCompute:
    """Another executor, and for how long its device has finished nothing though it has work.

    That is how a device that hangs is told from one that is slow or waits (`swarm.patience`): the
    process around it lives on and answers.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.counts = compute.counts
        self._waiting: Counter[Kind] = Counter()
        self._since = 0.0  # when it last finished something, or was given work when it had none

    async def run(self, kind: Kind, task: Callable[[], T]) -> Timed[T]:
        loop = asyncio.get_running_loop()
        if not self._waiting.total():
            self._since = loop.time()
        self._waiting[kind] += 1
        try:
            timed = await self._compute.run(kind, task)
            self._since = loop.time()
            return timed
        except StageFailedError:
            self._since = loop.time()
            raise
        finally:
            self._waiting[kind] -= 1

    def silent_s(self) -> float:
        """Seconds since the device finished anything; 0 when it has nothing to do."""
        if not self._waiting.total():
            return 0.0
        return asyncio.get_running_loop().time() - self._since

    @property
    def working(self) -> bool:
        """Whether anything is queued or runs."""
        return self._waiting.total() > 0

    @property
    def updating(self) -> bool:
        """Whether something other than microbatches is queued or runs."""
        return self._waiting[Kind.UPDATE] + self._waiting[Kind.BACKGROUND] > 0

    async def aclose(self) -> None:
        await self._compute.aclose()


def _as_stage_failure(error: Exception) -> Exception:
    if isinstance(error, StageFailedError):
        return error
    failure = StageFailedError(f"{type(error).__name__}: {str(error)[:300]}")
    failure.__cause__ = error
    # Its frames hold half a graph, and whoever keeps the error would keep that: after one that was
    # for want of memory there would be less of it.
    traceback.clear_frames(error.__traceback__)
    return failure
