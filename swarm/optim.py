"""Optimizers that give the same bits on every machine (DESIGN I5).

Every replica of a stage applies the same averaged gradient and must end with the same parameters,
though one CPU has AVX2 and the other has not. `torch.optim.AdamW` does not give that: its fused
multiply-adds (`addcmul`, `lerp`, `alpha=`) round once or twice depending on the kernel. So `AdamW`
and `SGD` here are sequences of single add, sub, mul, div and sqrt operations. IEEE 754 defines the
result of each of them to the bit, whatever the vector width, thread count or chunk size.

What else it takes:
- A root that is one: on a CPU numpy takes it, by the processor's own instruction. `torch.sqrt` goes
  through the vector library torch was built with, and MKL's is often a bit off, for other values on
  AMD (one in five) than on Intel. It is the only one of the five that torch leaves to a library.
- A Python float next to a float32 tensor is rounded to float32 first, in the same way everywhere.
  Scalars are therefore computed in Python (float64), by correctly rounded operations too:
  `power` instead of `**`, because libm's `pow` differs between C libraries.
- Nothing is divided by a scalar: CUDA turns that into a multiplication by the reciprocal. We
  multiply by a reciprocal taken in Python.
- Parameters lie flat with the decayed ones first (`ParameterLayout`), so decay is a prefix, and the
  padding between parameters, being zero in gradient and parameter, stays zero.

Work goes through in chunks that stay in the cache with their temporaries, instead of ten passes
over main memory. The formulas are torch's: Loshchilov and Hutter 2019 (AdamW), Dozat 2016 (AdamW
with Nesterov momentum: `torch.optim.NAdam` with decoupled decay and constant momentum), Sutskever
et al. 2013 with torch's convention of the learning rate outside the momentum (SGD, Nesterov).

Any other `torch.optim` name works through `swarm.torch_optimizer`, whose bits are only promised
among machines with equal `numerics_fingerprint`.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.flat_optimizer import FlatLayout, FlatOptimizer, OptimizerSettings
from swarm.torch_optimizer import TorchOptimizer

__all__ = [
    "SGD", "AdamW", "FlatOptimizer", "OptimizerSettings", "clip_scale", "make_optimizer",
    "numerics_fingerprint", "power",
]  # fmt: skip

CHUNK_ELEMENTS = 64 * 1024  # parameters, gradient, two moments, temporaries: 1.75 MiB


def clip_scale(norm: float, clip_norm: float) -> float:
    """The factor that brings a gradient of this norm down to `clip_norm`; 1.0 when it is below.

    `clip_norm` 0 means no clipping. A norm that is not finite gives 1.0: the caller skips it.
    """
    if clip_norm <= 0.0 or not math.isfinite(norm) or norm <= clip_norm:
        return 1.0
    return clip_norm / norm


def power(base: float, exponent: int) -> float:
    """base ** exponent for exponent >= 0 by squaring: the same bits with every C library."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


class _ChunkedOptimizer(FlatOptimizer):
    """Walks over chunks that lie wholly in the decayed prefix or wholly behind it."""

    def __init__(
        self,
        num_elements: int,
        num_decayed: int,
        settings: OptimizerSettings,
        device: torch.device | str = "cpu",
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        super().__init__(num_elements, num_decayed, settings)
        self._state = {
            name: torch.zeros(num_elements, dtype=torch.float32, device=device)
            for name in self._state_names(settings)
        }
        if torch.device(device).type != "cpu":
            chunk_elements *= 256  # launches cost more than cache misses there
        self._chunk_elements = max(1, min(chunk_elements, num_elements))
        self._temporaries = [
            torch.empty(self._chunk_elements, dtype=torch.float32, device=device) for _ in range(3)
        ]

    @staticmethod
    @abstractmethod
    def _state_names(settings: OptimizerSettings) -> Sequence[str]:
        """What is kept from step to step. ConfigError for settings that cannot be used."""

    def state(self) -> dict[str, Tensor]:
        return dict(self._state)

    def _chunks(self) -> Iterator[tuple[slice, bool]]:
        for start, stop, decayed in (
            (0, self.num_decayed, True),
            (self.num_decayed, self.num_elements, False),
        ):
            for begin in range(start, stop, self._chunk_elements):
                yield slice(begin, min(begin + self._chunk_elements, stop)), decayed


class AdamW(_ChunkedOptimizer):
    """Adam with decoupled weight decay on the first `num_decayed` elements."""

    @staticmethod
    def _state_names(settings: OptimizerSettings) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def step(
        self, parameters: Tensor, gradient: Tensor, *, lr: float, scale: float, step: int
    ) -> None:
        self._check(parameters, gradient, step)
        beta1, beta2 = self.settings.betas
        correction = 1.0 / (1.0 - power(beta1, step))
        ahead = beta1 / (1.0 - power(beta1, step + 1))
        step_size = lr if self.settings.nesterov else lr / (1.0 - power(beta1, step))
        root_correction = 1.0 / math.sqrt(1.0 - power(beta2, step))
        shrink = 1.0 - lr * self.settings.weight_decay
        for chunk, decayed in self._chunks():
            num = chunk.stop - chunk.start
            g, update, mean_ahead = (temporary[:num] for temporary in self._temporaries)
            mean, square = self._state["exp_avg"][chunk], self._state["exp_avg_sq"][chunk]
            p = parameters[chunk]
            torch.mul(gradient[chunk], scale, out=g)
            torch.mul(g, 1.0 - beta1, out=update)
            mean.mul_(beta1).add_(update)
            g.mul_(g).mul_(1.0 - beta2)
            square.mul_(beta2).add_(g)
            _root(square, out=g)
            g.mul_(root_correction).add_(self.settings.eps)
            if self.settings.nesterov:  # the mean as it will be if the next gradient is this one
                torch.mul(mean, ahead, out=mean_ahead)
                update.mul_(correction).add_(mean_ahead).div_(g)
            else:
                torch.div(mean, g, out=update)
            update.mul_(step_size)
            if decayed and shrink != 1.0:
                p.mul_(shrink)
            p.sub_(update)


class SGD(_ChunkedOptimizer):
    """SGD with momentum (dampening 0), Nesterov, and L2 decay on the first `num_decayed`."""

    @staticmethod
    def _state_names(settings: OptimizerSettings) -> Sequence[str]:
        if settings.nesterov and settings.momentum <= 0.0:
            raise ConfigError(
                "[optimizer] nesterov = true needs momentum above 0", "set momentum, e.g. 0.9"
            )
        return ("momentum",) if settings.momentum else ()

    @torch.no_grad()
    def step(
        self, parameters: Tensor, gradient: Tensor, *, lr: float, scale: float, step: int
    ) -> None:
        self._check(parameters, gradient, step)
        decay, momentum = self.settings.weight_decay, self.settings.momentum
        for chunk, decayed in self._chunks():
            num = chunk.stop - chunk.start
            g, temporary = (t[:num] for t in self._temporaries[:2])
            p = parameters[chunk]
            torch.mul(gradient[chunk], scale, out=g)
            if decayed and decay:
                torch.mul(p, decay, out=temporary)
                g.add_(temporary)
            if momentum:
                velocity = self._state["momentum"][chunk]
                velocity.mul_(momentum).add_(g)
                torch.mul(velocity, momentum if self.settings.nesterov else 1.0, out=temporary)
                if self.settings.nesterov:
                    g.add_(temporary)
                else:
                    g, temporary = temporary, g
            g.mul_(lr)
            p.sub_(g)


def _root(values: Tensor, *, out: Tensor) -> None:
    """The square root as IEEE 754 defines it, which torch's is on a GPU only (above)."""
    if values.device.type == "cpu":
        np.sqrt(values.numpy(), out=out.numpy())
    else:
        torch.sqrt(values, out=out)


BUILT_IN = {"AdamW": AdamW, "SGD": SGD}


def make_optimizer(
    settings: OptimizerSettings, layout: FlatLayout, device: torch.device | str = "cpu"
) -> FlatOptimizer:
    """The optimizer that `[optimizer] name` names. ConfigError for one that cannot be used."""
    built_in = {name.lower(): kind for name, kind in BUILT_IN.items()}.get(settings.name.lower())
    if built_in is not None:
        return built_in(layout.total, layout.num_decayed, settings, device)
    return TorchOptimizer(layout, settings, device)


class _FingerprintLayout:
    names = ("a.weight", "b.weight", "a.bias")
    shapes = ((37, 29), (8, 16), (61,))
    offsets = (0, 1088, 1216)
    total = 1280
    num_decayed = 1216


def numerics_fingerprint(settings: OptimizerSettings, device: torch.device | str = "cpu") -> str:
    """sha256 of what eight steps on fixed data leave behind (RAdam is plain in the first five).

    A replica joins a run with a `torch.optim` optimizer only with the same fingerprint. The data
    come from integers: `torch.randn` itself gives other bits on other CPUs.
    """
    layout = _FingerprintLayout()
    optimizer = make_optimizer(settings, layout, device)

    def data(seed: int) -> Tensor:
        whole = hashlib.shake_256(seed.to_bytes(4, "big")).digest(4 * layout.total)
        integers = torch.frombuffer(bytearray(whole), dtype=torch.int32)
        flat = integers.to(torch.float64).mul(2.0**-31).to(torch.float32)
        used = torch.zeros(layout.total, dtype=torch.bool)
        for shape, offset in zip(layout.shapes, layout.offsets, strict=True):
            used[offset : offset + math.prod(shape)] = True
        return torch.where(used, flat, 0.0).to(device)

    parameters = data(0)
    for step in range(1, 9):
        optimizer.step(parameters, data(step), lr=0.01, scale=0.7, step=step)
    digest = hashlib.sha256()
    for name, tensor in [("parameters", parameters), *sorted(optimizer.state().items())]:
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()
