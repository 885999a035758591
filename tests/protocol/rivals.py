"""Two trainers that want to lead at once, each at the worst moment for the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.consensus import Vote
from tests.protocol.simulated import Swarm

FIVE = ("t0", "t1", "t2", "t3", "t4")


class Rival:
    """t2 wins a term, and says so to `candidate`, `late_s` after its own vote has become one for
    which `when` is true. From that vote on the disk of `candidate` takes seconds; what t3 and t4
    answer comes a little after what t2 does."""

    def __init__(
        self, swarm: Swarm, candidate: str, when: Callable[[Vote], bool], late_s: float
    ) -> None:
        self.swarm, self.candidate, self.late_s = swarm, candidate, late_s
        self.when, self.has_seen = when, False
        self.task: asyncio.Task[None] | None = None
        swarm.disks["t2"].saved = self._look
        for name in ("t3", "t4"):
            swarm.disks[name].seconds = 0.1

    @property
    def has_led(self) -> bool:
        return self.task is not None and self.task.done() and self.task.exception() is None

    def _look(self) -> None:
        self.swarm.chronicle.voted()
        if not self.has_seen and self.when(self.swarm.disks["t2"].durable):
            self.has_seen = True
            self.swarm.disks[self.candidate].seconds = 2.0
            self.swarm.later(self.late_s, self._rise)

    def _rise(self) -> None:
        self.task = self.swarm.contexts["t2"].run(asyncio.ensure_future, self._lead())

    async def _lead(self) -> None:
        trainer = self.swarm.trainers["t2"]
        await trainer.quorum.elect()
        await trainer.say_leads(self.candidate, trainer.quorum.term)
