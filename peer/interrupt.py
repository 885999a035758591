"""Ctrl-C of a command: the first leaves in order, the second at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def stop_signals() -> list[signal.Signals]:
    """What asks a command to stop. One that is ignored already, as under nohup, stays so."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [each for each in signals if signal.getsignal(each) is not signal.SIG_IGN]


@contextmanager
def handlers_as_before() -> Iterator[None]:
    """Around an event loop that handles signals: afterwards they do what they did before, where the
    loop itself would leave SIGTERM and SIGHUP to end the process on the spot."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, but an interrupt does not leave its event loop half made: that one would
    complain of what it lacks, and `main` of never having been awaited."""
    try:
        with asyncio.Runner(loop_factory=_whole_loop) as runner:
            return runner.run(main)
    finally:
        main.close()


def _whole_loop() -> asyncio.AbstractEventLoop:
    caught: list[int] = []
    with handlers_as_before():
        for number in stop_signals():
            signal.signal(number, lambda number, frame: caught.append(number))
        loop = asyncio.new_event_loop()
    try:
        if caught:
            signal.raise_signal(caught[0])
    except BaseException:
        loop.close()
        raise
    return loop


def until_interrupted(
    main: Coroutine[Any, Any, T], on_first: Callable[[], Coroutine[Any, Any, bool]] | None = None
) -> T:
    """Run `main`. The first SIGINT, SIGTERM or SIGHUP runs `on_first` and then cancels `main`,
    unless that says it will end by itself; the second ends the process at once.

    Raises KeyboardInterrupt when `main` was cancelled so.
    """

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        task = loop.create_task(main)
        leaving: list[asyncio.Task[None]] = []

        async def leave() -> None:
            ends_itself = False
            try:
                ends_itself = on_first is not None and await on_first()
            finally:
                if not ends_itself:
                    task.cancel()

        def on_signal() -> None:
            if leaving:
                os._exit(130)
            leaving.append(loop.create_task(leave()))

        for number in stop_signals():
            loop.add_signal_handler(number, on_signal)
        try:
            return await task
        except asyncio.CancelledError:
            if leaving:
                raise KeyboardInterrupt from None
            raise
        finally:
            for each in leaving:
                each.cancel()

    try:
        with handlers_as_before():
            return run_loop(guarded())
    finally:
        main.close()
