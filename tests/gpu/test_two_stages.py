"""Two stages on one card against the whole model on it, to the bit, and against a plain torch loop.

Run when a GPU is there: `python -m pytest tests/gpu`. Numbers on a GPU are compared with the
baseline on the same GPU (DESIGN, I2: bits are promised on the same kind of device).
`tests/process/test_one_card.py` does the same on a CPU, but for the speed.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks._one_card import STAGES, Swarm, compare, run_config
from peer.baseline import Baseline
from peer.launch import be_exact, plan_of, whole_model
from swarm.config import RunConfig, load_config
from swarm.data import build_dataset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda:0"
EXAMPLE = Path(__file__).parents[2] / "examples" / "exact.toml"
STEPS = 3


def example() -> RunConfig:
    """`examples/exact.toml`, which has dropout, in two stages."""
    run = load_config(EXAMPLE)
    model = run.model.model_copy(update={"stages": STAGES, "cut": None})
    return run.model_copy(update={"model": model})


RUNS = {"llama": run_config(), "dropout": example(), "bfloat16": run_config(dtype="bfloat16")}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_two_stages_on_one_card_equal_the_whole_model_on_it(run: RunConfig) -> None:
    be_exact(DEVICE, None)
    oracle = Baseline(
        plan_of(run), whole_model(run), build_dataset(run), run.optimizer, device=DEVICE
    )
    list(oracle.steps(STEPS))

    async def trained() -> str:
        async with Swarm(run, DEVICE) as swarm:
            for _ in range(STEPS):
                await swarm.step()
            return swarm.sha256()

    assert asyncio.run(trained()) == oracle.report()["sha256"]


def test_two_stages_on_one_card_are_nearly_as_fast_as_a_plain_torch_loop() -> None:
    """With float32 accumulators on both sides: autograd has no others."""
    be_exact(DEVICE, None)
    run = run_config(hidden=1024, layers=8, sequence=512, microbatches=32, accumulate="float32")
    found = asyncio.run(compare(run, DEVICE, rounds=5))
    assert found.apart < 1e-3
    assert statistics.median(found.ratios) >= 0.95, found
