"""Peers that really compute, and then take a stated time more for every microbatch of a stage.

So stages cost what a test says, and one peer becomes slower when the test writes `SLOWER` into its
folder: how many times as long it takes from then on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peer import local_entry, witness
from peer.local import LEADER
from swarm.net.identity import load_identity
from swarm.net.links import peer_of
from tests.process import stoppable
from tests.process.stoppable import Stoppable

COSTS = (1.0, 1.0, 4.0)  # of the stages
UNIT_S = {"FORWARD": 0.015, "BACKWARD": 0.03}
SLOWER = "slower"
REST_S = 5.0  # who has moved stays for so long; the usual five minutes are longer than a test


class Slowed(Stoppable):
    leader_target = "tests.process.slowed:leader"
    peer_target = "tests.process.slowed:peer"

    def name_of(self) -> dict[str, str]:
        """The processes that run, by peer id."""
        keys = {
            name: process.data_dir / "identity.key"
            for name, process in self.processes.items()
            if name != LEADER and process.alive
        }
        return {load_identity(key).peer_id: name for name, key in keys.items() if key.exists()}

    def there(self, stage: int) -> list[str]:
        """Who serves this stage, and none but this."""
        return [name for name, stages in self.serving().items() if stages == {stage}]

    def serving(self) -> dict[str, set[int]]:
        """Stages by the name of the process: both, of a mover that its old stage still needs."""
        names, found = self.name_of(), defaultdict[str, set[int]](set)
        for row in self.status().get("replicas", []):
            if row["standing"] == "serving" and peer_of(row["replica"]) in names:
                found[names[peer_of(row["replica"])]].add(row["stage"])
        return found

    def settled(self, count: int) -> bool:
        """Nobody is left but so many peers, each in one stage, and the slowest stage is as fast as
        the best assignment of one stage to each of them makes it."""
        status, names = self.status(), self.name_of()
        rows = status.get("replicas", [])
        if any(row["standing"] != "serving" for row in rows):
            return False
        if {peer_of(row["replica"]) for row in rows} != set(names):
            return False
        if not len(rows) == len(names) == count:  # more rows: a mover that its old stage needs
            return False
        placement = status["placement"]
        return min(placement["stages"]) >= 0.95 * placement["best"]

    def share_of(self, name: str, since: int) -> float:
        """Of the routes drawn since, how many led through this peer."""
        peer_id = load_identity(self.processes[name].data_dir / "identity.key").peer_id
        routes = self.routes()[since:]
        return sum(route[-1].startswith(peer_id) for route in routes) / len(routes)

    def slow_down(self, name: str, factor: float) -> None:
        """From now on it takes so many times as long."""
        (self.processes[name].data_dir / SLOWER).write_text(str(factor))

    def routes(self) -> list[list[str]]:
        lines = witness.lines_of(self.run_dir / "peers" / LEADER / witness.FILE)
        return [line["route"] for line in lines if line["point"] == "issue"]


def leader(arguments: Mapping[str, Any], tell: local_entry.Tell) -> int:
    """A leader that moves a peer again soon: where all start at once, first rates mislead."""
    from swarm.placement import MovePolicy

    return stoppable.leader(arguments, tell, moves=MovePolicy(hysteresis_s=REST_S))


def peer(arguments: Mapping[str, Any], tell: local_entry.Tell) -> int:
    """As `witness.peer`, on such a device."""
    from peer.member import Member
    from peer.run_peer import PeerProcess
    from swarm.compute import Kind

    slower = Path(arguments["data_dir"]) / SLOWER

    class Device:
        """The process's device, as the stage of one member uses it."""

        def __init__(self, member: Member, device: Any) -> None:
            self.member, self.device, self.counts = member, device, device.counts

        async def run(self, kind: Kind, task: Callable[[], Any], step: int = 0) -> Any:
            if self.member.serves is None or kind.name not in UNIT_S:
                return await self.device.run(kind, task, step)
            factor = float(slower.read_text() or 1) if slower.exists() else 1.0
            more_s = UNIT_S[kind.name] * COSTS[self.member.serves]

            def longer() -> Any:
                began = time.perf_counter()
                answer = task()
                took_s = time.perf_counter() - began
                time.sleep(more_s * factor + took_s * (factor - 1))
                return answer

            return await self.device.run(kind, longer, step)

        async def aclose(self) -> None:
            """The device is its process's."""

    class SlowedMember(Member):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.compute = Device(self, self.compute)

    class SlowedPeer(PeerProcess):
        member_type = SlowedMember

    return witness.peer(arguments, tell, SlowedPeer)
