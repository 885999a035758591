"""Second stages: who holds one, and what a swarm with them does."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from scipy.optimize import linprog

from swarm.placement import (
    LoadTable,
    PeerLoad,
    StageNeed,
    chain_throughput,
    optimum,
    plan_seconds,
)
from swarm.placement.chain import next_stage


def by_linear_program(costs: list[float], alone: list[float], linked: list[float]) -> float:
    """Each link divides its speed between its two stages; the slowest stage is raised most."""
    stages = len(costs)
    # Variables: what link s gives to its own stage and to the next one, then the rate.
    rows, most = [], []
    for stage in range(stages):
        row = np.zeros(2 * stages + 1)
        row[stage] -= 1.0
        row[stages + (stage - 1) % stages] -= 1.0
        row[-1] = costs[stage]
        rows.append(row)
        most.append(alone[stage])
        limit = np.zeros(2 * stages + 1)
        limit[stage] = limit[stages + stage] = 1.0
        rows.append(limit)
        most.append(linked[stage])
    goal = np.zeros(2 * stages + 1)
    goal[-1] = -1.0
    found = linprog(goal, A_ub=np.array(rows), b_ub=np.array(most))
    assert found.success
    return float(-found.fun)


def test_the_throughput_of_a_chain_is_that_of_the_best_division() -> None:
    draw = random.Random(0)
    for stages, _ in itertools.product((2, 3, 4, 7), range(25)):
        costs = [draw.choice([0.5, 1.0, 3.0]) for _ in range(stages)]
        alone = [draw.choice([0.0, 1.0, 2.5, 8.0]) for _ in range(stages)]
        linked = [draw.choice([0.0, 0.0, 1.0, 4.0]) for _ in range(stages)]
        expected = by_linear_program(costs, alone, linked)
        assert chain_throughput(costs, alone, linked) == pytest.approx(expected, abs=1e-9)


def test_a_chain_without_links_is_the_slowest_stage_and_a_whole_one_nearly_everything() -> None:
    assert chain_throughput([1.0, 2.0], [3.0, 4.0], [0.0, 0.0]) == 2.0
    assert chain_throughput([2.0], [3.0], [0.0]) == 1.5
    # Twelve in each stage, one of them has lost eight: the chain carries the gap all around.
    linked = [12.0] * 31 + [4.0]
    assert chain_throughput([1.0] * 32, [0.0] * 32, linked) == pytest.approx(376 / 32)


def table(counts: list[int], **fields: object) -> LoadTable:
    peers = [
        PeerLoad(f"{stage}.{number}", (stage,), speed=1.0 + number, **fields)  # type: ignore[arg-type]
        for stage, count in enumerate(counts)
        for number in range(count)
    ]
    return LoadTable(tuple(StageNeed(memory_bytes=2) for _ in counts), tuple(peers))


def test_a_share_of_every_stage_fetches_the_next_one_the_fastest_first() -> None:
    orders = plan_seconds(table([4, 3, 1]), 0.5)
    assert [(each.peer, each.stage) for each in orders] == [
        ("0.3", 1), ("0.2", 1), ("1.2", 2), ("1.1", 2), ("2.0", 0),
    ]  # fmt: skip
    assert orders[0].reason == "0 of 4 in stage 0 hold stage 1 as well"
    assert plan_seconds(table([4]), 1.0) == ()
    assert plan_seconds(table([4, 4]), 0.0) == ()


@pytest.mark.parametrize(
    "fields",
    [{"pinned": True}, {"memory_bytes": 3}, {"leaves_s": 9.0}, {"arriving": 1}, {"second": 1}],
    ids=["pinned", "small", "going", "moving", "has one"],
)
def test_who_is_not_asked(fields: dict[str, object]) -> None:
    assert plan_seconds(table([2, 0], **fields), 1.0) == ()


def test_no_division_beats_the_sum_of_speeds_nor_one_stage_each_the_chain() -> None:
    draw = random.Random(1)
    for _ in range(50):
        stages = draw.randint(2, 5)
        costs = [draw.choice([1.0, 2.0]) for _ in range(stages)]
        counts = [draw.randint(1, 4) for _ in range(stages)]
        alone = [float(count) for count in counts]
        none = [0.0] * stages
        without = chain_throughput(costs, alone, none)
        whole = chain_throughput(costs, none, alone)
        assert without == pytest.approx(min(a / c for a, c in zip(alone, costs, strict=True)))
        assert without <= whole + 1e-9
        assert whole <= sum(counts) / sum(costs) + 1e-9
        assert without <= optimum(costs, [1.0] * sum(counts)) + 1e-9


def test_the_last_stage_is_followed_by_the_first() -> None:
    assert [next_stage(stage, 3) for stage in range(3)] == [1, 2, 0]
