"""The delayed policy: two steps under way, the bits of one process, whatever fails in either.

`tests/protocol/scenario.py` draws random faults for it too, by seeds of their own.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from swarm.compute import KernelQueue, Kind
from swarm.credits import Transit
from swarm.ledger import Phase
from tests.protocol.scenario import DELAYED_FROM, draw
from tests.protocol.scenarios import run_or_shrink
from tests.protocol.simulated import LEADER, Fault, Swarm, baseline, plan
from tests.protocol.tiny import ALL, TinyBatches

MICROBATCHES, STEPS = 6, 5
THREE = ("t0", "t1", "t2")


def delayed(*faults: Fault, microbatches: int = MICROBATCHES, **more: Any) -> Swarm:
    return Swarm(plan=plan(microbatches), faults=list(faults), policy="delayed", **more)


def check(swarm: Swarm, steps: int = STEPS) -> Swarm:
    microbatches = swarm.plan.num_microbatches
    expected, _ = baseline(
        steps, microbatches, policy="delayed", ahead=swarm.ahead, since=swarm.since
    )
    assert swarm.run(steps)["sha256"] == expected
    assert len(swarm.fired) == len(swarm.faults), "nothing was injected"
    return swarm


def slow_averaging(swarm: Swarm, rate_bps: float = 60_000.0) -> Swarm:
    """The next step is well under way while one is averaged."""
    swarm.thin_between_twins(rate_bps)
    return swarm


# ---- no faults -----------------------------------------------------------------------------------


some = pytest.mark.parametrize("ahead", [ALL, 4, 2, 1], ids=["all", "four", "two", "one"])  # of six


@some
@pytest.mark.parametrize("replicas", [(1,), (2,), (1, 3), (2, 2, 2), (1, 2, 1, 2, 1)], ids=str)
def test_the_bits_of_one_process(replicas: tuple[int, ...], ahead: int) -> None:
    check(delayed(num_stages=len(replicas), replicas=replicas, ahead=ahead))


@some
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("victim", ["r1.1", "leader"])
def test_nothing_is_ahead_before_its_step(ahead: int, step: int, victim: str) -> None:
    """Whoever dies around the first step of which some is computed ahead."""
    back_s = 0.5 if victim == "leader" else 0.0
    fault = Fault("counted", "kill", step=step, count=5, victim=victim, duration_s=back_s)
    swarm = check(delayed(fault, ahead=ahead, since=2))
    begun = {(each["step"], each["index"]): at for at, _, p, each in swarm.events if p == "issue"}
    committed = {each["step"]: at for at, _, p, each in swarm.events if p == "record"}
    early = {place for place, at in begun.items() if place[0] and at < committed[place[0] - 1]}
    assert not {number for number, _ in early if number < 2}


def test_what_is_computed_ahead_decides_the_bits() -> None:
    ends = [baseline(STEPS, MICROBATCHES, policy="delayed", ahead=ahead)[0] for ahead in range(7)]
    assert len(set(ends)) == 7
    assert ends[0] == baseline(STEPS, MICROBATCHES)[0], "nothing ahead is the exact policy"
    assert ends[6] == baseline(STEPS, MICROBATCHES, policy="delayed", ahead=ALL)[0]


def test_kernels_are_queued_by_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what is ahead would take turns with what the commit before it waits for."""
    queued: dict[Kind, set[int]] = {Kind.FORWARD: set(), Kind.BACKWARD: set()}
    push = KernelQueue.push

    def noted(queue: Any, kind: Kind, step: int, item: Any) -> None:
        if kind in queued:
            queued[kind].add(step)
        push(queue, kind, step, item)

    monkeypatch.setattr(KernelQueue, "push", noted)
    check(delayed(microbatches=24, ahead=12))
    for steps in queued.values():
        assert set(range(1, STEPS)) <= steps <= set(range(STEPS)), queued


class SlowUpdates(Swarm):
    """An update takes a second."""

    async def start_all(self) -> None:
        await super().start_all()
        for compute in self.computes.values():
            usual = compute._seconds_of
            compute._seconds_of = lambda kind, usual=usual: (
                1.0 if kind is Kind.UPDATE else usual(kind)
            )


def test_what_waits_for_a_commit_is_not_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or more would be put under way for it, which would wait too."""
    noted: list[float] = []
    note = Transit.note

    def spied(transit: Transit, elapsed_s: float, timings: Any) -> None:
        noted.append(elapsed_s - sum(map(sum, timings)))
        note(transit, elapsed_s, timings)

    monkeypatch.setattr(Transit, "note", spied)
    swarm = SlowUpdates(plan=plan(MICROBATCHES), policy="delayed", ahead=2, seconds=(0.03, 0.06))
    check(swarm)
    assert len(noted) == STEPS * MICROBATCHES
    assert max(noted) < 0.5, max(noted)


@some
@pytest.mark.parametrize("steps", [1, 2])
def test_short_runs(steps: int, ahead: int) -> None:
    check(delayed(ahead=ahead), steps)


@some
def test_few_slots_and_evicted_answers(ahead: int) -> None:
    check(delayed(slots=1, ahead=ahead))
    fault = Fault("counted", "kill", replica="r1.1", step=2, count=2)
    swarm = delayed(fault, kept_bytes=400, ahead=ahead)
    check(swarm)
    assert swarm.evictions()


def test_a_gradient_that_is_not_finite_changes_nothing_in_either_step() -> None:
    poisoned = ((1, 0), (3, 2))
    swarm = delayed(batches=TinyBatches(poisoned=poisoned))
    expected, _ = baseline(STEPS, MICROBATCHES, poisoned, "delayed")
    assert swarm.run(STEPS)["sha256"] == expected
    outcomes = [result.record.outcome for result in swarm.results if result.record]
    assert outcomes == ["applied", "skipped", "applied", "skipped", "applied"]


def test_losses_and_norms_are_the_baselines() -> None:
    swarm = check(delayed())
    _, expected = baseline(STEPS, MICROBATCHES, policy="delayed")
    assert [each.loss for each in swarm.results] == [each.loss for each in expected]
    assert [each.grad_norm for each in swarm.results] == pytest.approx(
        [each.grad_norm for each in expected], rel=1e-12
    )


# ---- what overlaps -------------------------------------------------------------------------------


class Timed(Swarm):
    """Stages of two replicas whose twins have thin links, `rate_bps`."""

    def __init__(
        self, policy: str, rate_bps: float, num_stages: int = 2, latency_s: float = 0.001
    ) -> None:
        super().__init__(
            num_stages=num_stages,
            replicas=(2,) * num_stages,
            plan=plan(16),
            seconds=(0.03, 0.06),
            policy=policy,
            latency_s=latency_s,
        )
        slow_averaging(self, rate_bps)
        assert self.run(8)["sha256"] == baseline(8, 16, policy=policy)[0]

    @property
    def step_s(self) -> float:
        """Of a step in the middle of the run, from commit to commit."""
        at = [at for at, _, point, _ in self.events if point == "record"]
        return statistics.mean(b - a for a, b in itertools.pairwise(at[1:-1]))


@pytest.mark.parametrize(("share", "bound"), [(0.7, 1.12), (2.0, 1.12)])
def test_a_step_takes_the_longer_of_computing_and_averaging(share: float, bound: float) -> None:
    """And with *exact* their sum; averaging takes about `share` of what computing does."""
    computing_s = Timed("exact", 1e9).step_s
    # what a round takes is in proportion to the bytes, which these links bound alone
    trial_bps = 20_000.0
    trial_s = Timed("exact", trial_bps).step_s - computing_s
    rate_bps = trial_bps * trial_s / (share * computing_s)
    exact_s, delayed_s = (Timed(policy, rate_bps).step_s for policy in ("exact", "delayed"))
    averaging_s = exact_s - computing_s
    assert 0.8 * share < averaging_s / computing_s < 1.2 * share
    assert delayed_s < bound * max(computing_s, averaging_s), (computing_s, averaging_s)


def test_long_lines_cost_no_more_than_filling_the_pipeline() -> None:
    """30 ms one way. With *exact* the pipeline runs empty at the end of every step, which costs a
    third more of it even where lines are short; with *delayed* it does not."""
    near_s, far_s = (Timed("exact", 1e9, 3, each).step_s for each in (0.0005, 0.030))
    assert Timed("delayed", 1e9, 3, 0.030).step_s < near_s < far_s / 1.3


@some
def test_two_steps_at_most_are_under_way(ahead: int) -> None:
    swarm = slow_averaging(delayed(ahead=ahead))
    early: Counter[bool] = Counter()

    def note(who: str, point: str, facts: dict[str, Any]) -> None:
        passed(who, point, facts)
        if point == "forward":
            server = swarm.members[who].server
            assert server is not None
            assert facts["step"] - server.parts.ledger.step in (0, 1)
            if facts["index"] >= ahead:
                assert facts["step"] == server.parts.ledger.step, "it needs the commit before"
            early[facts["step"] > server.parts.ledger.step] += 1

    passed, swarm.on_probe = swarm.on_probe, note  # type: ignore[method-assign]
    check(swarm)
    assert early[True]


# ---- deaths --------------------------------------------------------------------------------------

POINTS = ("forward", "sent", "backward", "counted", "average", "prepared", "commit", "committed")


def kernels(swarm: Swarm, point: str) -> Counter[int]:
    """How many microbatches were computed at each stage, by whoever served it."""
    return Counter(int(who[1]) for _, who, passed, _ in swarm.events if passed == point)


@some
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("back_s", [0.0, 0.5], ids=["gone", "back"])
def test_a_death_costs_its_stage_what_it_had_counted_in_two_steps(
    point: str, back_s: float, ahead: int
) -> None:
    for seed, step in ((0, 1), (1, 3)):
        fault = Fault(point, "kill", replica="r1.1", step=step, duration_s=back_s)
        swarm = check(slow_averaging(delayed(fault, seed=seed, ahead=ahead)))
        once = MICROBATCHES * STEPS
        for each in ("forward", "backward"):
            counts = kernels(swarm, each)
            assert (counts[0], counts[2]) == (once, once), (each, counts)
            assert once <= counts[1] <= once + 2 * MICROBATCHES, (each, counts)


class Between(Swarm):
    """Kills (or cuts off) a replica when it is in both steps: one being averaged, of the other some
    counted."""

    def __init__(self, fault: Fault, victim: str = "r1.1", **more: Any) -> None:
        super().__init__(plan=plan(MICROBATCHES), policy="delayed", **more)
        self.fault, self.victim = fault, victim
        self.struck: tuple[int, set[int]] | None = None
        slow_averaging(self)

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if who != self.victim or point != "counted" or self.struck is not None:
            return
        member = self.members[who]
        server, orders = member.server, member.orders
        assert server is not None
        assert orders is not None
        step = server.parts.ledger.step
        ahead = server.parts.of(step + 1).ledger
        busy = [entry.phase for entry in ahead.entries.values()]
        if step and orders.averaging and ahead.counted and Phase.COUNTED in busy:
            self.struck = (step, ahead.counted)
            self.faults.append(self.fault)
            self.later(0.0, self.striking.begin)


@pytest.mark.parametrize("action", ["kill", "freeze", "cut_leader", "reset", "leave", "lose"])
def test_struck_while_one_step_is_averaged_and_the_next_one_counted(action: str) -> None:
    for seed in range(2):
        more = {"duration_s": 7.0} if action in ("freeze", "cut_leader", "lose") else {}
        fault = Fault("", action, victim="r1.1", at_s=0.0, **more)  # type: ignore[arg-type]
        swarm = Between(fault, seed=seed)
        check(swarm)
        assert swarm.struck is not None
        once = MICROBATCHES * STEPS
        counts = kernels(swarm, "backward")
        if action == "kill":
            assert (counts[0], counts[2]) == (once, once), counts
            assert once < counts[1] <= once + 2 * MICROBATCHES, counts
        if action == "leave":
            assert counts == {0: once, 1: once, 2: once}


@pytest.mark.parametrize("victims", [("r0.0", "r2.1"), ("r1.0", LEADER)], ids=str)
def test_two_die_at_once_between_two_steps(victims: tuple[str, str]) -> None:
    for seed in range(2):
        faults = [
            Fault("average", "kill", replica="r1.1", step=2, victim=name, duration_s=1.0)
            for name in victims
        ]
        check(slow_averaging(delayed(*faults, seed=seed)))


@pytest.mark.parametrize("kind", ["forward", "backward", "average", "commit"])
def test_a_kernel_that_raises(kind: str) -> None:
    for seed in range(2):
        check(slow_averaging(delayed(Fault(kind, "raise", replica="r1.0", step=2), seed=seed)))


# ---- joining and leaving -------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["forward", "average", "prepared", "commit", "committed"])
def test_a_joiner_takes_part_in_the_step_ahead(point: str) -> None:
    for seed in range(2):
        join = Fault(point, "start", replica="r1.0", step=1, victim="r1.5", stage=1)
        swarm = check(slow_averaging(delayed(join, seed=seed, microbatches=12)), 10)
        members = [each.record.members[1] for each in swarm.results if each.record]
        assert "r1.5#1" in members[-1]


def test_a_stage_is_handed_over_to_a_joiner() -> None:
    """Its only replica leaves as soon as another serves."""
    for seed in range(2):
        faults = [
            Fault("counted", "start", step=1, victim="r1.5", stage=1),
            Fault("committed", "leave", replica="r1.5", victim="r1.0"),
        ]
        swarm = delayed(*faults, replicas=(2, 1, 2), seed=seed)
        swarm = check(swarm, 8)
        assert swarm.results[-1].record is not None
        assert swarm.results[-1].record.members[1] == ("r1.5#1",)


def test_a_state_that_differs_starts_both_steps_anew() -> None:
    swarm = slow_averaging(delayed())

    def spoil(who: str, point: str, facts: dict[str, Any]) -> None:
        passed(who, point, facts)
        if (who, point, facts.get("step")) == ("r1.1", "committed", 1):
            server = swarm.members[who].server
            assert server is not None
            server.state.parameters[0] += 1e-3

    passed, swarm.on_probe = swarm.on_probe, spoil  # type: ignore[method-assign]
    check(swarm)
    assert any(point == "diverged" for _, _, point, _ in swarm.events)


# ---- leaders -------------------------------------------------------------------------------------

LEADER_POINTS = ("issue", "acknowledged", "counted", "average", "prepared", "record", "commit")


@some
@pytest.mark.parametrize("point", LEADER_POINTS)
def test_a_leader_that_starts_again_adopts_both_steps(point: str, ahead: int) -> None:
    """Nothing is computed twice but what was not counted when it died."""
    for seed, step in ((0, 0), (1, 2)):
        count = 1 if point == "record" else 4 if step else 2
        fault = Fault(point, "kill", step=step, victim=LEADER, count=count)
        swarm = check(slow_averaging(delayed(fault, seed=seed, ahead=ahead)))
        assert swarm.lives[LEADER] == 2
        assert swarm.committed == sorted(set(swarm.committed))
        once = MICROBATCHES * STEPS
        counts = kernels(swarm, "backward")
        assert counts == {0: once, 1: once, 2: once}, counts


def test_a_leader_dies_between_two_steps_with_a_replica() -> None:
    for seed in range(2):
        swarm = Between(Fault("", "kill", victim="r1.1", at_s=0.0, duration_s=1.0), seed=seed)
        swarm.faults.append(Fault("average", "kill", step=2, victim=LEADER, count=3))
        assert swarm.run(STEPS)["sha256"] == baseline(STEPS, MICROBATCHES, policy="delayed")[0]
        assert swarm.struck is not None
        assert swarm.lives[LEADER] == 2


@pytest.mark.parametrize("point", ["acknowledged", "average", "prepared", "record"])
def test_three_trainers(point: str) -> None:
    for seed in range(2):
        faults: Sequence[Fault] = (
            Fault(point, "kill", step=2, victim=LEADER, duration_s=6.0),
            Fault("counted", "kill", replica="r1.1", step=3, duration_s=1.0),
        )
        swarm = delayed(*faults, seed=seed, trainer_ids=THREE, leases=dict.fromkeys(THREE, 1.0))
        check(slow_averaging(swarm), 6)
        assert len(swarm.chronicle.terms) > 1


# ---- going back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_a_stage_that_is_lost_comes_back_from_the_checkpoint(every: int) -> None:
    for seed in range(2):
        fault = Fault("average", "kill", replica="r1.0", step=3, duration_s=1.0)
        swarm = delayed(fault, seed=seed, replicas=(2, 1, 1), checkpoint_every=every)
        check(slow_averaging(swarm), 6)
        assert swarm.effects["epoch opened"] == 1


# ---- random faults -------------------------------------------------------------------------------

SEEDS, CHUNK = 200, 20


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_faults_leave_the_parameters_of_the_baseline(first: int) -> None:
    """A failure's notes are its scenario, and the smallest that fails like it."""
    fired: Counter[str] = Counter()
    for seed in range(DELAYED_FROM + first, DELAYED_FROM + first + CHUNK):
        swarm = run_or_shrink(seed)
        assert swarm.policy == "delayed"
        fired.update(fault.action for fault in swarm.fired)
    assert len(fired) >= 8, fired


def test_other_seeds_mean_what_they_did() -> None:
    assert {draw(seed).policy for seed in range(200)} == {"exact"}
