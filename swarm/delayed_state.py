"""A stage that is trained one step stale, so that averaging overlaps with the next step's work.

With the policy *delayed* the first microbatches of step s, a share f of all, are computed with
V_(s-1), and the commit of s makes V_(s+1) out of V_s with the gradient of all (V_0 are the first
weights, and V_(-1) too). So step s+1 can begin before s is averaged (docs/decisions/delayed.md).
The others wait for V_s, and are computed as far beyond it as balances the first ones, with
V_s + f / (1 - f) (V_s - V_(s-1)): the mean of where gradients are taken is V_s, so the gradient of
a step is that of *exact* but for what curvature changes within an update or two. For f above 2/3
it would be more than two, and is two. Where all are the first ones nothing balances, and the rule
is that of PipeDream-2BW (arXiv 2006.09503, section 3.1).

Held are two versions of the parameters, each with the accumulator of the step that begins with it,
the balanced one, and the optimizer's own state, of the newest. Which microbatches are the first is
part of the run, so one process computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from swarm.ahead import Ahead
from swarm.model.layout import fingerprint
from swarm.model.stage import Stage
from swarm.optim import OptimizerSettings
from swarm.stage_state import StageState, tensor_like

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
        balance: float = 0.0,
        accumulate: str = "float64",
        device: str = "cpu",
    ) -> None:
        self._newest = StageState(build(), optimizer, accumulate=accumulate, device=device)
        self._previous = self._newest.sharing(build())
        self._balance = balance
        self._balanced = self._newest.computing(build()) if balance else self._newest
        self._is_balanced = False  # it is that of V_s
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

    def waiting(self, ahead: int) -> StageState:
        """What microbatches are computed with that wait for V_s, in a step in which `ahead` do not.

        Valid until the next commit. Belongs on the compute thread.
        """
        if not (ahead and self._balance):
            return self._newest
        if not self._is_balanced:
            # One operation at a time, none fused: the same bits everywhere (DESIGN, I5).
            newest, update = self._newest.parameters, self._balanced.parameters
            torch.sub(newest, self._previous.parameters, out=update)
            update.mul_(self._balance).add_(newest)
            self._is_balanced = True
        return self._balanced

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
        self._is_balanced = False

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
        previous = tensor_like(self._previous.parameters, tensors, PREVIOUS)
        self._newest.load(tensors, updates)
        self._previous.parameters.copy_(previous)
        self._previous.clear()
        self._is_balanced = False


State = StageState | DelayedState


def new_state(
    build: Callable[[], Stage],
    optimizer: OptimizerSettings,
    *,
    ahead: Ahead | None = None,
    accumulate: str = "float64",
    device: str = "cpu",
) -> State:
    """A stage's first state; with `ahead` that of a policy with two steps under way at once."""
    if ahead is None or not ahead.microbatches:
        return StageState(build(), optimizer, accumulate=accumulate, device=device)
    return DelayedState(
        build, optimizer, balance=ahead.balance, accumulate=accumulate, device=device
    )
