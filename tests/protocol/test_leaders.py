"""Leaders that die or are cut off within a step: what is counted stands, and the majority goes on.

Random ones are in `test_scenarios.py`; every point at which one may die, in `test_matrix.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from peer.disk import MemoryDisk
from peer.finding import RETRY_S
from peer.leader import Leader
from peer.quorum import NO_MAJORITY, Quorum
from peer.run_leader import LeaderProcess
from peer.trainer import ASKED_S, BYPASSED_S, TELL_EVERY_S
from swarm.consensus import COMPLETING, Answer, Term, Vote
from swarm.net.channel import Message
from swarm.net.links import peer_of
from swarm.sim.virtual_time import run
from tests.protocol.rivals import FIVE, Rival
from tests.protocol.simulated import LEADER, Fault, Swarm, baseline, plan

TRAINERS = ("t0", "t1", "t2")


def counted(swarm: Swarm) -> Counter[tuple[int, int, int]]:
    """How often each microbatch was counted: by stage, step and index."""
    return Counter(
        (int(who[1]), facts["step"], facts["index"])
        for _, who, point, facts in swarm.events
        if point == "counted"
    )


def times(swarm: Swarm, point: str, *who: str) -> list[float]:
    return [at for at, name, passed, _ in swarm.events if passed == point and name in who]


@pytest.mark.parametrize("trainers", [(LEADER,), TRAINERS], ids=["one", "three"])
@pytest.mark.parametrize("point", ["acknowledged", "prepared"])
@pytest.mark.parametrize("away_s", [1.0, 6.0, 14.0])
def test_nothing_that_is_counted_is_computed_again(
    away_s: float, point: str, trainers: tuple[str, ...]
) -> None:
    """The leader dies within a step. Its next life, or another of the three, finishes that step:
    all that its replicas had counted stands, however long they had nobody."""
    fault = Fault(point, "kill", step=1, count=4, victim=LEADER, duration_s=away_s)
    leases = dict.fromkeys(trainers, away_s)
    swarm = Swarm(plan=plan(8, 3), trainer_ids=trainers, leases=leases, faults=[fault])
    assert swarm.run()["sha256"] == baseline(3, 8)[0]
    assert swarm.fired == [fault], "nothing was injected"
    assert swarm.effects["takeover"] == 1
    assert set(counted(swarm).values()) == {1}
    died = next(at for at, _, what, _ in swarm.events if what == "fault")
    assert times(swarm, "expelled", *trainers) == []
    back = [at for at in times(swarm, "joined", *trainers) if at > died]
    assert len(back) == 6
    assert back[-1] - back[0] < 3.0  # the longer it takes, the longer a step stands still


def test_bytes_are_counted_from_the_begin_of_a_term_as_tokens_are() -> None:
    """Or what a leader says of bytes per token would hold those of all the steps before it."""

    def raw_bytes(faults: list[Fault]) -> int:
        swarm = Swarm(plan=plan(8, 3), faults=faults)
        seen, found = swarm.on_probe, dict[str, int]()

        def probe(who: str, point: str, facts: dict[str, Any]) -> None:
            if (point, facts.get("step")) == ("committed", 2):
                server = swarm.members[who].server
                assert server is not None
                found[who] = server.raw_bytes
            seen(who, point, facts)

        swarm.on_probe = probe  # type: ignore[method-assign]
        swarm.run()
        assert swarm.fired == faults
        return sum(found.values())

    fault = Fault("acknowledged", "kill", step=1, count=4, victim=LEADER, duration_s=1.0)
    assert 8 / 24 <= raw_bytes([fault]) / raw_bytes([]) <= 12 / 24


MINE, THEIRS = ("r0.1", "r1.1", "r2.1"), ("r0.0", "r1.0", "r2.0")


@pytest.mark.parametrize("cut_off", ["t0", "t2"], ids=["the-leader", "a-standby"])
def test_with_a_cut_the_majority_of_trainers_goes_on_and_the_others_rejoin(cut_off: str) -> None:
    """A trainer and a replica of every stage on one side, two trainers and the rest on the other.
    The smaller side could compute every step, and commits none."""
    heals_s = 60.0
    side = (cut_off, *MINE)
    fault = Fault("acknowledged", "partition", step=1, count=3, side=side, duration_s=heals_s)
    swarm = Swarm(
        plan=plan(4, 40),
        trainer_ids=TRAINERS,
        leases=dict.fromkeys(TRAINERS, 2.0),
        seconds=(0.2, 0.4),
        faults=[fault],
    )
    assert swarm.run(40, limit_s=1000)["sha256"] == baseline(40)[0]
    assert swarm.fired == [fault], "nothing was injected"
    assert set(counted(swarm)) == {(k, t, i) for k in range(3) for t in range(40) for i in range(4)}
    cut = next(at for at, _, what, _ in swarm.events if what == "fault")
    healed = cut + heals_s
    majority = [each for each in TRAINERS if each != cut_off]

    def within(moments: list[float], since: float, until: float) -> int:
        return sum(since < at < until for at in moments)

    assert within(times(swarm, "record", *majority), cut, healed) >= 10
    assert within(times(swarm, "committed", *THEIRS), cut, healed) >= 30
    assert within(times(swarm, "record", cut_off), cut, healed) == 0
    assert within(times(swarm, "committed", *MINE), cut + 1.0, healed) == 0
    assert within(times(swarm, "committed", *MINE), healed, healed + 60.0) > 3
    if cut_off == "t2":  # the leader was not touched: nobody waits for an election
        first = next(at for at in times(swarm, "record", "t0") if at > cut)
        assert first - cut < 15.0


def promises(vote: Vote) -> bool:
    return peer_of(vote.promised.incarnation) == "t1"


def completes(vote: Vote) -> bool:
    accepted = vote.accepted
    return promises(vote) and accepted is not None and accepted.key.attempt == COMPLETING


@pytest.mark.parametrize(
    ("point", "when", "late_s"),
    [("forward", promises, 0.0), ("record", completes, 0.5)],
    ids=["while-it-is-promised", "while-it-completes-a-record"],
)
def test_a_candidate_that_is_succeeded_before_it_leads_does_not_begin(
    point: str, when: Callable[[Vote], bool], late_s: float
) -> None:
    """The leader dies, t1 wins a term, and t2 the next one before t1 is done with its own."""
    fault = Fault(point, "kill", step=1, victim=LEADER, duration_s=300.0)
    leases = {**dict.fromkeys(FIVE, 30.0), "t1": 1.0}
    swarm = Swarm(plan=plan(8, 3), trainer_ids=FIVE, leases=leases, faults=[fault])
    rival = Rival(swarm, "t1", when, late_s)
    assert swarm.run()["sha256"] == baseline(3, 8)[0]
    assert swarm.fired == [fault], "nothing was injected"
    assert rival.has_led


@pytest.mark.parametrize("action", ["cut", "deaf"])
@pytest.mark.parametrize("point", ["forward", "prepared", "record"])
def test_a_leader_that_reaches_no_other_trainer_gives_its_replicas_up(
    point: str, action: str
) -> None:
    """Only the lines between the trainers are cut, or carry words one way: replicas reach all of
    them. Another trainer commits what they have counted, long before the lines are mended."""
    lasts_s = 300.0
    faults = [
        Fault(point, action, step=1, victim=LEADER, other=other, duration_s=lasts_s)
        for other in TRAINERS[1:]
    ]
    swarm = Swarm(plan=plan(8, 6), trainer_ids=TRAINERS, faults=faults)
    assert swarm.run(6)["sha256"] == baseline(6, 8)[0]
    assert swarm.fired == faults, "nothing was injected"
    assert set(counted(swarm).values()) == {1}
    began = next(at for at, _, what, _ in swarm.events if what == "fault")
    ended = times(swarm, "record", *TRAINERS[1:])[-1]
    assert ended - began < 25.0


def test_a_leader_that_waits_for_replicas_beyond_the_cut_gives_up_the_others() -> None:
    """It asks nobody for a vote, since its step does not come so far."""
    others = (*TRAINERS[1:], "r1.0", "r1.1")
    faults = [
        Fault("forward", "cut", step=1, victim=LEADER, other=other, duration_s=300.0)
        for other in others
    ]
    swarm = Swarm(plan=plan(8, 6), trainer_ids=TRAINERS, faults=faults)
    assert swarm.run(6)["sha256"] == baseline(6, 8)[0]
    assert swarm.fired == faults, "nothing was injected"
    assert times(swarm, "record", *TRAINERS)[-1] < 30.0


def without_replicas(action: str, replicas: tuple[str, ...], lasts_s: float) -> Swarm:
    """What happens to replicas leaves the leader its lines to the other trainers."""
    faults = [
        Fault("forward", "freeze", step=1, victim=each, duration_s=lasts_s) for each in replicas
    ]
    if action == "cut":
        faults = [replace(each, action="cut", victim="t0", other=each.victim) for each in faults]
    swarm = Swarm(plan=plan(8, 6), trainer_ids=TRAINERS, faults=faults)
    assert swarm.run(6, limit_s=1000)["sha256"] == baseline(6, 8)[0]
    assert swarm.fired == faults, "nothing was injected"
    return swarm


def test_a_leader_that_no_replica_reaches_leaves_them_to_another_that_they_reach() -> None:
    swarm = without_replicas("cut", (*MINE, *THEIRS), 300.0)
    assert list(swarm.chronicle.terms.values()) == ["t0", "t1"]
    assert times(swarm, "record", "t1")[-1] < 90.0


@pytest.mark.parametrize(
    ("action", "replicas"),
    [("cut", MINE + THEIRS[1:]), ("freeze", MINE + THEIRS)],
    ids=["that-one-reaches", "whose-replicas-ask-nobody"],
)
def test_a_leader_keeps_its_term(action: str, replicas: tuple[str, ...]) -> None:
    """Until the others are back."""
    swarm = without_replicas(action, replicas, 120.0)
    assert list(swarm.chronicle.terms.values()) == ["t0"]
    assert times(swarm, "record", "t0")[-1] > 120.0


def test_a_visitor_that_asks_two_trainers_once_deposes_no_leader() -> None:
    """The other has ceased to say that somebody asked there before the leader has waited for as
    long; and who asks again and again does so while the last time counts, at its longest pause."""
    assert ASKED_S + 3 * TELL_EVERY_S < BYPASSED_S
    assert RETRY_S[1] * 1.2 < ASKED_S


def cut_from_one(faults: list[Fault], num_steps: int) -> Swarm:
    """A leader and the next in rank do not reach each other; the third reaches both. A step takes
    longer than one of them would lead, if they deposed one another."""
    cut = Fault("forward", "cut", step=1, victim="t0", other="t1", duration_s=1000.0)
    faults = [cut, *faults]
    swarm = Swarm(plan=plan(8, num_steps), trainer_ids=TRAINERS, seconds=(1.0, 2.0), faults=faults)
    assert swarm.run(num_steps)["sha256"] == baseline(num_steps, 8)[0]
    assert swarm.fired == faults, "nothing was injected"
    return swarm


def test_two_trainers_that_do_not_reach_each_other_do_not_take_turns() -> None:
    swarm = cut_from_one([], 8)
    assert list(swarm.chronicle.terms.values()) == ["t0"]
    assert times(swarm, "record", "t0")[-1] > 60.0


@pytest.mark.parametrize("others", [("t0",), ("t0", "t2")], ids=["the-leader", "both"])
def test_a_trainer_that_comes_back_leaves_the_leader_its_term(others: tuple[str, ...]) -> None:
    """Its line to the leader, or to all, is cut again and again, each time for longer than its
    patience lasts. It has asked for terms meanwhile, and asks as it comes back."""
    faults = [
        Fault("forward", "cut", step=step, victim="t1", other=other, duration_s=20.0)
        for step in (1, 5, 9)
        for other in others
    ]
    swarm = Swarm(plan=plan(8, 12), trainer_ids=TRAINERS, seconds=(1.0, 2.0), faults=faults)
    assert swarm.run(12)["sha256"] == baseline(12, 8)[0]
    assert swarm.fired == faults, "nothing was injected"
    assert list(swarm.chronicle.terms.values()) == ["t0"]
    cuts = [at for at, _, what, _ in swarm.events if what == "fault"]
    assert cuts[-1] - cuts[0] > 40.0, "each ended before the next began"
    assert times(swarm, "record", "t0")[-1] - cuts[-1] > 25.0


def test_a_trainer_that_starts_again_leaves_another_its_term() -> None:
    """The first in rank tries soon after its start; the leader may not have found it by then."""
    faults = [
        Fault("forward", "kill", step=1, victim="t0", duration_s=20.0),
        Fault("forward", "kill", step=6, victim="t0", duration_s=1.0),
    ]
    swarm = Swarm(plan=plan(8, 10), trainer_ids=TRAINERS, seconds=(1.0, 2.0), faults=faults)
    assert swarm.run(10)["sha256"] == baseline(10, 8)[0]
    assert swarm.fired == faults, "nothing was injected"
    assert list(swarm.chronicle.terms.values()) == ["t0", "t1"]


@pytest.mark.parametrize("action", ["kill", "freeze"])
def test_who_was_refused_for_a_leader_succeeds_it(action: str) -> None:
    """Its voter was loyal to one that it heard of, and is no longer."""
    swarm = cut_from_one([Fault("forward", action, step=3, victim="t0", duration_s=300.0)], 5)
    leaders = list(swarm.chronicle.terms.values())
    assert leaders[0] == "t0"
    assert len(leaders) == 2
    died = [at for at, _, what, _ in swarm.events if what == "fault"][-1]
    joined = [at for at in times(swarm, "joined", *TRAINERS) if at > died]
    assert joined[0] - died < 15.0


@pytest.mark.parametrize(
    ("asked", "after_s", "connected", "loyal"),
    [
        (Term(1, 6, "t1#1"), 2.0, True, True),
        (Term(1, 6, "t1#1"), 3.0, True, False),
        (Term(1, 6, "t1#1"), 2.0, False, False),
        (Term(2, 6, "t1#1"), 2.0, True, False),
        (Term(1, 6, "t0#2"), 2.0, True, False),
        (Term(1, 4, "t1#1"), 2.0, True, False),
    ],
    ids=["a-rival", "silent-for-long", "gone", "an-order", "the-leader-itself", "stale"],
)
def test_whom_a_trainer_refuses_that_hears_a_leader(
    asked: Term, after_s: float, connected: bool, loyal: bool
) -> None:
    answer = run(asked_for(asked, Quorum(TRAINERS, "t2", MemoryDisk()), after_s, connected))
    stale = asked < Term(1, 5, "t0#1")
    assert answer["yes"] is not (loyal or stale)
    promised = Vote.unpack(answer["vote"]).promised  # who is refused learns of what it lacks
    assert promised == (asked if answer["yes"] else Term(1, 5, "t0#1"))


@pytest.mark.parametrize(
    ("asked", "after_s", "connected", "refused"),
    [
        (Term(1, 6, "t1#1"), 2.0, True, True),
        (Term(1, 6, "t1#1"), 3.0, True, False),
        (Term(1, 6, "t1#1"), 2.0, False, False),
        (Term(2, 6, "t1#1"), 2.0, True, False),
    ],
    ids=["a-rival", "it-leads-no-more", "it-reaches-nobody", "an-order"],
)
def test_whom_a_leader_refuses(asked: Term, after_s: float, connected: bool, refused: bool) -> None:
    quorum = Quorum(TRAINERS, "t0", MemoryDisk())
    quorum.term = Term(1, 5, "t0#1")
    answer = run(asked_for(asked, quorum, after_s, connected))
    assert answer["yes"] is not refused
    assert (quorum.term == Term(1, 5, "t0#1")) is refused


async def asked_for(term: Term, quorum: Quorum, after_s: float, connected: bool) -> dict[str, Any]:
    """What a trainer answers `after_s` after somebody said that t0 leads in term 5."""
    leads = Term(1, 5, "t0#1")
    links: Any = SimpleNamespace(open_channel=lambda name: object() if connected else None)
    quorum.links = links
    await quorum._change(lambda vote: Answer(True, replace(vote, promised=leads)))
    quorum.follow(leads, 2.5)
    await asyncio.sleep(after_s)
    channel: Any = SimpleNamespace(peer=term.trainer)
    question = Message({"term": list(term), "disk": "its disk"})
    return (await quorum._on_prepare(channel, question)).body


class OverElsewhere(Swarm):
    """t0 hears that the run is over while it asks trainers for their votes that are gone."""

    async def start_all(self) -> None:
        await super().start_all()
        self.later(60.0, self.tell)

    def tell(self) -> None:
        trainer = self.trainers["t0"]
        assert trainer.leader is None
        trainer._finished(6)


@pytest.mark.parametrize("away_s", [65.0, 1000.0], ids=["then-gets-votes", "gets-none"])
def test_a_candidate_that_hears_that_the_run_is_over_ends(away_s: float) -> None:
    faults = [
        Fault("counted", "kill", step=1, victim=other, duration_s=away_s) for other in TRAINERS[1:]
    ]
    leases = {"t0": 1.0, "t1": 300.0, "t2": 300.0}
    swarm = OverElsewhere(plan=plan(8, 6), trainer_ids=TRAINERS, leases=leases, faults=faults)
    with pytest.raises(AssertionError, match="t0 thinks that the run is over"):
        swarm.run(6)
    assert swarm.fired == faults, "nothing was injected"
    assert list(swarm.chronicle.terms.values()) == ["t0"]


class ValidatesForEver(Swarm):
    """t0 has committed every step and asks replicas for more that have gone with another leader."""

    behind = 0

    async def lead(self, name: str, leader: Leader) -> None:
        self.chronicle.begins_to_lead(name, leader)
        while leader.next_step < self.num_steps:
            await leader.train_step()
        trainer, steps = self.trainers["t1"], self.num_steps - self.behind
        term = Term(leader.term.epoch, 0, "t1#1")  # an earlier one: its leader heard of no other
        self.later(5.0, lambda: trainer._tasks.spawn(trainer.say_leads("t0", term, steps), "said"))
        self.later(10.0, lambda: self.fail(AssertionError("t0 goes on")))
        await asyncio.Event().wait()


@pytest.mark.parametrize("behind", [0, 1])
def test_a_leader_with_nothing_left_to_commit_ends_when_another_has_finished(behind: int) -> None:
    swarm = ValidatesForEver(plan=plan(4, 3), trainer_ids=TRAINERS)
    swarm.behind = behind
    said = "t0 goes on" if behind else "t0 thinks that the run is over"
    with pytest.raises(AssertionError, match=said):
        swarm.run(3)


@pytest.mark.parametrize("away_s", [8.0, 100.0])
def test_a_leader_goes_on_when_others_are_back_whose_votes_it_lacked(away_s: float) -> None:
    faults = [
        Fault("counted", "kill", step=1, victim=other, duration_s=away_s) for other in TRAINERS[1:]
    ]
    swarm = Swarm(plan=plan(8, 6), trainer_ids=TRAINERS, faults=faults)
    lines: list[str] = []
    swarm.trainers_say = lines.append
    assert swarm.run(6)["sha256"] == baseline(6, 8)[0]
    assert swarm.fired == faults, "nothing was injected"
    assert set(counted(swarm).values()) == {1}
    began = next(at for at, _, what, _ in swarm.events if what == "fault")
    assert times(swarm, "record", *TRAINERS)[-1] - began < away_s + 20.0
    assert (NO_MAJORITY in lines) is (away_s > 10.0)


class SaysFarewell(Swarm):
    """When the run is over, the line between the two falls silent. The channel ends, with what was
    said over it, and they reach each other again."""

    async def lead(self, name: str, leader: Leader) -> None:
        self.chronicle.begins_to_lead(name, leader)
        while leader.next_step < self.num_steps:
            await leader.train_step()
        self.network.cut("t0", "t1")
        links = self.trainers[name].links
        self.later(0.5, links.end_channels, "t1#1", "the line is down")
        self.later(1.0, self.network.heal, "t0", "t1")
        config = SimpleNamespace(run=SimpleNamespace(trainers=self.trainer_ids))
        process: Any = SimpleNamespace(config=config, identity=SimpleNamespace(peer_id=name))
        await LeaderProcess._farewell(process, self.trainers[name], leader)
        self.fail(AssertionError("t1 was not told"))


def test_a_trainer_that_misses_the_farewell_is_told_again() -> None:
    swarm = SaysFarewell(plan=plan(4, 3), trainer_ids=("t0", "t1"))
    with pytest.raises(AssertionError, match="t1 thinks that the run is over"):
        swarm.run(3)
