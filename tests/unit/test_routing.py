"""Routing as properties: shares follow rates, the new are probed, failures cost, nobody starves."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.routing import Router

services = st.lists(st.floats(0.05, 0.5), min_size=1, max_size=6)
seeds = st.integers(0, 2**32)


def router_with(times: list[float], seed: int = 0, credits: int | None = None) -> Router:
    router = Router(seed, credits)
    for i, service_s in enumerate(times):
        router.add(f"r{i}", 0, service_s)
    return router


def draw(router: Router, count: int, now: float = 0.0, stage: int = 0) -> list[str]:
    choices = [router.choose(stage, now=now) for _ in range(count)]
    return [choice.replica for choice in choices if choice is not None]


@settings(max_examples=25, deadline=None)
@given(services, seeds)
def test_shares_follow_rates_over_a_thousand_draws(times: list[float], seed: int) -> None:
    counts = Counter(draw(router_with(times, seed), 1000))
    total = sum(1 / t for t in times)
    for i, service_s in enumerate(times):
        due = 1000 / service_s / total
        assert abs(counts[f"r{i}"] - due) <= 0.05 * due + 1, (counts, due)


@settings(max_examples=25, deadline=None)
@given(services, seeds, st.integers(0, 40), st.integers(1, 3))
def test_shares_follow_measured_rates_too(
    times: list[float], seed: int, before: int, measurements: int
) -> None:
    """As in a swarm: no rate is known before a replica has served, and first draws are guesses."""
    router = Router(seed)
    for i in range(len(times)):
        router.add(f"r{i}", 0)
    draw(router, before)
    for _ in range(measurements):
        for i, service_s in enumerate(times):
            router.observe(f"r{i}", service_s)
    counts = Counter(draw(router, 1000))
    total = sum(1 / t for t in times)
    for i, service_s in enumerate(times):
        due = 1000 / service_s / total
        assert abs(counts[f"r{i}"] - due) <= 0.05 * due + 1, (counts, due)


def test_slow_is_not_dead() -> None:
    counts = Counter(draw(router_with([0.1, 1.0]), 1100))
    assert counts["r1"] == pytest.approx(100, abs=5)


@settings(max_examples=25, deadline=None)
@given(services, seeds, st.integers(0, 200))
def test_new_replica_is_probed_at_once(times: list[float], seed: int, before: int) -> None:
    router = router_with(times, seed)
    draw(router, before + len(times))  # the first ones are probes themselves
    router.add("new", 0)
    choice = router.choose(0)
    assert choice is not None
    assert choice.replica == "new"
    assert choice.reason == "probe: new here"
    # It entered level with the others: it neither owes nor is owed the past.
    counts = Counter(draw(router, 20 * len(times)))
    assert counts["new"] <= 20 * len(times) * router.shares(0)["new"] + 2


@pytest.mark.parametrize("kind", ["error", "timeout"])
def test_failures_lower_a_score_that_recovers(kind: str) -> None:
    router = router_with([0.1, 0.1])
    draw(router, 2)
    router.failed("r0", kind, now=10.0)  # type: ignore[arg-type]
    assert router.score("r0", 10.0) == 0.5
    assert router.shares(0, 10.0) == pytest.approx({"r0": 1 / 3, "r1": 2 / 3})
    router.failed("r0", kind, now=10.0)  # type: ignore[arg-type]
    counts = Counter(draw(router, 100, now=10.0))
    assert counts["r0"] == pytest.approx(20, abs=2)
    assert 0.25 < router.score("r0", 30.0) < router.score("r0", 60.0) < 1.0
    assert router.score("r0", 300.0) > 0.999
    router.observe("r0", 0.1)  # a success repairs faster than time
    assert router.score("r0", 10.0) == 0.5


def test_failures_are_bounded() -> None:
    router = router_with([0.1, 0.1])
    for _ in range(1000):
        router.failed("r0", "error", now=0.0)
    assert router.score("r0", 0.0) == 2.0**-6
    assert "r0" in draw(router, 70)


@settings(max_examples=25, deadline=None)
@given(services, seeds, st.data())
def test_excluded_are_never_chosen(times: list[float], seed: int, data: st.DataObject) -> None:
    router = router_with(times, seed)
    names = router.replicas(0)
    for _ in range(30):
        exclude = data.draw(st.sets(st.sampled_from(names)))
        choice = router.choose(0, exclude)
        if choice is None:
            assert exclude == set(names)
            assert set(router.explain(0, exclude).values()) == {"excluded"}
        else:
            assert choice.replica not in exclude


@settings(max_examples=25, deadline=None)
@given(services, seeds)
def test_nobody_starves(times: list[float], seed: int) -> None:
    router = router_with(times, seed)
    names = draw(router, 400)
    total = sum(1 / t for t in times)
    for i, service_s in enumerate(times):
        longest, since = 0, 0
        for name in names:
            since = 0 if name == f"r{i}" else since + 1
            longest = max(longest, since)
        assert longest <= 2 * math.ceil(service_s * total) + len(times)


def test_a_bad_measurement_is_tried_again() -> None:
    router = router_with([0.1, 0.1])
    router.observe("r0", 1000.0)  # a machine that was suspended, say
    draw(router, 2)
    assert set(draw(router, 20, now=100.0)) == {"r1"}
    choice = router.choose(0, now=5000.0)
    assert choice is not None
    assert choice.replica == "r0"
    assert choice.reason == "probe: not used for 5000 s"


@settings(max_examples=25, deadline=None)
@given(
    seeds,
    st.lists(
        st.tuples(
            st.sampled_from(["choose", "observe", "error", "timeout", "add", "remove"]),
            st.integers(0, 5),
            st.floats(0.01, 2.0),
        ),
        max_size=60,
    ),
)
def test_same_seed_and_calls_give_the_same_choices(
    seed: int, calls: list[tuple[str, int, float]]
) -> None:
    def play() -> list[object]:
        router, said, now = router_with([0.1, 0.1, 0.1], seed, credits=4), [], 0.0
        for what, who, value in calls:
            now += value
            name = f"r{who}"
            if what == "choose":
                choice = router.choose(0, now=now)
                if choice is not None:
                    router.started(choice.replica)
                said.append(choice)
            elif what == "observe":
                router.finished(name)
                router.observe(name, value)
            elif what == "add":
                router.add(name, 0)
            elif what == "remove":
                router.remove(name)
            else:
                router.failed(name, what, now)  # type: ignore[arg-type]
        return said

    assert play() == play()


def test_seed_decides_ties_and_pairings_vary() -> None:
    routes = []
    for seed in range(2):
        router = Router(seed)
        for stage in range(2):
            for i in range(2):
                router.add(f"{stage}{i}", stage, 0.1)
        drawn = [router.route([0, 1]) for _ in range(40)]
        routes.append([tuple(c.replica for c in route or ()) for route in drawn])
    assert routes[0] != routes[1]
    assert len(set(routes[0])) == 4


def test_credits_bound_what_is_outstanding_and_nothing_is_owed_after() -> None:
    router = router_with([0.1, 0.1], credits=2)
    for _ in range(4):
        choice = router.choose(0)
        assert choice is not None
        router.started(choice.replica)
    assert router.choose(0) is None
    assert set(router.explain(0).values()) == {"at its limit of 2 outstanding"}
    for _ in range(50):  # r1 is stuck; r0 goes on
        router.finished("r0")
        assert draw(router, 1) == ["r0"]
        router.started("r0")
    for name in ("r0", "r0", "r1", "r1"):
        router.finished(name)
    assert Counter(draw(router, 20)) == pytest.approx({"r0": 10, "r1": 10}, abs=2)


def test_pairs_that_cannot_reach_each_other_are_routed_around() -> None:
    router = Router()
    for stage, names in enumerate((["a0", "a1"], ["b0", "b1"], ["c0"])):
        for name in names:
            router.add(name, stage, 0.1)
    router.avoid_pair("b0", "a0", until=50.0)
    router.avoid_pair("b1", "c0", until=50.0)
    for _ in range(10):  # only a1 - b0 - c0 is left; a greedy walk would run into dead ends
        route = router.route([0, 1, 2], now=1.0)
        assert route is not None
        assert [choice.replica for choice in route] == ["a1", "b0", "c0"]
    router.avoid_pair("b0", "a1", until=50.0)
    assert router.route([0, 1, 2], now=1.0) is None
    assert router.choose(1, now=1.0, beside=["a0", "c0"]) is None
    assert router.explain(1, now=1.0, beside=["a0", "c0"]) == {
        "b0": "cannot reach a0",
        "b1": "cannot reach c0",
    }
    assert router.route([0, 1, 2], now=50.0) is not None


def test_route_keeps_surviving_hops() -> None:
    router = Router()
    for stage in range(3):
        for i in range(2):
            router.add(f"{stage}{i}", stage, 0.1)
    route = router.route([0, 1, 2], exclude=["10"], fixed={0: "00", 2: "21"})
    assert route is not None
    assert [c.replica for c in route] == ["00", "11", "21"]
    assert [c.reason for c in route] == ["kept", "probe: new here", "kept"]
    assert router.route([0, 1, 2], exclude=["10", "11"], fixed={0: "00", 2: "21"}) is None
    assert router.choose(7) is None


def test_moves_leaves_and_nonsense() -> None:
    router = router_with([0.1, 0.2])
    router.add("r0", 0, 5.0)
    assert router.service_s("r0") == 0.1
    router.add("r0", 1)
    assert (router.replicas(0), router.replicas(1)) == (["r1"], ["r0"])
    for unknown in (router.remove, router.started, router.finished):
        unknown("nobody")
    router.observe("nobody", 1.0)
    router.failed("nobody", "error", 0.0)
    router.remove("r0")
    assert router.choose(1) is None
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="service time"):
            router.observe("r1", bad)


def test_draws_before_the_first_measurement_are_not_held_against_anybody() -> None:
    """The first to arrive gets the first microbatches, and its fair share afterwards."""
    router = Router()
    router.add("early", 0)
    draw(router, 8)
    router.add("late", 0)
    draw(router, 1)
    for name in ("early", "late"):
        router.observe(name, 0.03)
    counts = Counter(draw(router, 40))
    assert counts["early"] >= 15, counts


def test_a_step_begins_without_debts() -> None:
    """Each step is waited for as a whole, so what was given to whom before must not tilt it."""
    router = router_with([0.1, 0.1])
    draw(router, 3)
    router.remove("r1")
    draw(router, 7)
    router.add("r2", 0, 0.1)
    for _ in range(3):
        router.begin_step()
        assert Counter(draw(router, 24)) == {"r0": 12, "r2": 12}


class Queues:
    """Replicas of one stage, each with a queue; the router is told what a leader is told."""

    def __init__(self, times: list[float], in_flight: int, seed: int = 0) -> None:
        self.router = router_with(times, seed)
        self.times = dict(enumerate(times))
        self.free_at = dict.fromkeys(self.times, 0.0)
        self.under_way: list[tuple[float, int, float]] = []  # ends at, replica, took
        self.now, self.in_flight = 0.0, in_flight
        self.given: list[int] = []

    def run(self, count: int) -> list[int]:
        """Give out `count` more microbatches; to whom they went."""
        begun = len(self.given)
        while len(self.given) < begun + count:
            if len(self.under_way) >= self.in_flight:
                self.under_way.sort()
                self.now, who, took = self.under_way.pop(0)
                self.router.finished(f"r{who}")
                self.router.observe(f"r{who}", took)
            choice = self.router.choose(0, now=self.now)
            assert choice is not None
            who = int(choice.replica[1:])
            self.router.started(choice.replica)
            took = self.times[who]
            self.free_at[who] = max(self.free_at[who], self.now) + took
            self.under_way.append((self.free_at[who], who, took))
            self.given.append(who)
        return self.given[begun:]


speeds = st.lists(st.floats(0.05, 0.2), min_size=2, max_size=5)


@settings(max_examples=25, deadline=None)
@given(speeds, seeds, st.integers(3, 6))
def test_a_replica_that_becomes_five_times_slower_loses_its_load_at_once(
    times: list[float], seed: int, slots: int
) -> None:
    queues = Queues(times, slots * len(times), seed)
    queues.run(40 * len(times))
    queues.times[0] *= 5
    queues.run(10 * len(times))  # ten for each
    rates = {who: 1 / took for who, took in queues.times.items()}
    due = rates[0] / sum(rates.values())
    after = queues.run(20 * len(times))
    assert after.count(0) <= 2 * due * len(after) + 2


@settings(max_examples=25, deadline=None)
@given(speeds, seeds, st.integers(3, 6))
def test_queues_keep_the_shares_and_starve_nobody(
    times: list[float], seed: int, slots: int
) -> None:
    queues = Queues(times, slots * len(times), seed)
    queues.run(20 * len(times))
    given = queues.run(1000)
    total = sum(1 / took for took in times)
    for who, took in enumerate(times):
        due = 1000 / took / total
        assert abs(given.count(who) - due) <= 0.05 * due + 1, (given.count(who), due)


def test_one_that_is_fast_again_gets_its_share_back() -> None:
    queues = Queues([0.1, 0.1], 8)
    queues.run(40)
    queues.times[0] = 0.5
    queues.run(40)
    queues.times[0] = 0.1
    queues.run(40)
    assert 8 <= queues.run(20).count(0) <= 12


def test_an_estimate_is_where_the_average_starts_and_no_measurement() -> None:
    router = Router()
    router.add("a", 0, 0.5)
    assert (router.service_s("a"), router.measured_s("a"), router.measured()) == (0.5, None, {})
    router.observe("a", 0.1)
    assert router.measured_s("a") == pytest.approx(0.4)
    router.observe("a", 0.1)  # far off twice: so it was the estimate that was wrong
    assert router.measured_s("a") == pytest.approx(0.1)


def test_a_stage_can_be_given_credits_of_its_own() -> None:
    router = router_with([0.1], credits=1)
    router.grant(0, 2)
    router.started("r0")
    assert router.choose(0) is not None
    router.started("r0")
    assert router.choose(0) is None


def test_a_device_of_two_stages_gives_its_time_where_the_others_are_busiest() -> None:
    """Two others in stage 0, one in stage 1: it belongs to stage 1 alone, whichever name is first;
    where both stages have one other, it is shared."""
    for others, expected in ((["a#", "c#"], (0, 40)), (["a#"], (20, 20))):
        router = Router()
        for name in others:
            router.add(name, 0, 0.1)
        router.add("x#1", 0, 0.1)
        router.add("x#2", 1, 0.1)
        router.add("b#", 1, 0.1)
        given: Counter[str] = Counter()
        for _ in range(80 if len(others) == 2 else 60):
            route = router.route([0, 1])
            assert route is not None
            given.update(choice.replica for choice in route)
        assert abs(given["x#1"] - expected[0]) <= 2
        assert abs(given["x#2"] - expected[1]) <= 2


def test_the_queue_of_a_device_is_that_of_all_its_replicas() -> None:
    router = Router()
    for name, stage in (("x#1", 0), ("a#", 0), ("x#2", 1)):
        router.add(name, stage, 0.1)
    router.choose(0), router.choose(0)  # both have been tried
    for _ in range(4):
        router.started("x#2")
    assert [router.choose(0).replica for _ in range(4)] == ["a#"] * 4  # type: ignore[union-attr]
    router.remove("x#2")
    router.remove("x#1")
    router.add("x#3", 0)
    assert router.outstanding("x#3") == 0
