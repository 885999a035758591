"""A stage as it is trained: module, parameters, gradient accumulator, optimizer state.

The same class serves a replica in a swarm and the one-process baseline, so what they compute per
microbatch is the same code; what differs is only who calls it and in which order (DESIGN, I2, I6).
Nothing here knows of the network, steps in progress or other replicas. All methods are blocking
and belong on the compute thread.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.errors import WireError
from swarm.model.layout import ParameterLayout, fingerprint, gradient_sha256
from swarm.model.stage import Stage, backward
from swarm.optim import OptimizerSettings, make_optimizer


@dataclass(slots=True)
class Graph:
    """What a forward leaves for its backward, which is `state`'s: `inputs` and `outputs` of one
    microbatch."""

    state: StageState
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class StageState:
    """One stage's trainable state.

    `accumulate` is the accumulator's dtype, "float64" or "float32". `updates` counts the optimizer
    steps that have been applied.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: OptimizerSettings,
        *,
        accumulate: str = "float64",
        device: str = "cpu",
    ) -> None:
        self.stage = stage.train()  # but in `evaluate`
        self.device = torch.device(device)
        self.layout = ParameterLayout.of(stage)
        self.parameters = self.layout.flatten(stage)
        self.optimizer = make_optimizer(optimizer, self.layout, device)
        self.accumulator = torch.zeros(
            self.layout.total, dtype=getattr(torch, accumulate), device=self.device
        )
        self.updates = 0
        self._dirty = False
        self.spoiled = False  # what is in the accumulator is not what it should be

    def sharing(self, stage: Stage) -> StageState:
        """The same state in another module, with parameters and accumulator of its own."""
        other = self.computing(stage)
        other.accumulator = torch.zeros_like(self.accumulator)
        return other

    def computing(self, stage: Stage) -> StageState:
        """Another module with parameters of its own, for forward and for backward into others."""
        other = copy.copy(self)
        other.stage, other.parameters = stage.train(), self.layout.flatten(stage)
        other.accumulator = self.accumulator.new_empty(0)
        return other

    @property
    def live(self) -> tuple[StageState, ...]:
        """What the steps under way begin with, the oldest first. One step: this one."""
        return (self,)

    def waiting(self, ahead: int) -> StageState:
        """What microbatches are computed with that wait for the commit before: this."""
        return self

    def forward(
        self,
        step: int,
        index: int,
        inputs: Sequence[Tensor],
        batch: Mapping[str, Tensor],
        divisor: float | None,
    ) -> Graph:
        """Training forward of one microbatch. With a `divisor` (last stage) the output is
        `(loss_sum / divisor,)`: token losses over the tokens of the whole step."""
        leaves = tuple(
            tensor.detach().requires_grad_(True) if tensor.is_floating_point() else tensor
            for tensor in inputs
        )
        self.stage.set_microbatch(step, index)
        with torch.enable_grad():
            outputs = self.stage(leaves, batch)
            if divisor is not None:
                outputs = (outputs[0] / divisor,)
        return Graph(self, leaves, outputs)

    def backward(
        self,
        graph: Graph,
        gradients: Sequence[Tensor] | None,
        *,
        into: StageState | None,
        before: Callable[[tuple[Tensor, ...]], None] = lambda answers: None,
    ) -> tuple[Tensor, ...]:
        """Gradients of the inputs of a graph of this state. Those of the parameters are added to
        the accumulator of `into` (None: of nobody), unless `before` raises, which is given those
        of the inputs first: all that may fail belongs there, but for what a GPU has to tell, which
        is not waited for.

        Either everything is added to the accumulator or, when this raises, nothing; but if adding
        itself raises, part of it may be in there, and `into` is `spoiled` until its `clear`.
        """
        left = True
        try:
            answers = backward(graph.inputs, graph.outputs, gradients)
            before(answers)
            if into is not None:
                into._dirty = True
                try:
                    self.layout.grad_into(self.stage, into.accumulator)
                except BaseException:
                    into.spoiled = True
                    raise
                left = False
            return answers
        finally:
            if left:  # walking through the modules costs as much as a kernel or two
                for parameter in self.stage.parameters():
                    parameter.grad = None

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Forward only, dropout off. The last stage returns `(loss_sum,)`."""
        self.stage.eval()
        try:
            outputs: tuple[Tensor, ...] = self.stage(tuple(inputs), batch)
            return outputs
        finally:
            self.stage.train()

    def clear(self) -> None:
        """Forget what was accumulated."""
        if self._dirty:
            self.accumulator.zero_()
            self._dirty = self.spoiled = False

    @torch.no_grad()
    def apply(self, gradient: Tensor, *, lr: float, scale: float) -> None:
        """One optimizer step with the averaged flat float32 gradient; empties the accumulator."""
        self.updates += 1
        self.optimizer.step(self.parameters, gradient, lr=lr, scale=scale, step=self.updates)
        self.clear()

    def skip(self) -> None:
        """A step was committed that changes no parameter."""
        self.clear()

    def fingerprint(self) -> str:
        """A cheap hash of parameters and optimizer state: equal for replicas in step (I5)."""
        tensors = [self.parameters, *(value for _, value in sorted(self.optimizer.state().items()))]
        return f"{fingerprint(*tensors):016x}"

    def tensor_hashes(self) -> dict[str, str]:
        """sha256 of each parameter, by its whole-model name."""
        return self.layout.tensor_sha256(self.parameters)

    # ---- the state as bytes: snapshots and checkpoints -----------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The live flat float32 tensors that make up the state (not copies)."""
        optimizer = {f"optimizer.{name}": each for name, each in self.optimizer.state().items()}
        return {"parameters": self.parameters, **optimizer}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Take over a state. WireError, and nothing changed, when names or sizes differ."""
        parameters = tensor_like(self.parameters, tensors, "parameters")
        prefix = "optimizer."
        self.optimizer.load_state(
            {name[len(prefix) :]: each for name, each in tensors.items() if name.startswith(prefix)}
        )
        self.parameters.copy_(parameters)
        self.updates = updates
        self.clear()


def tensor_like(mine: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """That tensor of a state that came from elsewhere. WireError unless it is of my kind."""
    theirs = tensors.get(name)
    if theirs is None:
        raise WireError(f"a state without {name!r}: it has {sorted(tensors)}")
    if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
        raise WireError(
            f"{name!r} of a state is {theirs.dtype} {tuple(theirs.shape)}, "
            f"expected {mine.dtype} {tuple(mine.shape)}"
        )
    return theirs


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """What a member tells the leader of its stage's averaged gradient."""

    sha256: str
    squared_norms: list[float]
    finite: bool

    @classmethod
    def of(cls, layout: ParameterLayout, gradient: Tensor) -> GradientFacts:
        return cls.made(gradient_sha256(gradient), layout.squared_norms(gradient))

    @classmethod
    def made(cls, sha256: str, squared_norms: list[float]) -> GradientFacts:
        return cls(sha256, squared_norms, all(map(math.isfinite, squared_norms)))


def total(losses: Iterable[float]) -> float:
    """Exact whatever the order; nan where infinities make it undefined."""
    try:
        return math.fsum(losses)
    except (OverflowError, ValueError):
        return math.nan


def rounded(accumulator: Tensor) -> Tensor:
    """The accumulator rounded to float32 once, in new memory."""
    return accumulator.to(torch.float32, copy=True)
