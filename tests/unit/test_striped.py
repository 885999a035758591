"""Streams of several stripes, where somebody breaks their rules. What they do otherwise is in the
transports' conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from swarm.errors import StreamClosedError, UnreachableError
from swarm.net.memory import MemoryNetwork, MemoryTransport
from swarm.net.stream_limit import StreamLimit
from swarm.net.striped import (
    BLOCK_BYTES,
    GATHER_S,
    GREET_S,
    ID_BYTES,
    MAX_STRIPES,
    Gathering,
    dial_striped,
)
from swarm.net.transport import Buffer, Stream
from swarm.sim.virtual_time import run

ID, FIRST = b"i" * ID_BYTES, b"first"


class Server:
    """Serves `/p` at `here`; keeps what has come whole."""

    def __init__(self) -> None:
        self.network, self.num_stripes = MemoryNetwork(seed=1), 0
        self.limit = StreamLimit("test", of_one=4, of_all=6)
        self.came: asyncio.Queue[Stream] = asyncio.Queue()
        self.gathering = Gathering(self.greet, self.hold, self.limit)
        self.network.transport("here").serve("/p", self.gathering)

    async def greet(self, stream: Stream) -> bytes:
        return await stream.receive_exactly(5)

    async def hold(self, stream: Stream, first: bytes, num_stripes: int) -> None:
        assert first == FIRST
        assert num_stripes == self.num_stripes
        self.came.put_nowait(stream)
        await asyncio.Event().wait()

    async def dial(self, num_stripes: int) -> tuple[Stream, Stream, MemoryTransport]:
        """Both ends of a stream, and the transport of who has dialled."""
        here = self.network.transport("there")
        self.num_stripes = num_stripes
        stream = await dial_striped(here, "here", "/p", (), num_stripes, [FIRST])
        return stream, await self.came.get(), here

    async def say(self, peer: str, words: bytes) -> Stream:
        transport = self.network.transports.get(peer) or self.network.transport(peer)
        stream = await transport.dial("here", "/p")
        await stream.send([words])
        return stream


def simulate(script: Callable[[Server], Awaitable[None]]) -> None:
    async def main() -> None:
        server = Server()
        await script(server)
        for transport in server.network.transports.values():
            await transport.close()

    run(main())


async def ends(stream: Stream) -> float:
    """When it has ended."""
    with pytest.raises(StreamClosedError):
        await stream.receive_exactly(1)
    return asyncio.get_running_loop().time()


def test_bytes_go_round_robin_and_come_in_order() -> None:
    async def script(server: Server) -> None:
        stream, whole, here = await server.dial(3)
        before = [each.sent_bytes for each in here.streams]
        data = bytes(range(256)) * (2 * BLOCK_BYTES // 256)
        await stream.send([data[:1000], data[1000:], data])  # the last 5 are of a fifth block
        sent = [each.sent_bytes - n for each, n in zip(here.streams, before, strict=True)]
        assert sorted(sent) == [BLOCK_BYTES, BLOCK_BYTES + 5, 2 * BLOCK_BYTES - 5]
        assert await whole.receive_exactly(len(data)) == data
        assert await whole.receive_exactly(len(data)) == data
        assert (whole.peer, whole.received_bytes) == ("there", stream.sent_bytes)

    simulate(script)


def test_small_parts_of_a_block_are_sent_together() -> None:
    async def script(server: Server) -> None:
        stream, whole, here = await server.dial(2)
        sends = list[int]()
        for each in here.streams:
            send = each.send

            async def noted(parts: Sequence[Buffer], send: Any = send) -> None:
                sends.append(len(parts))
                await send(parts)

            each.send = noted  # type: ignore[method-assign]
        await stream.send([b"a", b"", b"bc", bytes(BLOCK_BYTES), b"d"])
        assert sends == [3, 2]
        assert await whole.receive_exactly(3) == b"abc"
        assert await whole.receive_exactly(BLOCK_BYTES + 1) == bytes(BLOCK_BYTES) + b"d"

    simulate(script)


@pytest.mark.parametrize(
    "words",
    [
        b"\x00",
        bytes([MAX_STRIPES + 1]) + b"\x00" + ID,
        b"\x02\x02" + ID,  # the third of two
    ],
)
def test_what_is_no_stripe_is_ended_at_once(words: bytes) -> None:
    async def script(server: Server) -> None:
        assert await ends(await server.say("there", words)) < 1.0
        assert server.came.empty()
        assert not server.limit.open

    simulate(script)


def test_one_number_twice_and_stripes_of_another_peer_make_no_stream() -> None:
    async def script(server: Server) -> None:
        server.num_stripes = 2
        waiting = await server.say("there", b"\x02\x00" + ID + FIRST)
        assert await ends(await server.say("there", b"\x02\x00" + ID)) < 1.0
        other = await server.say("mallory", b"\x02\x01" + ID)
        await asyncio.sleep(1.0)
        assert server.came.empty()
        await server.say("there", b"\x02\x01" + ID)
        assert (await server.came.get()).peer == "there"
        await ends(other)
        assert waiting.open  # type: ignore[attr-defined]

    simulate(script)


@pytest.mark.parametrize("late_s", [-1e-3, -1e-9, 0.0, 1e-9, 1e-3])
def test_stripes_that_come_too_late_end_with_those_before(late_s: float) -> None:
    async def script(server: Server) -> None:
        server.network.latency_s, server.num_stripes = 0.0, 3
        began = asyncio.get_running_loop().time()
        streams = [await server.say("there", b"\x03\x00" + ID + FIRST)]
        streams.append(await server.say("there", b"\x03\x01" + ID))
        await asyncio.sleep(began + GATHER_S + late_s - asyncio.get_running_loop().time())
        last = await server.say("there", b"\x03\x02" + ID)
        await asyncio.sleep(1.0)
        if server.came.empty():
            for each in streams:
                assert await ends(each) - began < GATHER_S + 1.1
        else:
            assert late_s < 1e-3
            assert all(each.open for each in (*streams, last))  # type: ignore[attr-defined]
        await asyncio.sleep(GATHER_S)
        assert not server.gathering._groups
        assert not server.limit.open

    simulate(script)


@pytest.mark.parametrize("first", [b"", FIRST[:-1]])
def test_who_is_whole_and_says_nothing_is_ended(first: bytes) -> None:
    async def script(server: Server) -> None:
        streams = [
            await server.say("there", bytes([2, number]) + ID + (b"" if number else first))
            for number in range(2)
        ]
        await asyncio.sleep(GREET_S / 2)
        assert server.limit.open == {"there": 2}  # each of them counts, also when all have come
        for each in streams:
            assert await ends(each) < GREET_S + 1.0
        assert server.came.empty()
        assert not server.limit.open

    simulate(script)


def test_those_that_have_not_come_whole_are_bounded() -> None:
    async def script(server: Server) -> None:
        for peer in ("s1", "s2"):
            for number in range(5):
                await server.say(peer, b"\x08" + bytes([number]) + ID)
        await asyncio.sleep(0.1)
        assert server.limit.open == {"s1": 4, "s2": 2}
        await asyncio.sleep(GATHER_S)
        assert not server.limit.open
        for _ in range(3):  # one after the other, for those that are served have come
            await server.dial(3)
        assert not server.limit.open

    simulate(script)


@pytest.mark.parametrize("what", ["dial", "send"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stripe_that_fails_leaves_none_behind(what: str, number: int) -> None:
    async def script(server: Server) -> None:
        transport = server.network.transport("there")
        dial, count = transport.dial, 0

        async def fail(parts: Sequence[Buffer]) -> None:
            raise StreamClosedError("not now")

        async def fails_once(*arguments: Any, connection: int) -> Stream:
            nonlocal count
            count += 1
            if count != number + 1:
                return await dial(*arguments, connection=connection)
            if what == "dial":
                raise UnreachableError("not now")
            stream = await dial(*arguments, connection=connection)
            stream.send = fail  # type: ignore[method-assign]
            return stream

        transport.dial = fails_once  # type: ignore[assignment,method-assign]
        with pytest.raises(UnreachableError if what == "dial" else StreamClosedError):
            await dial_striped(transport, "here", "/p", (), 3)
        assert not transport.streams

    simulate(script)


@pytest.mark.parametrize("when_s", [0.0, 0.001, 0.002, 0.003])
def test_a_dial_that_is_cancelled_leaves_none_behind(when_s: float) -> None:
    async def script(server: Server) -> None:
        transport = server.network.transport("there")
        server.num_stripes = 3
        task = asyncio.ensure_future(dial_striped(transport, "here", "/p", (), 3))
        await asyncio.sleep(when_s)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(GATHER_S + 1.0)
        assert not transport.streams
        assert not server.limit.open

    simulate(script)


@pytest.mark.parametrize("count", [0, MAX_STRIPES + 1])
def test_so_many_stripes_are_not_dialled(count: int) -> None:
    async def script(server: Server) -> None:
        transport = server.network.transport("there")
        with pytest.raises(ValueError, match="stripes"):
            await dial_striped(transport, "here", "/p", (), count)
        with pytest.raises(ValueError, match="stripes"):
            await dial_striped(transport, "here", "/p", (), 2, [bytes(BLOCK_BYTES + 1)])
        assert not transport.streams

    simulate(script)


def test_where_one_stripe_is_lost_neither_side_goes_on() -> None:
    async def script(server: Server) -> None:
        stream, whole, here = await server.dial(2)
        list(here.streams)[1].abort()
        with pytest.raises(StreamClosedError):
            await stream.send([bytes(3 * BLOCK_BYTES)])
        with pytest.raises(StreamClosedError):
            await whole.receive_exactly(3 * BLOCK_BYTES)
        with pytest.raises(StreamClosedError):
            await stream.send([b"more"])
        stream.abort()
        assert not here.streams

    simulate(script)
