"""Where joiners go, who moves, what memory and another cut amount to: the planner's answers."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from swarm.placement import (
    LoadTable,
    MovePolicy,
    PeerLoad,
    StageNeed,
    choose_stage,
    estimate_memory,
    least_slots,
    optimum,
    plan_moves,
    recut,
    slots_that_fit,
)

GIB = 2**30


def table_of(counts: list[int], *more: PeerLoad, **fields: object) -> LoadTable:
    """Equal peers, `counts[s]` of them in stage s, named s0, s1, …"""
    peers = [
        PeerLoad(f"{'abcdefgh'[stage]}{number}", (stage,), speed=1.0, **fields)  # type: ignore[arg-type]
        for stage, count in enumerate(counts)
        for number in range(count)
    ]
    return LoadTable(tuple(StageNeed() for _ in counts), (*peers, *more))


def test_a_stage_is_as_fast_as_its_replicas_together_and_the_swarm_as_its_slowest_stage() -> None:
    table = LoadTable(
        (StageNeed(cost=1.0), StageNeed(cost=2.0)),
        (
            PeerLoad("a", (0,), speed=3.0),
            PeerLoad("b", (1,), rates={1: 2.0}),  # measured
            PeerLoad("c", (1,), speed=1.0),
            PeerLoad("d", (1,), speed=9.0, leaves_s=5.0),
        ),
    )
    assert table.present_rates(0.0) == [3.0, 2.0 + 0.5 + 4.5]
    assert table.present_rates(5.0) == [3.0, 2.5]
    assert table.settled_rates(0.0) == [3.0, 2.5]
    assert table.throughput(0.0) == 3.0
    assert table.rate(table.peers[1], 0) == 4.0  # the speed its measured rate implies


def test_a_peer_of_several_stages_gives_its_time_where_they_lag() -> None:
    needs = tuple(StageNeed() for _ in range(3))
    peers = (PeerLoad("a", (0,), speed=1.0), PeerLoad("b", (0, 1, 2), speed=3.0))
    rates = LoadTable(needs, peers).present_rates(0.0)
    assert rates == pytest.approx([4 / 3] * 3)
    two = (*peers, PeerLoad("c", (1, 2), speed=1.0))
    assert LoadTable(needs, two).present_rates(0.0) == pytest.approx([5 / 3] * 3)
    rich = (PeerLoad("a", (0,), speed=9.0), PeerLoad("b", (0, 1, 2), speed=3.0))
    assert LoadTable(needs, rich).present_rates(0.0) == pytest.approx([9.0, 1.5, 1.5])


def test_a_joiner_goes_to_the_slowest_stage() -> None:
    placement = choose_stage(table_of([3, 1, 2]), PeerLoad("new", speed=1.0), 0.0)
    assert placement.stage == 1
    assert placement.reason == "stage 1 is the slowest: 1 -> 2 microbatches/s"


def test_many_that_join_at_once_spread_and_reservations_expire() -> None:
    table = table_of([2, 2, 2])
    for name in ("x", "y", "z"):
        joiner = PeerLoad(name, speed=1.0, reserved_until_s=60.0)
        stage = choose_stage(table, joiner, 0.0).stage
        arriving = PeerLoad(name, arriving=stage, speed=1.0, reserved_until_s=60.0)
        table = LoadTable(table.stages, (*table.peers, arriving))
    assert sorted(p.arriving for p in table.peers if p.arriving is not None) == [0, 1, 2]
    assert table.settled_rates(0.0) == [3.0, 3.0, 3.0]
    assert table.settled_rates(60.0) == [2.0, 2.0, 2.0]


def test_a_joiner_takes_what_its_memory_holds() -> None:
    table = LoadTable(
        (StageNeed(memory_bytes=8 * GIB), StageNeed(memory_bytes=2 * GIB)),
        (PeerLoad("a", (1,), speed=1.0),),
    )
    small = choose_stage(table, PeerLoad("new", memory_bytes=4 * GIB, speed=1.0), 0.0)
    assert small.stage == 1
    assert "fits its 4.0 GiB" in small.reason
    none = choose_stage(table, PeerLoad("new", memory_bytes=GIB, speed=1.0), 0.0)
    assert none.stage is None
    assert "the smallest needs 2.0 GiB" in none.reason
    told = choose_stage(table, PeerLoad("new", memory_bytes=3 << 19, speed=1.0), 0.0)  # --memory
    assert "this peer has 1.5 MiB for it" in told.reason


def test_a_stage_that_nobody_serves_comes_first() -> None:
    placement = choose_stage(table_of([2, 0, 1]), PeerLoad("new", speed=1.0), 0.0)
    assert placement.stage == 1
    assert placement.reason == "stage 1 has nobody"


def test_the_plan_fills_what_a_failed_region_left() -> None:
    plan = plan_moves(table_of([8, 8, 2, 2]), 0.0)
    assert [move.to_stage for move in plan.moves] == [2, 3, 2, 3, 2, 3]
    assert (plan.before, plan.after) == (2.0, 5.0)
    assert "stage 2 is the slowest (2/s)" in plan.moves[0].reason


def test_nothing_moves_where_nothing_is_gained() -> None:
    assert plan_moves(table_of([3, 2, 2]), 0.0).moves == ()
    assert plan_moves(table_of([2, 3, 3, 3]), 0.0).moves == ()
    # Two gaps and one that could be spared: no gain until the other is filled as well.
    assert plan_moves(table_of([3, 1, 1]), 0.0).moves == ()
    assert plan_moves(LoadTable((), ()), 0.0).moves == ()


def test_with_one_stage_nobody_moves_however_many_there_are() -> None:
    for peers in (1, 33, 100):
        plan = plan_moves(table_of([peers]), 0.0)
        assert (plan.moves, plan.before) == ((), peers)


def test_where_replicas_die_spares_are_spread_beforehand() -> None:
    needs = tuple(StageNeed(download_bytes=100) for _ in range(3))

    def plan(lifetime_s: float) -> int:
        peers = table_of([14, 12, 12], lifetime_s=lifetime_s, download_bytes_per_s=1.0).peers
        return len(plan_moves(LoadTable(needs, peers), 0.0).moves)

    assert plan(math.inf) == 0
    assert plan(20_000.0) == 1


def test_the_last_replica_stays_and_so_do_the_pinned_and_those_under_way() -> None:
    assert plan_moves(table_of([1, 0]), 0.0).moves == ()
    pinned = LoadTable(
        (StageNeed(), StageNeed()),
        tuple(PeerLoad(f"a{i}", (0,), speed=1.0, pinned=True) for i in range(4)),
    )
    assert plan_moves(pinned, 0.0).moves == ()
    moving = table_of([3, 0], PeerLoad("m", (0,), arriving=1, speed=1.0))
    assert plan_moves(moving, 0.0).before == 1.0


def test_a_peer_that_moved_rests_but_saves_a_stage() -> None:
    rested = {"moved_s": 0.0, "left_stage": 1}
    policy = MovePolicy(hysteresis_s=100.0)
    assert plan_moves(table_of([4, 1], **rested), 50.0, policy).moves == ()  # type: ignore[arg-type]
    assert len(plan_moves(table_of([4, 1], **rested), 100.0, policy).moves) == 1  # type: ignore[arg-type]
    # To a stage that nobody serves, but never back to the one it left.
    saved = plan_moves(table_of([4, 1, 0], **rested), 50.0, policy)  # type: ignore[arg-type]
    assert [move.to_stage for move in saved.moves] == [2]
    back = plan_moves(table_of([4, 0], **rested), 50.0, policy)  # type: ignore[arg-type]
    assert back.moves == ()


def test_a_long_download_for_a_short_life_does_not_pay() -> None:
    needs = tuple(StageNeed(download_bytes=600) for _ in range(2))

    def moves(lifetime_s: float) -> int:
        peers = table_of([4, 1], lifetime_s=lifetime_s, download_bytes_per_s=1.0).peers
        return len(plan_moves(LoadTable(needs, peers), 0.0).moves)

    assert moves(620.0) == 0
    assert moves(20_000.0) == 1


def test_a_mover_keeps_serving_where_memory_holds_both() -> None:
    needs = tuple(StageNeed(memory_bytes=GIB, download_bytes=10) for _ in range(2))

    def move(memory_bytes: int) -> tuple[bool, float]:
        peers = table_of([4, 2], memory_bytes=memory_bytes, download_bytes_per_s=1.0).peers
        plan = plan_moves(LoadTable(needs, peers), 0.0)
        return plan.moves[0].keeps_serving, plan.during

    assert move(2 * GIB) == (True, 2.0)
    assert move(GIB) == (False, 2.0)


def test_two_change_places_where_no_single_move_helps() -> None:
    table = LoadTable(
        (StageNeed(), StageNeed()),
        (
            PeerLoad("a", (0,), speed=1.5),
            PeerLoad("b", (0,), speed=1.5),
            PeerLoad("c", (1,), speed=1.0),
            PeerLoad("d", (1,), speed=1.0),
        ),
    )
    plan = plan_moves(table, 0.0)
    assert {(m.peer, m.to_stage) for m in plan.moves} == {("a", 1), ("c", 0)}
    assert plan.after == 2.5


def alone(*speeds: float, costs: tuple[float, ...], memory_bytes: int | None = None) -> LoadTable:
    """One peer in each stage: peer s in stage s."""
    peers = tuple(
        PeerLoad(f"p{stage}", (stage,), speed=speed, memory_bytes=memory_bytes)
        for stage, speed in enumerate(speeds)
    )
    return LoadTable(tuple(StageNeed(cost, memory_bytes=GIB) for cost in costs), peers)


@pytest.mark.parametrize("more", [0, 8], ids=["small", "large"])
def test_two_that_are_alone_change_places_if_each_can_stay_until_the_other_has_come(
    more: int,
) -> None:
    """Tried one after the other, and in a swarm too large for that (`more` pairs in balance)."""
    costs = (1.0, 3.0) + (2.0,) * more
    speeds = (3.0, 1.0) + (2.0,) * more
    plan = plan_moves(alone(*speeds, costs=costs, memory_bytes=2 * GIB), 0.0)
    assert {(m.peer, m.to_stage, m.keeps_serving) for m in plan.moves} == {
        ("p0", 1, True), ("p1", 0, True),
    }  # fmt: skip
    assert (plan.before, plan.after, plan.during) == pytest.approx((1 / 3, 1.0, 1 / 3))
    assert plan_moves(alone(*speeds, costs=costs, memory_bytes=GIB), 0.0).moves == ()
    policy = MovePolicy(keeps_serving=False)
    assert plan_moves(alone(*speeds, costs=costs), 0.0, policy).moves == ()


def test_three_that_are_alone_go_round() -> None:
    plan = plan_moves(alone(2.0, 3.0, 1.0, costs=(1.0, 2.0, 3.0)), 0.0)
    assert {(m.peer, m.to_stage) for m in plan.moves} == {("p0", 1), ("p1", 2), ("p2", 0)}
    assert plan.after == pytest.approx(1.0)


def test_swarms_of_one_replica_a_stage_end_at_the_best_assignment() -> None:
    draw = random.Random("alone")
    for _ in range(100):
        stages = draw.randint(2, 4)
        costs = tuple(draw.choice([1.0, 1.5, 2.0, 3.0]) for _ in range(stages))
        speeds = tuple(draw.choice([0.5, 1.0, 1.5, 3.0]) for _ in range(stages))
        reached = min(settle(alone(*speeds, costs=costs)))
        # What gains less than `min_gain` is left.
        assert reached >= 0.98 * best_by_trying(list(costs), list(speeds))


def best_by_trying(costs: list[float], speeds: list[float]) -> float:
    best = 0.0
    for stages in itertools.product(range(len(costs)), repeat=len(speeds)):
        rates = [0.0] * len(costs)
        for stage, speed in zip(stages, speeds, strict=True):
            rates[stage] += speed / costs[stage]
        best = max(best, min(rates))
    return best


def test_the_optimum_is_a_bound_and_exact_for_equal_peers() -> None:
    random_ = random.Random(0)
    for _ in range(60):
        costs = [random_.choice([1.0, 1.0, 1.5, 2.0]) for _ in range(3)]
        speeds = [random_.choice([0.5, 1.0, 2.0]) for _ in range(6)]
        assert optimum(costs, speeds) >= best_by_trying(costs, speeds) * (1 - 1e-9)
        equal = [1.3] * 6
        assert optimum(costs, equal) == pytest.approx(best_by_trying(costs, equal))
    assert optimum([1.0] * 32, [1.0] * 400) == 12.0
    assert optimum([1.0] * 3, [1.0] * 2) == 0.0


def settle(table: LoadTable) -> list[float]:
    """Plan after plan, each carried out at once, until nobody moves; the rates then."""
    now_s = 0.0
    for _ in range(20):
        plan = plan_moves(table, now_s)
        if not plan.moves:
            return table.present_rates(now_s)
        to = {move.peer: move.to_stage for move in plan.moves}
        peers = tuple(
            replace(p, stages=(to[p.peer],), moved_s=now_s, left_stage=p.stages[0])
            if p.peer in to
            else p
            for p in table.peers
        )
        table = LoadTable(table.stages, peers)
        now_s += 1000.0  # everybody has rested
    raise AssertionError("it never came to rest")


@pytest.mark.parametrize("start", ["as they joined", "anyhow"])
def test_small_unlike_swarms_end_near_the_best_assignment(start: str) -> None:
    """Against every assignment there is, also those that no plan reaches because a stage would be
    left to whoever does not serve it yet."""
    draw = random.Random(f"small/{start}")
    shares = []
    for _ in range(200):
        stages = draw.randint(2, 3)
        costs = [draw.choice([1.0, 1.5, 2.0, 3.0]) for _ in range(stages)]
        speeds = [draw.choice([0.5, 1.0, 1.5, 3.0]) for _ in range(draw.randint(2 * stages, 6))]
        table = LoadTable(tuple(StageNeed(cost) for cost in costs))
        for number, speed in enumerate(speeds):
            peer = PeerLoad(f"p{number}", speed=speed)
            stage = choose_stage(table, peer, 0.0).stage
            assert stage is not None
            if start == "anyhow":
                stage = number if number < stages else draw.randrange(stages)
            table = LoadTable(table.stages, (*table.peers, replace(peer, stages=(stage,))))
        shares.append(min(settle(table)) / best_by_trying(costs, speeds))
    assert max(shares) <= 1 + 1e-9
    assert min(shares) >= 0.6
    assert sum(shares) / len(shares) >= 0.97


def test_all_assignments_are_tried_where_no_single_move_or_exchange_helps() -> None:
    speeds = {"a": 3.0, "b": 2.0, "c": 2.0, "d": 2.0, "e": 3.0, "f": 1.0, "g": 1.0}
    for stages in itertools.product(range(2), repeat=len(speeds)):
        if not 0 < sum(stages) < len(speeds):
            continue
        peers = tuple(
            PeerLoad(name, (stage,), speed=speed)
            for (name, speed), stage in zip(speeds.items(), stages, strict=True)
        )
        table = LoadTable((StageNeed(), StageNeed()), peers)
        if min(table.replicas()) >= 2:
            assert min(settle(table)) >= 0.95 * best_by_trying([1.0, 1.0], list(speeds.values()))


def test_the_reason_of_moves_that_go_together_empties_no_stage() -> None:
    table = LoadTable(
        (StageNeed(1.0), StageNeed(4.0)),
        (PeerLoad("a", (0,), speed=5.0), PeerLoad("b", (1,), speed=1.0)),
    )
    assert {move.peer: move.reason for move in plan_moves(table, 1e6).moves} == dict.fromkeys(
        "ab", "2 moves together: their slowest stage 0.25 -> 1/s"
    )


def test_memory_is_the_stated_sum() -> None:
    estimate = estimate_memory(1000, activation_bytes=50, slots=4)
    assert estimate.total == 4000 + 8000 + 8000 + 4000 + 200
    lean = estimate_memory(1000, optimizer="sgd", accumulate="float32")
    assert lean.total == 4000 + 4000 + 4000 + 4000


@pytest.mark.parametrize(
    ("least", "memory", "activation", "slots"),
    [
        (8, None, 10, 8),  # nobody says how much memory there is
        (8, 1 << 40, 0, 8),  # nor what a microbatch takes
        (8, 0, 10, 8),
        (8, 1000, 10, 8),  # the state takes it all
        (8, 1000 + 4 * 89, 10, 8),
        (8, 1000 + 4 * 90, 10, 9),
        (8, 1000 + 4 * 639, 10, 63),
        (8, 1000 + 4 * 640, 10, 64),
        (8, 1 << 60, 1, 64),
        (130, 1 << 60, 1, 130),  # many stages need more than the most that memory gives
        (None, 1 << 60, 1, None),  # AFAB knows no limit
    ],
)
def test_slots_are_as_many_as_fit_beside_the_state(
    least: int | None, memory: int | None, activation: int, slots: int | None
) -> None:
    assert slots_that_fit(least, memory, 1000, activation) == slots


@pytest.mark.parametrize("memory", [2500, 4000, 10_000, 1 << 30])
def test_two_replicas_of_a_device_both_fit(memory: int) -> None:
    states, activation, least = (1000, 700), 20, least_slots(1)
    held = [slots_that_fit(least, memory // 2, state, activation) for state in states]
    taken = [s + h * activation for s, h in zip(states, held, strict=True) if h is not None]
    assert len(taken) == 2
    assert sum(taken) <= memory


def test_another_cut_is_proposed_with_its_gain() -> None:
    table = LoadTable(
        (StageNeed(cost=2.0), StageNeed(cost=2.0)),
        (PeerLoad("a", (0,), speed=3.0), PeerLoad("b", (1,), speed=1.0)),
    )
    other = recut([1.0] * 4, [2, 2], table, 0.0)
    assert other.cut == (3, 1)
    assert other.gain == pytest.approx(1.0)
    assert other.reason == "cut [3, 1] instead of [2, 2] would gain 100%"
    even = LoadTable(table.stages, tuple(PeerLoad(n, (s,), speed=1.0) for s, n in enumerate("ab")))
    assert recut([1.0] * 4, [2, 2], even, 0.0).gain == 0.0
    assert recut([1.0] * 4, [2, 2], table, 0.0, latest=2).cut == (2, 2)
