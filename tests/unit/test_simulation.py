"""The simulator: its two resolutions agree, its churn is what it says, its figures add up."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from peer.simulate import simulate
from swarm.errors import ConfigError
from swarm.placement import MovePolicy, StageNeed
from swarm.sim import fluid, microbatches
from swarm.sim.churn import Life, diurnal, exponential, preemptible, read_trace
from swarm.sim.fluid import Step
from swarm.sim.outcome import Reach
from swarm.sim.policies import Nothing, PaperRule, Planner, Policy
from swarm.sim.scenario import read_scenario

STEP = Step(microbatches=512, averaging_s=2.0, hop_s=0.01, slots=24)


def needs(stages: int, download_bytes: int = 0) -> tuple[StageNeed, ...]:
    return tuple(StageNeed(download_bytes=download_bytes) for _ in range(stages))


def constant(*speeds: float) -> list[Life]:
    return [Life(f"p{at:03}", 0.0, speed=speed) for at, speed in enumerate(speeds)]


def churning(notice_s: float, lifetime_s: float = 1200.0) -> list[Life]:
    stays = exponential(random.Random(3), 5400.0, count=16, lifetime_s=lifetime_s, away_s=200.0)
    return [
        Life(f"p{at:03}", since, until, notice_s, link_bytes_per_s=1.0)
        for at, (since, until) in enumerate(sorted(stays))
    ]


def holding_two(share: float) -> Planner:
    return Planner(30.0, MovePolicy(second_share=share))


COMMON = {
    "equal": (needs(3), constant(*[1.0] * 12), Nothing(), 900.0),
    "one to spare": (needs(3), constant(*[1.0] * 13), Nothing(), 900.0),
    "speeds differ": (needs(3), constant(*[0.6, 1.0, 1.6] * 4), Nothing(), 900.0),
    "planner moves": (needs(3, 60), churning(60.0), Planner(30.0), 1800.0),
    "deaths without notice": (needs(3, 60), churning(0.0, 3600.0), Planner(30.0), 1800.0),
    "the paper's rule": (needs(3, 60), churning(60.0), PaperRule(60.0), 1800.0),
    "all hold two": (needs(3, 60), churning(60.0), holding_two(1.0), 1800.0),
    "all hold two, one to spare": (needs(3), constant(*[1.0] * 13), holding_two(1.0), 900.0),
    "all hold two, deaths": (needs(3, 60), churning(0.0, 3600.0), holding_two(1.0), 1800.0),
}


@pytest.mark.parametrize("name", COMMON)
def test_both_resolutions_agree_within_three_percent(name: str) -> None:
    stages, lives, policy, seconds = COMMON[name]
    same: dict[str, Any] = {"seconds": seconds, "step": STEP}
    if policy.name.endswith("hold two"):  # with as many slots as a real swarm of three stages
        same |= {"second_cost": 0.05, "divisible": True, "step": STEP._replace(slots=8)}
    coarse = fluid.simulate(stages, lives, copy.deepcopy(policy), **same)
    fine = microbatches.simulate(stages, lives, copy.deepcopy(policy), **same)
    assert fine.work == pytest.approx(coarse.work, rel=0.03)
    assert (fine.seconds_fetched > 0) is (coarse.seconds_fetched > 0) is ("divisible" in same)
    assert (fine.joins, fine.leaves) == (coarse.joins, coarse.leaves)
    assert fine.optimum_work == pytest.approx(coarse.optimum_work, rel=0.01)


def test_what_a_dead_replica_counted_is_computed_again() -> None:
    lives = [Life("a", 0.0, 100.5), Life("b", 0.0), Life("c", 0.0)]
    done = microbatches.simulate(
        needs(1), lives, Nothing(), seconds=200.0, step=Step(1000, slots=8)
    )
    assert done.redone == 100  # it did one a second
    assert done.work == pytest.approx(3 * 100 + 2 * 100 - 100, abs=3)


@pytest.mark.parametrize("engine", [fluid, microbatches], ids=["fluid", "microbatch"])
def test_a_peer_may_become_slower_and_recover(engine: ModuleType) -> None:
    lives = [*constant(1.0, 1.0), Life("slow", 0.0, turns=((300.0, 0.5), (500.0, 1.0)))]
    done = engine.simulate(needs(1), lives, Nothing(), seconds=900.0, step=STEP)
    same = engine.simulate(needs(1), constant(1.0, 1.0, 1.0), Nothing(), seconds=900.0, step=STEP)
    assert done.work == pytest.approx(same.work * (1 - 100 / 2700), rel=0.01)
    assert done.optimum_work == pytest.approx(same.optimum_work * (1 - 100 / 2700), rel=0.01)


POLICIES: list[Policy] = [Nothing(), PaperRule(60.0), Planner(30.0)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda each: each.name)
def test_no_policy_is_better_than_the_bound_nor_that_than_the_optimum(policy: Policy) -> None:
    stays = exponential(random.Random(1), 7200.0, count=60, lifetime_s=3000.0, away_s=300.0)
    lives = [Life(f"p{at}", *stay, link_bytes_per_s=1.0) for at, stay in enumerate(sorted(stays))]
    outcome = fluid.simulate(needs(4, 100), lives, policy, seconds=7200.0, lifetime_s=3000.0)
    assert 0 < outcome.work <= outcome.reachable_work <= outcome.optimum_work
    assert sum(outcome.done) / len(outcome.done) == pytest.approx(outcome.work / 7200.0)
    assert outcome.joins == len(stays)


def test_second_stages_bring_throughput_near_the_bound_and_never_above() -> None:
    stays = exponential(random.Random(1), 14400.0, count=80, lifetime_s=6000.0, away_s=300.0)
    lives = [Life(f"p{at}", *stay, link_bytes_per_s=1.0) for at, stay in enumerate(sorted(stays))]
    shares = []
    for share in (0.0, 0.5, 1.0):
        outcome = fluid.simulate(
            needs(8, 300), lives, Planner(30.0, MovePolicy(second_share=share)), seconds=14400.0,
            lifetime_s=6000.0, divisible=True,
        )  # fmt: skip
        assert 0 < outcome.work <= outcome.reachable_work <= outcome.optimum_work
        assert (outcome.seconds_fetched > 0) is (share > 0)
        shares.append(outcome.work / outcome.reachable_work)
    assert shares == sorted(shares)
    assert shares[2] > 1 - (1 - shares[0]) / 2


def test_what_a_second_stage_costs_is_taken_from_its_holders() -> None:
    done = [
        fluid.simulate(
            needs(3), constant(*[1.0] * 12), Planner(30.0, MovePolicy(second_share=1.0)),
            seconds=1000.0, second_cost=cost, divisible=True,
        ).work
        for cost in (0.0, 0.1)
    ]  # fmt: skip
    assert done[0] == pytest.approx(4000.0)
    assert done[1] == pytest.approx(0.03 * 4000 + 0.97 * 3600)  # from the first tick on


def test_the_optimum_follows_the_peers() -> None:
    reach = Reach([1.0] * 4)
    for _ in range(7):
        reach.add(1.0)
    assert reach.value == 1.0
    reach.add(1.0)
    assert reach.value == 2.0
    reach.remove(1.0)
    assert reach.value == 1.0
    for _ in range(7):
        reach.remove(1.0)
    assert reach.value == 0.0


def test_stays_are_as_long_and_as_many_as_they_should_be() -> None:
    stays = exponential(random.Random(0), 1e6, count=50, lifetime_s=5000.0, away_s=5000.0)
    inside = [end - start for start, end in stays if end < 1e6]
    assert sum(inside) / len(inside) == pytest.approx(5000.0, rel=0.05)
    present = sum(min(end, 1e6) - start for start, end in stays)
    assert present / 1e6 == pytest.approx(25.0, rel=0.05)
    home = diurnal(random.Random(0), 5 * 86400.0, count=100)
    hours = [sum(a < (day + h / 24) * 86400 < b for a, b in home for day in range(5))
             for h in (8, 20)]  # fmt: skip
    assert hours[1] > 5 * hours[0]


def test_preemptible_machines_go_in_bursts_and_come_back_one_by_one() -> None:
    stays = preemptible(
        random.Random(0), 32 * 3600.0, count=400, lifetime_s=12 * 3600.0,
        burst_every_s=6 * 3600.0, burst_share=0.25, open_s=2 * 3600.0, gap_s=8 * 3600.0,
        grants_per_s=1 / 60,
    )  # fmt: skip
    ends: dict[float, int] = {}
    for start, end in stays:
        assert start < end
        ends[end] = ends.get(end, 0) + 1
    del ends[math.inf]
    assert max(ends.values()) > 20
    later = [start for start, _ in stays if start > 0]
    assert len(set(later)) == len(later)
    for at in range(0, 32 * 3600, 600):
        assert sum(start <= at < end for start, end in stays) <= 400


def test_a_trace_file_is_read_and_its_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("peer,joins_s,leaves_s,speed,down_mbps\na,0,,2.0,8\nb,5,10,,\n")
    assert read_trace(path) == [
        Life("a@0", 0.0, speed=2.0, link_bytes_per_s=1e6),
        Life("b@5", 5.0, 10.0),
    ]
    path.write_text("peer,joins_s,leaves_s\na,0,5\na,7,6\n")
    with pytest.raises(ConfigError, match=r"line 3: leaves_s is not after joins_s"):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none.csv")


SMALL = """
name = "small"
hours = 0.5
seeds = 2
[stages]
count = 2
download_mib = 10.0
[[peers]]
count = 12
speed = [0.5, 2.0]
memory_gib = 16.0
churn = { kind = "exponential", lifetime_h = 0.3, away_h = 0.05 }
[[policies]]
kind = "none"
joiners = "random"
[[policies]]
kind = "planner"
"""


def test_the_command_writes_what_it_says(tmp_path: Path) -> None:
    file, out = tmp_path / "small.toml", tmp_path / "out"
    file.write_text(SMALL)
    said: list[str] = []
    simulate(file, out, say=said.append)
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["policies"]) == ["none", "planner"]
    planner = summary["policies"]["planner"]
    assert len(planner["relative"]["seeds"]) == 2
    assert planner["relative"]["mean"] > summary["policies"]["none"]["relative"]["mean"]
    assert (out / "throughput.csv").read_text().startswith("until_s,optimum,none,planner\n")
    assert (out / "throughput.png").read_bytes().startswith(b"\x89PNG")
    assert "planner" in said[0]
    first = (out / "summary.json").read_bytes()
    simulate(file, out, say=said.append)
    assert (out / "summary.json").read_bytes() == first  # the seed decides everything


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count = 2", "count = 2\ncolour = 1", "stages.colour"),
        ("count = 2", "count = 2\ncost = [1.0]", "cost lists 1 stages but count is 2"),
        ('kind = "planner"', 'kind = "magic"', "'none', 'paper' or 'planner'"),
        ("seeds = 2", 'resolution = "microbatch"', "needs step.microbatches"),
    ],
    ids=["unknown", "costs", "policy", "step"],
)
def test_mistakes_in_a_scenario_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_scenario(file)


@pytest.mark.parametrize("resolution", ["fluid", "microbatch"])
def test_a_scenario_with_second_stages_runs_in_both_resolutions(
    tmp_path: Path, resolution: str
) -> None:
    file, out = tmp_path / "small.toml", tmp_path / "out"
    step = f'resolution = "{resolution}"\nstep = {{ microbatches = 64 }}\nhours = 0.1'
    file.write_text(SMALL.replace("hours = 0.5", step) + "second_share = 0.5\n")
    assert read_scenario(file).divisible
    simulate(file, out, seeds=1, say=lambda line: None)
    holding = json.loads((out / "summary.json").read_text())["policies"]["planner, 50% hold two"]
    assert holding["second_stages"] > 0
    assert holding["relative"]["mean"] > 0.5


def test_the_frozen_scenario_is_read() -> None:
    path = Path(__file__).parents[2] / "examples/scenarios/preemptible.toml"
    scenario = read_scenario(path)
    assert len({life.peer for life in scenario.lives(0, path.parent)}) > 400
