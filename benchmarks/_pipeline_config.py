"""The run of the pipeline benchmark: `_plain_model.LLAMA` in two stages, as a run config."""

from __future__ import annotations

from typing import Any

from _plain_model import LLAMA

from swarm.config import RunConfig, parse_config

STAGES = 2


def pipeline_config(
    options: Any,
    accumulate: str,
    *,
    stages: int = STAGES,
    gradients: str = "float32",
    policy: str = "exact",
    ahead: float = 1.0,
    **model: Any,
) -> RunConfig:
    """`options` holds microbatches, microbatch_size, sequence and wire; `model` more of [model]."""
    config = {key: value for key, value in LLAMA.items() if key != "use_cache"}
    return parse_config(
        {
            "run": {"name": "bench", "seed": 0},
            "model": {"stages": stages, "config": config, **model},
            "data": {"source": "stdlib", "sequence": options.sequence},
            "batch": {
                "microbatches": options.microbatches,
                "microbatch_size": options.microbatch_size,
            },
            "optimizer": {"name": "adamw", "lr": 3e-4},
            "schedule": {"kind": "constant", "warmup_steps": 0, "steps": 10_000},
            "wire": {"activations": options.wire, "gradients": gradients},
            "update": {
                "policy": policy,
                "ahead": ahead,
                "ahead_since": 0,
                "accumulate": accumulate,
            },
            "validation": {"every": 0},
            "checkpoint": {"every": 0},
        },
        "the benchmark's config",
    )
