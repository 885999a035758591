"""The real transport: libp2p through hivemind's p2pd, inside the caller's event loop.

Each stream is one unix socket to the daemon (`swarm.net.socket_stream`); the daemon encrypts and
multiplexes them over one connection per pair of peers, and vouches for the remote peer id. Further
connections are those of further daemons (`swarm.net.lanes`).

The daemon has no half-close: when one side ends, it ends the other direction too. It ends reading
before writing, and what reads may notice first, reset the stream and so drop what the other side
has not taken yet: the rest of one in a thousand streams here that were closed after 1 MiB; or all
of one that was dialled and closed at once, without an error at either side. Hence the rule of
`Stream.close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Coroutine, Sequence
from typing import NamedTuple

from swarm.errors import StreamClosedError, TransportError, UnreachableError
from swarm.net.dialling import Dialler
from swarm.net.identity import load_identity
from swarm.net.lanes import LANE, Lane, read_letter, start_lanes
from swarm.net.p2pd import P2PDaemon
from swarm.net.p2pd_control import base58_encode, read_exactly, read_message
from swarm.net.socket_stream import SocketStream
from swarm.net.transport import MAX_CONNECTIONS, Handler, Stream

log = logging.getLogger("swarm.net")

_REFRESH_S = 30.0
_ACCEPT_AGAIN_S = 1.0  # when it could not be; as asyncio's own servers do
_MAX_LETTERS = 512  # waited for


class _Route(NamedTuple):
    """A connection: of one of our daemons to that of `peer`, which may be another's lane."""

    daemon: P2PDaemon
    peer: str


class Libp2pTransport:
    """See `Transport`. Create with `await Libp2pTransport.create(...)`.

    `lost` is set, and every stream ends, if the daemon dies; the transport is then of no more use.
    """

    def __init__(
        self,
        daemon: P2PDaemon,
        addresses: tuple[str, ...],
        dial_timeout_s: float,
        lanes: Sequence[Lane] = (),
    ) -> None:
        self.peer_id = daemon.peer_id
        self.daemon = daemon
        self.lanes = tuple(lanes)
        self._dial_timeout_s = dial_timeout_s
        self._dialler = Dialler(daemon, dial_timeout_s)
        self._addresses = addresses
        self._handlers: dict[str, Handler] = {}
        self._letters: dict[socket.socket, None] = {}  # accepted, letter not yet read; oldest first
        self._streams: dict[SocketStream, _Route] = {}
        self._nameless: dict[socket.socket, None] = {}  # accepted, header not yet read
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._listen()
        self._spawn(self._notice_loss())
        for lane in self.lanes:
            self._spawn(self._notice_loss_of(lane))
        self._spawn(self._refresh_addresses())

    @classmethod
    async def create(
        cls,
        identity_path: str | os.PathLike[str] | None = None,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] = (),
        startup_timeout_s: float = 60.0,
        dial_timeout_s: float = 10.0,
        connections: int = 1,
    ) -> Libp2pTransport:
        """Start listening.

        Without `identity_path` (see swarm.net.identity) the peer gets a new identity each time.
        `listen=()` only dials. More `connections` than one to each peer, up to MAX_CONNECTIONS, are
        of daemons of their own, and want an identity; streams are dialled over them (`dial`).
        Raises ListenError (port taken, no such address), ConfigError (bad address), StorageError
        (no such identity), ValueError.
        """
        if not 1 <= connections <= MAX_CONNECTIONS or (connections > 1 and identity_path is None):
            raise ValueError(f"{connections} connections, with the identity {identity_path}")
        daemon = await P2PDaemon.start(
            identity_path=identity_path,
            listen=listen,
            announce=announce,
            startup_timeout_s=startup_timeout_s,
        )
        lanes: list[Lane] = []
        try:
            _, addresses = await daemon.identify()
            if identity_path is not None and connections > 1:
                identity = load_identity(identity_path, create=False)
                lanes = await start_lanes(
                    connections - 1, identity, startup_timeout_s, dial_timeout_s
                )
        except BaseException:
            await daemon.close()
            raise
        return cls(daemon, addresses, dial_timeout_s, lanes)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    @property
    def lost(self) -> asyncio.Event:
        return self.daemon.lost

    @property
    def connections(self) -> int:
        return 1 + len(self.lanes)

    def serve(self, protocol: str, handler: Handler) -> None:
        if protocol not in self._handlers:
            self.daemon.register(protocol)
            self.daemon.register(protocol + LANE)
        self._handlers[protocol] = handler

    async def dial(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = (), *, connection: int = 0
    ) -> Stream:
        """See Transport. Takes `dial_timeout_s` at most, and OPEN_S more where a lane does not
        answer; cancelled, it leaves nothing open."""
        if self._closed or self.lost.is_set():
            raise UnreachableError(f"cannot dial {peer_id}", self.daemon.why_lost or "closed here")
        if peer_id == self.peer_id:
            return self._dial_self(protocol)
        if number := connection % self.connections:
            lane = self.lanes[number - 1]
            if (end := await lane.open(peer_id, protocol, addresses)) is not None:
                return self._add_stream(end, peer_id, _Route(lane.daemon, peer_id))
        end = await self._dialler.open(peer_id, protocol, addresses)
        return self._add_stream(end, peer_id, _Route(self.daemon, peer_id))

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Be connected to a peer without opening a stream. Raises UnreachableError."""
        await self._dialler.connect(peer_id, addresses)

    def _dial_self(self, protocol: str) -> Stream:
        """The daemon does not dial itself; one replica here may be the neighbour of another."""
        if protocol not in self._handlers:
            raise UnreachableError(
                f"cannot reach {self.peer_id}", "it does not serve this protocol"
            )
        try:
            here, there = socket.socketpair()
        except OSError as error:
            raise UnreachableError(f"cannot reach {self.peer_id}", str(error)) from None
        for end in (here, there):
            end.setblocking(False)
        route = _Route(self.daemon, self.peer_id)
        self._spawn(self._serve_stream(protocol, self._add_stream(there, self.peer_id, route)))
        return self._add_stream(here, self.peer_id, route)

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self.daemon.incoming.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(16):
            try:
                connection, _address = self.daemon.incoming.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # Most likely no file descriptor is left. Who waits goes on waiting, and the loop
                # must not be woken for it all the time.
                log.debug("cannot accept: %s", error)
                self._loop.remove_reader(self.daemon.incoming.fileno())
                self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            connection.setblocking(False)
            self._nameless[connection] = None
            self._spawn(self._handle(connection))

    async def _handle(self, connection: socket.socket) -> None:
        from hivemind.proto import p2pd_pb2

        try:
            async with asyncio.timeout(self._dial_timeout_s):
                info = p2pd_pb2.StreamInfo.FromString(await read_message(connection))
                route = _Route(self.daemon, base58_encode(info.peer))
                protocol, peer = info.proto, route.peer
                if protocol.endswith(LANE):
                    protocol = protocol.removesuffix(LANE)
                    peer = await self._read_letter(connection, route.peer)
            self._handlers[protocol]
        except BaseException as error:
            connection.close()
            if isinstance(error, Exception):
                log.debug("refused an incoming stream: %r", error)
                return
            raise
        finally:
            del self._nameless[connection]
        await self._serve_stream(protocol, self._add_stream(connection, peer, route))

    async def _read_letter(self, connection: socket.socket, lane: str) -> str:
        """Where too many are waited for, the oldest gives way: an honest one comes at once, and a
        peer id costs a stranger nothing."""
        if len(self._letters) >= _MAX_LETTERS:
            oldest = next(iter(self._letters))
            del self._letters[oldest]
            oldest.shutdown(socket.SHUT_RDWR)
        self._letters[connection] = None
        try:
            return await read_letter(lambda size: read_exactly(connection, size), lane)
        finally:
            self._letters.pop(connection, None)

    async def _serve_stream(self, protocol: str, stream: SocketStream) -> None:
        try:
            await self._handlers[protocol](stream)
        except StreamClosedError as error:
            log.debug("%s from %s: %s", protocol, stream.peer, error)
        except Exception as error:
            log.warning("%s from %s failed: %r", protocol, stream.peer, error)
            log.debug("traceback", exc_info=True)
        finally:
            stream.abort()

    def _add_stream(self, connection: socket.socket, peer: str, route: _Route) -> SocketStream:
        stream = SocketStream(connection, peer, self._forget)
        self._streams[stream] = route
        if self._closed or self.lost.is_set():
            stream.abort()
        return stream

    def _forget(self, stream: SocketStream) -> None:
        route = self._streams.pop(stream, None)
        if route is None or stream.completed:
            return
        for lane in self.lanes:
            if lane.daemon is route.daemon:
                lane.put_aside(route.peer)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notice_loss(self) -> None:
        await self.lost.wait()
        for stream in list(self._streams):
            stream.abort()

    async def _notice_loss_of(self, lane: Lane) -> None:
        await lane.daemon.lost.wait()
        log.warning("%s: one connection fewer to each peer", lane.daemon.why_lost)

    async def _refresh_addresses(self) -> None:
        """Addresses change when NAT mappings are found."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            with contextlib.suppress(TransportError):
                _, self._addresses = await self.daemon.identify()

    async def close(self) -> None:
        """See Transport. The daemon is gone when this returns."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self.daemon.incoming.fileno())
        for stream in list(self._streams):
            stream.abort()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._nameless:  # their tasks were cancelled before they began
            connection.close()
        await asyncio.gather(*(lane.close() for lane in self.lanes), return_exceptions=True)
        await self.daemon.close()
