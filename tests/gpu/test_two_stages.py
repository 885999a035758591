"""Two stages on one card against the whole model on it, and the speed of a stage there.

Run when a GPU is there: `python -m pytest tests/gpu`. Numbers on a GPU are compared with the
baseline on the same GPU (DESIGN, I2: bits are promised on the same kind of device).
"""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from peer.baseline import Baseline
from peer.disk import MemoryDisk
from peer.launch import be_exact, plan_of, whole_model
from peer.leader import Leader
from peer.member import Member
from peer.quorum import Quorum
from swarm.averaging import GroupAllReduce
from swarm.averaging.policy import ExactPolicy
from swarm.compute import ThreadCompute
from swarm.config import RunConfig, parse_toml
from swarm.data import build_dataset
from swarm.device import allocator
from swarm.model import build_pipeline, model_sha256
from swarm.net.links import Links
from swarm.net.memory import MemoryNetwork

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda:0"
STEPS = 3

RUN = """
[run]
name = "gpu"
[model]
stages = 2
[model.config]
model_type = "llama"
hidden_size = {hidden}
intermediate_size = {inner}
num_hidden_layers = {layers}
num_attention_heads = 8
num_key_value_heads = 8
max_position_embeddings = 512
[data]
sequence = {sequence}
[batch]
microbatches = {microbatches}
microbatch_size = 4
[schedule]
steps = 10
"""


def config(
    hidden: int = 64, layers: int = 4, sequence: int = 64, microbatches: int = 4
) -> RunConfig:
    text = RUN.format(
        hidden=hidden,
        inner=hidden * 3,
        layers=layers,
        sequence=sequence,
        microbatches=microbatches,
    )
    return parse_toml(text)


async def two_stages(run: RunConfig, steps: int) -> tuple[str, float]:
    """sha256 of a swarm of two stages on the card, and its wall seconds a step after the first."""
    network, pipeline = MemoryNetwork(latency_s=1e-5, rate_bps=1e12), build_pipeline(run)
    quorum = Quorum(["leader"], "leader", MemoryDisk())
    leader = Leader(plan_of(run), pipeline, build_dataset(run), quorum)
    leader.links = Links(
        network.transport("leader"), "0" * 32, "leader#1", leader.admission.methods()
    )
    quorum.links = leader.links
    leader.links.serve()
    await leader.begin()
    members, tasks = [], []
    compute = ThreadCompute()  # one a device, whoever computes on it
    for stage in range(2):
        transport, name = network.transport(f"p{stage}"), f"p{stage}#1"
        reducer = GroupAllReduce(transport, name)
        reducer.serve()
        links = Links(transport, "0" * 32, name, {}, allocate=allocator(DEVICE))
        links.serve()

        async def find_leader() -> list[tuple[str, tuple[str, ...]]]:
            return [("leader", ())]

        member = Member(
            links,
            pipeline,
            compute,
            ExactPolicy(reducer),
            run.optimizer,
            ["leader"],
            find_leader,
            stage=stage,
            device=DEVICE,
        )
        members.append(member)
        tasks.append(asyncio.create_task(member.run()))
    walls = [(await leader.train_step()).wall_s for _ in range(steps)]
    hashes: dict[str, str] = {}
    for member in members:
        assert member.server is not None
        while member.step < steps:
            await member.server.advanced.wait()
        hashes.update(member.server.state.tensor_hashes())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for member in members:
        await member.links.aclose()
        await member.aclose()
    await compute.aclose()
    await leader.links.aclose()
    await leader.aclose()
    return model_sha256(hashes, pipeline.key_order), sum(walls[1:]) / max(len(walls) - 1, 1)


def test_two_stages_on_one_card_equal_the_whole_model_on_it() -> None:
    be_exact(DEVICE, None)
    run = config()
    oracle = Baseline(
        plan_of(run), whole_model(run), build_dataset(run), run.optimizer, device=DEVICE
    )
    list(oracle.steps(STEPS))
    sha256, _ = asyncio.run(two_stages(run, STEPS))
    assert sha256 == oracle.report()["sha256"]


def test_two_stages_on_one_card_are_nearly_as_fast_as_a_plain_loop() -> None:
    be_exact(DEVICE, None)
    run = config(hidden=1024, layers=8, sequence=512, microbatches=32)
    oracle = Baseline(
        plan_of(run), whole_model(run), build_dataset(run), run.optimizer, device=DEVICE
    )
    list(oracle.steps(1))
    torch.cuda.synchronize()
    began = time.perf_counter()
    list(oracle.steps(2))
    torch.cuda.synchronize()
    plain_s = (time.perf_counter() - began) / 2
    _, swarm_s = asyncio.run(two_stages(run, 3))
    assert plain_s / swarm_s >= 0.95, f"plain loop {plain_s:.3f} s, swarm {swarm_s:.3f} s a step"
