"""Averaging is ordered as soon as all microbatches are given away: members begin when each has
counted its own. What comes between ends the attempt, and never shows in the result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from peer.averaging import CONFIRM_S, Averaging
from peer.calls import MicrobatchCall
from peer.commits import Commits
from peer.stage_server import StageServer
from swarm.averaging.errors import RoundFailedError
from swarm.averaging.policy import ExactPolicy, Update
from swarm.ledger import Do, Ledger
from swarm.net.channel import CallFailedError, Message
from swarm.step import Group
from swarm.terms import Term
from swarm.wire.codecs import WireTensor
from tests.protocol.simulated import Fault, Swarm, baseline, plan
from tests.protocol.test_holes import corrupted, reasons

HOP_S = 0.5
TRAINERS = ("t0", "t1", "t2")


def times(swarm: Swarm, point: str, step: int, who: str | None = None) -> list[float]:
    return [
        at
        for at, name, passed, facts in swarm.events
        if (passed, facts.get("step")) == (point, step) and who in (None, name)
    ]


def attempt_of(swarm: Swarm, step: int) -> int:
    """The averaging attempt with which a step was committed, from 1."""
    before = swarm.results[step - 1].record if step else None
    record = swarm.results[step].record
    assert record is not None
    return record.ballot.attempt - (before.ballot.attempt if before is not None else 0)


def test_a_member_waits_for_nobody_to_tell_it_that_it_has_counted_all() -> None:
    """From the last backward to the record there are streams to open (a round trip), contributions,
    sums and answers. Neither the last answer's way through the stages nor an order's way back."""
    swarm = Swarm(latency_s=HOP_S, plan=plan(6, 3))
    swarm.network.jitter = 0.0
    assert swarm.run()["sha256"] == baseline(3, 6)[0]
    for step in (1, 2):  # some come into the first while others average it
        last = max(times(swarm, "counted", step))
        for name in swarm.members:
            counted, began = (
                times(swarm, "counted", step, name),
                times(swarm, "average", step, name),
            )
            assert 0 <= began[0] - max(counted) < 0.1, (step, name)
        (record,) = times(swarm, "record", step)
        assert record - last < 5.2 * HOP_S
        assert attempt_of(swarm, step) == 1


def test_a_term_that_has_voided_nothing_yet_orders_nothing_early() -> None:
    """Of several trainers one may have accepted a record of this step under an earlier leader."""
    swarm = Swarm(trainer_ids=TRAINERS, latency_s=HOP_S, plan=plan(6, 3))
    assert swarm.run()["sha256"] == baseline(3, 6)[0]
    acknowledged = [max(times(swarm, "acknowledged", step)) for step in range(3)]
    began = [min(times(swarm, "average", step)) for step in range(3)]
    assert began[0] > acknowledged[0]
    assert began[1] < acknowledged[1]
    assert began[2] < acknowledged[2]


@pytest.mark.parametrize("victim", ["r0.1", "r1.1", "r2.1"])
@pytest.mark.parametrize("action", ["kill", "reset", "freeze"])
def test_whoever_is_lost_while_others_average_already(victim: str, action: str) -> None:
    """The last stage has begun, the first still computes."""
    fault = Fault(
        "average",
        action,
        replica="r2.0",
        step=1,
        victim=victim,
        duration_s=8.0 * (action == "freeze"),
    )
    swarm = Swarm(latency_s=0.05, seconds=(0.1, 0.2), plan=plan(12, 4), faults=[fault])
    assert swarm.run(4)["sha256"] == baseline(4, 12)[0]
    assert swarm.fired == [fault], "nothing was injected"
    assert min(times(swarm, "average", 1)) < max(times(swarm, "acknowledged", 1))
    if action == "kill":
        assert attempt_of(swarm, 1) > 1
    assert attempt_of(swarm, 3) == 1


def test_who_comes_while_others_average_already_is_a_member_too() -> None:
    """The groups are others then: the record names the joiner, and its twins averaged with it."""
    joined = Fault("average", "start", replica="r2.0", step=1, victim="r0.2", stage=0)
    slow = {"r0.0": 8.0, "r0.1": 8.0}
    swarm = Swarm(latency_s=0.01, seconds=(0.1, 0.2), speed=slow, plan=plan(12, 4), faults=[joined])
    assert swarm.run(4)["sha256"] == baseline(4, 12)[0]
    assert swarm.fired == [joined]
    (admitted,) = [
        (at, facts["step"])
        for at, _, point, facts in swarm.events
        if point == "admitted" and facts["replica"] == "r0.2#1"
    ]
    record = swarm.results[admitted[1]].record
    assert record is not None
    assert "r0.2#1" in record.members[0]


def test_a_wrong_state_is_heard_of_although_its_attempt_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says so after the death of another has ended the attempt: what it sent to its neighbours
    was wrong, and the whole step starts anew."""
    swarm = Swarm(latency_s=0.05, seconds=(0.1, 0.2), plan=plan(12, 4))
    corrupted(swarm, "r1.1", "committed", 0)
    verify = Commits.verified
    said_at = list[float]()

    def verified(commits: Commits, value: str, step: int) -> str:
        try:
            return verify(commits, value, step)
        except CallFailedError:
            said_at.append(swarm.loop.now)
            if len(said_at) == 1:  # the leader hears of this death before it gets that answer
                swarm.kill("r0.1")
            raise

    monkeypatch.setattr(Commits, "verified", verified)
    assert swarm.run(4)["sha256"] == baseline(4, 12)[0]
    assert attempt_of(swarm, 1) > 1
    (diverged,) = [at for at, _, point, _ in swarm.events if point == "diverged"]
    (lost,) = [
        at
        for at, _, point, facts in swarm.events
        if (point, facts.get("replica")) == ("left", "r0.1#1")
    ]
    assert said_at[0] <= lost < diverged


def test_who_has_not_counted_what_its_route_answered_for_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica makes up the answer of the last stage, which waits for that microbatch."""
    go_on, made_up = StageServer._go_on, list[int]()

    async def lie(
        self: StageServer, call: MicrobatchCall, tensors: Any, y: Sequence[WireTensor]
    ) -> Any:
        if (self.stage, call.step, made_up) != (1, 1, []):
            return await go_on(self, call, tensors, y)
        made_up.append(call.index)
        return Message({"loss": 0.0, "timings": [[0.1, 0.1, 0.0]]}), y

    monkeypatch.setattr(StageServer, "_go_on", lie)
    swarm = Swarm(replicas=(1, 1, 2), plan=plan(6, 3))
    swarm.run(limit_s=60)
    assert len(made_up) == 1
    (expelled,) = reasons(swarm)
    assert expelled.startswith("r2.")


def test_nobody_is_expelled_for_saying_that_an_early_round_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long after the step was complete, when those who owe have been sent the order again."""
    prepare, order, failed = ExactPolicy.prepare, Averaging._order, list[str]()

    async def fail(
        self: ExactPolicy, round_id: str, members: Sequence[str], *others: Any
    ) -> Update:
        stage, step = round_id.split("/")[-3:-1]
        if (stage, step) != ("0", "1") or len(failed) >= len(members):
            return await prepare(self, round_id, members, *others)
        failed.append(round_id)
        await asyncio.sleep(CONFIRM_S + 5.0)
        raise RoundFailedError("has been silent", peer=members[-1])

    async def answered_last(self: Averaging, group: Group, member: str, *others: Any) -> Any:
        try:
            return await order(self, group, member, *others)
        except CallFailedError:
            if others[0].early:  # both orders are answered at once, in either order
                await asyncio.sleep(0.01)
            raise

    monkeypatch.setattr(ExactPolicy, "prepare", fail)
    monkeypatch.setattr(Averaging, "_order", answered_last)
    swarm = Swarm(replicas=(2, 1, 1), plan=plan(6, 3))
    assert swarm.run(limit_s=60)["sha256"] == baseline(3, 6)[0]
    assert len(failed) == 2
    assert attempt_of(swarm, 1) == 2
    assert reasons(swarm) == []


def test_an_early_order_waits_for_what_lacks_and_for_nothing_else() -> None:
    term = Term(0, 1, "leader#1")
    ledger = Ledger()
    for index in (0, 1, 2):
        assert ledger.on_call(term, 0, index, index, 0).do is Do.RUN
        ledger.on_forward_done(index)

    def count(index: int) -> None:
        assert ledger.on_gradient(term, 0, index, index).do is Do.RUN
        assert ledger.on_counted(0, index)

    def order(attempt: int, expected: set[int], **more: Any) -> Do:
        return ledger.freeze(term, 0, attempt, expected, **more).do

    assert order(1, {0, 1}, early=True) is Do.AWAIT_COUNT
    assert order(1, {0, 1}) is Do.REFUSE
    count(0)
    assert order(1, {0, 1}, early=True) is Do.AWAIT_COUNT
    assert ledger.frozen_attempt is None
    count(1)
    assert order(1, {0, 1}, early=True) is Do.RUN
    assert ledger.frozen_attempt == 1
    ledger.abort(term, 0, 1)
    assert order(1, {0, 1}, early=True) is Do.REFUSE  # aborted
    count(2)
    assert order(2, {0, 1}, early=True) is Do.REFUSE  # it has more
    assert order(2, {0, 1, 2, 3}, early=True) is Do.AWAIT_COUNT
    ledger.advance(1)
    assert order(2, {0, 1, 2, 3}, early=True) is Do.REFUSE  # the step is over
