"""The harness of `benchmarks/convergence.py` trains what the program trains, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peer.baseline import Baseline
from peer.launch import plan_of, whole_model
from swarm.config import RunConfig, parse_config
from swarm.model import build_pipeline
from swarm.wire.boundaries import BoundaryCodecs
from tests.protocol import simulated

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not a package

from convergence import Chain, replicas_of, sections

STEPS, MICROBATCHES = 3, 4
TINY = {"num_hidden_layers": 3, "max_position_embeddings": 16, "intermediate_size": 48}


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds the harness of a setting, for a tiny model and text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    chains = []

    def build(setting: str) -> Chain:
        tables = sections(setting, 32, 1, STEPS, 1e-2, MICROBATCHES)
        tables["model"]["config"].update(TINY)
        if "subspace" in tables["model"]:
            tables["model"]["subspace_layers"] = 2  # as many as its first two stages have
        tables["data"] = {"source": "text", "path": str(tmp_path / "corpus.txt"), "sequence": 16}
        chains.append(Chain(parse_config(tables, setting), num_replicas=replicas_of(setting)))
        return chains[-1]

    yield build
    for each in chains:
        each.data.close()


def swarm_of(config: RunConfig, data: Any, monkeypatch: pytest.MonkeyPatch) -> simulated.Swarm:
    """A simulated swarm of two replicas per stage that trains the same run."""
    monkeypatch.setattr(simulated, "OPTIMIZER", config.optimizer)
    swarm = simulated.Swarm(
        plan=plan_of(config),
        batches=data,
        codecs=BoundaryCodecs.of(config),
        gradients=config.wire.gradients,
        accumulate=config.update.accumulate,
        policy=config.update.policy,
        ahead=config.ahead.microbatches,
    )
    swarm.pipeline = build_pipeline(config)  # type: ignore[assignment]
    return swarm


@pytest.mark.parametrize(
    "setting", ["exact", "delayed-1", "delayed", "subspace-8", "delayed-1+averaged-float32"]
)
def test_what_loses_nothing_on_the_wire_is_the_one_process_run(chain: Any, setting: str) -> None:
    """Every loss, that of validation, and all bits: what it is compared with is not its own."""
    one = chain(setting)
    oracle = Baseline(one.plan, whole_model(one.config), one.data, one.config.optimizer)
    expected = list(oracle.steps(STEPS))
    assert [one.step(step) for step in range(STEPS)] == [each.loss for each in expected]
    assert one.sha256() == oracle.report()["sha256"]
    assert one.validate(one.plan.validation_microbatches) == oracle.validate()


@pytest.mark.parametrize(
    "setting", ["int8", "int4~", "int4/int8", "delayed-1", "subspace-8+int4+delayed-2"]
)
def test_what_is_rounded_is_what_a_swarm_trains(
    chain: Any, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = chain(setting)
    losses = [one.step(step) for step in range(STEPS)]
    swarm = swarm_of(one.config, one.data, monkeypatch)
    assert swarm.run(STEPS)["sha256"] == one.sha256()
    assert [result.loss for result in swarm.results] == losses


def test_replicas_that_average_rounded_gradients_stay_equal(chain: Any) -> None:
    """And what rounding costs is in the losses, from the second step on."""
    exact, averaged = chain("exact"), chain("averaged-int8")
    assert averaged.step(0) == exact.step(0)
    losses = [(averaged.step(step), exact.step(step)) for step in range(1, STEPS)]
    assert all(rounded != pytest.approx(kept, rel=1e-9) for rounded, kept in losses)
    assert all(rounded == pytest.approx(kept, rel=1e-2) for rounded, kept in losses)
    first, second = averaged.replicas
    assert [a.fingerprint() for a in first] == [b.fingerprint() for b in second]
