"""As many slots as fit a peer's memory: told to the leader, which uses them on slow lines alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from peer.disk import MemoryDisk
from peer.leader import Leader
from peer.members import Member as Known
from peer.quorum import Quorum
from swarm.errors import WireError
from swarm.net.channel import Message
from swarm.sim.virtual_time import run
from swarm.terms import Term
from tests.protocol.adaptive import AdaptiveSwarm
from tests.protocol.simulated import LEADER, Swarm, TinyBatches, baseline, plan, shared_pipeline

LEAST, MICROBATCHES, STEPS = 8, 48, 3
LITTLE, PLENTY = 1 << 32, 64 << 30  # as long on the wire
KEPT_BYTES = LITTLE


@dataclass
class Run:
    slots: set[int | None]  # of the replicas
    known: set[int]  # to the leader
    most_held: int
    wall_s: float  # of the last step


def train(memory_bytes: int | None, latency_s: float, **more: Any) -> Run:
    swarm = AdaptiveSwarm(
        plan=plan(MICROBATCHES, STEPS),
        peers=((0,), (1,), (2,)),
        memory_bytes=memory_bytes,
        latency_s=latency_s,
        kept_bytes=KEPT_BYTES,
        **more,
    )
    seen: list[Run] = []

    def at_end() -> None:
        assert swarm.leader is not None
        servers = [member.server for member in swarm.members.values() if member.server]
        seen.append(
            Run(
                {each.slots.limit for each in servers},
                {member.slots for member in swarm.leader.members},
                max(each.slots.most_held for each in servers),
                swarm.results[-1].wall_s,
            )
        )

    swarm.at_end = at_end
    assert swarm.run(STEPS)["sha256"] == baseline(STEPS, MICROBATCHES)[0]
    return seen[0]


@pytest.mark.parametrize(
    ("memory_bytes", "slots"),
    [(None, LEAST), (1 << 20, LEAST), (LITTLE, LEAST), (PLENTY, 64)],
    ids=["unknown", "none to speak of", "for kept answers alone", "plenty"],
)
def test_the_leader_knows_how_many_fit(memory_bytes: int | None, slots: int) -> None:
    seen = train(memory_bytes, 0.001)
    assert seen.slots == seen.known == {slots}


def test_a_number_that_was_given_stays() -> None:
    assert train(PLENTY, 0.001, slots=5).slots == {5}


def test_afab_has_no_limit_and_says_the_most() -> None:
    swarm = Swarm(replicas=(1, 1), num_stages=2, plan=plan(4), afab=True)
    known: set[int] = set()

    def at_end() -> None:
        assert swarm.leader is not None
        known.update(member.slots for member in swarm.leader.members)

    swarm.at_end = at_end
    swarm.run(1)
    assert known == {1024}


def test_on_slow_lines_more_are_under_way_and_a_step_ends_sooner() -> None:
    few, many = train(LITTLE, 0.075), train(PLENTY, 0.075)
    assert few.most_held == LEAST
    assert LEAST < many.most_held < 64, "no more than the line takes"
    assert 1.5 * many.wall_s < few.wall_s, "averaging, which is as slow as before, included"


def test_on_fast_lines_more_slots_change_nothing() -> None:
    few, many = train(LITTLE, 0.001), train(PLENTY, 0.001)
    assert (many.most_held, many.wall_s) == (few.most_held, few.wall_s)


class Caller:
    """A channel of a replica, as far as a handler looks."""

    peer, incarnation = "r1.0", "r1.0#1"


@pytest.mark.parametrize("slots", [None, True, "8", b"8", 8.0, [8], {}, 0, -1, 1025, 1 << 62])
def test_slots_that_make_no_sense_are_refused(slots: object) -> None:
    async def main() -> None:
        quorum = Quorum([LEADER], LEADER, MemoryDisk())
        leader = Leader(plan(2, 2), shared_pipeline(2), TinyBatches(), quorum)
        leader.term = quorum.term = Term(0, 1, f"{LEADER}#1")
        channel: Any = Caller()
        methods = leader.admission.methods()
        member = leader.members.by_name[Caller.incarnation] = Known(Caller.incarnation, 1, ())
        member.slots = LEAST
        bodies = {"ready": {"step": 7}, "join": {"stage": 1, "addresses": []}}
        for method, body in bodies.items():
            with pytest.raises(WireError):
                await methods[method].handle(channel, Message({**body, "slots": slots}))
            assert (member.slots, member.step) == (LEAST, 0)
        await leader.aclose()

    run(main(), limit_s=100)
