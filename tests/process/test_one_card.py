"""What waits for a GPU (`tests/gpu`, `benchmarks/one_card.py`) does its work on a CPU."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._one_card import Swarm, run_config
from peer.baseline import Baseline
from peer.launch import plan_of, whole_model
from swarm.config import RunConfig
from swarm.data import build_dataset
from tests.gpu.test_two_stages import example

ROOT = Path(__file__).parents[2]
SMALL = {"hidden": 32, "layers": 2, "sequence": 16, "microbatches": 3, "microbatch_size": 2}
RUNS = {
    "llama": run_config(**SMALL),
    "dropout": example(),
    "bfloat16": run_config(**SMALL, dtype="bfloat16"),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_two_stages_on_one_device_equal_the_whole_model(run: RunConfig) -> None:
    oracle = Baseline(plan_of(run), whole_model(run), build_dataset(run), run.optimizer)
    expected = [result.loss for result in oracle.steps(2)]

    async def trained() -> tuple[list[float], str]:
        async with Swarm(run, "cpu") as swarm:
            return [await swarm.step() for _ in expected], swarm.sha256()

    assert asyncio.run(trained()) == (expected, oracle.report()["sha256"])


def test_the_plain_loop_trains_the_same_beside_it() -> None:
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in SMALL.items()]
    done = subprocess.run(
        [sys.executable, "benchmarks/one_card.py", "--device=cpu", "--rounds=2", *sizes],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [each["metric"] for each in results] == [
        "two stages / plain loop", "plain loop", "two stages"
    ]  # fmt: skip
    assert all(each["value"] > 0 for each in results)
    apart = float(done.stdout.splitlines()[0].rsplit(maxsplit=1)[-1])
    assert apart == pytest.approx(0.0, abs=1e-5)
