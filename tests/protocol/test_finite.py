"""NaN of one replica is its own fault and costs a repetition; NaN of all is the step's outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer import stage_tasks
from swarm.compute import Kind
from swarm.finite import finite
from swarm.wire.boundaries import BACKWARD
from swarm.wire.codecs import WireTensor
from tests.protocol.faults import spoil_forward, spoil_gradients, spoil_sum
from tests.protocol.late_device import LateDownloader, Signal
from tests.protocol.simulated import Swarm, TinyBatches, baseline, plan

MICROBATCHES, STEPS, STEP = 6, 3, 1
Spoil = Callable[[Swarm, str], None]


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nonsense is seen only once it is in the accumulator."""
    if request.param == "gpu":
        monkeypatch.setattr(stage_tasks, "Downloader", LateDownloader)


class Spoiled(Swarm):
    """`spoil` is called each time that one of `victims` passes `point` in step 1, `times` of them
    at most by each."""

    def __init__(
        self, victims: Sequence[str], point: str, spoil: Spoil, times: int = 1000, **more: Any
    ) -> None:
        super().__init__(plan=plan(MICROBATCHES, STEPS), **more)
        self.victims, self.point, self.spoil, self.times = victims, point, spoil, times
        self.spoiled: Counter[str] = Counter()

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        here = (point, facts.get("step")) == (self.point, STEP)
        if here and who in self.victims and self.spoiled[who] < self.times:
            self.spoiled[who] += 1
            self.spoil(self, who)

    def told(self, point: str) -> list[dict[str, Any]]:
        return [facts for _, _, each, facts in self.events if each == point]

    def outcomes(self) -> list[str]:
        return [result.record.outcome for result in self.results if result.record]

    def train(self) -> str:
        sha256 = self.run(STEPS, limit_s=300.0)["sha256"]
        assert self.spoiled.keys() == {*self.victims}, "nothing was injected"
        return sha256


def forward(swarm: Swarm, who: str) -> None:
    spoil_forward(swarm.members[who].server.state)  # type: ignore[union-attr]


def gradients(swarm: Swarm, who: str) -> None:
    spoil_gradients(swarm.members[who].server)  # type: ignore[arg-type]


def added_up(swarm: Swarm, who: str) -> None:
    spoil_sum(swarm.members[who].server.state)  # type: ignore[union-attr]


def unsent(swarm: Swarm, who: str) -> None:
    """Its next backward cannot be encoded, as where there is no memory left."""
    server = swarm.members[who].server
    assert server is not None
    tasks = server.stage_tasks
    codecs = tasks.codecs

    def pack(tensors: Any, boundary: int, direction: str, microbatch: Any) -> Any:
        if direction != BACKWARD:
            return codecs.pack(tensors, boundary, direction, microbatch)
        tasks.codecs = codecs
        raise RuntimeError("no memory to encode it in")

    tasks.codecs = SimpleNamespace(pack=pack)  # type: ignore[assignment]


def not_uploaded(swarm: Swarm, who: str) -> None:
    """What comes next cannot be copied to its device."""
    server = swarm.members[who].server
    assert server is not None
    uploader = server.uploader

    class Full:
        def begin(self, wires: Sequence[WireTensor]) -> Any:
            server.uploader = uploader
            raise RuntimeError("out of memory")

    server.uploader = Full()  # type: ignore[assignment]


@pytest.mark.parametrize("replicas", [(2, 2, 2), (1, 1, 1)], ids=["twins", "alone"])
@pytest.mark.parametrize(
    ("point", "spoil"),
    [("backward", unsent), ("backward", not_uploaded), ("sent", not_uploaded)],
    ids=["encode", "upload of a gradient", "upload"],
)
def test_what_fails_around_the_kernels_is_computed_again_and_counted_once(
    point: str, spoil: Spoil, replicas: tuple[int, ...]
) -> None:
    swarm = Spoiled(["r1.0"], point, spoil, times=1, replicas=replicas)
    assert swarm.train() == baseline(STEPS, MICROBATCHES)[0]
    assert not swarm.told("expelled")
    assert {facts["suspect"] for facts in swarm.told("failed")} == {"r1.0#1"}


KERNELS = [
    pytest.param("forward", forward, id="forward"),
    pytest.param("backward", gradients, id="backward"),
    pytest.param("backward", added_up, id="sum"),
]


@pytest.mark.parametrize(("point", "spoil"), KERNELS)
@pytest.mark.parametrize("victim", ["r0.1", "r1.1", "r2.1"])
def test_a_replica_that_always_makes_nan_is_left_to_others(
    point: str, spoil: Spoil, victim: str
) -> None:
    swarm = Spoiled([victim], point, spoil)
    assert swarm.train() == baseline(STEPS, MICROBATCHES)[0]
    assert swarm.outcomes() == ["applied"] * STEPS
    blamed = {facts["suspect"] for facts in swarm.told("failed")}
    blamed |= {facts["replica"] for facts in swarm.told("expelled")}
    assert blamed == {f"{victim}#1"}


@pytest.mark.parametrize(("point", "spoil"), KERNELS)
@pytest.mark.parametrize("victim", ["r0.0", "r1.0", "r2.0"])
def test_who_is_alone_tries_once_more(point: str, spoil: Spoil, victim: str) -> None:
    swarm = Spoiled([victim], point, spoil, times=1, replicas=(1, 1, 1))
    assert swarm.train() == baseline(STEPS, MICROBATCHES)[0]
    assert swarm.outcomes() == ["applied"] * STEPS


@pytest.mark.parametrize(("point", "spoil"), KERNELS)
@pytest.mark.parametrize("replicas", [(2, 2, 2), (1, 1, 1)], ids=["twins", "alone"])
def test_what_nobody_of_a_stage_does_better_is_the_steps_outcome(
    point: str, spoil: Spoil, replicas: tuple[int, ...]
) -> None:
    """The step is skipped, as it is where one process computes such numbers; training goes on."""
    swarm = Spoiled([f"r1.{i}" for i in range(replicas[1])], point, spoil, replicas=replicas)
    swarm.train()
    assert swarm.outcomes() == ["applied", "skipped", "applied"]


def test_the_datas_nan_costs_nothing() -> None:
    """It comes in with the batch: nobody made it, nobody is asked again."""
    swarm = Swarm(plan=plan(MICROBATCHES, STEPS), batches=TinyBatches(poisoned=((STEP, 2),)))
    assert swarm.run(STEPS)["sha256"] == baseline(STEPS, MICROBATCHES, ((STEP, 2),))[0]
    outcomes = [result.record.outcome for result in swarm.results if result.record]
    assert outcomes == ["applied", "skipped", "applied"]
    assert not [point for _, _, point, _ in swarm.events if point in ("failed", "expelled")]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        counts = sum(compute.counts[kind] for compute in swarm.computes.values())
        assert counts == 3 * STEPS * MICROBATCHES


@pytest.mark.parametrize("device", ["gpu"], indirect=True)
@pytest.mark.parametrize("replicas", [(2, 2, 2), (1, 1, 1)], ids=["twins", "alone"])
def test_what_a_device_reports_late_voids_what_its_replica_had_counted(
    replicas: tuple[int, ...],
) -> None:
    """Its gradients have been added by then, and would be again."""

    def failing(swarm: Swarm, who: str) -> None:
        server = swarm.members[who].server
        assert server is not None
        tasks = server.stage_tasks
        downloader = tasks.downloader

        class Failing(LateDownloader):
            def begin(self, packed: Any = (), numbers: Any = ()) -> Any:
                departures: Any = super().begin(packed, numbers)
                departures.ready = Signal(report)
                tasks.downloader = downloader
                return departures

        tasks.downloader = Failing(server.state.device)

    def report() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    swarm = Spoiled(["r1.0"], "backward", failing, times=1, replicas=replicas)
    assert swarm.train() == baseline(STEPS, MICROBATCHES)[0]
    assert swarm.outcomes() == ["applied"] * STEPS


def test_finite() -> None:
    numbers = torch.arange(6.0)
    assert finite([numbers, torch.arange(3), torch.tensor([])])
    huge = torch.full((4,), 3e38)
    assert finite([huge])  # though its sum is none
    assert finite([torch.full((3,), 6e4, dtype=torch.float16)])
    for wrong in (float("nan"), float("inf"), -float("inf")):
        assert not finite([numbers, torch.tensor([0.0, wrong])])
    assert not finite([torch.tensor([float("inf"), -float("inf")])])
