"""What a replica makes wait for a commit holds its tensors: only what a leader can have sent waits,
and not more of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from peer.calls import FIELDS_CODEC, MicrobatchCall
from peer.stage_server import EVALUATIONS, StageServer
from swarm.ahead import Ahead
from swarm.compute import InlineCompute
from swarm.delayed_state import new_state
from swarm.errors import WireError
from swarm.net.channel import CallFailedError, Message
from swarm.terms import Term
from swarm.wire.codecs import encode
from tests.protocol.tiny import OPTIMIZER, TinyBatches, pipeline

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


class Replica:
    """At step 0 under the term `NOW`."""

    def __init__(self) -> None:
        shape, ahead = pipeline(1), Ahead(2, MICROBATCHES)
        self.state = new_state(lambda: shape.build_stage(0), OPTIMIZER, ahead=ahead)
        self.server = StageServer(
            0, self.state, shape, InlineCompute(), num_microbatches=MICROBATCHES, ahead=ahead
        )
        self.server.parts.see(NOW)
        self.calls: list[asyncio.Task[Message | None]] = []

    async def call(self, method: str, body: dict[str, Any]) -> asyncio.Task[Message | None]:
        """After all that it does without waiting."""
        handle: Any = self.server.methods()[method].handle
        self.calls.append(asyncio.ensure_future(handle(None, Message(body, FIELDS))))
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
    assert list(replica.server._awaiting) == [(CALL.step, 2)]
    replica.server.parts.committed()
    await all_that_needs_no_waiting()
    assert not replica.server._awaiting


async def what_need_not_wait_is_not_counted(replica: Replica) -> None:
    await replica.call("microbatch", CALL.body())
    await replica.call("microbatch", replace(CALL, step=0).body())
    assert list(replica.server._awaiting) == [(CALL.step, CALL.index)]


async def no_more_evaluations_wait_than_a_leader_asks_for(replica: Replica) -> None:
    calls = [await replica.call("evaluate", evaluation(NOW, 1)) for _ in range(EVALUATIONS)]
    assert not any(call.done() for call in calls)
    assert "too many evaluations wait" in why(await replica.call("evaluate", evaluation(NOW, 1)))
    calls[0].cancel()
    await all_that_needs_no_waiting()
    assert not (await replica.call("evaluate", evaluation(NOW, 1))).done(), "there is room again"


@pytest.mark.parametrize(
    "check",
    [
        another_term_does_not_wait,
        a_far_step_does_not_wait,
        the_newest_try_waits_and_no_other,
        what_need_not_wait_is_not_counted,
        no_more_evaluations_wait_than_a_leader_asks_for,
    ],
)
def test_of_what_waits_for_a_commit(check: Any) -> None:
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
