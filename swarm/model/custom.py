"""A user's own modules (`swarm.Pipeline`) as the run cuts them.

The user lists *layers*; the run says how many stages they make. A layer is named and given by a
factory, so that a peer builds only its own and each layer's first weights depend on its name alone.
A layer takes and returns one tensor or a tuple of tensors, of any number, shape and dtype; those of
a stage's last one have the same in every microbatch, and dtypes that can be sent. Everything
between layers passes a seam (see `stage.py`), also inside a stage: another cut gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from swarm.errors import PipelineError, SwarmError
from swarm.model.cut import choose_cut, stage_range
from swarm.model.definition import Pipeline
from swarm.model.layout import ParameterLayout
from swarm.model.randomness import seeded
from swarm.model.stage import Batch, ModelPipeline, Stage, seam, spec_of, torch_dtype
from swarm.spec import ITEM_BYTES, TensorSpec
from swarm.wire.codecs import MAX_DIMS
from swarm.wire.frames import MAX_TENSORS

MAX_ITEMS = 1 << 40  # a microbatch may weigh: the sum of a step's stays exact in a float64


def _as_tuple(value: Any, who: str) -> tuple[Tensor, ...]:
    tensors = (value,) if isinstance(value, Tensor) else value
    remedy = "return tensors in a tuple"
    if not isinstance(tensors, tuple):
        raise PipelineError(f"{who} returned {type(value).__name__}", remedy)
    for i, each in enumerate(tensors):
        if not isinstance(each, Tensor):
            raise PipelineError(f"{who} returned {type(each).__name__} as tensor {i}", remedy)
    return tensors


def _run_layer(run: Callable[..., Any], name: str, tensors: tuple[Tensor, ...]) -> tuple:
    return tuple(seam(t) for t in _as_tuple(run(*tensors), f"layer {name}"))


class _Layers(nn.Module):
    """A ModuleDict that takes any name, also "half" or "type"."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(layers)


class CustomStage(Stage):
    def __init__(
        self,
        definition: Pipeline,
        layers: dict[str, nn.Module],
        seed: int,
        first: bool,
        last: bool,
        recompute: bool,
        autocast: torch.dtype | None,
        between: Mapping[str, Sequence[TensorSpec]] | None = None,
    ) -> None:
        """`between` says by layer what it gives; it may be left out where that is to be found."""
        super().__init__(_Layers(layers), seed)
        self.between = between or {}
        self.definition, self.first, self.last = definition, first, last
        self.autocast = autocast
        self.runners = {n: self.unit_runner(n, m, recompute) for n, m in layers.items()}

    def forward(self, inputs: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, ...]:
        tensors = tuple(inputs)
        device = next((t.device.type for t in (*tensors, *batch.values())), "cpu")
        # The meta device knows nothing of autocast, not even switched off.
        cast = self.autocast and torch.autocast(device, dtype=self.autocast)
        with cast or nullcontext():
            if self.first:
                self.reseed("(inputs)")
                tensors = _as_tuple(self.definition.inputs(dict(batch)), "inputs")
            tensors = tuple(seam(t) for t in tensors)
            for name, run in self.runners.items():
                tensors = _run_layer(run, name, tensors)
                if self.autocast and name in self.between:
                    # A GPU's autocast leaves more in float32 than the CPU's, which was asked what
                    # crosses a boundary.
                    tensors = tuple(
                        tensor.to(torch_dtype(spec.dtype))
                        for tensor, spec in zip(tensors, self.between[name], strict=True)
                    )
        if not self.last:
            if self.runners and self.between:
                self._check_sent(name, tensors)
            return tensors
        self.reseed("(loss)")
        loss = self.definition.loss(tuple(_to_float32(t) for t in tensors), batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            raise PipelineError("loss must return one number", "sum the item losses")
        return (loss.float().reshape(()),)

    def _check_sent(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        """Whoever gets them takes nothing else: it allocates before they arrive."""
        found = self.between[name]
        given = tuple(spec_of(tensor) for tensor in tensors)
        if given != tuple(found):
            raise PipelineError(
                f"layer {name} ends a stage and gave {_described(given)}, where "
                f"{_described(found)} was found when the run was made",
                "give tensors of the same shapes for every microbatch, by padding for example",
            )


def _described(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in specs) or "nothing"


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class CustomPipeline(ModelPipeline):
    """A Pipeline cut as the run asks. Raises PipelineError for what cannot be a function of its
    parameters and inputs: buffers that forward changes, shared parameters, inputs changed in place.
    """

    def __init__(
        self,
        definition: Pipeline,
        *,
        seed: int,
        num_stages: int,
        microbatch_size: int,
        cut: list[int] | tuple[int, ...] | None = None,
        recompute: bool = False,
        dtype: str = "float32",
    ) -> None:
        self.definition, self.seed, self.recompute = definition, seed, recompute
        self.autocast = None if dtype == "float32" else torch_dtype(dtype)
        samples = definition.load_data()
        self.batch_spec = definition.batch_spec(samples, microbatch_size)
        self.num_stages = num_stages
        self._check_weight(samples.train, microbatch_size)
        self._find_boundaries(samples.train)
        self.cut = choose_cut(self.layer_costs, num_stages, cut)
        for stage in range(num_stages - 1):
            self._check_boundary(stage)

    def _check_boundary(self, stage: int) -> None:
        specs = self.boundary(stage)
        name = list(self.definition.layers)[stage_range(self.cut, stage)[1] - 1]
        who, elsewhere = f"layer {name} ends stage {stage} and gives", "choose another [model] cut"
        most = MAX_TENSORS - len(self.batch_spec)
        if len(specs) > most:
            what = f"{who} {len(specs)} tensors, more than the {most} that can be sent"
            raise PipelineError(what, f"put some together, or {elsewhere}")
        for spec in specs:
            if spec.dtype not in ITEM_BYTES:
                what = f"{who} {spec.dtype}, which cannot be sent"
                dtypes = ", ".join(ITEM_BYTES)
                raise PipelineError(what, f"convert it to one of {dtypes}, or {elsewhere}")
            if len(spec.shape) > MAX_DIMS:
                what = f"{who} {len(spec.shape)} dimensions, more than the {MAX_DIMS} there may be"
                raise PipelineError(what, f"flatten some, or {elsewhere}")

    def _check_weight(self, fields: Mapping[str, np.ndarray], size: int) -> None:
        batch = {n: np.zeros((size, *each.shape[1:]), each.dtype) for n, each in fields.items()}
        try:
            self.weight(batch)
        except SwarmError:
            raise
        except Exception as error:  # whatever the user's function raises
            raise PipelineError(
                f"weight does not run: {type(error).__name__}: {error}",
                "return how many items the loss of this batch sums up",
            ) from error

    def _find_boundaries(self, fields: Mapping[str, np.ndarray]) -> None:
        if self.autocast is None:  # which the meta device knows nothing of
            try:
                return self._try("meta", fields)
            except PipelineError:
                raise
            except Exception:  # not everything has a meta kernel: try again with real tensors
                pass
        try:
            return self._try("cpu", fields)
        except SwarmError:
            raise
        except Exception as error:  # whatever the user's modules raise
            reason = f"{type(error).__name__}: {error}"
            if "_Seam is a view" in reason:
                raise PipelineError(
                    "a layer or the loss changes its input in place", "use operations that do not"
                ) from error
            raise PipelineError(f"the pipeline does not run: {reason}") from error

    def _try(self, device: str, fields: Mapping[str, np.ndarray]) -> None:
        """One forward and backward on made-up data: finds shapes and costs, and what to refuse."""
        with seeded(self.seed, "trial"):
            layers = {n: self._build_layer(n, device) for n in self.definition.layers}
            again = {n: self._build_layer(n, device) for n in self.definition.layers}
            for module in layers.values():
                ParameterLayout.of(module)
            _refuse_shared(layers, again)
            batch = {
                name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
                for name, spec in self.batch_spec.items()
            }
            before = _buffer_versions(layers)
            loss, self._between = self._run_through(layers, batch)
            if loss.requires_grad:
                loss.backward()
            elif any(p.requires_grad for each in layers.values() for p in each.parameters()):
                # What is made up may be all padding, whose loss depends on nothing.
                real = {
                    name: torch.from_numpy(_spread(fields[name], spec.shape[0])).to(device)
                    for name, spec in self.batch_spec.items()
                }
                if not self._run_through(layers, real)[0].requires_grad:
                    raise PipelineError(
                        "the loss depends on no parameter, so nothing would be trained",
                        "compute it from the outputs, without detach or no_grad",
                    )
            for name, module in layers.items():
                if any(p.grad is not None and p.grad.is_sparse for p in module.parameters()):
                    raise PipelineError(
                        f"layer {name} has sparse gradients", "leave out sparse=True"
                    )
            for key, version in _buffer_versions(layers).items():
                if before.get(key) != version:
                    raise PipelineError(
                        f"forward changes buffer {key} (batch statistics?)",
                        "use a module without running statistics, e.g. GroupNorm or LayerNorm",
                    )
        self.key_order = [
            f"{n}.{key}" for n, m in layers.items() for key, _ in m.named_parameters()
        ]
        self.layer_costs = [
            1 + sum(p.numel() for p in module.parameters()) for module in layers.values()
        ]

    def _run_through(
        self, layers: dict[str, nn.Module], batch: Batch
    ) -> tuple[Tensor, list[tuple[TensorSpec, ...]]]:
        """The loss, and what each layer gives. Raises PipelineError for changes in place."""
        stage = CustomStage(self.definition, {}, self.seed, True, False, False, self.autocast)
        given = _versions(batch.values())
        tensors = stage((), batch)
        _refuse_changed(given, "inputs changes the batch")
        between = []
        for name, module in layers.items():
            stage = CustomStage(
                self.definition, {name: module}, self.seed, False, False, False, self.autocast
            )
            given = _versions((*tensors, *batch.values()))
            tensors = stage(tensors, batch)
            _refuse_changed(given, f"layer {name} changes its input")
            between.append(tuple(spec_of(t) for t in tensors))
        stage = CustomStage(self.definition, {}, self.seed, False, True, False, self.autocast)
        given = _versions((*tensors, *batch.values()))
        (loss,) = stage(tensors, batch)
        _refuse_changed(given, "loss changes what it is given")
        return loss, between

    def _build_layer(self, name: str, device: str | torch.device) -> nn.Module:
        with seeded(self.seed, "init", name), torch.device("meta" if device == "meta" else "cpu"):
            module = self.definition.layers[name]()
        if not isinstance(module, nn.Module):
            raise PipelineError(f"the factory of layer {name} returned no torch module")
        if any(isinstance(each, UninitializedParameter) for each in module.parameters()):
            raise PipelineError(
                f"layer {name} has parameters whose size is not known until it runs",
                "give the sizes, as nn.Linear(8, 8) instead of nn.LazyLinear(8)",
            )
        for key, child in module.named_modules():
            if getattr(child, "track_running_stats", False):
                where = f"{name}.{key}".rstrip(".")
                raise PipelineError(
                    f"{where} ({type(child).__name__}) keeps running statistics",
                    "use GroupNorm or LayerNorm, or track_running_stats=False",
                )
        return module.to(device)

    def boundary(self, stage: int) -> tuple[TensorSpec, ...]:
        return self._between[stage_range(self.cut, stage)[1] - 1]

    def build_stage(self, stage: int, device: str | torch.device = "cpu") -> Stage:
        start, end = stage_range(self.cut, stage)
        names = list(self.definition.layers)
        layers = {name: self._build_layer(name, device) for name in names[start:end]}
        first, last = start == 0, end == len(names)
        between = dict(zip(names, self._between, strict=True))
        return CustomStage(
            self.definition, layers, self.seed, first, last, self.recompute, self.autocast, between
        )

    def weight(self, batch: Mapping[str, Any]) -> int:
        found = self.definition.weight(batch)
        try:
            items = int(found)
        except (TypeError, ValueError, OverflowError):  # None, NaN, inf
            items = -1
        if abs(items) > MAX_ITEMS:
            raise PipelineError("weight returned a huge number", f"return at most {MAX_ITEMS}")
        if items != found or items < 0:
            raise PipelineError(f"weight returned {found}", "return a number of items, 0 or more")
        return items


def _spread(array: np.ndarray, count: int) -> np.ndarray:
    """So many samples from all over the data, or all if there are fewer."""
    return np.ascontiguousarray(array[:: max(1, len(array) // count)][:count])


def _versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in tensors]


def _refuse_changed(given: list[tuple[Tensor, int]], what: str) -> None:
    if any(tensor._version != version for tensor, version in given):
        raise PipelineError(f"{what} in place", "use operations that do not")


def _buffer_versions(layers: dict[str, nn.Module]) -> dict[str, tuple[int, int]]:
    return {
        f"{name}.{key}": (id(buffer), buffer._version)
        for name, module in layers.items()
        for key, buffer in module.named_buffers()
    }


def _refuse_shared(layers: dict[str, nn.Module], again: dict[str, nn.Module]) -> None:
    owner: dict[int, str] = {}
    for name, module in layers.items():
        for parameter in module.parameters():
            if owner.setdefault(id(parameter), name) != name:
                raise PipelineError(
                    f"layers {owner[id(parameter)]} and {name} share a parameter",
                    "give each layer its own, or make the two one layer",
                )
    for name, module in again.items():
        if any(id(parameter) in owner for parameter in module.parameters()):
            raise PipelineError(
                f"the factory of layer {name} returns the same module twice",
                "build the module inside the factory: lambda: MyLayer()",
            )
