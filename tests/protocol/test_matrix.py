"""Every kind of fault at every moment of a replica's work: same bits, and only its stage computes
again.

Each case checks that its victim was where the case says when it was struck, that the run ends with
the baseline's bits, and that in the other stages every microbatch was computed exactly once: what
the survivors keep (DESIGN, I1) makes a replay cost the lost stage alone.

A full disk has moments of its own, those in which a trainer writes its vote: a replica writes
nothing once it has its identity (the link it may not be able to remember is a convenience).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from peer.member import Member
from swarm.compute import Kind
from swarm.consensus import Vote
from swarm.ledger import Phase
from swarm.net.channel import Method
from tests.protocol.faults import ACTIONS, spoil_forward, spoil_gradients, spoil_sum
from tests.protocol.simulated import LEADER, Fault, Swarm, baseline, plan

MICROBATCHES, STEPS, STRUCK_STEP = 8, 4, 1
JOINING_STEP = 2  # too late to begin with the first weights
STAGE = 1  # whose `r1.1` is struck, if nothing else is said
AWAY_S = 20.0


class Struck(Swarm):
    """Strikes the second replica of `stage` (or a joiner, or a donor) once, at `moment`."""

    def __init__(self, moment: str, fault: str, stage: int = STAGE, **more: Any) -> None:
        joins = [Fault("forward", "start", step=JOINING_STEP, victim="r1.2", stage=STAGE)]
        super().__init__(
            plan=plan(MICROBATCHES, STEPS),
            faults=joins if moment in ("snapshot", "joining") else [],
            seconds=(0.05, 0.1),
            **more,
        )
        self.moment, self.fault, self.victim = moment, fault, f"r{stage}.1"
        self.struck: tuple[str, str] | None = None  # whom, and where it was
        self.departures: list[asyncio.Task[None]] = []
        self.computed: dict[str, set[tuple[int, int]]] = {}  # microbatches, by whom

    # ---- when -----------------------------------------------------------------------------------

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if point == "forward":
            self.computed.setdefault(who, set()).add((facts["step"], facts["index"]))
        if who != self.victim or facts.get("step") != STRUCK_STEP or self.struck is not None:
            return
        now = {
            ("queued", "forward"): 0.0,
            ("in forward", "forward"): 0.02,  # of the 0.04 s that a kernel takes at least
            ("waiting downstream", "sent"): 0.01,
            ("in backward", "backward"): 0.05,
            ("averaging", "average"): 0.0,
            ("prepared", "prepared"): 0.0,
            ("committing", "commit"): 0.0,
        }.get((self.moment, point))
        if now is not None:
            later = asyncio.get_running_loop().call_later
            later(now, self.hit_if_there, who, facts.get("index"))

    def start_replica(self, name: str, stage: int | None) -> Member:
        """A donor or a joiner is struck when the donor is asked for the first chunk."""
        member = super().start_replica(name, stage)
        if self.moment in ("snapshot", "joining"):
            methods = member.links.methods

            class Asked(dict[str, Method]):
                def get(inner, key: str, default: Any = None) -> Any:
                    if key == "chunk" and self.struck is None and "r1.2" in self.members:
                        self.hit(name if self.moment == "snapshot" else "r1.2", self.moment)
                    return dict.get(inner, key, default)

            member.links.methods = Asked(methods)
        return member

    def hit_if_there(self, who: str, index: int | None) -> None:
        if self.struck is None and who in self.members:
            where = self.where(self.members[who], index)
            if where == self.moment:
                self.hit(who, where)

    def where(self, member: Member, index: int | None) -> str:
        """What a replica does at this moment, by its own state."""
        server, commits = member.server, member.commits
        assert server is not None
        assert commits is not None
        if index is not None:
            entry = server.parts.ledger.entries.get(index)
            work = server.parts.kept.works.get(index)
            if entry is None or work is None:
                return "gone"
            running = self.computes[self.victim]._busy and not self.computes[self.victim]._queue
            match entry.phase:
                case Phase.FORWARD:
                    return "in forward" if running else "queued"
                case Phase.WAITING:
                    return "waiting downstream"
                case Phase.BACKWARD:
                    return "in backward"
            return "counted"
        if commits.lock.locked():
            return "committing"
        if commits.prepared is not None:
            return "prepared"
        return "averaging" if server.parts.ledger.frozen_attempt is not None else "elsewhere"

    async def depart(self, who: str) -> None:
        await self.members[who].drain(30.0)
        self.kill(who)  # its process ends

    # ---- what -----------------------------------------------------------------------------------

    def hit(self, who: str, where: str) -> None:
        loop = asyncio.get_running_loop()
        if self.fault == "kill":
            loop.call_soon(self.kill, who)
        elif self.fault == "kill with the leader":
            loop.call_soon(self.kill, who)
            loop.call_soon(self.kill_trainer, LEADER, 1.0)
        elif self.fault == "leave":  # what the first SIGTERM does
            self.departures.append(loop.create_task(self.depart(who)))
        elif self.fault == "cut":
            for other in [*self.members, LEADER]:
                if other != who:
                    self.network.cut(who, other)
                    loop.call_later(AWAY_S, self.network.heal, who, other)
        elif self.fault == "nan":
            server = self.members[who].server
            assert server is not None
            if where == "waiting downstream":
                spoil_gradients(server)
            elif where == "in backward":
                spoil_sum(server.state)
            else:
                spoil_forward(server.state)
        elif self.fault == "raise":
            kind = {"queued": Kind.FORWARD, "waiting downstream": Kind.BACKWARD}.get(where)
            self.computes[who].failing[kind or Kind.UPDATE] += 1
        else:
            ACTIONS[self.fault](self, Fault("", self.fault, duration_s=AWAY_S), who)
        self.struck = (who, where)  # not before: what raises here has struck nobody


MOMENTS = [
    "queued",
    "in forward",
    "waiting downstream",
    "in backward",
    "averaging",
    "prepared",
    "committing",
    "snapshot",
    "joining",
]
MOMENTS_OF_ALL_STAGES = ["in backward", "averaging", "prepared"]  # nobody is behind the last
FAULTS = ["kill", "leave", "freeze", "cut", "reset", "raise", "nan"]
ONLY = {
    # Before its own kernel; those of donors and joiners are further down.
    "raise": ("queued", "waiting downstream", "averaging", "committing"),
    "nan": ("queued", "in forward", "waiting downstream", "in backward"),
}


def cases() -> list[Any]:
    return [
        pytest.param(moment, fault, id=f"{fault}-{moment.replace(' ', '-')}")
        for moment in MOMENTS
        for fault in FAULTS
        if moment in ONLY.get(fault, MOMENTS)
    ]


def kernels(swarm: Swarm, kind: Kind) -> Counter[int]:
    """By stage, those of all who ever served it."""
    counts: Counter[int] = Counter()
    for name, compute in swarm.computes.items():
        counts[int(name[1])] += compute.counts[kind]
    return counts


def passes(swarm: Swarm, point: str) -> Counter[tuple[int, int, int]]:
    """How often each microbatch passed a point of its path: by stage, step and index."""
    return Counter(
        (int(who[1]), facts["step"], facts["index"])
        for _, who, passed, facts in swarm.events
        if passed == point
    )


@pytest.mark.parametrize(("moment", "fault"), cases())
def test_only_the_lost_stage_computes_again(moment: str, fault: str) -> None:
    swarm = Struck(moment, fault)
    assert swarm.run(STEPS)["sha256"] == baseline(STEPS, MICROBATCHES)[0]
    assert swarm.struck is not None, "nothing was injected"
    assert swarm.struck[1] == moment
    assert all(task.done() for task in swarm.departures)
    once = MICROBATCHES * STEPS
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        counts = kernels(swarm, kind)
        assert (counts[0], counts[2]) == (once, once), (kind, counts)
        assert once <= counts[STAGE] <= once + MICROBATCHES, (kind, counts)
        if fault == "leave" or moment == "joining":
            assert counts[STAGE] == once, (kind, counts)
        for name, computed in swarm.computed.items():
            if name != swarm.struck[0]:  # not even its twin computes anything twice
                assert swarm.computes[name].counts[kind] == len(computed), (name, kind)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    "moment", [pytest.param(m, id=m.replace(" ", "-")) for m in MOMENTS_OF_ALL_STAGES]
)
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_whichever_stage_is_lost_the_others_compute_nothing_again(
    fault: str, moment: str, stage: int
) -> None:
    """The first has only the leader before it, the last nobody behind it."""
    swarm = Struck(moment, fault, stage)
    assert swarm.run(STEPS)["sha256"] == baseline(STEPS, MICROBATCHES)[0]
    assert swarm.struck == (f"r{stage}.1", moment), "nothing was injected"
    once = MICROBATCHES * STEPS
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        counts = kernels(swarm, kind)
        lost = counts.pop(stage) - once
        assert (kind is Kind.FORWARD) <= lost <= MICROBATCHES, (kind, lost)
        assert set(counts.values()) == {once}, (kind, counts)


@pytest.mark.parametrize("moment", [pytest.param(m, id=m.replace(" ", "-")) for m in MOMENTS])
def test_a_replica_and_the_leader_die_at_the_same_moment(moment: str) -> None:
    """The next life of the leader finishes the same step, with all that survivors had counted."""
    swarm = Struck(moment, "kill with the leader")
    assert swarm.run(STEPS)["sha256"] == baseline(STEPS, MICROBATCHES)[0]
    assert swarm.struck is not None, "nothing was injected"
    assert swarm.struck[1] == moment
    assert swarm.lives[LEADER] == 2
    assert swarm.committed == sorted(set(swarm.committed))
    counted = passes(swarm, "counted")
    assert set(counted) == {
        (stage, step, index)
        for stage in range(3)
        for step in range(STEPS)
        for index in range(MICROBATCHES)
    }
    again = {stage for (stage, _, _), times in counted.items() if times > 1}
    assert again <= (set() if moment == "joining" else {STAGE}), again


# ---- the kernels of donors and joiners -----------------------------------------------------------

JOINER = "r1.2"
TRANSFERS = {  # what computes where a state is given and taken
    "copying": "Donor.take.<locals>.copy",
    "describing": "digest",
    "checking": "CatchUp._digest.<locals>.<lambda>",
    "loading": "CatchUp._load.<locals>.load",
}


class Transferred(Swarm):
    """`JOINER` joins; at each replica the first kernel called `kernel` raises when it is done."""

    def __init__(self, kernel: str, donors: int) -> None:
        super().__init__(
            replicas=(2, donors, 2),
            plan=plan(MICROBATCHES, 2 * STEPS),
            faults=[Fault("record", "start", step=STRUCK_STEP, victim=JOINER, stage=STAGE)],
            seconds=(0.05, 0.1),
        )
        self.kernel = kernel
        self.struck: list[str] = []

    def start_replica(self, name: str, stage: int | None) -> Member:
        member = super().start_replica(name, stage)
        compute = self.computes[name]
        usual = compute.run

        async def run(kind: Kind, task: Callable[[], Any], step: int = 0) -> Any:
            called = getattr(task, "func", task).__qualname__
            if called != self.kernel or name in self.struck:
                return await usual(kind, task, step)
            self.struck.append(name)

            def fail() -> None:
                task()
                raise RuntimeError("a kernel failed")

            return await usual(kind, fail, step)

        compute.run = run  # type: ignore[method-assign]
        return member


@pytest.mark.parametrize("donors", [1, 2])
@pytest.mark.parametrize("kernel", TRANSFERS.values(), ids=TRANSFERS)
def test_a_kernel_that_fails_where_a_state_is_given_or_taken_costs_time_alone(
    kernel: str, donors: int
) -> None:
    """The joiner serves all the same, also with nobody else to ask; nothing is computed twice."""
    swarm = Transferred(kernel, donors)
    assert swarm.run(2 * STEPS)["sha256"] == baseline(2 * STEPS, MICROBATCHES)[0]
    givers = {f"r{STAGE}.{number}" for number in range(donors)}
    takes = kernel.startswith("CatchUp")
    assert set(swarm.struck) == ({JOINER} if takes else givers), "nothing was injected"
    assert any((who, what) == (JOINER, "counted") for _, who, what, _ in swarm.events)
    for point in ("forward", "backward", "counted"):
        assert set(passes(swarm, point).values()) == {1}, point
    assert not any(what in ("expelled", "suspected", "failed") for _, _, what, _ in swarm.events)


# ---- a full disk ---------------------------------------------------------------------------------

TRAINERS = ("t0", "t1", "t2")
WRITES: dict[str, Callable[[Vote, Vote], bool]] = {
    "promising": lambda old, new: new.promised > old.promised and new.promised.counter == 2,
    "voiding": lambda old, new: (
        new.accepted not in (None, old.accepted) and new.accepted.record is None
    ),
    "accepting": lambda old, new: (
        new.accepted not in (None, old.accepted)
        and new.accepted.record is not None
        and new.accepted.record.step == STRUCK_STEP
    ),
    "learning": lambda old, new: (
        new.committed not in (None, old.committed) and new.committed.step == STRUCK_STEP
    ),
}


def disk_cases() -> list[Any]:
    return [
        pytest.param(moment, trainers, who, id=f"{moment}-{role}")
        for moment in WRITES
        for role, trainers, who in (
            ("alone", (LEADER,), LEADER),
            ("leader-of-three", TRAINERS, "t0"),
            ("standby", TRAINERS, "t1"),
        )
        if role != "alone" or moment != "voiding"  # nobody else could have left anything
    ]


@pytest.mark.parametrize(("moment", "trainers", "who"), disk_cases())
def test_a_vote_that_cannot_be_written_costs_nothing_counted(
    moment: str, trainers: tuple[str, ...], who: str
) -> None:
    """Whatever the vote was for: the trainer's process ends or says no, is started again, and the
    run goes on inside the step. `promising` is in a second term, so the leader dies first."""
    swarm = Swarm(plan=plan(MICROBATCHES, STEPS), trainer_ids=trainers, disk_s=0.002)
    if moment == "promising":
        swarm.faults = [Fault("average", "kill", step=STRUCK_STEP, victim=LEADER, duration_s=0.5)]
    struck: list[str] = []
    disk = swarm.disks[who]
    save = disk.save

    async def refuse(vote: Vote) -> None:
        if not struck and WRITES[moment](disk.vote, vote):
            struck.append(moment)
            disk.full = True
            swarm.later(AWAY_S / 4, setattr, disk, "full", False)
        await save(vote)

    disk.save = refuse  # type: ignore[method-assign]
    assert swarm.run(STEPS)["sha256"] == baseline(STEPS, MICROBATCHES)[0]
    assert struck == [moment], "nothing was injected"
    once = MICROBATCHES * STEPS
    late = MICROBATCHES if moment == "promising" else 0  # who comes late is taken in empty
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        assert all(once <= count <= once + late for count in kernels(swarm, kind).values())
