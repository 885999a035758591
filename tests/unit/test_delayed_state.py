"""The state of the delayed policy: which version of the parameters is when, and what a commit
leaves as it is."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from peer import checkpoints
from peer.baseline import Baseline
from peer.calls import FIELDS_CODEC, MicrobatchCall
from peer.checkpointing import write_state
from peer.inquiries import snapshot_mark
from peer.kept import Work
from peer.resume import CheckpointReader
from peer.snapshots import Snapshot
from peer.stage_server import StageServer
from swarm.ahead import Ahead
from swarm.averaging.policy import POLICIES
from swarm.compute import InlineCompute
from swarm.delayed_state import PREVIOUS, DelayedState, State, new_state
from swarm.errors import ConfigError, DataError, WireError
from swarm.ledger import Do, Ledger
from swarm.model.custom import CustomPipeline
from swarm.model.definition import Pipeline
from swarm.optim import make_optimizer
from swarm.placement import estimate_memory
from swarm.terms import Term
from swarm.wire.codecs import encode
from tests.protocol.tiny import (
    OPTIMIZER,
    TinyBatches,
    baseline,
    plan,
    shared_pipeline,
)

STEPS = 5


WHOLE, QUARTER = Ahead(4, 4), Ahead(1, 4)


def state(ahead: Ahead = WHOLE) -> State:
    return new_state(lambda: shared_pipeline(1).build_stage(0), OPTIMIZER, ahead=ahead)


def batch(step: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(each) for name, each in TinyBatches().batch(step, 0).items()}


def count(state: State, step: int) -> Tensor:
    """One microbatch of a step in the oldest version; its gradient."""
    version = state.live[0]
    version.backward(version.forward(step, 0, (), batch(step), 4.0), None, into=version)
    return version.accumulator.to(torch.float32)


def test_each_step_is_computed_one_step_stale() -> None:
    """Against the rule itself, with an optimizer of its own: V_(s+1) from V_s and the gradient of s
    at V_(s-1)."""
    ours = state()
    optimizer = make_optimizer(OPTIMIZER, ours.layout)
    versions = [ours.parameters.clone()]
    applied = 0
    for step in range(STEPS):
        assert torch.equal(ours.live[0].parameters, versions[max(step - 1, 0)])
        assert torch.equal(ours.live[1].parameters, versions[step])
        gradient = count(ours, step)
        newest = versions[step].clone()
        if step == 2:  # not finite, say
            ours.skip()
        else:
            applied += 1
            optimizer.step(newest, gradient, lr=0.1, scale=0.5, step=applied)
            ours.apply(gradient, lr=0.1, scale=0.5)
        versions.append(newest)
        assert torch.equal(ours.parameters, newest)
        assert ours.updates == applied
        assert not ours.accumulator.any()
    assert len({tuple(each.tolist()) for each in versions}) == STEPS


def test_the_baseline_differs_from_the_exact_one_from_the_second_step_on() -> None:
    losses = {name: [each.loss for each in baseline(4, policy=name)[1]] for name in POLICIES}
    exact, delayed = losses["exact"], losses["delayed"]
    assert exact[0] == delayed[0]
    assert all(a != b for a, b in zip(exact[1:], delayed[1:], strict=True))
    assert baseline(1)[0] == baseline(1, policy="delayed")[0]


def test_a_commit_leaves_the_next_steps_work_as_it_is() -> None:
    """A forward before the commit, its backward after it: the gradient of V_s, and it stays."""
    alone, ours = state(), state()
    for each in (alone, ours):
        each.apply(count(each, 0), lr=0.1, scale=1.0)
    version = alone.live[1]
    version.backward(version.forward(2, 0, (), batch(2), 4.0), None, into=version)

    version = ours.live[1]
    graph = version.forward(2, 0, (), batch(2), 4.0)
    ours.apply(count(ours, 1), lr=0.1, scale=1.0)
    version.backward(graph, None, into=version)
    assert version is ours.live[0]
    assert torch.equal(ours.accumulator, alone.live[1].accumulator)
    assert ours.accumulator.any()


def test_a_state_that_travels_goes_on_with_the_same_bits() -> None:
    first, second = state(), state()
    for step in range(3):
        first.apply(count(first, step), lr=0.1, scale=1.0)
    assert list(first.tensors()) == [
        "parameters",
        "optimizer.exp_avg",
        "optimizer.exp_avg_sq",
        PREVIOUS,
    ]
    count(second, 7)  # to be forgotten
    second.load({name: each.clone() for name, each in first.tensors().items()}, first.updates)
    for step in range(3, 6):
        assert first.fingerprint() == second.fingerprint()
        for each in (first, second):
            each.apply(count(each, step), lr=0.1, scale=1.0)
    assert first.tensor_hashes() == second.tensor_hashes()


@pytest.mark.parametrize("ahead", [Ahead(), WHOLE], ids=["exact", "delayed"])
def test_a_state_of_another_kind_is_refused_and_changes_nothing(ahead: Ahead) -> None:
    ours = state(ahead)
    ours.apply(count(ours, 0), lr=0.1, scale=1.0)
    mark, theirs = ours.fingerprint(), {n: each + 1 for n, each in ours.tensors().items()}
    for name, each in theirs.items():
        others = {other: tensor for other, tensor in theirs.items() if other != name}
        for bad in (others, {**others, name: each[:-1]}, {**others, name: each.double()}):
            with pytest.raises(WireError, match=name.rpartition(".")[2]):
                ours.load(bad, 7)
            assert (ours.fingerprint(), ours.updates) == (mark, 1)


def test_the_fingerprint_covers_both_versions() -> None:
    ours = state()
    ours.apply(count(ours, 0), lr=0.1, scale=1.0)
    mark = ours.fingerprint()
    tensors = {name: each.clone() for name, each in ours.tensors().items()}
    assert snapshot_mark(Snapshot(1, 1, "", None, tensors)) == mark
    ours.live[0].parameters[0] += 1.0
    assert ours.fingerprint() != mark


def test_ledgers_that_take_turns() -> None:
    term = Term(0, 1, "a#1")
    ledger = Ledger(step=1, stride=2)
    ledger.see(term)
    assert ledger.on_call(term, 1, 0, 1, 0).do is Do.RUN
    assert ledger.on_call(term, 3, 0, 1, 0).do is Do.AWAIT_COMMIT
    assert ledger.on_call(term, 2, 0, 1, 0).do is Do.REFUSE
    assert ledger.on_call(term, 5, 0, 1, 0).do is Do.REFUSE


def test_the_others_are_computed_as_far_beyond_as_balances_the_first() -> None:
    """V + c (V - V_before) with c = f / (1 - f), the bits of single operations; at most two
    updates, and none where nothing was computed ahead, nor where nothing waits."""
    assert [Ahead(n, 4).balance for n in range(5)] == [0.0, 1 / 3, 1.0, 2.0, 0.0]
    assert Ahead(5, 8).balance == 5 / 3
    assert [Ahead(1, 4, since=2).of(step) for step in range(4)] == [0, 0, 1, 1]
    ours = state(QUARTER)
    for step in range(3):
        before = ours.parameters.clone()
        ours.apply(count(ours, step), lr=0.1, scale=1.0)
        expected = (ours.parameters - before).mul(1 / 3).add(ours.parameters)
        assert torch.equal(ours.waiting(1).parameters, expected)
        assert torch.equal(ours.waiting(0).parameters, ours.parameters)
        assert torch.equal(ours.live[0].parameters, before)
        assert not ours.accumulator.any()
    again = state(QUARTER)
    again.load({name: each.clone() for name, each in ours.tensors().items()}, ours.updates)
    assert torch.equal(again.waiting(1).parameters, ours.waiting(1).parameters)
    ours.skip()  # the next step begins where this one did
    assert torch.equal(ours.waiting(1).parameters, ours.parameters)


class AllAlike:
    """Every microbatch is the same."""

    def __init__(self, data: dict[str, np.ndarray]) -> None:
        self.data = data

    def batch(self, step: int, index: int) -> dict[str, np.ndarray]:
        return self.data

    def validation_batch(self, index: int) -> dict[str, np.ndarray]:
        return self.data


@pytest.mark.parametrize(("first", "of"), [(1, 4), (2, 4), (5, 8)])
def test_where_curvature_does_not_change_it_is_the_exact_policy(first: int, of: int) -> None:
    """A quadratic loss: stale and balanced gradients have the mean of fresh ones, in every step."""
    draw = np.random.default_rng(0)
    data = {name: draw.standard_normal((8, 3)).astype(np.float32) for name in ("x", "y")}
    line = Pipeline(
        layers={"line": lambda: nn.Linear(3, 3)},
        inputs=lambda batch: (batch["x"],),
        loss=lambda outputs, batch: (outputs[0] - batch["y"]).square().sum(),
        weight=lambda batch: len(batch["y"]),
        data=lambda: SimpleNamespace(train=data, validation=data),
    )
    pipeline = CustomPipeline(line, seed=0, num_stages=1, microbatch_size=8)

    def end(ahead: Ahead) -> Tensor:
        oracle = Baseline(plan(of, 40, ahead=ahead), pipeline, AllAlike(data), OPTIMIZER)
        list(oracle.steps(40))
        return oracle.state.parameters

    exact, balanced, stale = end(Ahead()), end(Ahead(first, of)), end(Ahead(of, of))
    assert torch.allclose(exact, balanced, rtol=0, atol=1e-5)
    assert not torch.allclose(exact, stale, rtol=0, atol=1e-3)


def test_nothing_is_ahead_before_its_step() -> None:
    """Until then it is the exact policy, bit for bit."""
    late = plan(ahead=Ahead(1, 4, since=3))
    oracle = Baseline(late, shared_pipeline(1), TinyBatches(), OPTIMIZER)
    losses = [each.loss for each in oracle.steps(6)]
    exact = [each.loss for each in baseline(6)[1]]
    assert losses[:3] == exact[:3]
    assert losses[3] != exact[3]


def test_it_takes_memory_for_more_versions() -> None:
    exact, delayed = estimate_memory(1000), estimate_memory(1000, steps_in_flight=2)
    assert delayed.total - exact.total == 2 * 4000 + 8000


# ---- at a replica --------------------------------------------------------------------------------


def test_an_answer_computed_again_while_a_step_is_committed_leaves_no_gradient_behind() -> None:
    """Its graph is of what was the newest version when the forward ran, and so is its backward:
    what that leaves in the parameters of a version would be added to a microbatch of another."""
    ours, shape = state(), shared_pipeline(1)
    server = StageServer(0, ours, shape, InlineCompute(), num_microbatches=4, ahead=WHOLE)
    call = MicrobatchCall(Term(0, 1, "t#1"), 0, 1, 1, 0, ("a#1",), 0, 4.0, False)
    fields = [encode(each, FIELDS_CODEC) for _, each in sorted(batch(0).items())]

    async def meanwhile(*_: Any) -> tuple[None, tuple[()]]:
        ours.apply(torch.ones_like(ours.parameters), lr=0.1, scale=1.0)
        server.parts.committed()
        return None, ()

    server._go_on = meanwhile  # type: ignore[assignment, method-assign]
    asyncio.run(server._recompute(server.parts.of(0), Work(1), call, fields))
    assert ours.updates == 1
    for version in ours.live:
        assert all(each.grad is None for each in version.stage.parameters())
        assert not version.accumulator.any()


# ---- checkpoints ---------------------------------------------------------------------------------


def write(where: Path, state: State, step: int) -> Path:
    """A checkpoint of `state` as two stages would be read from it."""
    snapshot = Snapshot(step, state.updates, "", None, state.tensors())
    snapshot.fingerprint = snapshot_mark(snapshot)
    staging = checkpoints.begin(where, step)
    entry = write_state(staging, shared_pipeline(1), 0, snapshot)
    facts: dict[str, Any] = {"run_id": "0" * 32, "config": {}, "stages": [entry]}
    return checkpoints.complete(staging, {"step": step, **facts})


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_checkpoint_holds_both_versions_whatever_the_cut(tmp_path: Path, num_stages: int) -> None:
    ours = state()
    for step in range(3):
        ours.apply(count(ours, step), lr=0.1, scale=1.0)
    pipeline = shared_pipeline(num_stages)
    reader = CheckpointReader(write(tmp_path, ours, 3), pipeline, OPTIMIZER, 2)
    names = ours.layout.slices(ours.parameters)
    before = ours.layout.slices(ours.live[0].parameters)
    for stage in range(num_stages):
        read = new_state(partial(pipeline.build_stage, stage), OPTIMIZER, ahead=WHOLE)
        snapshot = reader.snapshot(stage)
        read.load(snapshot.tensors, snapshot.updates)
        assert isinstance(read, DelayedState)
        assert read.fingerprint() == snapshot.fingerprint
        for name, each in read.layout.slices(read.parameters).items():
            assert torch.equal(each, names[name])
        for name, each in read.layout.slices(read.live[0].parameters).items():
            assert torch.equal(each, before[name])


def test_a_checkpoint_of_another_policy_serves_as_first_weights_do(tmp_path: Path) -> None:
    exact, delayed = state(Ahead()), state()
    for each in (exact, delayed):
        for step in range(3):
            each.apply(count(each, step), lr=0.1, scale=1.0)
    one, two = write(tmp_path / "one", exact, 3), write(tmp_path / "two", delayed, 3)
    read = CheckpointReader(one, shared_pipeline(1), OPTIMIZER, 2).snapshot(0)
    assert torch.equal(read.tensors[PREVIOUS], exact.parameters)
    assert torch.equal(read.tensors["parameters"], exact.parameters)
    read = CheckpointReader(two, shared_pipeline(1), OPTIMIZER).snapshot(0)
    assert PREVIOUS not in read.tensors
    assert torch.equal(read.tensors["parameters"], delayed.parameters)


def test_a_checkpoint_whose_parameters_mean_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its names and shapes fit (of a subspace: `tests/unit/test_subspace.py`)."""
    path, pipeline = write(tmp_path, state(), 3), shared_pipeline(1)
    monkeypatch.setattr(pipeline, "differs_from", lambda config: "of another seed")
    with pytest.raises(DataError, match="is of another model: of another seed"):
        CheckpointReader(path, pipeline, OPTIMIZER)

    def unreadable(config: Any) -> str:
        raise ConfigError("model.config: no such model_type")

    monkeypatch.setattr(pipeline, "differs_from", unreadable)
    with pytest.raises(DataError, match=r"is damaged: model\.config: no such model_type - choose"):
        CheckpointReader(path, pipeline, OPTIMIZER)


def test_a_baseline_that_resumes_ends_with_the_same_bits(tmp_path: Path) -> None:
    def oracle() -> Baseline:
        return Baseline(plan(ahead=WHOLE), shared_pipeline(1), TinyBatches(), OPTIMIZER)

    first, second = oracle(), oracle()
    list(first.steps(3))
    path = write(tmp_path, first.state, 3)
    second.resume(CheckpointReader(path, shared_pipeline(1), OPTIMIZER, 2).snapshot(0))
    assert [each.step for each in second.steps(6)] == [3, 4, 5]
    assert second.report()["sha256"] == baseline(6, policy="delayed")[0]
