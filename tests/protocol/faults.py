"""What can happen to a simulated swarm, as data, and how each of it is done.

A `Fault` says when (the so-manyth time that somebody passes a point of the protocol, or at a moment
of virtual time), to whom, and what. It strikes only where it is survivable by design: without
checkpoints, what takes the newest state of a stage with it is held back until another replica has
that state. So a fault may never fire; `Swarm.fired` holds those that did.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from peer.stage_server import StageServer
from swarm.compute import Kind
from swarm.stage_state import StageState

if TYPE_CHECKING:
    from tests.protocol.simulated import Swarm

LEADER = "leader"  # whichever trainer leads; the only one's name in a run with one trainer
MOVER = "mover"  # the process that was ordered to move, or has moved, last
DURATION_S = 20.0  # of a fault that has a duration and does not say which


@dataclass(frozen=True)
class Fault:
    """`action` strikes `victim` (None: whoever passes) at the `count`-th time that `replica` (None:
    anybody) passes `point` (of `step`, if given), or at `at_s`. For `duration_s` where that has a
    meaning; `other` is the other side of what happens between two; the actions are those of
    `ACTIONS` below. `other` None is a random one where two are needed, everybody where not."""

    point: str
    action: str
    replica: str | None = None
    step: int | None = None
    count: int = 1
    duration_s: float = 0.0
    victim: str | None = None
    stage: int | None = None
    other: str | None = None
    at_s: float | None = None
    late_s: float = 0.0
    side: tuple[str, ...] = ()


def can_strike(swarm: Swarm, fault: Fault, who: str) -> bool:
    if fault.action == "start":
        return who not in swarm.processes
    if who in swarm.network.frozen and fault.action != "kill":
        return False
    if fault.action == "disk_full":
        return who in swarm.trainers
    if who in swarm.trainers:
        return fault.action not in ("raise", "nan", "leave", "cut_leader")
    replicas = swarm.replicas_of(who)
    if not replicas:
        return False
    if fault.action == "nan":
        return replicas[0].server is not None
    if fault.action in ("kill", "leave") or (fault.action == "raise" and _kind(fault) is UPDATE):
        if fault.action != "raise" and not fault.duration_s and swarm.nobody_else_comes(who):
            return False
        survives = swarm.checkpoints is not None and fault.action != "leave"
        return who not in swarm.leaving and (survives or swarm.chronicle.can_lose(who))
    return True


def _kill(swarm: Swarm, fault: Fault, who: str) -> None:
    """As kill -9. After `duration_s`, if any, a replica comes back empty; a trainer with its disk,
    after a second at least."""
    if who in swarm.trainers:
        # Not inside the probe of the process that dies.
        swarm.later(0.0, swarm.kill_trainer, who, fault.duration_s or 1.0)
        return
    swarm.kill(who)
    if fault.duration_s:
        stage = int(who[1 : who.index(".")])
        swarm.later(fault.duration_s, swarm.restart, who, stage)


def _freeze(swarm: Swarm, fault: Fault, who: str) -> None:
    """As SIGSTOP, then SIGCONT."""
    swarm.freeze(who)
    swarm.later(fault.duration_s or DURATION_S, swarm.thaw, who)


def _start(swarm: Swarm, fault: Fault, who: str) -> None:
    """A new replica joins: of `stage`, or where it is sent."""
    swarm.start_replica(who, fault.stage)


def _leave(swarm: Swarm, fault: Fault, who: str) -> None:
    """As the first SIGTERM; comes back empty after `duration_s`, if any."""
    swarm.leave(who, fault.duration_s)


def _raise(swarm: Swarm, fault: Fault, who: str) -> None:
    """Its next kernel of the kind that belongs to the point raises. An update may come later, when
    nobody else has the state."""
    compute, kind = swarm.computes[who], _kind(fault)
    compute.failing[kind] += 1
    if kind is UPDATE and swarm.checkpoints is None:
        spare = swarm.chronicle.can_spare_now
        compute.may_fail = lambda kind: kind is not UPDATE or spare(who)


def _nan(swarm: Swarm, fault: Fault, who: str) -> None:
    """A kernel of its gives what is no number, once: which one follows from the point."""
    member = swarm.replicas_of(who)[0]
    assert member.server is not None
    if fault.point == "backward":
        spoil_gradients(member.server)
    elif fault.point == "counted":
        spoil_sum(member.server.state.waiting(1))
    else:
        spoil_forward(member.server.state.waiting(1))


def spoil_forward(state: StageState) -> None:
    """Its next forward gives NaN."""

    def spoil(module: object, arguments: object, outputs: tuple[Tensor, ...]) -> Any:
        handle.remove()
        return tuple(output * math.nan for output in outputs)

    handle = state.stage.register_forward_hook(spoil)


def spoil_gradients(server: StageServer) -> None:
    """The backward of whatever has its forward behind it gives NaN, inside and to the stage
    before."""
    for work in server.parts.kept.works.values():
        if work.graph is not None:
            work.graph.outputs[0].register_hook(lambda gradient: gradient * math.nan)
            return


def spoil_sum(state: StageState) -> None:
    """The next backward gives NaN for one parameter, and numbers to the stage before."""

    def spoil(gradient: Tensor) -> Tensor:
        handle.remove()
        return gradient * math.nan

    handle = next(state.stage.parameters()).register_hook(spoil)


UPDATE = Kind.UPDATE


def _kind(fault: Fault) -> Kind:
    kinds = {"backward": Kind.BACKWARD, "average": UPDATE, "commit": UPDATE}
    return kinds.get(fault.point, Kind.FORWARD)


def _others(swarm: Swarm, fault: Fault, who: str) -> list[str]:
    """`other`, or everybody."""
    if fault.other is not None:
        return [swarm.name_of(fault.other)]
    return [name for name in (*swarm.trainers, *swarm.processes) if name != who]


def _other(swarm: Swarm, fault: Fault, who: str) -> str | None:
    """Who stands at the other side of what happens between two."""
    if fault.other is not None:
        return swarm.name_of(fault.other)
    others = [name for name in swarm.processes if name != who]
    return swarm.random.choice(others) if others else None


def _cut(swarm: Swarm, fault: Fault, who: str) -> None:
    """Silence between two, in both directions; their streams stay open."""
    if (other := _other(swarm, fault, who)) is not None:
        swarm.network.cut(who, other)
        swarm.later(fault.duration_s or DURATION_S, swarm.network.heal, who, other)


def _cut_leader(swarm: Swarm, fault: Fault, who: str) -> None:
    leader = swarm.name_of(LEADER)
    swarm.network.cut(who, leader)
    swarm.later(fault.duration_s or DURATION_S, swarm.network.heal, who, leader)


def _partition(swarm: Swarm, fault: Fault, who: str) -> None:
    """Silence between those of `side` and everybody else."""
    side = {swarm.name_of(name) for name in fault.side}
    for left in sorted(side):
        for right in [*swarm.trainers, *swarm.processes]:
            if right not in side:
                swarm.network.cut(left, right)
                swarm.later(fault.duration_s or DURATION_S, swarm.network.heal, left, right)


def _deaf(swarm: Swarm, fault: Fault, who: str) -> None:
    """It does not hear `other`, which hears it."""
    if (other := _other(swarm, fault, who)) is not None:
        swarm.network.deafen(other, who)
        swarm.later(fault.duration_s or DURATION_S, swarm.network.undeafen, other, who)


def _lose(swarm: Swarm, fault: Fault, who: str) -> None:
    """What it sends to `other`, or to anybody, is lost, then the connection ends: orders are
    carried out whose answers are lost, and given again over another connection."""
    for other in _others(swarm, fault, who):
        swarm.network.lose(who, other)
        swarm.later(fault.duration_s or 0.5, swarm.network.stop_losing, who, other)


def _late(swarm: Swarm, fault: Fault, who: str) -> None:
    """Its streams are late, each by a time of its own."""
    for other in [*swarm.trainers, *swarm.processes]:
        if other != who:
            swarm.network.delay(who, other, fault.late_s)
            swarm.later(fault.duration_s or DURATION_S, swarm.network.delay, who, other, 0.0)


def _sever(swarm: Swarm, fault: Fault, who: str) -> None:
    """Its connection with `other`, or with everybody, ends; what it had sent arrives later, perhaps
    after what it sends over the next one."""
    for other in _others(swarm, fault, who):
        swarm.network.sever(who, other, fault.late_s)


def _reset(swarm: Swarm, fault: Fault, who: str) -> None:
    """All its connections end."""
    for stream in list(swarm.network.transports[who].streams):
        stream.abort()


def _corrupt(swarm: Swarm, fault: Fault, who: str) -> None:
    """One bit of what it sends next to `other`, or to each, is wrong."""
    for other in _others(swarm, fault, who):
        swarm.network.spoil(who, other)


def _disk_full(swarm: Swarm, fault: Fault, who: str) -> None:
    """It cannot write its vote; if it leads, its process ends, and is started again."""
    disk = swarm.disks[who]
    disk.full = True
    swarm.later(fault.duration_s or DURATION_S, setattr, disk, "full", False)


ACTIONS: dict[str, Callable[[Swarm, Fault, str], None]] = {
    "kill": _kill,
    "freeze": _freeze,
    "start": _start,
    "leave": _leave,
    "raise": _raise,
    "nan": _nan,
    "cut": _cut,
    "cut_leader": _cut_leader,
    "partition": _partition,
    "deaf": _deaf,
    "lose": _lose,
    "late": _late,
    "sever": _sever,
    "reset": _reset,
    "corrupt": _corrupt,
    "disk_full": _disk_full,
}


class Faults:
    """Watches a swarm, and strikes when a fault's time has come."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self._passes: dict[int, int] = {}
        self._done: set[int] = set()

    def begin(self) -> None:
        """At the beginning of the run: those that have a moment wait for it."""
        for number, fault in enumerate(self.swarm.faults):
            if fault.at_s is not None:
                self.swarm.later(fault.at_s, self._at, number, fault)

    def _at(self, number: int, fault: Fault) -> None:
        """Struck now or, where that is not possible yet, a little later."""
        if not self._strike(number, fault, None) and not self.swarm.over:
            self.swarm.later(0.25, self._at, number, fault)

    def passed(self, who: str, point: str, step: int | None) -> None:
        for number, fault in enumerate(self.swarm.faults):
            if fault.point != point or number in self._done or fault.at_s is not None:
                continue
            if fault.replica not in (None, who) or fault.step not in (None, step):
                continue
            passes = self._passes[number] = self._passes.get(number, 0) + 1
            if passes >= fault.count:
                self._strike(number, fault, who)

    def _strike(self, number: int, fault: Fault, who: str | None) -> bool:
        swarm = self.swarm
        struck = swarm.name_of(fault.victim or who or LEADER)
        if not can_strike(swarm, fault, struck):
            return False
        self._done.add(number)
        swarm.fired.append(fault)
        now = asyncio.get_running_loop().time()
        swarm.events.append((now, struck, "fault", {"action": fault.action}))
        ACTIONS[fault.action](swarm, fault, struck)
        return True
