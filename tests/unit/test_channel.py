"""Channels and links: many calls over one stream, errors, silence, hostile bytes, one dial."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from swarm.errors import (
    JoinError,
    RefusedError,
    StageFailedError,
    StreamClosedError,
    UnreachableError,
    WireError,
)
from swarm.net import links as links_module
from swarm.net.channel import (
    BULK_QUEUE_BYTES,
    MAX_CALLS_IN_PROGRESS,
    UNANSWERED,
    CallFailedError,
    Channel,
    Message,
    Method,
)
from swarm.net.links import PROTOCOL, VERSION_PROTOCOL, Links
from swarm.net.memory import MemoryNetwork
from swarm.net.transport import Stream, until_ended
from swarm.sim.virtual_time import run
from swarm.wire.codecs import decode, encode
from swarm.wire.frames import PROTOCOL_VERSION, check_tensors, encode_frame, no_tensors

RUN = "run"


async def echo(channel: Channel, message: Message) -> Message:
    await asyncio.sleep(message.body.get("wait_s", 0.0))
    return Message({"body": message.body, "from": channel.peer}, message.tensors)


async def fail(channel: Channel, message: Message) -> Message:
    match message.body["how"]:
        case "refused":
            raise RefusedError("no")
        case "stage":
            raise StageFailedError("a kernel")
        case "call":
            raise CallFailedError("unreachable", "next hop", hop=2)
        case "wire":
            raise WireError("bad bytes")
    raise KeyError("a defect")


def anything(body: dict[str, Any], metas: object) -> None:
    if body.get("poison"):
        raise WireError("poison")


METHODS = {
    "echo": Method(echo, anything),
    "fail": Method(fail, no_tensors),
}


@dataclass
class Pair:
    """Peers a and b of one run, with a channel from a to b."""

    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    closed: list[str] = field(default_factory=list)

    async def open(self) -> Channel:
        self.a, self.b = (
            Links(
                self.network.transport(name),
                RUN,
                f"{name}#1",
                dict(METHODS),
                on_close=lambda channel: self.closed.append(channel.incarnation),
            )
            for name in "ab"
        )
        self.a.serve()
        self.b.serve()
        return await self.a.channel("b#1")

    async def close(self) -> None:
        for links in (self.a, self.b):
            await links.aclose()
        for transport in self.network.transports.values():
            await transport.close()


def with_pair(check: Callable[[Pair, Channel], Awaitable[None]]) -> None:
    async def main() -> None:
        pair = Pair()
        channel = await pair.open()
        try:
            await check(pair, channel)
        finally:
            await pair.close()
        assert not pair.network.handler_errors

    run(main())


def test_many_calls_at_once_both_ways() -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        await channel.call("echo", {})
        back = pair.b.open_channel("a#1")
        assert back is not None

        async def call(number: int) -> None:
            tensor = torch.full((number % 7 + 1, 1000), float(number))
            wait_s = (number * 7919 % 13) / 10
            side = channel if number % 2 else back
            answer = await side.call(
                "echo",
                {"number": number, "wait_s": wait_s},
                [encode(tensor, "float32")],
                check_reply=lambda _, metas: None,
            )
            assert answer.body["body"]["number"] == number
            assert answer.body["from"] == ("a" if number % 2 else "b")
            assert torch.equal(decode(answer.tensors[0]), tensor)

        await asyncio.gather(*(call(number) for number in range(100)))
        assert len(pair.network.transports["a"].streams) == 1

    with_pair(check)


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("refused", "refused", "no"),
        ("stage", "failed", "a kernel"),
        ("call", "unreachable", "next hop"),
        ("wire", "refused", "bad bytes"),
        ("defect", "failed", "KeyError"),
    ],
)
def test_errors_come_back_and_the_channel_lives(how: str, kind: str, text: str) -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        with pytest.raises(CallFailedError, match=text) as failed:
            await channel.call("fail", {"how": how})
        assert failed.value.kind == kind
        assert failed.value.detail == ({"hop": 2} if how == "call" else {})
        assert (await channel.call("echo", {})).body["from"] == "a"

    with_pair(check)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged for people who did not ask for it; none of it is a traceback."""
    records = [each for each in caplog.records if each.levelno > logging.DEBUG]
    assert not any(each.exc_info for each in records)
    return [each.getMessage() for each in records]


def test_a_defect_is_one_line_and_its_traceback_for_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        with pytest.raises(CallFailedError):
            await channel.call("fail", {"how": "defect"})
        pair.b.methods["fail"] = Method(fail, lambda *_: {}["a\nkey"])
        with pytest.raises(StreamClosedError):
            await channel.call("fail", {})

    with caplog.at_level(logging.DEBUG):
        with_pair(check)
    assert errors(caplog) == [
        "fail of a: KeyError('a defect')",
        "channel to a: KeyError('a\\nkey')",
    ]
    assert sum(each.exc_info is not None for each in caplog.records) == 2


def test_no_memory_for_what_comes_in_ends_the_channel_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def allocate(num_bytes: int) -> torch.Tensor:
        raise RuntimeError("can't allocate memory\nException raised from")

    async def check(pair: Pair, channel: Channel) -> None:
        await channel.call("echo", {})
        back = pair.b.open_channel("a#1")
        assert back is not None
        back._allocate = allocate
        await channel.call("echo", {})  # for the frame that it waits for, it has the old one
        with pytest.raises(StreamClosedError):
            await channel.call("echo", {}, [encode(torch.zeros(3), "float32")])

    with_pair(check)
    (line,) = errors(caplog)
    assert line == "channel to a: no memory for 12 bytes that came in - free some on this machine"


def test_silence_ends_the_channel_within_seconds_and_work_does_not() -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        await channel.call("echo", {"wait_s": 60.0})  # slow is not silent
        began = loop.time()
        call = asyncio.create_task(channel.call("echo", {"wait_s": 60.0}))
        await asyncio.sleep(0.1)
        pair.network.freeze("b")
        with pytest.raises(StreamClosedError, match="silent"):
            await call
        assert 4.0 < loop.time() - began <= 5.1
        with pytest.raises(StreamClosedError):
            await channel.call("echo", {})
        pair.network.thaw("b")
        await asyncio.sleep(0.1)
        assert sorted(pair.closed) == ["a#1", "b#1"]
        assert (await (await pair.a.channel("b#1")).call("echo", {})).body

    with_pair(check)


def test_an_uneven_line_may_be_silent_for_longer() -> None:
    """Twice as long as it was of late; on an even line a silence ends it as ever."""

    async def check(pair: Pair, channel: Channel) -> None:
        async def silent(seconds: float) -> None:
            pair.network.freeze("b")
            await asyncio.sleep(seconds)
            pair.network.thaw("b")
            await asyncio.sleep(1.5)

        await silent(4.0)
        assert channel.unevenness > 1.0
        await silent(5.5)
        assert channel.ended is None
        await asyncio.sleep(600.0)
        assert channel.unevenness == 1.0
        await silent(5.5)
        assert channel.ended is not None

    with_pair(check)


def test_death_ends_every_call_at_once() -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        calls = [asyncio.create_task(channel.call("echo", {"wait_s": 9.0})) for _ in range(5)]
        await asyncio.sleep(1.0)
        began = loop.time()
        pair.network.kill("b")
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, StreamClosedError) for each in results)
        assert loop.time() - began < 0.1

    with_pair(check)


def test_a_call_given_up_is_answered_into_the_void() -> None:
    """However large its answer: it must not cost the channel."""

    async def check(pair: Pair, channel: Channel) -> None:
        large = [encode(torch.zeros(20 << 20), "float32")]
        call = asyncio.create_task(
            channel.call("echo", {"wait_s": 1.0}, large, check_reply=lambda _, metas: None)
        )
        await asyncio.sleep(1.5)
        call.cancel()
        await asyncio.sleep(5.0)
        assert channel.ended is None
        assert (await channel.call("echo", {})).body
        assert not channel._pending

    with_pair(check)


def test_who_answers_nothing_does_not_fill_the_memory_of_who_asks() -> None:
    """Whether or not it reads what it is asked."""

    async def never(_: Channel, __: Message) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def check(pair: Pair, channel: Channel) -> None:
        # The other side is one that does not end the channel for too many calls.
        pair.b.methods["echo"] = Method(never, anything)
        back = pair.b.open_channel("a#1")
        assert back is not None
        limit = UNANSWERED * MAX_CALLS_IN_PROGRESS
        back._calls_in_progress = -limit
        calls = [asyncio.create_task(channel.call("echo", {})) for _ in range(limit)]
        await asyncio.sleep(1.0)
        assert channel.ended is None
        with pytest.raises(StreamClosedError, match="calls without an answer"):
            await channel.call("echo", {})
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, StreamClosedError) for each in results)
        assert not channel._pending

    with_pair(check)


def test_an_answer_that_breaks_its_check_ends_the_channel() -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        with pytest.raises(StreamClosedError, match="expected"):
            await channel.call(
                "echo",
                {},
                [encode(torch.zeros(3), "float32")],
                check_reply=lambda _, metas: check_tensors(metas, (), "float32"),
            )

    with_pair(check)


FRAMES = {
    "junk": [b"GET / HTTP/1.1\r\n\r\n" + bytes(64)],
    "unknown method": encode_frame({"kind": "call", "id": 1, "method": "exec", "body": {}}),
    "no id": encode_frame({"kind": "call", "method": "echo", "body": {}}),
    "body is no map": encode_frame({"kind": "call", "id": 1, "method": "echo", "body": [1]}),
    "unknown kind": encode_frame({"kind": "shell"}),
    "no kind": encode_frame({}),
    "unasked answer": encode_frame({"kind": "reply", "id": 77, "body": {}}),
    "ping with tensors": encode_frame({"kind": "ping"}, [encode(torch.zeros(3), "float32")]),
    "refused by the check": encode_frame(
        {"kind": "call", "id": 1, "method": "echo", "body": {"poison": True}}
    ),
    "detail is no map": encode_frame(
        {"kind": "error", "id": 1, "body": {"error": "x", "detail": [1]}}
    ),
}


@pytest.mark.parametrize("name", FRAMES)
def test_hostile_frames_end_their_channel_only(name: str) -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        mallory = pair.network.transport("m")
        stream = await mallory.dial("b", PROTOCOL)
        await stream.send(encode_frame({"kind": "hello", "run": RUN, "incarnation": "m#1"}))
        await asyncio.sleep(1.0)
        there = pair.b.open_channel("m#1")
        assert there is not None
        waiting = asyncio.create_task(there.call("echo", {}))
        await asyncio.sleep(0.1)
        await stream.send(FRAMES[name])
        await asyncio.sleep(1.0)
        assert pair.b.open_channel("m#1") is None
        with pytest.raises(StreamClosedError):
            await waiting
        assert channel.ended is None
        assert (await channel.call("echo", {})).body["from"] == "a"

    with_pair(check)


@pytest.mark.parametrize(
    "hello",
    [
        {"kind": "hello", "run": RUN, "incarnation": "a#1"},  # somebody else's name
        {"kind": "hello", "run": RUN},
        {"kind": "call", "run": RUN, "incarnation": "m#1"},
        {"kind": "hello", "run": "another", "incarnation": "m#1"},
        {"kind": "hello", "run": RUN, "incarnation": "m#\u20ac"},
        {"kind": "hello", "run": RUN, "incarnation": "m#1", "more": "x" * 4096},
    ],
)
def test_a_hello_that_lies_opens_nothing(hello: dict[str, Any]) -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        stream = await pair.network.transport("m").dial("b", PROTOCOL)
        await stream.send(encode_frame(hello))
        await asyncio.sleep(1.0)
        assert pair.b.open_channel("m") is None
        assert pair.b.open_channel("a#1") is not None

    with_pair(check)


def test_links_dial_once_and_only_the_life_they_mean() -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        network = pair.network
        c = Links(network.transport("c"), RUN, "c#1", {})
        c.serve()
        channels = await asyncio.gather(*(c.channel("b#1") for _ in range(5)))
        assert all(each is channels[0] for each in channels)
        assert await c.channel("b#1") is channels[0]
        with pytest.raises(UnreachableError, match="is gone"):
            await c.channel("b#2")
        with pytest.raises(UnreachableError):
            await c.channel("nobody#1")
        other = Links(network.transport("d"), "another run", "d#1", {})
        other.serve()
        with pytest.raises(JoinError, match="another run"):
            await c.channel("d#1")
        for links in (c, other):
            await links.aclose()

    with_pair(check)


def test_streams_are_bounded_over_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer id costs nothing, so a limit for each alone is none. One that ends makes room."""
    monkeypatch.setattr(links_module, "MAX_STREAMS", 3)

    async def check(pair: Pair, channel: Channel) -> None:
        others = [
            Links(pair.network.transport(name), RUN, f"{name}#1", {}) for name in ("c", "d", "e")
        ]
        for links in others[:2]:
            assert (await links.channel("b#1")).ended is None
        with pytest.raises(UnreachableError):
            await others[2].channel("b#1")
        assert channel.ended is None
        assert (await channel.call("echo", {"n": 1})).body["body"] == {"n": 1}
        await others[0].aclose()
        await asyncio.sleep(1.0)
        assert (await others[2].channel("b#1")).ended is None
        for links in others:
            await links.aclose()

    with_pair(check)


def test_a_call_that_waits_for_room_when_the_channel_ends_leaves_no_error_unseen() -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        unseen: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(context))
        channel._bulk_bytes = BULK_QUEUE_BYTES + 1
        tensors = [encode(torch.zeros(1), "float32")]
        call = asyncio.create_task(channel.call("echo", {}, tensors))
        await asyncio.sleep(1.0)
        channel.end("test")
        with pytest.raises(StreamClosedError):
            await call
        del call
        assert channel.ended is not None
        channel.ended.__traceback__ = None  # it holds what the call had
        gc.collect()
        assert not unseen

    with_pair(check)


def test_orders_overtake_bulk() -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        pair.network.rate_bps = 8e6  # a megabyte a second
        loop = asyncio.get_running_loop()
        bulk = [encode(torch.zeros(1 << 20), "float32")]
        calls = [
            asyncio.create_task(channel.call("echo", {}, bulk, check_reply=lambda _, metas: None))
            for _ in range(8)
        ]
        await asyncio.sleep(0.1)
        began = loop.time()
        await channel.call("echo", {"order": True})
        order_s = loop.time() - began
        await asyncio.gather(*calls)
        assert order_s < (loop.time() - began) / 2

    with_pair(check)


@pytest.mark.parametrize("how", ["reply", "error"])
def test_an_answer_that_cannot_be_sent_is_an_error_to_who_waits(how: str) -> None:
    """A header has at most 1 MiB, and a call has no time-out while the line is alive."""

    async def huge(channel: Channel, message: Message) -> Message:
        if how == "reply":
            return Message({"roster": ["x" * 2**16] * 17})
        raise CallFailedError("failed", "no", suspect="x" * 2**20)

    async def check(pair: Pair, channel: Channel) -> None:
        pair.b.methods["huge"] = Method(huge, no_tensors)
        for _ in range(3):
            with pytest.raises(CallFailedError, match="the answer to huge cannot be sent"):
                await channel.call("huge", {})
        back = pair.b.open_channel("a#1")
        assert back is not None
        assert back._calls_in_progress == 0
        assert (await channel.call("echo", {})).body["from"] == "a"

    with_pair(check)


def test_an_answer_whose_work_is_given_up_is_an_error_to_who_waits() -> None:
    """Somebody cancels what the handler waits for, and not the handler."""

    async def waits(channel: Channel, message: Message) -> Message:
        work = asyncio.ensure_future(asyncio.sleep(100))
        asyncio.get_running_loop().call_later(1, work.cancel)
        await asyncio.shield(work)
        raise AssertionError

    async def check(pair: Pair, channel: Channel) -> None:
        pair.b.methods["waits"] = Method(waits, no_tensors)
        with pytest.raises(CallFailedError, match="given up here") as failed:
            await channel.call("waits", {})
        assert failed.value.kind == "refused"
        assert (await channel.call("echo", {})).body["from"] == "a"

    with_pair(check)


def test_an_error_may_have_any_detail() -> None:
    """Names of our own arguments among them: the call must end all the same."""
    for name in ("kind", "message", "self", ""):
        error = CallFailedError("refused", "no", **{name: 1})
        assert (error.kind, error.message, error.detail) == ("refused", "no", {name: 1})


def test_who_asks_for_the_version_keeps_few_streams_here_and_not_for_long() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = MemoryNetwork()
        here = network.transport("b")
        links = Links(here, RUN, "b#1", {})
        links.serve()
        stranger = network.transport("a")
        streams = [await stranger.dial("b", VERSION_PROTOCOL) for _ in range(9)]
        answers = await asyncio.gather(
            *(each.receive_exactly(4) for each in streams), return_exceptions=True
        )
        told = [answer for answer in answers if answer == PROTOCOL_VERSION.to_bytes(4, "big")]
        assert len(told) == links_module.MAX_ASKING_PER_PEER
        assert len(here.streams) == len(told)
        began = loop.time()
        for each in streams:
            with pytest.raises(StreamClosedError):
                await each.receive_exactly(1)
        assert loop.time() - began < links_module.VERSION_TIMEOUT_S + 1.0
        assert not here.streams
        again = await stranger.dial("b", VERSION_PROTOCOL)
        assert await again.receive_exactly(4) == told[0]
        await links.aclose()
        await here.close()

    run(main(), limit_s=100)


def test_a_peer_that_is_cut_off_costs_one_dial_and_no_more() -> None:
    """What is asked besides (another version?) must not double the wait, nor wait for ever."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = MemoryNetwork()
        links = Links(network.transport("a"), RUN, "a#1", {})
        there = network.transport("b")
        network.cut("a", "b")
        began = loop.time()
        with pytest.raises(UnreachableError):
            await links.channel("b#1")
        assert loop.time() - began < 6.0
        network.heal("a", "b")

        async def mute(stream: Any) -> None:
            await asyncio.sleep(1000.0)

        there.serve(VERSION_PROTOCOL, mute)  # answers the dial, and never says a version
        began = loop.time()
        with pytest.raises(UnreachableError):
            await links.channel("b#1")
        assert loop.time() - began < 4.0
        await links.aclose()
        await there.close()

    run(main(), limit_s=100)


def test_a_process_is_as_many_peers_as_it_has_lives() -> None:
    """Each is found behind one address by its incarnation, by its own process too."""

    async def check(pair: Pair, channel: Channel) -> None:
        def named(name: str) -> dict[str, Method]:
            async def answer(channel: Channel, message: Message) -> Message:
                return Message({"me": name, "you": channel.incarnation})

            return {"who": Method(answer, no_tensors)}

        pair.b.methods.update(named("b#1"))
        second = pair.b.another_life("b#2", named("b#2"))
        for name in ("b#1", "b#2"):
            answer = await (await pair.a.channel(name)).call("who", {})
            assert answer.body == {"me": name, "you": "a#1"}
        answer = await (await pair.b.channel("b#2")).call("who", {})
        assert answer.body == {"me": "b#2", "you": "b#1"}
        assert (await (await pair.a.channel("b")).call("who", {})).body["me"] in ("b#1", "b#2")
        pair.a.addresses = {"b": ("somewhere",)}
        second.addresses = {"a": ("elsewhere",)}
        assert pair.b.addresses == {"a": ("elsewhere",)}
        await second.aclose()
        await asyncio.sleep(0.1)
        assert pair.a.open_channel("b#2") is None
        assert channel.ended is None
        with pytest.raises(UnreachableError, match="is gone"):
            await pair.a.channel("b#2")

    with_pair(check)


def test_a_dial_given_up_before_it_is_greeted_leaves_no_stream() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, mute = network.transport("a"), network.transport("b")
        arrived = asyncio.Event()

        async def say_nothing(stream: Stream) -> None:
            arrived.set()
            await until_ended(stream, 1000.0)

        mute.serve(PROTOCOL, say_nothing)
        links = Links(here, RUN, "a#1", {})
        dial = asyncio.create_task(links.channel("b#1"))
        await arrived.wait()
        assert here.streams
        await links.aclose()
        assert not here.streams
        with pytest.raises(asyncio.CancelledError):
            await dial
        await here.close()
        await mute.close()

    run(main())


def test_who_dials_a_life_that_ends_meanwhile_is_not_kept() -> None:
    async def check(pair: Pair, channel: Channel) -> None:
        stream = await pair.network.transport("m").dial("b", PROTOCOL)
        await asyncio.sleep(1.0)
        pair.b.abort()
        await stream.send(
            encode_frame({"kind": "hello", "run": RUN, "incarnation": "m#1", "to": "b#1"})
        )
        await asyncio.sleep(1.0)
        assert pair.b.open_channel("m#1") is None
        assert not pair.network.transports["b"].streams

    with_pair(check)
