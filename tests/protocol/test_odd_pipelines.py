"""Pipelines unlike most: a stage without parameters, such as an activation between two; float64."""

from __future__ import annotations

import functools
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peer import checkpoints
from peer.baseline import Baseline
from peer.checkpointing import write_state
from peer.inquiries import snapshot_mark
from peer.resume import CheckpointReader
from peer.snapshots import Snapshot
from swarm.errors import DataError
from swarm.model.custom import CustomPipeline
from swarm.model.definition import Pipeline
from tests.protocol.simulated import Fault, Swarm
from tests.protocol.test_epochs import EpochSwarm
from tests.protocol.tiny import OPTIMIZER, TINY, TinyBatches, ahead_of, plan, tiny_data

STEPS = 6
BARE = Pipeline(
    layers={
        "enter": lambda: nn.Linear(6, 8),
        "bend": lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.1)),
        "leave": lambda: nn.Linear(8, 2),
    },
    inputs=TINY.inputs,
    loss=TINY.loss,
    weight=TINY.weight,
    data=tiny_data,
)


class Double(nn.Module):
    """Gives what float32 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).double().mul(1.1).tanh()


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul(3.0).sin().float())


WIDE = Pipeline(
    layers={"double": Double, "single": Single},
    inputs=TINY.inputs,
    loss=TINY.loss,
    weight=TINY.weight,
    data=tiny_data,
)


@functools.cache
def pipeline(num_stages: int) -> CustomPipeline:
    cut = (1,) * 3 if num_stages == 3 else None
    return CustomPipeline(BARE, seed=3, num_stages=num_stages, microbatch_size=4, cut=cut)


def oracle() -> Baseline:
    return Baseline(plan(num_steps=STEPS), pipeline(1), TinyBatches(), OPTIMIZER)


@functools.cache
def expected() -> str:
    baseline = oracle()
    list(baseline.steps(STEPS))
    sha256: str = baseline.report()["sha256"]
    return sha256


@pytest.mark.parametrize("point", ["forward", "counted", "average", "commit"])
def test_a_replica_of_it_dies_and_joins_again(point: str) -> None:
    fault = Fault(point, "kill", replica="r1.1", step=1, duration_s=0.2)
    swarm = Swarm(plan=plan(num_steps=STEPS), faults=[fault])
    swarm.pipeline = pipeline(3)
    joined: list[bool] = []
    swarm.at_end = lambda: joined.append(swarm.members["r1.1"].server is not None)
    assert swarm.run(STEPS)["sha256"] == expected()
    assert swarm.fired == [fault]
    assert swarm.lives["r1.1"] == 2
    assert joined == [True], "it has not joined again"


class Late(Swarm):
    """`r1.9` joins a swarm that goes on meanwhile, over links so slow that it is steps behind."""

    slow = ("r1.0", "r1.9"), ("r1.1", "r1.9")

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if point == "admitted" and facts["replica"].startswith("r1.9"):
            for link in self.slow:
                self.network.rates.pop(link, None)


@pytest.mark.parametrize("policy", ["exact", "delayed"])
def test_who_joins_it_is_told_the_commits_that_it_has_missed(policy: str) -> None:
    num_steps = 40
    chosen = plan(num_steps=num_steps, ahead=ahead_of(policy, 4, 4))
    baseline = Baseline(chosen, pipeline(1), TinyBatches(), OPTIMIZER)
    list(baseline.steps(num_steps))
    swarm = Late(
        plan=chosen,
        policy=policy,
        faults=[Fault("record", "start", step=1, victim="r1.9", stage=1)],
    )
    swarm.pipeline = pipeline(3)
    swarm.network.rates.update(dict.fromkeys(swarm.slow, 50e3))
    assert swarm.run(num_steps)["sha256"] == baseline.report()["sha256"]
    counted = [t for t, who, point, _ in swarm.events if (who, point) == ("r1.9", "counted")]
    assert counted, "it never took part"
    times = [t for t, _, point, _ in swarm.events if point == "record"]
    assert max(after - before for before, after in pairwise(times)) < 2.0, "the run stood still"


def test_all_of_it_dies_and_the_run_goes_back() -> None:
    swarm = EpochSwarm(plan=plan(num_steps=STEPS))
    swarm.pipeline = pipeline(3)
    swarm.lost, swarm.point, swarm.step = 1, "forward", 3
    assert swarm.run(STEPS)["sha256"] == expected()
    assert swarm.deaths == 1
    assert swarm.epochs


def test_float64_between_stages_is_sent_as_it_is() -> None:
    def wide(num_stages: int) -> CustomPipeline:
        return CustomPipeline(WIDE, seed=3, num_stages=num_stages, microbatch_size=4)

    assert wide(2).boundary(0)[0].dtype == "float64"
    baseline = Baseline(plan(), wide(1), TinyBatches(), OPTIMIZER)
    list(baseline.steps(3))
    swarm = Swarm(num_stages=2, replicas=(2, 2))
    swarm.pipeline = wide(2)
    assert swarm.run() == baseline.report()


def snapshots(baseline: Baseline, updates: int) -> list[Snapshot]:
    """Of the three stages, cut from the whole; the last with so many updates."""
    whole, made = baseline.state, []
    of_whole = whole.layout.slices(whole.parameters)
    for stage in range(3):
        state = type(whole)(pipeline(3).build_stage(stage), OPTIMIZER)
        for name, view in state.layout.slices(state.parameters).items():
            view.copy_(of_whole[name])
        count = updates if stage == 2 else whole.updates
        snapshot = Snapshot(2, count, "", None, state.tensors())
        snapshot.fingerprint = snapshot_mark(snapshot)
        made.append(snapshot)
    return made


def write(where: Path, states: list[Snapshot]) -> Path:
    staging = checkpoints.begin(where, 2)
    entries = [write_state(staging, pipeline(3), k, each) for k, each in enumerate(states)]
    facts: dict[str, Any] = {"run_id": "0" * 32, "config": {}, "stages": entries}
    return checkpoints.complete(staging, {"step": 2, **facts})


def test_a_checkpoint_of_it_is_read_whatever_the_cut(tmp_path: Path) -> None:
    baseline = oracle()
    list(baseline.steps(2))
    path = write(tmp_path, snapshots(baseline, updates=2))
    for num_stages in (1, 3):
        reader = CheckpointReader(path, pipeline(num_stages), OPTIMIZER)
        origin = reader.origin()
        assert len(origin.fingerprints) == num_stages
        assert {reader.snapshot(k).updates for k in range(num_stages)} == {2}


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "RAdam"])
def test_a_checkpoint_of_torchs_own_optimizers_is_cut_anew(tmp_path: Path, name: str) -> None:
    """Their state is packed otherwise than the parameters: without gaps, or a number for each."""
    settings = SimpleNamespace(**{**vars(OPTIMIZER), "name": name})
    baseline = Baseline(plan(num_steps=STEPS), pipeline(1), TinyBatches(), settings)
    list(baseline.steps(2))
    before = baseline.state.tensors()
    whole = Snapshot(2, 2, "", None, {key: each.clone() for key, each in before.items()})
    staging = checkpoints.begin(tmp_path / "one", 2)
    facts: dict[str, Any] = {"step": 2, "run_id": "0" * 32, "config": {}}
    entries = [write_state(staging, pipeline(1), 0, whole)]
    path = checkpoints.complete(staging, {**facts, "stages": entries})
    reader = CheckpointReader(path, pipeline(3), settings)
    path = write(tmp_path / "three", [reader.snapshot(stage) for stage in range(3)])
    again = CheckpointReader(path, pipeline(1), settings).snapshot(0)
    assert again.tensors.keys() == before.keys()
    for key, each in again.tensors.items():
        assert torch.equal(each, before[key]), key
    resumed = Baseline(plan(num_steps=STEPS), pipeline(1), TinyBatches(), settings)
    resumed.resume(again)
    list(resumed.steps(STEPS))
    straight = Baseline(plan(num_steps=STEPS), pipeline(1), TinyBatches(), settings)
    list(straight.steps(STEPS))
    assert resumed.report()["sha256"] == straight.report()["sha256"]


def test_adafactors_state_is_not_cut_anew_and_that_is_said(tmp_path: Path) -> None:
    """It is of rows and columns, whatever the parameters are laid out like."""
    settings = SimpleNamespace(**{**vars(OPTIMIZER), "name": "Adafactor"})
    baseline = Baseline(plan(num_steps=STEPS), pipeline(1), TinyBatches(), settings)
    list(baseline.steps(2))
    before = baseline.state.tensors()
    staging = checkpoints.begin(tmp_path, 2)
    facts: dict[str, Any] = {"step": 2, "run_id": "0" * 32, "config": {}}
    whole = Snapshot(2, 2, "", None, {key: each.clone() for key, each in before.items()})
    entries = [write_state(staging, pipeline(1), 0, whole)]
    path = checkpoints.complete(staging, {**facts, "stages": entries})
    again = CheckpointReader(path, pipeline(1), settings).snapshot(0)
    assert all(torch.equal(each, before[key]) for key, each in again.tensors.items())
    with pytest.raises(DataError, match="the state of this optimizer cannot be cut anew"):
        CheckpointReader(path, pipeline(3), settings).snapshot(0)


def test_stages_of_another_number_of_updates_do_not_belong_together(tmp_path: Path) -> None:
    baseline = oracle()
    list(baseline.steps(2))
    path = write(tmp_path, snapshots(baseline, updates=1))
    with pytest.raises(DataError, match="do not belong together - use another checkpoint"):
        CheckpointReader(path, pipeline(3), OPTIMIZER)
