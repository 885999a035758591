"""What a leader takes from a joiner to tell everybody: addresses that harm nobody, few enough."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peer.admission import MAX_ADDRESS_CHARS, MAX_ADDRESSES_CHARS, _usable
from peer.disk import MemoryDisk
from peer.leader import Leader
from peer.members import MAX_MEMBERS, Standing
from peer.quorum import Quorum
from swarm.net.channel import MAX_INCARNATION_CHARS, CallFailedError, Message
from swarm.net.identity import peer_id_of
from swarm.sim.virtual_time import run
from swarm.terms import Ballot, Record, Term
from swarm.wire.frames import MAX_HEADER_BYTES, encode_frame
from tests.protocol.tiny import TinyBatches, plan, shared_pipeline

LEADER = "leader"


def peer_id(number: int) -> str:
    return peer_id_of(bytes([8, 1, 18, 32]) + number.to_bytes(32, "big"))


PEER, OTHER = peer_id(1), peer_id(2)


def of_length(num_chars: int, number: int, peer: str = PEER) -> str:
    """A valid address of so many characters."""
    tail = f"/tcp/{10_000 + number}/p2p/{peer}"
    labels = "a." * num_chars
    return "/dns4/" + labels[: num_chars - len(tail) - 7] + "a" + tail


def a_leader() -> Leader:
    """In its term, with nobody to talk to: what it would tell its replicas goes nowhere."""
    quorum = Quorum([LEADER], LEADER, MemoryDisk())
    leader: Any = Leader(plan(2, 2), shared_pipeline(2), TinyBatches(), quorum)
    leader.term = quorum.term = Term(0, 1, f"{LEADER}#1")
    leader.links = SimpleNamespace(incarnation=f"{LEADER}#1")
    leader.tell = lambda *_: None
    made: Leader = leader
    return made


def test_only_addresses_of_the_joiner_itself_go_to_the_others() -> None:
    good = [f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}", f"/dns4/example.org/tcp/4001/p2p/{PEER}"]
    bad = [
        f"/ip4/a..b/tcp/1/p2p/{PEER}",  # who dials it looks up a name that is none
        f"/ip4/example.org/tcp/1/p2p/{PEER}",
        f"/ip6/fe80::1%a..b/tcp/1/p2p/{PEER}",
        "/ip4/1.2.3.4/tcp/1",
        f"/ip4/1.2.3.4/tcp/1/p2p/{OTHER}",
        f"/memory/{PEER}/p2p/{PEER}",
        "\u20ac" * 9,
        of_length(MAX_ADDRESS_CHARS + 1, 0),
        7,
        None,
    ]
    assert _usable(PEER, [*bad[:5], *good, *bad[5:], *good]) == tuple(good)


@pytest.mark.parametrize("num_chars", [80, MAX_ADDRESS_CHARS])
def test_the_largest_roster_fits_into_a_header(num_chars: int) -> None:
    """It is in every answer to `join` and `ready`, with the newest record and the donors."""

    async def main() -> None:
        leader = a_leader()
        join = leader.admission.methods()["join"].handle

        async def comes(number: int) -> Message:
            peer = peer_id(number)
            name = f"{peer}#".ljust(MAX_INCARNATION_CHARS, "f")
            addresses = [of_length(num_chars, each, peer) for each in range(32)]
            channel: Any = SimpleNamespace(peer=peer, incarnation=name)
            return await join(channel, Message({"stage": 0, "addresses": addresses}))

        for number in range(MAX_MEMBERS):
            answer = await comes(number)
        member = next(iter(leader.members))
        own = sum(map(len, member.addresses))
        assert MAX_ADDRESSES_CHARS - num_chars < own <= MAX_ADDRESSES_CHARS
        for each in leader.members:
            each.standing = Standing.READY
        # As many stages as replicas: there is more to say of each in a record.
        stages = {stage: (name,) for stage, name in enumerate(leader.members.by_name)}
        digests = dict.fromkeys(stages, "f" * 64)
        ballot = Ballot(Term(2**39, 2**39, member.incarnation), 2**39, 2**39)
        leader.record = Record(
            *(ballot, "f" * 64, stages, digests, 1.0, 1.0, 1.0, "applied", 1.0, 2**39, digests),
            voters={member.incarnation + str(each): "f" * 64 for each in range(5)},
        )
        body = {**answer.body, **leader.admission._position(member)}
        assert len(body["roster"]) == len(body["donors"]) + 1 == MAX_MEMBERS
        packed = encode_frame({"kind": "reply", "id": 2**63, "body": body})[0]
        assert 0.8 * MAX_HEADER_BYTES < len(packed) <= MAX_HEADER_BYTES
        with pytest.raises(CallFailedError, match="all it can take") as refused:
            await comes(MAX_MEMBERS)
        assert refused.value.detail == {"fatal": False}
        await leader.aclose()

    run(main(), limit_s=100)


def test_after_the_last_step_whoever_can_be_spared_goes_at_once() -> None:
    """No commit will come that it could wait for: the last checkpoint alone is still to be had."""

    async def main() -> None:
        leader = a_leader()
        methods = leader.admission.methods()
        channels: list[Any] = []
        for number in range(2):
            peer = peer_id(number)
            channels.append(SimpleNamespace(peer=peer, incarnation=f"{peer}#1"))
            await methods["join"].handle(channels[-1], Message({"stage": 0, "addresses": []}))
        for member in leader.members:
            member.standing = Standing.SERVING

        async def leave(number: int) -> dict[str, Any]:
            return dict((await methods["leave"].handle(channels[number], Message({}))).body)

        assert await leave(0) == {"now": False, "reason": "this step's commit"}
        last = Ballot(leader.term, leader.plan.num_steps - 1, 0)
        leader.record = Record(last, "", {}, {}, 1.0, 1.0, 1.0, "applied", 1.0, 1)
        assert await leave(0) == {"now": True, "reason": ""}
        assert await leave(1) == {"now": False, "reason": "another replica of stage 0"}
        await leader.aclose()

    run(main(), limit_s=100)


class Heard:
    """A leader with two members of stage 0 and one of stage 1, and the events it emits."""

    def __init__(self) -> None:
        self.leader = a_leader()
        self.events: list[tuple[str, str]] = []
        self.leader.probe = lambda point, **facts: self.events.append((point, facts["replica"]))
        self.channels: list[Any] = []

    async def come(self) -> None:
        for number, stage in enumerate((0, 0, 1)):
            peer = peer_id(number)
            self.channels.append(SimpleNamespace(peer=peer, incarnation=f"{peer}#1"))
            await self.says(number, "join", {"stage": stage, "addresses": []})
        self.events.clear()

    async def says(self, number: int, method: str, body: dict[str, Any]) -> None:
        methods = self.leader.admission.methods()
        await methods[method].handle(self.channels[number], Message(body))


def test_who_asks_to_leave_again_and_again_is_one_event() -> None:
    async def main() -> None:
        heard = Heard()
        await heard.come()
        heard.leader.members.by_name[heard.channels[0].incarnation].standing = Standing.SERVING
        for _ in range(100):
            await heard.says(0, "leave", {"within_s": 1.0})
        assert heard.events == [("leaving", heard.channels[0].incarnation)]
        await heard.leader.aclose()

    run(main(), limit_s=100)


def test_only_whoever_can_have_given_wrong_bytes_is_accused_of_it_and_once() -> None:
    async def main() -> None:
        heard = Heard()
        await heard.come()
        me, twin, other = (each.incarnation for each in heard.channels)
        made_up = [f"{peer_id(9)}#{number}" for number in range(4)]
        noted = [*made_up, me, other, twin, heard.leader.links.incarnation]
        for _ in range(100):
            await heard.says(0, "ready", {"step": 0, "noted": noted})
        assert heard.events == [("bad_chunk", twin), ("bad_chunk", f"{LEADER}#1")]
        await heard.says(1, "ready", {"step": 0, "noted": [me, me]})
        assert heard.events[2:] == [("bad_chunk", me)]
        await heard.leader.aclose()

    run(main(), limit_s=100)
