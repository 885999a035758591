"""The real transport: libp2p through hivemind's p2pd, inside the caller's event loop.

Each stream is one unix socket to the daemon (`swarm.net.socket_stream`); the daemon encrypts and
multiplexes them over one connection per pair of peers, and vouches for the remote peer id.

The daemon has no half-close: when one side ends, it ends the other direction too. So after
`close()` this side can no longer receive; what was sent before still arrives, also when the other
side is slow or sending at that moment. But who has dialled must not close before anything shows
that the other side knows of the stream (an answer, say): until then the daemons still agree on its
protocol, and now and then (2 of 4,000 here) all of it is lost, without an error at either side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import Coroutine, Sequence

from swarm.errors import StreamClosedError, TransportError, UnreachableError
from swarm.net.p2pd import P2PDaemon
from swarm.net.p2pd_control import base58_encode, read_exactly, read_message
from swarm.net.socket_stream import SocketStream
from swarm.net.transport import Handler, Stream

log = logging.getLogger("swarm.net")

_REFRESH_S = 30.0
_GRACE_S = 0.25
_BACKOFF_POLL_S = 0.5
_LAST_WORDS_S = 3.0
_ACCEPT_AGAIN_S = 1.0  # when it could not be; as asyncio's own servers do
_MAX_LAST_WORDS = 128
_PING = "/ipfs/ping/1.0.0"  # every libp2p host echoes 32 bytes on it
_TCP_ADDRESS = re.compile(r"/ip[46]/([^/]+)/tcp/(\d{1,5})(?:/|$)")


class Libp2pTransport:
    """See `Transport`. Create with `await Libp2pTransport.create(...)`.

    `lost` is set, and every stream ends, if the daemon dies; the transport is then of no more use.
    """

    def __init__(
        self, daemon: P2PDaemon, addresses: tuple[str, ...], dial_timeout_s: float
    ) -> None:
        self.peer_id = daemon.peer_id
        self.daemon = daemon
        self.dial_timeout_s = dial_timeout_s
        self._addresses = addresses
        self._handlers: dict[str, Handler] = {}
        self._streams: dict[int, SocketStream] = {}
        self._nameless: dict[socket.socket, None] = {}  # accepted, header not yet read
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: dict[str, None] = {}  # peers with which a stream was closed, newest last
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._listen()
        self._spawn(self._notice_loss())
        self._spawn(self._refresh_addresses())

    @classmethod
    async def create(
        cls,
        identity_path: str | os.PathLike[str] | None = None,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] = (),
        startup_timeout_s: float = 60.0,
        dial_timeout_s: float = 10.0,
    ) -> Libp2pTransport:
        """Start listening.

        Without `identity_path` (see swarm.net.identity) the peer gets a new identity each time.
        `listen=()` only dials.
        Raises ListenError (port taken, no such address) or ConfigError (bad address).
        """
        daemon = await P2PDaemon.start(
            identity_path=identity_path,
            listen=listen,
            announce=announce,
            startup_timeout_s=startup_timeout_s,
        )
        try:
            _, addresses = await daemon.identify()
        except BaseException:
            await daemon.close()
            raise
        return cls(daemon, addresses, dial_timeout_s)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    @property
    def lost(self) -> asyncio.Event:
        return self.daemon.lost

    def serve(self, protocol: str, handler: Handler) -> None:
        if protocol not in self._handlers:
            self.daemon.register(protocol)
        self._handlers[protocol] = handler

    async def dial(self, peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> Stream:
        """See Transport. Takes `dial_timeout_s` at most; cancelled, it leaves nothing open."""
        if self._closed or self.lost.is_set():
            raise UnreachableError(f"cannot dial {peer_id}", self.daemon.why_lost or "closed here")
        if peer_id == self.peer_id:
            return self._dial_self(protocol)
        try:
            async with asyncio.timeout(self.dial_timeout_s):
                connection, peer = await self._open(peer_id, protocol, addresses)
        except TimeoutError:
            reason = f"no answer within {self.dial_timeout_s:.0f} s"
            raise UnreachableError(f"cannot reach {peer_id}", reason) from None
        except UnreachableError:
            raise
        except TransportError as error:
            raise UnreachableError(f"cannot reach {peer_id}", _short(error.message)) from None
        if peer != peer_id:
            connection.close()
            raise UnreachableError(f"cannot reach {peer_id}", f"{peer} answered instead")
        return self._add_stream(connection, peer)

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Be connected to a peer without opening a stream. Raises UnreachableError."""
        try:
            async with asyncio.timeout(self.dial_timeout_s):
                if not await self.daemon.is_connected(peer_id):
                    await self._connect(peer_id, addresses)
        except TimeoutError:
            reason = f"no answer within {self.dial_timeout_s:.0f} s"
            raise UnreachableError(f"cannot reach {peer_id}", reason) from None
        except TransportError as error:
            raise UnreachableError(f"cannot reach {peer_id}", _short(error.message)) from None

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
        self._spawn(self._serve_stream(protocol, self._add_stream(there, self.peer_id)))
        return self._add_stream(here, self.peer_id)

    async def _open(
        self, peer_id: str, protocol: str, addresses: Sequence[str]
    ) -> tuple[socket.socket, str]:
        # A stream to a peer that is not connected would make p2pd dial by itself; see _connect.
        if addresses and not await self.daemon.is_connected(peer_id):
            await self._connect(peer_id, addresses)
        return await self.daemon.open_stream(peer_id, protocol, self.dial_timeout_s)

    async def _connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Connect to the addresses whose port answers.

        After a refused dial p2pd refuses to try that address again for 5 s, after more of them for
        minutes; so a port is tried with a plain TCP connection first, and a peer that comes back
        is found at once. Only what p2pd has dialled by itself may have to be waited for.
        """
        open_addresses = await _answering(addresses, self.dial_timeout_s / 2)
        if not open_addresses:
            raise TransportError("connection refused")
        while True:
            try:
                return await self.daemon.connect(peer_id, open_addresses, self.dial_timeout_s)
            except TransportError as error:
                if "dial backoff" not in error.message:
                    raise
            await asyncio.sleep(_BACKOFF_POLL_S)

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
            async with asyncio.timeout(self.dial_timeout_s):
                info = p2pd_pb2.StreamInfo.FromString(await read_message(connection))
            self._handlers[info.proto]
        except BaseException as error:
            connection.close()
            if isinstance(error, Exception):
                log.debug("incoming stream without a header: %r", error)
                return
            raise
        finally:
            del self._nameless[connection]
        await self._serve_stream(info.proto, self._add_stream(connection, base58_encode(info.peer)))

    async def _serve_stream(self, protocol: str, stream: SocketStream) -> None:
        try:
            await self._handlers[protocol](stream)
        except StreamClosedError as error:
            log.debug("%s from %s: %s", protocol, stream.peer, error)
        except Exception as error:
            log.warning("%s from %s failed: %r", protocol, stream.peer, error)
            log.debug("traceback", exc_info=True)
        finally:
            stream.abort_unless_closed()

    def _add_stream(self, connection: socket.socket, peer: str) -> SocketStream:
        stream = SocketStream(connection, peer, self._forget)
        self._streams[id(stream)] = stream
        if self._closed or self.lost.is_set():
            stream.abort()
        return stream

    def _forget(self, stream: SocketStream) -> None:
        self._streams.pop(id(stream), None)
        if stream.drained:
            self._told.pop(stream.peer, None)
            self._told[stream.peer] = None
            if len(self._told) > _MAX_LAST_WORDS:
                del self._told[next(iter(self._told))]

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notice_loss(self) -> None:
        await self.lost.wait()
        for stream in list(self._streams.values()):
            stream.abort()

    async def _refresh_addresses(self) -> None:
        """Addresses change when NAT mappings are found."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            with contextlib.suppress(TransportError):
                _, self._addresses = await self.daemon.identify()

    async def close(self) -> None:
        """See Transport. The daemon is gone when this returns.

        What was sent on streams that were closed, not aborted, is with the peers' daemons by then,
        except with peers that take nothing any more: they get `_LAST_WORDS_S` together.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self.daemon.incoming.fileno())
        for stream in list(self._streams.values()):
            stream.abort_unless_closed()
        if not self.lost.is_set():
            with contextlib.suppress(TimeoutError, TransportError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._deliver_last_words()
        for stream in list(self._streams.values()):
            stream.abort()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._nameless:  # their tasks were cancelled before they began
            connection.close()
        await self.daemon.close()

    async def _deliver_last_words(self) -> None:
        """Until the peers' daemons have what closed streams sent.

        A daemon hangs up when it has taken a stream's last byte, but then that may still be in its
        queue. It sends to a peer in order, over one connection; so when the peer's daemon answers
        a ping that was sent later, it has all that went before.
        """
        closing = list(self._streams.values())
        peers = dict.fromkeys([*self._told, *(stream.peer for stream in closing)])

        async def deliver(peer: str) -> None:
            for stream in closing:
                if stream.peer == peer:
                    await stream.gone.wait()
            if await self.daemon.is_connected(peer):
                await self._ping(peer)

        await asyncio.gather(*(deliver(peer) for peer in peers), return_exceptions=True)

    async def _ping(self, peer_id: str) -> None:
        """One round trip to the peer's daemon. Raises TransportError or OSError; may hang."""
        connection, _ = await self.daemon.open_stream(peer_id, _PING, _LAST_WORDS_S)
        try:
            await self._loop.sock_sendall(connection, bytes(32))
            await read_exactly(connection, 32)
        finally:
            connection.close()


async def _answering(addresses: Sequence[str], timeout_s: float) -> list[str]:
    """Of these addresses, those whose TCP port accepts, and those that cannot be asked so."""
    answering: list[str] = []
    probes: list[asyncio.Task[None]] = []

    async def probe(address: str, host: str, port: int) -> None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            answering.append(address)

    for address in addresses:
        match = _TCP_ADDRESS.match(address)
        if match is None or "/p2p-circuit" in address or int(match[2]) > 65535:
            answering.append(address)
        else:
            probes.append(asyncio.create_task(probe(address, match[1], int(match[2]))))
    try:
        loop = asyncio.get_running_loop()
        deadline, waiting = loop.time() + timeout_s, set(probes)
        while waiting and loop.time() < deadline:
            done, waiting = await asyncio.wait(
                waiting,
                timeout=min(deadline - loop.time(), _GRACE_S if answering else timeout_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                break
    finally:
        for task in probes:
            task.cancel()
    return [address for address in addresses if address in answering]


def _short(reason: str) -> str:
    """The daemon's reason in a line a person can read."""
    for words, said in (
        ("protocols not supported", "it does not serve this protocol"),
        ("connection refused", "connection refused"),
        ("no route to host", "no route to host"),
        ("peer id mismatch", "another peer answered there"),
        ("no addresses", "no address known"),
        ("not found", "no address known"),
        ("dial to self", "that is this peer itself"),
        ("timeout", "no answer in time"),
        ("deadline exceeded", "no answer in time"),
    ):
        if words in reason.lower():
            return said
    return " ".join(reason.split())[:200]
