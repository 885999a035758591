"""Streams between peers of a `swarm.net.memory.MemoryNetwork`: bytes in order, or not at all.

What a fault does to a stream happens here, piece by piece (a piece is what one `send` was given).
A piece that is lost takes all that come after it in its stream with it, as TCP would have it: the
stream stays open and silent in that direction until the network ends it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from swarm.errors import StreamClosedError
from swarm.net.transport import Buffer

if TYPE_CHECKING:
    from swarm.net.memory import MemoryNetwork

WINDOW_BYTES = 4 << 20
LARGE_BYTES = 1 << 16


def _joined(parts: Sequence[Buffer]) -> bytes | memoryview:
    """All of them in memory of their own."""
    size = sum(memoryview(part).nbytes for part in parts)
    if size < LARGE_BYTES:
        return b"".join(parts)
    memory, filled = np.empty(size, np.uint8).data, 0
    for part in parts:
        there = filled + memoryview(part).nbytes
        _copy(memory[filled:there], part)
        filled = there
    return memory


def _copy(target: memoryview, source: Buffer) -> None:
    """Bytes, without the interpreter's lock where they are many: who feeds a GPU needs it."""
    if target.nbytes >= LARGE_BYTES:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    elif target.nbytes:
        target[:] = memoryview(source).cast("B")


class Pipe:
    """One direction of a stream: bytes written, travelling, and waiting to be read."""

    def __init__(self, network: MemoryNetwork, source: str, target: str) -> None:
        self.network, self.source, self.target = network, source, target
        self.link = (source, target)
        self.inbox: deque[memoryview] = deque()
        # When it was sent, and what; None marks the end.
        self.in_flight: deque[tuple[float, bytes | memoryview | None]] = deque()
        self.in_flight_bytes = self.unread_bytes = self.received_bytes = self.sent_bytes = 0
        self.arrives_at = 0.0
        self.ended: StreamClosedError | None = None
        self.broken = False  # something was lost: nothing arrives any more
        self.lingers = False  # its source has gone, and what is under way still comes
        self.late_s = -1.0  # drawn once per fault: how much later than others this one is
        self.streams: list[MemoryStream] = []  # its two ends
        self.changed = asyncio.Event()
        self._schedule = 0  # raised when what is in flight is scheduled anew

    def push(self, data: bytes | memoryview) -> None:
        network, now = self.network, asyncio.get_running_loop().time()
        self.in_flight_bytes += len(data)
        self.sent_bytes += len(data)
        sent_at = network.transmit(self.source, self.target, len(data), now)
        arrives_at = sent_at + network.delay_s(self.source, self.target) + network.late_s(self)
        self.arrives_at = max(self.arrives_at, arrives_at)
        self.in_flight.append((now, data))
        self._call_at(self.arrives_at)

    def _call_at(self, when: float) -> None:
        # What is under way arrives whatever becomes of its sender: it is in no process's context.
        asyncio.get_running_loop().call_at(
            when, self.arrive, self._schedule, context=self.network.context
        )

    def arrive(self, schedule: int | None = None) -> None:
        network = self.network
        if not self.in_flight or self.ended or schedule not in (None, self._schedule):
            return
        if self.broken or network.loses(self.link):
            _, data = self.in_flight.popleft()
            self._lose(data)
            return
        if network.is_silent(self.source, self.target):
            network.held.append(self)
            return
        sent_at, data = self.in_flight.popleft()
        if data is None:
            self.end("ended by the peer")
            return
        self.in_flight_bytes -= len(data)
        changed = network.in_transit(self, data)
        if changed is None:
            for stream in self.streams:  # both ends know at once
                stream.abort()
            return
        network.note_arrival(self, sent_at)
        self.unread_bytes += len(changed)
        self.received_bytes += len(changed)
        self.inbox.append(memoryview(changed))
        self.changed.set()

    def _lose(self, data: bytes | memoryview | None) -> None:
        self.broken = True
        self.in_flight_bytes -= len(data or b"")
        if data:
            self.network.effects["lost"] += 1
        self.changed.set()  # room for a sender that waits

    def linger(self, pieces: int, share: float, late_s: float) -> None:
        """The source is gone: the first `pieces` in flight come `late_s` from now, and of the next
        one the first `share` of its bytes; then the end."""
        self._schedule += 1
        self.lingers = True
        under_way = [each for each in self.in_flight if each[1] is not None]
        self.in_flight = deque(under_way[:pieces])
        if len(under_way) > pieces:
            sent_at, data = under_way[pieces]
            assert data is not None
            self.network.effects["lost"] += len(under_way) - pieces
            if part := data[: int(len(data) * share)]:
                self.in_flight.append((sent_at, part))
        now = asyncio.get_running_loop().time()
        self.in_flight.append((now, None))
        self.in_flight_bytes = sum(len(data or b"") for _, data in self.in_flight)
        for _ in self.in_flight:
            self._call_at(now + late_s)

    def end(self, why: str) -> None:
        if self.ended is None:
            self.ended = StreamClosedError(f"stream from {self.source} to {self.target} {why}")
        self.in_flight.clear()
        self.changed.set()

    async def wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()


class MemoryStream:
    """One end of a stream between two peers of a `MemoryNetwork`."""

    def __init__(self, peer: str, outgoing: Pipe, incoming: Pipe) -> None:
        self.peer = peer
        self._out, self._in = outgoing, incoming
        outgoing.streams.append(self)
        incoming.streams.append(self)
        self._sending = self._receiving = False
        self._left: StreamClosedError | None = None  # here; the other end may not know yet

    @property
    def received_bytes(self) -> int:
        return self._in.received_bytes

    @property
    def sent_bytes(self) -> int:
        return self._out.sent_bytes

    @property
    def open(self) -> bool:
        return self._left is None

    @property
    def incomplete(self) -> bool:
        """Whether something was lost in it, and its ends do not know yet."""
        return self._out.broken or self._in.broken

    async def send(self, parts: Sequence[Buffer]) -> None:
        if self._sending:
            raise RuntimeError("one sender at a time")
        data = _joined(parts)
        self._sending = True
        try:
            while (
                not self._out.ended
                and not self._left
                and self._out.in_flight_bytes + self._out.unread_bytes > WINDOW_BYTES
            ):
                await self._out.wait()
        finally:
            self._sending = False
        if over := self._left or self._out.ended:
            raise over
        if data:
            self._out.push(data)

    async def receive_exactly(self, num_bytes: int) -> bytes:
        if self._receiving:
            raise RuntimeError("one receiver at a time")
        pipe = self._in
        if pipe.inbox and num_bytes < len(pipe.inbox[0]) and not self._left:
            piece = pipe.inbox[0]  # most reads are of a part of what one send has brought
            pipe.inbox[0] = piece[num_bytes:]
            pipe.unread_bytes -= num_bytes
            pipe.changed.set()
            return bytes(piece[:num_bytes])
        buffer = bytearray(num_bytes)
        await self.receive_into(memoryview(buffer))
        return bytes(buffer)

    async def receive_into(self, buffer: memoryview) -> None:
        if self._receiving:
            raise RuntimeError("one receiver at a time")
        self._receiving = True
        try:
            await self._fill(buffer.cast("B") if buffer.nbytes else buffer)
        finally:
            self._receiving = False

    async def _fill(self, buffer: memoryview) -> None:
        filled, pipe = 0, self._in
        while filled < buffer.nbytes:
            while self._left or not pipe.inbox:
                if over := self._left or pipe.ended:
                    raise over
                try:
                    await pipe.wait()
                except asyncio.CancelledError:  # a cancelled receive loses nothing
                    if filled:
                        pipe.inbox.appendleft(memoryview(bytes(buffer[:filled])))
                        pipe.unread_bytes += filled
                    raise
            piece = pipe.inbox[0]
            count = min(len(piece), buffer.nbytes - filled)
            _copy(buffer[filled : filled + count], piece[:count])
            filled += count
            pipe.unread_bytes -= count
            if count == len(piece):
                pipe.inbox.popleft()
            else:
                pipe.inbox[0] = piece[count:]
            pipe.changed.set()

    async def close(self) -> None:
        self._leave("was closed")

    def abort(self) -> None:
        self._leave("was aborted")

    def _leave(self, why: str) -> None:
        """End here at once; the other end learns of it as soon as it can hear from here."""
        if self._left is None:
            self._left = StreamClosedError(f"stream with {self.peer} {why}")
        network = self._out.network
        network.forget(self)
        for pipe in (self._out, self._in):
            pipe.changed.set()
            if pipe.ended is None and not pipe.lingers:
                network.end(pipe, why)

    def lose_source(self, pieces: int, share: float, late_s: float) -> None:
        """This end sees the stream's end now; the other one goes on to read what is under way
        (see `Pipe.linger`), and what it sends meanwhile arrives nowhere."""
        self._out.linger(pieces, share, late_s)
        self._in.broken = True
        self._left = StreamClosedError(f"stream with {self.peer} was lost")
        self._out.network.forget(self)
        self._in.changed.set()
        self._out.changed.set()
