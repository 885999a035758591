"""What the best assignment could reach at most, and whether another cut would do better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.placement.table import LoadTable

_HALVINGS = 60


def optimum(costs: Sequence[float], speeds: Sequence[float]) -> float:
    """Upper bound of the throughput, microbatches/s, over all assignments of one stage per peer.

    Exact for peers of equal speed, and 0 for fewer peers than stages. A rate x is ruled out when
    (a) the stages need more peers than there are even if all were as fast as the fastest, or
    (b) the speeds do not add up: a peer that alone exceeds what the dearest stage needs counts for
    one stage only. Memory is left out, which can only raise the bound.
    """
    fastest = max(speeds, default=0.0)
    if len(speeds) < len(costs) or fastest <= 0 or not costs:
        return 0.0
    ordered = sorted(speeds, reverse=True)
    sums = [0.0]
    for speed in ordered:
        sums.append(sums[-1] + speed)
    dear = sorted(costs, reverse=True)
    cheap_sums = [0.0]
    for cost in reversed(dear):
        cheap_sums.append(cheap_sums[-1] + cost)

    def possible(x: float) -> bool:
        if sum(_ceil(x * cost / fastest) for cost in costs) > len(speeds):
            return False
        # The k fastest serve one stage each; the rest must carry the cheapest S - k stages.
        for k in range(len(costs)):
            if ordered[k] < x * dear[0]:
                break
            rest = sums[-1] - sums[k + 1]
            if rest * (1 + 1e-12) < x * cheap_sums[len(costs) - k - 1]:
                return False
        return sums[-1] * (1 + 1e-12) >= x * cheap_sums[-1]

    low, high = 0.0, sums[-1] / cheap_sums[-1]
    if possible(high):
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    for cost in sorted(set(costs)):  # where whole replicas decide: exactly that many of them
        exact = round(high * cost / fastest) * fastest / cost
        if math.isclose(exact, high, rel_tol=1e-9):
            return exact
    return high


def _ceil(value: float) -> int:
    return math.ceil(value * (1 - 1e-12))


@dataclass(frozen=True, slots=True)
class Recut:
    """Another cut with the same replicas. `gain`: share by which throughput would rise."""

    cut: tuple[int, ...]
    throughput: float
    gain: float
    reason: str


def recut(
    layer_costs: Sequence[float],
    cut: Sequence[int],
    table: LoadTable,
    now_s: float,
    latest: int | None = None,
) -> Recut:
    """The cut that suits the peers as they are placed now, and what it would gain.

    `layer_costs`: of every layer, in the units of `StageNeed.cost`; `cut`: layers per stage now.
    A stage's capacity is its settled rate times its cost. The best contiguous cut for those
    capacities is found exactly (the largest cost per capacity is smallest), O(stages x layers^2).
    No boundary may come after more than `latest` layers.
    """
    present = table.settled_rates(now_s)
    capacity = [rate * need.cost for rate, need in zip(present, table.stages, strict=True)]
    before = min(present, default=0.0)
    if not capacity or min(capacity) <= 0:
        return Recut(tuple(cut), before, 0.0, "a stage has nobody: another cut does not help")
    best = best_cut(layer_costs, capacity, latest)
    start, after = 0, math.inf
    for layers, each in zip(best, capacity, strict=True):
        after = min(after, each / sum(layer_costs[start : start + layers]))
        start += layers
    if after <= before * (1 + 1e-9):
        return Recut(tuple(cut), before, 0.0, "no other cut suits these peers better")
    gain = after / before - 1
    return Recut(
        best, after, gain, f"cut {list(best)} instead of {list(cut)} would gain {gain:.0%}"
    )


def best_cut(
    layer_costs: Sequence[float], capacity: Sequence[float], latest: int | None = None
) -> tuple[int, ...]:
    """Layers per stage, at least one each, with the least largest cost / capacity.

    No boundary comes after more than `latest` layers, which must be stages - 1 at least.
    """
    layers, stages = len(layer_costs), len(capacity)
    latest = layers - 1 if latest is None else latest
    sums = [0.0]
    for cost in layer_costs:
        sums.append(sums[-1] + cost)
    best = [math.inf] * (layers + 1)
    best[0] = 0.0
    choice: list[list[int]] = []
    for stage in range(stages):
        row = [math.inf] * (layers + 1)
        took = [0] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(stage, min(end, latest + 1)):
                worst = max(best[start], (sums[end] - sums[start]) / capacity[stage])
                if worst < row[end]:
                    row[end], took[end] = worst, end - start
        best = row
        choice.append(took)
    cut: list[int] = []
    end = layers
    for took in reversed(choice):
        cut.append(took[end])
        end -= took[end]
    return tuple(reversed(cut))
