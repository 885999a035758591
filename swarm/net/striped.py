"""One stream of several: for large tensors over long lines, and over several connections.

A new stream of libp2p may have 256 KiB on their way and unread, and more only after some round
trips; a home line and the buffers along it hold as much, so a stream alone leaves it idle now and
then (docs/decisions/group-all-reduce.md). Here bytes go round robin over `count` streams to the
same peer, a block each, and are read in the same order; towards its users it is one stream. Where
the transport has several connections, they are spread over these.

Each begins with a byte, `count`; where that is not 1 with its own number (one byte) and 16 random
bytes that all of them share, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

from swarm.errors import StreamClosedError, WireError
from swarm.net.stream_limit import StreamLimit
from swarm.net.transport import Buffer, Stream, Transport

BLOCK_BYTES = 64 * 1024
MAX_STRIPES = 16
ID_BYTES = 16
GATHER_S = 10.0  # for all stripes to come, once one has
GREET_S = 10.0  # for what comes first
log = logging.getLogger(__name__)
First = TypeVar("First")


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
            for stripe, pieces in self._batches(parts):
                await stripe.send(pieces)
        except StreamClosedError as error:  # of one stripe; what has come in may still be read
            self._ended = error
            raise
        except asyncio.CancelledError:
            self.abort()  # the other side may have got half of it
            raise
        finally:
            self._sending = False

    def _batches(self, parts: Sequence[Buffer]) -> Iterator[tuple[Stream, list[Buffer]]]:
        """What goes to which stripe, of one block each, in order."""
        current, pieces = self._stripes[0], list[Buffer]()
        for part in parts:
            view = memoryview(part).cast("B")
            for stripe, start, stop in self._blocks(self._num_sent, len(view)):
                if stripe is not current and pieces:
                    yield current, pieces
                    pieces = []
                current = stripe
                pieces.append(view[start:stop])
            self._num_sent += len(view)
        if pieces:
            yield current, pieces

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
        """See `Stream`: what may be lost may be so on one stripe alone."""
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
    opened: list[Stream] = []

    async def dial(number: int) -> Stream:
        stream = await transport.dial(peer, protocol, addresses, connection=number)
        opened.append(stream)
        own = bytes([number]) + identity if count > 1 else b""
        await stream.send([bytes([count]) + own, *(first if number == 0 else ())])
        return stream

    tasks: list[asyncio.Task[Stream]] = []
    try:
        front = await dial(0)  # the others find the connection
        if count == 1:
            return front
        tasks += (asyncio.ensure_future(dial(number)) for number in range(1, count))
        return StripedStream([front, *await asyncio.gather(*tasks)], num_first)
    except BaseException:
        for task in tasks:
            task.cancel()
        for each in opened:
            each.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in opened:  # while they were cancelled
            each.abort()
        raise


class _Group:
    """Streams that belong together, while they come and as long as they are served: by the task of
    the first of them."""

    def __init__(self, count: int) -> None:
        self.stripes: list[Stream | None] = [None] * count
        self.failed = False
        self.settled = asyncio.Event()  # all have come, or it has failed
        self.greeted = asyncio.Event()  # and what came first has been read
        self.over = asyncio.Event()
        self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.fail)

    def add(self, number: int, stream: Stream) -> None:
        if self.settled.is_set() or self.stripes[number] is not None:
            raise WireError(f"no stripe {number} is expected")
        self.stripes[number] = stream
        if None not in self.stripes:
            self._timer.cancel()
            self.settled.set()

    def fail(self) -> None:
        self.failed = True
        self._timer.cancel()
        for event in (self.settled, self.greeted, self.over):
            event.set()

    def whole(self) -> Stream:
        stripes = [each for each in self.stripes if each is not None]
        return stripes[0] if len(stripes) == 1 else StripedStream(stripes)


class Gathering(Generic[First]):
    """A `Handler` that makes one stream of all stripes that belong together.

    `greet(stream)` reads what comes first, within `GREET_S`; `handle(stream, first, count)` serves
    the stream from then on. `limit` bounds those that have not come so far, each stripe by itself.
    """

    def __init__(
        self,
        greet: Callable[[Stream], Awaitable[First]],
        handle: Callable[[Stream, First, int], Awaitable[None]],
        limit: StreamLimit,
    ) -> None:
        self._greet, self._handle, self._limit = greet, handle, limit
        self._groups: dict[tuple[str, bytes], _Group] = {}

    async def __call__(self, stream: Stream) -> None:
        with self._limit.one_more(stream.peer) as room:
            if not room:
                stream.abort()
                return
            try:
                group = await self._join(stream)
                whole = group.whole()
                if group.stripes[0] is stream:
                    first = await self._read(group, whole)
                else:
                    await group.greeted.wait()
            except (StreamClosedError, WireError, TimeoutError) as error:
                log.debug("a stream of %s ended: %s", stream.peer, error or "silent")
                stream.abort()
                return
        if group.stripes[0] is not stream:
            await group.over.wait()  # whoever serves a stripe ends it on returning
            return
        try:
            await self._handle(whole, first, len(group.stripes))
        finally:
            group.over.set()

    async def _join(self, stream: Stream) -> _Group:
        """The group of a stream, once all of it has come. Raises if it has not in time."""
        async with asyncio.timeout(GREET_S):
            count = (await stream.receive_exactly(1))[0]
            if not 1 <= count <= MAX_STRIPES:
                raise WireError(f"{count} stripes")
            own = await stream.receive_exactly(1 + ID_BYTES) if count > 1 else bytes(1)
        if own[0] >= count:
            raise WireError(f"stripe {own[0]} of {count}")
        if count == 1:
            alone = _Group(1)
            alone.add(0, stream)
            return alone
        key = stream.peer, bytes([count]) + own[1:]
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(count)
        group.add(own[0], stream)
        try:
            await group.settled.wait()
        except BaseException:
            group.fail()
            raise
        finally:
            if self._groups.get(key) is group:
                del self._groups[key]
        if group.failed:
            raise WireError("not all stripes have come")
        return group

    async def _read(self, group: _Group, whole: Stream) -> First:
        try:
            async with asyncio.timeout(GREET_S):
                first = await self._greet(whole)
        except BaseException:
            group.fail()
            raise
        group.greeted.set()
        return first
