"""For how long a step waits for a replica from which nothing comes, of one stage and its twin."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peer.watch import CALM_STEPS, Watch
from swarm.patience import SUSPECT_S
from swarm.routing import Router
from swarm.sim.virtual_time import run
from swarm.step import Step

SERVICE_S, SHARE = 1.0, 3


class Stuttering:
    """What a `Watch` sees of a leader: "slow" has been silent for a while and owes its share."""

    def __init__(self) -> None:
        self.router = Router()
        self.wake = asyncio.Event()
        self.links = SimpleNamespace(open_channel=self._channel)
        self.expelled = asyncio.Event()
        self.step = None
        self.members = {name: SimpleNamespace(hold_offs=0) for name in ("slow", "twin")}
        leader: Any = self
        self.watch = Watch(leader)

    def _channel(self, replica: str) -> Any:
        silent_s = 2 * SUSPECT_S if replica == "slow" else 0.0
        return SimpleNamespace(silent_s=lambda: silent_s, unevenness=1.0)

    def probe(self, point: str, **facts: object) -> None:
        pass

    def is_averaged(self, step: Step) -> bool:
        return False

    def expel(self, step: Step, replica: str, reason: str) -> None:
        assert replica == "slow"
        step.expel(replica, reason)
        self.expelled.set()

    async def waited_s(self) -> float:
        """A step in which all wait for "slow", until it is left out."""
        step = Step(0, SHARE, 1, self.router)
        for replica in ("slow", "twin"):
            step.admit(replica, 0)
            self.router.observe(replica, SERVICE_S)
        for index in range(SHARE):
            step.hops[index] = ["slow"]
            step.open[index] = 1
        self.expelled.clear()
        began = asyncio.get_running_loop().time()
        listening = asyncio.ensure_future(self.watch.listen(step))
        await self.expelled.wait()
        waited_s = asyncio.get_running_loop().time() - began
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        return waited_s


def test_each_silence_is_waited_for_twice_as_long_until_steps_went_well() -> None:
    """Alarms fade, or a line that stutters now and then would make steps wait for ever longer."""

    async def main() -> list[float]:
        leader = Stuttering()
        waited = []
        for quiet_steps in (0, 0, 1, 9):
            waited.append(await leader.waited_s())
            leader.watch.calm({"twin"})  # the step it was left out in
            for _ in range(quiet_steps):
                leader.watch.calm({"slow", "twin"})
        return [*waited, await leader.waited_s()]

    share_s = SHARE * SERVICE_S
    expected = [share_s, 2 * share_s, 4 * share_s, 4 * share_s, share_s]
    assert run(main()) == pytest.approx(expected, abs=0.5)


def test_verdicts_are_forgotten_with_the_steps_that_a_replica_helps_to_make() -> None:
    """Else one that is left out now and then would in days be waited for without end."""

    async def main() -> None:
        leader = Stuttering()
        watch, member = leader.watch, leader.members["slow"]
        watch._strikes["slow"], member.hold_offs = 3, 2
        patience_s = watch.patience_of("slow")
        for _ in range(CALM_STEPS - 1):
            watch.calm({"slow"})
        watch.judged("slow")
        for _ in range(CALM_STEPS - 1):
            watch.calm({"slow"})
        watch.calm({"twin"})
        assert (watch.patience_of("slow"), member.hold_offs) == (patience_s, 2)
        watch.calm({"slow"})
        assert (watch.patience_of("slow"), member.hold_offs) == (patience_s / 2, 1)
        for _ in range(4 * CALM_STEPS):
            watch.calm({"slow"})
        assert (watch.patience_of("slow"), member.hold_offs) == (patience_s / 8, 0)

    run(main())
