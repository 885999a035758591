"""Which faults strike a swarm, and when: a schedule from a seed, and who is hit. Pure.

The schedule is drawn before the swarm starts and does not depend on it, so one seed is one attack.
*Who* is hit depends on who is there: each fault brings a number that picks one of those that may be
hit at that moment (`victim`). A stage always keeps a replica that holds its state; without one a
run can only go back to a checkpoint, which is another question than the one asked here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

CALM_S, CALM_SHARE = 10.0, 0.05
SILENCE_S = 5.0  # frozen for less than this, a peer is not given up (swarm.net.channel)


class Kind(StrEnum):
    KILL = "kill"  # kill -9; another peer joins later
    FREEZE = "freeze"  # SIGSTOP, SIGCONT before the silence limit
    FREEZE_LONG = "freeze_long"  # SIGSTOP, SIGCONT after it
    LEAVE = "leave"  # SIGTERM; another peer joins later
    LEADER_KILL = "leader_kill"  # kill -9; started again with its disk
    LEADER_LEAVE = "leader_leave"  # SIGTERM; started again with its disk
    LEADER_FREEZE = "leader_freeze"
    LEADER_FREEZE_LONG = "leader_freeze_long"
    BOTH_KILL = "leader_and_peer_kill"  # at the same moment


OF_LEADER = frozenset(
    {Kind.LEADER_KILL, Kind.LEADER_LEAVE, Kind.LEADER_FREEZE, Kind.LEADER_FREEZE_LONG}
)
ENDS_LEADER = frozenset({Kind.LEADER_KILL, Kind.LEADER_LEAVE, Kind.BOTH_KILL})
ENDS_PEER = frozenset({Kind.KILL, Kind.LEAVE, Kind.BOTH_KILL})
WEIGHTS = {
    Kind.KILL: 8,
    Kind.FREEZE: 4,
    Kind.FREEZE_LONG: 3,
    Kind.LEAVE: 4,
    Kind.LEADER_KILL: 2,
    Kind.LEADER_LEAVE: 1,
    Kind.LEADER_FREEZE: 2,
    Kind.LEADER_FREEZE_LONG: 1,
    Kind.BOTH_KILL: 1,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`pick` in [0, 1) chooses the victim. `hold_s`: how long it is frozen, or gone."""

    at_s: float
    kind: Kind
    pick: float
    hold_s: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer as the supervisor sees it. `holds`: it takes part, at the step being trained."""

    name: str
    stage: int
    holds: bool
    protected: bool = False  # may be frozen, but must not end


def calm(seconds: float) -> float:
    """How long a run of `seconds` is left alone at its beginning, and at its end: 5 %, 10 s at the
    least."""
    return max(CALM_S, CALM_SHARE * seconds)


def schedule(seed: int, seconds: float, every_s: float) -> list[Fault]:
    """Faults about every `every_s` of a run of `seconds`, between its calm ends. In its second half
    the leader is only frozen: how its memory grows can be seen of a long life only."""
    draw = random.Random(f"chaos/{seed}")
    faults = []
    at = calm(seconds)
    end_s = seconds - at
    while at < end_s:
        at_s = at + every_s * draw.uniform(0.0, 0.6)
        kind = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind in ENDS_LEADER and at_s >= seconds / 2:
            kind = Kind.KILL if kind is Kind.BOTH_KILL else Kind.LEADER_FREEZE
        if kind in (Kind.FREEZE, Kind.LEADER_FREEZE):
            hold_s = draw.uniform(0.5, SILENCE_S - 1.5)
        elif kind in (Kind.FREEZE_LONG, Kind.LEADER_FREEZE_LONG):
            hold_s = draw.uniform(SILENCE_S + 1.0, SILENCE_S + 4.0)
        else:
            hold_s = draw.uniform(0.5, 4.0)
        faults.append(Fault(at_s, kind, draw.random(), hold_s))
        at += every_s
    return [fault for fault in faults if fault.at_s < end_s]


def victim(fault: Fault, candidates: Iterable[Candidate]) -> tuple[str | None, str]:
    """Whom this fault strikes, and why nobody if nobody may be struck now."""
    if fault.kind in OF_LEADER:
        return None, "it strikes the leader"
    present = sorted(candidates, key=lambda each: each.name)
    allowed = [each for each in present if _may_be_struck(each, present, fault.kind)]
    if not allowed:
        return None, "every stage needs whom it has"
    chosen = allowed[int(fault.pick * len(allowed))]
    return chosen.name, f"stage {chosen.stage} keeps another"


def _may_be_struck(who: Candidate, all_of_them: Sequence[Candidate], kind: Kind) -> bool:
    if not who.holds or (who.protected and kind in ENDS_PEER):
        return False
    return any(
        other.holds and other.stage == who.stage and other.name != who.name for other in all_of_them
    )
