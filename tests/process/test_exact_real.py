"""Exactness with real processes: whatever the cut, the replicas, the deaths: the same bits.

A small GPT-2 with dropout, and the custom example; `examples/exact.toml` is the same at length
(docs/results.md has the commands).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.baseline import Baseline
from peer.launch import plan_of, stamp, whole_model
from peer.local import LocalSwarm
from swarm.config import RunConfig, load_config
from swarm.config_fields import ValidationSection
from swarm.data import build_dataset
from swarm.net.identity import load_identity
from tests.process.forks import Forks, toml

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "run.toml"
STEPS = 6
VALIDATED = {"validation": ValidationSection(every=2, microbatches=3)}
Act = Callable[[LocalSwarm, int], None]


def oracle(config: RunConfig, steps: int, cache: Path) -> tuple[str, list[float]]:
    """The sha256 one process ends with, and the validation losses on the way; with one thread, as
    the peers have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dataset = build_dataset(config, cache)
    try:
        model = Baseline(plan_of(config), whole_model(config), dataset, config.optimizer)
        losses = [step.validation_loss for step in model.steps(steps)]
        return str(model.report()["sha256"]), [each for each in losses if each is not None]
    finally:
        dataset.close()
        torch.set_num_threads(threads)


def baseline(config: RunConfig, steps: int, cache: Path) -> str:
    """As `oracle`: only the sha256."""
    return oracle(config, steps, cache)[0]


class Swarms:
    """Trains configs with real swarms. `act(swarm, step)` is called after each step. `losses`: of
    validation, in the last swarm that trained."""

    def __init__(self, forks: Forks, where: Path) -> None:
        self.forks, self.where, self.count = forks, where, 0
        self.cache = where / "cache"
        self.losses: list[float] = []

    def config(self, path: Path) -> RunConfig:
        return stamp(load_config(path), self.identity.peer_id, self.cache)

    @property
    def identity(self) -> Any:
        return load_identity(self.where / "identity.key")

    def train(
        self,
        config: RunConfig,
        peers: dict[int, int],
        steps: int = STEPS,
        act: Act = lambda swarm, step: None,
    ) -> dict[str, Any]:
        self.count += 1
        self.losses = []

        async def main() -> dict[str, Any] | None:
            def on_step(step: Mapping[str, Any]) -> None:
                self.losses += [step["validation_loss"]] if "validation_loss" in step else []
                act(swarm, step["step"])

            swarm = LocalSwarm(
                config,
                self.where / f"run-{self.count}",
                peers=peers,
                identity_path=self.identity.path,
                steps=steps,
                threads=1,
                device="cpu",
                cache_dir=self.cache,
                server=self.forks.server,
                say=lambda line: None,
                on_step=on_step,
            )
            return await swarm.run()

        report = self.forks.run(main())
        assert report is not None
        assert report["steps"] == steps
        return report


@pytest.fixture
def swarms(forks: Forks, tmp_path: Path) -> Swarms:
    return Swarms(forks, tmp_path)


def recut(config: RunConfig, cut: tuple[int, ...]) -> RunConfig:
    model = config.model.model_copy(update={"stages": len(cut), "cut": cut})
    return config.model_copy(update={"model": model})


def test_a_hugging_face_model_with_dropout(swarms: Swarms, tmp_path: Path) -> None:
    """Three stages of two replicas, another cut, other replica counts: the same weights, and the
    same loss on data that is not trained on."""
    config = swarms.config(toml(tmp_path / "run.toml", steps=50, layers=6)).model_copy(
        update=VALIDATED
    )
    expected, losses = oracle(config, STEPS, swarms.cache)
    assert swarms.train(config, {0: 2, 1: 2, 2: 2})["sha256"] == expected
    assert len(losses) == STEPS // 2
    assert swarms.losses == losses
    assert swarms.train(recut(config, (1, 5)), {0: 1, 1: 3})["sha256"] == expected


def test_the_custom_example(swarms: Swarms) -> None:
    pytest.importorskip("sklearn.datasets", reason="pip install scikit-learn")
    config = swarms.config(DIGITS)
    expected = baseline(config, STEPS, swarms.cache)
    assert swarms.train(config, {0: 2, 1: 2, 2: 2})["sha256"] == expected
    num_layers = sum(whole_model(config).cut)
    other = recut(config, (num_layers - 1, 1))
    assert swarms.train(other, {0: 1, 1: 2})["sha256"] == expected


def num_serving(swarm: LocalSwarm, stage: int) -> int:
    """How many replicas take part in a stage, as the leader last said."""
    replicas = swarm.status()["replicas"]
    return [row["stage"] for row in replicas if row["standing"] == "serving"].count(stage)


def test_killed_replicas_and_a_late_joiner(swarms: Swarms, tmp_path: Path) -> None:
    """A replica is killed, another joins late, and then carries its stage alone."""
    steps = 30
    join: list[Any] = []
    config = swarms.config(toml(tmp_path / "run.toml", steps=50, layers=6))
    expected = baseline(config, steps, swarms.cache)

    def act(swarm: LocalSwarm, step: int) -> None:
        if step == 2:
            swarm.kill_peer("1b")
        elif step == 3:
            join.append(asyncio.create_task(swarm.add_peer(0)))
        elif len(join) == 1 and num_serving(swarm, 0) == 2:
            swarm.kill_peer("0a")
            join.append(step)

    report = swarms.train(config, {0: 1, 1: 2, 2: 1}, steps, act)
    assert report["sha256"] == expected
    assert len(join) == 2, "the late joiner came too late"
    log = (tmp_path / "run-1" / "peers" / "0b" / "log").read_text()
    assert "downloading 100 %" in log
