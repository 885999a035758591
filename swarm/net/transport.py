"""The seams to the outside: byte streams between peers, and the shared directory (DESIGN, I7).

Protocol code sees only these. Implementations: `swarm.net.libp2p` (hivemind's p2pd, inside this
event loop) and `swarm.net.memory` (one process, scripted faults). One conformance suite,
`tests/conformance`, is run against both. Time is the event loop's clock, so a virtual-time loop
makes every deadline below virtual too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from swarm.errors import StreamClosedError

Buffer = bytes | bytearray | memoryview
MAX_CONNECTIONS = 16  # to a peer


class Stream(Protocol):
    """An ordered, reliable, bidirectional byte stream.

    `peer` is the verified remote peer id. `received_bytes` counts what has arrived from it so far,
    read by us or not, and `sent_bytes` what it or a buffer on the way has taken: growing counts are
    signs of life while a large frame is on its way.
    """

    peer: str

    @property
    def received_bytes(self) -> int: ...

    @property
    def sent_bytes(self) -> int: ...

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send the parts in order, waiting while the other side is slow.

        Buffers may be referenced until this returns, not after. One sender at a time.
        Raises StreamClosedError when the stream has ended; what was sent may or may not arrive.
        """

    async def receive_exactly(self, num_bytes: int) -> bytes:
        """The next `num_bytes`. Raises StreamClosedError if the stream ends first.

        One receiver at a time: RuntimeError for another, as for a second sender."""

    async def receive_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes. Raises StreamClosedError if the stream ends first."""

    async def close(self) -> None:
        """End a stream on which all is done: what either side has not received by now may be lost,
        so who has sent last waits (`until_ended`). The other side sees the end. Idempotent."""

    def abort(self) -> None:
        """Drop a stream on which something is amiss, at once: pending sends and receives here and
        there raise. Idempotent."""


async def until_ended(stream: Stream, limit_s: float) -> None:
    """Discard what comes until the other side ends the stream, at most `limit_s`."""
    trash = memoryview(bytearray(1 << 16))
    try:
        async with asyncio.timeout(limit_s):
            while True:
                await stream.receive_into(trash)
    except (StreamClosedError, TimeoutError):
        pass


Handler = Callable[[Stream], Awaitable[None]]


class Transport(Protocol):
    """Dial peers and serve protocols. A crash and a normal end of a stream look alike."""

    peer_id: str

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs (with /p2p/ID) at which others can dial this peer."""

    @property
    def connections(self) -> int:
        """To each peer, over which streams can be spread."""

    def serve(self, protocol: str, handler: Handler) -> None:
        """Run `handler(stream)` in a task of its own per incoming stream; the stream is aborted
        when the handler returns or raises (an exception is logged, never propagated)."""

    async def dial(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = (), *, connection: int = 0
    ) -> Stream:
        """Open a stream. Raises UnreachableError: no such peer, refused, not in time.

        Of several connections it takes that of this number, modulo theirs, if it is there already;
        one that is not is made for the next time.
        """

    async def close(self) -> None:
        """Abort all streams and stop serving. Idempotent."""


class Directory(Protocol):
    """A shared, untrusted, eventually consistent map `key -> {signer peer id: value}`.

    Records are signed by their writer and size-bounded; invalid or expired ones are never returned.
    """

    async def publish(self, key: str, value: Mapping[str, object], ttl_s: float) -> bool:
        """Store this peer's record under `key`; False when nobody took it."""

    async def lookup(self, key: str) -> dict[str, dict[str, object]]:
        """Valid records by signer. An unreachable directory gives an empty dict, not an error."""

    async def close(self) -> None: ...
