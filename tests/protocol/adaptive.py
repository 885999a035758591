"""A simulated swarm whose peers are whole processes: they choose stages, move, and serve several.

As `tests.protocol.simulated`, with a `Host` per peer. A peer's device takes `speed` times the
seconds of a microbatch times its stage's cost; a test may change the speed at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peer.host import Host
from peer.measure import device_speed
from peer.member import Member
from swarm.averaging.all_reduce import GroupAllReduce
from swarm.averaging.policy import POLICIES
from swarm.compute import Kind, Timed
from swarm.net.links import Links
from swarm.placement import MovePolicy
from tests.protocol.simulated import OPTIMIZER, RUN_ID, FaultyCompute, Swarm

EAGER = MovePolicy(hysteresis_s=5.0, horizon_s=600.0)


class StageCompute:
    """One stage's share of a device: what a task takes depends on whose it is."""

    def __init__(self, device: FaultyCompute, seconds_of: Callable[[Kind], float]) -> None:
        self.device, self.seconds_of, self.counts = device, seconds_of, device.counts

    async def run(self, kind: Kind, task: Callable[[], Any], step: int = 0) -> Timed[Any]:
        seconds = self.seconds_of(kind)
        timed: Timed[Any] = await self.device.run(kind, task, step, seconds=seconds)
        return timed

    async def aclose(self) -> None:
        """The device is the host's."""


@dataclass
class AdaptiveSwarm(Swarm):
    """`peers`: each one's stages, () where the leader chooses; their names are p0, p1, …"""

    peers: Sequence[Sequence[int]] = ((),) * 6
    costs: Sequence[float] = (1.0, 1.0, 1.0)
    moves: MovePolicy | None = field(default_factory=lambda: EAGER)
    benchmark_s: float = 1.0
    memory_bytes: int | None = None  # of each device

    def __post_init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.fronts: dict[str, Links] = {}
        self.said: list[str] = []
        self.settled: dict[str, list[int]] = {}  # at the end
        super().__post_init__()

    @property
    def members(self) -> dict[str, Member]:  # type: ignore[override]
        """Every replica: by the name of its peer, the further ones by name+number."""
        return {
            f"{name}+{number}" if number else name: member
            for name, host in self.hosts.items()
            for number, member in enumerate(host.members)
        }

    @members.setter
    def members(self, _: dict[str, Member]) -> None:
        """They are those of the hosts."""

    @property
    def processes(self) -> list[str]:
        return list(self.hosts)

    def replicas_of(self, name: str) -> list[Member]:
        return self.hosts[name].members if name in self.hosts else []

    def passing(self, who: str, facts: Mapping[str, Any]) -> Member | None:
        lives = {each.links.incarnation: each for each in self.replicas_of(who)}
        return lives.get(str(facts.get("life")))

    def is_moving(self, name: str) -> bool:
        return name in self.hosts and self.hosts[name]._moving is not None

    def stages(self) -> dict[str, list[int]]:
        """Which peer serves what."""
        return {name: sorted(host.stages) for name, host in self.hosts.items()}

    def rate_of(self, placement: Mapping[str, Sequence[int]]) -> float:
        """Microbatches/s of an assignment, as the speeds are now."""
        rates = [0.0] * self.num_stages
        for name, stages in placement.items():
            for stage in stages:
                seconds = sum(self.seconds) * self.costs[stage] * self.speed.get(name, 1.0)
                rates[stage] += 1.0 / (seconds * len(stages))
        return min(rates)

    async def start_all(self) -> None:
        starts = []
        for number, stages in enumerate(self.peers):
            name = f"p{number}"
            starts.append(self.start_peer(name, stages, pinned=bool(stages)))
        await asyncio.gather(*starts)

    def start_peer(self, name: str, stages: Sequence[int], *, pinned: bool) -> asyncio.Task[None]:
        """A process comes up. Done when it has begun to ask for `stages`, or for any."""
        incarnation = self._begin_life(name)
        begin = asyncio.get_running_loop().create_task
        start = self._start_peer(name, incarnation, stages, pinned)
        task = self.tasks[name] = self.contexts[name].run(begin, start)
        return task

    async def speed_of(self, name: str, reference: StageCompute) -> float:
        """Of a process's device, as it measures it before it serves."""
        return await device_speed(reference, "cpu")

    def host_of(self, name: str, *arguments: Any) -> Host:
        return Host(*arguments)

    async def _start_peer(
        self, name: str, incarnation: str, stages: Sequence[int], pinned: bool
    ) -> None:
        """It measures its device, then asks to serve."""
        transport = self.network.transport(name)
        front = Links(
            transport,
            RUN_ID,
            incarnation,
            {},
            heartbeat_s=self.heartbeat_s,
            silence_s=self.silence_s,
        )
        front.serve()
        reducer = GroupAllReduce(transport, front.incarnation)
        reducer.serve()
        device = self.computes[name] = FaultyCompute()

        async def find_leader() -> list[tuple[str, tuple[str, ...]]]:
            return [(trainer, ()) for trainer in self.trainer_ids]

        def cost_of(stage: int | None, kind: Kind) -> float:
            seconds = dict(zip((Kind.FORWARD, Kind.BACKWARD), self.seconds, strict=True))
            cost = 1.0 if stage is None else self.costs[stage]
            return seconds.get(kind, 0.0) * self.speed.get(name, 1.0) * cost

        def make(links: Links, stage: int | None) -> Member:
            chosen: list[Member] = []
            life = links.incarnation

            def seconds_of(kind: Kind) -> float:
                return cost_of(chosen[0].serves if chosen else None, kind)

            member = Member(
                links,
                self.pipeline,
                StageCompute(device, seconds_of),
                POLICIES[self.policy](reducer, self.gradients, self.plan.ahead),
                OPTIMIZER,
                self.trainer_ids,
                find_leader,
                num_microbatches=self.plan.num_microbatches,
                stage=stage,
                slots=self.slots,
                kept_bytes=self.kept_bytes,
                benchmark_s=self.benchmark_s,
                speed=speed,
                memory_bytes=self.memory_bytes,
                pinned=pinned,
                probe=lambda point, **facts: self.on_probe(name, point, {**facts, "life": life}),
                say=lambda line: self.said.append(f"{name}: {line}"),
            )
            chosen.append(member)
            member.random.seed(f"{self.seed}/{links.incarnation}")
            return member

        def name_life() -> str:
            self.lives[name] += 1
            return f"{name}#{self.lives[name]}"

        reference = StageCompute(device, lambda kind: cost_of(None, kind))
        speed = await self.speed_of(name, reference)
        host = self.hosts[name] = self.host_of(name, make, front, reducer.lives, name_life)
        host.begin(stages or (None,))
        self.fronts[name] = front
        self.tasks[name] = asyncio.get_running_loop().create_task(host.run(), name=name)

    def kill(self, name: str) -> None:
        """What kill -9 does."""
        self.thaw(name)
        self.chronicle.crashed(name)
        if (leaving := self.leaving.pop(name, None)) is not None:
            leaving.cancel()
        self.tasks.pop(name).cancel()
        host = self.hosts.pop(name)
        host.abort()
        self.fronts.pop(name).abort()
        self.network.kill(name)

    async def stop(self, name: str) -> None:
        if name not in self.hosts:
            return
        task, host = self.tasks.pop(name), self.hosts.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await host.aclose()
        await self.fronts.pop(name).aclose()
        await self.computes[name].aclose()
        await self.network.transports[name].close()
