"""What every optimizer here is: an update of one flat float32 tensor, with flat state.

`swarm.optim` has those that give the same bits on every machine, `swarm.torch_optimizer` all
others of `torch.optim`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from swarm.errors import WireError


class OptimizerSettings(Protocol):
    """The `[optimizer]` section, as far as optimizers read it."""

    @property
    def name(self) -> str: ...
    @property
    def betas(self) -> Sequence[float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...


class FlatLayout(Protocol):
    """What an optimizer needs of `swarm.model.layout.ParameterLayout`."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def shapes(self) -> Sequence[Sequence[int]]: ...
    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def total(self) -> int: ...
    @property
    def num_decayed(self) -> int: ...


class FlatOptimizer(ABC):
    """Updates a flat float32 tensor in place. Its state: flat float32, fixed names and sizes.

    Nothing but `step` and `load_state` changes anything. `state` returns the live tensors, not
    copies: whoever keeps them across a step copies them.
    """

    def __init__(self, num_elements: int, num_decayed: int, settings: OptimizerSettings) -> None:
        if not 0 <= num_decayed <= num_elements:
            raise ValueError(f"num_decayed {num_decayed} is not within 0..{num_elements}")
        self.num_elements = num_elements
        self.num_decayed = num_decayed
        self.settings = settings

    @abstractmethod
    def step(
        self, parameters: Tensor, gradient: Tensor, *, lr: float, scale: float, step: int
    ) -> None:
        """Apply update number `step`, counted from 1, with `gradient` times `scale`.

        Leaves `gradient` as it was. All tensors: float32, flat, `num_elements`, one device.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` in. WireError, and nothing changed, when names, sizes or dtypes differ."""
        for name, tensor in self._checked(state).items():
            tensor.copy_(state[name])

    def _checked(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our own state, when `state` is like it. Raises WireError."""
        mine = self.state()
        if sorted(state) != sorted(mine):
            raise WireError(f"optimizer state has {sorted(state)}, expected {sorted(mine)}")
        for name, tensor in mine.items():
            theirs = state[name]
            if theirs.shape != tensor.shape or theirs.dtype != tensor.dtype:
                raise WireError(
                    f"optimizer state {name!r} is {theirs.dtype} {tuple(theirs.shape)}, "
                    f"expected {tensor.dtype} {tuple(tensor.shape)}"
                )
        return mine

    def _check(self, parameters: Tensor, gradient: Tensor, step: int) -> None:
        for tensor in (parameters, gradient):
            if tensor.shape != (self.num_elements,) or tensor.dtype != torch.float32:
                raise ValueError(
                    f"expected float32 ({self.num_elements},), "
                    f"got {tensor.dtype} {tuple(tensor.shape)}"
                )
        if step < 1:
            raise ValueError(f"updates are counted from 1, got {step}")
