"""One conformance suite for every `Transport`, and for streams of several stripes over each: what
the code above may rely on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from swarm.errors import StreamClosedError, UnreachableError
from swarm.net.transport import Stream, Transport, until_ended
from tests.conformance.networks import (
    lane_libp2p_transports,
    libp2p_transports,
    memory_transports,
    striped_libp2p_transports,
    striped_memory_transports,
)

Check = Callable[[list[Transport]], Awaitable[None]]
MIB = 1 << 20
SOON_S = 20.0


async def send_framed(stream: Stream, data: bytes) -> None:
    await stream.send([len(data).to_bytes(4, "big"), memoryview(data)])


async def receive_framed(stream: Stream) -> bytes:
    buffer = bytearray(int.from_bytes(await stream.receive_exactly(4), "big"))
    await stream.receive_into(memoryview(buffer))
    return bytes(buffer)


async def echo(stream: Stream) -> None:
    while True:
        await send_framed(stream, await receive_framed(stream))


class Held:
    """A handler that hands its stream to the test and ends when the test does."""

    def __init__(self, transport: Transport, protocol: str = "/held/1") -> None:
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.done = asyncio.Event()
        transport.serve(protocol, self.handle)

    async def handle(self, stream: Stream) -> None:
        self.streams.put_nowait(stream)
        await self.done.wait()


async def pair(peers: list[Transport]) -> tuple[Stream, Stream, Held]:
    held = Held(peers[1])
    here = await peers[0].dial(peers[1].peer_id, "/held/1", peers[1].addresses)
    await here.send([b"hello"])
    there = await held.streams.get()
    assert await there.receive_exactly(5) == b"hello"
    return here, there, held


async def check_echo_of_many_sizes(peers: list[Transport]) -> None:
    peers[1].serve("/echo/1", echo)
    stream = await peers[0].dial(peers[1].peer_id, "/echo/1", peers[1].addresses)
    for size in (0, 1, 2, 3, 4095, 65536, 65537, 300_000, MIB + 1, 5_000_000):
        data = random.Random(size).randbytes(size)
        sending = asyncio.create_task(send_framed(stream, data))
        assert await receive_framed(stream) == data
        await sending
    assert stream.received_bytes >= 5_000_000
    assert stream.sent_bytes >= 5_000_000


async def check_parts_arrive_in_order(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    numbers = list(range(20_000))
    parts: list[Any] = [number.to_bytes(4, "big") for number in numbers]
    parts[10] = bytearray(parts[10])
    parts[11] = memoryview(parts[11])
    parts.insert(5, b"")
    sending = asyncio.create_task(here.send(parts))
    data = await there.receive_exactly(4 * len(numbers))
    await sending
    assert [int.from_bytes(data[i : i + 4], "big") for i in range(0, len(data), 4)] == numbers


async def check_buffers_of_other_formats(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    floats = memoryview(bytes(range(48))).cast("f", (3, 4))
    await here.send([floats])
    target = memoryview(bytearray(48)).cast("d")
    await there.receive_into(target)
    assert target.tobytes() == bytes(range(48))


async def check_large_buffers_are_done_with_once_sent(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    large = bytearray(random.Random(1).randbytes(3 * MIB))
    expected = bytes(large) + b"end"
    target = memoryview(bytearray(len(expected)))

    async def send() -> None:
        await here.send([b"", memoryview(large).cast("f"), bytearray(b"end"), memoryview(b"")])
        large[:] = bytes(len(large))

    sending = asyncio.create_task(send())
    await there.receive_into(target)
    await sending
    assert target == expected


async def check_slow_reader_blocks_sender(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    sent = 0
    block = random.Random(1).randbytes(MIB)

    async def pump() -> None:
        nonlocal sent
        for _ in range(128):
            await here.send([block])
            sent += 1

    pumping = asyncio.create_task(pump())
    last = -1
    while sent != last:  # until nothing has moved for a while
        last = sent
        await asyncio.sleep(0.3)
    assert not pumping.done()
    assert sent <= 64
    for _ in range(128):
        assert await there.receive_exactly(MIB) == block
    await pumping


async def check_close_ends_the_stream_everywhere(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    waiting = asyncio.create_task(here.receive_exactly(1))
    await here.send([b"all"])
    assert await there.receive_exactly(3) == b"all"
    await here.close()
    await here.close()
    for call in (waiting, there.receive_exactly(1), here.send([b"x"]), here.receive_exactly(1)):
        with pytest.raises(StreamClosedError):
            await call


async def check_who_waits_for_the_other_to_end_loses_nothing(peers: list[Transport]) -> None:
    """Also while the reader is slow, and sends what nobody wants."""
    data = random.Random(3).randbytes(2 * MIB)
    over = asyncio.Event()

    async def answer(stream: Stream) -> None:
        await stream.send([data])
        await until_ended(stream, 2 * SOON_S)
        over.set()

    async def chatter(stream: Stream) -> None:
        while True:
            await stream.send([b"x" * 1000])
            await asyncio.sleep(0.0005)  # on and on, as long as the reader reads

    peers[1].serve("/answer/1", answer)
    stream = await peers[0].dial(peers[1].peer_id, "/answer/1", peers[1].addresses)
    chattering = asyncio.create_task(chatter(stream))
    await asyncio.sleep(0.2)
    received = b""
    while len(received) < len(data):
        received += await stream.receive_exactly(MIB // 64)
        await asyncio.sleep(0.002)  # it is slow
    assert received == data
    assert not over.is_set()
    await stream.close()
    await over.wait()
    with pytest.raises(StreamClosedError):
        await chattering


async def check_nobody_waits_for_an_end_for_ever(peers: list[Transport]) -> None:
    _, there, _ = await pair(peers)
    await until_ended(there, 0.1)
    await there.send([b"x"])


async def check_partial_message_then_end(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    await here.send([b"abc"])
    await here.close()
    with pytest.raises(StreamClosedError):
        await there.receive_exactly(4)


async def check_abort_raises_everywhere(peers: list[Transport]) -> None:
    here, there, held = await pair(peers)
    full = await peers[0].dial(peers[1].peer_id, "/held/1", peers[1].addresses)
    await full.send([b"hello"])
    writer = await held.streams.get()

    async def pump() -> None:
        while True:
            await writer.send([bytes(MIB)])

    tasks = [
        asyncio.create_task(here.receive_exactly(1)),
        asyncio.create_task(there.receive_exactly(1)),
        asyncio.create_task(pump()),
    ]
    await asyncio.sleep(0.2)
    for stream in (here, full):
        stream.abort()
        stream.abort()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, StreamClosedError)
    for call in (here.send([b"x"]), here.receive_exactly(1), there.receive_exactly(1)):
        with pytest.raises(StreamClosedError):
            await call


async def check_cancelled_receive_loses_nothing(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    await here.send([b"ab"])
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await there.receive_exactly(4)
    await here.send([b"cdefgh"])
    assert await there.receive_exactly(3) == b"abc"
    assert await there.receive_exactly(5) == b"defgh"


async def check_cancelled_receive_of_many_blocks_loses_nothing(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    data = random.Random(5).randbytes(MIB)
    await here.send([data[:200_001]])
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await there.receive_exactly(400_000)
    assert await there.receive_exactly(10) == data[:10]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await there.receive_exactly(200_000)
    sending = asyncio.create_task(here.send([data[200_001:]]))
    assert await there.receive_exactly(MIB - 10) == data[10:]
    await sending


async def check_one_receiver_and_one_sender_at_a_time(peers: list[Transport]) -> None:
    here, there, held = await pair(peers)
    receiving = asyncio.create_task(there.receive_exactly(5))
    await asyncio.sleep(0)
    for second in (there.receive_exactly(1), there.receive_into(memoryview(bytearray(1)))):
        with pytest.raises(RuntimeError, match="one receiver"):
            await second
    await here.send([b"again"])
    assert await receiving == b"again"

    async def send_for_ever() -> None:
        while True:
            await here.send([bytes(MIB)])

    senders = [asyncio.create_task(send_for_ever()) for _ in range(2)]
    refused, waiting = await asyncio.wait(senders, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(RuntimeError, match="one sender"):
        await refused.pop()
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    held.done.set()


async def check_dial_what_is_not_there(peers: list[Transport]) -> None:
    peers[1].serve("/echo/1", echo)
    with pytest.raises(UnreachableError):
        await peers[0].dial(peers[1].peer_id, "/other/1", peers[1].addresses)
    stranger = "12D3KooWCXFeDz2JfyUmv3C3ecF2czRUwbpNzyx7sd3MU72RgBse"
    with pytest.raises(UnreachableError):
        await peers[0].dial(stranger, "/echo/1")
    address = peers[1].addresses[0].partition("/p2p/")[0]
    with pytest.raises(UnreachableError):  # the right door, the wrong peer behind it
        await peers[0].dial(stranger, "/echo/1", [f"{address}/p2p/{stranger}"])


async def check_peer_ids(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    assert here.peer == peers[1].peer_id
    assert there.peer == peers[0].peer_id
    assert peers[0].peer_id != peers[1].peer_id
    for peer in peers:
        assert peer.addresses
        assert all(address.endswith(f"/p2p/{peer.peer_id}") for address in peer.addresses)


async def check_concurrent_streams(peers: list[Transport]) -> None:
    peers[1].serve("/echo/1", echo)

    async def one(seed: int) -> None:
        stream = await peers[0].dial(peers[1].peer_id, "/echo/1", peers[1].addresses)
        rng = random.Random(seed)
        for _ in range(5):
            data = rng.randbytes(rng.randrange(200_000))
            sending = asyncio.create_task(send_framed(stream, data))
            assert await receive_framed(stream) == data
            await sending
        await stream.close()

    await asyncio.gather(*(one(seed) for seed in range(16)))


async def check_both_directions_at_once(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    data = [random.Random(seed).randbytes(2 * MIB) for seed in (1, 2)]
    received = await asyncio.gather(
        here.receive_exactly(2 * MIB),
        there.receive_exactly(2 * MIB),
        here.send([data[0]]),
        there.send([data[1]]),
    )
    assert received[:2] == [data[1], data[0]]


async def check_failing_handler_hurts_only_its_stream(peers: list[Transport]) -> None:
    peers[1].serve("/echo/1", echo)

    async def fail(stream: Stream) -> None:
        await stream.receive_exactly(1)
        raise ValueError("on purpose")

    peers[1].serve("/fail/1", fail)
    good = await peers[0].dial(peers[1].peer_id, "/echo/1", peers[1].addresses)
    bad = await peers[0].dial(peers[1].peer_id, "/fail/1", peers[1].addresses)
    await bad.send([b"x"])
    with pytest.raises(StreamClosedError):
        await bad.receive_exactly(1)
    await send_framed(good, b"still here")
    assert await receive_framed(good) == b"still here"


async def check_serve_again_replaces(peers: list[Transport]) -> None:
    async def say(stream: Stream, word: bytes) -> None:
        await stream.send([word])
        await until_ended(stream, SOON_S)

    for word in (b"one", b"two"):
        peers[1].serve("/word/1", lambda stream, word=word: say(stream, word))
    stream = await peers[0].dial(peers[1].peer_id, "/word/1", peers[1].addresses)
    assert await stream.receive_exactly(3) == b"two"


async def check_closing_transport_ends_streams(peers: list[Transport]) -> None:
    here, there, _ = await pair(peers)
    pending = [
        asyncio.create_task(here.receive_exactly(1)),
        asyncio.create_task(there.receive_exactly(1)),
    ]
    await asyncio.sleep(0.05)
    await peers[1].close()
    await peers[1].close()
    for result in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(result, StreamClosedError | asyncio.CancelledError)
    with pytest.raises(UnreachableError):
        await peers[0].dial(peers[1].peer_id, "/held/1", peers[1].addresses)
    with pytest.raises(UnreachableError):
        await peers[1].dial(peers[0].peer_id, "/held/1", peers[0].addresses)


async def check_a_peer_can_dial_itself(peers: list[Transport]) -> None:
    """One process may be two replicas, and each other's neighbours."""
    me = peers[0]
    me.serve("/echo/1", echo)
    stream = await me.dial(me.peer_id, "/echo/1", me.addresses)
    assert stream.peer == me.peer_id
    data = random.Random(4).randbytes(MIB)
    sending = asyncio.create_task(send_framed(stream, data))
    assert await receive_framed(stream) == data
    await sending
    with pytest.raises(UnreachableError):
        await me.dial(me.peer_id, "/nobody/1", me.addresses)
    stream.abort()


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


async def run_check(make: Any, check: Check) -> None:
    async with asyncio.timeout(60.0), make(2) as peers, asyncio.timeout(SOON_S):
        await check(peers)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
@pytest.mark.parametrize("make", [memory_transports, libp2p_transports, lane_libp2p_transports])
def test_transport(
    make: Any, check: Callable[[list[Transport]], Coroutine[Any, Any, None]]
) -> None:
    asyncio.run(run_check(make, check))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_stripes_in_memory(check: Callable[[list[Transport]], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(run_check(striped_memory_transports, check))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_stripes(check: Callable[[list[Transport]], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(run_check(striped_libp2p_transports, check))
