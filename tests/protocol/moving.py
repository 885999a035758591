"""A simulated swarm under faults whose peers move between stages and may serve several.

As `tests.protocol.adaptive`, with processes named by the stage that they begin in. What a process
gives up is held against the rest of the swarm: nobody may be let go with the last state of a stage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peer.host import Host
from peer.member import Member
from swarm.net.links import peer_of
from swarm.placement import MovePolicy
from tests.protocol.adaptive import AdaptiveSwarm, StageCompute
from tests.protocol.faults import MOVER

MOVES = ("move", "moved", "second")


class WatchedHost(Host):
    """A process that tells the swarm of what it gives up."""

    swarm: MovingSwarm
    name: str

    async def _end(self, member: Member) -> None:
        if member in self._serving:
            self.swarm.given_up(self.name, member)
        await super()._end(member)


@dataclass
class MovingSwarm(AdaptiveSwarm):
    """`then`: what stages cost after the first commit. `pinned` stay where they begin, and so do
    those of `both`, which serve the next stage as well."""

    then: Sequence[float] = ()
    pinned: Sequence[str] = ()
    both: Sequence[str] = ()
    second_share: float = 0.0
    moves: MovePolicy | None = field(default=None)
    benchmark_s: float = 1e-6  # one microbatch

    def __post_init__(self) -> None:
        self.moves = MovePolicy(hysteresis_s=1.0, horizon_s=600.0, second_share=self.second_share)
        self.mover = ""
        super().__post_init__()

    def name_of(self, name: str) -> str:
        return self.mover if name == MOVER else super().name_of(name)

    async def start_all(self) -> None:
        for stage, count in enumerate(self.replicas):
            for number in range(count):
                self.start_replica(f"r{stage}.{number}", stage)

    def start_replica(self, name: str, stage: int | None) -> Any:
        stages = () if stage is None else (stage,)
        if name in self.both and stage is not None and stage + 1 < self.num_stages:
            stages = (stage, stage + 1)
        self.start_peer(name, stages, pinned=name in self.pinned or len(stages) > 1)

    def restart(self, name: str, stage: int | None) -> None:
        if not self.over and name not in self.tasks:
            self.start_replica(name, stage)

    async def speed_of(self, name: str, reference: StageCompute) -> float:
        """What it would measure; the products themselves take longer than all the rest."""
        return 1.0 / (sum(self.seconds) * self.speed.get(name, 1.0))

    def host_of(self, name: str, *arguments: Any) -> Host:
        host = WatchedHost(*arguments)
        host.swarm, host.name = self, name
        return host

    async def _start_peer(
        self, name: str, incarnation: str, stages: Sequence[int], pinned: bool
    ) -> None:
        await super()._start_peer(name, incarnation, stages, pinned)
        self.tasks[name].add_done_callback(self._process_ended)

    def _process_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self.over:
            self.fail(task.exception())

    def is_alone(self, name: str, replica: Member) -> bool:
        stage = replica.stage if replica.serves is None else replica.serves
        others = [each for who in self.processes if who != name for each in self.replicas_of(who)]
        there = [each.server.stage for each in others if each.server is not None]
        return stage is not None and stage not in there

    def nobody_else_comes(self, name: str) -> bool:
        return False  # `is_alone` has seen to it

    def given_up(self, name: str, member: Member) -> None:
        """A replica of a process ends, the process goes on."""
        told = member.finished.is_set() and not self.over
        stays = self.chronicle.stays_for_now
        if told and not self.checkpoints and not self.chronicle.can_spare(name, member, to=stays):
            self.fail(AssertionError(f"{name} was told to go, with its stage's state"))

    def leave(self, name: str, back_s: float) -> None:
        host = self.hosts[name]

        async def go() -> None:
            while self.hosts.get(name) is host and host.members:
                await host.drain(1000.0)
                if self.chronicle.can_lose(name):
                    break
                await asyncio.sleep(0.5)
            self.leaving.pop(name, None)
            if self.hosts.get(name) is host:
                stages = host.stages
                await self.stop(name)
                if back_s:
                    self.later(back_s, self.restart, name, stages[0] if stages else None)

        task = self.contexts[name].run(asyncio.get_running_loop().create_task, go())
        task.add_done_callback(lambda done: done.cancelled() or self.fail(done.exception()))
        self.leaving[name] = task

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        if who in self.trainers and point in MOVES:
            self.mover = peer_of(facts["replica"])
        if who in self.trainers and point == "record" and self.then:
            self.costs = self.then
        super().on_probe(who, point, facts)
