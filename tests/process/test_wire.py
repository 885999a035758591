"""Thin wires with real processes: what `[wire]` and `subspace` say comes to the peers, over libp2p.

The references are of one process: a `Chain`, the stages one after another with the wire between
them (`benchmarks/convergence.py`), and the whole model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from swarm.config import RunConfig
from tests.process.forks import Forks, toml
from tests.process.test_exact_real import Swarms, baseline

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not a package

from convergence import Chain

STEPS, WIDTH, SUBSPACE = 4, 32, 8
INT8 = 'activations = "int8"\n'
BOUNDARY = 'boundaries = [{ boundary = 1, forward = "int4", backward = "bfloat16" }]\n'
STOCHASTIC = 'rounding = "stochastic"\n'
# Bytes of float32 for one on the wire, forward and back: int8 has 2 more per 64 values, int4 one
# per 8 (and one more for a tensor, which is taken off).
THINNER = [(256 / (64 + 2), 256 / (64 + 2)), (32 / (4 + 1), 2.0)]


@pytest.fixture
def swarms(forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Swarms:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Swarms(forks, tmp_path)


def chained(config: RunConfig) -> str:
    """The sha256 that the stages end with in one process; with one thread, as the peers have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    chain = Chain(config)
    try:
        for step in range(STEPS):
            chain.step(step)
        return chain.sha256()
    finally:
        chain.data.close()
        torch.set_num_threads(threads)


def test_codecs_of_a_boundary_and_stochastic_rounding(swarms: Swarms, tmp_path: Path) -> None:
    """Whatever the replicas: how and by how much is rounded is of the run alone (I1, I2)."""

    def config(wire: str) -> RunConfig:
        return swarms.config(toml(tmp_path / "run.toml", steps=50, wire=wire))

    mixed = config(INT8 + BOUNDARY + STOCHASTIC)
    expected = chained(mixed)
    assert expected not in [chained(config(INT8 + more)) for more in (BOUNDARY, STOCHASTIC)]
    assert expected != baseline(config('activations = "float32"'), STEPS, swarms.cache)
    for count in (1, 2):
        report = swarms.train(mixed, dict.fromkeys(range(3), count), STEPS)
        assert report["sha256"] == expected
        for row, (forward, back) in zip(report["bytes"]["boundaries"], THINNER, strict=True):
            tensors = STEPS * mixed.batch.microbatches if forward > 4 else 0
            wire_bytes = row["wire_bytes"] - tensors
            assert row["raw_bytes"] == pytest.approx(forward * wire_bytes)
            assert row["back_raw_bytes"] == pytest.approx(back * row["back_wire_bytes"])


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_gradients_between_replicas_in_few_bits(swarms: Swarms, tmp_path: Path, codec: str) -> None:
    """What is rounded depends on who counted what; but all replicas apply the same bytes (I4), so
    they hold the same bits (I5), or the leader says who differs."""
    config = swarms.config(toml(tmp_path / "run.toml", steps=50, gradients=codec))
    report = swarms.train(config, dict.fromkeys(range(3), 2), STEPS)
    assert report["sha256"] != baseline(config, STEPS, swarms.cache)
    events = (swarms.where / f"run-{swarms.count}" / "events.jsonl").read_text()
    happened = [json.loads(line)["event"] for line in events.splitlines()]
    assert happened.count("step") == STEPS
    assert not {"diverged", "round_failed"} & {*happened}


def test_a_subspace_is_sent_and_loses_nothing(swarms: Swarms, tmp_path: Path) -> None:
    """The bits of one process, which has no boundary."""
    config = swarms.config(toml(tmp_path / "run.toml", steps=50, subspace=SUBSPACE))
    expected = baseline(config, STEPS, swarms.cache)
    report = swarms.train(config, {0: 1, 1: 2, 2: 1}, STEPS)
    assert report["sha256"] == expected
    for row in report["bytes"]["boundaries"]:
        # What was sent twice, if anything was, counts twice.
        assert 4 * SUBSPACE <= row["wire_per_token"] < 4 * WIDTH / 2
        assert 4 * SUBSPACE <= row["back_wire_per_token"] < 4 * WIDTH / 2
