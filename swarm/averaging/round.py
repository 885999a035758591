"""One averaging round at one member: its streams, its buffers, its end. See `all_reduce`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from swarm.averaging.errors import RoundFailedError
from swarm.averaging.plan import EXACT, MAX_MEMBERS, Chunk, Plan
from swarm.averaging.progress import Count, Link, Rates
from swarm.averaging.sums import decode_chunk, encode_chunk, sum_rounded
from swarm.errors import StreamClosedError, TransportError, WireError
from swarm.net.striped import MAX_STRIPES
from swarm.net.transport import Buffer, Stream, until_ended
from swarm.tasks import TaskSet
from swarm.wire.frames import encode_frame, no_tensors, read_frame

_SUM, _NOTICE, _TAKEN = b"\x01", b"\x00", b"\x02"
MAX_NOTICE_BYTES = 4096
log = logging.getLogger(__name__)
_MAX_REASON = 300
# To the member of this index, and what is sent first.
Dial = Callable[[int, Sequence[Buffer]], Awaitable[Stream]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a round. None depends on its size, nor on the links' speed if they move at all."""

    start_s: float = 30.0  # for all members to begin, once one has
    silence_s: float = 10.0  # without a byte from a peer that owes some
    settle_s: float = 0.5  # for a member that gives up to say why, and to be heard
    linger_s: float = 60.0  # for a peer to take the last bytes out of the transport
    window: int = 4  # chunks per peer that have come in and wait for those of others
    # Streams, each stripe by itself: of which no header has been read, and of rounds not started
    # here. A whole group may wait for one member; the members of few have stripes.
    max_unread: int = 1024
    max_unread_of_one: int = 4 * MAX_STRIPES
    max_parked: int = MAX_MEMBERS
    max_parked_per_peer: int = 4  # rounds


class Round:
    """Runs once. `failure` says how it failed; `ended` is set when nothing of it is left."""

    def __init__(
        self,
        round_id: str,
        me: str,
        plan: Plan,
        data: memoryview,
        result: memoryview,
        limits: Limits,
        lingering: TaskSet,
    ) -> None:
        self.round_id, self.me, self.plan, self.limits = round_id, me, plan, limits
        self._lingering = lingering  # outlives this round
        self.index = plan.members.index(me)
        self._data, self._result = data, result
        self._dtype = np.dtype(plan.accumulate)
        self._coded = plan.codec != EXACT
        self._sums: list[Buffer] = []  # of my part, encoded, chunk by chunk
        self._given: dict[Chunk, tuple[Buffer, int]] = {}  # encoded, and by how many still needed
        self._num_chunks = plan.num_chunks(self.index)
        self._links = {m: Link(i, m) for i, m in enumerate(plan.members) if m != me}
        self._num_reduced = Count()
        self._tasks, self._replies = TaskSet(), TaskSet()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: RoundFailedError | None = None
        self.ended = asyncio.Event()

    async def run(self, dial: Dial) -> None:
        """Exchange with all members. Raises as `GroupAllReduce.all_reduce` says."""
        for link in self._links.values():
            link.active_at = asyncio.get_running_loop().time()
            link.received = not self._num_chunks
            link.replied = not any(self.plan.replies(self.index))
            if self.plan.num_chunks(link.index):
                self._spawn(link, partial(self._contribute, link, dial))
            else:
                link.contributed = link.collected = True
        self._tasks.spawn(self._reduce(), "averaging sum")
        self._tasks.spawn(self._watch(), "averaging watch")
        self._check_done()
        try:
            await self._done
            await self._hang_up()
        except RoundFailedError:
            await self._give_up()
            raise
        finally:
            self._abort_dialled()
            self._tasks.abort()
            if self._done.cancelled() or self.failure is not None:
                self.failure = self.failure or RoundFailedError("was given up", peer="")
                for link in self._links.values():
                    if link.incoming is not None:
                        link.incoming.abort()
            if self._done.done() and not self._done.cancelled():
                self._done.exception()  # seen, even if a cancellation came first
            self._num_reduced.stop()
            await self._tasks.aclose()
            await self._replies.aclose()
            self._data = self._result = memoryview(b"")
            self._sums.clear()
            self._given.clear()
            self.ended.set()

    def rates(self) -> Rates:
        """How fast each member's contributions came in here."""
        links = [self._links.get(member) for member in self.plan.members]
        return tuple(0 if link is None else link.meter.rate() for link in links)

    def fail(self, error: RoundFailedError) -> None:
        """End the round here; the first reason is the one that counts."""
        if not self._done.done():
            self.failure = error
            self._done.set_exception(error)
            self._num_reduced.stop()

    async def serve(self, stream: Stream, header: dict[str, Any]) -> None:
        """Take a member's contributions to my part and answer with the sums."""
        link = self._links.get(header["from"])
        part = self.plan.part(self.index).num_elements
        expected = {"plan": self.plan.digest(), "part": part, "accumulate": self.plan.accumulate}
        unlike = [name for name, value in expected.items() if header[name] != value]
        if link is None or link.incoming is not None or not part:
            await refuse(stream, "no such stream is expected", "", self.limits)
            return
        if self.failure is not None:
            await refuse(stream, self.failure.message, self.failure.peer, self.limits)
            return
        if unlike:
            what = f"{link.member} has another {' and '.join(unlike)} for this round"
            self.fail(RoundFailedError(what, peer=link.member))
            await refuse(stream, what, link.member, self.limits)
            return
        link.incoming = stream
        receive = self._spawn(link, partial(self._receive, link, stream))
        work = partial(self._reply, link, stream)
        reply = link.reply = self._spawn(link, work, self._replies)
        try:
            await asyncio.wait((receive, reply))
            failed = self.failure is not None
            if self.plan.direct and not failed:
                await stream.send([_TAKEN])
            await until_ended(stream, self.limits.settle_s if failed else self.limits.linger_s)
        finally:
            link.gone.set()

    # The parts of a round, one task each per member

    async def _contribute(self, link: Link, dial: Dial) -> None:
        header = {
            "round": self.round_id,
            "from": self.me,
            "to": link.member,
            "plan": self.plan.digest(),
            "part": self.plan.part(link.index).num_elements,
            "accumulate": self.plan.accumulate,
        }
        stream = await dial(link.index, encode_frame(header))
        link.dialled = stream
        self._spawn(link, partial(self._collect, link, stream))
        for chunk in self.plan.chunks(link.index):
            await stream.send([self._given_for(chunk)])
        link.contributed = True
        self._check_done()

    async def _collect(self, link: Link, stream: Stream) -> None:
        for chunk in self.plan.replies(link.index):
            status = await stream.receive_exactly(1)
            if status == _NOTICE:
                raise await self._read_notice(link, stream)
            if status != _SUM:
                raise WireError(f"status byte {status!r}")
            out = _bytes_of(self._result, chunk, 4)
            if self._coded:
                data = bytearray(self.plan.sum_bytes(chunk.num_elements))
                await stream.receive_into(memoryview(data))
                values = decode_chunk(data, chunk.num_elements, self.plan.codec)
                np.frombuffer(out, np.float32)[:] = values
            else:
                await stream.receive_into(out)
        link.collected = True
        self._check_done()
        try:  # it may still give up, because of another member
            status = await stream.receive_exactly(1)
            if status == _TAKEN and self.plan.direct:
                link.taken = True
                status = await stream.receive_exactly(1)
        except StreamClosedError:
            if link.complete:
                return
            raise
        if status == _NOTICE:
            raise await self._read_notice(link, stream)
        raise WireError("more bytes than there are sums")

    async def _receive(self, link: Link, stream: Stream) -> None:
        part = self.plan.part(self.index).num_elements
        largest = self.plan.contribution_bytes(min(part, self.plan.chunk_elements))
        link.buffers = np.empty((min(self.limits.window, self._num_chunks), largest), np.uint8)
        window, clock = len(link.buffers), asyncio.get_running_loop().time
        for number, chunk in enumerate(self.plan.chunks(self.index)):
            await self._num_reduced.reach(number + 1 - window)
            size = self.plan.contribution_bytes(chunk.num_elements)
            began = clock()
            await stream.receive_into(link.buffers[number % window, :size].data)
            if number:  # the first also waits for the member to begin
                link.meter.add(size, clock() - began)
            link.num_in.advance()
        link.received = True
        self._check_done()

    async def _reply(self, link: Link, stream: Stream) -> None:
        for number, chunk in enumerate(self.plan.replies(self.index)):
            await self._num_reduced.reach(number + 1)
            if self.failure is not None:
                break
            sums = self._sums[number] if self._coded else _bytes_of(self._result, chunk, 4)
            await stream.send([_SUM, sums])
        else:
            link.replied = True
            self._check_done()
            await self._num_reduced.reach(self._num_chunks + 1)  # until the round ends
        if self.failure is not None:
            await stream.send(_notice(self.failure.message, self.failure.peer))

    async def _reduce(self) -> None:
        if self._num_chunks:
            await self._guard(self.me, self._reduce_chunks)

    async def _reduce_chunks(self) -> None:
        window = min(self.limits.window, self._num_chunks)
        out = np.frombuffer(self._result, np.float32)
        work = np.empty(min(self.plan.chunk_elements, len(out)), self._dtype)
        for number, chunk in enumerate(self.plan.chunks(self.index)):
            for link in self._links.values():
                await link.num_in.reach(number + 1)
            terms = [
                self._contribution(self._links[member], number % window, chunk)
                if member != self.me
                else self._own(chunk)
                for member in self.plan.members
            ]
            part = out[chunk.start : chunk.stop]
            sum_rounded(terms, work[: chunk.num_elements], part)
            if self._coded and not self.plan.direct:  # I take what the others decode
                data = encode_chunk(part, self.plan.codec)
                self._sums.append(data)
                part[:] = decode_chunk(data, chunk.num_elements, self.plan.codec)
            self._num_reduced.advance()
            await asyncio.sleep(0)  # a turn for everything else in this process
        self._check_done()

    def _contribution(self, link: Link, slot: int, chunk: Chunk) -> np.ndarray:
        """What a member gave for a chunk, in the accumulator's dtype."""
        data = link.buffers[slot, : self.plan.contribution_bytes(chunk.num_elements)]
        if not self._coded:
            return data.view(self._dtype)
        return self._decoded(data.data, chunk)

    def _own(self, chunk: Chunk) -> np.ndarray:
        """What I give for a chunk; as the others see it, where they add it too."""
        if self._coded and self.plan.direct:
            return self._decoded(self._given_for(chunk), chunk)
        mine = _bytes_of(self._data, chunk, self._dtype.itemsize)
        return np.frombuffer(mine, self._dtype)

    def _given_for(self, chunk: Chunk) -> Buffer:
        """The bytes of my contribution to a chunk. Encoded once, and kept for as long as others of
        this round need the same: in a direct one all members do, and I."""
        if not self._coded:
            return _bytes_of(self._data, chunk, self._dtype.itemsize)
        if chunk in self._given:
            data, needed = self._given.pop(chunk)
        else:
            mine = _bytes_of(self._data, chunk, self._dtype.itemsize)
            data = encode_chunk(np.frombuffer(mine, self._dtype), self.plan.codec)
            needed = len(self.plan.members) if self.plan.direct else 1
        if needed > 1:
            self._given[chunk] = data, needed - 1
        return data

    def _decoded(self, data: Buffer, chunk: Chunk) -> np.ndarray:
        decoded = decode_chunk(data, chunk.num_elements, self.plan.codec)
        return decoded.astype(self._dtype)

    # How a round ends

    def _check_done(self) -> None:
        reduced = self._num_reduced.value == self._num_chunks
        if reduced and not self._done.done() and all(x.complete for x in self._links.values()):
            self._done.set_result(None)

    def _spawn(
        self,
        link: Link,
        work: Callable[[], Coroutine[Any, Any, None]],
        tasks: TaskSet | None = None,
    ) -> asyncio.Task[None]:
        owner = self._tasks if tasks is None else tasks
        return owner.spawn(self._guard(link.member, work), f"averaging {link.member}")

    async def _guard(self, member: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Whatever `work` with that member fails with fails the round, and names a suspect. It is
        not begun before, or one that is cancelled first would complain that nobody awaited it."""
        try:
            await work()
        except RoundFailedError as error:
            self.fail(error)
        except WireError as error:
            what = f"{member} broke the averaging protocol: {error}"
            self.fail(RoundFailedError(what, peer=member))
        except TransportError as error:
            if self.failure is None and len(self._links) > 1:
                await asyncio.sleep(self.limits.settle_s)  # it may have given up, and say why
            self.fail(RoundFailedError(f"lost {member}: {error}", peer=member))
        except Exception as error:  # no memory, no file descriptor, a defect: mine, and said so
            log.debug("averaging with %s", member, exc_info=error)
            what = f"cannot average: {type(error).__name__}: {error}"
            self.fail(RoundFailedError(what, peer=self.me))

    async def _read_notice(self, link: Link, stream: Stream) -> RoundFailedError:
        frame = await read_frame(
            stream, no_tensors, max_header_bytes=MAX_NOTICE_BYTES, max_payload_bytes=0
        )
        why, suspect = frame.header.get("failed"), frame.header.get("suspect")
        if not isinstance(why, str) or not isinstance(suspect, str):
            raise WireError("malformed notice")
        if suspect not in self._links:  # nobody, itself, or me
            suspect = link.member
        what = f"{link.member} gave up: {_printable(why)}"
        return RoundFailedError(what, peer=suspect, reporter=link.member)

    async def _give_up(self) -> None:
        """Tell everybody who waits for sums why there will be none, and wait to be heard."""
        await self._tasks.aclose()
        replies = [link.reply for link in self._links.values() if link.reply is not None]
        served = [link for link in self._links.values() if link.incoming is not None]
        try:
            async with asyncio.timeout(self.limits.settle_s):
                await asyncio.gather(*replies, return_exceptions=True)
        except TimeoutError:
            pass
        self._abort_dialled()
        try:
            async with asyncio.timeout(self.limits.settle_s):
                for link in served:
                    await link.gone.wait()
        except TimeoutError:
            pass

    async def _hang_up(self) -> None:
        """All is well here, and peers may still need what I gave. Sums that came back say that
        they have it; in a direct round its own word does, which nobody waits for here."""
        await self._tasks.aclose()  # a stream has one receiver at a time
        for link in self._links.values():
            if link.dialled is None:
                continue
            if self.plan.direct and not link.taken:
                self._lingering.spawn(_close_once_taken(link.dialled, self.limits.linger_s))
            else:
                await link.dialled.close()
            link.dialled = None

    def _abort_dialled(self) -> None:
        for link in self._links.values():
            if link.dialled is not None:
                link.dialled.abort()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        all_in_at = loop.time()
        while True:
            await asyncio.sleep(self.limits.silence_s / 4)
            now = loop.time()
            for link in self._links.values():
                signs = link.signs_of_life()
                if signs != link.seen:
                    link.seen, link.active_at = signs, now
            if any(link.num_in.value < self._num_chunks for link in self._links.values()):
                all_in_at = now
                overdue = self._overdue_contributor(now)
            else:
                overdue = self._overdue_owner(now, all_in_at)
            if overdue is not None:
                silent = now - overdue.active_at
                what = f"{overdue.member} has been silent for {silent:.0f} s"
                self.fail(RoundFailedError(what, peer=overdue.member))
                return

    def _overdue_contributor(self, now: float) -> Link | None:
        """A member whose contributions are all I wait for: they depend on nobody else."""
        furthest = min(self._num_chunks, self._num_reduced.value + self.limits.window)
        for link in self._links.values():
            limit = self.limits.silence_s if link.num_in.value else self.limits.start_s
            if link.num_in.value < furthest and now - link.active_at > limit:
                return link
        return None

    def _overdue_owner(self, now: float, all_in_at: float) -> Link | None:
        """A member that owes me sums, or takes none, though others had time to report a cause."""
        limit = self.limits.silence_s + self.limits.start_s
        for link in self._links.values():
            if not link.complete and now - max(link.active_at, all_in_at) > limit:
                return link
        return None


async def refuse(stream: Stream, why: str, suspect: str, limits: Limits) -> None:
    """Answer a stream with a notice instead of sums, and let it be heard."""
    async with asyncio.timeout(limits.settle_s):
        await stream.send(_notice(why, suspect))
        await until_ended(stream, limits.settle_s)


def _notice(why: str, suspect: str) -> list[Buffer]:
    return [_NOTICE, *encode_frame({"failed": _printable(why), "suspect": suspect})]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_REASON])


async def _close_once_taken(stream: Stream, limit_s: float) -> None:
    """End a stream when the peer says that it has what was sent on it."""
    try:
        async with asyncio.timeout(limit_s):
            await stream.receive_exactly(1)
        await stream.close()
    except (StreamClosedError, TimeoutError):
        pass
    finally:
        stream.abort()


def _bytes_of(view: memoryview, chunk: Chunk, itemsize: int) -> memoryview:
    return view[chunk.start * itemsize : chunk.stop * itemsize]
