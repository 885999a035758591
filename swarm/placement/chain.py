"""Second stages: who holds the next stage as well, and what a swarm with such peers does.

A peer that holds the state of a second stage can serve either at any moment, so work flows to where
a replica has died without a download; routing alone decides. Every peer's second stage is the one
after its own, the first after the last: a *chain* through all stages. Along it a surplus reaches a
gap many stages away, each stage handing on what it is handed, and a long chain does nearly what
peers that hold everything would (Jordan and Graves, "Principles on the benefits of manufacturing
process flexibility", Management Science 41(4), 1995).

It costs memory for a second state, a second part in every averaging, and the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm.placement.table import LoadTable, PeerLoad


@dataclass(frozen=True, slots=True)
class Second:
    """`peer` is to fetch the state of `stage` and hold it beside its own."""

    peer: str
    stage: int
    reason: str


def next_stage(stage: int, stages: int) -> int:
    """The second stage of those that serve `stage`."""
    return (stage + 1) % stages


def plan_seconds(table: LoadTable, share: float) -> tuple[Second, ...]:
    """Who should fetch a second stage now, so that `share` of every stage's replicas hold one.

    Only peers that serve one stage, whose memory holds both, that nothing else happens to, and that
    are not pinned. The fastest of a stage first, then by name. O(peers log peers).
    """
    stages = len(table.stages)
    if stages < 2 or share <= 0:
        return ()
    free: list[list[PeerLoad]] = [[] for _ in range(stages)]
    count, held = [0] * stages, [0] * stages
    for peer in table.peers:
        if len(peer.stages) != 1 or peer.leaves_s < math.inf or peer.arriving is not None:
            continue
        [stage] = peer.stages
        count[stage] += 1
        if peer.second is not None or peer.fetching is not None:
            held[stage] += 1
        elif not peer.pinned and table.fits(peer, stage, next_stage(stage, stages)):
            free[stage].append(peer)
    orders = []
    for stage in range(stages):
        missing = math.ceil(share * count[stage] - 1e-9) - held[stage]
        if missing > 0:
            free[stage].sort(key=lambda peer: (-table.speed(peer), peer.peer))
            after = next_stage(stage, stages)
            why = f"{held[stage]} of {count[stage]} in stage {stage} hold stage {after} as well"
            orders += [Second(peer.peer, after, why) for peer in free[stage][:missing]]
    return tuple(orders)


def chain_throughput(
    costs: Sequence[float], alone: Sequence[float], linked: Sequence[float]
) -> float:
    """Microbatches/s of a swarm in which time is divided best; exact, O(stages^2).

    `costs` (stages,): seconds of a device of speed 1 per microbatch. `alone` (stages,): speed of
    those that hold this stage only; `linked` (stages,): of those that hold it and the next one.
    A rate x is possible if every set of stages has as much speed among those that hold one of it
    as x times its costs (Hall's condition). On a ring only sets of neighbours can be the worst:
    two that do not touch share no peer, so one of them is at least as bad as both together.
    """
    cost, own, link = (np.asarray(each, dtype=np.float64) for each in (costs, alone, linked))
    stages = len(cost)
    whole = float((own.sum() + link.sum()) / cost.sum())
    if stages == 1:
        return whole
    # Of the arc of `length` stages from `start`: what its stages hold, and the link that enters it.
    needed, there = _windows(cost), _windows(own + link) + np.roll(link, 1)
    return min(whole, float((there[:-1] / needed[:-1]).min()))


def _windows(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[length - 1, start]`: the sum of `length` values from `start` on, around the ring."""
    size = len(values)
    sums = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values)))))
    start = np.arange(size)
    length = np.arange(1, size + 1)[:, None]
    windows: NDArray[np.float64] = sums[start + length] - sums[start]
    return windows
