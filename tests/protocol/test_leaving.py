"""Who wants to go stays as long as it is needed."""

from __future__ import annotations

import asyncio
from typing import Any

from peer.leader import Leader
from tests.protocol.simulated import Swarm, baseline, plan

STEPS = 3


class LeavesBetweenSteps(Swarm):
    """One of two asks to leave between two steps, and its twin dies in the next."""

    async def start_all(self) -> None:
        self.asked = asyncio.Event()
        await super().start_all()

    async def at_record(self, leader: Leader) -> None:
        await super().at_record(leader)
        if leader.next_step == 1:  # as with a checkpoint or a validation, which take time
            await self.asked.wait()

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if (who, point, facts.get("step")) == ("r1.0", "committed", 0):
            self.later(0.0, self.leave, "r1.0", 0.0)
        elif point == "leaving":
            self.asked.set()
        elif (who, point, facts.get("step")) == ("r1.1", "counted", 1):
            self.later(0.0, self.kill, "r1.1")


def test_who_asked_to_leave_between_two_steps_is_taken_back_when_its_twin_dies() -> None:
    swarm = LeavesBetweenSteps(replicas=(1, 2, 1), plan=plan(4, STEPS))
    assert swarm.run(STEPS)["sha256"] == baseline(STEPS)[0]
