"""The settled table as arrays, on which a plan tries its moves one after the other.

Arrays over peers (in order of name) and over stages, so that a swarm of 10,000 peers costs some
hundred microseconds a move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm.placement.table import LoadTable, PeerLoad

_EPSILON = 1e-9
_CLEARLY = 0.25  # of a replica's rate


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """What a move must bring.

    `hysteresis_s`: a peer that has moved stays for so long. `horizon_s`: gains count for so long
    at most, or for the movers' expected lifetime. `min_gain`: the share of the throughput that a
    plan must add, so that noise in measured rates moves nobody. `keeps_serving`: movers serve
    their old stage while they download, where their memory holds both. `effort`: what a download
    costs the swarm besides (others' links), as a share of what the mover could compute meanwhile.
    `second_share`: of every stage's replicas, so many are to hold the next stage as well (`chain`).
    """

    hysteresis_s: float = 300.0
    horizon_s: float = 3600.0
    min_gain: float = 0.02
    keeps_serving: bool = True
    effort: float = 0.1
    second_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """`peer` goes from a stage to another; `keeps_serving`: the old one while it downloads."""

    peer: str
    from_stage: int
    to_stage: int
    download_s: float
    keeps_serving: bool
    reason: str


class Sketch:
    """What the stages' rates become, move by move. Every move keeps the rules in `moves`."""

    def __init__(self, table: LoadTable, now_s: float, policy: MovePolicy) -> None:
        self.table, self.now_s, self.policy = table, now_s, policy
        peers = self.peers = sorted(
            (p for p in table.peers if self._can_move(p)), key=lambda peer: peer.peer
        )
        self.settled = np.array(table.settled_rates(now_s))
        self.present = np.array(table.present_rates(now_s))
        self.staying = np.array(table.replicas(), dtype=np.int64)
        self.cost = np.array([need.cost for need in table.stages])
        self.need = np.array([float(need.memory_bytes) for need in table.stages])
        self.bytes = np.array([float(need.download_bytes) for need in table.stages])
        self.stage = np.array([p.stages[0] for p in peers], dtype=np.int64)
        self.own = np.array([table.rate(p, p.stages[0]) for p in peers])
        self.speed = np.array([table.speed(p) for p in peers])
        self.memory = np.array(
            [math.inf if p.memory_bytes is None else float(p.memory_bytes) for p in peers]
        )
        self.link = np.array([p.download_bytes_per_s for p in peers])
        self.resting = np.array(
            [now_s - p.moved_s < self.policy.hysteresis_s for p in peers], dtype=bool
        )
        self.left = np.array(
            [-1 if p.left_stage is None else p.left_stage for p in peers], dtype=np.int64
        )
        self.second = np.array(
            [next(iter({p.second, p.fetching} - {None}), -1) for p in peers], dtype=np.int64
        )
        self.life = np.array([p.lifetime_s for p in peers])
        self.moved = np.zeros(len(peers), dtype=bool)
        self.measured: dict[int, list[tuple[int, float]]] = {}
        for at, peer in enumerate(peers):
            for stage, rate in peer.rates.items():
                self.measured.setdefault(stage, []).append((at, rate))

    def _can_move(self, peer: PeerLoad) -> bool:
        return (
            len(peer.stages) == 1
            and not peer.pinned
            and peer.leaves_s == math.inf
            and (peer.arriving is None or peer.reserved_until_s <= self.now_s)
        )

    def rates_at(self, stage: int) -> NDArray[np.float64]:
        """Of every peer, if it were there."""
        rates = self.speed / self.cost[stage]
        for at, rate in self.measured.get(stage, ()):
            rates[at] = rate
        return rates

    def may_go_to(self, stage: int) -> NDArray[np.bool_]:
        """Peers that may move there and leave somebody behind who serves their stage."""
        allowed = (
            ~self.moved
            & (self.stage != stage)
            & (self.second != stage)  # it helps there already
            & (self.memory >= self.need[stage])
            & (self.staying[self.stage] >= 2)
        )
        if self.staying[stage]:
            return allowed & ~self.resting
        return allowed & (~self.resting | (self.left != stage))

    def download_s(self, at: int, stage: int) -> float:
        return float(self.bytes[stage] / self.link[at])

    def holds_both(self, stage: int) -> NDArray[np.bool_]:
        """Of every peer, whether it would keep serving its stage while it downloads this one."""
        if not self.policy.keeps_serving:
            return np.zeros(len(self.peers), dtype=bool)
        return self.memory >= self.need[self.stage] + self.need[stage]

    def keeps(self, at: int, stage: int) -> bool:
        return bool(self.holds_both(stage)[at])

    def throughput(self) -> tuple[float, float]:
        """Settled, and while the movers download."""
        return float(self.settled.min(initial=math.inf)), float(self.present.min(initial=math.inf))

    def slowest(self) -> int:
        """The stage to help next, the first of equally slow ones."""
        return int(np.argmax(self.settled <= self.settled.min() * (1 + _EPSILON)))

    def best_step(self, to: int) -> list[tuple[int, int]]:
        """`(peer, stage)` moves that leave no stage they touch as slow as `to` is; [] if none."""
        at = self.best_move(to)
        if at is not None:
            return [(at, to)]
        pair = self.best_exchange(to)
        return [(pair[0], to), (pair[1], int(self.stage[pair[0]]))] if pair else []

    def best_move(self, to: int) -> int | None:
        """Who should move to `to`: the one that leaves the lower of both stages highest."""
        allowed = self.may_go_to(to)
        score = np.minimum(
            self.settled[self.stage] - self.own, self.settled[to] + self.rates_at(to)
        )
        score[~allowed] = -math.inf
        best = float(score.max(initial=-math.inf))
        if best <= self.settled[to] * (1 + _EPSILON) or best <= 0:
            return None
        equal = np.flatnonzero(score >= best * (1 - _EPSILON))
        # Of equally good ones: who leaves most behind, in the order of the stages. Joiners take
        # that order too, so what is under way gathers in few stages, where several gaps cost no
        # more than one; spread over all of them, each is one more place where a death hurts.
        at = self.stage[equal]
        left = self.settled[at] - self.own[equal]
        fetch_s = self.bytes[to] / self.link[equal]
        return int(equal[np.lexsort((-self.life[equal], fetch_s, at, -left))[0]])

    def best_exchange(self, to: int) -> tuple[int, int] | None:
        """Who of another stage should change places with whom of `to`. Who is alone in its stage
        may, if it keeps serving there until the other one does."""
        if not self.staying[to]:
            return None
        free = ~self.moved & ~self.resting
        others = (self.stage != to) & (self.second != to) & (self.memory >= self.need[to])
        others &= (self.staying[self.stage] >= 2) | self.holds_both(to)
        others = np.flatnonzero(others & free)
        ours = np.flatnonzero((self.stage == to) & free)
        if not len(ours) or not len(others):
            return None
        here = self.rates_at(to)[others]
        gap = float(here.max() - self.own[ours].min())
        if gap <= self.policy.min_gain * self.settled[to]:
            return None  # so also in swarms too large to compare all pairs
        there = self.stage[others]
        rates = self.speed[ours][None, :] / self.cost[there][:, None]
        for column, at in enumerate(ours):
            for stage, rate in self.peers[at].rates.items():
                rates[there == stage, column] = rate
        left = (self.settled[there] - self.own[others])[:, None] + rates
        gained = self.settled[to] + here[:, None] - self.own[ours][None, :]
        fits = self.memory[ours][None, :] >= self.need[there][:, None]
        if self.staying[to] < 2:
            both = self.need[to] + self.need[there]
            fits &= self.policy.keeps_serving & (self.memory[ours][None, :] >= both[:, None])
        fits &= self.second[ours][None, :] != there[:, None]
        score = np.where(fits, np.minimum(left, gained), -math.inf)
        row, column = divmod(int(score.argmax()), len(ours))
        if score[row, column] <= self.settled[to] * (1 + self.policy.min_gain):
            return None
        return int(others[row]), int(ours[column])

    def insurance(self, at: int, to: int) -> float:
        """Microbatches that the move saves within the horizon, because stage `to` can then lose a
        replica without waiting for another's download. Only where the stages differ by clearly
        more than this replica, so that noise moves nobody.
        """
        life_s = float(self.life[at])
        clear = self.settled[self.stage[at]] - self.own[at] - self.settled[to]
        if math.isinf(life_s) or clear < _CLEARLY * self.own[at]:
            return 0.0
        wait_s = self.download_s(at, to)
        insured_s = max(0.0, min(self.policy.horizon_s, life_s) - wait_s)
        return float(self.settled[to]) * insured_s / life_s * wait_s

    def apply(self, at: int, to: int) -> Move:
        """Do it on the sketch."""
        peer, origin = self.peers[at], int(self.stage[at])
        rate = self.table.rate(peer, to)
        before, richest = float(self.settled[to]), float(self.settled[origin])
        keeps = self.keeps(at, to)
        if not keeps:
            self.present[origin] -= self.own[at]
        if not self.staying[to]:
            why = f"stage {to} has nobody"
        elif before <= float(self.settled.min()) * (1 + _EPSILON):
            why = f"stage {to} is the slowest ({before:.3g}/s)"
        else:
            why = f"stage {to} can use it ({before:.3g}/s)"
        self.settled[origin] -= self.own[at]
        self.settled[to] += rate
        # `to` gains a server only when it has arrived; the last of a stage stays for so long.
        self.staying[origin] = max(1, self.staying[origin] - 1)
        self.moved[at] = True
        return Move(
            peer.peer,
            origin,
            to,
            self.download_s(at, to),
            keeps,
            f"{why}, stage {origin} can spare it ({richest:.3g} -> "
            f"{float(self.settled[origin]):.3g}/s)",
        )
