"""Small swarms: every assignment that may be reached is tried.

Move by move a plan can end where no single move and no exchange helps and another assignment is
still much better; with few peers of unlike speeds that is common. There all can be looked at.
"""

from __future__ import annotations

import math

import numpy as np

from swarm.placement.sketch import Sketch

MOST = 10_000  # assignments: thirteen peers that may move in two stages, or eight in three
_EPSILON = 1e-9


def is_small(sketch: Sketch) -> bool:
    """Whether all assignments of those that may move can be tried, and there are others: with one
    stage there is one, however many peers it has."""
    free, stages = len(sketch.peers) - int(sketch.resting.sum()), len(sketch.cost)
    return stages > 1 and free * math.log(stages) <= math.log(MOST)


def best_moves(sketch: Sketch) -> list[tuple[int, int]]:
    """`(peer, stage)` moves to the fastest assignment that keeps the rules of `moves`, the fewest
    of equally fast ones; [] where it is the present one, or there are too many to try."""
    stages = len(sketch.cost)
    free = np.flatnonzero(~sketch.moved & ~sketch.resting)
    if not len(free) or not is_small(sketch):
        return []
    # (assignments, peers): the stage of each that may move. The present ones come as they come.
    tried = np.stack(np.meshgrid(*[np.arange(stages)] * len(free), indexing="ij"), axis=-1)
    tried = tried.reshape(-1, len(free))
    own = sketch.stage[free]
    goes = tried != own
    rates = np.stack([sketch.rates_at(stage)[free] for stage in range(stages)])
    settled = np.tile(sketch.settled, (len(tried), 1))
    stays = np.tile(sketch.staying, (len(tried), 1))
    held = np.zeros_like(stays, dtype=bool)  # by one that leaves it once another has come
    comes = np.zeros_like(stays)
    allowed = np.ones(len(tried), dtype=bool)
    rows = np.arange(len(tried))
    for column, at in enumerate(free):
        to, moves = tried[:, column], goes[:, column]
        settled[:, own[column]] -= np.where(moves, sketch.own[at], 0.0)
        settled[rows, to] += np.where(moves, rates[to, column], 0.0)
        stays[:, own[column]] -= moves
        comes[rows, to] += moves
        keeps = np.array([sketch.keeps(int(at), stage) for stage in range(stages)])
        held[:, own[column]] |= moves & keeps[to]
        fits = (sketch.memory[at] >= sketch.need[to]) & (sketch.second[at] != to)
        allowed &= fits | ~moves
    # Who is alone in a stage changes places and no more: a plan that also made stages larger and
    # smaller would put all of a small swarm elsewhere for what was measured in its first seconds.
    places = (stays + comes == sketch.staying).all(axis=1)
    safe = (stays >= 1) | (sketch.staying == 0)
    allowed &= safe.all(axis=1) | (places & (safe | (held & (comes > 0))).all(axis=1))
    after = np.where(allowed, settled.min(axis=1), -np.inf)
    best = np.flatnonzero(after >= after.max() * (1 - _EPSILON))
    chosen = best[np.argmin(goes[best].sum(axis=1))]
    return [
        (int(at), int(stage))
        for at, stage, moves in zip(free, tried[chosen], goes[chosen], strict=True)
        if moves
    ]
