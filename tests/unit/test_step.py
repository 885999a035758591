"""A step as its leader sees it: nobody else gets a microbatch before a fence or an expulsion."""

from __future__ import annotations

import pytest

from swarm.routing import Router
from swarm.step import Step


def step_with(*replicas: str, num_microbatches: int = 4) -> Step:
    """Replicas named "stage.number"."""
    stages = {int(name.split(".")[0]) for name in replicas}
    step = Step(0, num_microbatches, len(stages), Router())
    for name in replicas:
        step.admit(name, int(name.split(".")[0]))
    return step


def run_all(step: Step) -> None:
    for index in step.waiting():
        issue = step.issue(index, 0.0)
        assert issue is not None
        assert step.acknowledge(issue)


def test_every_microbatch_is_counted_once_per_stage() -> None:
    step = step_with("0.a", "0.b", "1.a")
    run_all(step)
    assert step.complete
    for group in step.groups():
        counted = sorted(index for each in group.ledgers.values() for index in each)
        assert counted == [0, 1, 2, 3]
    assert step.groups()[1].ledgers == {"1.a": [0, 1, 2, 3]}


def test_a_failed_try_keeps_its_route_until_somebody_is_fenced() -> None:
    step = step_with("0.a", "0.b", "1.a", "1.b")
    first = step.issue(0, 0.0)
    assert first is not None
    step.give_back(first)
    again = step.issue(0, 0.0)
    assert again is not None
    assert again.route == first.route
    assert again.replay
    assert again.try_ > first.try_
    step.fenced(again, again.route[1])
    step.give_back(again)
    third = step.issue(0, 0.0, exclude=[again.route[1]])
    assert third is not None
    assert third.route[0] == first.route[0]
    assert third.route[1] != first.route[1]


@pytest.mark.parametrize("slow_is_full", [False, True])
def test_what_is_begun_waits_for_nobody_who_may_wait_for_it(slow_is_full: bool) -> None:
    """It holds a slot of 0.a; another one waits for that slot, and counts as outstanding at 1.fast.
    Anything new waits for 1.fast, which is due and sooner done."""
    step = step_with("0.a", "1.fast", "1.slow", "1.dead")
    router = step.router
    for stage in (0, 1):
        router.grant(stage, 1)
    for name, seconds in (("1.fast", 1.0), ("1.slow", 10.0), ("1.dead", 1.0)):
        router.choose(1, [each for each in step.replicas(1) if each != name])  # its probe
        router.observe(name, seconds)
    router.begin_step()
    begun = step.issue(0, 0.0, exclude=["1.fast", "1.slow"])
    assert begun is not None
    assert begun.route == ("0.a", "1.dead")
    step.expel("1.dead", "it died")
    router.remove("1.dead")
    router.started("1.fast")
    assert step.issue(1, 0.0) is None
    if slow_is_full:
        router.started("1.slow")
    again = step.issue(0, 0.0)
    assert again is not None
    assert again.route == ("0.a", "1.fast" if slow_is_full else "1.slow")
    assert again.replay


def test_an_expelled_replicas_share_is_issued_again_past_the_same_survivors() -> None:
    step = step_with("0.a", "1.a", "1.b")
    run_all(step)
    lost = [index for index, hops in enumerate(step.hops) if hops[1] == "1.b"]
    assert lost
    assert step.expel("1.b", "dead") == lost
    assert step.expel("1.b", "dead") == []
    assert step.waiting() == lost
    for index in lost:
        issue = step.issue(index, 0.0)
        assert issue is not None
        assert issue.route == ("0.a", "1.a")
        assert issue.replay
        assert step.acknowledge(issue)
    assert step.groups()[1].ledgers == {"1.a": [0, 1, 2, 3]}


def test_an_answer_of_a_route_that_has_changed_does_not_count() -> None:
    step = step_with("0.a", "1.a", "1.b")
    issue = step.issue(0, 0.0)
    assert issue is not None
    step.expel(issue.route[1], "cut")
    assert not step.acknowledge(issue)
    newer = step.issue(0, 0.0)
    assert newer is not None
    assert not step.acknowledge(issue)
    step.fenced(issue, newer.route[0])  # nor does a fence of the former try
    assert step.hops[0] == list(newer.route)
    assert step.acknowledge(newer)


def test_who_has_been_fenced_leaves_a_hop_to_be_placed() -> None:
    step = step_with("0.a", "1.a", "1.b")
    issues = [step.issue(index, 0.0) for index in range(4)]
    assert step.placed
    first = issues[0]
    assert first is not None
    step.fenced(first, first.route[1])
    assert not step.waiting(), "its try is open still"
    assert not step.placed
    with pytest.raises(ValueError, match=r"lacks \[0\]"):
        step.groups()
    step.give_back(first)
    assert step.issue(0, 0.0)
    assert step.placed
    assert sum(map(len, step.groups()[1].ledgers.values())) == 4


def test_a_stage_without_replicas_gives_no_route() -> None:
    step = step_with("0.a", "1.a")
    step.expel("1.a", "dead")
    assert step.empty_stages() == [1]
    assert step.issue(0, 0.0) is None
    with pytest.raises(ValueError, match="lacks"):
        step.groups()
    step.admit("1.c", 1)
    run_all(step)
    assert step.complete


def test_apart_is_a_preference() -> None:
    step = step_with("0.a", "1.a", "1.b")
    step.router.avoid_pair("0.a", "1.a", 30.0)
    for index in range(3):
        issue = step.issue(index, 0.0)
        assert issue is not None
        assert issue.route == ("0.a", "1.b")
    step.expel("1.b", "dead")
    issue = step.issue(3, 0.0)
    assert issue is not None
    assert issue.route == ("0.a", "1.a")


def test_begun_are_those_issued_and_not_done() -> None:
    step = step_with("0.a")
    issues = [step.issue(index, 0.0) for index in (0, 1)]
    assert issues[0] is not None
    assert issues[1] is not None
    step.give_back(issues[0])
    assert step.begun == {0, 1}
    step.acknowledge(issues[1])
    assert step.begun == {0}
    step.expel("0.a", "dead")
    assert step.begun == {0}


def test_tries_and_attempts_never_repeat() -> None:
    step = step_with("0.a")
    numbers = [step.next_try() for _ in range(3)]
    issue = step.issue(0, 0.0)
    assert issue is not None
    assert numbers == [1, 2, 3]
    assert issue.try_ == 4
    assert [step.next_attempt(), step.next_attempt()] == [1, 2]


def test_nobody_gets_work_who_does_not_take_part() -> None:
    """The router outlives the step, and may know others."""
    step = step_with("0.a", "1.a")
    step.router.add("0.z", 0)
    step.router.add("1.a", 1)
    for index in step.waiting():
        issue = step.issue(index, 0.0)
        assert issue is not None
        assert issue.route == ("0.a", "1.a")


def test_expelling_one_who_does_not_take_part_leaves_no_hop_of_it() -> None:
    step = step_with("0.a", "0.b", "1.a")
    step.hops[2][0] = "0.z"
    assert step.expel("0.z", "never was here") == [2]
    assert step.expelled == {}
    assert step.expel("0.z", "again") == []
