"""A whole swarm in one process under virtual time, with faults by script.

Real trainers, real members, real (tiny) torch stages; only the network, the clock, the disks and
the compute are simulated, so one seed decides every ordering. Every run ends with `check`: twins
are equal, no kept answer, slot, task or order is left over, no handler has raised, no step has two
records, and each record was made of each microbatch exactly once per stage.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peer import snapshots
from peer.disk import MemoryDisk
from peer.leader import Leader
from peer.member import Member
from peer.quorum import Quorum
from peer.restoring import Order, Saved
from peer.trainer import Trainer
from peer.training import Plan, StepResult
from swarm.averaging.all_reduce import GroupAllReduce
from swarm.averaging.policy import POLICIES
from swarm.compute import InlineCompute, Kind
from swarm.consensus import Vote
from swarm.errors import StorageError
from swarm.model.layout import model_sha256
from swarm.net.links import Links, peer_of
from swarm.net.memory import MemoryNetwork
from swarm.placement import MovePolicy
from swarm.sim.virtual_time import VirtualTimeLoop, process_context, run
from swarm.wire.boundaries import LOSSLESS, BoundaryCodecs
from tests.protocol.checkpoints import Checkpoints
from tests.protocol.chronicle import Chronicle
from tests.protocol.faults import LEADER, Fault, Faults
from tests.protocol.tiny import (
    ALL,
    OPTIMIZER,
    TinyBatches,
    ahead_of,
    baseline,
    pipeline,
    plan,
    shared_pipeline,
)

RUN_ID = "0123456789abcdef" * 2


class FaultyCompute(InlineCompute):
    """Inline compute whose next task of a kind can be made to raise, as a kernel would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failing: Counter[Kind] = Counter()
        self.failed: Counter[Kind] = Counter()  # and whoever asked does not know yet
        self.may_fail: Callable[[Kind], bool] = lambda kind: True  # at this moment

    def will_fail(self, kind: Kind) -> bool:
        return self.failing[kind] + self.failed[kind] > 0

    async def run(
        self, kind: Kind, task: Callable[[], Any], step: int = 0, *, seconds: float | None = None
    ) -> Any:
        if not self.failing[kind] or not self.may_fail(kind):
            return await super().run(kind, task, step, seconds=seconds)
        self.failing[kind] -= 1

        def fail() -> None:
            raise RuntimeError("a kernel failed")

        self.failed[kind] += 1
        try:
            return await super().run(kind, fail, step)
        finally:
            self.failed[kind] -= 1


class SlowDisk(MemoryDisk):
    """A trainer's memory that takes `seconds` and can be full; `saved` is called after a write.

    As with a thread that writes, whoever waits for it may be gone by then. `vote` is what the
    present process knows, `durable` what the next one will read.
    """

    def __init__(self, disk_id: str = "first disk", seconds: float = 0.0, seed: str = "") -> None:
        super().__init__(disk_id)
        self.seconds = seconds
        self.durable = self.vote
        self.writing: dict[int, Vote] = {}
        self.full = False
        self.saved: Callable[[], None] = lambda: None
        self._random, self._writes = random.Random(seed), 0

    def begin_life(self) -> None:
        self.vote = self.durable

    async def save(self, vote: Vote) -> None:
        if self.full:
            raise StorageError("no space left on the disk")
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._writes += 1
        self.writing[self._writes] = vote
        if self.seconds:
            seconds = self.seconds * self._random.uniform(0.5, 2.0)
            loop.call_later(seconds, self._write, self._writes, written)
        else:
            self._write(self._writes, written)
        await written
        self.vote = vote

    def _write(self, number: int, written: asyncio.Future[None]) -> None:
        self.durable = self.writing.pop(number)
        self.saved()
        if not written.done():
            written.set_result(None)


@dataclass
class Swarm:
    """Assembles the swarm and runs it. `seconds` is the virtual time of (forward, backward);
    `leases` are those of the trainers."""

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
    heartbeat_s: float = 1.0
    gradients: str = "float32"
    silence_s: float = 5.0
    speed: Mapping[str, float] = field(default_factory=dict)
    latency_s: float = 0.001
    cut: Sequence[int] | None = None
    accumulate: str = "float64"
    batches: Any = None  # TinyBatches unless given
    trainer_ids: Sequence[str] = (LEADER,)
    leases: Mapping[str, float] = field(default_factory=dict)
    moves: MovePolicy | None = None
    disk_s: float = 0.0  # about so long a vote takes to be written
    checkpoint_every: int = 0  # steps; 0: none, and nobody goes back
    chunk: int | None = None  # elements of a state that donors give at once; None: as usual
    policy: str = "exact"
    ahead: int = ALL  # with the delayed policy
    since: int = 0
    optimizer: Any = field(default_factory=lambda: OPTIMIZER)

    def __post_init__(self) -> None:
        self.context = contextvars.copy_context()  # of no process
        self.network = MemoryNetwork(self.seed, self.latency_s)
        self.random = random.Random(self.seed)
        self.pipeline = shared_pipeline(self.num_stages, self.cut)
        every = self.checkpoint_every
        self.checkpoints = Checkpoints(every, self.num_stages) if every else None
        self.chronicle = Chronicle(self)
        self.disks = {
            name: SlowDisk(seconds=self.disk_s, seed=f"{self.seed}/{name}")
            for name in self.trainer_ids
        }
        for disk in self.disks.values():
            disk.saved = self.chronicle.voted
        self.order: Order | None = None  # an operator's, to trainers that start from now on
        self.trainers_say: Callable[[str], None] = lambda line: None  # what trainers tell people
        self.trainers: dict[str, Trainer[None]] = {}
        self.members: dict[str, Member] = {}
        self.leaving: dict[str, asyncio.Task[None]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}  # the life of each process
        self.computes: dict[str, FaultyCompute] = {}
        self.contexts: dict[str, contextvars.Context] = {}
        self.striking = Faults(self)
        self.events: list[tuple[float, str, str, dict[str, Any]]] = []
        self.lives: Counter[str] = Counter()
        self.results: list[StepResult] = []
        self.leader: Leader | None = None  # the last that has begun to lead
        self.fired: list[Fault] = []
        self.over = False
        self.evicted = self.resumed = 0
        self.at_end: Callable[[], None] | None = None  # while all are still there
        self.committed: list[int] = []  # steps whose ledgers `check_record` has seen

    # ---- processes ------------------------------------------------------------------------------

    @property
    def processes(self) -> list[str]:
        """Those that serve, or come to."""
        return list(self.members)

    def replicas_of(self, name: str) -> list[Member]:
        """What a process serves; nothing, if it is not there."""
        return [self.members[name]] if name in self.members else []

    def passing(self, who: str, facts: Mapping[str, Any]) -> Member | None:
        """Which replica of a process passes a point of the protocol."""
        return self.members.get(who)

    def is_alone(self, name: str, replica: Member) -> bool:
        """Whether a replica that has no state yet must not be lost: nobody else would come."""
        return False

    def nobody_else_comes(self, name: str) -> bool:
        """Whether a process is the only one of its stage, and serves nothing yet: without it the
        swarm would wait for ever, and rightly."""
        (replica,) = self.replicas_of(name)
        stage = name.partition(".")[0]
        others = [each for each in self.processes if each != name and each.startswith(f"{stage}.")]
        return replica.server is None and not others

    def is_moving(self, name: str) -> bool:
        """Whether a process is about to give some of its replicas up."""
        return False

    @property
    def loop(self) -> VirtualTimeLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return loop

    def later(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        """Do something to the swarm, whichever process is stopped or dead by then."""
        self.loop.call_later(seconds, act, *args, context=self.context)

    def name_of(self, name: str) -> str:
        """A process by its name; `LEADER` is the trainer that leads, or led last."""
        if name != LEADER or name in self.trainer_ids:
            return name
        terms = self.chronicle.terms
        return terms[max(terms)] if terms else self.trainer_ids[0]

    def _begin_life(self, name: str) -> str:
        """Returns the incarnation."""
        self.lives[name] += 1
        self.contexts[name] = process_context(name)
        return f"{name}#{self.lives[name]}"

    def start_trainer(self, name: str) -> None:
        incarnation = self._begin_life(name)
        self.contexts[name].run(self._start_trainer, name, incarnation)

    def _start_trainer(self, name: str, incarnation: str) -> None:
        links = Links(
            self.network.transport(name),
            RUN_ID,
            incarnation,
            {},
            on_close=lambda channel: trainer.on_channel_closed(channel),
            heartbeat_s=self.heartbeat_s,
            silence_s=self.silence_s,
        )
        self.disks[name].begin_life()
        quorum = Quorum(self.trainer_ids, name, self.disks[name], say=self.trainers_say)
        quorum.random.seed(f"{self.seed}/{incarnation}")

        def make_leader() -> Leader:
            leader = Leader(
                self.plan,
                self.pipeline,
                self.batches or TinyBatches(),
                quorum,
                seed=self.seed,
                slots=self.slots if not self.afab else 1000,
                moves=self.moves,
                probe=lambda point, **facts: self.on_probe(name, point, facts),
                saved=self.saved_of(name),
            )
            leader.links = links
            return leader

        trainer: Trainer[None] = Trainer(
            links,
            quorum,
            make_leader,
            lambda leader: self.lead(name, leader),
            order=self.order,
            accept_loss=self.order is not None,
            lease_s=self.leases.get(name, 5.0),
            seed=f"{self.seed}/{incarnation}",
        )
        links.serve()
        self.trainers[name] = trainer
        task = asyncio.get_running_loop().create_task(trainer.run(), name=name)
        self.tasks[name] = task
        task.add_done_callback(lambda done: self._trainer_ended(name, trainer, done))

    def _trainer_ended(self, name: str, trainer: Trainer[None], task: asyncio.Task[None]) -> None:
        """A trainer that cannot write its vote ends; it is started again until it can."""
        if task.cancelled() or self.trainers.get(name) is not trainer:
            return
        error = task.exception()
        if isinstance(error, StorageError):
            self.kill_trainer(name, 1.0)
        else:
            self.fail(error or AssertionError(f"{name} thinks that the run is over"))

    def start_replica(self, name: str, stage: int | None) -> Member:
        incarnation = self._begin_life(name)
        return self.contexts[name].run(self._start_replica, name, incarnation, stage)

    def _start_replica(self, name: str, incarnation: str, stage: int | None) -> Member:
        transport = self.network.transport(name)
        factor = self.speed.get(name, 1.0)
        costs = {
            Kind.FORWARD: self.seconds[0] * factor,
            Kind.BACKWARD: self.seconds[1] * factor,
        }
        jitter = random.Random(f"{self.seed}/{name}")
        compute = FaultyCompute(
            lambda kind: costs.get(kind, 0.001) * jitter.uniform(0.8, 1.2), afab=self.afab
        )
        links = Links(
            transport,
            RUN_ID,
            incarnation,
            {},
            heartbeat_s=self.heartbeat_s,
            silence_s=self.silence_s,
        )
        reducer = GroupAllReduce(transport, incarnation)
        reducer.serve()

        async def find_leader() -> list[tuple[str, tuple[str, ...]]]:
            return [(trainer, ()) for trainer in self.trainer_ids]

        member = Member(
            links,
            self.pipeline,
            compute,
            POLICIES[self.policy](reducer, self.gradients, self.plan.ahead),
            self.optimizer,
            self.trainer_ids,
            find_leader,
            num_microbatches=self.plan.num_microbatches,
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

    def revive(self, name: str) -> None:
        """A trainer with the disk it had."""
        if not self.over and name not in self.trainers:
            self.start_trainer(name)

    def kill(self, name: str) -> None:
        """What kill -9 does."""
        self.thaw(name)
        self.chronicle.crashed(name)
        member = self.members.pop(name)
        if (leaving := self.leaving.pop(name, None)) is not None:
            leaving.cancel()
        self.tasks.pop(name).cancel()
        member.abort()
        member.links.abort()
        self.network.kill(name)

    def kill_trainer(self, name: str, away_s: float) -> None:
        if self.over or name not in self.trainers:
            return
        self.thaw(name)
        self.chronicle.crashed(name)
        trainer = self.trainers.pop(name)
        self.tasks.pop(name).cancel()
        trainer.abort()
        trainer.links.abort()
        self.network.kill(name)
        self.later(away_s, self.revive, name)

    def freeze(self, name: str) -> None:
        """What SIGSTOP does: nothing of it runs, and nothing reaches it or leaves it."""
        self.loop.stop_process(name)
        self.network.freeze(name)

    def thaw(self, name: str) -> None:
        if name in self.network.frozen:
            self.chronicle.woke(name)
        self.loop.continue_process(name)
        self.network.thaw(name)

    def leave(self, name: str, back_s: float) -> None:
        """What the first SIGTERM does, with all the patience in the world."""
        member = self.members[name]

        async def go() -> None:
            while not member.finished.is_set():
                await member.drain(1000.0)
                if self.chronicle.can_lose(name):
                    break
                await asyncio.sleep(0.5)
            if not self.checkpoints and not self.chronicle.can_lose(
                name, to=self.chronicle.stays_for_now
            ):
                self.fail(AssertionError(f"{name} was told to go, with its stage's state"))
            self.leaving.pop(name, None)
            if self.members.get(name) is member:
                await self.stop(name)
                if back_s:
                    stage = member.server.stage if member.server else member.stage
                    self.later(back_s, self.restart, name, stage)

        task = self.contexts[name].run(asyncio.get_running_loop().create_task, go())
        task.add_done_callback(lambda done: done.cancelled() or self.fail(done.exception()))
        self.leaving[name] = task

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        if point == "record":
            try:
                self.check_record(who, facts["step"])
            except AssertionError as error:
                self.fail(error)  # raised here, it would be the process's to deal with
        elif point == "committed" and self.checkpoints is not None:
            member = self.passing(who, facts)
            complete = self.checkpoints.note(member) if member is not None else None
            if complete is not None and self.leader is not None:
                self.leader.saved_step = complete
        self.chronicle.passed(who, point, facts)
        self.events.append((self.loop.now, who, point, facts))
        self.striking.passed(who, point, facts.get("step"))

    def thin_between_twins(self, rate_bps: float) -> None:
        """From now on the links between replicas of a stage, also of those to come, are so thin:
        averaging takes long, microbatches do not."""
        for stage in range(self.num_stages):
            names = [f"r{stage}.{number}" for number in range(10)]
            self.network.rates.update(dict.fromkeys(itertools.permutations(names, 2), rate_bps))

    @property
    def effects(self) -> Counter[str]:
        """What the faults did, beyond that they were injected."""
        return self.chronicle.effects

    # ---- the run --------------------------------------------------------------------------------

    async def lead(self, name: str, leader: Leader) -> None:
        """One term, to the end of the run if it lasts so long."""
        self.leader = leader
        self.chronicle.begins_to_lead(name, leader)
        await self.at_record(leader)
        while leader.next_step < self.num_steps:
            self.results.append(await leader.train_step())
            await self.at_record(leader)
        while True:
            await leader.restoring.until_held()
            self.leader = leader  # another that was beaten may have come between
            if await self.settle():
                break
        self.check()
        if self.at_end is not None:
            self.at_end()
        self.over = True
        self.done.set_result(self.hashes())
        await asyncio.Event().wait()  # go on leading until the run is taken down

    async def at_record(self, leader: Leader) -> None:
        """A leader begins, or has committed a step."""
        self.chronicle.note_record(leader.record)

    def saved_of(self, name: str) -> Saved | None:
        """The checkpoints a trainer has."""
        return self.checkpoints

    def fail(self, error: BaseException | None) -> None:
        if error is not None and not self.done.done():
            self.done.set_exception(error)

    async def start_all(self) -> None:
        for stage, count in enumerate(self.replicas):
            for number in range(count):
                self.start_replica(f"r{stage}.{number}", stage)

    async def main(self, num_steps: int) -> dict[str, str]:
        self.num_steps = num_steps
        ahead = ahead_of(self.policy, self.ahead, self.plan.num_microbatches, self.since)
        self.plan = replace(self.plan, num_steps=num_steps, ahead=ahead)
        self.done: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(self._callback_raised)
        for name in self.trainer_ids:
            self.start_trainer(name)
        await self.start_all()
        self.striking.begin()
        try:
            return await self.done
        finally:
            await self._take_down()

    def _callback_raised(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback that raises has not done its part, be it a fault's: the run must not pass."""
        loop.default_exception_handler(context)
        if "handle" in context:
            self.fail(context.get("exception"))

    async def _take_down(self) -> None:
        self.over = True
        for name in sorted(self.network.frozen):
            self.thaw(name)
        for task in self.leaving.values():
            task.cancel()
        await asyncio.gather(*self.leaving.values(), return_exceptions=True)
        for name in list(self.members):
            await self.stop(name)
        for name, trainer in list(self.trainers.items()):
            self.tasks[name].cancel()
            await asyncio.gather(self.tasks[name], return_exceptions=True)
            await trainer.aclose()
            await trainer.links.aclose()
            await self.network.transports[name].close()

    async def settle(self) -> bool:
        """Until everybody who can has applied the last commit, and what it began has ended. False:
        a stage has lost its state, and the leader has to see to that first."""
        assert self.leader is not None
        for _ in range(40_000):
            if not self.leader.restoring.all_held:
                return False
            steps = {name: member.step for name, member in self.members.items()}
            if (
                set(steps.values()) == {self.leader.next_step}
                and not any(each.server.tasks for each in self.members.values() if each.server)
                and self.network.healthy
            ):
                return True
            await asyncio.sleep(0.05)
        raise AssertionError(f"replicas stand at {steps}, the run at {self.leader.next_step}")

    def check_record(self, who: str, step: int) -> None:
        """Every microbatch is counted once per stage by those whom the record names."""
        leader = self.trainers[who].leader
        assert leader is not None
        assert leader.record is not None
        alive = {member.links.incarnation: member for member in self.members.values()}
        for stage, names in leader.record.members.items():
            servers = [alive[name].server for name in names if name in alive]
            parts = [server.parts for server in servers if server is not None]
            ledgers = [each.ledger.counted for each in parts if each.ledger.step == step]
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
            for part in server.parts:
                kept, ledger = part.kept, part.ledger
                assert not kept.works, f"{name} keeps {sorted(kept.works)}"
                assert kept.kept_bytes == 0, f"{name} keeps {kept.kept_bytes} bytes"
                assert not ledger.entries, f"{name} has entries of step {ledger.step}"
                self.evicted += kept.evictions
            assert server.slots.held == 0, f"{name} holds {server.slots.held} slots"
            self.resumed += member.catching_up.resumed if member.catching_up else 0
            assert not server.tasks, f"{name} runs {len(server.tasks)} tasks"

    async def stop(self, name: str) -> None:
        member, task = self.members.pop(name), self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await member.links.aclose()
        server = member.server
        assert server is None or not server._serving.tasks, f"{name} serves calls without channels"
        await member.aclose()
        await self.computes[name].aclose()
        await self.network.transports[name].close()

    def hashes(self) -> dict[str, str]:
        """sha256 of the model per choice of replicas; twins must agree on every tensor (I5)."""
        merged: dict[str, str] = {}
        marks: dict[int, str] = {}
        for name, member in sorted(self.members.items()):
            assert member.server is not None
            state, mark = member.server.state, member.server.state.fingerprint()
            for key, value in state.tensor_hashes().items():
                assert merged.setdefault(key, value) == value, f"{name} differs in {key}"
            assert marks.setdefault(member.server.stage, mark) == mark, (
                f"{name}'s optimizer differs"
            )
        return {"sha256": model_sha256(merged, self.pipeline.key_order)}

    def run(self, num_steps: int = 3, limit_s: float = 2000.0) -> dict[str, str]:
        usual = snapshots.CHUNK
        snapshots.CHUNK = self.chunk or usual
        try:
            return run(self.main(num_steps), limit_s=limit_s)
        finally:
            snapshots.CHUNK = usual

    def evictions(self) -> int:
        """Answers evicted so far, by those that have lived to the end."""
        return self.evicted


__all__ = [
    "LEADER",
    "OPTIMIZER",
    "RUN_ID",
    "Fault",
    "Swarm",
    "TinyBatches",
    "baseline",
    "peer_of",
    "pipeline",
    "plan",
    "shared_pipeline",
]
