"""The implementations under test, each as an async context manager that yields peers."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.averaging import GroupAllReduce
from swarm.averaging.round import Limits
from swarm.net.identity import claim_identity, load_identity
from swarm.net.memory_directory import MemoryDirectory, Shared
from swarm.net.stream_limit import StreamLimit
from swarm.net.striped import Gathering, dial_striped
from swarm.net.transport import Directory, Handler, Stream, Transport

if TYPE_CHECKING:
    from swarm.net.libp2p import Libp2pTransport, _Route

MakeTransports = Callable[[int], AbstractAsyncContextManager[list[Transport]]]
MakeDirectories = Callable[[int], AbstractAsyncContextManager[list[Directory]]]


@asynccontextmanager
async def memory_transports(count: int) -> AsyncIterator[list[Transport]]:
    from swarm.net.memory import MemoryNetwork

    network = MemoryNetwork(seed=1)
    transports: list[Transport] = [network.transport(f"peer{i}") for i in range(count)]
    yield transports
    for transport in transports:
        await transport.close()


@asynccontextmanager
async def libp2p_transports(count: int) -> AsyncIterator[list[Transport]]:
    from swarm.net.libp2p import Libp2pTransport

    transports: list[Transport] = []
    try:
        while len(transports) < count:
            transports.append(await Libp2pTransport.create())
        yield transports
    finally:
        for transport in transports:
            await transport.close()


class Striped:
    """A transport, all of whose streams have several stripes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.peer_id, self.close = transport.peer_id, transport.close
        self.connections = transport.connections

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._transport.addresses

    def serve(self, protocol: str, handler: Handler) -> None:
        async def greet(stream: Stream) -> None:
            pass

        async def handle(stream: Stream, first: None, num_stripes: int) -> None:
            await handler(stream)

        gathering = Gathering(greet, handle, StreamLimit("test", 64, 64))
        self._transport.serve(protocol, gathering)

    async def dial(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = (), *, connection: int = 0
    ) -> Stream:
        return await dial_striped(self._transport, peer_id, protocol, addresses, 3)


def route_of(transport: Libp2pTransport, stream: Stream) -> _Route:
    """The connection that a stream goes over."""
    return {id(each): route for each, route in transport._streams.items()}[id(stream)]


def reducers_of(
    transports: Sequence[Transport], limits: Limits | None = None
) -> dict[str, GroupAllReduce]:
    """That know each other and serve, by peer id in the order of members."""
    by_peer = {each.peer_id: each for each in transports}
    reducers = {
        peer: GroupAllReduce(
            by_peer[peer], addresses=lambda other: by_peer[other].addresses, limits=limits
        )
        for peer in sorted(by_peer)
    }
    for each in reducers.values():
        each.serve()
    return reducers


class OverALane:
    """A transport that dials all its streams over its second connection, also after one that was
    aborted."""

    def __init__(self, transport: Libp2pTransport) -> None:
        self.transport = transport
        self.peer_id, self.close = transport.peer_id, transport.close
        self.serve, self.connections = transport.serve, transport.connections

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.transport.addresses

    async def dial(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = (), *, connection: int = 1
    ) -> Stream:
        (lane,) = self.transport.lanes
        lane._again_at.clear()
        stream = await self.transport.dial(peer_id, protocol, addresses, connection=1)
        if peer_id != self.peer_id:
            assert route_of(self.transport, stream).daemon is lane.daemon
        return stream


@asynccontextmanager
async def connected_libp2p_transports(
    count: int, connections: int
) -> AsyncIterator[list[Libp2pTransport]]:
    """Each with its connections to all others there already."""
    from swarm.net.libp2p import Libp2pTransport

    transports: list[Libp2pTransport] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while len(transports) < count:
                path = load_identity(Path(folder) / f"{len(transports)}.key").path
                transports.append(await Libp2pTransport.create(path, connections=connections))
            for each in transports:
                for lane in each.lanes:
                    for other in transports:
                        if other is not each:
                            await lane.open(other.peer_id, "/nothing", other.addresses)
                    await lane.connected()
                    for other in transports:
                        if other is not each:
                            assert await lane.daemon.is_connected(other.peer_id)
            yield transports
        finally:
            for transport in transports:
                await transport.close()


@asynccontextmanager
async def lane_libp2p_transports(count: int) -> AsyncIterator[list[Transport]]:
    async with connected_libp2p_transports(count, 2) as transports:
        yield [OverALane(each) for each in transports]


@asynccontextmanager
async def striped_memory_transports(count: int) -> AsyncIterator[list[Transport]]:
    async with memory_transports(count) as transports:
        yield [Striped(each) for each in transports]


@asynccontextmanager
async def striped_libp2p_transports(count: int) -> AsyncIterator[list[Transport]]:
    async with libp2p_transports(count) as transports:
        yield [Striped(each) for each in transports]


@asynccontextmanager
async def memory_directories(count: int) -> AsyncIterator[list[Directory]]:
    shared: Shared = {}
    yield [MemoryDirectory(shared, f"peer{i}") for i in range(count)]


def dht_directories(tmp_path: Path) -> MakeDirectories:
    from swarm.net.directory import DhtDirectory
    from swarm.net.libp2p import Libp2pTransport

    @asynccontextmanager
    async def make(count: int) -> AsyncIterator[list[Directory]]:
        identities = [claim_identity(tmp_path) for _ in range(count)]
        transports: list[Libp2pTransport] = []
        directories: list[Directory] = []
        try:
            for identity in identities:
                transport = await Libp2pTransport.create(identity_path=identity.path)
                transports.append(transport)
                first = transports[0].addresses if directories else ()
                directories.append(await DhtDirectory.create(transport, identity, first))
            yield directories
        finally:
            for directory in directories:
                await directory.close()
            for transport in transports:
                await transport.close()
            for identity in identities:
                identity.release()

    return make
