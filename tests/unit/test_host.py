"""Moves of one process: how long they may take, and who gives them up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from peer.host import MOVE_S, Host
from peer.orders import MoveOrder
from swarm.sim.virtual_time import run


class Replica:
    """What a `Host` asks of a `Member`."""

    def __init__(self, links: Any, stage: int | None) -> None:
        self.links, self.serves, self.pinned, self.second = links, stage, False, False
        self.server = SimpleNamespace(stage=stage)
        self.pipeline, self.memory_bytes = SimpleNamespace(num_stages=3), None
        self.finished, self.took_part = asyncio.Event(), asyncio.Event()
        self.reached, self.awaits_commit = (0.0, False), False
        self.on_move: Callable[..., str]

    async def run(self) -> None:
        await self.finished.wait()

    async def drain(self, seconds: float) -> bool:
        self.finished.set()
        return True

    async def aclose(self) -> None:
        pass


def life(incarnation: str) -> Any:
    async def aclose() -> None:
        pass

    return SimpleNamespace(
        incarnation=incarnation, aclose=aclose, another_life=lambda name, _: life(name)
    )


async def moving() -> tuple[Host, Replica]:
    """From stage 0 to stage 1; and the replica that is to replace the one that is there."""
    made: list[Replica] = []

    def make(links: Any, stage: int | None) -> Any:
        made.append(Replica(links, stage))
        return made[-1]

    names = iter("ab")
    host = Host(make, life(""), set(), lambda: next(names))
    host.begin([0])
    old = made[0]
    assert old.on_move(old, MoveOrder(1, "", beside=True, memory_bytes=0, also=False)) == ""
    await asyncio.sleep(1.0)
    assert host.stages == [0, 1]
    return host, made[1]


def test_a_move_may_take_hours_while_more_of_the_state_comes() -> None:
    async def moved() -> None:
        host, new = await moving()
        for tenth in range(1, 11):
            await asyncio.sleep(0.9 * MOVE_S)
            new.reached = (tenth / 10, False)
        await asyncio.sleep(0.9 * MOVE_S)
        new.reached = (1.0, True)  # it has caught up, and waits for a commit
        await asyncio.sleep(0.9 * MOVE_S)
        assert host.stages == [0, 1]
        new.took_part.set()
        await asyncio.sleep(1.0)
        assert host.stages == [1]
        await host.aclose()

    run(moved(), limit_s=100 * MOVE_S)


def test_a_move_that_gets_no_further_is_given_up() -> None:
    async def given_up() -> None:
        host, new = await moving()
        new.reached = (0.5, False)
        await asyncio.sleep(2.0 * MOVE_S)
        assert host.stages == [0]
        await host.aclose()

    run(given_up(), limit_s=100 * MOVE_S)


def test_a_move_waits_for_a_step_that_takes_hours_and_no_longer() -> None:
    async def moved() -> None:
        host, new = await moving()
        new.reached, new.awaits_commit = (1.0, True), True
        await asyncio.sleep(9.5 * MOVE_S)
        assert host.stages == [0, 1]
        new.awaits_commit = False  # commits have passed it over
        await asyncio.sleep(MOVE_S)
        assert host.stages == [0]
        await host.aclose()

    run(moved(), limit_s=100 * MOVE_S)
