"""A stage that is trained one step stale, so that averaging overlaps with the next step's work.

With the policy *delayed* the first microbatches of step s are computed with V_(s-1), the others
with V_s, and the commit of s makes V_(s+1) out of V_s with their gradient (V_0 are the first
weights, and V_(-1) too). So step s+1 can begin before s is averaged (docs/decisions/delayed.md).
Held are two versions of the parameters, each with the accumulator of the step that begins with it,
and the optimizer's own state, of the newest. Where all microbatches are the first ones this is the
update rule of PipeDream-2BW (arXiv 2006.09503, section 3.1). Which are is part of the run, so one
process computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from swarm.model.layout import fingerprint
from swarm.model.stage import Stage
from swarm.optim import OptimizerSettings
from swarm.stage_state import StageState

PREVIOUS = "previous"  # in `tensors`: the parameters that the oldest step begins with


class DelayedState:
    """The trainable state of one stage at step s: V_s and V_(s-1).

    `build` makes the stage with its first weights, for each version anew. What it has in common
    with `StageState` means the same; `parameters` are the newest, `accumulator` is the oldest
    step's.
    """

    def __init__(
        self,
        build: Callable[[], Stage],
        optimizer: OptimizerSettings,
        *,
        accumulate: str = "float64",
        device: str = "cpu",
    ) -> None:
        self._newest = StageState(build(), optimizer, accumulate=accumulate, device=device)
        self._previous = self._newest.sharing(build())
        self.device, self.layout = self._newest.device, self._newest.layout

    @property
    def live(self) -> tuple[StageState, ...]:
        """What steps s and s+1 begin with: V_(s-1) and V_s."""
        return self._previous, self._newest

    @property
    def parameters(self) -> Tensor:
        return self._newest.parameters

    @property
    def accumulator(self) -> Tensor:
        return self._previous.accumulator

    @property
    def updates(self) -> int:
        return self._newest.updates

    def evaluate(self, inputs: Sequence[Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Forward only, with the newest version."""
        return self._newest.evaluate(inputs, batch)

    # ---- a commit: the older version becomes the newest -----------------------------------------

    def apply(self, gradient: Tensor, *, lr: float, scale: float) -> None:
        """One optimizer step on a copy of V_s, which takes the place of V_(s-1).

        V_s stays as it is: step s+1 has begun with it.
        """
        self._catch_up()
        self._previous.apply(gradient, lr=lr, scale=scale)
        self._turn()

    def skip(self) -> None:
        """A step was committed that changes no parameter: V_(s+1) is V_s."""
        self._catch_up()
        self._previous.clear()
        self._turn()

    def _catch_up(self) -> None:
        self._previous.parameters.copy_(self._newest.parameters)
        self._previous.updates = self._newest.updates

    def _turn(self) -> None:
        self._previous, self._newest = self._newest, self._previous

    # ---- the state as bytes ---------------------------------------------------------------------

    def fingerprint(self) -> str:
        """A cheap hash of both versions and the optimizer state (I5)."""
        tensors = self.tensors()
        first = tensors.pop("parameters")
        return f"{fingerprint(first, *(each for _, each in sorted(tensors.items()))):016x}"

    def tensor_hashes(self) -> dict[str, str]:
        """sha256 of each parameter of the newest version."""
        return self._newest.tensor_hashes()

    def tensors(self) -> dict[str, Tensor]:
        """The live flat float32 tensors that make up the state (not copies)."""
        return {**self._newest.tensors(), PREVIOUS: self._previous.parameters}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Take over a state. WireError, and nothing changed, when names or sizes differ."""
        previous = tensors[PREVIOUS]
        self._newest.load(tensors, updates)
        self._previous.parameters.copy_(previous)
        self._previous.clear()


State = StageState | DelayedState


def new_state(
    build: Callable[[], Stage],
    optimizer: OptimizerSettings,
    *,
    steps_in_flight: int = 1,
    accumulate: str = "float64",
    device: str = "cpu",
) -> State:
    """A stage's first state, for a policy with so many steps under way at once: one or two."""
    if steps_in_flight == 1:
        return StageState(build(), optimizer, accumulate=accumulate, device=device)
    return DelayedState(build, optimizer, accumulate=accumulate, device=device)
