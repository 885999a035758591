"""Peers that really compute, and then take a stated time more for every microbatch of a stage.

So stages cost what a test says, and one peer becomes slower when the test writes `SLOWER` into its
folder: how many times as long it takes from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peer import local_entry, witness
from tests.process import stoppable

COSTS = (1.0, 1.0, 4.0)  # of the stages
UNIT_S = {"FORWARD": 0.015, "BACKWARD": 0.03}
SLOWER = "slower"
REST_S = 5.0  # who has moved stays for so long; the usual five minutes are longer than a test


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

        async def run(self, kind: Kind, task: Callable[[], Any]) -> Any:
            if self.member.serves is None or kind.name not in UNIT_S:
                return await self.device.run(kind, task)
            factor = float(slower.read_text() or 1) if slower.exists() else 1.0
            more_s = UNIT_S[kind.name] * COSTS[self.member.serves] * factor

            def longer() -> Any:
                answer = task()
                time.sleep(more_s)
                return answer

            return await self.device.run(kind, longer)

        async def aclose(self) -> None:
            """The device is its process's."""

    class SlowedMember(Member):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.compute = Device(self, self.compute)

    class SlowedPeer(PeerProcess):
        member_type = SlowedMember

    return witness.peer(arguments, tell, SlowedPeer)
