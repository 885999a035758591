"""What is compared in a simulation: doing nothing, the paper's rule, and this project's planner.

A policy says where a joiner goes, and at its ticks who moves. All see the same roster.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal, Protocol

from swarm.placement import Move, MovePolicy, PeerLoad, Second, plan_moves, plan_seconds
from swarm.placement.joining import choose_among
from swarm.sim.roster import Roster

Joiners = Literal["slowest", "random"]


class Policy(Protocol):
    """`every_s`: seconds between ticks; None: it never moves anybody."""

    name: str
    every_s: float | None

    def stage_of(self, roster: Roster, joiner: PeerLoad) -> int | None:
        """Where a joiner goes; None where it fits nowhere."""
        ...

    def moves(self, roster: Roster, now_s: float) -> Sequence[Move]:
        """Who begins to move now."""
        ...

    def seconds(self, roster: Roster) -> Sequence[Second]:
        """Who begins to fetch a second stage now."""
        ...


class Nothing:
    """Nobody moves. A joiner takes the slowest stage, those under way counted, or a random one."""

    every_s: float | None = None

    def __init__(self, joiners: Joiners = "slowest", seed: int = 0) -> None:
        self.name = "none"
        self.joiners = joiners
        self._draw = random.Random(f"joiners/{seed}")

    def stage_of(self, roster: Roster, joiner: PeerLoad) -> int | None:
        if self.joiners == "random":
            fitting = [s for s in range(len(roster.needs)) if roster.bare.fits(joiner, s)]
            return self._draw.choice(fitting) if fitting else None
        return choose_among(roster.bare, joiner, roster.settled, roster.expected).stage

    def moves(self, roster: Roster, now_s: float) -> Sequence[Move]:
        return ()

    def seconds(self, roster: Roster) -> Sequence[Second]:
        return ()


class PaperRule(Nothing):
    """SWARM (arXiv 2301.11913, section 3.2): every T seconds the replica with the smallest queue in
    the least loaded stage moves to the most loaded one.

    A stage's load is the swarm's rate over its own. Queues are not simulated where rates are; the
    replica is the fastest of its stage (its queue is the shortest), the first by name of several.
    Two liberties make the rule stronger than its letter: it counts those under way to a stage, so
    it does not send one peer after another to the same gap while the first still downloads; and it
    leaves a peer where it is when the stage it would leave became as slow as the one it would help.
    `keeps_serving` is a third: as in `MovePolicy`.
    """

    def __init__(
        self,
        every_s: float,
        joiners: Joiners = "slowest",
        seed: int = 0,
        *,
        keeps_serving: bool = False,
    ) -> None:
        super().__init__(joiners, seed)
        self.name = f"paper, T={every_s:g} s"
        self.every_s = every_s
        self.keeps_serving = keeps_serving

    def moves(self, roster: Roster, now_s: float) -> Sequence[Move]:
        stages = range(len(roster.needs))
        to = min(stages, key=roster.settled.__getitem__)
        origin = max(stages, key=roster.settled.__getitem__)
        if roster.serving[origin] < 2:
            return ()
        candidates = [
            peer
            for peer in roster.peers.values()
            if peer.stages == (origin,) and peer.arriving is None and roster.bare.fits(peer, to)
        ]
        if not candidates:
            return ()
        peer = min(candidates, key=lambda each: (-(each.speed or 0.0), each.peer))
        if roster.settled[origin] - roster.rate(peer, origin) <= roster.settled[to] * (1 + 1e-9):
            return ()
        return (
            Move(
                peer.peer,
                origin,
                to,
                roster.bare.download_s(peer, to),
                self.keeps_serving and roster.bare.fits(peer, origin, to),
                f"stage {to} is the most loaded, {origin} the least",
            ),
        )


class Planner:
    """The functions of `swarm.placement`, as a leader runs them."""

    def __init__(self, every_s: float = 30.0, policy: MovePolicy | None = None) -> None:
        self.every_s: float | None = every_s
        self.policy = policy or MovePolicy()
        share = self.policy.second_share
        self.name = f"planner, {share:.0%} hold two" if share else "planner"
        self._seen = self._seen_seconds = -1
        self._rests_until_s = 0.0

    def stage_of(self, roster: Roster, joiner: PeerLoad) -> int | None:
        return choose_among(roster.bare, joiner, roster.settled, roster.expected).stage

    def moves(self, roster: Roster, now_s: float) -> Sequence[Move]:
        if roster.changes == self._seen and now_s < self._rests_until_s:
            return ()  # the same table gives the same plan, until somebody's rest is over
        plan = plan_moves(roster.table, now_s, self.policy)
        self._seen = roster.changes + len(plan.moves)
        rested = (p.moved_s + self.policy.hysteresis_s for p in roster.peers.values())
        self._rests_until_s = min((at for at in rested if at > now_s), default=math.inf)
        if plan.moves:
            self._rests_until_s = min(self._rests_until_s, now_s + self.policy.hysteresis_s)
        return plan.moves

    def seconds(self, roster: Roster) -> Sequence[Second]:
        share = self.policy.second_share
        if not share or roster.changes == self._seen_seconds:
            return ()
        orders = plan_seconds(roster.table, share)
        self._seen_seconds = roster.changes + len(orders)
        return orders
