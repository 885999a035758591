"""Streams of several stripes, where somebody breaks their rules. What they do otherwise is in the
transports' conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarm.errors import StreamClosedError, UnreachableError
from swarm.net.memory import MemoryNetwork
from swarm.net.stream_limit import StreamLimit
from swarm.net.striped import (
    BLOCK_BYTES,
    GATHER_S,
    ID_BYTES,
    MAX_STRIPES,
    Gathering,
    dial_striped,
)
from swarm.net.transport import Stream
from swarm.sim.virtual_time import run

ID = b"i" * ID_BYTES


class Server:
    """Serves `/p` at `here`; keeps what has come whole."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(seed=1)
        self.limit = StreamLimit("test", of_one=4, of_all=6)
        self.came: asyncio.Queue[Stream] = asyncio.Queue()
        self.gathering = Gathering(self.hold, self.limit)
        self.network.transport("here").serve("/p", self.gathering)

    async def hold(self, stream: Stream) -> None:
        self.came.put_nowait(stream)
        await asyncio.Event().wait()

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
        here = server.network.transport("there")
        stream = await dial_striped(here, "here", "/p", (), 3, [b"fi", b"rst"])
        whole = await server.came.get()
        assert await whole.receive_exactly(5) == b"first"
        before = [each.sent_bytes for each in here.streams]
        data = bytes(range(256)) * (2 * BLOCK_BYTES // 256)
        await stream.send([data[:1000], data[1000:], data])  # the last 5 are of a fifth block
        sent = [each.sent_bytes - n for each, n in zip(here.streams, before, strict=True)]
        assert sorted(sent) == [BLOCK_BYTES, BLOCK_BYTES + 5, 2 * BLOCK_BYTES - 5]
        assert await whole.receive_exactly(len(data)) == data
        assert await whole.receive_exactly(len(data)) == data
        assert (whole.peer, whole.received_bytes) == ("there", stream.sent_bytes)

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
        waiting = await server.say("there", b"\x02\x00" + ID)
        assert await ends(await server.say("there", b"\x02\x00" + ID)) < 1.0
        other = await server.say("mallory", b"\x02\x01" + ID)
        await asyncio.sleep(1.0)
        assert server.came.empty()
        await server.say("there", b"\x02\x01" + ID)
        assert (await server.came.get()).peer == "there"
        await ends(other)
        assert waiting.open  # type: ignore[attr-defined]

    simulate(script)


def test_a_stripe_without_the_others_is_not_kept() -> None:
    async def script(server: Server) -> None:
        stream = await server.say("there", b"\x02\x00" + ID)
        began = asyncio.get_running_loop().time()
        assert await ends(stream) - began == pytest.approx(GATHER_S, abs=0.1)
        assert not server.gathering._groups
        assert not server.limit.open

    simulate(script)


def test_those_that_wait_for_others_are_bounded_and_leave_room_when_whole() -> None:
    async def script(server: Server) -> None:
        for peer in ("s1", "s2"):
            for number in range(5):
                await server.say(peer, b"\x08" + bytes([number]) + ID)
        await asyncio.sleep(0.1)
        assert server.limit.open == {"s1": 4, "s2": 2}
        await asyncio.sleep(GATHER_S)
        assert not server.limit.open
        transport = server.network.transport("there")
        for _ in range(3):  # of 3 stripes each, one after the other
            await dial_striped(transport, "here", "/p", (), 3)
            assert (await server.came.get()).peer == "there"
        assert not server.limit.open

    simulate(script)


def test_a_dial_that_fails_leaves_no_stripe_behind() -> None:
    async def script(server: Server) -> None:
        transport = server.network.transport("there")
        dial, count = transport.dial, 0

        async def fails_once(*arguments: object) -> Stream:
            nonlocal count
            count += 1
            if count == 2:
                raise UnreachableError("not now")
            return await dial(*arguments)  # type: ignore[arg-type]

        transport.dial = fails_once  # type: ignore[assignment,method-assign]
        with pytest.raises(UnreachableError):
            await dial_striped(transport, "here", "/p", (), 3)
        assert not transport.streams
        for count, first in ((MAX_STRIPES + 1, b""), (0, b""), (2, bytes(BLOCK_BYTES + 1))):
            with pytest.raises(ValueError, match="stripes"):
                await dial_striped(transport, "here", "/p", (), count, [first])

    simulate(script)


def test_where_one_stripe_is_lost_neither_side_goes_on() -> None:
    async def script(server: Server) -> None:
        here = server.network.transport("there")
        stream = await dial_striped(here, "here", "/p", (), 2)
        whole = await server.came.get()
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
