"""Calls hold their tensors while they wait, for a commit, the device or the rest of their route:
only what a leader can have sent does, and not more of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from peer.calls import FIELDS_CODEC, MicrobatchCall
from peer.evaluations import EVALUATED_AT_ONCE, EVALUATIONS, Evaluations
from peer.stage_server import CALLS_OF_A_MICROBATCH, StageServer
from swarm.ahead import Ahead
from swarm.compute import InlineCompute, Kind, Task, Timed
from swarm.delayed_state import new_state
from swarm.device import Arrivals, Uploader
from swarm.errors import WireError
from swarm.net.channel import CallFailedError, Message
from swarm.terms import Term
from swarm.wire.codecs import WireTensor, encode
from tests.protocol.tiny import OPTIMIZER, TinyBatches, pipeline

T = TypeVar("T")
OLD, NOW, NEXT = (Term(0, counter, "t#1") for counter in (1, 2, 3))
MICROBATCHES = 4
# Of the second step, and of the half of it that waits for the commit of the first.
CALL = MicrobatchCall(NOW, 1, 3, 1, 0, ("a#1",), 0, 4.0, False)
FIELDS = [
    encode(torch.from_numpy(each), FIELDS_CODEC)
    for _, each in sorted(TinyBatches().batch(0, 0).items())
]


async def all_that_needs_no_waiting() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class BusyCompute(InlineCompute):
    """Begins nothing until `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self.free.set()

    async def run(self, kind: Kind, task: Task[T], step: int = 0, **others: Any) -> Timed[T]:
        await self.free.wait()
        return await super().run(kind, task, step, **others)


class CountingUploader(Uploader):
    """How often something was copied to the device."""

    uploads = 0

    def begin(self, wires: Sequence[WireTensor]) -> Arrivals:
        self.uploads += 1
        return super().begin(wires)


class Replica:
    """At step 0 under the term `NOW`."""

    def __init__(self) -> None:
        shape, ahead = pipeline(1), Ahead(2, MICROBATCHES)
        self.state = new_state(lambda: shape.build_stage(0), OPTIMIZER, ahead=ahead)
        self.compute = BusyCompute()
        self.server = StageServer(
            0, self.state, shape, self.compute, num_microbatches=MICROBATCHES, ahead=ahead
        )
        self.server.uploader = self.uploader = CountingUploader(self.state.device)
        self.server.parts.see(NOW)
        self.methods = {**self.server.methods(), **Evaluations(self.server).methods()}
        self.calls: list[asyncio.Task[Message | None]] = []

    async def call(
        self, method: str, body: dict[str, Any], peer: str = "b"
    ) -> asyncio.Task[Message | None]:
        """After all that it does without waiting."""
        handle: Any = self.methods[method].handle
        channel = SimpleNamespace(peer=peer)
        self.calls.append(asyncio.ensure_future(handle(channel, Message(body, FIELDS))))
        await all_that_needs_no_waiting()
        return self.calls[-1]

    async def aclose(self) -> None:
        for call in self.calls:
            call.cancel()
        await asyncio.gather(*self.calls, return_exceptions=True)
        await self.server.aclose()


def why(call: asyncio.Task[Message | None]) -> str:
    assert call.done(), "it waits"
    return str(call.exception())


def evaluation(term: Term, step: int) -> dict[str, Any]:
    return {"term": list(term), "step": step, "route": ["a#1"], "hop": 0}


async def another_term_does_not_wait(replica: Replica) -> None:
    succeeded, unheard = "term 1 has been succeeded", "no order of that term has come here"
    for term, reason in ((OLD, succeeded), (NEXT, unheard)):
        body = replace(CALL, term=term).body()
        assert reason in why(await replica.call("microbatch", body))
        assert reason in why(await replica.call("evaluate", evaluation(term, 1)))


async def a_far_step_does_not_wait(replica: Replica) -> None:
    for step in (5, 10**6):
        assert f"at step 0, not {step}" in why(
            await replica.call("evaluate", evaluation(NOW, step))
        )
        assert f"not {step}" in why(
            await replica.call("microbatch", replace(CALL, step=step).body())
        )


async def the_newest_try_waits_and_no_other(replica: Replica) -> None:
    older = await replica.call("microbatch", CALL.body())
    newer = await replica.call("microbatch", replace(CALL, try_=2).body())
    assert "given up here for a newer try" in why(older)
    assert isinstance(older.exception(), CallFailedError), (
        "at this hop, so that no other is suspected"
    )
    late = await replica.call("microbatch", CALL.body())
    assert "try 2 has overtaken try 1" in why(late)
    assert not newer.done()
    other = await replica.call("microbatch", replace(CALL, index=2).body())
    assert not other.done()
    newer.cancel()
    await asyncio.gather(newer, return_exceptions=True)
    assert newer.cancelled()
    assert list(replica.server._awaiting.at) == [(CALL.step, 2)]
    replica.server.parts.committed()
    await all_that_needs_no_waiting()
    assert not replica.server._awaiting.at


async def what_need_not_wait_is_not_counted(replica: Replica) -> None:
    await replica.call("microbatch", CALL.body())
    await replica.call("microbatch", replace(CALL, step=0).body())
    assert list(replica.server._awaiting.at) == [(CALL.step, CALL.index)]


async def no_more_evaluations_wait_than_a_leader_asks_for(replica: Replica) -> None:
    calls = [await replica.call("evaluate", evaluation(NOW, 1)) for _ in range(EVALUATIONS)]
    assert not any(call.done() for call in calls)
    assert "too many evaluations at once" in why(await replica.call("evaluate", evaluation(NOW, 1)))
    calls[0].cancel()
    await all_that_needs_no_waiting()
    assert not (await replica.call("evaluate", evaluation(NOW, 1))).done(), "there is room again"
    other = await replica.call("evaluate", evaluation(NOW, 1), peer="c")
    assert not other.done(), "nobody takes another's room"


async def a_new_leader_counts_its_tries_anew(replica: Replica) -> None:
    older = await replica.call("microbatch", replace(CALL, try_=7).body())
    replica.server.parts.see(NEXT)
    newer = await replica.call("microbatch", replace(CALL, term=NEXT).body())
    assert "given up here for a newer try" in why(older)
    assert not newer.done()


async def evaluations_wait_for_the_device_without_being_copied_there(replica: Replica) -> None:
    replica.compute.free.clear()
    calls = [await replica.call("evaluate", evaluation(NOW, 0)) for _ in range(EVALUATIONS)]
    assert "too many evaluations at once" in why(await replica.call("evaluate", evaluation(NOW, 0)))
    assert not any(call.done() for call in calls)
    assert replica.uploader.uploads == EVALUATED_AT_ONCE
    replica.compute.free.set()
    answers = await asyncio.gather(*calls)
    assert len({answer.body["loss"] for answer in answers if answer is not None}) == 1
    assert replica.uploader.uploads == EVALUATIONS


async def evaluations_that_waited_past_a_commit_are_refused(replica: Replica) -> None:
    replica.compute.free.clear()
    calls = [await replica.call("evaluate", evaluation(NOW, 0)) for _ in range(EVALUATIONS)]
    replica.server.parts.committed()
    replica.compute.free.set()
    await all_that_needs_no_waiting()
    assert all("at step 1, not 0" in why(call) for call in calls[EVALUATED_AT_ONCE:])


async def no_more_calls_of_a_microbatch_than_a_leader_makes(replica: Replica) -> None:
    replica.compute.free.clear()
    body = replace(CALL, step=0, index=0).body()
    calls = [await replica.call("microbatch", body) for _ in range(10)]
    for call in calls[:-CALLS_OF_A_MICROBATCH]:
        assert "given up here for a newer try" in why(call)
    newest = calls[-CALLS_OF_A_MICROBATCH:]
    older = await replica.call("microbatch", replace(CALL, step=0, index=0, try_=0).body())
    assert "try 1 has overtaken try 0" in why(older)
    stranger = await replica.call("microbatch", body, peer="c")
    assert not any(call.done() for call in (*newest, stranger)), "nobody ends another's"
    stranger.cancel()
    await all_that_needs_no_waiting()
    assert len(replica.server._serving.tasks) == len(newest), "a call ends with its channel"
    other = await replica.call("microbatch", replace(CALL, step=0, index=1).body())
    assert not any(call.done() for call in (*newest, other))
    replica.compute.free.set()
    answers = await asyncio.gather(*newest)
    assert len({str(answer.body) for answer in answers if answer is not None}) == 1
    await other
    assert replica.server.parts.ledger.counted == {0, 1}
    assert replica.compute.counts == {Kind.FORWARD: 2, Kind.BACKWARD: 2}, "once, whoever asked"
    assert not replica.server._serving.at


async def calls_end_with_the_server(replica: Replica) -> None:
    replica.compute.free.clear()
    call = await replica.call("microbatch", replace(CALL, step=0, index=0).body())
    await replica.server.aclose()
    await all_that_needs_no_waiting()
    assert why(call) == "given up here"
    assert not replica.server._serving.at


@pytest.mark.parametrize(
    "check",
    [
        another_term_does_not_wait,
        a_far_step_does_not_wait,
        the_newest_try_waits_and_no_other,
        what_need_not_wait_is_not_counted,
        no_more_evaluations_wait_than_a_leader_asks_for,
        a_new_leader_counts_its_tries_anew,
        evaluations_wait_for_the_device_without_being_copied_there,
        evaluations_that_waited_past_a_commit_are_refused,
        no_more_calls_of_a_microbatch_than_a_leader_makes,
        calls_end_with_the_server,
    ],
)
def test_of_what_waits(check: Any) -> None:
    async def main() -> None:
        replica = Replica()
        try:
            await check(replica)
        finally:
            await replica.aclose()

    asyncio.run(main())


def test_a_microbatch_that_no_step_has_is_refused_before_its_tensors_are_read() -> None:
    server = Replica().server
    server.links = type("Links", (), {"incarnation": "a#1"})()
    check = server.methods()["microbatch"].check
    metas = [each.meta for each in FIELDS]
    check(CALL.body(), metas)
    with pytest.raises(WireError, match=f"^microbatch {MICROBATCHES} of {MICROBATCHES}$"):
        check(replace(CALL, index=MICROBATCHES).body(), metas)
