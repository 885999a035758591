"""Calls made at once: in the order of their answers, and none that waits for another for long.
Work that goes on unless an event is set."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, nullcontext

import pytest

from swarm.sim.virtual_time import run
from swarm.tasks import as_answered, unless

PATIENCE_S = 1.0


class Calls:
    """Each answers with its name, or raises it, after its time."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    async def __call__(self, name: str, after_s: float, *, fails: bool = False) -> str:
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if fails:
            raise ValueError(name)
        return name


def test_in_the_order_of_their_answers_until_one_takes_too_long() -> None:
    async def main() -> None:
        call, loop = Calls(), asyncio.get_running_loop()
        began = loop.time()
        calls = [call("frozen", 1e6), call("slow", 5.8), call("failed", 5.0, fails=True)]
        said = [
            str(task.exception()) if task.exception() else task.result()
            async for task in as_answered([*calls, call("first", 5.0)], PATIENCE_S)
        ]
        assert said == ["failed", "first", "slow"]
        assert loop.time() - began == 5.8 + PATIENCE_S
        assert call.cancelled == ["frozen"]

    run(main(), limit_s=100.0)


def test_who_has_heard_enough_waits_for_nobody() -> None:
    async def main() -> None:
        call, loop = Calls(), asyncio.get_running_loop()
        began = loop.time()
        calls = [call("other", 9.0), call("first", 2.0), call("unheard", 2.0, fails=True)]
        async with aclosing(as_answered(calls, PATIENCE_S)) as answers:
            async for task in answers:
                assert task.result() == "first"
                break
        assert loop.time() - began == 2.0
        assert call.cancelled == ["other"]
        assert len(asyncio.all_tasks()) == 1

    run(main(), limit_s=100.0)


def test_of_nothing_there_is_no_answer() -> None:
    async def main() -> None:
        assert [task async for task in as_answered([], PATIENCE_S)] == []

    run(main(), limit_s=1.0)


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_ends_before_the_event(fails: bool) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="work") if fails else nullcontext():
            done = await unless(asyncio.Event(), Calls()("work", 1.0, fails=fails))
            assert done is not None
            assert done.result() == "work"
        assert len(asyncio.all_tasks()) == 1

    run(main(), limit_s=10.0)


@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_of_the_work_outlives_the_event(cancelled: bool) -> None:
    async def main() -> None:
        call, event, loop = Calls(), asyncio.Event(), asyncio.get_running_loop()
        going = asyncio.create_task(unless(event, call("work", 9.0)))
        loop.call_later(1.0, going.cancel if cancelled else event.set)
        with pytest.raises(asyncio.CancelledError) if cancelled else nullcontext():
            assert await going is None
        assert call.cancelled == ["work"]
        assert len(asyncio.all_tasks()) == 1
        assert loop.time() == pytest.approx(1.0, abs=0.1)

    run(main(), limit_s=10.0)
