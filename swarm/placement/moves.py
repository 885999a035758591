"""Who moves where, and whether it pays.

Throughput is that of the slowest stage, so a plan raises the slowest stage again and again, each
time by the move that leaves the two stages it touches best off, or by the exchange of two peers
where no single move helps. It works on the *settled* table (everything under way has arrived), so
nothing is moved for a gap that a joiner is about to fill. Of that list it takes the first so many
moves whose gain over the movers' expected lifetime, less what is lost while they download, is
largest. A failed region is one plan with many moves. In a small swarm all assignments are tried as
well (`small`), and taken if that brings more.

What may never happen: a stage left to peers that do not serve it yet (the last one of a stage may
only go if somebody comes and its memory holds both stages; it then serves the old one until the
other has arrived, which the leader sees to); a stage on a device it does
not fit; a move of a pinned peer, of one under way, of one that has said it goes; a second move
within the hysteresis time, except to a stage that nobody serves, and then not back to the stage it
left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.placement.sketch import Move, MovePolicy, Sketch
from swarm.placement.small import best_moves, is_small
from swarm.placement.table import LoadTable


@dataclass(frozen=True, slots=True)
class Plan:
    """`before`, `after`: throughput in microbatches/s without and with the moves, everything under
    way settled; `during`: while the movers download."""

    moves: tuple[Move, ...]
    before: float
    after: float
    during: float
    reason: str

    @property
    def gain(self) -> float:
        """Microbatches/s that the moves add."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class _Stop:
    """A possible end of the plan: after the first `count` moves."""

    count: int
    after: float
    during: float
    net: float  # microbatches gained within the horizon, less what the moves cost
    insured: float  # the part of it that pays only if a replica is lost


class _Draft:
    """Moves tried one after the other, and what each possible end would bring."""

    def __init__(self, table: LoadTable, now_s: float, policy: MovePolicy) -> None:
        self.policy = policy
        self.sketch = Sketch(table, now_s, policy)
        self.before, self.present = self.sketch.throughput()
        self.moves: list[Move] = []
        self.stops = [_Stop(0, self.before, self.present, 0.0, 0.0)]
        self.horizon_s, self.wait_s, self.effort, self.insured = policy.horizon_s, 0.0, 0.0, 0.0

    def step(self, moves: Sequence[tuple[int, int]]) -> None:
        """`(peer, stage)` moves that only make sense together."""
        sketch = self.sketch
        touched = [where for _, where in moves]
        before = float(sketch.settled[touched].min())
        for at, where in moves:
            self.horizon_s = min(self.horizon_s, sketch.peers[at].lifetime_s)
            self.effort += self.policy.effort * float(sketch.own[at]) * sketch.download_s(at, where)
            self.insured += sketch.insurance(at, where)
            self.moves.append(sketch.apply(at, where))
            self.wait_s = max(self.wait_s, self.moves[-1].download_s)
        after, during = sketch.throughput()
        if len(moves) > 1:  # what one alone does to its stages would mislead
            now = float(sketch.settled[touched].min())
            why = f"{len(moves)} moves together: their slowest stage {before:.3g} -> {now:.3g}/s"
            done = len(self.moves) - len(moves)
            self.moves[done:] = [replace(move, reason=why) for move in self.moves[done:]]
        net = (after - self.before) * max(0.0, self.horizon_s - self.wait_s)
        net -= max(0.0, self.present - during) * self.wait_s + self.effort
        self.stops.append(_Stop(len(self.moves), after, during, net + self.insured, self.insured))

    @property
    def best(self) -> _Stop:
        """Where to stop."""
        enough = self.policy.min_gain * self.before
        paying = [s for s in self.stops if s.insured > 0 or s.after - self.before > enough]
        return max(paying, key=lambda stop: (stop.net, -stop.count), default=self.stops[0])


def plan_moves(table: LoadTable, now_s: float, policy: MovePolicy | None = None) -> Plan:
    """The moves to begin now, in order; none when nothing pays.

    Deterministic: peers count in order of their names, not of the table. Carried out, and nothing
    changed, the next plan is empty. O(peers + moves x (peers + stages)).
    """
    policy = policy or MovePolicy()
    draft = _Draft(table, now_s, policy)
    blocked = ""
    for _ in draft.sketch.peers:
        to = draft.sketch.slowest()
        step = draft.sketch.best_step(to)
        if not step:
            blocked = f"nobody can be spared for stage {to}, the slowest"
            break
        draft.step(step)
    if is_small(draft.sketch):
        whole = _Draft(table, now_s, policy)
        if moves := best_moves(whole.sketch):
            whole.step(moves)
        if whole.best.net > draft.best.net:
            draft = whole
    best = draft.best
    if best.net <= 0:
        why = blocked if len(draft.stops) == 1 and blocked else "no move gains enough"
        return Plan((), draft.before, draft.before, draft.present, why)
    return Plan(
        tuple(draft.moves[: best.count]),
        draft.before,
        best.after,
        best.during,
        f"{draft.before:.3g} -> {best.after:.3g} microbatches/s"
        if best.after > draft.before
        else "spare replicas are spread, so that the loss of one costs less",
    )
