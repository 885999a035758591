"""More connections to a peer than the one that two daemons keep.

All streams between two daemons share a TCP connection, and where packets are lost `cubic` leaves
most of a line idle that several connections would fill (docs/decisions/several-connections.md). So
a peer may run further daemons, its *lanes*, which dial and are not dialled. libp2p wants each to
have a key of its own: a new one each time. Every stream of a lane begins with a *letter*, in which
the key of the peer says that the lane speaks for it; from then on it is a stream of that peer.

    length (2 bytes, little-endian) · public key · length (2 bytes) · signature

The key is libp2p's protobuf; signed, as a "lane", is the lane's peer id (base58).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from swarm.errors import TransportError, WireError
from swarm.net.dialling import Dialler
from swarm.net.identity import Identity, peer_id_of, verify
from swarm.net.p2pd import P2PDaemon
from swarm.tasks import TaskSet

LANE = "/lane"  # ends the name of what is dialled
CONTEXT = "lane"
MAX_FIELD_BYTES = 2048  # an RSA key of 8192 bits has 1,060, its signature 1,024
OPEN_S = 3.0  # for a stream of a lane; then the first connection is tried
AGAIN_S = 60.0  # after something with a peer has failed over a lane
MAX_REMEMBERED = 1024
log = logging.getLogger("swarm.net")


class Lane:
    """One more connection to each of the peers that are dialled over it.

    Nobody waits for it to connect: until it is, or where it cannot, `open` gives nothing, and the
    stream goes over the peer's first connection."""

    def __init__(self, daemon: P2PDaemon, letter: bytes, dial_timeout_s: float) -> None:
        self.daemon = daemon
        self._letter = letter
        self._dialler = Dialler(daemon, dial_timeout_s)
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._again_at: dict[str, float] = {}  # by peer, of those that are put aside
        self._tasks = TaskSet()

    @classmethod
    async def start(
        cls, identity: Identity, startup_timeout_s: float, dial_timeout_s: float
    ) -> Lane:
        """Raises ListenError, StorageError where its daemon does not start, leaving nothing."""
        daemon = await P2PDaemon.start(
            identity_path=None, listen=(), announce=(), startup_timeout_s=startup_timeout_s
        )
        return cls(daemon, write_letter(identity, daemon.peer_id), dial_timeout_s)

    async def open(
        self, peer_id: str, protocol: str, addresses: Sequence[str]
    ) -> socket.socket | None:
        """A stream that the peer takes as one of ours; None while there is no connection, and where
        it does not come within OPEN_S."""
        if self.daemon.lost.is_set() or self._is_aside(peer_id):
            return None
        try:
            async with asyncio.timeout(OPEN_S):
                if not await self.daemon.is_connected(peer_id):
                    self._connect_soon(peer_id, addresses)
                    return None
                connection = await self._dialler.open(peer_id, protocol + LANE, ())
                try:
                    await asyncio.get_running_loop().sock_sendall(connection, self._letter)
                except BaseException:
                    connection.close()
                    raise
                return connection
        except (TransportError, TimeoutError, OSError) as error:
            log.debug("no stream to %s over a lane: %s", peer_id[-8:], error or "no answer")
            self.put_aside(peer_id)
            return None

    def put_aside(self, peer_id: str) -> None:
        """Dial this peer no more for AGAIN_S. Of what failed over a lane nobody can say whether it
        would have failed without: a connection that is dead looks well for half a minute."""
        self._again_at.pop(peer_id, None)
        self._again_at[peer_id] = asyncio.get_running_loop().time() + AGAIN_S
        if len(self._again_at) > MAX_REMEMBERED:
            del self._again_at[next(iter(self._again_at))]

    def _is_aside(self, peer_id: str) -> bool:
        return asyncio.get_running_loop().time() < self._again_at.get(peer_id, 0.0)

    def _connect_soon(self, peer_id: str, addresses: Sequence[str]) -> None:
        if peer_id not in self._connecting and addresses:
            task = self._tasks.spawn(self._connect(peer_id, addresses), f"lane to {peer_id[-8:]}")
            self._connecting[peer_id] = task
            task.add_done_callback(lambda _: self._connecting.pop(peer_id, None))

    async def _connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        try:
            await self._dialler.connect(peer_id, addresses)
        except TransportError as error:
            log.debug("no lane to %s: %s", peer_id[-8:], error)
            self.put_aside(peer_id)

    async def connected(self) -> None:
        """Until no attempt to connect is under way."""
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)

    async def close(self) -> None:
        """End its daemon. Idempotent."""
        await self._tasks.aclose()
        await self.daemon.close()


async def start_lanes(
    count: int, identity: Identity, startup_timeout_s: float, dial_timeout_s: float
) -> list[Lane]:
    """So many that speak for this identity, or none. Raises ListenError, StorageError."""
    starting = [
        asyncio.ensure_future(Lane.start(identity, startup_timeout_s, dial_timeout_s))
        for _ in range(count)
    ]
    try:
        # All are waited for, or one would be cancelled while it cleans up.
        results = await asyncio.gather(*starting, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [task.result() for task in starting]
    except BaseException:
        for task in starting:
            if task.done() and not task.cancelled() and task.exception() is None:
                await task.result().close()
        raise


def write_letter(identity: Identity, lane: str) -> bytes:
    """What says that the daemon of peer id `lane` speaks for this identity."""
    fields = identity.public_key, identity.sign(CONTEXT, lane.encode())
    return b"".join(len(field).to_bytes(2, "little") + field for field in fields)


async def read_letter(read: Callable[[int], Awaitable[bytes]], lane: str) -> str:
    """The peer id for which `lane`, the verified peer id of a stream, speaks; `read(n)` gives the
    stream's next n bytes. Raises WireError for any other bytes."""
    fields = []
    for what in ("key", "signature"):
        length = int.from_bytes(await read(2), "little")
        if not 0 < length <= MAX_FIELD_BYTES:
            raise WireError(f"a lane's {what} of {length} bytes")
        fields.append(await read(length))
    key, signature = fields
    peer = peer_id_of(key)
    if not verify(peer, key, CONTEXT, lane.encode(), signature):
        raise WireError("a lane that speaks for nobody")
    return peer
