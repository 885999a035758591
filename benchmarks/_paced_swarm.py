"""A local swarm of paced peers (`swarm.sim.paced`) that keeps books, for benchmarks of churn.

Each peer stands for a machine of its own: its device takes `FORWARD_S` and `BACKWARD_S` per
microbatch, whatever else this machine does. Everything but the kernels is real.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from peer import local_entry, witness
from peer.launch import stamp
from peer.local import LEADER, LocalProcess, LocalSwarm
from swarm.config import RunConfig
from swarm.net.identity import Identity, claim_identity_file, load_identity
from swarm.sim.paced import paced

SECONDS = "SWARM_BENCH_PACE"  # environment: seconds of a forward, a backward
COSTS = "SWARM_BENCH_COSTS"  # environment: how many times that each stage takes; else once
CONNECTIONS = "SWARM_BENCH_CONNECTIONS"  # environment: of each peer to each other; else one
SPEED = "speed"  # a file of a peer: how many times slower its device is, from now on
POLL_S = 0.02
S = TypeVar("S", bound="PacedSwarm")


class PacedSwarm(LocalSwarm):
    leader_target = witness.WITNESSED_LEADER
    peer_target = "_paced_swarm:peer"
    served_at: dict[str, float]  # by the name of the process: when it first served

    def _hear(self, process: LocalProcess, message: Mapping[str, Any]) -> None:
        super()._hear(process, message)
        if str(message.get("say", "")).startswith("serving stage"):
            self.served_at.setdefault(process.name, now())

    @property
    def step(self) -> int:
        return int(self.status().get("step", 0))

    def incarnations(self) -> dict[str, str]:
        """By the name of the process, of replicas that serve."""
        serving = {
            str(row["replica"]).partition("#")[0]: str(row["replica"])
            for row in self.status().get("replicas", [])
            if row["standing"] == "serving"
        }
        found = {}
        for name, process in self.processes.items():
            path = process.data_dir / "identity.key"
            if name != LEADER and process.alive and not process.frozen and path.exists():
                peer_id = load_identity(path).peer_id
                if peer_id in serving:
                    found[name] = serving[peer_id]
        return found

    async def until(self, condition: Callable[[], Any], what: str, limit_s: float = 60.0) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    self.raise_if_failed()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise RuntimeError(f"waited for {what}; see {self.run_dir}") from None

    async def until_serving(self, counts: Mapping[int, int]) -> None:
        def complete() -> bool:
            stages = [self.processes[name].stage for name in self.incarnations()]
            return all(stages.count(stage) >= count for stage, count in counts.items())

        await self.until(complete, f"{dict(counts)} to serve")

    def book(self) -> list[dict[str, Any]]:
        """The leader's lines so far."""
        return list(witness.lines_of(self.run_dir / "peers" / LEADER / witness.FILE))


@contextmanager
def paced_swarm(
    *,
    peers: Mapping[int, int] | Sequence[tuple[int | None, int | None]],
    microbatches: int,
    forward_s: float,
    backward_s: float,
    drain_s: float = 30.0,
    costs: Sequence[float] = (),
) -> Iterator[PacedSwarm]:
    """A swarm to be started; its files are gone afterwards. `costs` of the stages, if they differ;
    then `peers` may be (stage or None, threads) each."""
    run = paced(stages=len(costs or peers), microbatches=microbatches, microbatch_size=1)
    os.environ[COSTS] = " ".join(map(str, costs))
    with swarm_of(PacedSwarm, run, peers, (forward_s, backward_s), drain_s=drain_s) as swarm:
        yield swarm


@contextmanager
def swarm_of(
    kind: type[S],
    run: RunConfig,
    peers: Mapping[int, int] | Sequence[tuple[int | None, int | None]],
    pace: Sequence[float],
    *,
    drain_s: float = 30.0,
) -> Iterator[S]:
    """A swarm of this run, to be started; its files are gone afterwards. `pace`: seconds of a
    forward and a backward."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        folder = Path(name)
        os.environ[SECONDS] = " ".join(map(str, pace))
        identity = claim_identity_file(folder / "identity.key")
        config = stamp(run, identity.peer_id)
        identity.release()
        swarm = kind(
            config,
            folder / "run",
            peers=peers,
            identity_path=identity.path,
            threads=1,
            device="cpu",
            drain_s=drain_s,
            say=lambda line: None,
        )
        swarm.served_at = {}
        yield swarm


def peer(arguments: Mapping[str, Any], tell: local_entry.Tell) -> int:
    """A peer with a paced device, which several stages may share."""
    from peer.member import Member
    from peer.run_peer import PeerOptions, PeerProcess
    from swarm.compute import Compute, Kind
    from swarm.net.link import JoinLink
    from swarm.sim.paced import PacedCompute

    forward_s, backward_s = (float(each) for each in os.environ[SECONDS].split())
    costs = [float(each) for each in os.environ.get(COSTS, "").split()]
    seconds = {Kind.FORWARD: forward_s, Kind.BACKWARD: backward_s}
    speed = Path(arguments["data_dir"]) / SPEED
    stage: ContextVar[int | None] = ContextVar("stage", default=None)

    def seconds_of(kind: Kind) -> float:
        where = stage.get()
        cost = costs[where] if costs and where is not None else 1.0
        slower = float(speed.read_text()) if speed.exists() else 1.0
        return seconds.get(kind, 0.0) * cost * slower

    class Share:
        """The device, as the stage of one member uses it."""

        def __init__(self, member: Member, device: Any) -> None:
            self.member, self.device, self.counts = member, device, device.counts

        async def run(self, kind: Kind, task: Callable[[], Any], step: int = 0) -> Any:
            token = stage.set(self.member.serves)
            try:
                return await self.device.run(kind, task, step)
            finally:
                stage.reset(token)

        async def aclose(self) -> None:
            """The device is its process's."""

    class PacedMember(Member):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.compute = Share(self, self.compute)

    class PacedPeer(PeerProcess):
        member_type = PacedMember

        def __init__(
            self, link: JoinLink, identity: Identity, options: PeerOptions, **rest: Any
        ) -> None:
            several = int(os.environ.get(CONNECTIONS, "1"))
            super().__init__(link, identity, replace(options, connections=several), **rest)

        def open_device(self) -> Compute:
            return PacedCompute(seconds_of)

    return witness.peer(arguments, tell, PacedPeer)


def now() -> float:
    """The clock of the books."""
    return time.time()
