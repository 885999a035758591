"""One stream of several: for large tensors over long lines.

A new stream of libp2p may have 256 KiB on their way and unread, and more only after some round
trips; a home line and the buffers along it hold as much, so a stream alone leaves it idle now and
then (docs/decisions/group-all-reduce.md). Here bytes go round robin over `count` streams of the
same connection, a block each, and are read in the same order; towards its users it is one stream.

Each begins with a byte, `count`; where that is not 1 with its own number (one byte) and 16 random
bytes that all of them share, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence

from swarm.errors import StreamClosedError, WireError
from swarm.net.stream_limit import StreamLimit
from swarm.net.transport import Buffer, Handler, Stream, Transport

BLOCK_BYTES = 64 * 1024
MAX_STRIPES = 8
ID_BYTES = 16
GATHER_S = 10.0  # for all stripes to come, once one has
log = logging.getLogger(__name__)


class StripedStream:
    """See `Stream`; of streams with the same peer, in the order of their numbers."""

    def __init__(self, stripes: Sequence[Stream], num_sent: int = 0) -> None:
        """`num_sent` bytes have been sent on the first of them."""
        self.peer = stripes[0].peer
        self._stripes = stripes
        self._num_sent, self._num_received = num_sent, 0  # bytes
        self._sending = self._receiving = False
        self._pushed_back = memoryview(b"")
        self._ended: StreamClosedError | None = None  # for sending

    @property
    def received_bytes(self) -> int:
        return sum(each.received_bytes for each in self._stripes)

    @property
    def sent_bytes(self) -> int:
        return sum(each.sent_bytes for each in self._stripes)

    async def send(self, parts: Sequence[Buffer]) -> None:
        if self._sending:
            raise RuntimeError("one sender at a time")
        if self._ended is not None:
            raise StreamClosedError(self._ended.message)
        self._sending = True
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                for stripe, start, stop in self._blocks(self._num_sent, len(view)):
                    await stripe.send([view[start:stop]])
                self._num_sent += len(view)
        except StreamClosedError as error:  # of one stripe; what has come in may still be read
            self._ended = error
            raise
        except asyncio.CancelledError:
            self.abort()  # the other side may have got half of it
            raise
        finally:
            self._sending = False

    async def receive_exactly(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        await self.receive_into(memoryview(buffer))
        return bytes(buffer)

    async def receive_into(self, buffer: memoryview) -> None:
        if self._receiving:
            raise RuntimeError("one receiver at a time")
        view = memoryview(buffer).cast("B")
        filled = min(len(self._pushed_back), len(view))
        view[:filled] = self._pushed_back[:filled]
        self._pushed_back = self._pushed_back[filled:]
        self._receiving = True
        try:
            rest = view[filled:]
            for stripe, start, stop in self._blocks(self._num_received, len(rest)):
                await stripe.receive_into(rest[start:stop])
                self._num_received += stop - start
                filled += stop - start
        except asyncio.CancelledError:
            self._pushed_back = memoryview(bytes(view[:filled]))
            raise
        finally:
            self._receiving = False

    def _blocks(self, position: int, num_bytes: int) -> Iterator[tuple[Stream, int, int]]:
        """Which stripe takes what of the next `num_bytes`."""
        start = 0
        while start < num_bytes:
            number, passed = divmod(position + start, BLOCK_BYTES)
            stop = min(start + BLOCK_BYTES - passed, num_bytes)
            yield self._stripes[number % len(self._stripes)], start, stop
            start = stop

    async def close(self) -> None:
        """See `Stream`: what the other side has not answered may be lost, also on one stripe alone;
        so whoever has dialled closes once it knows that all has arrived."""
        for each in self._stripes:
            await each.close()

    def abort(self) -> None:
        for each in self._stripes:
            each.abort()


async def dial_striped(
    transport: Transport,
    peer: str,
    protocol: str,
    addresses: Sequence[str],
    count: int,
    first: Sequence[Buffer] = (),
) -> Stream:
    """`Transport.dial`, with `count` stripes, to who serves it with `Gathering`. What is sent
    `first`, a block at most, needs no message of its own.

    Raises UnreachableError, StreamClosedError, or ValueError for what makes no stripes.
    """
    num_first = sum(memoryview(part).nbytes for part in first)
    if not 1 <= count <= MAX_STRIPES or num_first > BLOCK_BYTES:
        raise ValueError(f"{count} stripes, of at most {MAX_STRIPES}; {num_first} bytes at first")
    identity = os.urandom(ID_BYTES)

    async def dial(number: int) -> Stream:
        stream = await transport.dial(peer, protocol, addresses)
        own = bytes([number]) + identity if count > 1 else b""
        await stream.send([bytes([count]) + own, *(first if number == 0 else ())])
        return stream

    tasks = [asyncio.ensure_future(dial(number)) for number in range(count)]
    try:
        stripes = [await task for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        for opened in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(opened, BaseException):
                opened.abort()
        raise
    return stripes[0] if count == 1 else StripedStream(stripes, num_first)


class _Group:
    """Streams that belong together, while they come and as long as they are served."""

    def __init__(self, count: int) -> None:
        self.stripes: list[Stream | None] = [None] * count
        self.complete, self.over = asyncio.Event(), asyncio.Event()

    def add(self, number: int, stream: Stream) -> None:
        if self.stripes[number] is not None:
            raise WireError(f"stripe {number} has come already")
        self.stripes[number] = stream
        if None not in self.stripes:
            self.complete.set()

    def whole(self) -> Stream:
        stripes = [each for each in self.stripes if each is not None]
        return stripes[0] if len(stripes) == 1 else StripedStream(stripes)


class Gathering:
    """A `Handler` that gives `handler` one stream for all stripes that belong together.

    `limit` bounds streams that have not said what they belong to, or wait for others of it.
    """

    def __init__(self, handler: Handler, limit: StreamLimit) -> None:
        self._handler, self._limit = handler, limit
        self._groups: dict[tuple[str, bytes], _Group] = {}

    async def __call__(self, stream: Stream) -> None:
        with self._limit.one_more(stream.peer) as room:
            if not room:
                stream.abort()
                return
            try:
                async with asyncio.timeout(GATHER_S):
                    group = await self._join(stream)
            except (StreamClosedError, WireError, TimeoutError) as error:
                log.debug("a stream of %s ended: %s", stream.peer, error or "stripes are missing")
                stream.abort()
                return
        if group.stripes[0] is not stream:  # who serves a stripe ends it on returning
            await group.over.wait()
            return
        try:
            await self._handler(group.whole())
        finally:
            group.over.set()

    async def _join(self, stream: Stream) -> _Group:
        count = (await stream.receive_exactly(1))[0]
        if not 1 <= count <= MAX_STRIPES:
            raise WireError(f"a stream of {count} stripes")
        if count == 1:
            group = _Group(1)
            group.add(0, stream)
            return group
        own = await stream.receive_exactly(1 + ID_BYTES)
        if own[0] >= count:
            raise WireError(f"stripe {own[0]} of {count}")
        key = stream.peer, bytes([count]) + own[1:]
        group = self._groups.setdefault(key, _Group(count))
        group.add(own[0], stream)
        try:
            await group.complete.wait()
        finally:
            if self._groups.get(key) is group:
                del self._groups[key]
        return group
