"""A swarm under faults ends with the bits of the one-process run (DESIGN, I6), and what they cost.

Random faults are in `test_scenarios.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from peer.baseline import Baseline
from peer.calls import MicrobatchCall
from peer.inquiries import validate
from peer.kept import Work
from peer.leader import Leader
from peer.parts import Part
from peer.stage_server import StageServer
from swarm.compute import Kind
from swarm.errors import JoinError
from swarm.ledger import Decision, Do, Ledger
from swarm.model.custom import CustomPipeline
from swarm.net.channel import Channel, Message
from swarm.net.links import Links
from swarm.terms import Term
from swarm.wire.boundaries import BoundaryCodecs
from tests.protocol.simulated import (
    OPTIMIZER,
    Fault,
    Swarm,
    TinyBatches,
    baseline,
    plan,
    shared_pipeline,
)

POINTS = ["forward", "sent", "backward", "counted", "average", "prepared", "commit", "committed"]


@pytest.mark.parametrize("point", POINTS)
def test_a_replica_dies_wherever_it_is(point: str) -> None:
    """In each stage in turn, at each point, for good or to come back empty."""
    expected, _ = baseline()
    for stage in range(3):
        if (point, stage) == ("sent", 2):
            continue  # the last stage sends nothing on
        for duration_s in (0.0, 2.0):
            victim = f"r{stage}.1"
            fault = Fault(point, "kill", replica=victim, step=1, duration_s=duration_s)
            swarm = Swarm(seed=stage, faults=[fault])
            assert swarm.run()["sha256"] == expected
            assert swarm.fired == [fault], "nothing was injected"


def test_the_hashes_of_each_stage_are_those_of_the_one_process() -> None:
    swarm, found = Swarm(cut=(2, 1, 2)), []

    def keep() -> None:
        for name in ("r0.0", "r1.0", "r2.0"):
            server = swarm.members[name].server
            assert server is not None
            found.append(server.state.tensor_hashes())

    swarm.at_end = keep
    swarm.run()
    oracle = Baseline(plan(), shared_pipeline(1), TinyBatches(), OPTIMIZER)
    list(oracle.steps(3))
    assert oracle.stage_hashes(swarm.pipeline) == found


def test_a_neighbour_that_greets_as_of_another_run_is_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not who dialled it, the only replica of its stage, whose model would seem to raise."""
    usual, refused = Links.channel, 0

    async def channel(self: Links, incarnation: str, addresses: Sequence[str] = ()) -> Channel:
        nonlocal refused
        if incarnation.startswith("r1.1") and self.incarnation.startswith("r0"):
            refused += 1
            raise JoinError("it serves another run", "check the join link")
        return await usual(self, incarnation, addresses)

    monkeypatch.setattr(Links, "channel", channel)
    swarm = Swarm(replicas=(1, 2, 1))
    assert swarm.run(limit_s=200.0)["sha256"] == baseline()[0]
    assert refused


def test_a_step_in_which_nothing_weighs_is_one_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where all items of a step are masked."""
    monkeypatch.setattr(CustomPipeline, "weight", lambda self, batch: 0)
    expected, results = baseline.__wrapped__()
    swarm = Swarm()
    assert swarm.run(limit_s=60.0)["sha256"] == expected
    assert [result.loss for result in swarm.results] == [result.loss for result in results]
    assert all(math.isfinite(result.loss) for result in results)


@pytest.mark.parametrize(
    ("cut", "replicas"),
    [((5,), (1,)), ((2, 3), (3, 1)), ((1, 2, 2), (1, 1, 1)), ((2, 1, 1, 1), (2, 1, 2, 1))],
)
def test_cut_and_replicas_change_nothing(cut: tuple[int, ...], replicas: tuple[int, ...]) -> None:
    expected, results = baseline()
    swarm = Swarm(num_stages=len(cut), replicas=replicas, cut=cut)
    assert swarm.run()["sha256"] == expected
    assert [result.loss for result in swarm.results] == [result.loss for result in results]
    assert [result.grad_norm for result in swarm.results] == [r.grad_norm for r in results]


def test_evicted_answers_are_computed_again() -> None:
    expected, _ = baseline(num_microbatches=6)
    evictions = 0
    for seed in range(6):
        faults = [Fault("counted", "kill", replica="r1.1", step=1, count=2)]
        swarm = Swarm(seed=seed, plan=plan(6), kept_bytes=1, faults=faults)
        assert swarm.run()["sha256"] == expected
        assert swarm.fired
        evictions += swarm.evictions()
    assert evictions > 50


def recomputing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, MicrobatchCall]]:
    """Each time that a stage has computed evicted answers again: which stage, for which call."""
    usual, again = StageServer._recompute, []

    async def recompute(
        self: StageServer, part: Part, work: Work, call: MicrobatchCall, tensors: Any
    ) -> Message:
        answer = await usual(self, part, work, call, tensors)
        again.append((self.stage, call))
        return answer

    monkeypatch.setattr(StageServer, "_recompute", recompute)
    return again


def test_a_chain_of_evicted_answers_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one replay of what the last stage has lost, both stages before it compute once more."""
    again = recomputing(monkeypatch)
    expected, _ = baseline(num_microbatches=6)
    for seed in range(3):
        fault = Fault("acknowledged", "kill", replica="leader", step=1, count=4, victim="r2.1")
        swarm = Swarm(seed=seed, plan=plan(6), kept_bytes=1, faults=[fault])
        again.clear()
        assert swarm.run()["sha256"] == expected
        assert swarm.fired == [fault], "nothing was injected"
        # Those that their whole route had counted; others may be evicted during their replay.
        points = [(point, facts) for _, _, point, facts in swarm.events if facts.get("step") == 1]
        expelled = [point for point, _ in points].index("expelled")
        known = [facts for point, facts in points[:expelled] if point == "acknowledged"]
        lost = {facts["index"] for facts in known if facts["route"][2] == "r2.1#1"}
        computed = Counter((at, call.index) for at, call in again if call.index in lost)
        assert lost, "it had counted nothing"
        assert computed == {(stage, index): 1 for stage in (0, 1) for index in lost}, again


def test_an_answer_that_is_evicted_during_a_replay_is_not_counted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was kept when the repeat began, and gone when the rest of the route had answered."""
    again, repeats, usual = recomputing(monkeypatch), set(), Ledger.on_gradient

    def on_gradient(self: Ledger, term: Term, step: int, index: int, try_: int) -> Decision:
        decision = usual(self, term, step, index, try_)
        if decision.do is Do.REPEAT:
            repeats.add((step, index, try_))
        return decision

    monkeypatch.setattr(Ledger, "on_gradient", on_gradient)
    fault = Fault("counted", "kill", replica="r2.1", step=1, count=3)
    swarm = Swarm(plan=plan(12), kept_bytes=300, faults=[fault])
    assert swarm.run()["sha256"] == baseline(num_microbatches=12)[0]
    assert swarm.fired == [fault], "nothing was injected"
    assert repeats
    assert repeats <= {(call.step, call.index, call.try_) for _, call in again}


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "float32+zstd", "int8", "int4+zstd"])
def test_codecs_train(codec: str) -> None:
    # 4 bits leave too much to chance with the 16 samples that fewer microbatches have.
    expected, results = baseline(num_microbatches=12)
    codecs = BoundaryCodecs(codec, codec)
    swarm = Swarm(plan=plan(12), codecs=codecs, faults=[Fault("counted", "kill", replica="r1.1")])
    sha256 = swarm.run()["sha256"]
    assert swarm.fired
    assert (sha256 == expected) == (codec == "float32+zstd")
    losses = [result.loss for result in swarm.results]
    assert losses == pytest.approx([result.loss for result in results], rel=2e-2)


@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "stochastic"])
def test_what_is_rounded_does_not_depend_on_replicas_or_failures(seed: int | None) -> None:
    """I1 and I2 with codecs of each boundary and direction, evictions and a lost replica."""
    codecs = BoundaryCodecs("int8", "bfloat16", {1: ("int4", "int8+zstd")}, seed)
    alone = Swarm(replicas=(1, 1, 1), codecs=codecs).run()["sha256"]
    faults = [Fault("counted", "kill", replica="r1.1", step=1, count=2)]
    swarm = Swarm(codecs=codecs, kept_bytes=1, faults=faults)
    assert swarm.run()["sha256"] == alone
    assert swarm.fired
    assert swarm.evictions()
    assert Swarm(codecs=replace(codecs, seed=6)).run()["sha256"] != alone


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "int8"])
def test_gradient_codecs_train_and_replicas_stay_equal(codec: str) -> None:
    """I5 with rounded gradients: no round is repeated for twins that disagree, and nobody is sent
    for another state, which would make them equal too."""
    exact, results = baseline()
    swarm = Swarm(gradients=codec, faults=[Fault("counted", "kill", replica="r1.1")])
    assert swarm.run()["sha256"] != exact, "gradients are not rounded"
    assert swarm.fired
    points = {point for _, _, point, _ in swarm.events}
    assert not points & {"round_failed", "diverged", "failed"}
    expelled = {told["replica"] for _, _, point, told in swarm.events if point == "expelled"}
    assert expelled == {"r1.1#1"}
    losses = [result.loss for result in swarm.results]
    assert losses == pytest.approx([result.loss for result in results], rel=2e-2)


def test_float32_accumulators_are_close() -> None:
    """As docs/determinism.md says, of 20 steps, though a death has them added in other order."""
    fault = Fault("counted", "kill", replica="r1.1", step=7)
    exact, close = Swarm(), Swarm(accumulate="float32", faults=[fault])
    parameters = []
    for swarm in (exact, close):
        kept: dict[int, np.ndarray] = {}

        def keep(swarm: Swarm = swarm, kept: dict[int, np.ndarray] = kept) -> None:
            for member in swarm.members.values():
                assert member.server is not None
                kept[member.server.stage] = member.server.state.parameters.numpy().copy()

        swarm.at_end = keep
        swarm.run(20)
        parameters.append(np.concatenate([kept[stage] for stage in sorted(kept)]))
    assert close.fired
    a, b = parameters
    assert 0 < np.linalg.norm(a - b) / np.linalg.norm(a) <= 1e-5


# ---- what a death costs --------------------------------------------------------------------------


def kernels(swarm: Swarm) -> dict[str, Counter[Kind]]:
    return {name: compute.counts for name, compute in swarm.computes.items()}


def test_only_the_lost_stage_computes_again() -> None:
    """The dead replica of stage 1 had counted some; stages 0 and 2 run each microbatch once."""
    num_microbatches, num_steps = 8, 2
    for seed in range(4):
        fault = Fault("counted", "kill", replica="r1.1", step=1)
        swarm = Swarm(seed=seed, plan=plan(num_microbatches), faults=[fault])
        assert swarm.run(num_steps)["sha256"] == baseline(num_steps, num_microbatches)[0]
        assert swarm.fired
        counts = kernels(swarm)
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            for stage in (0, 2):
                ran = sum(counts[f"r{stage}.{number}"][kind] for number in range(2))
                assert ran == num_steps * num_microbatches, (stage, kind, counts)
            ran = sum(counts[f"r1.{number}"][kind] for number in range(2))
            assert ran > num_steps * num_microbatches


# ---- the schedule --------------------------------------------------------------------------------


def most_held(swarm: Swarm) -> dict[str, int]:
    held = {}
    for name, member in swarm.members.items():
        assert member.server is not None
        held[name] = member.server.slots.most_held
    return held


def test_one_forward_one_backward_keeps_activations_within_slots() -> None:
    """AFAB, the same queue in the other order and without a bound, keeps every microbatch's."""
    held: dict[bool, dict[str, int]] = {}
    for afab in (False, True):
        swarm = Swarm(replicas=(1, 1, 1), plan=plan(16), slots=3, afab=afab)
        swarm.at_end = lambda swarm=swarm, afab=afab: held.update({afab: most_held(swarm)})
        assert swarm.run(2)["sha256"] == baseline(2, 16)[0]
    assert max(held[False].values()) <= 3
    assert min(held[True].values()) > 8, held


class Ordered(Swarm):
    """Remembers in which order `r1.0` begins its kernels."""

    async def start_all(self) -> None:
        await super().start_all()
        self.kinds: list[Kind] = []
        compute = self.computes["r1.0"]
        usual = compute._seconds_of
        compute._seconds_of = lambda kind: (self.kinds.append(kind), usual(kind))[1]


def test_backwards_do_not_wait_for_all_forwards() -> None:
    """They take turns where both wait, so few microbatches are between the two."""
    most = {}
    for afab in (False, True):
        swarm = Ordered(replicas=(1, 1), num_stages=2, plan=plan(8), slots=4, afab=afab)
        swarm.run(1)
        assert Counter(swarm.kinds)[Kind.FORWARD] == Counter(swarm.kinds)[Kind.BACKWARD] == 8
        steps = [{Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(kind, 0) for kind in swarm.kinds]
        most[afab] = max(accumulate(steps))
    assert most[False] == 2  # the next forward has begun before the first one's backward is queued
    assert most[True] > 4


def test_a_validation_computes_no_gradient() -> None:
    """It is forwards alone, and the run's bits are those of one without."""
    num_microbatches, num_steps = 6, 3

    class Validated(Swarm):
        async def at_record(self, leader: Leader) -> None:
            await super().at_record(leader)
            if leader.next_step:
                losses.append(await validate(leader))

    losses: list[float] = []
    swarm = Validated(plan=plan(num_microbatches, validation_microbatches=4))
    assert swarm.run(num_steps)["sha256"] == baseline(num_steps, num_microbatches)[0]
    assert len(losses) == num_steps
    counts = kernels(swarm)
    for stage in range(3):
        of_stage = [counts[f"r{stage}.{number}"] for number in range(2)]
        assert sum(each[Kind.BACKWARD] for each in of_stage) == num_steps * num_microbatches
        forwards = sum(each[Kind.FORWARD] for each in of_stage)
        assert forwards == num_steps * (num_microbatches + 4)
