"""Who joins is told of the others, and they of it, once."""

from __future__ import annotations

import asyncio
from collections import Counter

from peer.leader import Leader
from peer.member import Member as Replica
from swarm.net.channel import Channel, Message, Method
from swarm.net.links import Links
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
