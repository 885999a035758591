"""Where a joiner goes and who moves: the leader's side of `swarm.placement`.

At every commit the leader draws up what it knows of stages and peers as a `LoadTable`, asks for the
moves that pay, and orders them. A peer may refuse. It is asked no more than that: the replica it
adds elsewhere joins like any other and the one it gives up leaves like any other (`peer.host`), so
a mover that dies, or a leader that is lost half way, costs what any death costs. What is under way
is told by those who are under way: a replica that joins names the one that it replaces, and so the
next leader knows too.

A stage's cost and a peer's speed cannot be told apart from one rate, so peers measure their device
on a reference (`peer.measure`): a stage costs what its most able replicas say, speed over rate, and
what has not been measured costs as much more or less as its layers' shapes tell. A peer's own
speed is then what its rate shows, not what it measured once. What a stage costs does not change: a
replica that takes twice as long as at the commits before has become slow, and its stage no dearer,
even where it is the only one. A leader that has not seen it fast cannot know.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from peer.members import Member, Offer, Standing
from swarm.errors import SwarmError
from swarm.names import brief
from swarm.net.links import peer_of
from swarm.placement import (
    LoadTable,
    Move,
    MovePolicy,
    PeerLoad,
    Placement,
    Second,
    StageNeed,
    choose_stage,
    estimate_memory,
    least_slots,
    optimum,
    plan_moves,
    plan_seconds,
    recut,
)

if TYPE_CHECKING:
    from peer.leader import Leader

log = logging.getLogger(__name__)
RESERVED_S = 600.0  # who is under way counts where it goes for so long, some for longer
REFUSED_S = 300.0  # a peer that refused, or gave a move up, is not asked again before
MOVABLE = (Standing.SERVING, Standing.READY)  # before the first step nobody serves yet
MAX_NEWS = 8  # moves that status shows
SLOWED = 2.0  # a replica that takes so many times what it did says nothing of its stage
ENOUGH = 8  # measurements after which an estimate that was wrong is forgotten
STATE_FLOATS = 3  # parameters and two moments: what a snapshot holds, at most


@dataclass(slots=True)
class _Peer:
    """What outlives a replica of a peer, but not this leader."""

    source: int | None = None  # the stage it left, or is to leave
    target: int | None = None  # the stage it was told to go to and has not reached
    until: float = -math.inf  # for so long it counts there
    pinned_until: float = -math.inf  # it has refused
    fetching: int | None = None  # the second stage it was told to hold
    fetching_until: float = -math.inf
    moved_at: float = -math.inf


@dataclass(slots=True)
class Rebalancing:
    """The placement of a `Leader`'s peers."""

    leader: Leader
    policy: MovePolicy = field(default_factory=MovePolicy)
    news: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _shown: dict[str, float] = field(default_factory=dict)  # cost of its stage, by incarnation
    _reason: str = ""

    # ---- what is known --------------------------------------------------------------------------

    def table(self) -> LoadTable:
        """Stages and peers as they stand. Costs and speeds are in rounds of the reference."""
        now = asyncio.get_running_loop().time()
        by_peer: dict[str, list[Member]] = {}
        for member in self.leader.members:
            by_peer.setdefault(peer_of(member.incarnation), []).append(member)
        needs = tuple(self._need(stage, cost) for stage, cost in enumerate(self._costs()))
        peers = [self._load(name, lives, needs, now) for name, lives in by_peer.items()]
        links = [p.download_bytes_per_s for p in peers if p.download_bytes_per_s < math.inf]
        if links:  # of others as good a guess as any
            usual = statistics.median(links)
            peers = [
                replace(p, download_bytes_per_s=usual) if p.download_bytes_per_s == math.inf else p
                for p in peers
            ]
        return LoadTable(needs, tuple(peers))

    def rate(self, member: Member) -> float | None:
        """Microbatches/s with all of its device's time: measured, or as it estimated itself."""
        service_s = self.leader.router.measured_s(member.incarnation)
        if service_s is None and member.facts is not None:
            service_s = member.facts.service_s
        return 1.0 / service_s if service_s else None

    def _costs(self) -> list[float]:
        """Per stage, rounds of the reference that a microbatch takes."""
        pipeline = self.leader.pipeline
        shapes = [max(pipeline.stage_cost(k), 1e-9) for k in range(pipeline.num_stages)]
        measured: dict[int, float] = {}
        for stage in range(pipeline.num_stages):
            found = sorted(
                self._shown.get(member.incarnation, cost)
                for member in self.leader.members.of_stage(stage)
                if (cost := self._cost(member)) is not None
            )
            if found:  # a device that is slower than it says makes its stage look dear
                measured[stage] = found[(len(found) - 1) // 4]
        ratio = statistics.median(c / shapes[k] for k, c in measured.items()) if measured else 1.0
        return [measured.get(stage, shape * ratio) for stage, shape in enumerate(shapes)]

    def _cost(self, member: Member) -> float | None:
        """Of its stage, as this replica's rate shows it now."""
        rate = self.rate(member)
        return (member.offer.speed or 1.0) / rate if rate is not None else None

    def _remember(self) -> None:
        """What stages cost, at a commit: half of it news, unless somebody has become slow."""
        for member in self.leader.members:
            name, cost = member.incarnation, self._cost(member)
            if cost is not None and self.leader.router.measured_s(name, ENOUGH) is not None:
                before = self._shown.get(name, cost)
                if cost < SLOWED * before:
                    self._shown[name] = (before + cost) / 2

    def _need(self, stage: int, cost: float) -> StageNeed:
        """Its size: the state, and the activations that those who serve it have measured."""
        found = [m.facts for m in self.leader.members.of_stage(stage) if m.facts is not None]
        held = statistics.median(each.activation_bytes for each in found) if found else 0
        parameters = sum(map(math.prod, self.leader.pipeline.layout(stage).shapes))
        settings = self.leader.plan.optimizer
        least = least_slots(self.leader.pipeline.num_stages)  # those who hold more need not
        estimate = estimate_memory(
            parameters,
            optimizer=settings.name if settings is not None else "adamw",
            accumulate=self.leader.plan.accumulate,
            activation_bytes=int(held),
            slots=self.leader.fixed_slots or min(least, self.leader.plan.num_microbatches),
            steps_in_flight=self.leader.plan.ahead.steps_in_flight,
            shared_bytes=self.leader.pipeline.shared_bytes,
        )
        return StageNeed(cost, estimate.total, 4 * STATE_FLOATS * parameters)

    def _load(
        self, name: str, lives: list[Member], needs: tuple[StageNeed, ...], now: float
    ) -> PeerLoad:
        """One peer, all its replicas together."""
        known = self._peers.get(name, _Peer())
        present = [each for each in lives if each.standing is not Standing.JOINING]
        coming = [each for each in lives if each.standing is Standing.JOINING]
        replaced = {each.offer.replaces for each in present}
        # A mover that is the last in the stage it leaves serves both until another comes.
        serving = [
            m
            for m in present
            if (not self.leader.members.may_go(m) if m.incarnation in replaced else not m.leaving)
        ]
        # What a process was told that has ended since, the one after it knows nothing of.
        begun = min(each.joined_at for each in lives) + RESERVED_S
        arriving, until = known.target if known.until >= begun else None, known.until
        second = fetching = None
        if any(not each.offer.second for each in lives):
            extra = [each for each in lives if each.offer.second]
            serving = [each for each in serving if each not in extra]
            coming = [each for each in coming if each not in extra]
            for each in extra:
                if each.standing is Standing.JOINING:
                    fetching = each.stage
                elif not each.leaving:
                    second = each.stage
            if second is None and fetching is None and known.fetching_until >= max(now, begun):
                fetching = known.fetching
        for member in coming:
            if member.offer.replaces or not serving:
                arriving, until = member.stage, self.counts_until(member)
            else:
                serving.append(member)  # a further stage beside those it serves
        offer = lives[-1].offer
        # What it did under this leader, or says it did under an earlier one.
        told = max(lives, key=lambda each: each.joined_at - each.offer.left_ago_s)
        moved_at, left = told.joined_at - told.offer.left_ago_s, told.offer.left_stage
        if known.moved_at >= moved_at:
            moved_at, left = known.moved_at, known.source if known.target is None else None
        rates = {each.stage: rate for each in serving if (rate := self.rate(each)) is not None}
        fetched = [needs[m.stage].download_bytes / m.fetch_s for m in lives if m.fetch_s > 0]
        return PeerLoad(
            name,
            tuple(dict.fromkeys(each.stage for each in serving)),
            arriving=arriving if until > now else None,
            reserved_until_s=until,
            rates=rates,
            speed=None if rates else offer.speed or 1.0,
            memory_bytes=offer.memory_bytes,
            download_bytes_per_s=max(filter(None, fetched), default=math.inf),
            pinned=offer.pinned or known.pinned_until > now,
            moved_s=moved_at,
            left_stage=left,
            leaves_s=now if present and not serving and not coming else math.inf,
            second=second,
            fetching=fetching,
        )

    def counts_until(self, coming: Member) -> float:
        """How long a joiner counts where it goes, whether it gets there or not: since it joined,
        or last had some of a state from here.

        A mover does as long as it and what it replaces are there, for its host ends one that gets
        no further; but a stage that nobody else has a state of is not left to it for ever.
        """
        there = self.leader.members.of_stage(coming.stage)
        others = any(each.standing is not Standing.JOINING for each in there)
        moves = self.leader.members.get(coming.offer.replaces) is not None and not coming.arrived
        since = max(coming.joined_at, coming.fetched_at)
        return math.inf if moves and others else since + RESERVED_S

    # ---- joiners --------------------------------------------------------------------------------

    def place(self, incarnation: str, offer: Offer) -> Placement:
        """The stage of a joiner that leaves it to the leader. From its `join` on it counts there,
        so that many who come at once spread."""
        joiner = PeerLoad(
            peer_of(incarnation), speed=offer.speed or 1.0, memory_bytes=offer.memory_bytes
        )
        return choose_stage(self.table(), joiner, asyncio.get_running_loop().time())

    def admitted(self, member: Member) -> None:
        """A replica takes part from now on. If it came to replace another, that is a move."""
        old, peer = self.leader.members.get(member.offer.replaces), self._of(member.incarnation)
        if member.offer.second:
            peer.fetching, peer.fetching_until = None, -math.inf
            return
        if member.arrived or (old is None and peer.target != member.stage):
            return
        member.arrived = True
        if old is not None:
            peer.source = old.stage
        peer.target, peer.until = None, -math.inf
        peer.moved_at = asyncio.get_running_loop().time()
        source = -1 if peer.source is None else peer.source
        self._tell("moved", member.incarnation, source, member.stage, "")

    def left(self, member: Member) -> None:
        """A replica is gone. If it was to replace one that stays, its move has come to nothing, and
        would again: as who refuses, its peer is not asked for a while."""
        old = self.leader.members.get(member.offer.replaces)
        over = self.leader.admission.finished or (old is not None and old.leaving)
        if old is not None and not member.arrived and not over:
            self._refused(old, member.stage, "it did not get there")

    def _refused(self, mover: Member, stage: int, reason: str, *, also: bool = False) -> None:
        peer = self._of(mover.incarnation)
        if also:
            peer.fetching, peer.fetching_until = None, -math.inf
        else:
            peer.target, peer.until = None, -math.inf
        peer.pinned_until = asyncio.get_running_loop().time() + REFUSED_S
        self._tell("move_refused", mover.incarnation, mover.stage, stage, reason)

    def _of(self, incarnation: str) -> _Peer:
        return self._peers.setdefault(peer_of(incarnation), _Peer())

    # ---- moves ----------------------------------------------------------------------------------

    def consider(self) -> None:
        """Order the moves that pay, if any do."""
        serving = [m for m in self.leader.members if m.standing is Standing.SERVING]
        if any(self.rate(member) is None for member in serving):
            return  # whoever has not been measured yet looks like nobody
        self._remember()
        now, table = asyncio.get_running_loop().time(), self.table()
        self._forget(now)
        plan = plan_moves(table, now, self.policy)
        self._reason = plan.reason
        for move in plan.moves:
            mover = next(
                (
                    each
                    for each in self.leader.members.of_stage(move.from_stage, *MOVABLE)
                    if peer_of(each.incarnation) == move.peer
                ),
                None,
            )
            if mover is not None:
                peer = self._of(mover.incarnation)
                peer.source, peer.target = move.from_stage, move.to_stage
                peer.until = now + RESERVED_S
                need = table.stages[move.to_stage].memory_bytes
                self.leader.tasks.spawn(self._order(mover, move, need), "move")
        if not plan.moves:
            for order in plan_seconds(table, self.policy.second_share):
                self._order_second(order, table, now)

    def _order_second(self, order: Second, table: LoadTable, now: float) -> None:
        lives = [m for m in self.leader.members if peer_of(m.incarnation) == order.peer]
        if any(each.stage == order.stage for each in lives):
            return  # it has come from there, and not left yet
        for member in lives:
            if member.standing is Standing.SERVING and not member.leaving:
                peer = self._of(member.incarnation)
                peer.fetching, peer.fetching_until = order.stage, now + RESERVED_S
                need = table.stages[order.stage].memory_bytes
                self.leader.tasks.spawn(self._order(member, order, need), "second stage")
                return

    def _forget(self, now: float) -> None:
        """Peers that are gone, once what is remembered of them has no effect any more."""
        lives = {member.incarnation for member in self.leader.members}
        self._shown = {name: cost for name, cost in self._shown.items() if name in lives}
        present = {peer_of(incarnation) for incarnation in lives}
        for name, peer in list(self._peers.items()):
            rests_until = peer.moved_at + self.policy.hysteresis_s
            last = max(peer.until, peer.pinned_until, peer.fetching_until, rests_until)
            if name not in present and last < now:
                del self._peers[name]

    async def _order(self, mover: Member, order: Move | Second, memory_bytes: int) -> None:
        leader, refusal = self.leader, ""
        also = isinstance(order, Second)
        stage = order.stage if isinstance(order, Second) else order.to_stage
        body = {
            "term": list(leader.term),
            "stage": stage,
            "reason": order.reason,
            "beside": isinstance(order, Second) or order.keeps_serving,
            "also": also,
            "memory_bytes": memory_bytes,
        }
        try:
            channel = leader.links.open_channel(mover.incarnation)
            if channel is None:
                return
            answer = await leader.watch.ask(channel, "move", body)
            refusal = brief(str(answer.get("refusal", "")))
        except SwarmError as error:
            refusal = brief(str(error))
        if refusal:
            self._refused(mover, stage, refusal, also=also)
        else:
            what = "second" if also else "move"
            self._tell(what, mover.incarnation, mover.stage, stage, order.reason)

    def _tell(self, what: str, replica: str, source: int, target: int, reason: str) -> None:
        self.leader.probe(what, replica=replica, source=source, target=target, reason=reason)
        facts = {"what": what, "replica": replica, "from": source, "to": target}
        self.news.append({**facts, "reason": reason, "step": self.leader.next_step})

    # ---- for people -----------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """For status: rates per stage, what the best assignment and another cut could reach, and
        where one more peer like the others would go."""
        pipeline = self.leader.pipeline
        now, table = asyncio.get_running_loop().time(), self.table()
        speeds = [table.speed(peer) for peer in table.peers]
        costs = [need.cost for need in table.stages]
        layers = [float(each) for each in pipeline.layer_costs]
        scaled = [
            cost * each / max(sum(part), 1e-9)
            for cost, part in zip(costs, _parts(layers, pipeline.cut), strict=True)
            for each in part
        ]
        cut = recut(scaled, pipeline.cut, table, now, pipeline.latest_boundary)
        usual = statistics.median([each for each in speeds if each > 0] or [1.0])
        missed = choose_stage(table, PeerLoad("", speed=usual), now)
        return {
            "stages": [round(each, 4) for each in table.present_rates(now)],
            "best": round(optimum(costs, speeds), 4),
            "plan": self._reason,
            "recut": {"cut": list(cut.cut), "gain": round(cut.gain, 4), "reason": cut.reason},
            "help": {"stage": missed.stage, "reason": missed.reason},
            "moves": list(self.news),
        }


def _parts(layers: list[float], cut: tuple[int, ...]) -> list[list[float]]:
    parts, start = [], 0
    for count in cut:
        parts.append(layers[start : start + count])
        start += count
    return parts
