"""An averaged gradient stays on the device until it is applied, unless the room is needed before:
no microbatch is computed beside one, whoever dies and whatever becomes of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from swarm.averaging.policy import ExactPolicy, Update
from tests.protocol.simulated import LEADER, Fault, Swarm, TinyBatches, baseline, plan

STEPS, MICROBATCHES = 4, 6


class Watched(Swarm):
    """Counts the microbatches that are computed beside a gradient on their replica's device."""

    crowded = 0

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        member = self.passing(who, facts)
        if point in ("forward", "backward") and member is not None and member.commits is not None:
            for held in (member.commits.prepared, member.commits.committed):
                self.crowded += held is not None and held.update.on_device is not None


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Update]:
    """All updates. Each has its gradient on the device, which is the CPU here."""
    prepare, updates = ExactPolicy.prepare, list[Update]()

    async def keeping(
        self: ExactPolicy, round_id: str, members: Sequence[str], *others: Any
    ) -> Update:
        update = await prepare(self, round_id, members, *others)
        update.on_device = update.gradient.clone()
        updates.append(update)
        return update

    monkeypatch.setattr(ExactPolicy, "prepare", keeping)
    return updates


FAULTS = {
    "nobody dies": (),
    "a replica dies, prepared": (Fault("prepared", "kill", replica="r1.1", step=1),),
    "a replica and the leader die when all have prepared": (
        Fault("prepared", "kill", step=1, count=6, victim="r1.1"),
        Fault("prepared", "kill", step=1, count=6, victim=LEADER, duration_s=1.0),
    ),
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_nothing_is_computed_beside_it(faults: tuple[Fault, ...], kept: list[Update]) -> None:
    swarm = Watched(plan=plan(MICROBATCHES, STEPS), faults=list(faults))
    assert swarm.run(STEPS)["sha256"] == baseline(STEPS, MICROBATCHES)[0]
    assert swarm.fired == list(faults), "nothing was injected"
    assert len(kept) >= 6 * STEPS - 2 * len(faults)
    assert swarm.crowded == 0


def test_a_step_that_is_skipped_leaves_none() -> None:
    swarm = Watched(plan=plan(MICROBATCHES, STEPS), batches=TinyBatches(poisoned=((1, 2),)))
    assert swarm.run(STEPS)["sha256"] == baseline(STEPS, MICROBATCHES, ((1, 2),))[0]
    outcomes = [result.record.outcome for result in swarm.results if result.record]
    assert outcomes == ["applied", "skipped", "applied", "applied"]
    assert swarm.crowded == 0
