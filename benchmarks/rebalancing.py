"""Rebalancing under preemptible machines, simulated: the SWARM paper's table, then with real costs.

Source: SWARM parallelism (arXiv 2301.11913), the experiment on adaptive rebalancing: 32 stages, a
32-hour trace of preemptible T4s, throughput relative to the optimal assignment, moves free: 82.7 %
without rebalancing, 95.8 % with its rule every 300 s. The trace is not public. Ours is drawn by
`swarm.sim.churn.preemptible` with the parameters in examples/scenarios/preemptible.toml, chosen so
that these two policies come out as there, and frozen before the planner was tuned.

(i) moves free, at 8, 32 (twice as many seeds) and 128 stages, 12.5 peers asked for per stage.
(ii) At 32 stages, joiners and movers download for 30, 120 or 300 s, and do not serve meanwhile,
under every policy. The clairvoyant bound has every peer that could have downloaded a stage since it
came, always placed at best, for nothing; so no policy can reach it, whatever it knows.

(iii) The same machines and downloads where the memory holds two stages. There movers of every
policy serve while they download, and ours is the planner with second stages: all peers hold the
next stage as well. Holders divide their time, so all of (iii) is measured against total speed /
total cost, and its bound is the clairvoyant one of peers that divide theirs as they like. What a
second stage costs is counted against everybody: the exact policy waits for those who average two
stages, and averaging one is taken as AVERAGING of a step. T = 60 s and the bound pay nothing.
Printed beside: smaller shares of holders, the planner without second stages, the share of all time
that second stages may cost with half the gap still closed, and what is closed of the gap to (ii)'s
bound, the best that whole stages could do (above 1: more than all of it).

All is simulated (fluid), so the figures do not depend on the machine.

    python benchmarks/rebalancing.py [--workers 2] [--seeds 10] [--parts i,ii,iii]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from _helpers import print_results, result

from swarm.placement import MovePolicy, StageNeed
from swarm.sim import fluid
from swarm.sim.outcome import Outcome
from swarm.sim.policies import Nothing, PaperRule, Planner, Policy
from swarm.sim.scenario import Scenario, read_scenario

SCENARIO = Path(__file__).parents[1] / "examples/scenarios/preemptible.toml"
PAPER = {"none": 82.7, "paper, T=300 s": 95.8}
TOLERANCE = {"none": 2.0, "paper, T=300 s": 1.0}
STAGES = (8, 32, 128)
DOWNLOADS_S = (30.0, 120.0, 300.0)
OURS, T60 = "planner", "paper, T=60 s"
SIGNIFICANT = 1.0  # points between T=60 and the bound, from which closing it counts
SHARES = (0.1, 0.25, 0.5, 1.0)  # of the replicas, that hold a second stage
OURS_OF_TWO = "planner, 100% hold two"
WHOLE = "(whole stages, clairvoyant)"
AVERAGING = 0.02  # of a step, for one stage
PARTS = ("i", "ii", "iii")
BELOW = 0.2  # points that ours may be below another policy


class Case(NamedTuple):
    stages: int
    download_s: float
    seed: int
    two: bool = False  # (iii)


class Figures(NamedTuple):
    """Percent of the optimum, and moves."""

    relative: float
    bound: float
    moves: int


def policies() -> list[Policy]:
    ours = Planner(30.0, MovePolicy(keeps_serving=False))
    return [Nothing(), PaperRule(300.0), PaperRule(60.0), ours]


def policies_of_two() -> list[Policy]:
    return [
        Nothing(),
        *(PaperRule(every_s, keeps_serving=True) for every_s in (300.0, 60.0)),
        *(Planner(30.0, MovePolicy(second_share=share)) for share in (0.0, *SHARES)),
    ]


def sized(scenario: Scenario, stages: int) -> Scenario:
    """As many peers, and machines granted, per stage as in the file."""
    scale = stages / scenario.stages.count
    data = scenario.model_dump()
    data["stages"]["count"] = stages
    data["peers"][0]["count"] = round(data["peers"][0]["count"] * scale)
    data["peers"][0]["churn"]["grants_per_h"] *= scale
    return Scenario.model_validate(data)


def run(case: Case) -> tuple[Case, dict[str, Figures]]:
    scenario = sized(read_scenario(SCENARIO), case.stages)
    lives = scenario.lives(case.seed, SCENARIO.parent)
    link = lives[0].link_bytes_per_s
    needs = (StageNeed(download_bytes=int(case.download_s * link)),) * case.stages

    def simulated(policy: Policy, *, divisible: bool) -> Outcome:
        return fluid.simulate(
            needs, lives, policy, seconds=scenario.seconds, seed=case.seed,
            lifetime_s=3600 * (scenario.lifetime_h or 0.0), divisible=divisible,
        )  # fmt: skip

    found = {}
    for policy in policies_of_two() if case.two else policies():
        done = simulated(policy, divisible=case.two)
        relative = 100 * done.relative
        if policy.name.endswith("hold two"):
            relative /= 1 + AVERAGING
        found[done.policy] = Figures(relative, 100 * done.bound, done.moves)
    if case.two:
        whole = 100 * simulated(Nothing(), divisible=False).reachable_work / done.optimum_work
        found[WHOLE] = Figures(whole, 100 * done.bound, 0)
    return case, found


def cases(seeds: int, parts: Collection[str]) -> Iterator[Case]:
    for seed in range(2 * seeds):
        if "i" in parts:
            yield Case(32, 0.0, seed)
    for seed in range(seeds):
        for download_s in DOWNLOADS_S:
            if "ii" in parts:
                yield Case(32, download_s, seed)
            if "iii" in parts:
                yield Case(32, download_s, seed, two=True)
        if "i" in parts:
            yield Case(8, 0.0, seed)
            yield Case(128, 0.0, seed)


Key = tuple[int, float, bool]
Table = Mapping[Key, Sequence[Mapping[str, Figures]]]


def mean(table: Table, key: Key, policy: str) -> float:
    return statistics.fmean(row[policy].relative for row in table[key])


def print_table(table: Table) -> None:
    print(f"{'stages':>6} {'download':>9} {'seeds':>5}  {'policy':<22} "
          f"{'% of optimum':>12} {'spread':>6} {'moves':>6}")  # fmt: skip
    for (stages, download_s, _), rows in sorted(table.items(), key=lambda row: (row[0][2], row[0])):
        for policy in rows[0]:
            values = [row[policy].relative for row in rows]
            moves = statistics.fmean(row[policy].moves for row in rows)
            print(f"{stages:>6} {download_s:>7.0f} s {len(rows):>5}  {policy:<22} "
                  f"{statistics.fmean(values):>12.2f} {statistics.stdev(values):>6.2f} "
                  f"{moves:>6.0f}")  # fmt: skip
        bound = statistics.fmean(row[OURS].bound for row in rows)
        print(f"{stages:>6} {download_s:>7.0f} s {len(rows):>5}  {'(clairvoyant)':<22} "
              f"{bound:>12.2f}")  # fmt: skip


def results(table: Table, parts: Collection[str]) -> list[dict[str, Any]]:
    found = []
    if "i" in parts:
        found += results_when_free(table)
    for download_s in DOWNLOADS_S:
        if "ii" in parts:
            found += results_with_costs(table, (32, download_s, False))
    for download_s in DOWNLOADS_S:
        if "iii" in parts:
            found += results_of_two(table, (32, download_s, True))
    return found


def results_when_free(table: Table) -> list[dict[str, Any]]:
    found = []
    for policy, figure in PAPER.items():
        away = abs(mean(table, (32, 0.0, False), policy) - figure)
        found.append(
            result(f"calibration: {policy}, from the paper's {figure} %", away, "points",
                   TOLERANCE[policy], at_most=True)
        )  # fmt: skip
    found.append(
        result("planner, 32 stages, moves free", mean(table, (32, 0.0, False), OURS), "%", 99.0)
    )
    for stages in STAGES:
        key = (stages, 0.0, False)
        ahead = mean(table, key, OURS) - best_other(table, key)
        found.append(result(f"ahead of the best other, {stages} stages", ahead, "points", 0.0))
    return found


def results_with_costs(table: Table, key: Key) -> list[dict[str, Any]]:
    """The two goals of real costs, on the policy that is ours for such machines."""
    ours = OURS_OF_TWO if key[2] else OURS
    name = f"{'memory for two, ' if key[2] else ''}downloads of {key[1]:.0f} s"
    bound, t60 = bound_of(table, key), mean(table, key, T60)
    goal = 0.5 if bound - t60 > SIGNIFICANT else None
    ahead = mean(table, key, ours) - best_other(table, key)
    return [
        result(f"{name}: gap from T=60 closed", closed(table, key, ours), "", goal),
        result(f"{name}: ahead of the best other", ahead, "points", -BELOW),
    ]


def results_of_two(table: Table, key: Key) -> list[dict[str, Any]]:
    found = results_with_costs(table, key)
    bound, t60, whole = bound_of(table, key), mean(table, key, T60), mean(table, key, WHOLE)
    for policy in table[key][0]:
        if policy.startswith(OURS):
            ours, name = mean(table, key, policy), f"downloads of {key[1]:.0f} s, {policy}"
            if policy != OURS_OF_TWO:
                found.append(result(f"{name}: gap closed", closed(table, key, policy), ""))
            found.append(
                result(f"{name}: to whole stages' bound", (ours - t60) / (whole - t60), "")
            )
            if policy != OURS:
                free = ours * (1 + AVERAGING)
                most = 1 - (t60 + bound) / 2 / free
                found.append(result(f"{name}: may cost, for half the gap", 100 * most, "%"))
    return found


def bound_of(table: Table, key: Key) -> float:
    return statistics.fmean(row[OURS].bound for row in table[key])


def closed(table: Table, key: Key, policy: str) -> float:
    """The share of the gap from T = 60 s to the bound that this policy closes."""
    t60 = mean(table, key, T60)
    return (mean(table, key, policy) - t60) / (bound_of(table, key) - t60)


def best_other(table: Table, key: Key) -> float:
    others = (each for each in table[key][0] if each != WHOLE and not each.startswith(OURS))
    return max(mean(table, key, policy) for policy in others)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--parts", default=",".join(PARTS), help="of i, ii and iii")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    table: dict[Key, list[Mapping[str, Figures]]] = {}
    with ProcessPoolExecutor(arguments.workers) as pool:
        for case, row in pool.map(run, cases(arguments.seeds, parts)):
            table.setdefault((case.stages, case.download_s, case.two), []).append(row)
    print_table(table)
    print_results("rebalancing", results(table, parts))


if __name__ == "__main__":
    main()
