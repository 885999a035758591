"""A paced model with the tensors of a large one: `_wide:pipeline`, sized by the environment.

What crosses a boundary is `(microbatch, sequence, width)` float32 before its codec, beside token
ids (two bytes that pack into one, since they are drawn evenly): the hidden state of a large model,
or with a small width the `r` of a subspace.
Each stage has as many more parameters as asked for, which are averaged and cost nothing else.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swarm.config import RunConfig, parse_config
from swarm.model.definition import Pipeline

SIZES = "SWARM_BENCH_WIDE"  # environment: JSON of `Sizes`
STAGES = 3
VOCABULARY = 256


@dataclass(frozen=True)
class Sizes:
    width: int = 2048
    sequence: int = 1024
    parameters: int = 0  # of a stage, beside the few that compute

    def export(self) -> None:
        os.environ[SIZES] = json.dumps(self.__dict__)


sizes = Sizes(**json.loads(os.environ.get(SIZES, "{}")))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(sizes.width))
        if sizes.parameters:
            self.more = nn.Parameter(torch.zeros(sizes.parameters))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _samples() -> SimpleNamespace:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, VOCABULARY, (64, sizes.sequence), dtype=np.uint16)
    return SimpleNamespace(train={"tokens": tokens}, validation={"tokens": tokens[:16]})


_embedding: list[Tensor] = []


def _embed(batch: Any) -> Tensor:
    tokens = batch["tokens"]
    if tokens.device.type == "meta":
        return torch.empty((*tokens.shape, sizes.width), device="meta")
    if not _embedding:
        draw = torch.Generator().manual_seed(0)
        _embedding.append(torch.randn(VOCABULARY, sizes.width, generator=draw))
    return _embedding[0][tokens.long()]


pipeline = Pipeline(
    layers={f"layer{number}": _Layer for number in range(STAGES)},
    inputs=_embed,
    loss=lambda outputs, batch: outputs[0].square().sum(),
    weight=lambda batch: batch["tokens"].shape[0] * batch["tokens"].shape[1],
    data=_samples,
)


def wide(
    *, microbatches: int, microbatch_size: int, wire: dict[str, str], policy: str, ahead: float
) -> RunConfig:
    """A run of it. `Sizes.export` must have been called in this process before this module was
    imported in those that run it."""
    sections: dict[str, Any] = {
        "run": {"name": "wide", "seed": 0},
        "model": {"stages": STAGES, "pipeline": "_wide:pipeline"},
        "data": {"source": "pipeline"},
        "batch": {"microbatches": microbatches, "microbatch_size": microbatch_size},
        "optimizer": {"name": "sgd", "lr": 1e-9, "momentum": 0.0, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "warmup_steps": 0, "steps": 100_000},
        "wire": wire,
        "update": {"policy": policy, "ahead": ahead, "ahead_since": 0, "accumulate": "float32"},
        "validation": {"every": 0},
        "checkpoint": {"every": 0},
    }
    return parse_config(sections, "the wide run")
