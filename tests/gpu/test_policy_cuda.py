"""A gradient on a GPU on its way through a round, and back: the bits of the CPU."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

from swarm.ahead import NONE, Ahead
from swarm.averaging import GroupAllReduce
from swarm.averaging.policy import ExactPolicy, Update
from swarm.compute import InlineCompute
from swarm.config import OptimizerSection
from swarm.net.memory import MemoryNetwork
from swarm.stage_state import StageState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def counted(device: str, member: int) -> StageState:
    """Member `member`'s state on `device`: all begin with the same weights and count their own."""
    torch.manual_seed(0)
    stage = nn.Linear(400, 300).to(device)
    state = StageState(stage, OptimizerSection(), accumulate="float64", device=device)
    draw = torch.Generator().manual_seed(1 + member)
    terms = torch.randn(state.layout.total, dtype=torch.float64, generator=draw)
    state.accumulator.copy_(terms.to(device))
    return state


@pytest.mark.parametrize("ahead", [NONE, Ahead(1, 4)], ids=["exact", "ahead"])
@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cpu")], ids=["alone", "with a CPU"])
def test_a_round_on_a_gpu_gives_what_it_gives_on_a_cpu(
    devices: tuple[str, ...], ahead: Ahead
) -> None:
    async def after_a_step(devices: tuple[str, ...]) -> list[str]:
        network, members = MemoryNetwork(), [f"p{i}#1" for i in range(len(devices))]
        reducers = [GroupAllReduce(network.transport(m.partition("#")[0]), m) for m in members]
        for reducer in reducers:
            reducer.serve()
        policies = [ExactPolicy(reducer, ahead=ahead) for reducer in reducers]
        states = [counted(device, member) for member, device in enumerate(devices)]
        updates: list[Update] = await asyncio.gather(
            *(
                policy.prepare("1", members, state, InlineCompute())
                for policy, state in zip(policies, states, strict=True)
            )
        )
        for policy, state, update in zip(policies, states, updates, strict=True):
            assert update.gradient.device.type == "cpu"
            if state.device.type == "cuda" and not ahead.microbatches:
                assert update.on_device is not None
                assert torch.equal(update.on_device.cpu(), update.gradient)
            else:
                assert update.on_device is None
            policy.apply(state, update, lr=0.1, scale=0.5)
        for transport in network.transports.values():
            await transport.close()
        return [state.fingerprint() for state in states]

    # In real time: a GPU's gradient is hashed by a thread.
    everywhere = asyncio.run(after_a_step(("cpu",) * len(devices)))
    assert asyncio.run(after_a_step(devices)) == everywhere
    assert len(set(everywhere)) == 1
