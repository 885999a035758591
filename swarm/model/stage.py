"""What a stage and a pipeline are to the rest of the project, wherever the model comes from.

A stage is a function of its inputs, its parameters and the microbatch's own fields, and of nothing
else: that is what lets any replica repeat any microbatch (DESIGN I2). Two things are made equal for
every cut, because kernels round differently for them: tensors between units are contiguous and
start on a 64-byte boundary, forward and backward (`seam`), and every unit draws its own random
numbers (`Stage.reseed`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from swarm.model.cut import stage_range
from swarm.model.layout import ParameterLayout
from swarm.model.randomness import derive_seed, set_seed
from swarm.spec import TensorSpec

ALIGNMENT_BYTES = 64
Batch = Mapping[str, Tensor]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a TensorSpec's dtype name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no torch dtype is called {name!r}")
    return dtype


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def needs_gradient(spec: TensorSpec) -> bool:
    """Whether a gradient comes back for a boundary tensor: for floating point ones, always."""
    return torch_dtype(spec.dtype).is_floating_point


def gradient_specs(boundary: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """What comes back over a boundary: one gradient per floating point tensor, in their order."""
    return tuple(spec for spec in boundary if needs_gradient(spec))


def _settled(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        return tensor.contiguous()
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT_BYTES:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class _Seam(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        settled = _settled(tensor)
        return settled.view_as(settled)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _settled(gradients[0])


def seam(tensor: Tensor) -> Tensor:
    """The tensor as the wire would deliver it: contiguous and aligned, its gradient too."""
    if not tensor.is_floating_point() or not tensor.requires_grad:
        return _settled(tensor)
    return _Seam.apply(tensor)


class Stage(nn.Module, ABC):
    """A contiguous slice of a model.

    `forward(inputs, batch)` takes what the previous stage returned (the first stage takes `()`) and
    the microbatch's fields, and returns the boundary tensors; the last stage returns `(loss_sum,)`,
    a float32 scalar: the *sum* of the item losses (whoever calls divides by the step's items).
    Floating point inputs should require a gradient when training; integer ones have none.
    Parameters keep their whole-model names. `train()` / `eval()` switch dropout.
    """

    def __init__(self, inner: nn.Module, seed: int) -> None:
        super().__init__()
        self.inner = inner
        self.seed = seed
        self.microbatch = (0, 0)
        self.refresh_names()

    def refresh_names(self) -> None:
        """To be called when parameters of `inner` have been replaced by others."""
        self._named = list(self.inner.named_parameters())

    @abstractmethod
    def forward(self, inputs: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, ...]: ...

    def set_microbatch(self, step: int, index: int) -> None:
        """Names the microbatch of the next forward; its random draws depend on it."""
        self.microbatch = (step, index)

    def unit_seed(self, unit: str) -> int:
        return derive_seed(self.seed, "forward", *self.microbatch, unit)

    def reseed(self, unit: str) -> None:
        """Called before a unit runs. Costs some 10 µs, so nobody asks whether it is needed."""
        set_seed(self.unit_seed(unit))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Whole-model names, in the model's key order (not those of this wrapper)."""
        for name, parameter in self._named:
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def unit_runner(
        self, unit: str, function: Callable[..., Any], recompute: bool
    ) -> Callable[..., Any]:
        """`function` with its own randomness, and with its activations recomputed if asked.

        The seed is taken when the forward runs: its recomputation happens in the backward, when
        the stage may long be at another microbatch.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            seed = self.unit_seed(unit)

            def seeded_run(*args: Any, **kwargs: Any) -> Any:
                set_seed(seed)
                return function(*args, **kwargs)

            if not (recompute and self.training and torch.is_grad_enabled()):
                return seeded_run(*args, **kwargs)
            from torch.utils.checkpoint import checkpoint

            return checkpoint(
                seeded_run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )

        return run


def backward(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    """Runs a stage's backward; parameters' `.grad` grow, and the inputs' gradients are returned.

    `gradients` are those of the floating point outputs, in order (None for the last stage, whose
    loss is its own root). Returned are those of the floating point inputs, in order, zeros where
    an input did not matter; they are contiguous and detached, and the inputs' `.grad` is cleared.
    """
    floating = [tensor for tensor in outputs if tensor.is_floating_point()]
    roots = list(zip(floating, gradients if gradients is not None else [None] * len(floating)))  # noqa: B905
    roots = [(tensor, gradient) for tensor, gradient in roots if tensor.requires_grad]
    if roots:
        torch.autograd.backward([r[0] for r in roots], [r[1] for r in roots])
    answers = []
    for tensor in inputs:
        if tensor.is_floating_point():
            gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            answers.append(_settled(gradient.detach()))
            tensor.grad = None
    return tuple(answers)


class ModelPipeline(ABC):
    """A whole model, described; `build_stage` makes the one slice a peer serves.

    Attributes: `num_stages`; `cut`, layers per stage; `layer_costs`, what each layer computes
    relative to the others, as far as its shapes tell; `batch_spec`, one microbatch's fields;
    `key_order`, the parameter names of the whole model in the order exports and hashes use.
    """

    num_stages: int
    cut: tuple[int, ...]
    layer_costs: Sequence[int]
    batch_spec: dict[str, TensorSpec]
    key_order: list[str]

    @property
    def latest_boundary(self) -> int:
        """How many layers may come before the last boundary, whatever the cut."""
        return len(self.layer_costs) - 1

    @property
    def shared_bytes(self) -> int:
        """What every stage holds on its device beside parameters and activations."""
        return 0

    def differs_from(self, config: Mapping[str, Any]) -> str:
        """Why the parameters of a run of that canonical config would not mean here what they meant
        there, though names and shapes fit; empty if they do."""
        return ""

    def stage_cost(self, stage: int) -> float:
        """What a microbatch costs in `stage`, in the unit of `layer_costs`."""
        return float(sum(self.layer_costs[slice(*stage_range(self.cut, stage))]))

    @abstractmethod
    def boundary(self, stage: int) -> tuple[TensorSpec, ...]:
        """What stage `stage` returns for one microbatch (not for the last: its loss)."""

    @abstractmethod
    def build_stage(self, stage: int, device: str | torch.device = "cpu") -> Stage:
        """Stage `stage` with its first weights; the same whatever the cut and the device."""

    @cached_property
    def _layouts(self) -> dict[int, ParameterLayout]:
        return {}

    def layout(self, stage: int) -> ParameterLayout:
        """Where a stage's parameters lie in its flat state; costs no memory.

        Asked for the first time it builds the stage on no device, which takes long if it is deep:
        not where others wait.
        """
        if stage not in self._layouts:
            self._layouts[stage] = ParameterLayout.of(self.build_stage(stage, "meta"))
        return self._layouts[stage]

    def check(self) -> None:  # noqa: B027  (nothing to prove by default)
        """For whoever starts a run: raises PipelineError if the cut changes numbers."""

    @abstractmethod
    def weight(self, batch: Mapping[str, Any]) -> int:
        """How many loss items (tokens, samples) the microbatch has."""
