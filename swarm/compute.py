"""The device executor: one task at a time, in the order of `KernelQueue`; a device that runs beside
its thread has the kernels of the next ones queued.

The order of the queue *is* the pipeline schedule. One forward, one backward in turn where both
wait, together with at most `slots` microbatches between the two per replica, gives 1F1B (PipeDream,
arXiv 1806.03377) without any global plan; forward first without a limit gives AFAB (GPipe, arXiv
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
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeAlias, TypeVar

from swarm.errors import StageFailedError

T = TypeVar("T")


class Kind(IntEnum):
    """What a task computes, the most urgent first; of forward and backward see `KernelQueue`."""

    UPDATE = 0  # optimizer, averaging, hashing: all wait for it
    BACKWARD = 1
    FORWARD = 2
    BACKGROUND = 3  # when nothing else waits


class KernelQueue(Generic[T]):
    """What waits for a device, in the order of the pipeline schedule. Pure.

    Updates first. Then the oldest step, which is the next to be committed: what is computed ahead
    of it (*delayed*) fills the time that it leaves. Of one step a backward, but a forward after a
    backward: with backward first always, those that come together go on together, and the stages
    below wait meanwhile (docs/decisions/kernel-order.md). `afab` takes a forward first always.
    """

    def __init__(self, *, afab: bool = False) -> None:
        self._afab = afab
        self._waiting: dict[Kind, list[tuple[int, int, T]]] = {kind: [] for kind in Kind}
        self._sequence = itertools.count()
        self._last = Kind.FORWARD  # of forward and backward, what ran last

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, kind: Kind, step: int, item: T) -> None:
        heapq.heappush(self._waiting[kind], (step, next(self._sequence), item))

    def pop(self) -> T | None:
        """The next one; None when nothing waits."""
        kind = self._next_kind()
        return None if kind is None else heapq.heappop(self._waiting[kind])[2]

    def began(self, kind: Kind) -> None:
        """The device has begun such a task, whether it waited or not."""
        if kind in (Kind.FORWARD, Kind.BACKWARD):
            self._last = kind

    def drain(self) -> list[T]:
        """All that wait; none do any more."""
        items = [item for each in self._waiting.values() for _, _, item in each]
        for each in self._waiting.values():
            each.clear()
        return items

    def _next_kind(self) -> Kind | None:
        forward, backward = self._waiting[Kind.FORWARD], self._waiting[Kind.BACKWARD]
        if not self._waiting[Kind.UPDATE] and forward and backward:
            if forward[0][0] != backward[0][0]:
                return Kind.FORWARD if forward[0][0] < backward[0][0] else Kind.BACKWARD
            forward_next = self._afab or self._last is Kind.BACKWARD
            return Kind.FORWARD if forward_next else Kind.BACKWARD
        return next((kind for kind in Kind if self._waiting[kind]), None)


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What a task returned, and the seconds the device spent on it (waiting excluded)."""

    value: T
    seconds: float


@dataclass(frozen=True, slots=True)
class Launched(Generic[T]):
    """What a task returns that has only queued its kernels, on a device that runs them beside this
    thread. `finish` waits for them and makes the result; `done`: it would not have to wait."""

    finish: Callable[[], T]
    done: Callable[[], bool] = lambda: False


Result: TypeAlias = T | Launched[T]
Task: TypeAlias = Callable[[], Result[T]]


def waited_for(result: Result[T]) -> T:
    """What a task gives in the end."""
    return result.finish() if isinstance(result, Launched) else result


class Compute(Protocol):
    """Runs functions on one device, one at a time. `counts` says how many of each kind ran."""

    counts: Counter[Kind]

    async def run(self, kind: Kind, task: Task[T], step: int = 0) -> Timed[T]:
        """Queue `task`, of training step `step`, and wait. A cancelled caller takes a task that has
        not begun off the queue; one that has begun completes unseen. An exception of the task is
        raised as StageFailedError with its text."""

    async def aclose(self) -> None:
        """Finish the running task, drop the others. Idempotent."""


MOST_UNDER_WAY = 2  # a forward is queued in more time than it takes, a backward in less


def _is_done(launched: Launched[object]) -> bool:
    """Whether to finish it. Also where the device fails: `finish` says what it was."""
    try:
        return launched.done()
    except Exception:
        return True


class ThreadCompute:
    """One worker thread. `afab` runs forwards before backwards.

    While the device runs the kernels of forwards and backwards (`Launched`), at most
    `MOST_UNDER_WAY`, the thread queues those of one more, and then waits for the oldest. Tasks of
    other kinds find the device idle, and may wait for it themselves.
    """

    def __init__(self, *, afab: bool = False, name: str = "compute") -> None:
        self.counts: Counter[Kind] = Counter()
        self.busy_s = 0.0
        self._queue: KernelQueue[_Job] = KernelQueue(afab=afab)
        self._wake = threading.Condition()
        self._stopped = False
        # The worker's alone, as what follows.
        self._under_way: deque[tuple[_Job, Launched]] = deque()
        self._idle_since = 0.0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, kind: Kind, task: Task[T], step: int = 0) -> Timed[T]:
        loop = asyncio.get_running_loop()
        job = _Job(kind, task, loop.create_future(), loop)
        with self._wake:
            if self._stopped:
                raise StageFailedError("the device executor has stopped")
            self._queue.push(kind, step, job)
            self._wake.notify()
        return await job.future

    def _work(self) -> None:
        while (job := self._next()) is not None or self._under_way:
            if job is None:
                self._complete()
            elif job.kind not in (Kind.FORWARD, Kind.BACKWARD):
                self._complete_all()
            if job is not None and not job.future.cancelled():
                self._queue.began(job.kind)
                self._begin(job)
            del job

    def _next(self) -> _Job | None:
        """What to do now; None: nothing, until the oldest that is under way has been completed or,
        with nothing under way, for ever."""
        with self._wake:
            while (job := self._queue.pop()) is None and not self._stopped:
                if self._under_way:
                    return None
                self._wake.wait()
            return job

    def _begin(self, job: _Job) -> None:
        job.began = time.perf_counter()
        try:
            value, error = job.task(), None
        except Exception as caught:
            value, error = None, _as_stage_failure(caught)
        if isinstance(value, Launched):
            self._under_way.append((job, value))
            while self._under_way and (
                len(self._under_way) > MOST_UNDER_WAY or _is_done(self._under_way[0][1])
            ):
                self._complete()
        else:
            self._complete_all()
            self._tell(job, value, error)

    def _complete_all(self) -> None:
        while self._under_way:
            self._complete()

    def _complete(self) -> None:
        """The oldest that is under way."""
        job, launched = self._under_way.popleft()
        try:
            value, error = waited_for(launched), None
        except Exception as caught:
            value, error = None, _as_stage_failure(caught)
        self._tell(job, value, error)

    def _tell(self, job: _Job, value: object, error: Exception | None) -> None:
        """Its result. The device has spent on it the time since it was free for it."""
        now = time.perf_counter()
        seconds, self._idle_since = now - max(job.began, self._idle_since), now
        self.busy_s += seconds
        self.counts[job.kind] += 1
        try:
            job.loop.call_soon_threadsafe(job.finish, value, seconds, error)
        except RuntimeError:  # the loop has been closed: nobody waits any more
            with self._wake:
                self._stopped = True
                self._queue.drain()

    async def aclose(self) -> None:
        with self._wake:
            self._stopped = True
            for job in self._queue.drain():
                job.future.cancel()
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)


class _Job:
    __slots__ = ("began", "future", "kind", "loop", "task")

    def __init__(
        self,
        kind: Kind,
        task: Callable[[], object],
        future: asyncio.Future,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.kind, self.task, self.future, self.loop = kind, task, future, loop
        self.began = 0.0

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
        self._queue: KernelQueue[asyncio.Future[None]] = KernelQueue(afab=afab)
        self._busy = False

    async def run(
        self, kind: Kind, task: Task[T], step: int = 0, *, seconds: float | None = None
    ) -> Timed[T]:
        await self._turn(kind, step)
        try:
            seconds = self._seconds_of(kind) if seconds is None else seconds
            if seconds > 0:
                await asyncio.sleep(seconds)
            self.busy_s += seconds
            self.counts[kind] += 1
            try:
                return Timed(waited_for(task()), seconds)
            except Exception as caught:
                raise _as_stage_failure(caught) from caught
        finally:
            self._next()

    async def _turn(self, kind: Kind, step: int) -> None:
        """Wait until the device is free for it. Whoever has had its turn calls `_next`."""
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.push(kind, step, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # the turn was ours already: pass it on
                raise
        self._busy = True
        self._queue.began(kind)

    def _next(self) -> None:
        while (turn := self._queue.pop()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

    async def aclose(self) -> None:
        for turn in self._queue.drain():
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

    async def run(self, kind: Kind, task: Task[T], step: int = 0) -> Timed[T]:
        loop = asyncio.get_running_loop()
        if not self._waiting.total():
            self._since = loop.time()
        self._waiting[kind] += 1
        try:
            timed = await self._compute.run(kind, task, step)
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
