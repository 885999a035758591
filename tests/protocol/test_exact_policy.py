"""The exact policy: members prepare the same update; nothing changes before it is applied."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm.averaging import GroupAllReduce
from swarm.averaging.policy import ExactPolicy, Update
from swarm.compute import InlineCompute
from swarm.config import OptimizerSection
from swarm.model.layout import gradient_sha256
from swarm.net.memory import MemoryNetwork
from swarm.sim.virtual_time import run
from swarm.stage_state import StageState


def test_members_agree_and_nothing_changes_before_apply() -> None:
    def state() -> StageState:
        torch.manual_seed(0)
        return StageState(nn.Linear(40, 30), OptimizerSection())

    async def main() -> None:
        network = MemoryNetwork()
        members = ["a#1", "b#2"]
        states = [state(), state()]
        terms: list[Tensor] = []
        for each in states:
            terms.append(torch.randn(each.layout.total, dtype=torch.float64))
            each.accumulator.copy_(terms[-1])
        reducers = [GroupAllReduce(network.transport(m[0]), m) for m in members]
        for reducer in reducers:
            reducer.serve()
        before = [each.fingerprint() for each in states]
        policies = [ExactPolicy(reducer) for reducer in reducers]
        updates: list[Update] = await asyncio.gather(
            *(
                policy.prepare("1", members, each, InlineCompute())
                for policy, each in zip(policies, states, strict=True)
            )
        )
        expected = (terms[0] + terms[1]).to(torch.float32)
        assert [u.facts for u in updates] == [updates[0].facts] * 2
        assert updates[0].facts.sha256 == gradient_sha256(expected)
        assert before == [each.fingerprint() for each in states]
        assert all(torch.equal(s.accumulator, t) for s, t in zip(states, terms, strict=True))
        for policy, each, update in zip(policies, states, updates, strict=True):
            policy.apply(each, update, lr=0.1, scale=0.5)
        assert states[0].fingerprint() == states[1].fingerprint() != before[0]
        for transport in network.transports.values():
            await transport.close()

    run(main())


@pytest.mark.parametrize("members", [["a#1"], ["a#1", "b#2"]], ids=["alone", "two"])
def test_averaging_on_a_cpu_waits_for_no_kernel(members: list[str]) -> None:
    """In *delayed* the device computes the next step meanwhile, and all wait for the slowest."""
    order: list[str] = []

    class Noting(InlineCompute):
        async def run(self, *arguments: Any, **options: Any) -> Any:
            order.append("a turn on the device")
            return await super().run(*arguments, **options)

    class Reducer:
        async def all_reduce(self, *arguments: Any, **options: Any) -> tuple[int, ...]:
            order.append("averaging")
            return (0,) * len(members)

    state = StageState(nn.Linear(4, 3), OptimizerSection())
    run(ExactPolicy(Reducer()).prepare("1", members, state, Noting()))
    assert order == ["averaging", "a turn on the device"]
