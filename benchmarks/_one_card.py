"""Two stages on one device, and the plain torch loop that trains the same, one beside the other.

The plain loop is what somebody writes for a model that fits on one card: the whole Hugging Face
model, gradients added up by autograd, `clip_grad_norm_`, `torch.optim.AdamW`. It begins with the
run's first weights and takes the run's batches and learning rates, so both sides reach the same
losses up to rounding, or the comparison means nothing.

One card is one process here, so the swarm's streams are in memory: what libp2p costs is measured by
`pipeline.py`. Nothing but the device's name is particular to a GPU.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.nn.functional import cross_entropy

from peer.disk import MemoryDisk
from peer.launch import plan_of, whole_model
from peer.leader import Leader
from peer.member import Member
from peer.quorum import Quorum
from swarm.averaging import GroupAllReduce
from swarm.averaging.policy import ExactPolicy
from swarm.compute import ThreadCompute
from swarm.config import RunConfig, parse_config
from swarm.data import build_dataset
from swarm.device import allocator
from swarm.model import build_pipeline, model_sha256
from swarm.model.hf_carve import build_model
from swarm.model.hf_config import inline_config
from swarm.net.links import Links
from swarm.net.memory import MemoryNetwork

STAGES = 2
RUN_ID = "0" * 32


def run_config(
    *,
    hidden: int = 64,
    layers: int = 4,
    sequence: int = 64,
    microbatches: int = 4,
    microbatch_size: int = 4,
    accumulate: str = "float64",
    dtype: str = "float32",
) -> RunConfig:
    """A byte-level Llama in two stages, on Python's own sources."""
    llama = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": sequence,
    }
    return parse_config(
        {
            "run": {"name": "one card"},
            "model": {"stages": STAGES, "config": llama, "dtype": dtype},
            "data": {"sequence": sequence},
            "batch": {"microbatches": microbatches, "microbatch_size": microbatch_size},
            "schedule": {"steps": 1000},
            "update": {"accumulate": accumulate},
        },
        "the config for one card",
    )


class PlainLoop:
    """The whole model of `run` on `device`. Adds gradients up in float32, as autograd does."""

    def __init__(self, run: RunConfig, device: str) -> None:
        assert run.model.config is not None
        self.plan, self.device, self.batches = plan_of(run), device, build_dataset(run)
        config = inline_config(dict(run.model.config), run.data.vocab_size)
        self.model = build_model(config, empty=False).train()
        first = dict(whole_model(run).build_stage(0).named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(first[name])
        self.model.to(device)
        parameters = list(self.model.parameters())
        matrices = [each for each in parameters if each.ndim > 1]
        others = [each for each in parameters if each.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": others, "weight_decay": 0.0},
        ]
        beta1, beta2 = run.optimizer.betas
        self.optimizer = torch.optim.AdamW(
            groups,
            betas=(beta1, beta2),
            eps=run.optimizer.eps,
            weight_decay=run.optimizer.weight_decay,
        )

    def step(self, number: int) -> float:
        """Train step `number`; returns its loss, once the device is done."""
        plan, device = self.plan, self.device
        batches = [self.batches.batch(number, index) for index in range(plan.num_microbatches)]
        tokens = sum(batch["targets"].size for batch in batches)
        losses = []
        for batch in batches:
            inputs, targets = (
                torch.from_numpy(batch[name]).to(device).long() for name in ("tokens", "targets")
            )
            logits = self.model(input_ids=inputs, use_cache=False).logits
            loss = cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="sum")
            (loss / tokens).backward()
            losses.append(loss.detach())
        if plan.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = plan.lr(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).sum()) / tokens


class Swarm:
    """Leader and two replicas of `run` in this process, both on `device`."""

    def __init__(self, run: RunConfig, device: str) -> None:
        network = MemoryNetwork(latency_s=1e-5, rate_bps=1e12)
        self.pipeline, quorum = build_pipeline(run), Quorum(["leader"], "leader", MemoryDisk())
        self.leader = Leader(plan_of(run), self.pipeline, build_dataset(run), quorum)
        self.leader.links = quorum.links = Links(
            network.transport("leader"), RUN_ID, "leader#1", self.leader.admission.methods()
        )
        self.compute = ThreadCompute()  # one a device, whoever computes on it
        self.members = [self._member(network, run, device, stage) for stage in range(STAGES)]
        self._tasks: list[asyncio.Task[None]] = []

    def _member(self, network: MemoryNetwork, run: RunConfig, device: str, stage: int) -> Member:
        async def find_leader() -> list[tuple[str, tuple[str, ...]]]:
            return [("leader", ())]

        transport, name = network.transport(f"p{stage}"), f"p{stage}#1"
        reducer = GroupAllReduce(transport, name)
        reducer.serve()
        links = Links(transport, RUN_ID, name, {}, allocate=allocator(device))
        links.serve()
        return Member(
            links,
            self.pipeline,
            self.compute,
            ExactPolicy(reducer),
            run.optimizer,
            ["leader"],
            find_leader,
            num_microbatches=run.batch.microbatches,
            stage=stage,
            accumulate=run.update.accumulate,
            device=device,
        )

    async def __aenter__(self) -> Self:
        self.leader.links.serve()
        await self.leader.begin()
        self._tasks = [asyncio.create_task(member.run()) for member in self.members]
        return self

    async def step(self) -> float:
        """Train the next step; returns its loss, once all replicas have applied it."""
        result = await self.leader.train_step()
        for member in self.members:
            while member.step <= result.step:
                assert member.server is not None
                await member.server.parts.advanced.wait()
        return result.loss

    def sha256(self) -> str:
        """Of the whole model's parameters."""
        hashes: dict[str, str] = {}
        for member in self.members:
            assert member.server is not None
            hashes.update(member.server.state.tensor_hashes())
        return model_sha256(hashes, self.pipeline.key_order)

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members:
            await member.links.aclose()
            await member.aclose()
        await self.compute.aclose()
        await self.leader.links.aclose()
        await self.leader.aclose()


@dataclass
class Compared:
    """Seconds and loss of every measured step, plain loop first."""

    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    losses: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    @property
    def ratios(self) -> list[float]:
        """The swarm's speed over the plain loop's, round by round."""
        return [plain / swarm for plain, swarm in zip(*self.seconds, strict=True)]

    @property
    def apart(self) -> float:
        """How far the losses are from each other at most, relatively."""
        pairs = zip(*self.losses, strict=True)
        return max(abs(swarm - plain) / abs(plain) for plain, swarm in pairs)


async def compare(run: RunConfig, device: str, rounds: int, warm_up: int = 2) -> Compared:
    """Both sides take turns, a step each a round; the first `warm_up` rounds do not count."""
    found, plain = Compared(), PlainLoop(run, device)
    async with Swarm(run, device) as swarm:

        async def plain_step(number: int) -> float:
            return await asyncio.to_thread(plain.step, number)  # the swarm's heartbeats go on

        async def swarm_step(_: int) -> float:
            return await swarm.step()

        for number in range(warm_up + rounds):
            for side, step in enumerate((plain_step, swarm_step)):
                _settle(device)
                began = time.perf_counter()
                loss = await step(number)
                _settle(device)
                if number >= warm_up:
                    found.seconds[side].append(time.perf_counter() - began)
                    found.losses[side].append(loss)
    return found


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
