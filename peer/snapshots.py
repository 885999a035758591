"""A stage's state on its way to a joiner, a checkpoint or an export: the donor's side.

A donor copies its state between two commits (on the compute thread, so it is of one step) and
hands the copy out in chunks while training goes on. The description of a copy names the sha256 of
every chunk, so a reader may take chunks from any donor that describes the same bytes. Readers
share copies; there are few at once, and one that somebody reads is never thrown away for another.

Whoever reads a copy has to catch up with what is committed meanwhile: as long as it comes back, the
averaged gradients since its step are kept too, within `BACKLOG_BYTES`. The reader's side is in
`peer.donors` (whom to ask), `peer.downloads` (a copy) and `peer.joining` (catching up).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from peer.calls import count
from peer.commits import Commits, Prepared
from peer.gradients import GRADIENT_CHUNK
from peer.stage_server import StageServer
from swarm.compute import Kind
from swarm.errors import RefusedError, StageFailedError, WireError
from swarm.model.layout import sha256_of
from swarm.net.channel import CallFailedError, Channel, Message, Method
from swarm.terms import Record
from swarm.wire.codecs import encode
from swarm.wire.frames import no_tensors

CHUNK = 1 << 20  # elements; one frame of 4 MiB
MAX_CHUNKS = 1 << 14  # their digests fit in a header
IDLE_S = 60.0  # a reader that has asked nothing for so long is gone
WAIT_S = 10.0  # for a step or a gradient that is still to come
PATIENCE_S = 2.0  # for idle moments of the device to hash in; after that hashing takes turns
MAX_COPIES = 3
COPIES_BYTES = 16 << 30
BACKLOG_BYTES = 1 << 30


@dataclass(slots=True)
class Snapshot:
    """A copy of a stage's state with `step` as the next step to train."""

    step: int
    updates: int
    fingerprint: str
    record: Record | None
    tensors: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Description:
    """What a donor says of a copy: everything but the bytes. Equal descriptions, equal bytes."""

    step: int
    updates: int
    fingerprint: str
    record: bytes  # of the last record applied; empty before the first
    sizes: tuple[tuple[str, int], ...]
    chunk: int  # elements
    digests: bytes  # sha256 of each chunk, in the order of `chunks`

    def chunks(self) -> Iterator[tuple[str, int, int]]:
        """`(name, start, length)` of every chunk."""
        return chunks(dict(self.sizes), self.chunk)

    def body(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "updates": self.updates,
            "fingerprint": self.fingerprint,
            "record": self.record,
            "tensors": [list(each) for each in self.sizes],
            "chunk": self.chunk,
            "digests": self.digests,
        }

    @classmethod
    def read(cls, body: Mapping[str, Any], expected: Mapping[str, int] | None) -> Description:
        """From the wire. `expected` (name -> elements) is what the reader's own state has.

        Raises WireError.
        """
        sizes = _sizes(body)
        if expected is not None and sizes != dict(expected):
            raise WireError("the donor's state has other tensors than this stage")
        record, digests, chunk = body.get("record"), body.get("digests"), count(body.get("chunk"))
        if not isinstance(record, bytes) or not isinstance(digests, bytes):
            raise WireError("a snapshot without record or digests")
        if not 1 <= chunk <= CHUNK or -(-sum(sizes.values()) // chunk) > MAX_CHUNKS:
            raise WireError("a snapshot in chunks that make no sense")
        if record:
            Record.unpack(record)
        described = cls(
            count(body.get("step")),
            count(body.get("updates")),
            str(body.get("fingerprint"))[:64],
            record,
            tuple(sizes.items()),
            chunk,
            digests,
        )
        if len(digests) != 32 * sum(1 for _ in described.chunks()):
            raise WireError("a snapshot with too few or too many digests")
        return described


def chunks(sizes: Mapping[str, int], chunk: int) -> Iterator[tuple[str, int, int]]:
    for name, size in sizes.items():
        for start in range(0, size, chunk):
            yield name, start, min(chunk, size - start)


def _sizes(answer: Mapping[str, Any]) -> dict[str, int]:
    listed = answer.get("tensors")
    if not isinstance(listed, list) or len(listed) > 64:
        raise WireError("a snapshot without tensors")
    sizes = {}
    for item in listed:
        match item:
            case [str(name), int(size)] if 0 <= size < 1 << 34 and len(name) < 200:
                sizes[name] = size
            case _:
                raise WireError("a snapshot that makes no sense")
    return sizes


@dataclass(slots=True)
class _Copy:
    snapshot: Snapshot
    chunk: int
    hashing: asyncio.Task[bytes]


@dataclass(slots=True)
class _Reader:
    """Somebody who reads a copy, and then needs the gradients from `since` on."""

    channel: Channel
    step: int
    since: int
    until: float


class Donor:
    """Hands out snapshots of one `StageServer`, and what was committed since."""

    def __init__(
        self,
        server: StageServer,
        commits: Commits,
        *,
        max_copies: int = MAX_COPIES,
        copies_bytes: int = COPIES_BYTES,
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        self.server, self.commits = server, commits
        self.max_copies, self.copies_bytes = max_copies, copies_bytes
        self.backlog_bytes = backlog_bytes
        self.copies: dict[int, _Copy] = {}
        self.backlog: dict[int, tuple[Record, Tensor]] = {}
        self._readers: dict[str, _Reader] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._lock = asyncio.Lock()
        # Of the newest state, and since when it is that one (`Parts.advanced`).
        self._hashing: tuple[asyncio.Event, asyncio.Task[dict[str, str]]] | None = None

    def methods(self) -> dict[str, Method]:
        return {
            "snapshot": Method(self._snapshot, no_tensors),
            "chunk": Method(self._chunk, no_tensors),
            "gradient": Method(self._gradient, no_tensors),
            "hashes": Method(self._hashes, no_tensors),
        }

    # ---- copies ---------------------------------------------------------------------------------

    async def _snapshot(self, channel: Channel, message: Message) -> Message:
        """`{}`: the current state. `{step}`: that of a step, now, held, or soon. `{offer}`: which
        there are; `{anew}` with it: the asker has nothing of a former one any more. `{release}`:
        it needs nothing any more."""
        body = message.body
        if body.get("release") is True or body.get("anew") is True:
            self._readers.pop(channel.incarnation, None)
            self._forget_unused()
        if body.get("release") is True:
            return Message({})
        if not self.commits.valid:
            raise RefusedError("there is no valid state here")
        if body.get("offer") is True:
            usable = {step for step in self.copies if self._catchable(step)}
            reader = self._readers.get(channel.incarnation)  # it may have some gradients already
            if reader is not None and reader.step in self.copies and self._catchable(reader.since):
                usable.add(reader.step)
            return Message({"step": self.server.parts.ledger.step, "copies": sorted(usable)})
        copy = await self._copy_of(channel, body.get("step"))
        digests = await asyncio.shield(copy.hashing)
        snapshot = copy.snapshot
        described = Description(
            snapshot.step,
            snapshot.updates,
            snapshot.fingerprint,
            snapshot.record.pack() if snapshot.record else b"",
            tuple((name, tensor.numel()) for name, tensor in snapshot.tensors.items()),
            copy.chunk,
            digests,
        )
        return Message(described.body())

    async def _copy_of(self, channel: Channel, wanted: object) -> _Copy:
        """The copy of step `wanted` (None: of now), taken if need be; `channel` is its reader.

        Raises RefusedError when that step is over, or does not come, or there are too many copies.
        """
        step = None if wanted is None else count(wanted)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while step is not None and step not in self.copies:
                    if self.server.parts.ledger.step >= step:
                        break
                    await self.server.parts.advanced.wait()
        async with self._lock:
            now = self.server.parts.ledger.step
            if step is not None and step not in self.copies and step != now:
                raise RefusedError(f"this replica is at step {now}, and has no copy of {step}")
            if step is None:
                step = now
            if step not in self.copies:
                self._make_room(channel)
                snapshot = await self.take()
                if message := self._missed(snapshot, step if wanted is not None else None):
                    raise RefusedError(message)
                step = snapshot.step
                if step not in self.copies:
                    hashing = self.server.tasks.spawn(self._digests(snapshot), "hash a copy")
                    self.copies[step] = _Copy(snapshot, CHUNK, hashing)
            until = asyncio.get_running_loop().time() + IDLE_S
            before = self._readers.get(channel.incarnation)
            since = before.since if before is not None and before.step == step else step
            self._readers[channel.incarnation] = _Reader(channel, step, since, until)
            self._forget_unused()
            self._schedule_sweep()
            return self.copies[step]

    def _catchable(self, step: int) -> bool:
        """Whether the gradients of all commits since `step` are here."""
        steps = range(step, self.server.parts.ledger.step)
        return all(self._find_gradient(each, committed=True) is not None for each in steps)

    @staticmethod
    def _missed(snapshot: Snapshot, step: int | None) -> str:
        return "" if step in (None, snapshot.step) else f"step {step} was over too soon"

    def _make_room(self, channel: Channel) -> None:
        """For one more copy. What somebody else reads stays."""
        self._readers.pop(channel.incarnation, None)
        self._readers = {k: r for k, r in self._readers.items() if r.channel.ended is None}
        self._forget_unused()
        state_bytes = sum(tensor.nbytes for tensor in self.server.state.tensors().values())
        held = sum(copy.snapshot.num_bytes for copy in self.copies.values())
        full = len(self.copies) >= self.max_copies or held + state_bytes > self.copies_bytes
        if self.copies and full:
            raise RefusedError("all copies here are being read")

    async def take(self) -> Snapshot:
        """Copy the state between two commits."""
        state = self.server.state

        def copy() -> Snapshot:
            return Snapshot(
                self.server.parts.ledger.step,
                state.updates,
                state.fingerprint(),
                self.commits.record,
                {name: tensor.to("cpu", copy=True) for name, tensor in state.tensors().items()},
            )

        # Under the commit's lock, or the ledger's step and the state could be of two steps.
        async with self.commits.lock:
            return (await self.server.compute.run(Kind.UPDATE, copy)).value

    async def _digests(self, snapshot: Snapshot) -> bytes:
        """Chunk by chunk, in the device's idle moments; when there are none, between forwards."""
        loop = asyncio.get_running_loop()
        sizes = {name: tensor.numel() for name, tensor in snapshot.tensors.items()}
        deadline, digests = loop.time() + PATIENCE_S, []
        for name, start, length in chunks(sizes, CHUNK):
            part = snapshot.tensors[name][start : start + length]
            try:
                async with asyncio.timeout_at(deadline):
                    timed = await self.server.compute.run(Kind.BACKGROUND, partial(digest, part))
            except TimeoutError:
                timed = await self.server.compute.run(
                    Kind.FORWARD, partial(digest, part), snapshot.step
                )
            digests.append(timed.value)
        return b"".join(digests)

    async def _chunk(self, channel: Channel, message: Message) -> Message:
        body = message.body
        copy = self.copies.get(count(body.get("step")))
        reader = self._touch(channel, body.get("since"))
        if copy is None or reader is None or reader.step != copy.snapshot.step:
            raise RefusedError("that snapshot is no longer here")
        tensor = copy.snapshot.tensors.get(str(body.get("name")))
        if tensor is None:
            raise RefusedError("no such tensor")
        start = count(body.get("start"))
        return Message({}, [encode(tensor[start : start + copy.chunk], "raw")])

    async def _hashes(self, channel: Channel, message: Message) -> Message:
        """sha256 of every parameter of the stage, and what it sent on."""
        step = self.server.parts.ledger.step
        hashes = await asyncio.shield(self._hashing_now())
        return Message({"step": step, "hashes": hashes, **self.server.counted_bytes()})

    def _hashing_now(self) -> asyncio.Task[dict[str, str]]:
        """Once for each state, however many ask: anybody may, and all parameters are read."""
        since = self.server.parts.advanced  # another object when the state is another
        if self._hashing is None or self._hashing[0] is not since:
            if self._hashing is not None:
                self._hashing[1].cancel()
            task = self.server.tasks.spawn(self._hash(since), "hash the state")
            self._hashing = since, task
        return self._hashing[1]

    async def _hash(self, since: asyncio.Event) -> dict[str, str]:
        compute, state = self.server.compute, self.server.state
        try:
            hashes = (await compute.run(Kind.BACKGROUND, state.tensor_hashes)).value
        except StageFailedError:
            self._hashing = None  # who asks next has it tried again
            raise
        if self.server.parts.advanced is not since:
            raise RefusedError("the state became another meanwhile")
        return hashes

    # ---- gradients ------------------------------------------------------------------------------

    def keep_gradient(self, record: Record, prepared: Prepared) -> None:
        """Keep a committed gradient while somebody reads a copy of that step or one before."""
        if any(reader.since <= record.step for reader in self._readers.values()):
            self.backlog[record.step] = (record, prepared.update.gradient)
        self._trim_backlog()

    def _trim_backlog(self) -> None:
        since = min((reader.since for reader in self._readers.values()), default=None)
        held = sum(gradient.nbytes for _, gradient in self.backlog.values())
        for step in sorted(self.backlog):
            if since is not None and step >= since and held <= self.backlog_bytes:
                return
            held -= self.backlog.pop(step)[1].nbytes

    async def _gradient(self, channel: Channel, message: Message) -> Message:
        """A chunk of the averaged gradient of `step`, with its record once it is committed.

        With `committed` the answer waits for the commit, some seconds. A refusal says what step
        this replica is `at`: when that is beyond `step`, the gradient is gone.
        """
        body = message.body
        step, start = count(body.get("step")), count(body.get("start"))
        self._touch(channel, body.get("since"))
        committed = body.get("committed") is True
        if committed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    while self.server.parts.ledger.step <= step and self.commits.valid:
                        await self.server.parts.advanced.wait()
        found = self._find_gradient(step, committed=committed)
        if found is None:
            at = self.server.parts.ledger.step if self.commits.valid else -1
            raise CallFailedError("refused", f"the gradient of step {step} is not here", at=at)
        record, gradient = found
        part = gradient[start : start + GRADIENT_CHUNK]
        return Message({"record": record if start == 0 else b""}, [encode(part, "float32")])

    def _find_gradient(self, step: int, *, committed: bool) -> tuple[bytes, Tensor] | None:
        if step in self.backlog:
            record, gradient = self.backlog[step]
            return record.pack(), gradient
        mine, last = self.commits.committed, self.commits.record
        if mine is not None and last is not None and last.step == step:
            return last.pack(), mine.update.gradient
        waiting = self.commits.prepared
        if waiting is not None and waiting.ballot.step == step and not committed:
            return b"", waiting.update.gradient
        return None

    # ---- readers --------------------------------------------------------------------------------

    def _touch(self, channel: Channel, since: object) -> _Reader | None:
        reader = self._readers.get(channel.incarnation)
        if reader is not None:
            reader.channel = channel
            reader.until = asyncio.get_running_loop().time() + IDLE_S
            if since is not None:
                reader.since = max(reader.since, count(since))
                self._trim_backlog()
        return reader

    def _schedule_sweep(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S / 2, self._drop_idle)

    def _drop_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        self._readers = {name: r for name, r in self._readers.items() if r.until > now}
        self._forget_unused()
        self._sweep = None
        if self._readers:
            self._schedule_sweep()

    def _forget_unused(self) -> None:
        read = {reader.step for reader in self._readers.values()}
        self.copies = {step: copy for step, copy in self.copies.items() if step in read}
        self._trim_backlog()

    def forget(self) -> None:
        """The state was replaced: nothing of the former one must be handed out."""
        self._readers.clear()
        self._forget_unused()

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()


def digest(part: Tensor) -> bytes:
    """sha256 of a chunk's bytes. Blocking."""
    return bytes.fromhex(sha256_of(part))
