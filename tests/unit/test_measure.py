"""What a peer finds out about its device before it serves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from peer import measure
from peer.measure import StageFacts, device_speed, stage_facts
from swarm.compute import InlineCompute, Kind, Timed
from swarm.sim.virtual_time import run
from swarm.stage_state import StageState
from tests.protocol.tiny import OPTIMIZER, shared_pipeline

SECONDS = {Kind.FORWARD: 0.001, Kind.BACKWARD: 0.002, Kind.BACKGROUND: 0.0}


class Busy(InlineCompute):
    """A device whose tasks take three times as long when other programs come between, as they
    mostly do."""

    def __init__(self, seed: str) -> None:
        super().__init__()
        self.draw = random.Random(seed)

    async def run(
        self, kind: Kind, task: Callable[[], Any], step: int = 0, *, seconds: float | None = None
    ) -> Timed[Any]:
        disturbed = self.draw.random() < 0.6
        takes_s = SECONDS[kind] * (3.0 if disturbed else 1.0)
        return await super().run(kind, task, step, seconds=takes_s)


@pytest.mark.parametrize("number", range(8))
def test_a_devices_speed_is_what_it_does_when_it_has_nothing_else_to_do(number: int) -> None:
    """So peers that start at once on a busy machine say the same."""
    rounds = run(device_speed(Busy(f"busy/{number}"), "cpu"))
    assert rounds == pytest.approx(1 / sum(SECONDS.values()))


def test_no_memory_to_measure_a_stage_with_is_no_reason_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same process may serve another stage, and goes on."""

    def none_left(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measure, "_made_up", none_left)
    pipeline = shared_pipeline(1)
    state = StageState(pipeline.build_stage(0), OPTIMIZER)
    assert run(stage_facts(InlineCompute(), state, pipeline, 0, 1.0)) == StageFacts(None, 0)
