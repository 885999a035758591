"""Peers of one process, connected by memory, with faults on command (DESIGN, I7).

Streams behave as libp2p's do towards the code above: bytes in order or not at all, bounded
windows, a killed process gives its peers an end of stream at once, a frozen process or a cut
network gives them silence. Corruption flips a bit in transit.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence

from swarm.errors import StreamClosedError, UnreachableError
from swarm.net.transport import Buffer, Handler

WINDOW_BYTES = 4 << 20
DIAL_TIMEOUT_S = 5.0


class _Pipe:
    """One direction of a stream: bytes written, travelling, and waiting to be read."""

    def __init__(self, network: MemoryNetwork, source: str, target: str) -> None:
        self.network, self.source, self.target = network, source, target
        self.inbox: deque[memoryview] = deque()
        self.in_flight: deque[bytes | None] = deque()  # None marks the end of the stream
        self.in_flight_bytes = self.unread_bytes = self.received_bytes = 0
        self.arrives_at = 0.0
        self.ended: StreamClosedError | None = None
        self.changed = asyncio.Event()

    def push(self, data: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        self.in_flight.append(data)
        self.in_flight_bytes += len(data or b"")
        sent_at = self.network.transmit(self.source, self.target, len(data or b""), loop.time())
        delay = self.network.delay_s(self.source, self.target)
        self.arrives_at = max(self.arrives_at, sent_at + delay)
        loop.call_at(self.arrives_at, self.arrive)

    def arrive(self) -> None:
        if self.network.is_silent(self.source, self.target):
            self.network.held.append(self)
            return
        if not self.in_flight or self.ended:
            return
        data = self.in_flight.popleft()
        if data is None:
            self.end("ended by the peer")
            return
        data = self.network.in_transit(self.source, self.target, data)
        self.in_flight_bytes -= len(data)
        self.unread_bytes += len(data)
        self.received_bytes += len(data)
        self.inbox.append(memoryview(data))
        self.changed.set()

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

    def __init__(self, peer: str, outgoing: _Pipe, incoming: _Pipe) -> None:
        self.peer = peer
        self._out, self._in = outgoing, incoming
        self._closed = False
        self._aborted: StreamClosedError | None = None  # here; the other end may not know yet

    @property
    def received_bytes(self) -> int:
        return self._in.received_bytes

    async def send(self, parts: Sequence[Buffer]) -> None:
        data = b"".join(parts)
        while (
            not self._out.ended
            and not self._aborted
            and self._out.in_flight_bytes + self._out.unread_bytes > WINDOW_BYTES
        ):
            await self._out.wait()
        if self._aborted or self._out.ended or self._closed:
            closed = StreamClosedError("this side has closed the stream")
            raise self._aborted or self._out.ended or closed
        if data:
            self._out.push(data)

    async def receive_exactly(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        await self.receive_into(memoryview(buffer))
        return bytes(buffer)

    async def receive_into(self, buffer: memoryview) -> None:
        buffer = buffer.cast("B") if buffer.nbytes else buffer
        filled, pipe = 0, self._in
        while filled < buffer.nbytes:
            while self._aborted or not pipe.inbox:
                if self._aborted or pipe.ended:
                    raise self._aborted or pipe.ended  # type: ignore[misc]
                try:
                    await pipe.wait()
                except asyncio.CancelledError:  # a cancelled receive loses nothing
                    if filled:
                        pipe.inbox.appendleft(memoryview(bytes(buffer[:filled])))
                        pipe.unread_bytes += filled
                    raise
            piece = pipe.inbox[0]
            count = min(len(piece), buffer.nbytes - filled)
            buffer[filled : filled + count] = piece[:count]
            filled += count
            pipe.unread_bytes -= count
            if count == len(piece):
                pipe.inbox.popleft()
            else:
                pipe.inbox[0] = piece[count:]
            pipe.changed.set()

    async def close(self) -> None:
        if not self._closed and not self._out.ended and not self._aborted:
            self._out.push(None)
        self._closed = True

    def finish(self) -> None:
        """Its user has gone: abort, but what was sent before a close still arrives."""
        if not self._closed:
            self.abort()
            return
        self._leave("was left", self._in)

    def abort(self) -> None:
        self._closed = True
        self._leave("was aborted", self._out, self._in)

    def _leave(self, why: str, *pipes: _Pipe) -> None:
        """End here at once; the other end learns of it as soon as it can hear from here."""
        if self._aborted is None:
            self._aborted = StreamClosedError(f"stream with {self.peer} {why}")
        network = self._out.network
        network.forget(self)
        for pipe in pipes:
            pipe.changed.set()
            if pipe.ended is None:
                network.end(pipe, why)


class MemoryTransport:
    """A peer's place in a `MemoryNetwork`; made by `MemoryNetwork.transport`."""

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        self.network, self.peer_id = network, peer_id
        self.handlers: dict[str, Handler] = {}
        self.streams: dict[MemoryStream, None] = {}
        self.tasks: dict[asyncio.Task[None], None] = {}
        self.closed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self.peer_id}/p2p/{self.peer_id}",)

    def serve(self, protocol: str, handler: Handler) -> None:
        self.handlers[protocol] = handler

    async def dial(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = ()
    ) -> MemoryStream:
        network = self.network
        deadline = asyncio.get_running_loop().time() + DIAL_TIMEOUT_S
        await asyncio.sleep(2 * network.delay_s(self.peer_id, peer_id))
        while network.is_silent(self.peer_id, peer_id) or network.is_silent(peer_id, self.peer_id):
            if asyncio.get_running_loop().time() >= deadline:
                raise UnreachableError(f"{peer_id} did not answer within {DIAL_TIMEOUT_S:.0f} s")
            await asyncio.sleep(DIAL_TIMEOUT_S / 20)
        other = network.transports.get(peer_id)
        if self.closed or other is None or other.closed or protocol not in other.handlers:
            raise UnreachableError(f"{peer_id} does not serve {protocol}")
        there = _Pipe(network, self.peer_id, peer_id)
        back = _Pipe(network, peer_id, self.peer_id)
        mine, theirs = MemoryStream(peer_id, there, back), MemoryStream(self.peer_id, back, there)
        self.streams[mine] = other.streams[theirs] = None
        task = asyncio.get_running_loop().create_task(other.run_handler(protocol, theirs))
        other.tasks[task] = None
        task.add_done_callback(lambda done: other.tasks.pop(done, None))
        return mine

    async def run_handler(self, protocol: str, stream: MemoryStream) -> None:
        try:
            await self.handlers[protocol](stream)
        except Exception as error:
            self.network.handler_errors.append((self.peer_id, protocol, error))
        finally:
            stream.finish()

    def abort(self) -> None:
        """What the end of a process does: every stream ends, nothing is served any more."""
        for stream in list(self.streams):
            stream.abort()
        self._serve_no_more()

    def _serve_no_more(self) -> None:
        self.closed = True
        for task in list(self.tasks):
            task.cancel()

    async def close(self) -> None:
        for stream in list(self.streams):
            stream.finish()
        self._serve_no_more()
        current = asyncio.current_task()
        await asyncio.gather(
            *(task for task in self.tasks if task is not current), return_exceptions=True
        )


class MemoryNetwork:
    """All peers of one process. Delays are drawn from `seed`; faults are the methods below.

    `latency_s` is the mean one-way delay, `jitter` its relative spread. `rate_bps` is the rate of
    each link, from one peer to one other: what two streams send over it goes out one after the
    other. `rates` names links, `(source, target)`, with a rate of their own.
    """

    def __init__(
        self, seed: int = 0, latency_s: float = 0.001, jitter: float = 0.5, rate_bps: float = 1e9
    ) -> None:
        self.random = random.Random(seed)
        self.latency_s, self.jitter, self.rate_bps = latency_s, jitter, rate_bps
        self.rates: dict[tuple[str, str], float] = {}
        self._sent_at: dict[tuple[str, str], float] = {}  # when a link has sent what it was given
        self.transports: dict[str, MemoryTransport] = {}
        self.handler_errors: list[tuple[str, str, Exception]] = []
        self.held: list[_Pipe] = []
        self.held_ends: list[tuple[_Pipe, str]] = []
        self.frozen: set[str] = set()
        self.cuts: set[frozenset[str]] = set()
        self.corrupt: Callable[[str, str, bytes], bytes] | None = None

    def transport(self, peer_id: str) -> MemoryTransport:
        """The transport of a (re)started peer; its former life, if any, must be killed."""
        self.transports[peer_id] = MemoryTransport(self, peer_id)
        return self.transports[peer_id]

    def kill(self, peer_id: str) -> None:
        self.thaw(peer_id)  # a stopped process that is killed leaves like any other
        self.transports[peer_id].abort()

    def freeze(self, peer_id: str) -> None:
        """Nothing reaches the peer or leaves it, and its streams stay open."""
        self.frozen.add(peer_id)

    def thaw(self, peer_id: str) -> None:
        self.frozen.discard(peer_id)
        self._release()

    def cut(self, left: str, right: str) -> None:
        """The two peers cannot hear each other; their streams stay open and silent."""
        self.cuts.add(frozenset((left, right)))

    def heal(self, *pair: str) -> None:
        """End the cut between the two peers, or all cuts."""
        self.cuts = self.cuts - {frozenset(pair)} if pair else set()
        self._release()

    def delay_s(self, source: str, target: str) -> float:
        return self.latency_s * (1 + self.jitter * (2 * self.random.random() - 1))

    def transmit(self, source: str, target: str, num_bytes: int, now: float) -> float:
        """When a link will have sent `num_bytes` more."""
        link = (source, target)
        seconds = num_bytes * 8 / self.rates.get(link, self.rate_bps)
        self._sent_at[link] = max(self._sent_at.get(link, 0.0), now) + seconds
        return self._sent_at[link]

    def is_silent(self, source: str, target: str) -> bool:
        return bool(
            source in self.frozen
            or target in self.frozen
            or (self.cuts and frozenset((source, target)) in self.cuts)
        )

    def in_transit(self, source: str, target: str, data: bytes) -> bytes:
        return self.corrupt(source, target, data) if self.corrupt else data

    def forget(self, stream: MemoryStream) -> None:
        for transport in self.transports.values():
            transport.streams.pop(stream, None)

    def end(self, pipe: _Pipe, why: str) -> None:
        """End a pipe, or once its two peers hear each other again."""
        if self.is_silent(pipe.source, pipe.target):
            self.held_ends.append((pipe, why))
        else:
            pipe.inbox.clear()
            pipe.end(why)

    def _release(self) -> None:
        held, self.held = self.held, []
        ends, self.held_ends = self.held_ends, []
        for pipe, why in ends:
            self.end(pipe, why)
        loop = asyncio.get_running_loop()
        for pipe in held:
            loop.call_soon(pipe.arrive)
