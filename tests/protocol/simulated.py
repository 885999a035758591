"""A whole swarm in one process under virtual time, with faults by script.

Real leader, real members, real (tiny) torch stages; only the network, the clock and the compute
are simulated, so one seed decides every ordering. Every run ends with `check`: twins are equal, no
kept answer, slot, task or order is left over, no handler has raised, and each record was made of
each microbatch exactly once per stage.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from peer.baseline import Baseline
from peer.disk import MemoryDisk
from peer.leader import Leader, Plan, StepResult
from peer.member import Member
from peer.quorum import Quorum
from swarm.averaging.all_reduce import GroupAllReduce
from swarm.averaging.policy import ExactPolicy
from swarm.compute import InlineCompute, Kind
from swarm.model.custom import CustomPipeline, Pipeline
from swarm.model.layout import model_sha256
from swarm.net.links import Links, peer_of
from swarm.net.memory import MemoryNetwork
from swarm.placement import MovePolicy
from swarm.schedule import Schedule
from swarm.sim.virtual_time import run
from swarm.wire.boundaries import LOSSLESS, BoundaryCodecs

RUN_ID = "0123456789abcdef" * 2
LEADER = "leader"


class Block(nn.Module):
    """Linear, nonlinearity, dropout: enough for rounding and randomness to show."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def tiny_data() -> SimpleNamespace:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((64, 6)).astype(np.float32)
    y = (x[:, :1] * x[:, 1:2] > 0).astype(np.int64).reshape(-1)
    return SimpleNamespace(train={"x": x[:48], "y": y[:48]}, validation={"x": x[48:], "y": y[48:]})


TINY = Pipeline(
    layers={
        "enter": lambda: nn.Linear(6, 8),
        "one": lambda: Block(8),
        "two": lambda: Block(8),
        "three": lambda: Block(8),
        "leave": lambda: nn.Linear(8, 2),
    },
    inputs=lambda batch: (batch["x"],),
    loss=lambda outputs, batch: nn.functional.cross_entropy(
        outputs[0], batch["y"].long(), reduction="sum"
    ),
    weight=lambda batch: batch["y"].size if isinstance(batch["y"], np.ndarray) else len(batch["y"]),
    data=tiny_data,
)

OPTIMIZER = SimpleNamespace(
    name="adamw",
    lr=0.01,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    momentum=0.9,
    nesterov=False,
)


class TinyBatches:
    """Samples drawn by (step, index)."""

    def __init__(self, microbatch_size: int = 4) -> None:
        self.data, self.size = tiny_data(), microbatch_size

    def batch(self, step: int, index: int) -> Mapping[str, np.ndarray]:
        rows = np.random.default_rng((step, index)).integers(0, 48, self.size)
        return {name: array[rows] for name, array in self.data.train.items()}

    def validation_batch(self, index: int) -> Mapping[str, np.ndarray]:
        rows = np.arange(self.size) + index * self.size
        return {name: array[rows % 16] for name, array in self.data.validation.items()}


def pipeline(num_stages: int, cut: Sequence[int] | None = None) -> CustomPipeline:
    return CustomPipeline(
        TINY, seed=3, num_stages=num_stages, microbatch_size=4, cut=tuple(cut) if cut else None
    )


@functools.cache
def _shared(num_stages: int, cut: tuple[int, ...] | None) -> CustomPipeline:
    return pipeline(num_stages, cut)


def shared_pipeline(num_stages: int, cut: Sequence[int] | None = None) -> CustomPipeline:
    """Pipelines hold no state of a swarm; building one costs more than a step."""
    return _shared(num_stages, tuple(cut) if cut else None)


def plan(num_microbatches: int = 4, num_steps: int = 3, **more: Any) -> Plan:
    schedule = Schedule(kind="cosine", peak=0.01, warmup_steps=2, steps=50, final_ratio=0.1)
    return Plan(num_microbatches, num_steps, schedule.lr, clip_norm=1.0, **more)


class FaultyCompute(InlineCompute):
    """Inline compute whose next task of a kind can be made to raise, as a kernel would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failing: Counter[Kind] = Counter()

    async def run(self, kind: Kind, task: Callable[[], Any], seconds: float | None = None) -> Any:
        if not self.failing[kind]:
            return await super().run(kind, task, seconds)
        self.failing[kind] -= 1

        def fail() -> None:
            raise RuntimeError("a kernel failed")

        return await super().run(kind, fail)


FROM_NOTHING = ("start", "kill_leader")  # what does not strike a replica


@dataclass
class Fault:
    """Do `action` at the `count`-th time `replica` (None: anyone) passes `point`.

    Struck is `victim`, or whoever passed. Actions: kill (restarted empty after `duration_s`, if
    any), freeze, cut (from another replica), cut_leader, reset (all its connections end), raise
    (its next kernel), start (`victim` joins as a new replica of stage `stage`), kill_leader (back
    with its disk after `duration_s`).
    """

    point: str
    action: str
    replica: str | None = None
    step: int | None = None
    count: int = 1
    duration_s: float = 0.0
    victim: str | None = None
    stage: int | None = None
    other: str | None = None  # the other side of a cut
    fired: bool = False


@dataclass
class Swarm:
    """Assembles the swarm and runs it. `seconds` is the virtual time of (forward, backward)."""

    num_stages: int = 3
    replicas: Sequence[int] = (2, 2, 2)
    seed: int = 0
    plan: Plan = field(default_factory=plan)
    faults: list[Fault] = field(default_factory=list)
    seconds: tuple[float, float] = (0.010, 0.020)
    slots: int | None = None
    afab: bool = False
    kept_bytes: int = 1 << 30
    codecs: BoundaryCodecs = LOSSLESS
    silence_s: float = 5.0
    speed: Mapping[str, float] = field(default_factory=dict)
    latency_s: float = 0.001
    cut: Sequence[int] | None = None
    accumulate: str = "float64"
    batches: Any = None  # TinyBatches unless given
    trainer_ids: Sequence[str] = (LEADER,)
    moves: MovePolicy | None = None

    def __post_init__(self) -> None:
        self.network = MemoryNetwork(self.seed, self.latency_s)
        self.random = random.Random(self.seed)
        self.pipeline = shared_pipeline(self.num_stages, self.cut)
        self.members: dict[str, Member] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.computes: dict[str, FaultyCompute] = {}
        self.points: Counter[tuple[str, str]] = Counter()
        self.events: list[tuple[float, str, str, dict[str, Any]]] = []
        self.lives: Counter[str] = Counter()
        self.results: list[StepResult] = []
        self.disk = MemoryDisk()
        self.leader: Leader | None = None
        self.fired: list[Fault] = []
        self.over = False
        self.training: asyncio.Task[StepResult] | None = None
        self.away_s: float | None = None
        self.evicted = 0
        self.at_end: Callable[[], None] | None = None  # while all are still there
        self.committed: list[int] = []  # steps whose ledgers `check_record` has seen

    # ---- parts ----------------------------------------------------------------------------------

    def start_leader(self) -> Leader:
        self.lives[LEADER] += 1
        transport = self.network.transport(LEADER)
        quorum = Quorum([LEADER], LEADER, self.disk)
        leader = Leader(
            self.plan,
            self.pipeline,
            self.batches or TinyBatches(),
            quorum,
            seed=self.seed,
            slots=self.slots if not self.afab else 1000,
            moves=self.moves,
            probe=lambda point, **facts: self.on_probe(LEADER, point, facts),
        )
        leader.links = Links(
            transport,
            RUN_ID,
            f"{LEADER}#{self.lives[LEADER]}",
            leader.admission.methods(),
            on_close=leader.on_channel_closed,
            silence_s=self.silence_s,
        )
        quorum.links = leader.links
        leader.links.serve()
        self.leader = leader
        return leader

    def start_replica(self, name: str, stage: int | None) -> Member:
        self.lives[name] += 1
        transport = self.network.transport(name)
        incarnation = f"{name}#{self.lives[name]}"
        factor = self.speed.get(name, 1.0)
        costs = {
            Kind.FORWARD: self.seconds[0] * factor,
            Kind.BACKWARD: self.seconds[1] * factor,
        }
        jitter = random.Random(f"{self.seed}/{name}")
        compute = FaultyCompute(
            lambda kind: costs.get(kind, 0.001) * jitter.uniform(0.8, 1.2), afab=self.afab
        )
        links = Links(transport, RUN_ID, incarnation, {}, silence_s=self.silence_s)
        reducer = GroupAllReduce(transport, incarnation)
        reducer.serve()

        async def find_leader() -> list[tuple[str, tuple[str, ...]]]:
            return [(trainer, ()) for trainer in self.trainer_ids]

        member = Member(
            links,
            self.pipeline,
            compute,
            ExactPolicy(reducer),
            OPTIMIZER,
            self.trainer_ids,
            find_leader,
            stage=stage,
            accumulate=self.accumulate,
            codecs=self.codecs,
            slots=self.slots,
            afab=self.afab,
            kept_bytes=self.kept_bytes,
            pinned=stage is not None,
            probe=lambda point, **facts: self.on_probe(name, point, facts),
        )
        member.random.seed(f"{self.seed}/{incarnation}")
        links.serve()
        self.members[name], self.computes[name] = member, compute
        self.tasks[name] = asyncio.get_running_loop().create_task(member.run(), name=name)
        return member

    def restart(self, name: str, stage: int | None) -> None:
        """An empty replica under the name of a dead one, unless the run is over."""
        if not self.over and name not in self.members:
            self.start_replica(name, stage)

    def kill_leader(self, duration_s: float) -> None:
        """Ends its process as kill -9 does; `main` starts the next life."""
        if self.training is not None and not self.over and not self.training.done():
            assert self.leader is not None
            self.away_s = duration_s or 1.0
            self.leader.abort()
            self.leader.links.abort()
            self.network.kill(LEADER)
            self.training.cancel()

    async def train(self) -> StepResult | None:
        """One step; None when the leader died meanwhile, and another life of it goes on."""
        assert self.leader is not None
        self.training = asyncio.get_running_loop().create_task(self.leader.train_step())
        try:
            return await self.training
        except asyncio.CancelledError:
            if self.away_s is None:
                raise
            away_s, self.away_s = self.away_s, None
            await asyncio.sleep(away_s)
            await self.start_leader().begin()
            return None

    def kill(self, name: str) -> None:
        """What kill -9 does."""
        member = self.members.pop(name)
        self.tasks.pop(name).cancel()
        member.abort()
        member.links.abort()
        self.network.kill(name)

    # ---- faults ---------------------------------------------------------------------------------

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        self.points[who, point] += 1
        self.points["", point] += 1
        if point == "record":
            self.check_record(facts["step"])
        now = asyncio.get_running_loop().time()
        self.events.append((now, who, point, facts))
        for fault in self.faults:
            if fault.fired or fault.point != point or fault.replica not in (None, who):
                continue
            if fault.step is not None and facts.get("step") != fault.step:
                continue
            fault.count -= 1
            struck = fault.victim or who
            if fault.count > 0 or (struck in self.members) == (fault.action in FROM_NOTHING):
                continue
            if fault.action == "kill" and not self.can_lose(struck):
                continue
            fault.fired = True
            self.fired.append(fault)
            self.strike(fault, struck)

    def can_lose(self, name: str) -> bool:
        """Whether others of the stage hold what it needs to go on; else only a checkpoint helps."""
        assert self.leader is not None
        lost, record = self.members[name].server, self.leader.record
        if lost is None:
            return True
        for other in self.members.values():
            if other.server is None or other.server is lost or other.server.stage != lost.stage:
                continue
            behind = self.leader.next_step - other.server.ledger.step
            prepared = other.orders.prepared if other.orders else None
            if behind == 0 or (
                behind == 1
                and record is not None
                and prepared is not None
                and prepared.update.facts.sha256 == record.gradients[lost.stage]
            ):
                return True
        return False

    def strike(self, fault: Fault, who: str) -> None:
        loop = asyncio.get_running_loop()
        duration_s = fault.duration_s or 20.0
        if fault.action == "kill":
            self.kill(who)
            if fault.duration_s:
                stage = int(who[1 : who.index(".")])
                loop.call_later(fault.duration_s, self.restart, who, stage)
        elif fault.action == "kill_leader":
            loop.call_soon(self.kill_leader, fault.duration_s)
        elif fault.action == "start":
            self.start_replica(who, fault.stage)
        elif fault.action == "freeze":
            self.network.freeze(who)
            loop.call_later(duration_s, self.network.thaw, who)
        elif fault.action == "cut":
            others = [fault.other] if fault.other else [n for n in self.members if n != who]
            if others:
                other = self.random.choice(others)
                self.network.cut(who, other)
                loop.call_later(duration_s, self.network.heal, who, other)
        elif fault.action == "cut_leader":
            self.network.cut(who, LEADER)
            loop.call_later(duration_s, self.network.heal, who, LEADER)
        elif fault.action == "reset":
            for stream in list(self.network.transports[who].streams):
                stream.abort()
        elif fault.action == "raise":
            kind = Kind.BACKWARD if fault.point == "backward" else Kind.FORWARD
            self.computes[who].failing[kind] += 1
        else:
            raise ValueError(fault.action)

    # ---- the run --------------------------------------------------------------------------------

    async def start_all(self) -> None:
        for stage, count in enumerate(self.replicas):
            for number in range(count):
                self.start_replica(f"r{stage}.{number}", stage)

    async def main(self, num_steps: int) -> dict[str, str]:
        await self.start_leader().begin()
        assert self.leader is not None
        await self.start_all()
        try:
            while self.leader.next_step < num_steps:
                if (result := await self.train()) is not None:
                    self.results.append(result)
            await self.settle()
            self.check()
            if self.at_end is not None:
                self.at_end()
            return self.hashes()
        finally:
            self.over = True
            for name in list(self.members):
                await self.stop(name)
            await self.leader.links.aclose()
            await self.leader.aclose()
            await self.network.transports[LEADER].close()

    async def settle(self) -> None:
        """Until everybody who can has applied the last commit, and what it began has ended."""
        assert self.leader is not None
        for _ in range(40_000):
            steps = {
                member.step
                for name, member in self.members.items()
                if name not in self.network.frozen
            }
            if (
                steps == {self.leader.next_step}
                and not any(each.server.tasks for each in self.members.values() if each.server)
                and not self.network.frozen
                and not self.network.cuts
            ):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"replicas stand at {steps}, the run at {self.leader.next_step}")

    def check_record(self, step: int) -> None:
        """Every microbatch is counted once per stage by those whom the record names."""
        assert self.leader is not None
        assert self.leader.record is not None
        alive = {member.links.incarnation: member for member in self.members.values()}
        for stage, names in self.leader.record.members.items():
            servers = [alive[name].server for name in names if name in alive]
            ledgers = [s.ledger.counted for s in servers if s is not None and s.ledger.step == step]
            counted = sorted(index for ledger in ledgers for index in ledger)
            everybody = len(ledgers) == len(names)
            expected = list(range(self.plan.num_microbatches))
            assert len(set(counted)) == len(counted), f"step {step} counts twice: {counted}"
            assert not everybody or counted == expected, f"step {step} of {stage}: {counted}"
        self.committed.append(step)

    def check(self) -> None:
        """Nothing is left over once everybody stands at the last commit."""
        assert self.leader is not None
        assert not self.network.handler_errors, self.network.handler_errors
        assert not self.leader.in_flight, self.leader.in_flight
        for name, member in self.members.items():
            server = member.server
            assert server is not None, f"{name} has not joined"
            assert not server.kept.works, f"{name} keeps {sorted(server.kept.works)}"
            assert server.kept.kept_bytes == 0, f"{name} keeps {server.kept.kept_bytes} bytes"
            assert server.slots.held == 0, f"{name} holds {server.slots.held} slots"
            self.evicted += server.kept.evictions
            assert not server.tasks, f"{name} runs {len(server.tasks)} tasks"
            assert not server.ledger.entries, f"{name} has entries of step {server.ledger.step}"

    async def stop(self, name: str) -> None:
        member, task = self.members.pop(name), self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await member.links.aclose()
        await member.aclose()
        await self.computes[name].aclose()
        await self.network.transports[name].close()

    def hashes(self) -> dict[str, str]:
        """sha256 of the model per choice of replicas; twins must agree on every tensor."""
        merged: dict[str, str] = {}
        for name, member in sorted(self.members.items()):
            assert member.server is not None
            for key, value in member.server.state.tensor_hashes().items():
                assert merged.setdefault(key, value) == value, f"{name} differs in {key}"
        return {"sha256": model_sha256(merged, self.pipeline.key_order)}

    def run(self, num_steps: int = 3, limit_s: float = 2000.0) -> dict[str, str]:
        return run(self.main(num_steps), limit_s=limit_s)

    def evictions(self) -> int:
        """Answers evicted so far, by those that have lived to the end."""
        return self.evicted


_baselines: dict[tuple[int, int], tuple[str, list[StepResult]]] = {}


def baseline(num_steps: int = 3, num_microbatches: int = 4) -> tuple[str, list[StepResult]]:
    """sha256 and step results of the one-process run."""
    key = (num_steps, num_microbatches)
    if key not in _baselines:
        oracle = Baseline(plan(num_microbatches), shared_pipeline(1), TinyBatches(), OPTIMIZER)
        results = list(oracle.steps(num_steps))
        _baselines[key] = (oracle.report()["sha256"], results)
    return _baselines[key]


Check = Callable[[Swarm], None]
__all__ = ["Fault", "Swarm", "baseline", "peer_of", "plan"]
