"""Both device executors: the same order, the same errors; nothing runs for those who left."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable

import pytest
import torch

from swarm import compute as compute_module
from swarm.compute import Compute, InlineCompute, KernelQueue, Kind, Launched, ThreadCompute
from swarm.errors import StageFailedError
from swarm.sim.virtual_time import run

Check = Callable[[Compute, bool], Awaitable[None]]
BOTH = (Kind.BACKGROUND, Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Kind.FORWARD, Kind.BACKWARD)


def on_both(check: Check, afab: bool = False) -> None:
    """Run a check on the inline executor under virtual time and on a real thread."""
    run(check(InlineCompute(lambda kind: 0.01, afab=afab), False))  # type: ignore[arg-type]

    async def threaded() -> None:
        compute = ThreadCompute(afab=afab)
        try:
            async with asyncio.timeout(20):
                await check(compute, True)
        finally:
            await compute.aclose()

    asyncio.run(threaded())


async def occupied(compute: Compute, real: bool) -> Callable[[], Awaitable[None]]:
    """Keep the device busy; the result lets it go on."""
    if real:
        gate, begun = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold() -> None:
            loop.call_soon_threadsafe(begun.set)
            gate.wait(20)

        task = asyncio.create_task(compute.run(Kind.UPDATE, hold))
        await begun.wait()
    else:
        task = asyncio.create_task(compute.run(Kind.UPDATE, lambda: None))
        await asyncio.sleep(0)

    async def release() -> None:
        if real:
            gate.set()
        await task

    return release


@pytest.mark.parametrize(
    ("afab", "expected"),
    [(False, [3, 2, 1, 5, 4, 0]), (True, [3, 1, 4, 2, 5, 0])],
)
def test_order_of_the_queue(afab: bool, expected: list[int]) -> None:
    async def check(compute: Compute, real: bool) -> None:
        release = await occupied(compute, real)
        done: list[int] = []

        def task(number: int) -> Callable[[], None]:
            return lambda: done.append(number)

        tasks = [
            asyncio.create_task(compute.run(kind, task(number))) for number, kind in enumerate(BOTH)
        ]
        await asyncio.sleep(0)
        await release()
        await asyncio.gather(*tasks)
        assert done == expected
        assert compute.counts[Kind.FORWARD] == 2

    on_both(check, afab)


@pytest.mark.parametrize("afab", [False, True])
def test_an_older_step_goes_first(afab: bool) -> None:
    """All of it but for updates: it is the next to be committed."""
    queue: KernelQueue[str] = KernelQueue(afab=afab)
    for step in (8, 7):
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.FORWARD, Kind.UPDATE):
            queue.push(kind, step, f"{kind.name} {step}")
    order = []
    while (item := queue.pop()) is not None:
        queue.began(Kind[item.partition(" ")[0]])
        order.append(item.replace("WARD", ""))
    turns = ["FOR", "FOR", "BACK"] if afab else ["BACK", "FOR", "FOR"]
    in_turns = [f"{kind} {step}" for step in (7, 8) for kind in turns]
    assert order == ["UPDATE 7", "UPDATE 8", *in_turns]


@pytest.mark.parametrize("last", [Kind.FORWARD, Kind.BACKWARD])
def test_a_forward_follows_a_backward_whatever_came_between(last: Kind) -> None:
    """An update or a background task changes nothing about whose turn it is."""
    queue: KernelQueue[Kind] = KernelQueue()
    for kind in (last, Kind.UPDATE, Kind.BACKGROUND):
        queue.began(kind)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        queue.push(kind, 0, kind)
    assert queue.pop() is (Kind.FORWARD if last is Kind.BACKWARD else Kind.BACKWARD)
    assert len(queue.drain()) == 1
    assert queue.pop() is None


def test_value_time_and_failure() -> None:
    async def check(compute: Compute, real: bool) -> None:
        timed = await compute.run(Kind.FORWARD, lambda: 7)
        assert timed.value == 7
        assert timed.seconds >= 0.0

        def fail() -> None:
            raise ValueError("of shape (3,)")

        with pytest.raises(StageFailedError, match=r"ValueError: of shape \(3,\)"):
            await compute.run(Kind.FORWARD, fail)
        assert (await compute.run(Kind.FORWARD, lambda: 8)).value == 8

    on_both(check)


def test_a_failure_holds_nothing_of_what_failed() -> None:
    """Its traceback would: half a graph, which who keeps the error would keep."""

    async def check(compute: Compute, real: bool) -> None:
        held: list[weakref.ref[torch.Tensor]] = []

        def fail() -> None:
            activation = torch.ones(3)
            held.append(weakref.ref(activation))
            raise RuntimeError("out of memory")

        with pytest.raises(StageFailedError, match="out of memory") as failed:
            await compute.run(Kind.FORWARD, fail)
        await compute.run(Kind.FORWARD, lambda: None)
        gc.collect()
        assert failed.value.__cause__ is not None
        assert held[0]() is None

    on_both(check)


def test_a_task_whose_caller_left_is_not_run() -> None:
    async def check(compute: Compute, real: bool) -> None:
        release = await occupied(compute, real)
        ran: list[str] = []
        left = asyncio.create_task(compute.run(Kind.BACKWARD, lambda: ran.append("left")))
        stays = asyncio.create_task(compute.run(Kind.FORWARD, lambda: ran.append("stays")))
        await asyncio.sleep(0)
        left.cancel()
        await release()
        await stays
        assert ran == ["stays"]
        assert compute.counts[Kind.BACKWARD] == 0

    on_both(check)


def test_closing_drops_what_waits() -> None:
    async def check(compute: Compute, real: bool) -> None:
        release = await occupied(compute, real)
        waiting = asyncio.create_task(compute.run(Kind.FORWARD, lambda: None))
        await asyncio.sleep(0)
        closing = asyncio.create_task(compute.aclose())
        await asyncio.sleep(0)
        await release()
        await closing
        with pytest.raises(asyncio.CancelledError):
            await waiting

    on_both(check)


def test_the_thread_never_blocks_the_loop() -> None:
    async def main() -> None:
        compute = ThreadCompute()
        gate = threading.Event()
        kernel = asyncio.create_task(compute.run(Kind.FORWARD, lambda: gate.wait(20)))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not kernel.done()
        gate.set()
        assert (await kernel).value is True
        await compute.aclose()
        with pytest.raises(StageFailedError, match="stopped"):
            await compute.run(Kind.FORWARD, lambda: None)

    asyncio.run(main())


class Device:
    """Runs the kernels of what has been launched when it is told to; a thread notes what happens
    to each, and a test waits for that."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._changed = threading.Condition()

    def note(self, what: str) -> None:
        with self._changed:
            self.log.append(what)
            self._changed.notify_all()

    def _await(self, what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: what in self.log, 20), self.log

    async def has(self, what: str) -> None:
        await asyncio.to_thread(self._await, what)

    def task(self, name: str, result: object = None) -> Callable[[], Launched[object]]:
        device = self

        def finish() -> object:
            device.note(f"{name} waited for")
            device._await(f"{name} has run")
            device.note(f"{name} finished")
            if isinstance(result, Exception):
                raise result
            return result

        def launch() -> Launched[object]:
            device.note(f"{name} launched")
            return Launched(finish, lambda: f"{name} has run" in device.log)

        return launch


def on_a_thread(check: Callable[[ThreadCompute, Device], Awaitable[None]]) -> Device:
    device = Device()

    async def main() -> None:
        compute = ThreadCompute()
        try:
            async with asyncio.timeout(20):
                await check(compute, device)
        finally:
            await compute.aclose()

    asyncio.run(main())
    return device


def test_the_kernels_of_one_more_are_queued_while_a_device_has_those_of_two() -> None:
    async def check(compute: ThreadCompute, device: Device) -> None:
        release = await occupied(compute, True)
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD, Kind.BACKWARD)
        running = [
            asyncio.create_task(compute.run(kind, device.task(name, name)))
            for kind, name in zip(kinds, "abcd", strict=True)
        ]
        await asyncio.sleep(0)
        await release()
        await device.has("b waited for")  # the schedule has it first
        assert device.log == ["b launched", "a launched", "c launched", "b waited for"]
        device.note("b has run")
        assert (await running[1]).value == "b"
        await device.has("a waited for")
        assert device.log[5:] == ["b finished", "d launched", "a waited for"]
        for name in "acd":
            device.note(f"{name} has run")
        assert [(await each).value for each in running] == ["a", "b", "c", "d"]
        assert compute.counts == {Kind.UPDATE: 1, Kind.FORWARD: 1, Kind.BACKWARD: 3}

    on_a_thread(check)


def test_what_is_done_when_the_next_is_queued_does_not_wait_for_one_more() -> None:
    async def check(compute: ThreadCompute, device: Device) -> None:
        release = await occupied(compute, True)
        running = [
            asyncio.create_task(compute.run(Kind.FORWARD, device.task(name))) for name in "abc"
        ]
        await asyncio.sleep(0)
        for name in "ab":
            device.note(f"{name} has run")
        await release()
        await device.has("c waited for")
        finished = [what for what in device.log if "run" not in what and "waited" not in what]
        assert finished == ["a launched", "a finished", "b launched", "b finished", "c launched"]
        device.note("c has run")
        await asyncio.gather(*running)

    on_a_thread(check)


@pytest.mark.parametrize("kind", [Kind.UPDATE, Kind.BACKGROUND])
def test_whatever_else_there_is_to_do_finds_the_device_idle(kind: Kind) -> None:
    async def check(compute: ThreadCompute, device: Device) -> None:
        forward = asyncio.create_task(compute.run(Kind.FORWARD, device.task("a")))
        await device.has("a waited for")
        other = asyncio.create_task(compute.run(kind, lambda: device.note("other")))
        await asyncio.sleep(0)
        device.note("a has run")
        await asyncio.gather(forward, other)
        assert device.log[-2:] == ["a finished", "other"]

    on_a_thread(check)


def test_what_fails_once_its_kernels_have_run_is_its_own_failure() -> None:
    async def check(compute: ThreadCompute, device: Device) -> None:
        tasks = [device.task("a", ValueError("no number")), device.task("b", 5)]
        for name in "ab":
            device.note(f"{name} has run")
        ended = await asyncio.gather(
            *(compute.run(Kind.FORWARD, task) for task in tasks), return_exceptions=True
        )
        assert isinstance(ended[0], StageFailedError)
        assert str(ended[0]) == "ValueError: no number"
        assert getattr(ended[1], "value", None) == 5

    on_a_thread(check)


def test_a_device_that_cannot_even_be_asked_fails_its_task_alone() -> None:
    """As after an assertion on a GPU, which every later call of CUDA reports."""

    def lost() -> bool:
        raise RuntimeError("device-side assert triggered")

    async def check(compute: ThreadCompute, device: Device) -> None:
        release = await occupied(compute, True)
        tasks = [lambda: Launched(lost, lost), device.task("b", 5)]
        running = [asyncio.create_task(compute.run(Kind.FORWARD, task)) for task in tasks]
        await asyncio.sleep(0)
        device.note("b has run")
        await release()
        with pytest.raises(StageFailedError, match="device-side assert"):
            await running[0]
        assert (await running[1]).value == 5

    on_a_thread(check)


def test_a_launch_that_fails_takes_nothing_along() -> None:
    def broken() -> None:
        raise ValueError("no memory")

    async def check(compute: ThreadCompute, device: Device) -> None:
        first = asyncio.create_task(compute.run(Kind.FORWARD, device.task("a", 5)))
        await device.has("a waited for")
        second = asyncio.create_task(compute.run(Kind.FORWARD, broken))
        await asyncio.sleep(0)
        device.note("a has run")
        assert (await first).value == 5
        with pytest.raises(StageFailedError, match="no memory"):
            await second

    on_a_thread(check)


def test_closing_waits_for_what_is_under_way() -> None:
    async def check(compute: ThreadCompute, device: Device) -> None:
        running = asyncio.create_task(compute.run(Kind.FORWARD, device.task("a", 5)))
        await device.has("a waited for")
        closing = asyncio.create_task(compute.aclose())
        await asyncio.sleep(0)
        device.note("a has run")
        await closing
        assert (await running).value == 5

    on_a_thread(check)


def test_no_second_of_a_device_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is launched at 1 and done at 10, the other launched at 2 and done at 12."""
    clock = iter([0.0, 0.5, 1.0, 2.0, 10.0, 12.0])  # at first of what keeps the thread busy
    monkeypatch.setattr(compute_module.time, "perf_counter", lambda: next(clock))

    async def check(compute: ThreadCompute, device: Device) -> None:
        release = await occupied(compute, True)
        running = [
            asyncio.create_task(compute.run(Kind.FORWARD, device.task(name))) for name in "ab"
        ]
        await asyncio.sleep(0)
        await release()
        await device.has("a waited for")
        for name in "ab":
            device.note(f"{name} has run")
        assert [(await each).seconds for each in running] == [9.0, 2.0]
        assert compute.busy_s == 0.5 + 9.0 + 2.0

    on_a_thread(check)
