"""Peers that stand for machines of their own: a device that takes the time it is told, and a model.

Processes that really compute share the cores of the machine they run on, so killing one makes the
others faster, and no speed under churn means anything. A paced device waits instead (DESIGN,
"Compute"): it takes its configured seconds for every forward and backward, one at a time, in the
order of the real queue, and then returns tensors of the configured shape, as a model computes them
that is too small to matter. Network, protocol, averaging and hashes are the real ones.

`pipeline` is that model, `paced(...)` a run config of it, `PacedCompute` the device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from swarm.compute import InlineCompute, Kind, Task, Timed, waited_for
from swarm.config import RunConfig, parse_config
from swarm.model.definition import Pipeline

T = TypeVar("T")
WIDTH = 64
MAX_LAYERS = 16
PIPELINE = "swarm.sim.paced:pipeline"


class PacedCompute(InlineCompute):
    """The 1F1B queue of a device that takes `seconds_of(kind)` per task of a real clock.

    The device has a time line of its own: a task ends its seconds after the later of its arrival
    and the end of the task before it, however late this process was woken, so that sharing cores
    with other processes costs the paced machine nothing as long as it keeps up. What a task
    computes runs on the event loop, and must be small.
    """

    def __init__(self, seconds_of: Callable[[Kind], float], *, afab: bool = False) -> None:
        super().__init__(seconds_of, afab=afab)
        self._free_at = 0.0

    async def run(
        self, kind: Kind, task: Task[T], step: int = 0, *, seconds: float | None = None
    ) -> Timed[T]:
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        await self._turn(kind, step)
        try:
            seconds = self._seconds_of(kind) if seconds is None else seconds
            self._free_at = max(self._free_at, arrived) + seconds
            if (late_s := self._free_at - loop.time()) > 0:
                await asyncio.sleep(late_s)
            self.busy_s += seconds
            self.counts[kind] += 1
            return Timed(waited_for(task()), seconds)
        finally:
            self._next()


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _samples() -> SimpleNamespace:
    draw = np.random.default_rng(0)
    return SimpleNamespace(
        train={"x": draw.standard_normal((256, WIDTH), dtype=np.float32)},
        validation={"x": draw.standard_normal((16, WIDTH), dtype=np.float32)},
    )


pipeline = Pipeline(
    layers={f"layer{number}": _Layer for number in range(MAX_LAYERS)},
    inputs=lambda batch: batch["x"],
    loss=lambda outputs, batch: outputs[0].square().sum(),
    weight=lambda batch: len(batch["x"]),
    data=_samples,
)


def paced(
    *, stages: int, microbatches: int, microbatch_size: int, steps: int = 100_000
) -> RunConfig:
    """A run of the paced model; its learning rate is too small to lead anywhere."""
    sections: dict[str, Any] = {
        "run": {"name": "paced", "seed": 0},
        "model": {"stages": stages, "pipeline": PIPELINE},
        "data": {"source": "pipeline"},
        "batch": {"microbatches": microbatches, "microbatch_size": microbatch_size},
        "optimizer": {"name": "sgd", "lr": 1e-9, "momentum": 0.0, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "warmup_steps": 0, "steps": steps},
        "wire": {"activations": "float32", "gradients": "float32"},
        "update": {"accumulate": "float64"},
        "validation": {"every": 0},
        "checkpoint": {"every": 0},
    }
    return parse_config(sections, "the paced run")
