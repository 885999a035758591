"""What a device can do, measured before it serves: its speed, and a stage's time and memory on it.

Estimates for the first minute only. Once microbatches are acknowledged, the leader measures what
they really took (`swarm.routing`). Kernels run on made-up inputs on the device's own queue, so a
process that serves another stage meanwhile goes on doing so; parameters and accumulator stay as
they are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm.compute import Compute, Kind, Result
from swarm.device import Downloader
from swarm.errors import StageFailedError
from swarm.model.stage import ModelPipeline, torch_dtype
from swarm.spec import TensorSpec
from swarm.stage_state import Graph, StageState

MAX_ROUNDS = 3  # forward and backward, after one that warms up
MATRIX = 256
GPU_MATRIX = 4096  # of a smaller one the launch is all that shows
REFERENCE_S = 0.1  # of the device's time go into its speed, or `MAX_ROUNDS` if they take longer
MAX_PIECES = 200  # even if they are shorter
MAX_BYTES = 1 << 48
MIN_SERVICE_S, MAX_SERVICE_S = 1e-6, 1e6  # of a microbatch; what lies outside is not believed


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What one microbatch of a stage takes on this device; None where it could not be found."""

    service_s: float | None
    activation_bytes: int

    @classmethod
    def read(cls, value: object) -> StageFacts | None:
        """From a replica's `ready`; None for what makes no sense, for it is only an estimate."""
        match value:
            case {
                "service_s": float() | None as service_s,
                "activation_bytes": int(held),
            } if 0 <= held < MAX_BYTES:
                usable = service_s is None or MIN_SERVICE_S < service_s < MAX_SERVICE_S
                return cls(service_s if usable else None, held)
        return None

    def body(self) -> dict[str, Any]:
        """As it is told to the leader."""
        return {"service_s": self.service_s, "activation_bytes": self.activation_bytes}


async def device_speed(compute: Compute, device: str) -> float:
    """Rounds per second of a fixed reference, a matrix product forward and one backward, when the
    device has nothing else to do.

    So the shortest of many short pieces counts. Other work often comes between, most of all where
    several peers start at once, and a speed that is too low would make the peer's stage look cheap
    (`peer.rebalancing`): nothing that is measured later tells a dear stage from a slow peer.
    """
    draw = torch.Generator().manual_seed(0)
    side = MATRIX if device == "cpu" else GPU_MATRIX
    made = torch.randn(side, side, generator=draw)
    matrix = (await compute.run(Kind.BACKGROUND, lambda: made.to(device))).value
    downloader = Downloader(torch.device(device))

    def product() -> Result[None]:
        matrix @ matrix
        return downloader.begin().done(None)

    there, back = list[float](), list[float]()
    while len(there) <= MAX_ROUNDS or (
        sum(there) + sum(back) < REFERENCE_S and len(there) < MAX_PIECES
    ):
        there.append((await compute.run(Kind.FORWARD, product)).seconds)
        back.append((await compute.run(Kind.BACKWARD, product)).seconds)
    return (side / MATRIX) ** 3 / max(min(there) + min(back), 1e-9)


async def stage_facts(
    compute: Compute, state: StageState, pipeline: ModelPipeline, stage: int, limit_s: float
) -> StageFacts:
    """A few real microbatches of made-up numbers, for about `limit_s` at most."""
    loop = asyncio.get_running_loop()
    began, seconds, held = loop.time(), list[float](), 0
    try:
        made_up = await compute.run(
            Kind.BACKGROUND, lambda: _made_up(pipeline, stage, state.device)
        )
    except StageFailedError:  # no memory for it
        return StageFacts(None, 0)
    batch, inputs = made_up.value
    divisor = 1.0 if stage == pipeline.num_stages - 1 else None
    downloader = Downloader(state.device)

    def forward() -> Result[tuple[Graph, int]]:
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            graph = state.forward(0, 0, inputs, batch, divisor)
        own = {each.untyped_storage().data_ptr() for each in (state.parameters, *batch.values())}
        held = sum(size for place, size in saved.items() if place not in own)
        return downloader.begin().done((graph, held))

    def backward(graph: Graph) -> Result[None]:
        gradients = [torch.ones_like(each) for each in graph.outputs if each.is_floating_point()]
        state.backward(graph, None if divisor else gradients, into=None)
        return downloader.begin().done(None)

    try:
        for _ in range(1 + MAX_ROUNDS):
            there = await compute.run(Kind.FORWARD, forward)
            graph, held = there.value
            back = await compute.run(Kind.BACKWARD, lambda graph=graph: backward(graph))  # type: ignore[misc]
            seconds.append(there.seconds + back.seconds)
            if loop.time() - began > limit_s:
                break
    except StageFailedError:  # made-up numbers need not suit a model of the user's own
        seconds.clear()
    service_s = min(seconds) if seconds else None
    return StageFacts(service_s, held)


def _made_up(
    pipeline: ModelPipeline, stage: int, device: torch.device
) -> tuple[dict[str, Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(0)

    def tensor(spec: TensorSpec) -> Tensor:
        dtype: Any = torch_dtype(spec.dtype)
        if dtype.is_floating_point:
            return torch.randn(spec.shape, generator=draw).to(device, dtype)
        return torch.zeros(spec.shape, dtype=dtype, device=device)

    batch = {name: tensor(spec) for name, spec in sorted(pipeline.batch_spec.items())}
    return batch, [tensor(spec) for spec in (pipeline.boundary(stage - 1) if stage else ())]


def device_memory(device: str) -> int | None:
    """Bytes that are free on the device now; None where nobody says."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return None
    return None
