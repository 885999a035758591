"""A model so small that a whole swarm trains it in a tenth of a second, and its one-process run.

Real torch modules, a real optimizer and dropout: enough for rounding and randomness to show.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn, tanh

from peer.baseline import Baseline
from peer.training import Plan, StepResult
from swarm.ahead import Ahead
from swarm.model.custom import CustomPipeline
from swarm.model.definition import Pipeline
from swarm.schedule import Schedule

Place = tuple[int, int]  # a microbatch: step and index

ALL = 1 << 32  # as `ahead`: every microbatch that a step can have


class Block(nn.Module):
    """Linear, nonlinearity, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(tanh(self.linear(x)))


@functools.cache
def tiny_data() -> SimpleNamespace:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((64, 6)).astype(np.float32)
    y = (x[:, :1] * x[:, 1:2] > 0).astype(np.int64).reshape(-1)
    return SimpleNamespace(train={"x": x[:48], "y": y[:48]}, validation={"x": x[48:], "y": y[48:]})


TINY = Pipeline(
    layers={
        "enter": lambda: nn.Linear(6, 8),
        "one": lambda: Block(8),
        "two": lambda: Block(8),
        "three": lambda: Block(8),
        "leave": lambda: nn.Linear(8, 2),
    },
    inputs=lambda batch: (batch["x"],),
    loss=lambda outputs, batch: nn.functional.cross_entropy(
        outputs[0], batch["y"].long(), reduction="sum"
    ),
    weight=lambda batch: batch["y"].size if isinstance(batch["y"], np.ndarray) else len(batch["y"]),
    data=tiny_data,
)

OPTIMIZER = SimpleNamespace(
    name="adamw",
    lr=0.01,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    momentum=0.9,
    nesterov=False,
)


class TinyBatches:
    """Samples drawn by (step, index). Those of `poisoned` are not numbers."""

    def __init__(self, microbatch_size: int = 4, poisoned: Sequence[Place] = ()) -> None:
        self.data, self.size, self.poisoned = tiny_data(), microbatch_size, poisoned

    def batch(self, step: int, index: int) -> Mapping[str, np.ndarray]:
        rows = np.random.default_rng((step, index)).integers(0, 48, self.size)
        batch = {name: array[rows] for name, array in self.data.train.items()}
        if (step, index) in self.poisoned:
            batch["x"] = np.full_like(batch["x"], np.nan)
        return batch

    def validation_batch(self, index: int) -> Mapping[str, np.ndarray]:
        rows = np.arange(self.size) + index * self.size
        return {name: array[rows % 16] for name, array in self.data.validation.items()}


def pipeline(num_stages: int, cut: Sequence[int] | None = None) -> CustomPipeline:
    return CustomPipeline(
        TINY, seed=3, num_stages=num_stages, microbatch_size=4, cut=tuple(cut) if cut else None
    )


@functools.cache
def _shared(num_stages: int, cut: tuple[int, ...] | None) -> CustomPipeline:
    return pipeline(num_stages, cut)


def shared_pipeline(num_stages: int, cut: Sequence[int] | None = None) -> CustomPipeline:
    """Pipelines hold no state of a swarm; building one costs more than a step."""
    return _shared(num_stages, tuple(cut) if cut else None)


def plan(num_microbatches: int = 4, num_steps: int = 3, **more: Any) -> Plan:
    schedule = Schedule(kind="cosine", peak=0.01, warmup_steps=2, steps=50, final_ratio=0.1)
    return Plan(num_microbatches, num_steps, schedule.lr, clip_norm=1.0, **more)


def ahead_of(policy: str, ahead: int, num_microbatches: int, since: int = 0) -> Ahead:
    if policy == "exact":
        return Ahead()
    return Ahead(min(ahead, num_microbatches), num_microbatches, since)


@functools.cache
def baseline(
    num_steps: int = 3,
    num_microbatches: int = 4,
    poisoned: tuple[Place, ...] = (),
    policy: str = "exact",
    ahead: int = ALL,
    since: int = 0,
) -> tuple[str, list[StepResult]]:
    """sha256 and step results of the one-process run."""
    batches = TinyBatches(poisoned=poisoned)
    chosen = plan(num_microbatches, ahead=ahead_of(policy, ahead, num_microbatches, since))
    oracle = Baseline(chosen, shared_pipeline(1), batches, OPTIMIZER)
    results = list(oracle.steps(num_steps))
    return oracle.report()["sha256"], results
