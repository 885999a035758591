"""Any other `torch.optim` class as one of ours, packed flat; its bits are those of its kernels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.flat_optimizer import FlatLayout, FlatOptimizer, OptimizerSettings


class TorchOptimizer(FlatOptimizer):
    """Any other element- or parameter-wise `torch.optim` class, by its name.

    It sees one tensor per parameter (views of copies of ours), and its per-parameter state is
    packed: one flat tensor per state name, parameters in layout order, plus `started` (0 or 1 for
    each parameter), since most of them create their state in the first step. A dry run on zeros at
    construction finds the names and sizes, and refuses what needs a closure or sparse gradients.
    """

    def __init__(
        self,
        layout: FlatLayout,
        settings: OptimizerSettings,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(layout.total, layout.num_decayed, settings)
        self._layout = layout
        self._device = device
        self._class = _torch_class(settings.name)
        self._template = self._dry_run()
        self._reset()

    def _reset(self) -> None:
        self._parameters = [
            torch.zeros(tuple(shape), dtype=torch.float32, device=self._device)
            for shape in self._layout.shapes
        ]
        self._optimizer = self._build(self._parameters)
        self._started = torch.zeros(len(self._parameters))

    def _build(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        settings = self.settings
        decayed = [o < self.num_decayed for o in self._layout.offsets]
        groups = [
            {"params": [p for p, d in zip(parameters, decayed, strict=True) if d]},
            {"params": [p for p, d in zip(parameters, decayed, strict=True) if not d]},
        ]
        known = inspect.signature(self._class).parameters
        options: dict[str, Any] = {
            "lr": 1e-3,
            "betas": tuple(settings.betas),
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
            "momentum": settings.momentum,
            "nesterov": settings.nesterov,
            "lambd": 0.0,  # ASGD's own decay, also of what is frozen or not to be decayed
            "foreach": False,
            "fused": False,
        }
        if "eps" in known and not isinstance(known["eps"].default, float):
            del options["eps"]  # Adafactor's is a pair of other things
        options = {name: value for name, value in options.items() if name in known}
        if "weight_decay" in options:
            groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
        try:
            some = [g for g in groups if g["params"]] or [{"params": [torch.zeros(0)]}]
            return self._class(some, **options)  # which refuses to have no parameters
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"[optimizer] torch.optim.{settings.name}: {error}", "choose another optimizer.name"
            ) from error

    def _dry_run(self) -> list[dict[str, Tensor]]:
        parameters = [torch.zeros(tuple(shape)) for shape in self._layout.shapes]
        optimizer = self._build(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"[optimizer] torch.optim.{self.settings.name} cannot be used here: {error}",
                "use AdamW, SGD or another optimizer that needs no closure and no sparse gradients",
            ) from error
        template = []
        for parameter in parameters:
            entry = {
                name: torch.as_tensor(value)
                for name, value in sorted(optimizer.state[parameter].items())
                if value is not None
            }
            template.append(entry)
        return template

    @torch.no_grad()
    def step(
        self, parameters: Tensor, gradient: Tensor, *, lr: float, scale: float, step: int
    ) -> None:
        self._check(parameters, gradient, step)
        layout = self._layout
        for mine, shape, offset in zip(
            self._parameters, layout.shapes, layout.offsets, strict=True
        ):
            view = slice(offset, offset + mine.numel())
            mine.copy_(parameters[view].view(tuple(shape)))
            mine.grad = torch.mul(gradient[view].view(tuple(shape)), scale)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._started.fill_(1.0)
        for mine, offset in zip(self._parameters, layout.offsets, strict=True):
            parameters[offset : offset + mine.numel()].copy_(mine.view(-1))
            mine.grad = None

    def _names(self) -> list[str]:
        return sorted({name for entry in self._template for name in entry})

    def state(self) -> dict[str, Tensor]:
        """Copies, unlike the built-in ones: the live state is torch's."""
        packed, started = {"started": self._started.clone()}, bool(self._started.any())
        for name in self._names():
            parts = []
            for parameter, entry in zip(self._parameters, self._template, strict=True):
                if name not in entry:
                    continue
                value = self._optimizer.state[parameter].get(name) if started else None
                tensor = torch.zeros_like(entry[name]) if value is None else torch.as_tensor(value)
                parts.append(tensor.detach().reshape(-1).to("cpu", torch.float32))
            packed[name] = torch.cat(parts)
        return packed

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._checked(state)
        self._reset()
        if not state["started"].any():
            return
        self._started.fill_(1.0)
        position = dict.fromkeys(self._names(), 0)
        for parameter, entry in zip(self._parameters, self._template, strict=True):
            loaded: dict[str, Any] = {}
            for name, like in entry.items():
                begin, end = position[name], position[name] + like.numel()
                position[name] = end
                value = state[name][begin:end].reshape(like.shape).to(like.dtype)
                loaded[name] = value.clone().to("cpu" if like.dim() == 0 else self._device)
            self._optimizer.state[parameter] = loaded


def _torch_class(name: str) -> type[torch.optim.Optimizer]:
    found = getattr(torch.optim, name, None)
    if (
        not isinstance(found, type)
        or not issubclass(found, torch.optim.Optimizer)
        or found is torch.optim.Optimizer
    ):
        raise ConfigError(
            f"[optimizer] unknown optimizer {name!r}",
            "use AdamW, SGD or the name of a class in torch.optim",
        )
    return found
