"""The faults of the in-memory network (what a `Transport` must do is in tests/conformance)."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import StreamClosedError, UnreachableError
from swarm.net.memory import MemoryNetwork, MemoryStream
from swarm.sim.virtual_time import run
from swarm.tasks import TaskSet
from swarm.wire.frames import MAGIC


async def connected(network: MemoryNetwork) -> tuple[MemoryStream, MemoryStream]:
    there: asyncio.Future[MemoryStream] = asyncio.get_running_loop().create_future()

    async def serve(stream: MemoryStream) -> None:
        there.set_result(stream)
        await asyncio.Event().wait()

    here = network.transport("a")
    network.transport("b").serve("/p", serve)  # type: ignore[arg-type]
    stream = await here.dial("b", "/p")
    return stream, await there


@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_silence_hides_data_and_ends_until_it_is_over(fault: str) -> None:
    async def main() -> None:
        network, tasks = MemoryNetwork(), TaskSet()
        here, there = await connected(network)
        if fault == "cut":
            network.cut("a", "b")
        else:
            network.freeze("a")
        await here.send([b"late"])
        reading = tasks.spawn(there.receive_exactly(4))
        await asyncio.sleep(60)
        assert not reading.done()
        here.abort()
        with pytest.raises(StreamClosedError):
            await here.receive_exactly(1)  # this side knows at once
        await asyncio.sleep(60)
        assert not reading.done()
        network.heal("a", "b")
        network.thaw("a")
        with pytest.raises(StreamClosedError):
            await reading
        for transport in network.transports.values():
            await transport.close()

    run(main())


def test_a_killed_peer_ends_its_streams_even_if_it_was_frozen() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        _, there = await connected(network)
        network.freeze("a")
        network.kill("a")
        with pytest.raises(StreamClosedError):
            await there.receive_exactly(1)
        for transport in network.transports.values():
            await transport.close()

    run(main())


async def received(stream: MemoryStream, most: int = 1000) -> bytes:
    """All that comes before the stream ends."""
    data = b""
    while len(data) < most:
        try:
            data += await stream.receive_exactly(1)
        except StreamClosedError:
            break
    return data


async def end(network: MemoryNetwork) -> None:
    for transport in network.transports.values():
        await transport.close()


def test_what_is_lost_stays_lost_and_ends_the_stream_when_it_is_noticed() -> None:
    """Both directions go on meanwhile; neither end notices."""

    async def main() -> None:
        network, tasks = MemoryNetwork(), TaskSet()
        here, there = await connected(network)
        await here.send([b"one "])
        await asyncio.sleep(1)
        network.lose("a", "b")
        await here.send([b"two "])
        await asyncio.sleep(1)
        reading = tasks.spawn(received(there))
        await there.send([b"back"])
        assert await here.receive_exactly(4) == b"back"
        with pytest.raises(UnreachableError):
            await network.transports["a"].dial("b", "/p")
        assert not reading.done()
        network.stop_losing("a", "b")
        assert await reading == b"one "
        with pytest.raises(StreamClosedError):
            await here.send([b"three"])
        assert network.effects == {"lost": 1}
        await end(network)

    run(main())


def test_a_severed_stream_delivers_a_prefix_late() -> None:
    """The source knows at once; the other end hears of it after what was under way."""
    prefixes = set()

    async def main(seed: int) -> None:
        network, tasks = MemoryNetwork(seed), TaskSet()
        here, there = await connected(network)
        for piece in (b"aaaa", b"bbbb", b"cccc"):
            await here.send([piece])
        network.sever("a", "b", late_s=30.0)
        with pytest.raises(StreamClosedError):
            await here.receive_exactly(1)
        await there.send([b"to nobody"])
        reading = tasks.spawn(received(there))
        await asyncio.sleep(29)
        assert not reading.done()
        prefixes.add(await reading)
        await end(network)

    for seed in range(30):
        run(main(seed))
    assert all(b"aaaabbbbcccc".startswith(prefix) for prefix in prefixes)
    assert len(prefixes) > 6, prefixes


def test_late_streams_are_overtaken_by_others() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.delay("a", "b", 2.0)
        heard = []

        async def serve(stream: MemoryStream) -> None:
            heard.append(await stream.receive_exactly(1))
            await asyncio.Event().wait()

        here = network.transport("a")
        network.transport("b").serve("/p", serve)  # type: ignore[arg-type]
        for letter in b"abcdef":
            await (await here.dial("b", "/p")).send([bytes([letter])])
        await asyncio.sleep(5)
        assert sorted(heard) == [bytes([letter]) for letter in b"abcdef"]
        assert heard != sorted(heard)
        assert network.effects["late"] == 6
        assert network.effects["reordered"] > 0
        network.delay("a", "b", 0)
        assert network.healthy
        await end(network)

    run(main())


def test_who_is_deaf_is_heard() -> None:
    async def main() -> None:
        network, tasks = MemoryNetwork(), TaskSet()
        here, there = await connected(network)
        network.deafen("a", "b")
        await here.send([b"late"])
        reading = tasks.spawn(there.receive_exactly(4))
        await there.send([b"back"])
        assert await here.receive_exactly(4) == b"back"
        await asyncio.sleep(60)
        assert not reading.done()
        network.undeafen("a", "b")
        assert await reading == b"late"
        await end(network)

    run(main())


@pytest.mark.parametrize("head", [MAGIC, b"..."])
def test_a_wrong_bit_is_refused_by_the_frame_or_ends_the_stream(head: bytes) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = await connected(network)
        network.spoil("a", "b")
        await here.send([head + b"rest"])
        if head == MAGIC:
            data = await there.receive_exactly(7)
            assert data[:3] != MAGIC
            assert data[3:] == b"rest"
        else:
            for stream in (here, there):
                with pytest.raises(StreamClosedError):
                    await stream.receive_exactly(1)
        assert network.effects == {"corrupted": 1}
        await end(network)

    run(main())
