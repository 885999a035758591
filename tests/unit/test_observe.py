"""What is told to whoever looks on: bounded, in order, and never at the cost of the run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from peer.observe import (
    ANSWERS_PER_S,
    EVENTS_PER_ANSWER,
    MAX_ASKERS,
    MAX_EVENTS,
    MAX_LOSSES,
    MAX_ROWS,
    MIN_INTERVAL_S,
    NUM_SAMPLES,
    Allowance,
    Observations,
    activity_of,
)
from swarm.errors import RefusedError
from swarm.net.channel import Message
from swarm.wire.frames import encode_frame


def observations(clock: list[float] | None = None, **status: object) -> Observations:
    now = clock or [1000.0]
    return Observations("life", lambda: status, clock=lambda: now[0])


def test_events_come_once_in_order_and_from_the_start_for_a_stranger() -> None:
    shown = observations()
    for number in range(600):
        shown.event({"t": 1.0, "event": "step", "step": number})
    seen, after = [], 0
    while True:
        body = shown.body({"life": "life", "after": after})
        if not body["events"]:
            break
        assert len(body["events"]) <= EVENTS_PER_ANSWER
        seen += [event["step"] for event in body["events"]]
        after = body["after"]
    assert seen == list(range(600))
    assert shown.body({})["events"][0]["step"] == 0
    assert shown.body({"life": "another", "after": 500})["events"][0]["step"] == 0


@pytest.mark.parametrize("after", [10**30, -5, "x", None, 3.5, [1]], ids=str)
def test_any_question_has_an_answer(after: object) -> None:
    shown = observations()
    shown.event({"t": 1.0, "event": "hold"})
    body = shown.body({"life": "life", "after": after})
    assert 0 <= body["after"] <= 1


def test_an_answer_is_bounded_and_fits_into_a_frame() -> None:
    row = {"replica": "Qm" + "a" * 44 + "#" + "0" * 16, "stage": 1, "standing": "serving"}
    row |= {"step": 1, "device": "cpu", "counted": 12345, "reason": "r" * 160}
    row |= {"service_s": 0.1, "outstanding": 2, "share": 0.5}
    shown = observations(replicas=[row] * 5000, losses=[[step, 1.0] for step in range(200)])
    for number in range(3 * MAX_EVENTS):
        shown.event({"t": 1.0, "event": "expelled", "step": number, "reason": "r" * 160})
    body = shown.body({})
    assert len(body["status"]["replicas"]) == MAX_ROWS
    assert len(body["status"]["losses"]) == MAX_LOSSES
    assert body["events"][0]["step"] == 2 * MAX_EVENTS
    encode_frame({"kind": "reply", "id": 1, "body": body})
    assert msgpack.packb(body)


def test_microbatches_are_sampled_with_their_route() -> None:
    clock = [1000.0]
    shown = observations(clock)
    for index in range(1000):
        shown.probe("issue", {"step": 3, "index": index})
        clock[0] += 0.06
        shown.probe("acknowledged", {"step": 3, "index": index, "route": ("a#1", "b#2")})
    samples = shown.body({})["samples"]
    assert len(samples) == NUM_SAMPLES
    assert samples[-1] == {
        "t": pytest.approx(clock[0] - 0.06, abs=0.1),
        "wall_s": 0.06,
        "step": 3,
        "index": samples[-1]["index"],
        "route": ["a#1", "b#2"],
    }
    shown.probe("acknowledged", {"step": 4, "index": 77, "route": ()})  # never issued: no sample
    assert shown.body({})["samples"] == samples


def test_who_asks_too_often_is_refused_and_so_are_too_many() -> None:
    now = [0.0]
    allowance = Allowance(lambda: now[0])
    allowance.take("a")
    with pytest.raises(RefusedError, match="too often"):
        allowance.take("a")
    now[0] += MIN_INTERVAL_S
    allowance.take("a")
    answered = sum(_is_answered(allowance, f"stranger {n}") for n in range(3 * MAX_ASKERS))
    assert 0 < answered <= ANSWERS_PER_S
    now[0] += 1.0
    allowance.take("a")


def test_the_status_is_for_whoever_asks_now_and_then() -> None:
    """And for who has just asked to observe."""

    async def main() -> None:
        shown = observations(state="training")
        channel: Any = SimpleNamespace(peer="a")
        await shown.answer(channel, Message({}))
        assert (await shown.answer_status(channel, Message({}))).body == {"state": "training"}
        with pytest.raises(RefusedError, match="too often"):
            await shown.answer_status(channel, Message({}))
        others = [SimpleNamespace(peer=f"stranger {number}") for number in range(1000)]
        answers = await asyncio.gather(
            *(shown.answer_status(cast(Any, other), Message({})) for other in others),
            return_exceptions=True,
        )
        answered = [each for each in answers if isinstance(each, Message)]
        assert 0 < len(answered) <= 2 * ANSWERS_PER_S

    asyncio.run(main())


def _is_answered(allowance: Allowance, asker: str) -> bool:
    try:
        allowance.take(asker)
    except RefusedError:
        return False
    return True


def test_a_replica_does_one_thing_at_a_time() -> None:
    nothing = {"settled": True, "averaging": False, "computing": False, "sending": False}
    assert activity_of(**nothing) == "wait"
    assert activity_of(**{**nothing, "sending": True}) == "transfer"
    assert activity_of(**{**nothing, "sending": True, "computing": True}) == "compute"
    assert activity_of(**{**nothing, "computing": True, "averaging": True}) == "average"
    assert activity_of(**{**nothing, "settled": False, "averaging": True}) == "move"
