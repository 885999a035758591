"""What is trained, and what came of a step: all that a leader and the baseline have in common.

Apart from `peer.leader`, because the baseline is the oracle of what a leader should come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from swarm.ahead import NONE, Ahead
from swarm.model.layout import ParameterLayout
from swarm.optim import OptimizerSettings
from swarm.spec import TensorSpec
from swarm.terms import Record


class Batches(Protocol):
    """Microbatches as pure functions of (step, index)."""

    def batch(self, step: int, index: int) -> Mapping[str, np.ndarray]: ...

    def validation_batch(self, index: int) -> Mapping[str, np.ndarray]: ...


class Shape(Protocol):
    """What a leader needs to know of the pipeline."""

    num_stages: int
    cut: tuple[int, ...]
    layer_costs: Sequence[int]
    batch_spec: dict[str, TensorSpec]
    key_order: list[str]

    @property
    def latest_boundary(self) -> int: ...

    @property
    def shared_bytes(self) -> int: ...

    def stage_cost(self, stage: int) -> float: ...

    def weight(self, batch: Mapping[str, Any]) -> int: ...

    def layout(self, stage: int) -> ParameterLayout: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of the run config that a leader or the baseline acts on."""

    num_microbatches: int
    num_steps: int  # where the run ends; nothing is worked ahead beyond it
    lr: Callable[[int], float]
    clip_norm: float = 0.0
    validation_every: int = 0
    validation_microbatches: int = 0
    optimizer: OptimizerSettings | None = None  # so that states can be told from nonsense
    accumulate: str = "float64"
    gradient_bytes: tuple[float, float] = (8.0, 4.0)  # an element's contribution, and its sum
    ahead: Ahead = NONE  # which microbatches may go round before the commit of the step before


def divisor_of(weights: Iterable[int]) -> float:
    """What the losses of a step with these weights are divided by; 1 where nothing weighs."""
    return float(max(sum(weights), 1))


@dataclass(slots=True)
class StepResult:
    """What is told of a step that became real. Times are of the clock of whoever drove it."""

    step: int
    loss: float
    grad_norm: float
    tokens: int
    wall_s: float
    validation_loss: float | None = None
    record: Record | None = None
