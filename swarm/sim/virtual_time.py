"""An event loop whose clock jumps: whole swarms run in milliseconds, and one seed decides all.

Idea from trio's MockClock: when every task waits, time moves at once to the next timer. Nothing
real is waited for, so threads and sockets are refused. All protocol code takes its time from the
running loop (`loop.time`, `asyncio.sleep`, `asyncio.timeout`), so nothing else has to be replaced.

Several simulated processes share the loop. What runs in `process_context(name)`, and every task and
timer it starts, belongs to that process; `stop` halts it as SIGSTOP does, to the last timer, and
`cont` lets it find that time has passed.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
MAX_TURNS = 200_000  # of the loop, at one moment

_process: contextvars.ContextVar[str | None] = contextvars.ContextVar("process", default=None)


def process_context(name: str) -> contextvars.Context:
    """A context for what belongs to the simulated process `name`."""
    context = contextvars.Context()
    context.run(_process.set, name)
    return context


class DeadlockError(RuntimeError):
    """Every task waits for another and no timer is left, or some never wait: time stands still."""


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for `timeout` seconds, moves the loop's clock by them."""

    loop: VirtualTimeLoop
    turns = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.turns = 0 if timeout else self.turns + 1
        if self.turns > MAX_TURNS:
            raise DeadlockError(f"{MAX_TURNS} turns of the loop, and time has not moved")
        if timeout is None:
            waiting = sorted(str(task.get_coro()) for task in asyncio.all_tasks(self.loop))
            raise DeadlockError("all tasks wait for each other:\n  " + "\n  ".join(waiting))
        if timeout > 0:
            self.loop.now += timeout
        return []


def _waits(handle: asyncio.Handle) -> bool:
    """Whether the handle's process is stopped; it is put aside then."""
    loop: VirtualTimeLoop = handle._loop  # type: ignore[attr-defined]
    if handle._context.get(_process) not in loop.stopped:  # type: ignore[attr-defined]
        return False
    loop.deferred.append(handle)
    return True


class _Handle(asyncio.Handle):
    """A callback that waits while its process is stopped."""

    __slots__ = ()

    def _run(self) -> None:
        if not (self._loop.stopped and _waits(self)):  # type: ignore[attr-defined]
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        if not (self._loop.stopped and _waits(self)):  # type: ignore[attr-defined]
            super()._run()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop under virtual time, starting at 0 s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped: set[str] = set()
        self.deferred: list[asyncio.Handle] = []
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def stop_process(self, name: str) -> None:
        """Nothing of that process runs from its next callback on."""
        self.stopped.add(name)

    def continue_process(self, name: str) -> None:
        """What became due meanwhile runs now, in its order."""
        self.stopped.discard(name)
        due, self.deferred = self.deferred, []
        self._ready.extend(due)  # type: ignore[attr-defined]

    def _call_soon(self, callback: Any, args: Any, context: Any) -> _Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("a thread has no place under virtual time: its order is not the seed's")


def run(main: Coroutine[Any, Any, T], *, limit_s: float = 3600.0) -> T:
    """Run `main` under virtual time.

    Raises TimeoutError when `main` takes longer than `limit_s` virtual seconds, DeadlockError when
    nothing can ever happen again, and RuntimeError when `main` leaves a task behind.
    """

    async def limited() -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        try:
            async with asyncio.timeout(limit_s):
                result = await main
        finally:
            for name in sorted(loop.stopped):
                loop.continue_process(name)
        left = sorted(
            str(task.get_coro())
            for task in asyncio.all_tasks()
            if task is not asyncio.current_task() and not task.done()
        )
        if left:
            raise RuntimeError("tasks left behind:\n  " + "\n  ".join(left))
        return result

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(limited())
