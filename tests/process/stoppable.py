"""A swarm that ends when the test says so, and peers that fail as the test says.

How many steps fit before a fault has run its course depends on the machine, so no test names that
number: its script waits for what it wants to see, then says `enough`, and the baseline trains as
many steps as there were.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer import witness
from peer.local import LEADER, LocalSwarm
from swarm.events import tail_events
from swarm.net.channel import HEARTBEAT_S
from tests.process.paced import pace
from tests.protocol.faults import spoil_forward

STOP = "stop"
RESET = signal.SIGUSR1
WAIT_S = 60.0
# From the freeze or cut of a replica to its end at the leader: 5 s of silence, and room for a busy
# machine. One so busy that heartbeats came 3 s late before would be given longer (`unevenness`).
NOTICED_S = 5.0 + HEARTBEAT_S


class Stoppable(LocalSwarm):
    leader_target = "tests.process.stoppable:leader"
    peer_target = "tests.process.stoppable:peer"

    def enough(self) -> None:
        """The leader ends after the step it trains."""
        (self.run_dir / STOP).touch()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [
            event for event in tail_events(self.run_dir / "events.jsonl") if event["event"] == kind
        ]

    @property
    def step(self) -> int:
        return int(self.status().get("step", 0))

    def num_serving(self, stage: int) -> int:
        """How many replicas take part in a stage, as the leader last said."""
        rows = self.status().get("replicas", [])
        return [row["stage"] for row in rows if row["standing"] == "serving"].count(stage)

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        """What the condition then is: asked again, the swarm may have gone on."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not (found := condition()):
                    self.raise_if_failed()
                    await asyncio.sleep(0.02)
                return found
        except TimeoutError:
            raise AssertionError(f"waited for {what}; {self.status()}") from None

    async def until_said(self, name: str, line: str, times: int) -> None:
        """Until a peer has said that so many times."""
        log = self.processes[name].log

        def said() -> bool:
            return log.exists() and log.read_text().count(line) >= times

        await self.until(said, f"{line!r} of {name}")

    async def until_step(self, more: int) -> None:
        """Until so many more steps are committed."""
        goal = self.step + more
        await self.until(lambda: self.step >= goal, f"step {goal}")

    async def within_a_step(self) -> None:
        """Until a step has begun to count and is far from its end."""

        def under_way() -> bool:
            lines = list(witness.lines_of(self.run_dir / "peers" / LEADER / witness.FILE))
            acknowledged = [line for line in lines[-3:] if line["point"] == "acknowledged"]
            return len(acknowledged) == 3 and len({line["step"] for line in acknowledged}) == 1

        await self.until(under_way, "the middle of a step")


class FailingKernels(Stoppable):
    """Of peer 1b's forwards every eighth raises, and every eighth is NaN."""

    peer_target = "tests.process.stoppable:peer_with_failing_kernels"


class Resettable(Stoppable):
    """`reset` ends all streams of a peer at once, whatever they carry."""

    peer_target = "tests.process.stoppable:peer_that_resets"

    def reset(self, name: str) -> None:
        os.kill(self.processes[name].child.pid, RESET)


def leader(arguments: Any, tell: Any, **more: Any) -> int:
    """With `more` as options of the process."""
    from peer.run_leader import LeaderProcess

    class StoppableLeader(LeaderProcess):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, **more})

        def _out_of_time(self, began: float) -> bool:
            return (self.run_dir / STOP).exists()

    return witness.leader(arguments, tell, StoppableLeader)


def peer(arguments: Any, tell: Any) -> int:
    pace()
    return witness.peer(arguments, tell)


def peer_with_failing_kernels(arguments: Any, tell: Any) -> int:
    from swarm.stage_state import StageState

    if Path(arguments["data_dir"]).name == "1b":
        forward, calls = StageState.forward, [0]

        def failing(self: StageState, *args: Any) -> Any:
            calls[0] += 1
            if calls[0] % 8 == 0:
                raise FloatingPointError("a kernel has failed")
            if calls[0] % 8 == 4:
                spoil_forward(self)
            return forward(self, *args)

        StageState.forward = failing  # type: ignore[method-assign]
    return peer(arguments, tell)


def peer_that_resets(arguments: Any, tell: Any) -> int:
    from swarm.net.libp2p import Libp2pTransport

    class Reset(Libp2pTransport):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._loop.add_signal_handler(RESET, self.reset)

        def reset(self) -> None:
            for stream in list(self._streams):
                stream.abort()

    Libp2pTransport.create = Reset.create  # type: ignore[method-assign]
    return peer(arguments, tell)
