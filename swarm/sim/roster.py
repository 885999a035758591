"""The simulated swarm's membership: who serves what, who is under way, and what follows from it.

Both resolutions use it, so they differ only in how microbatches flow. It keeps the rates per stage
as they change, in O(1) an event, and hands the planner the same `LoadTable` a leader would.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from swarm.placement import LoadTable, Move, PeerLoad, Second, StageNeed, chain_throughput
from swarm.placement.chain import next_stage
from swarm.sim.churn import Life


class Roster:
    """Peers of one stage each, some of which hold the next one as well.

    `lifetime_s` is what planners are told of how long peers stay; `second_cost` the share of its
    time that a second stage costs whoever holds one (its averaging and update).
    """

    def __init__(
        self,
        needs: tuple[StageNeed, ...],
        lifetime_s: float = math.inf,
        second_cost: float = 0.0,
    ) -> None:
        self.needs = needs
        self.lifetime_s = lifetime_s
        self.second_cost = second_cost
        self.peers: dict[str, PeerLoad] = {}
        stages = len(needs)
        self.present = [0.0] * stages  # microbatches/s of those who serve
        self.settled = [0.0] * stages  # once all have arrived, and those who said so have gone
        self.serving = [0] * stages
        self.linked = [0.0] * stages  # speed of those that serve it and hold the next one
        self.links = [0] * stages
        self._flow: float | None = 0.0
        self.expected = [0] * stages
        self.changes = 0
        self._waiting: set[str] = set()  # they have downloaded, and are the last in their stage
        self.homeless = 0  # joiners that fitted no stage
        self._bare = LoadTable(needs)

    @property
    def table(self) -> LoadTable:
        return LoadTable(self.needs, tuple(self.peers.values()))

    @property
    def bare(self) -> LoadTable:
        """The stages alone."""
        return self._bare

    @property
    def throughput(self) -> float:
        """Microbatches/s now."""
        if self._flow is None:
            self._flow = self._compute()
        return self._flow

    def _compute(self) -> float:
        if not any(self.links):
            return min(self.present)
        costs = [need.cost for need in self.needs]
        alone = [
            rate * cost - linked
            for rate, cost, linked in zip(self.present, costs, self.linked, strict=True)
        ]
        left = 1.0 - self.second_cost
        return max(0.0, chain_throughput(costs, alone, [left * each for each in self.linked]))

    def newcomer(self, life: Life) -> PeerLoad:
        return PeerLoad(
            life.peer,
            speed=life.speed,
            memory_bytes=life.memory_bytes,
            download_bytes_per_s=life.link_bytes_per_s,
            lifetime_s=self.lifetime_s,
        )

    def enter(self, joiner: PeerLoad, stage: int, now_s: float, *, at_once: bool) -> float:
        """It takes `stage`; returns when it will serve."""
        download_s = 0.0 if at_once else self._bare.download_s(joiner, stage)
        if download_s == 0.0:
            self._put(replace(joiner, stages=(stage,)))
        else:
            self._put(replace(joiner, arriving=stage, arrives_s=now_s + download_s))
        return now_s + download_s

    def begin(self, move: Move, now_s: float) -> float:
        """It begins to move; returns when it will serve its new stage."""
        peer = self.peers[move.peer]
        assert peer.stages == (move.from_stage,)
        mover = replace(peer, moved_s=now_s, left_stage=move.from_stage, second=None, fetching=None)
        if move.download_s == 0.0:
            self._put(replace(mover, stages=(move.to_stage,)))
        else:
            self._put(
                replace(
                    mover,
                    stages=peer.stages if move.keeps_serving else (),
                    arriving=move.to_stage,
                    arrives_s=now_s + move.download_s,
                )
            )
        return now_s + move.download_s

    def arrive(self, name: str, now_s: float) -> list[str]:
        """Its download should be done. Who serves another stage from now on: it, and who waited for
        it, or nobody where it has gone, that was another download, or its own stage has nobody else
        yet. (A real peer serves both stages while it waits.)"""
        peer = self.peers.get(name)
        if peer is None or peer.arriving is None or peer.arrives_s > now_s:
            return []
        self._waiting = {each for each in self._waiting if each in self.peers} | {name}
        going = {each: self.peers[each] for each in sorted(self._waiting)}
        while last := next((p for p in going.values() if self._empties(p, going.values())), None):
            del going[last.peer]
        for peer in going.values():
            assert peer.arriving is not None
            self._put(replace(peer, stages=(peer.arriving,), arriving=None))
        self._waiting -= set(going)
        return list(going)

    def _empties(self, peer: PeerLoad, going: Collection[PeerLoad]) -> bool:
        """Whether its stage would have nobody once all these have gone to theirs."""
        if not peer.stages:
            return False
        [stage] = peer.stages
        leave = sum(each.stages == (stage,) for each in going)
        come = sum(each.arriving == stage for each in going)
        return self.serving[stage] - leave + come < 1

    def begin_second(self, order: Second, now_s: float) -> float:
        """It begins to fetch a second stage; returns when it will hold it."""
        peer = self.peers[order.peer]
        download_s = self._bare.download_s(peer, order.stage)
        self._put(replace(peer, fetching=order.stage, arrives_s=now_s + download_s))
        return now_s + download_s

    def hold_second(self, name: str, now_s: float) -> int | None:
        """Its second stage should be there: which; None if it has gone or moves."""
        peer = self.peers.get(name)
        if peer is None or peer.fetching is None or peer.arrives_s > now_s:
            return None
        self._put(replace(peer, second=peer.fetching, fetching=None))
        return peer.fetching

    def give_notice(self, name: str, leaves_s: float) -> None:
        peer = self.peers.get(name)
        if peer is not None:
            self._put(replace(peer, leaves_s=leaves_s))

    def set_speed(self, name: str, speed: float) -> None:
        peer = self.peers.get(name)
        if peer is not None:
            self._put(replace(peer, speed=speed))

    def remove(self, name: str) -> PeerLoad | None:
        """It is gone."""
        peer = self.peers.get(name)
        if peer is not None:
            self._count(peer, -1)
            del self.peers[name]
            self.changes += 1
            self._flow = None
        return peer

    def rate(self, peer: PeerLoad, stage: int) -> float:
        return (peer.speed or 0.0) / self.needs[stage].cost

    def _put(self, peer: PeerLoad) -> None:
        old = self.peers.get(peer.peer)
        if old is not None:
            self._count(old, -1)
        self.peers[peer.peer] = peer
        self._count(peer, 1)
        self.changes += 1
        self._flow = None

    def _count(self, peer: PeerLoad, sign: int) -> None:
        for stage in peer.stages:
            self._add(self.present, self.serving, stage, sign, self.rate(peer, stage))
        if peer.second is not None:
            assert peer.second == next_stage(peer.stages[0], len(self.needs))
            self._add(self.linked, self.links, peer.stages[0], sign, peer.speed or 0.0)
        if math.isinf(peer.leaves_s):
            settled: Iterable[int] = peer.stages if peer.arriving is None else (peer.arriving,)
            for stage in settled:
                self._add(self.settled, self.expected, stage, sign, self.rate(peer, stage))

    @staticmethod
    def _add(rates: list[float], counts: list[int], stage: int, sign: int, rate: float) -> None:
        counts[stage] += sign
        rates[stage] = rates[stage] + sign * rate if counts[stage] else 0.0  # no rounding is left
