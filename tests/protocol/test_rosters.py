"""Who joins is told of the others, and they of it, at a bounded cost whoever asks how often."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from peer import rosters
from peer.leader import Leader
from peer.member import Member as Replica
from peer.members import MAX_MEMBERS, Member, Members
from peer.rosters import Rosters
from swarm.errors import StreamClosedError, SwarmError
from swarm.net.channel import Channel, Message, Method
from swarm.net.links import Links
from swarm.sim.virtual_time import run
from swarm.tasks import TaskSet
from swarm.wire.frames import no_tensors
from tests.protocol.simulated import LEADER, RUN_ID, Swarm, baseline

JOIN = {"stage": 1, "addresses": []}


class JoinedAgain(Swarm):
    """A stranger joins after the first step, and then over and over; `told` counts what replicas
    are told meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Counter[str] = Counter()
        self.meanwhile: Counter[str] | None = None

    def start_replica(self, name: str, stage: int | None) -> Replica:
        replica = super().start_replica(name, stage)
        note = replica._note_roster

        def counted(roster: object) -> None:
            self.told[name] += 1
            note(roster)

        replica._note_roster = counted  # type: ignore[method-assign]
        return replica

    async def at_record(self, leader: Leader) -> None:
        await super().at_record(leader)
        if leader.next_step != 1:
            return
        methods = {"roster": Method(self.listen, no_tensors)}
        links = Links(self.network.transport("mallory"), RUN_ID, "mallory#1", methods)
        links.serve()
        channel = await links.channel(LEADER)
        await channel.call("join", JOIN)
        await asyncio.sleep(0.1)
        assert all("mallory" in each.links.addresses for each in self.members.values())
        before = self.told.copy()
        for _ in range(200):
            answer = (await channel.call("join", JOIN)).body
        assert {"r0.0#1", "mallory#1"} <= answer["roster"].keys()
        await asyncio.sleep(1.0)
        self.meanwhile = self.told - before
        await links.aclose()

    async def listen(self, channel: Channel, message: Message) -> None:
        self.told["mallory"] += 1


def test_a_join_again_tells_nobody_anything() -> None:
    """One small call, over and over, would have the leader write a roster for everybody each."""
    swarm = JoinedAgain()
    assert swarm.run()["sha256"] == baseline()[0]
    assert swarm.meanwhile == Counter()


def test_who_is_taken_in_is_known_to_all_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes to tell them: whoever is before it on a route has to dial it."""
    monkeypatch.setattr(rosters, "ROUND_S", 0.5 * MAX_MEMBERS)  # for each member a half second

    unknown = []

    class Watching(Swarm):
        def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
            super().on_probe(who, point, facts)
            if point == "admitted":
                name = facts["replica"].partition("#")[0]
                for other, member in self.members.items():
                    if name != other and name not in member.links.addresses:
                        unknown.append((name, other))

    assert Watching().run()["sha256"] == baseline()[0]
    assert unknown == []


class Told:
    """A channel that notes when a roster comes, and how many it names; it answers when `open`."""

    ended = None

    def __init__(self) -> None:
        self.came: list[tuple[float, int]] = []
        self.open = asyncio.Event()
        self.error: SwarmError | None = None

    async def call(self, method: str, body: dict[str, Any]) -> Message:
        assert method == "roster"
        self.came.append((asyncio.get_running_loop().time(), len(body["roster"])))
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return Message({})


class Crowd:
    """As much of a leader as rosters need, and its members' channels."""

    def __init__(self) -> None:
        self.channels: dict[str, Told] = {}
        self.members, self.tasks = Members(1), TaskSet()
        self.links = SimpleNamespace(open_channel=self.channels.get)
        leader: Any = self
        self.rosters = Rosters(leader)

    def comes(self) -> Told:
        name = f"peer{len(self.channels)}#1"
        member = self.members.by_name[name] = Member(name, 0, ())
        channel = self.channels[name] = Told()
        channel.open.set()
        self.rosters.add(member)
        return channel


def test_however_many_come_nobody_is_told_more_than_once_a_round() -> None:
    async def main() -> None:
        crowd = Crowd()
        for _ in range(MAX_MEMBERS - 200):
            crowd.comes()
        await asyncio.sleep(2.0)
        early = list(crowd.channels.values())
        before = [len(each.came) for each in early]
        for _ in range(200):
            crowd.comes()
            await asyncio.sleep(0.01)
        await asyncio.sleep(3.0)
        told = [len(each.came) - count for each, count in zip(early, before, strict=True)]
        assert min(told) >= 1
        assert max(told) <= 5
        assert {each.came[-1][1] for each in early} == {MAX_MEMBERS}
        await crowd.tasks.aclose()

    run(main(), limit_s=100)


def test_who_answers_no_roster_is_sent_no_other_and_then_the_newest() -> None:
    async def main() -> None:
        crowd = Crowd()
        slow, other = crowd.comes(), crowd.comes()
        slow.open.clear()
        for _ in range(20):
            crowd.comes()
            await asyncio.sleep(1.0)
        assert len(slow.came) == 1
        assert [named for _, named in other.came] == list(range(3, 23))
        slow.open.set()
        await asyncio.sleep(0.1)
        assert [named for _, named in slow.came] == [slow.came[0][1], 22]
        await crowd.tasks.aclose()

    run(main(), limit_s=100)


def test_who_has_come_back_over_another_channel_is_told_there() -> None:
    """The former one is found dead only now, with a roster on it."""

    async def main() -> None:
        crowd = Crowd()
        former = crowd.comes()
        former.open.clear()
        former.error = StreamClosedError("silent for 5 s")
        crowd.comes()
        await asyncio.sleep(1.0)
        another = crowd.channels["peer0#1"] = Told()
        another.open.set()
        crowd.comes()
        await asyncio.sleep(1.0)
        assert (len(former.came), another.came) == (1, [])
        former.open.set()
        await asyncio.sleep(0.1)
        assert [named for _, named in another.came] == [3]
        await crowd.tasks.aclose()

    run(main(), limit_s=100)


def test_the_first_to_come_are_told_of_the_next_at_once() -> None:
    async def main() -> None:
        crowd = Crowd()
        first, second = crowd.comes(), crowd.comes()
        await asyncio.sleep(0.01)
        assert [named for _, named in first.came] == [2]
        assert second.came == []  # the answer to its join names the first
        await crowd.tasks.aclose()

    run(main(), limit_s=100)
