"""Virtual time jumps, and refuses whatever would make a run depend on anything but its seed."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from swarm.sim.virtual_time import DeadlockError, run


def test_an_hour_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3599)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run(main()) == 3599
    assert time.perf_counter() - began < 5


def test_timers_fire_in_order() -> None:
    fired: list[int] = []

    async def one(number: int) -> None:
        await asyncio.sleep(number)
        fired.append(number)

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in (3, 1, 2)))

    run(main())
    assert fired == [1, 2, 3]


def test_a_deadlock_is_named() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):  # the limit is a timer itself, so it comes first
        run(main(), limit_s=10)

    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    from swarm.sim.virtual_time import VirtualTimeLoop

    loop = VirtualTimeLoop()
    task = loop.create_task(stuck())
    with pytest.raises(DeadlockError, match="stuck"):
        loop.run_until_complete(task)
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


def test_a_task_left_behind_is_named() -> None:
    async def forgotten() -> None:
        await asyncio.sleep(1000)

    async def main() -> None:
        main.task = asyncio.create_task(forgotten())  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    with pytest.raises(RuntimeError, match="forgotten"):
        run(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="thread"):
        run(main())


def test_a_stopped_process_does_nothing_until_it_continues() -> None:
    """Its tasks, its timers, and what others want of it; then all at once, in order."""
    from swarm.sim.virtual_time import VirtualTimeLoop, process_context

    said: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        asked = asyncio.Event()

        async def ticks() -> None:
            for _ in range(3):
                await asyncio.sleep(1.0)
                said.append(("tick", loop.time()))

        async def answers() -> None:
            await asked.wait()
            said.append(("answer", loop.time()))

        tasks = [process_context("p").run(loop.create_task, each()) for each in (ticks, answers)]
        await asyncio.sleep(1.5)
        loop.stop_process("p")
        asked.set()
        await asyncio.sleep(10.0)
        assert said == [("tick", 1.0)]
        loop.continue_process("p")
        await asyncio.gather(*tasks)

    run(main())
    assert said == [("tick", 1.0), ("answer", 11.5), ("tick", 11.5), ("tick", 12.5)]


def test_a_run_that_fails_while_a_process_is_stopped_ends() -> None:
    from swarm.sim.virtual_time import VirtualTimeLoop, process_context

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        main.task = process_context("p").run(loop.create_task, asyncio.sleep(5.0))  # type: ignore[attr-defined]
        loop.stop_process("p")
        await asyncio.sleep(1.0)
        raise ValueError("as planned")

    with pytest.raises(ValueError, match="as planned"):
        run(main())


def test_time_that_stands_still_is_noticed() -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(DeadlockError, match="not moved"):
        run(main())
