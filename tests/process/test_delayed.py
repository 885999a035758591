"""The delayed policy with real processes: a death, and a checkpoint: the bits of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.local import LocalSwarm
from swarm.config import RunConfig
from tests.process.forks import Forks, toml
from tests.process.test_exact_real import baseline, recut
from tests.process.test_resume import EVERY, STEPS, Runs


def delayed(config: RunConfig) -> RunConfig:
    update = config.update.model_copy(update={"policy": "delayed", "ahead_since": 0})
    return config.model_copy(update={"update": update})


@pytest.fixture
def runs(forks: Forks, tmp_path: Path) -> Runs:
    return Runs(forks, tmp_path)


def test_a_replica_is_killed_then_all_are_and_the_run_goes_on_with_another_cut(
    runs: Runs, tmp_path: Path
) -> None:
    exact = runs.config(toml(tmp_path / "run.toml", steps=50, extra=EVERY))
    config = delayed(exact)
    expected = baseline(config, STEPS, runs.cache)
    assert baseline(exact, STEPS, runs.cache) != expected

    def kill_one(swarm: LocalSwarm, step: int) -> None:
        if step == 2:
            swarm.kill_peer("1b")

    report = runs.run_in(config, "one", {0: 1, 1: 2, 2: 1}, script=kill_one)
    assert report is not None
    assert report["sha256"] == expected
    assert any(each["event"] == "left" for each in runs.events("one"))

    assert runs.run_in(config, "two", {0: 1, 1: 1, 2: 1}, kill_at=4) is None
    other = recut(config, (1, 2))
    report = runs.run_in(other, "three", {0: 2, 1: 1}, resume=tmp_path / "two")
    assert report is not None
    assert report["sha256"] == expected
