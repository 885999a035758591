"""All limits at once, in one swarm under load: what is seen of each never exceeds it.

The limits are tiny, three joiners download meanwhile, and a stranger floods a replica and the
leader: more streams than it may open, more calls than may be in progress, calls that give the
device work, that ask for tensors or for copies of the state, and it never reads an answer. The run
is exact all the same, and everything that has a limit was near it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peer import following, observe
from peer.evaluations import EVALUATED_AT_ONCE
from peer.inquiries import validate
from peer.leader import Leader
from peer.member import Member
from swarm.compute import Kind
from swarm.errors import SwarmError
from swarm.events import EventLog
from swarm.net import channel, links, memory_stream
from swarm.net.links import PROTOCOL
from swarm.wire.boundaries import FORWARD, LOSSLESS
from swarm.wire.codecs import encode
from swarm.wire.frames import encode_frame
from tests.protocol.simulated import LEADER, RUN_ID, Fault, Swarm, baseline, plan
from tests.protocol.tiny import TinyBatches, ahead_of

MICROBATCHES, STEPS, SLOTS, KEPT_BYTES = 16, 40, 2, 1000
MAX_CALLS, MAX_STREAMS, BULK_BYTES, GRADIENTS = 24, 3, 2000, 4
COPIES = 2  # of a donor's state, fewer than there are readers
EVENT_BYTES, EVENTS = 32768, 32
BOUNDARY_BYTES = 4 * 4 * 8  # between two stages: four samples of eight
JOINERS = ("r1.7", "r1.8", "r1.9")
FLOODED = ("r1.0", LEADER)
ROUTE = ["nobody#1", "r1.0#1", "nobody#2"]


class Flooded(Swarm):
    """`most` is what was seen of everything that has a limit."""

    def __init__(self, where: Path) -> None:
        super().__init__(
            plan=plan(MICROBATCHES, STEPS),
            faults=[Fault("record", "start", step=1, victim=each, stage=1) for each in JOINERS],
            slots=SLOTS,
            kept_bytes=KEPT_BYTES,
            chunk=1,
        )
        self.log = EventLog(where / "events.jsonl", max_bytes=EVENT_BYTES)
        self.seen = observe.Observations("life", dict)
        self.most: Counter[str] = Counter()
        self.flooding: list[asyncio.Task[None]] = []
        self.refused = 0
        for joiner in JOINERS:
            for donor in ("r1.0", "r1.1"):
                self.network.rates[donor, joiner] = 100e3

    async def start_all(self) -> None:
        await super().start_all()
        self.network.transport("mallory")
        for target in FLOODED:
            for number in range(3 * MAX_STREAMS):
                flood = self.flood(target, number)
                self.flooding.append(asyncio.get_running_loop().create_task(flood))

    async def flood(self, target: str, number: int) -> None:
        """One stream of many: calls without a look at their answers, or none at all."""
        hello = {"kind": "hello", "run": RUN_ID, "incarnation": f"mallory#{number}"}
        await asyncio.sleep(0.5 + 0.6 * min(number, MAX_STREAMS))
        try:
            stream = await self.network.transports["mallory"].dial(target, PROTOCOL)
            await stream.send(encode_frame(hello))
            for call_id, (method, body, tensors) in enumerate(self.calls(target, number)):
                call = {"kind": "call", "method": method, "body": body, "id": call_id}
                await stream.send(encode_frame(call, tensors))
                await asyncio.sleep(0.0003)  # so that each is seen to wait
                self.look()
            while True:  # silent until it is ended
                await stream.receive_exactly(1)
                await asyncio.sleep(1.0)
        except SwarmError:
            self.refused += 1

    def calls(self, target: str, number: int) -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
        """The method, body and tensors of each."""
        if number < MAX_STREAMS:
            yield "snapshot", {}, []  # which it reads for ever: another copy than the other streams
        if number == 0 and target != LEADER:
            yield from self.evaluations(MAX_CALLS - 1)
        elif number == 1:
            for _ in range(MAX_CALLS - 1):
                record = self.members["r1.0"].commits.record
                yield "gradient", {"step": record.step, "start": 0}, []
        elif number == 2:
            yield from [("hashes", {}, [])] * (MAX_CALLS // 2)
            yield from [("snapshot", {"offer": True}, [])] * (20 * MAX_CALLS)

    def evaluations(self, num: int) -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
        """Of the present state, whichever that is; nobody is there to go on to."""
        server = self.members["r1.0"].server
        assert server is not None
        assert self.leader is not None
        fields = self.leader.microbatches.encode(TinyBatches().batch(0, 0))
        tensors = [*fields, encode(torch.zeros(4, 8), LOSSLESS.name(0, FORWARD))]
        for _ in range(num):
            ledger = server.parts.ledger
            body = {"term": list(ledger.term), "step": ledger.step, "route": ROUTE, "hop": 1}
            yield "evaluate", body, tensors

    async def _take_down(self) -> None:
        for task in self.flooding:
            task.cancel()
        await asyncio.gather(*self.flooding, return_exceptions=True)
        await super()._take_down()

    def start_replica(self, name: str, stage: int | None) -> Member:
        member = super().start_replica(name, stage)
        build = member._build

        async def small(which: int) -> None:
            await build(which)
            assert member.donor is not None
            assert member.server is not None
            member.donor.max_copies = COPIES
            member.donor.backlog_bytes = GRADIENTS * 4 * member.server.state.layout.total

        member._build = small  # type: ignore[method-assign]
        return member

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        self.seen.event(self.log.emit(point, **facts))
        self.look()

    def note(self, what: str, value: int) -> None:
        self.most[what] = max(self.most[what], value)

    def look(self) -> None:
        self.note("events", len(self.seen._events))
        for file in self.log.path.parent.iterdir():
            self.note("bytes of an event file", os.stat(file).st_size)
        if self.leader is not None:
            self.note("microbatches under way", len(self.leader.in_flight))
        all_links = [member.links for member in self.members.values()]
        all_links += [trainer.links for trainer in self.trainers.values()]
        for each in all_links:
            self.note("streams of one peer", max(each._accepted.open.values(), default=0))
            for one in each._channels.values():
                self.note("calls in progress", one._calls_in_progress)
                self.note("answers and orders that wait", len(one._urgent))
                self.note("bytes that wait to be sent", one._bulk_bytes)
        for name, member in self.members.items():
            compute = self.computes[name]
            self.note("tasks of a device", len(compute._queue) + compute._busy)
            if member.server is None or member.donor is None or member.catching_up is None:
                continue
            kept = member.server.parts.kept
            assert kept.kept_bytes == sum(work.kept_bytes for work in kept.works.values())
            self.note("kept bytes", kept.kept_bytes)
            self.note("slots", member.server.slots.held)
            self.note("copies", len(member.donor.copies))
            self.note("gradients kept", len(member.donor.backlog))
            self.note("gradients ahead", len(member.catching_up.updates.ahead))


def test_no_limit_is_exceeded_under_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(channel, "MAX_CALLS_IN_PROGRESS", MAX_CALLS)
    monkeypatch.setattr(channel, "BULK_QUEUE_BYTES", BULK_BYTES)
    monkeypatch.setattr(links, "MAX_STREAMS_PER_PEER", MAX_STREAMS)
    monkeypatch.setattr(memory_stream, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(observe, "MAX_EVENTS", EVENTS)
    stage_bytes = 4 * 72  # of stage 1: a layer of 8 by 8 and its bias
    monkeypatch.setattr(following, "AHEAD_BYTES", GRADIENTS * stage_bytes)
    monkeypatch.setattr(following, "LEAST_BYTES", 1)
    swarm = Flooded(tmp_path)
    assert swarm.run(STEPS)["sha256"] == baseline(STEPS, MICROBATCHES)[0]
    limits = {
        "events": EVENTS,
        "bytes of an event file": EVENT_BYTES,
        "microbatches under way": 2 * SLOTS,
        "streams of one peer": MAX_STREAMS,
        "calls in progress": MAX_CALLS,
        "answers and orders that wait": MAX_CALLS + 4,
        "bytes that wait to be sent": BULK_BYTES + stage_bytes,  # and the last that found room
        # Evaluations; hashes, which all the stranger's calls share; microbatches, or an update that
        # they wait for; copies that are hashed.
        "tasks of a device": EVALUATED_AT_ONCE + 1 + SLOTS + COPIES,
        "kept bytes": KEPT_BYTES + SLOTS * BOUNDARY_BYTES,  # what is not counted yet stays
        "slots": SLOTS,
        "copies": COPIES,
        "gradients kept": GRADIENTS,
        "gradients ahead": GRADIENTS,
    }
    assert swarm.most.keys() == limits.keys()
    assert {what: seen for what, seen in swarm.most.items() if seen > limits[what]} == {}
    # They were pressed: without them there would have been more.
    idle = {what for what, seen in swarm.most.items() if 2 * seen <= limits[what]}
    assert idle == set(), swarm.most
    for what in ("events", "streams of one peer", "slots", "copies", "gradients kept"):
        assert swarm.most[what] == limits[what], (what, swarm.most)
    assert swarm.evictions()
    assert swarm.refused == len(swarm.flooding)
    admitted = {facts["replica"] for _, _, point, facts in swarm.events if point == "admitted"}
    assert {f"{name}#1" for name in JOINERS} <= admitted


class SlowCommits(Swarm):
    """Much waits for each commit: it validates after every step, and an update takes long."""

    update_s = 2.0

    async def start_all(self) -> None:
        self.losses: list[float | None] = []
        await super().start_all()
        for compute in self.computes.values():
            usual = compute._seconds_of
            compute._seconds_of = lambda kind, usual=usual: (
                self.update_s if kind is Kind.UPDATE else usual(kind)
            )

    async def at_record(self, leader: Leader) -> None:
        await super().at_record(leader)
        if leader.next_step:
            self.losses.append(await validate(leader))


def test_validation_does_not_wait_for_those_who_are_full() -> None:
    """It takes no slot, and the step ahead may keep all of them taken for long."""
    microbatches, ahead = 60, 30
    chosen = plan(
        microbatches, validation_microbatches=12, ahead=ahead_of("delayed", ahead, microbatches)
    )
    swarm = SlowCommits(
        replicas=(1, 1, 1), plan=chosen, policy="delayed", ahead=ahead, seconds=(0.1, 0.2)
    )
    swarm.run(3)
    assert len(swarm.losses) >= 2
    assert None not in swarm.losses


@pytest.mark.parametrize(
    ("policy", "microbatches", "stages"), [("exact", 1, 3), ("exact", 2, 5), ("delayed", 4, 5)]
)
def test_all_that_a_leader_sends_may_wait_for_a_commit(
    policy: str, microbatches: int, stages: int
) -> None:
    ahead = microbatches // 4
    chosen = plan(
        microbatches, validation_microbatches=12, ahead=ahead_of(policy, ahead, microbatches)
    )
    swarm = SlowCommits(
        num_stages=stages, replicas=(1,) * stages, plan=chosen, policy=policy, ahead=ahead
    )
    swarm.run(3)
    assert len(swarm.losses) >= 2
    assert None not in swarm.losses
    assert [facts["why"] for _, _, point, facts in swarm.events if point == "failed"] == []
