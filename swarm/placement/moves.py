"""Who moves where, and whether it pays.

Throughput is that of the slowest stage, so a plan raises the slowest stage again and again, each
time by the move that leaves the two stages it touches best off, or by the exchange of two peers
where no single move helps. It works on the *settled* table (everything under way has arrived), so
nothing is moved for a gap that a joiner is about to fill. Of that list it takes the first so many
moves whose gain over the movers' expected lifetime, less what is lost while they download, is
largest. A failed region is one plan with many moves.

What may never happen: a stage left to peers that do not serve it yet; a stage on a device it does
not fit; a move of a pinned peer, of one under way, of one that has said it goes; a second move
within the hysteresis time, except to a stage that nobody serves, and then not back to the stage it
left.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.placement.sketch import Move, MovePolicy, Sketch
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


def plan_moves(table: LoadTable, now_s: float, policy: MovePolicy | None = None) -> Plan:
    """The moves to begin now, in order; none when nothing pays.

    Deterministic: peers count in order of their names, not of the table. Carried out, and nothing
    changed, the next plan is empty. O(peers + moves x (peers + stages)).
    """
    policy = policy or MovePolicy()
    sketch = Sketch(table, now_s, policy)
    before, present = sketch.throughput()
    moves: list[Move] = []
    stops = [_Stop(0, before, present, 0.0, 0.0)]
    horizon_s, wait_s, effort, insured = policy.horizon_s, 0.0, 0.0, 0.0
    blocked = ""
    for _ in sketch.peers:
        to = sketch.slowest()
        step = sketch.best_step(to)
        if not step:
            blocked = f"nobody can be spared for stage {to}, the slowest"
            break
        for at, where in step:
            horizon_s = min(horizon_s, sketch.peers[at].lifetime_s)
            effort += policy.effort * float(sketch.own[at]) * sketch.download_s(at, where)
            insured += sketch.insurance(at, where)
            moves.append(sketch.apply(at, where))
            wait_s = max(wait_s, moves[-1].download_s)
        after, during = sketch.throughput()
        net = (after - before) * max(0.0, horizon_s - wait_s)
        net -= max(0.0, present - during) * wait_s + effort
        stops.append(_Stop(len(moves), after, during, net + insured, insured))
    paying = [s for s in stops if s.insured > 0 or s.after - before > policy.min_gain * before]
    best = max(paying, key=lambda stop: (stop.net, -stop.count), default=stops[0])
    if best.net <= 0:
        why = blocked if len(stops) == 1 and blocked else "no move gains enough"
        return Plan((), before, before, present, why)
    return Plan(
        tuple(moves[: best.count]),
        before,
        best.after,
        best.during,
        f"{before:.3g} -> {best.after:.3g} microbatches/s"
        if best.after > before
        else "spare replicas are spread, so that the loss of one costs less",
    )
