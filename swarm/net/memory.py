"""Peers of one process, connected by memory, with faults on command (DESIGN, I7).

Streams behave as libp2p's do towards the code above: bytes in order or not at all, bounded
windows, a killed process gives its peers an end of stream at once, a frozen process or a cut
network gives them silence. What "lost", "late", "reordered" or "corrupt" can mean over such streams
is a method of `MemoryNetwork` each; `effects` counts what they really did.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Callable, Sequence

from swarm.errors import UnreachableError
from swarm.net.memory_stream import WINDOW_BYTES, MemoryStream, Pipe
from swarm.net.transport import Handler
from swarm.wire.frames import MAGIC

DIAL_TIMEOUT_S = 5.0
__all__ = ["DIAL_TIMEOUT_S", "WINDOW_BYTES", "MemoryNetwork", "MemoryStream", "MemoryTransport"]


class MemoryTransport:
    """A peer's place in a `MemoryNetwork`; made by `MemoryNetwork.transport`."""

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        self.network, self.peer_id = network, peer_id
        self.connections = 1
        self.handlers: dict[str, Handler] = {}
        self.streams: dict[MemoryStream, None] = {}
        self.tasks: dict[asyncio.Task[None], None] = {}
        self.closed = False
        self.context = contextvars.copy_context()  # of the process whose transport this is

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self.peer_id}/p2p/{self.peer_id}",)

    def serve(self, protocol: str, handler: Handler) -> None:
        self.handlers[protocol] = handler

    async def dial(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = (), *, connection: int = 0
    ) -> MemoryStream:
        network = self.network
        deadline = asyncio.get_running_loop().time() + DIAL_TIMEOUT_S
        await asyncio.sleep(2 * network.delay_s(self.peer_id, peer_id))
        while network.is_apart(self.peer_id, peer_id):
            if asyncio.get_running_loop().time() >= deadline:
                raise UnreachableError(f"{peer_id} did not answer within {DIAL_TIMEOUT_S:.0f} s")
            await asyncio.sleep(DIAL_TIMEOUT_S / 20)
        other = network.transports.get(peer_id)
        if self.closed or other is None or other.closed or protocol not in other.handlers:
            raise UnreachableError(f"{peer_id} does not serve {protocol}")
        there = Pipe(network, self.peer_id, peer_id)
        back = Pipe(network, peer_id, self.peer_id)
        mine, theirs = MemoryStream(peer_id, there, back), MemoryStream(self.peer_id, back, there)
        self.streams[mine] = other.streams[theirs] = None
        serving = other.run_handler(protocol, theirs)
        task = asyncio.get_running_loop().create_task(serving, context=other.context)
        other.tasks[task] = None
        task.add_done_callback(lambda done: other.tasks.pop(done, None))
        return mine

    async def run_handler(self, protocol: str, stream: MemoryStream) -> None:
        try:
            await self.handlers[protocol](stream)
        except Exception as error:
            self.network.handler_errors.append((self.peer_id, protocol, error))
        finally:
            stream.abort()

    def abort(self) -> None:
        """What the end of a process does: every stream ends, nothing is served any more."""
        for stream in list(self.streams):
            stream.abort()
        self.closed = True
        for task in list(self.tasks):
            task.cancel()

    async def close(self) -> None:
        self.abort()
        current = asyncio.current_task()
        await asyncio.gather(
            *(task for task in self.tasks if task is not current), return_exceptions=True
        )


Link = tuple[str, str]  # source and target


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
        self.held: list[Pipe] = []
        self.held_ends: list[tuple[Pipe, str]] = []
        self.frozen: set[str] = set()
        self.cuts: set[frozenset[str]] = set()
        self.deaf: set[Link] = set()
        self.losing: set[Link] = set()
        self.delays: dict[frozenset[str], float] = {}
        self.corrupting: Counter[Link] = Counter()
        self.corrupt: Callable[[str, str, bytes], bytes] | None = None
        self.effects: Counter[str] = Counter()  # pieces lost, late, reordered, stale, corrupted
        self._newest: dict[Link, float] = {}  # when what arrived last on a link was sent, at most
        self.context = contextvars.copy_context()  # no process's: what is under way is the wires'

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

    def deafen(self, source: str, target: str) -> None:
        """`target` does not hear `source`, which hears it; what is sent arrives when it does."""
        self.deaf.add((source, target))

    def undeafen(self, source: str, target: str) -> None:
        self.deaf.discard((source, target))
        self._release()

    def lose(self, source: str, target: str) -> None:
        """From now on nothing that `source` sends to `target` arrives, ever; neither end notices.

        So orders are carried out whose answers are lost, or never come although they were sent.
        """
        self.losing.add((source, target))

    def stop_losing(self, source: str, target: str) -> None:
        """The two hear each other again, and find those streams ended in which something is
        missing."""
        self.losing.discard((source, target))
        for stream in self._between(source, target):
            if stream.incomplete:
                stream.abort()
        self._release()

    def delay(self, left: str, right: str, most_s: float) -> None:
        """Each stream between the two is later than usual by a time of its own, up to `most_s`: so
        what is sent in one overtakes what was sent before it in another. 0 ends it."""
        if most_s > 0:
            self.delays[frozenset((left, right))] = most_s
        else:
            self.delays.pop(frozenset((left, right)), None)

    def sever(self, source: str, target: str, late_s: float) -> None:
        """`source` finds its streams with `target` ended. Of what it had sent, `target` gets some
        prefix, `late_s` later, and the end only then: when the two may have new streams already."""
        for stream in self._between(source, target):
            if stream.open and not stream.incomplete:
                pieces, share = self.random.randint(0, 3), self.random.random()
                stream.lose_source(pieces, share, late_s)

    def spoil(self, source: str, target: str) -> None:
        """Of the next piece from `source` to `target` one bit arrives wrong. At the head of a frame
        the frame is refused; elsewhere the transport's authentication ends the stream."""
        self.corrupting[source, target] += 1

    def _between(self, source: str, target: str) -> list[MemoryStream]:
        """The ends at `source` of its streams with `target`."""
        transport = self.transports.get(source)
        return [each for each in transport.streams if each.peer == target] if transport else []

    def late_s(self, pipe: Pipe) -> float:
        most_s = self.delays.get(frozenset(pipe.link), 0.0) if self.delays else 0.0
        if not most_s:
            pipe.late_s = -1.0
            return 0.0
        if pipe.late_s < 0:
            pipe.late_s = self.random.uniform(0, most_s)
        self.effects["late"] += 1
        return pipe.late_s

    def loses(self, link: Link) -> bool:
        return link in self.losing

    def note_arrival(self, pipe: Pipe, sent_at: float) -> None:
        newest = self._newest.get(pipe.link, 0.0)
        if sent_at < newest:
            self.effects["reordered"] += 1
        else:
            self._newest[pipe.link] = sent_at
        if pipe.lingers:
            self.effects["stale"] += 1

    @property
    def healthy(self) -> bool:
        """Whether everybody hears everybody, in time."""
        return not (self.frozen or self.cuts or self.deaf or self.losing or self.delays)

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
            or (source, target) in self.deaf
        )

    def is_apart(self, left: str, right: str) -> bool:
        """Whether the two cannot open a stream now."""
        return any(
            self.is_silent(*link) or link in self.losing for link in ((left, right), (right, left))
        )

    def in_transit(self, pipe: Pipe, data: bytes | memoryview) -> bytes | memoryview | None:
        """What arrives of a piece; None when its stream must end."""
        if self.corrupt:
            data = self.corrupt(pipe.source, pipe.target, bytes(data))
        if self.corrupting[pipe.link]:
            self.corrupting[pipe.link] -= 1
            self.effects["corrupted"] += 1
            data = bytes(data)
            if not data.startswith(MAGIC):
                return None
            where = self.random.randrange(len(MAGIC))
            wrong = data[where] ^ (1 << self.random.randrange(8))
            return data[:where] + bytes([wrong]) + data[where + 1 :]
        return data

    def forget(self, stream: MemoryStream) -> None:
        for transport in self.transports.values():
            transport.streams.pop(stream, None)

    def end(self, pipe: Pipe, why: str) -> None:
        """End a pipe, or once its two peers hear each other again."""
        if pipe.link in self.losing or self.is_silent(pipe.source, pipe.target):
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
            loop.call_soon(pipe.arrive, context=self.context)
