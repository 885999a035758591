"""What anybody may ask about a state is computed once for it, and is of the step it names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from peer.leader import Leader
from swarm.compute import Kind
from swarm.errors import SwarmError
from swarm.net.channel import CallFailedError, Message
from swarm.net.links import Links
from tests.protocol.simulated import RUN_ID, Swarm, baseline, plan


class Asked(Swarm):
    """A stranger asks r1.0 for its hashes, many times at once; `hashed` counts the passes."""

    def __init__(self) -> None:
        super().__init__(plan=plan(4, 4))
        self.hashed = 0
        self.seen: list[tuple[int, int]] = []  # the leader's step, and `hashed`, after each round
        self.during: Callable[[], None] = lambda: None

    async def at_record(self, leader: Leader) -> None:
        await super().at_record(leader)
        if leader.next_step == 0:
            return
        server = self.members["r1.0"].server
        assert server is not None
        await server.parts.commit_of(leader.next_step - 1)
        truth = server.state.tensor_hashes

        def counted() -> dict[str, str]:
            self.hashed += 1
            self.during()
            return truth()

        server.state.tensor_hashes = counted  # type: ignore[method-assign]
        links = Links(self.network.transport("mallory"), RUN_ID, f"mallory#{leader.next_step}", {})
        links.serve()
        channel = await links.channel("r1.0#1")
        await self.ask(leader, channel.call, truth())
        server.state.tensor_hashes = truth  # type: ignore[method-assign]
        await links.aclose()

    async def ask(self, leader: Leader, call: Any, truth: dict[str, str]) -> None:
        for _ in range(2):
            answers = await asyncio.gather(*(call("hashes", {}) for _ in range(50)))
            assert all(answer.body["hashes"] == truth for answer in answers)
            assert {answer.body["step"] for answer in answers} == {leader.next_step}
            self.seen.append((leader.next_step, self.hashed))


def test_all_who_ask_share_what_is_computed_once_for_a_step() -> None:
    swarm = Asked()
    assert swarm.run(4)["sha256"] == baseline(4)[0]
    assert swarm.seen == [(step, step) for step in (1, 2, 3, 4) for _ in range(2)]


def test_who_asks_while_the_state_becomes_another_is_not_told_a_wrong_step() -> None:
    """Nor is anybody after it."""

    class Replaced(Asked):
        async def ask(self, leader: Leader, call: Any, truth: dict[str, str]) -> None:
            server = self.members["r1.0"].server
            assert server is not None
            self.during = server.parts._tell_advanced
            with pytest.raises(CallFailedError, match="became another"):
                await call("hashes", {})
            self.during = lambda: None
            assert (await call("hashes", {})).body["hashes"] == truth
            self.seen.append((leader.next_step, self.hashed))

    swarm = Replaced()
    assert swarm.run(4)["sha256"] == baseline(4)[0]
    assert swarm.seen == [(step, 2 * step) for step in (1, 2, 3, 4)]


def test_a_kernel_that_failed_is_tried_again() -> None:
    class Failing(Asked):
        async def ask(self, leader: Leader, call: Any, truth: dict[str, str]) -> None:
            self.computes["r1.0"].failing[Kind.BACKGROUND] += 1
            answers = await asyncio.gather(
                *(call("hashes", {}) for _ in range(3)), return_exceptions=True
            )
            assert all(isinstance(each, SwarmError) for each in answers)
            again: Message = await call("hashes", {})
            assert again.body["hashes"] == truth

    assert Failing().run(4)["sha256"] == baseline(4)[0]
