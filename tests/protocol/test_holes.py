"""Regressions: each of these once hung, crashed or stalled (docs/decisions/protocol-holes.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from peer import parts
from peer.calls import MicrobatchCall
from peer.inquiries import fetch_states, validate
from peer.leader import HOLD_OFF_S, Leader
from peer.member import Member
from peer.microbatches import MAX_FAILURES
from peer.quorum import Quorum
from peer.snapshots import Donor
from peer.stage_server import StageServer
from peer.training import StepResult
from swarm.compute import Kind
from swarm.consensus import on_prepare
from swarm.errors import RefusedError, StageFailedError
from swarm.net.channel import CallFailedError, Channel, Message, Method
from swarm.net.links import Links
from swarm.sim.virtual_time import run
from swarm.terms import Record, Term
from swarm.wire.codecs import encode
from swarm.wire.frames import no_tensors
from tests.protocol.simulated import (
    LEADER,
    RUN_ID,
    Fault,
    SlowDisk,
    Swarm,
    TinyBatches,
    baseline,
    peer_of,
    plan,
)


def total_s(results: list[StepResult]) -> float:
    return sum(result.wall_s for result in results)


def reasons(swarm: Swarm, point: str = "expelled") -> list[str]:
    return [facts["replica"] for _, _, each, facts in swarm.events if each == point]


def test_a_member_dies_after_it_has_prepared() -> None:
    """Its average stands: the record names it, and nothing is averaged again."""
    for seed in range(4):
        swarm = Swarm(replicas=(2, 1, 1), seed=seed, speed={"r1.0": 3.0})
        swarm.faults = [Fault("prepared", "kill", replica=f"r{1 + seed % 2}.0", victim="r0.1")]
        assert swarm.run()["sha256"] == baseline()[0]
        assert swarm.fired
    assert swarm.results[0].loss == baseline()[1][0].loss


def test_twins_that_never_reach_each_other_cost_one_of_them() -> None:
    """Every round with both fails: one is left out, and training does not wait for the cut."""
    fault = Fault("forward", "cut", replica="r1.0", other="r1.1", duration_s=1000.0)
    swarm = Swarm(faults=[fault], plan=plan(4, 6))
    assert swarm.run(6, limit_s=3000)["sha256"] == baseline(6)[0]
    assert swarm.fired
    assert len(reasons(swarm)) == 1, "it was taken back at once"
    assert total_s(swarm.results) < 150
    assert total_s(swarm.results[3:]) < 60


def fails_to_average(swarm: Swarm, victim: str, rounds: int, from_step: int = 0) -> None:
    """A kernel of `victim` raises in so many rounds, and nowhere else."""
    seen, struck = swarm.on_probe, list[int]()

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        seen(who, point, facts)
        if (who, point) != (victim, "average") or facts["step"] < from_step:
            return
        if len(struck) < rounds:
            struck.append(facts["step"])
            swarm.computes[victim].failing[Kind.UPDATE] += 1

    swarm.on_probe = probe  # type: ignore[method-assign]


def test_who_is_expelled_for_a_round_stays_out_longer_each_time() -> None:
    """It follows the commits, and could be taken into the next round at once."""
    swarm = Swarm(num_stages=2, replicas=(1, 2), seconds=(1.0, 2.0), plan=plan(2, 14))
    fails_to_average(swarm, "r1.0", 6)  # of a step the early one, and the first after it, too
    assert swarm.run(14)["sha256"] == baseline(14, 2)[0]
    assert reasons(swarm) == ["r1.0#1"] * 2
    _, *turns = [
        at
        for at, _, point, facts in swarm.events
        if point in ("admitted", "expelled") and facts["replica"] == "r1.0#1"
    ]
    absences = [back - left for left, back in zip(turns[::2], turns[1::2], strict=True)]
    step_s = max(result.wall_s for result in swarm.results)
    for absence, at_least in zip(absences, [HOLD_OFF_S, 2 * HOLD_OFF_S], strict=True):
        assert at_least <= absence < at_least + step_s


def test_who_stays_out_is_taken_back_when_its_stage_has_nobody_else() -> None:
    swarm = Swarm(num_stages=2, replicas=(1, 2), plan=plan(2, 3))
    fails_to_average(swarm, "r1.0", 3)
    seen, killed_at = swarm.on_probe, list[float]()

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        seen(who, point, facts)
        if (who, point, facts.get("step")) == ("r1.0", "committed", 0):
            killed_at.append(swarm.loop.now)
            swarm.later(0.0, swarm.kill, "r1.1")

    swarm.on_probe = probe  # type: ignore[method-assign]
    assert swarm.run()["sha256"] == baseline(3, 2)[0]
    assert reasons(swarm)[0] == "r1.0#1"
    back = [at for at, _, point, facts in swarm.events if point == "admitted"][-1]
    assert killed_at[0] < back < killed_at[0] + 1.0


def test_neighbours_that_cannot_reach_each_other_are_routed_around() -> None:
    fault = Fault("sent", "cut", replica="r0.0", other="r1.0", duration_s=300.0, step=1)
    swarm = Swarm(faults=[fault], plan=plan(8, 4))
    assert swarm.run(4)["sha256"] == baseline(4, 8)[0]
    assert swarm.fired
    assert reasons(swarm) == []
    assert total_s(swarm.results) < 40


def test_neighbours_without_alternative_go_on_as_soon_as_they_can() -> None:
    """A connection that is reset is no reason to avoid the only route for half a minute."""
    swarm = Swarm(replicas=(1, 1, 1), faults=[Fault("sent", "reset", replica="r1.0", step=1)])
    assert swarm.run()["sha256"] == baseline()[0]
    assert swarm.fired
    assert total_s(swarm.results) < 10


def test_neighbours_without_alternative_are_tried_again() -> None:
    """Both are connected to the leader all the time; only the line between them has ended."""
    fault = Fault("sent", "sever", replica="r0.0", other="r1.0", step=1)
    swarm = Swarm(replicas=(1, 1, 1), faults=[fault])
    assert swarm.run(limit_s=100)["sha256"] == baseline()[0]
    assert swarm.fired
    failed = [facts["suspect"] for _, _, point, facts in swarm.events if point == "failed"]
    assert failed == ["r1.0#1"]
    assert reasons(swarm) == []
    assert total_s(swarm.results) < 5


def test_neighbours_that_have_both_counted_and_are_cut() -> None:
    """A replay must pass both: one of the two starts anew, since neither can be fenced."""
    for victim in ("r1.0", "r1.1"):
        faults = [
            Fault("average", "kill", victim="r0.1", step=1),
            *(
                Fault("average", "cut", victim=victim, other=other, step=1, duration_s=200.0)
                for other in ("r2.0", "r2.1")
            ),
        ]
        swarm = Swarm(faults=faults, plan=plan(6, 3))
        assert swarm.run()["sha256"] == baseline(3, 6)[0]
        assert len(swarm.fired) == 3
        assert total_s(swarm.results) < 120


def test_microbatches_that_wait_for_a_retry_do_not_block_those_under_way() -> None:
    """They hold slots at stage 0; what was begun is issued before anything new."""
    faults = [Fault("forward", "raise", replica="r1.0") for _ in range(9)]
    swarm = Swarm(num_stages=2, replicas=(1, 1), slots=2, plan=plan(12, 2), faults=faults)
    assert swarm.run(2, limit_s=100)["sha256"] == baseline(2, 12)[0]
    assert len(swarm.fired) == 9


def test_a_replica_that_always_raises_is_avoided() -> None:
    swarm = Swarm(faults=[])
    swarm.faults = [Fault("forward", "raise", replica="r1.1", count=1) for _ in range(40)]
    assert swarm.run()["sha256"] == baseline()[0]


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE])
def test_a_kernel_that_always_fails_ends_the_run(kind: Kind) -> None:
    """Naming the stage; a time-out or a hang would not say what is wrong."""
    swarm = Swarm(num_stages=2, replicas=(1, 2))
    start = swarm.start_replica

    def start_broken(name: str, stage: int | None) -> Any:
        member = start(name, stage)
        if stage == 1:
            swarm.computes[name].failing[kind] = 10_000
        return member

    swarm.start_replica = start_broken  # type: ignore[method-assign]
    with pytest.raises(StageFailedError, match="stage 1 cannot"):
        swarm.run(limit_s=500)


def test_who_is_alone_in_its_stage_and_never_averages_ends_the_run() -> None:
    """It cannot be left out, and its microbatches and resets are as they should be."""
    swarm = Swarm(num_stages=2, replicas=(2, 1))
    fails_to_average(swarm, "r1.0", 10_000, from_step=1)
    with pytest.raises(StageFailedError, match="stage 1 cannot average its step"):
        swarm.run(limit_s=50)
    rounds = [facts for _, _, point, facts in swarm.events if point == "round_failed"]
    assert len(rounds) == MAX_FAILURES


def test_who_is_alone_in_its_stage_may_fail_to_average_for_a_while() -> None:
    swarm = Swarm(num_stages=2, replicas=(2, 1))
    fails_to_average(swarm, "r1.0", MAX_FAILURES - 1, from_step=1)
    assert swarm.run(limit_s=50)["sha256"] == baseline()[0]
    assert reasons(swarm) == []


def test_only_failures_of_the_computation_count() -> None:
    """One hop refuses for reasons of the network seven times, then its kernel fails once."""
    swarm = Swarm(replicas=(1, 1, 1), plan=plan(4, 3))
    seen, struck = swarm.on_probe, list[str]()

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        seen(who, point, facts)
        if (point, facts.get("step")) != ("record", 0):
            return
        methods = swarm.members["r1.0"].links.methods
        usual = methods["microbatch"]

        async def handle(channel: Channel, message: Message) -> Message | None:
            if (message.body["step"], message.body["index"]) == (1, 2) and len(struck) < 8:
                struck.append("failed" if len(struck) == 7 else "unreachable")
                raise CallFailedError(struck[-1], "no reason", hop=1)
            return await usual.handle(channel, message)

        methods["microbatch"] = replace(usual, handle=handle)

    swarm.on_probe = probe  # type: ignore[method-assign]
    assert swarm.run()["sha256"] == baseline()[0]
    failed = [facts for _, _, point, facts in swarm.events if point == "failed"]
    assert len(failed) == len(struck) == 8
    assert {(each["index"], each["suspect"]) for each in failed} == {(2, "r1.0#1")}
    assert reasons(swarm) == []


def test_a_microbatch_whose_computation_failed_goes_elsewhere_first() -> None:
    """To its twin, although that one is ten times slower."""
    faults = [Fault("forward", "raise", replica="r1.0", step=2, count=each) for each in (1, 4, 7)]
    swarm = Swarm(replicas=(1, 2, 1), plan=plan(12, 3), speed={"r1.1": 10.0}, faults=faults)
    assert swarm.run()["sha256"] == baseline(3, 12)[0]
    assert len(swarm.fired) == 3
    tried: dict[int, list[str]] = {}
    for _, _, point, facts in swarm.events:
        if (point, facts.get("step")) == ("issue", 2):
            tried.setdefault(facts["index"], []).append(facts["route"][1])
    again = [hops for hops in tried.values() if len(hops) > 1]
    assert again == [["r1.0#1", "r1.1#1"]] * 3


@pytest.mark.parametrize("victim", ["r0.1", "r1.1", "r2.1"])
def test_a_loss_that_is_no_number_costs_who_answers_it(victim: str) -> None:
    """Twice: whoever passes something on has looked at it, so nobody else is blamed."""
    swarm = Swarm(plan=plan(6, 3))
    seen, struck = swarm.on_probe, list[str]()

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        seen(who, point, facts)
        if (who, point, facts.get("step")) != (victim, "committed", 0):
            return
        server = swarm.members[victim].server
        assert server is not None
        usual = server._reply

        def reply(*args: Any) -> dict[str, Any]:
            if len(struck) < 2:
                struck.append(f"{victim}#1")
                return {**usual(*args), "loss": "none"}
            return usual(*args)

        server._reply = reply  # type: ignore[method-assign]

    swarm.on_probe = probe  # type: ignore[method-assign]
    assert swarm.run(limit_s=100)["sha256"] == baseline(3, 6)[0]
    assert struck == [f"{victim}#1"] * 2
    blamed = [facts["suspect"] for _, _, point, facts in swarm.events if point == "failed"]
    assert blamed + reasons(swarm) == struck


class PoisonedBatches(TinyBatches):
    """Step 1 has a microbatch whose input is not a number."""

    def batch(self, step: int, index: int) -> Mapping[str, np.ndarray]:
        batch = dict(super().batch(step, index))
        if (step, index) == (1, 2):
            batch["x"] = np.full_like(batch["x"], np.nan)
        return batch


def test_a_gradient_that_is_no_number_skips_the_step_here_and_there() -> None:
    from peer.baseline import Baseline
    from tests.protocol.simulated import OPTIMIZER, shared_pipeline

    oracle = Baseline(plan(), shared_pipeline(1), PoisonedBatches(), OPTIMIZER)
    results = list(oracle.steps(3))
    swarm = Swarm(batches=PoisonedBatches(), faults=[Fault("counted", "kill", "r1.1", step=1)])
    assert swarm.run()["sha256"] == oracle.report()["sha256"]
    assert swarm.fired
    assert [r.record.outcome for r in swarm.results if r.record] == [
        "applied",
        "skipped",
        "applied",
    ]
    assert [r.loss for r in swarm.results][::2] == [r.loss for r in results][::2]
    assert np.isnan(swarm.results[1].loss)
    assert np.isnan(results[1].loss)


def corrupted(swarm: Swarm, victim: str, point: str, step: int) -> None:
    """A cosmic ray strikes the parameters of `victim` when it passes `point`."""
    seen = swarm.on_probe

    def probe(who: str, name: str, facts: dict[str, Any]) -> None:
        if (who, name, facts.get("step")) == (victim, point, step):
            server = swarm.members[victim].server
            assert server is not None
            server.state.parameters[0] += 1e-3
        seen(who, name, facts)

    swarm.on_probe = probe  # type: ignore[method-assign]


@pytest.mark.parametrize("victim", ["r1.0", "r1.2"])
@pytest.mark.parametrize("policy", ["exact", "delayed"])
def test_first_weights_that_differ_are_fetched_from_most_twins(victim: str, policy: str) -> None:
    """As between kinds of CPU. The step tells nothing: it is 0 before and after."""
    swarm = Swarm(plan=plan(4, 4), replicas=(1, 3, 1), policy=policy)
    seen, struck = swarm.on_probe, list[str]()

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        if (who, point, facts.get("step")) == (victim, "forward", 0) and not struck:
            struck.append(who)
            server = swarm.members[victim].server
            assert server is not None
            for version in server.state.live:
                version.parameters[0] += 1e-3
        seen(who, point, facts)

    swarm.on_probe = probe  # type: ignore[method-assign]
    assert swarm.run(4, limit_s=100.0)["sha256"] == baseline(4, policy=policy)[0]
    assert struck
    assert reasons(swarm, "diverged") == [f"{victim}#1"]


@pytest.mark.parametrize("victim", ["r1.0", "r1.1"])
def test_a_state_that_changes_by_itself_has_no_part_in_the_gradient(victim: str) -> None:
    """Its own fingerprint from the commit tells, before anything is averaged with it.

    What it sent on is in its neighbours' gradients, so the whole step starts anew.
    """
    swarm = Swarm(plan=plan(4, 4))
    corrupted(swarm, victim, "committed", 0)
    assert swarm.run(4)["sha256"] == baseline(4)[0]
    assert f"{victim}#1" in reasons(swarm)


@pytest.mark.parametrize("victim", ["r1.0", "r1.2"])
def test_a_bad_replica_does_not_make_its_healthy_twins_start_anew(victim: str) -> None:
    """Whoever answers first, the majority's fingerprint is the stage's."""
    swarm = Swarm(plan=plan(4, 4), replicas=(1, 3, 1), speed={"r1.1": 3.0})
    corrupted(swarm, victim, "commit", 1)
    assert swarm.run(4)["sha256"] == baseline(4)[0]
    assert reasons(swarm, "diverged") == [f"{victim}#1"]


WRONG = "f" * 64


def misreported(swarm: Swarm, victim: str, when: Callable[[int], bool]) -> list[int]:
    """`victim` says a false sha256 of what it has averaged, `when` this is of such a step. The
    steps in which it did."""
    seen, struck = swarm.on_probe, list[int]()

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        if (who, point) == (victim, "prepared") and when(facts["step"]):
            struck.append(facts["step"])
            prepared = swarm.members[victim].commits.prepared
            assert prepared is not None
            wrong = replace(prepared.update.facts, sha256=WRONG)
            prepared.update = replace(prepared.update, facts=wrong)
        seen(who, point, facts)

    swarm.on_probe = probe  # type: ignore[method-assign]
    return struck


def test_who_differs_again_and_again_is_left_out_for_a_while() -> None:
    """Bad memory, say: each time the whole step is computed again."""
    swarm = Swarm(plan=plan(4, 8), replicas=(1, 3, 1))
    for step in range(1, 8):
        corrupted(swarm, "r1.2", "commit", step)
    assert swarm.run(8)["sha256"] == baseline(8)[0]
    assert reasons(swarm, "diverged") == ["r1.2#1"] * 2


@pytest.mark.parametrize("victim", ["r1.0", "r1.2"])
def test_the_majority_says_what_the_averaged_gradient_is(victim: str) -> None:
    """One in whose memory a bit flips after each averaging of a step, the first to answer or not,
    costs nobody else its part, and no record names its gradient."""
    swarm = Swarm(plan=plan(4, 4), replicas=(1, 3, 1), speed={"r1.1": 3.0})
    struck = misreported(swarm, victim, lambda step: step == 1)
    assert swarm.run(4)["sha256"] == baseline(4)[0]
    assert struck
    assert set(reasons(swarm)) == {f"{victim}#1"}
    assert all(WRONG not in r.record.gradients.values() for r in swarm.results if r.record)


def test_whose_averaged_gradient_differs_again_and_again_is_left_out_for_a_while() -> None:
    """Also where it is right at the second attempt: every step would be averaged twice."""
    swarm = Swarm(plan=plan(4, 8), replicas=(1, 3, 1))
    struck: list[int] = misreported(swarm, "r1.2", lambda step: step not in struck)
    assert swarm.run(8)["sha256"] == baseline(8)[0]
    assert len(struck) == 2
    assert reasons(swarm) == ["r1.2#1"]


def test_who_cannot_have_a_gradient_fetches_a_newer_state() -> None:
    """The only donor says a sha256 that its bytes do not have, and of two it is believed: nobody
    can follow its commit, but its state after it is there."""
    swarm = Swarm(plan=plan(4, 8), replicas=(1, 2, 1))
    misreported(swarm, "r1.1", lambda step: step == 1)
    assert swarm.run(8, limit_s=60.0)["sha256"] == baseline(8)[0]
    records = {each.record.step: each.record for each in swarm.results if each.record}
    assert records[1].gradients[1] == WRONG
    assert [who for _, who, point, _ in swarm.events if point == "bad_chunk"] == ["r1.0", LEADER]
    assert records[7].members[1] == records[0].members[1]


def test_of_two_that_differ_none_is_left_out() -> None:
    """It is a guess which of them is wrong."""
    swarm = Swarm(plan=plan(4, 8), replicas=(1, 2, 1))
    for step in range(1, 6):
        corrupted(swarm, "r1.1", "commit", step)
    swarm.run(8)
    assert len(reasons(swarm, "diverged")) > 2
    assert all(member.hold_offs == 0 for member in swarm.leader.members)


def test_of_two_that_differ_the_newer_one_starts_anew() -> None:
    """A tie cannot be decided by votes; one state and one chain of them must remain."""
    for victim in ("r1.0", "r1.1"):
        swarm = Swarm(plan=plan(4, 4), replicas=(1, 2, 1))
        corrupted(swarm, victim, "commit", 1)
        result = swarm.run(4)["sha256"]
        joined = [name for name in reasons(swarm, "joined") if name.startswith("r1")]
        assert reasons(swarm, "diverged") == [joined[1]]
        assert (result == baseline(4)[0]) == (joined[1] == f"{victim}#1")
    marks = [result.record.fingerprints for result in swarm.results if result.record]
    assert all(sorted(each) == [0, 1, 2] and all(each.values()) for each in marks)


def test_a_record_that_does_not_follow_the_last_one_is_refused() -> None:
    """The replica is on another chain than the run: it fetches the state."""
    swarm = Swarm(plan=plan(4, 4))
    seen = swarm.on_probe

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        seen(who, point, facts)
        if (who, point, facts.get("step")) == ("r1.1", "committed", 1):
            commits = swarm.members["r1.1"].commits
            assert commits is not None
            assert commits.record is not None
            commits.record = replace(commits.record, loss=0.0)

    swarm.on_probe = probe  # type: ignore[method-assign]
    assert swarm.run(4)["sha256"] == baseline(4)[0]
    assert reasons(swarm) == ["r1.1#1"]
    applied = [f["step"] for _, w, p, f in swarm.events if (w, p) == ("r1.1", "committed")]
    assert 2 not in applied


def test_an_update_that_fails_half_way_is_replaced_by_a_twins_state() -> None:
    swarm = Swarm(plan=plan(4, 4))
    seen, struck = swarm.on_probe, list[str]()

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        if (who, point, facts.get("step")) == ("r1.1", "commit", 1) and not struck:
            struck.append(who)
            commits = swarm.members[who].commits
            assert commits is not None
            policy, apply = commits.policy, commits.policy.apply

            def half(state: Any, update: Any, **_: Any) -> None:
                policy.apply = apply  # type: ignore[method-assign]
                state.parameters[: state.layout.total // 2] += 1.0
                raise RuntimeError("out of memory")

            policy.apply = half  # type: ignore[method-assign, assignment]
        seen(who, point, facts)

    swarm.on_probe = probe  # type: ignore[method-assign]
    assert swarm.run(4)["sha256"] == baseline(4)[0]
    assert "r1.1#1" in reasons(swarm)
    assert reasons(swarm, "diverged") == [], "nothing was applied to what is left of it"


def test_a_commit_goes_on_when_the_leaders_connection_ends() -> None:
    """Cut off in the middle of an update, it would be applied twice."""
    for seed in range(3):
        swarm = Swarm(seed=seed, faults=[Fault("commit", "reset", replica="r1.1", step=1)])
        assert swarm.run()["sha256"] == baseline()[0]
        assert swarm.fired
        applied = [f["step"] for _, w, p, f in swarm.events if (w, p) == ("r1.1", "committed")]
        assert applied == [0, 1, 2]


class LateCommit(Swarm):
    """The commit of step 1 takes a second to come at `r1.1`, which is so slow that the single
    microbatch of step 2 is computed by its twin."""

    def __init__(self) -> None:
        super().__init__(replicas=(1, 2, 2), plan=plan(1, 4), speed={"r1.1": 20.0})
        self.aborted: list[int] = []

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if (point, facts.get("step")) == ("record", 1):
            commits = self.members["r1.1"].commits
            assert commits is not None
            usual = commits.before_commit
            assert usual is not None

            async def late(record: Record) -> None:
                commits.before_commit = usual
                await asyncio.sleep(1.0)
                await usual(record)

            commits.before_commit = late

    def at(self, who: str, point: str, step: int) -> list[float]:
        return [
            at
            for at, name, passed, facts in self.events
            if (name, passed, facts.get("step")) == (who, point, step)
        ]


def test_a_slow_twin_that_has_counted_nothing_is_waited_for() -> None:
    """The order to average comes before its commit, which is on the way."""
    swarm = LateCommit()
    assert swarm.run(4)["sha256"] == baseline(4, 1)[0]
    assert swarm.at("r1.0", "average", 2) < swarm.at("r1.1", "commit", 1), "nothing was late"
    assert not swarm.at("r1.1", "counted", 2)
    assert reasons(swarm) == []


def test_an_abort_that_overtakes_a_commit_leaves_what_was_prepared_of_it() -> None:
    """A round of step 2 fails while the commit of step 1 is on the way to `r1.1`. Then its twin
    dies, which was the only other one that had the averaged gradient of step 1."""
    swarm = LateCommit()
    swarm.faults = [Fault("average", "kill", replica="r1.0", step=2, victim="r2.1")]
    seen = swarm.on_probe

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        seen(who, point, facts)
        if (point, facts.get("step")) != ("record", 1):
            return
        member = swarm.members["r1.1"]
        usual = member.links.methods["abort"]

        async def abort(channel: Channel, message: Message) -> Message | None:
            answer = await usual.handle(channel, message)
            if not swarm.aborted:
                swarm.aborted.append(member.step)
                swarm.later(0.0, swarm.kill, "r1.0")
            return answer

        member.links.methods["abort"] = replace(usual, handle=abort)

    swarm.on_probe = probe  # type: ignore[method-assign]
    assert swarm.run(4, limit_s=100)["sha256"] == baseline(4, 1)[0]
    assert swarm.fired, "nothing was injected"
    assert swarm.aborted == [1], "the abort did not overtake the commit"
    assert swarm.at("r1.1", "committed", 1)


def test_a_copy_that_could_not_be_had_does_not_keep_who_is_behind_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut off for some commits, with a state that is valid. Its donor cannot hold a copy at first;
    what is collected since would have continued that copy, not the state that is here."""
    usual, refused = Donor._copy_of, []

    async def copy_of(self: Donor, channel: Channel, wanted: object) -> Any:
        if len(refused) < 2:  # of now, and of the next step
            refused.append(wanted)
            raise RefusedError("all copies here are being read")
        return await usual(self, channel, wanted)

    monkeypatch.setattr(Donor, "_copy_of", copy_of)
    fault = Fault("committed", "partition", "r1.1", step=1, side=("r1.1",), duration_s=30.0)
    swarm = Swarm(replicas=(1, 2, 1), plan=plan(2, 20), seconds=(0.5, 1.0), faults=[fault])
    assert swarm.run(20, limit_s=500)["sha256"] == baseline(20, 2)[0]
    assert swarm.fired, "nothing was injected"
    assert len(refused) == 2
    assert reasons(swarm, "admitted").count("r1.1#1") == 2  # at first, and with a copy


# ---- devices that hang, and those that are only slow ---------------------------------------------


def hang(swarm: Swarm, victim: str, kind: Kind, step: int) -> None:
    """The device of `victim` begins a kernel of that kind in `step` and never ends it."""
    seen, struck = swarm.on_probe, []

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        seen(who, point, facts)
        begins = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "average"}
        if not struck and (who, point) == (victim, begins[kind]) and facts.get("step") == step:
            struck.append(who)
            compute = swarm.computes[victim]
            compute._seconds_of = lambda kind: 1e9
        if struck and point == "record" and facts["step"] == 2:
            swarm.kill(victim)  # it would never come to an end

    swarm.on_probe = probe  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE])
def test_a_device_that_hangs_costs_its_replica_its_part(kind: Kind) -> None:
    """Its process answers pings and questions, so no channel ends; the twin does its work."""
    swarm = Swarm(plan=plan(6, 3))
    hang(swarm, "r1.1", kind, 1)
    assert swarm.run(limit_s=1500)["sha256"] == baseline(3, 6)[0]
    assert reasons(swarm)[:1] == ["r1.1#1"]
    assert total_s(swarm.results) < 200


class AskedBetweenSteps(Swarm):
    """After the second commit the device of `r1.0` hangs (or gets slower by `factor`, and its lines
    thin), and the leader asks all stages. `answers`: what came of it, and in how many seconds."""

    ask: Callable[[Leader], Coroutine[Any, Any, Any]]
    hung = "r1.0"
    factor = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.answers: list[tuple[Any, float]] = []

    async def at_record(self, leader: Leader) -> None:
        await super().at_record(leader)
        if leader.next_step != 2 or self.answers:
            return
        await asyncio.sleep(1.0)  # for all to have applied it
        compute, lines, factor = self.computes[self.hung], self.network.rates, self.factor
        usual = compute._seconds_of
        compute._seconds_of = lambda kind: usual(kind) * factor or 1e9
        if factor:  # some 10 bytes a second besides the pings
            lines["r0.0", self.hung], lines[self.hung, LEADER] = 250.0, 400.0
        began = self.loop.now
        self.answers.append((await self.ask(leader), self.loop.now - began))
        if factor:
            compute._seconds_of = usual
            lines["r0.0", self.hung] = lines[self.hung, LEADER] = 1e9
        else:
            self.kill(self.hung)  # it would never come to an end


ASKED = [
    pytest.param(validate, id="validation"),
    pytest.param(fetch_states, id="checkpoint"),
]


@pytest.mark.parametrize("ask", ASKED)
def test_a_device_that_hangs_between_two_steps_does_not_stop_the_run(ask: Any) -> None:
    swarm = AskedBetweenSteps(plan=plan(6, 3, validation_microbatches=6))
    swarm.ask = ask
    assert swarm.run(limit_s=1500)["sha256"] == baseline(3, 6)[0]
    [(answer, seconds)] = swarm.answers
    assert answer is not None  # of its twin
    assert seconds < 200


@pytest.mark.parametrize("ask", ASKED)
def test_a_slow_device_and_thin_lines_are_waited_for_between_two_steps(ask: Any) -> None:
    swarm = AskedBetweenSteps(
        plan=plan(6, 3, validation_microbatches=6), replicas=(1, 1, 1), silence_s=100.0
    )
    swarm.ask, swarm.factor = ask, 300.0
    assert swarm.run(limit_s=100_000)["sha256"] == baseline(3, 6)[0]
    [(answer, seconds)] = swarm.answers
    assert answer is not None
    assert seconds > 65  # who is overdue is asked after 62 s at most


@pytest.mark.parametrize("factor", [10.0, 50.0])
@pytest.mark.parametrize("seconds", [(0.01, 0.02), (1.0, 2.0)])
def test_slow_is_not_dead(factor: float, seconds: tuple[float, float]) -> None:
    for victims in (("r1.1",), ("r0.0", "r1.0", "r2.1")):
        speed = dict.fromkeys(victims, factor)
        swarm = Swarm(plan=plan(6, 3), speed=speed, seconds=seconds)
        assert swarm.run(limit_s=20_000)["sha256"] == baseline(3, 6)[0]
        assert reasons(swarm) == []


def test_a_replica_alone_in_its_stage_is_waited_for() -> None:
    """Leaving it out would win nothing, however long its kernels take."""
    swarm = Swarm(replicas=(1, 1, 1), speed={"r1.0": 3000.0}, seconds=(0.5, 1.0), plan=plan(2, 2))
    assert swarm.run(2, limit_s=100_000)["sha256"] == baseline(2, 2)[0]
    assert reasons(swarm) == []


@pytest.mark.parametrize(
    ("counts", "suspect"),
    [pytest.param(False, "r0.", id="its call"), pytest.param(True, "r1.1", id="its answer")],
)
def test_a_call_that_comes_to_nothing_is_issued_again(counts: bool, suspect: str) -> None:
    """Every channel lives and no device hangs: one call is never begun, or never answered.

    It is asked back from the last that has it: who waits for the one that never began, or who
    stands before the last hop, which has counted and so has answered.
    """
    swarm = Swarm(plan=plan(6, 3))
    seen, struck = swarm.on_probe, []

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        seen(who, point, facts)
        if struck or (who, point, facts.get("step")) != ("r1.1", "committed", 0):
            return
        methods = swarm.members[who].links.methods
        usual = methods["microbatch"]

        async def handle(channel: Channel, message: Message) -> Message | None:
            methods["microbatch"] = usual
            struck.append(message.body["index"])
            if counts:
                await usual.handle(channel, message)
            await asyncio.Event().wait()
            return None

        methods["microbatch"] = replace(usual, handle=handle)

    swarm.on_probe = probe  # type: ignore[method-assign]
    assert swarm.run(limit_s=1500)["sha256"] == baseline(3, 6)[0]
    [failed] = [facts for _, _, point, facts in swarm.events if point == "failed"]
    assert [failed["index"]] == struck
    assert failed["suspect"].startswith(suspect)
    assert "no answer" in failed["why"]
    assert reasons(swarm) == []
    assert total_s(swarm.results) < 100


NONSENSE = {
    "no hop": CallFailedError("failed", "lies"),
    "the first": CallFailedError("failed", "lies", hop=0),
    "beyond the last": CallFailedError("failed", "lies", hop=99),
    "no number": CallFailedError("failed", "lies", hop=[]),
    "timings that are none": ["A" * 1_000_000] * 2,
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_who_answers_nonsense_accuses_nobody_before_it(
    nonsense: CallFailedError | list[str],
) -> None:
    """Nor ends the run, as if the whole of their stage had failed."""
    swarm = Swarm(plan=plan(6, 3))
    seen, liar = swarm.on_probe, "r1.1"

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        seen(who, point, facts)
        if (who, point, facts.get("step")) != (liar, "committed", 0):
            return
        methods = swarm.members[who].links.methods
        usual = methods["microbatch"]

        async def handle(channel: Channel, message: Message) -> Message | None:
            answer = await usual.handle(channel, message)
            if isinstance(nonsense, CallFailedError):
                raise nonsense
            assert answer is not None
            return Message({**answer.body, "timings": nonsense}, answer.tensors)

        methods["microbatch"] = replace(usual, handle=handle)

    swarm.on_probe = probe  # type: ignore[method-assign]
    assert swarm.run(limit_s=1500)["sha256"] == baseline(3, 6)[0]
    failed = [facts["suspect"] for _, _, point, facts in swarm.events if point == "failed"]
    assert set(failed) == {f"{liar}#1"}


# ---- gradients that are half added ---------------------------------------------------------------


def test_an_addition_that_ends_half_way_voids_what_was_counted() -> None:
    for replicas in ((2, 2, 2), (1, 1, 1)):
        swarm = Swarm(plan=plan(6, 3), replicas=replicas)
        seen, struck = swarm.on_probe, []

        def probe(
            who: str,
            point: str,
            facts: dict[str, Any],
            swarm: Swarm = swarm,
            seen: Callable[..., None] = seen,
            struck: list[int] = struck,
        ) -> None:
            seen(who, point, facts)
            if (who, point, facts.get("step")) == ("r1.0", "counted", 1) and not struck:
                struck.append(1)
                state = swarm.members[who].server.state  # type: ignore[union-attr]
                layout = state.layout

                class Half:
                    def __getattr__(self, name: str) -> Any:
                        return getattr(layout, name)

                    def grad_into(self, stage: Any, accumulator: Any) -> None:
                        state.layout = layout
                        accumulator[: layout.total // 2] += 1.0
                        raise RuntimeError("out of memory")

                state.layout = Half()  # type: ignore[assignment]

        swarm.on_probe = probe  # type: ignore[method-assign]
        assert swarm.run()["sha256"] == baseline(3, 6)[0]
        assert struck
        assert reasons(swarm) == ["r1.0#1"]


# ---- the end of a run ----------------------------------------------------------------------------


def test_the_run_does_not_end_before_the_last_commit_is_held() -> None:
    """Its only replica fails in the last update: there is no further step to wait for it."""
    fault = Fault("commit", "raise", step=2, victim="r0.0")
    swarm = Swarm(num_stages=1, replicas=(1,), checkpoint_every=2, faults=[fault])
    assert swarm.run()["sha256"] == baseline()[0]
    assert swarm.fired
    assert swarm.effects["epoch opened"] == 1


# ---- leaving -------------------------------------------------------------------------------------


def test_the_last_of_a_stage_stays_until_somebody_else_serves_it() -> None:
    answers = []

    async def act(swarm: Swarm) -> None:
        member = swarm.members["r1.0"]
        assert member.leader is not None
        answers.append((await member.leader.call("leave", {})).body)

        async def bring_another() -> None:
            await asyncio.sleep(5.0)
            assert not member.finished.is_set()
            swarm.start_replica("r1.7", 1)

        swarm.bringing = asyncio.get_running_loop().create_task(  # type: ignore[attr-defined]
            bring_another()
        )

    swarm = Swarm(replicas=(1, 1, 1), plan=plan(4, 8), seconds=(0.1, 0.2))

    async def main() -> dict[str, str]:
        training = asyncio.get_running_loop().create_task(swarm.main(8))
        await until(lambda: swarm.leader is not None and swarm.leader.next_step > 0)
        await act(swarm)
        await until(lambda: swarm.members["r1.0"].finished.is_set() or training.done())
        return await training

    assert run(main(), limit_s=500)["sha256"] == baseline(8)[0]
    assert answers == [{"now": False, "reason": "another replica of stage 1"}]
    assert "r1.7#1" in reasons(swarm, "admitted")


# ---- who is to blame -----------------------------------------------------------------------------


def test_a_recomputation_that_fails_is_blamed_on_who_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answers were evicted, and asked for again: the first hop only passes the failure on."""
    usual, struck = StageServer._recompute, []

    async def recompute(self: StageServer, *args: Any) -> Message:
        if self.stage == 1 and not struck:
            struck.append(self.links.incarnation)
            swarm.computes[peer_of(struck[0])].failing[Kind.FORWARD] += 1
        return await usual(self, *args)

    monkeypatch.setattr(StageServer, "_recompute", recompute)
    fault = Fault("counted", "kill", replica="r2.1", step=1, count=2)
    swarm = Swarm(plan=plan(6), kept_bytes=1, faults=[fault])
    assert swarm.run()["sha256"] == baseline(3, 6)[0]
    blamed = [
        facts["suspect"]
        for _, _, point, facts in swarm.events
        if point == "failed" and "a kernel failed" in facts["why"]
    ]
    assert blamed == struck != []
    assert not {"r0.0#1", "r0.1#1"} & {*reasons(swarm)}


def test_a_commit_that_does_not_come_is_blamed_on_who_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second hop of a route has to be named by its own refusal; nobody else knows."""
    monkeypatch.setattr(parts, "COMMIT_WAIT_S", 0.05)

    async def act(swarm: Swarm) -> None:
        links, channel = await stranger(swarm, "mallory", "r1.0#1")
        server, leader = swarm.members["r1.0"].server, swarm.leader
        assert leader is not None
        assert server is not None
        route = ("r0.0#1", "r1.0#1", "r2.0#1")
        step = server.parts.ledger.step + 1
        call = MicrobatchCall(leader.term, step, 0, 1, 0, route, 1, 16.0, False)
        y = encode(torch.zeros(4, 8), "float32")
        wires = [*leader.microbatches.encode(TinyBatches().batch(step, 0)), y]
        with pytest.raises(CallFailedError, match="did not arrive") as refused:
            await channel.call("microbatch", call.body(), wires)
        assert (refused.value.kind, refused.value.detail) == ("refused", {"hop": 1})
        await links.aclose()

    assert during(Swarm(plan=plan(24, 3)), act)["sha256"] == baseline(3, 24)[0]


# ---- who may order what --------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


def during(swarm: Swarm, act: Callable[[Swarm], Any]) -> dict[str, str]:
    """Run three steps, and `act` once when the second has begun."""

    async def main() -> dict[str, str]:
        training = asyncio.get_running_loop().create_task(swarm.main(3))
        await until(
            lambda: (
                swarm.leader is not None
                and swarm.leader.next_step > 0
                and swarm.leader.step is not None
            )
        )
        await act(swarm)
        return await training

    return run(main(), limit_s=500)


async def stranger(swarm: Swarm, name: str, target: str) -> tuple[Links, Channel]:
    links = Links(swarm.network.transport(name), RUN_ID, f"{name}#1", {})
    links.serve()
    return links, await links.channel(target)


async def is_refused(channel: Channel, method: str, body: dict[str, Any]) -> None:
    with pytest.raises(CallFailedError, match="trainers") as refused:
        await channel.call(method, body)
    assert refused.value.kind == "refused"


def test_only_a_trainer_gives_orders() -> None:
    async def act(swarm: Swarm) -> None:
        links, channel = await stranger(swarm, "mallory", "r1.0#1")
        leader = swarm.leader
        assert leader is not None
        for term in (list(leader.term), [0, 99, "mallory#1"], [0, 99, f"{LEADER}#1"]):
            ballot = [term, 1, 1]
            for method, body in (
                ("fence", {"term": term, "step": 1, "index": 0, "try": 1 << 30}),
                ("reset", {"term": term, "step": 1, "number": 1 << 30}),
                ("average", {"ballot": ballot, "members": ["r1.0#1"], "expected": []}),
                ("abort", {"ballot": ballot}),
                ("commit", {"term": term, "record": leader.record.pack()}),  # type: ignore[union-attr]
            ):
                await is_refused(channel, method, body)
        await links.aclose()

    swarm = Swarm()
    assert during(swarm, act)["sha256"] == baseline()[0]
    assert reasons(swarm) == []


def test_nobody_joins_at_a_peer_that_is_no_trainer() -> None:
    """It stands first among the leaders that one has heard of, and would take anybody in."""
    asked: list[str] = []

    class Deceived(Swarm):
        def _start_replica(self, name: str, incarnation: str, stage: int | None) -> Member:
            member = super()._start_replica(name, incarnation, stage)
            trainers = member._find_leader

            async def find_leader() -> list[tuple[str, Sequence[str]]]:
                return [("mallory#1", ()), *await trainers()]

            member._find_leader = find_leader
            return member

        async def start_all(self) -> None:
            async def join(channel: Channel, message: Message) -> Message:
                asked.append(channel.peer)
                return Message({"stage": 0, "step": 0, "donors": [], "roster": {}})

            methods = {"join": Method(join, no_tensors)}
            links = Links(self.network.transport("mallory"), RUN_ID, "mallory#1", methods)
            links.serve()
            await super().start_all()

    assert Deceived().run()["sha256"] == baseline()[0]
    assert not asked


def test_only_a_trainer_sends_a_replica_home_or_for_another_state() -> None:
    async def act(swarm: Swarm) -> None:
        links, channel = await stranger(swarm, "mallory", "r1.0#1")
        for method, body in (
            ("finish", {}),
            ("refetch", {"term": [0, 99, "mallory#1"]}),
            ("roster", {"roster": {"r2.0#1": ["elsewhere"]}}),
        ):
            await is_refused(channel, method, body)
        await links.aclose()

    swarm = Swarm()
    assert during(swarm, act)["sha256"] == baseline()[0]
    assert reasons(swarm) == []


def test_a_call_cannot_raise_the_term() -> None:
    """Calls come from any volunteer: a made-up term in one would depose the leader everywhere."""

    async def act(swarm: Swarm) -> None:
        links, channel = await stranger(swarm, "mallory", "r1.0#1")
        server = swarm.members["r1.0"].server
        assert server is not None
        before = server.parts.ledger.term
        term = Term(0, 1 << 39, f"{LEADER}#1")
        route = ("r0.0#1", "r1.0#1", "r2.0#1")
        call = MicrobatchCall(term, 1, 0, 1, 0, route, 1, 16.0, False)
        batch = TinyBatches().batch(1, 0)
        assert swarm.leader is not None
        wires = [*swarm.leader.microbatches.encode(batch), encode(torch.zeros(4, 8), "float32")]
        with pytest.raises(CallFailedError, match="term") as refused:
            await channel.call("microbatch", call.body(), wires)
        assert refused.value.kind == "refused"
        assert server.parts.ledger.term == before
        await links.aclose()

    assert during(Swarm(), act)["sha256"] == baseline()[0]


def test_a_stale_term_is_refused() -> None:
    async def act(swarm: Swarm) -> None:
        leader = swarm.leader
        assert leader is not None
        channel = leader.links.open_channel("r1.0#1")
        assert channel is not None
        stale = [0, 0, f"{LEADER}#0"]
        with pytest.raises(CallFailedError, match="succeeded") as refused:
            await channel.call("fence", {"term": stale, "step": 1, "index": 0, "try": 1})
        assert refused.value.detail == {"stale": True}

    assert during(Swarm(), act)["sha256"] == baseline()[0]


@pytest.mark.parametrize("trainers", [(LEADER,), ("t0", "t1", "t2")], ids=["one", "three"])
def test_a_replica_that_calls_the_term_stale_does_not_stop_the_leader(
    trainers: tuple[str, ...],
) -> None:
    """It may lie: it is left out. Only another trainer is believed, and asked if there is one."""

    async def act(swarm: Swarm) -> None:
        server = swarm.members["r1.0"].server
        assert server is not None
        server.parts.ledger.term = Term(0, 1 << 30, f"{LEADER}#9")

    swarm = Swarm(plan=plan(4, 3), trainer_ids=trainers)
    stop = swarm.settle

    async def settle() -> bool:
        swarm.kill("r1.0")  # it follows nobody any more
        return await stop()

    swarm.settle = settle  # type: ignore[method-assign]
    assert during(swarm, act)["sha256"] == baseline()[0]
    assert "r1.0#1" in reasons(swarm)
    assert len(swarm.chronicle.terms) == 1


def test_a_member_whose_ledger_differs_is_expelled_and_its_share_computed_again() -> None:
    async def act(swarm: Swarm) -> None:
        server = swarm.members["r1.0"].server
        assert server is not None
        await until(lambda: server.parts.ledger.step == 1 and bool(server.parts.ledger.counted))
        lost = min(server.parts.ledger.counted)
        del server.parts.ledger.entries[lost]  # as after a reset the leader does not know of

    swarm = Swarm()
    assert during(swarm, act)["sha256"] == baseline()[0]
    assert reasons(swarm) == ["r1.0#1"]


def test_a_reset_whose_connection_ends_is_carried_out_whole() -> None:
    """The ledger was emptied and the accumulator not: a new leader adopts such a replica."""
    cleared: list[int] = []

    async def act(swarm: Swarm) -> None:
        member, leader = swarm.members["r1.0"], swarm.leader
        server, orders = member.server, member.orders
        assert leader is not None
        assert leader.step is not None
        assert server is not None
        assert orders is not None
        assert member.leader is not None
        await until(lambda: server.parts.ledger.step == 1 and bool(server.parts.ledger.counted))
        number, clear = leader.step.next_try(), server.state.clear

        def noted() -> None:
            cleared.append(server.parts.ledger.floor)
            clear()

        server.state.clear = noted  # type: ignore[method-assign]
        order = Message({"term": list(leader.term), "step": 1, "number": number})
        answering = asyncio.ensure_future(orders._reset(member.leader, order))
        await asyncio.sleep(0)
        assert not server.parts.ledger.counted
        answering.cancel()
        await until(lambda: bool(cleared))
        assert cleared == [number]

    assert during(Swarm(), act)["sha256"] == baseline()[0]
    assert cleared


@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
def test_half_a_reset_is_not_what_the_next_leader_adopts(raises: bool) -> None:
    """The leader dies as its reset comes; the next one asks what was counted, and resets nobody.

    The kernel that empties the accumulator goes on without the order's connection, or fails with
    nobody to tell.
    """
    swarm = Swarm(plan=plan(12, 3))
    counted: list[int] = []

    async def act(swarm: Swarm) -> None:
        member, leader = swarm.members["r1.0"], swarm.leader
        assert leader is not None
        server = member.server
        assert server is not None
        await until(lambda: server.parts.ledger.step == 1 and len(server.parts.ledger.counted) > 1)
        usual = member.links.methods["reset"]

        async def reset(channel: Channel, message: Message) -> Message | None:
            member.links.methods["reset"] = usual
            counted.extend(server.parts.ledger.counted)
            swarm.computes["r1.0"].failing[Kind.UPDATE] += raises
            swarm.later(0.0, channel.end, "its leader died")
            swarm.later(0.0, swarm.kill_trainer, LEADER, 1.0)
            return await usual.handle(channel, message)

        member.links.methods["reset"] = replace(usual, handle=reset)
        leader.expel(leader.step, "r1.0#1", "a test")

    assert during(swarm, act)["sha256"] == baseline(3, 12)[0]
    assert counted
    assert len(swarm.chronicle.terms) == 2


def test_a_reset_that_is_refused_is_answered_with_the_record() -> None:
    """The leader believes that the replica has the step's state, and it does not."""
    swarm, resets = Swarm(plan=plan(24, 3), seconds=(0.1, 0.2)), []

    async def act(swarm: Swarm) -> None:
        member, leader = swarm.members["r1.1"], swarm.leader
        assert leader is not None
        assert member.commits is not None
        await until(lambda: member.step == 1)
        await asyncio.sleep(0.5)  # for the leader to know
        usual = member.links.methods["reset"]

        async def reset(channel: Channel, message: Message) -> Message | None:
            resets.append(member.step)
            return await usual.handle(channel, message)

        member.links.methods["reset"] = replace(usual, handle=reset)
        member.commits.invalidate()
        leader.expel(leader.step, "r1.1#1", "a test")
        assert leader.next_step == 1

    assert during(swarm, act)["sha256"] == baseline(3, 24)[0]
    assert resets == [0, 1]  # refused, and once it has the state
    back = [facts["step"] for _, _, p, facts in swarm.events if p == "admitted"][-1]
    assert back == 1, "it did not come back before the next commit told it"


def test_a_vote_that_was_told_is_not_undone_by_one_that_nobody_waits_for() -> None:
    """The connection of the first question ends while its vote is being written."""

    async def main(seed: int) -> None:
        disk = SlowDisk(seconds=0.002, seed=str(seed))
        quorum = Quorum(("a", "b", "c"), "a", disk)
        lower, higher = Term(0, 1, "b#1"), Term(0, 2, "c#1")
        asking = asyncio.ensure_future(quorum._change(lambda vote: on_prepare(vote, lower)))
        await asyncio.sleep(0.0005)
        asking.cancel()
        assert (await quorum._change(lambda vote: on_prepare(vote, higher))).yes
        assert disk.durable.promised == higher
        await asyncio.sleep(1.0)
        assert disk.durable.promised == higher
        await quorum.aclose()

    for seed in range(20):
        run(main(seed))


def test_a_replica_dies_while_the_trainers_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before averaging; what it had counted was missing, and the leader crashed."""
    swarm = Swarm(trainer_ids=("t0", "t1", "t2"))
    void, struck = Quorum.void, []

    async def slowly(quorum: Quorum, step: int) -> None:
        if step == 1 and not struck:
            struck.append(step)
            swarm.kill("r1.1")
            await asyncio.sleep(0.1)
        await void(quorum, step)

    monkeypatch.setattr(Quorum, "void", slowly)
    assert swarm.run()["sha256"] == baseline()[0]
    assert struck == [1]


def test_a_replica_that_came_back_is_not_dropped_with_its_former_connection() -> None:
    """Its end of a cut connection gives up first; ours must not take the new one with it."""

    async def act(swarm: Swarm) -> None:
        leader = swarm.leader
        assert leader is not None
        former = leader.links.open_channel("r1.0#1")
        assert former is not None
        swarm.network.cut("r1.0", LEADER)
        there = swarm.members["r1.0"].leader
        assert there is not None
        there.end("gave up first")
        # The cut heals for new connections, while the former one stays silent here.
        ends, swarm.network.held_ends = swarm.network.held_ends, []
        swarm.network.heal("r1.0", LEADER)
        await until(lambda: leader.links.open_channel("r1.0#1") not in (former, None))
        await asyncio.sleep(1.0)
        former.end("silent for 5 s")
        for pipe, why in ends:
            swarm.network.end(pipe, why)
        await asyncio.sleep(1.0)
        assert leader.members.get("r1.0#1") is not None

    assert during(Swarm(plan=plan(4, 3), seconds=(0.5, 1.0)), act)["sha256"] == baseline()[0]


def test_a_channel_that_ends_leaves_the_other_one_to_the_same_replica() -> None:
    """Both had dialled at once; the replica had joined over the one that is not found."""

    async def act(swarm: Swarm) -> None:
        leader = swarm.leader
        assert leader is not None
        joined = leader.links.open_channel("r1.0#1")
        second = await leader.links._dial("r1.0#1", ())
        await asyncio.sleep(0.1)
        assert leader.links.open_channel("r1.0#1") is second is not joined
        second.end("it was frozen")
        await asyncio.sleep(0.1)
        assert leader.links.open_channel("r1.0#1") is joined

    swarm = Swarm(plan=plan(4, 3), seconds=(0.5, 1.0))
    assert during(swarm, act)["sha256"] == baseline()[0]
    assert reasons(swarm) == []
