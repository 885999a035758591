"""A snapshot on its way here, from as many donors as describe the same bytes.

Every chunk is checked against the sha256 in the description before it counts. A chunk that is wrong
costs its donor the trust of the reader, and is fetched elsewhere; the chunks that a donor owed when
it was lost, or gave nothing for minutes, are fetched from the others. What was verified stays: a
`Download` whose donors are all gone goes on with others that describe the same bytes. Fast donors
give more, since each takes the next chunk when it has delivered one, and the last ones are fetched
twice rather than waited for.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from peer.snapshots import Description, Snapshot
from swarm.errors import RefusedError, SwarmError
from swarm.net.channel import Channel
from swarm.spec import TensorSpec
from swarm.terms import Record
from swarm.wire.codecs import TensorMeta, bytes_view, decode
from swarm.wire.frames import check_tensors

log = logging.getLogger(__name__)
WINDOW = 3  # chunks under way from one donor: 12 MiB
# Without a chunk from a donor that owes some. At 5 Mbit/s one takes 7 s; other readers, and the
# gradients that are collected meanwhile, may make it forty times as long.
CHUNK_S = 300.0
SLICE = 1 << 18  # bytes hashed on the loop at a time: less than half a millisecond

Digest = Callable[[Tensor], Awaitable[bytes]]
Blame = Callable[[str], None]


async def digest_in_slices(part: Tensor) -> bytes:
    """sha256 for a process that has no compute thread; the loop goes on between slices."""
    view, sha = bytes_view(part.view(torch.uint8)), hashlib.sha256()
    for start in range(0, len(view), SLICE):
        sha.update(view[start : start + SLICE])
        await asyncio.sleep(0)
    return sha.digest()


class Download:
    """One snapshot, complete after `run`. Memory is allocated once, here."""

    def __init__(self, described: Description) -> None:
        self.described = described
        self._parts = list(described.chunks())
        self._verified = [False] * len(self._parts)
        self._left = len(self._parts)
        self._missing = list(range(len(self._parts)))[::-1]
        self._under_way: dict[int, list[str]] = {}  # chunk -> the donors asked
        self._changed = asyncio.Event()
        self._out: dict[str, None] = {}  # donors not asked any more in this run
        self.late: set[str] = set()  # those of them that gave nothing for too long
        self._limits: dict[str, set[asyncio.Timeout]] = {}  # donor -> of what is under way from it
        self.fetched: dict[str, int] = {}  # chunks by donor
        self._tensors = {
            name: torch.empty(size, dtype=torch.float32) for name, size in described.sizes
        }

    @property
    def share(self) -> float:
        return 1.0 - self._left / max(len(self._parts), 1)

    @property
    def verified(self) -> int:
        """Chunks that are here."""
        return len(self._parts) - self._left

    def snapshot(self) -> Snapshot:
        """What was downloaded."""
        if self._left:
            raise ValueError(f"{self._left} chunks are missing")
        described = self.described
        record = Record.unpack(described.record) if described.record else None
        return Snapshot(
            described.step, described.updates, described.fingerprint, record, self._tensors
        )

    async def run(
        self,
        donors: Mapping[str, Channel],
        *,
        digest: Digest = digest_in_slices,
        blame: Blame = lambda donor: None,
        progress: Callable[[float], None] = lambda share: None,
        since: Callable[[], int] | None = None,
    ) -> None:
        """Fetch what is missing. `blame(donor)` is told of a wrong chunk.

        `since()` says from which step on the reader still needs gradients. After return all chunks
        are here. Raises RefusedError when no donor is left; when it raises or is cancelled, what
        was verified stays, and it may be called again.
        """
        self._out.clear()
        self.late.clear()
        self._under_way.clear()
        self._missing = [i for i, here in enumerate(self._verified) if not here][::-1]

        async def work(name: str, channel: Channel) -> None:
            while self._left and name not in self._out:
                self._changed.clear()
                index = self._next(name)
                if index is None:
                    await self._changed.wait()
                    continue
                try:
                    part = await self._in_time(name, self._fetch(channel, index, since))
                    right = self._verified[index] or await digest(part) == self._digest(index)
                except SwarmError as error:
                    log.debug("no chunk from %s: %s", name[-8:], error)
                    self._out[name] = None
                    return
                finally:
                    self._give_back(index, name)
                if right:
                    self._keep(index, part, name, progress)
                elif name not in self._out:
                    self._out[name] = None
                    blame(name)

        loop = asyncio.get_running_loop()
        workers = [
            loop.create_task(work(name, channel))
            for name, channel in donors.items()
            for _ in range(WINDOW)
        ]
        waiting = set(workers)
        try:
            while self._left and waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for worker in done:
                    worker.result()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if self._left:
            raise RefusedError(f"no donor is left, {self.share:.0%} of the state is here")

    async def _in_time(self, name: str, fetch: Awaitable[Tensor]) -> Tensor:
        """A chunk from this donor. Raises RefusedError when none comes from it for too long."""
        limits, limit = self._limits.setdefault(name, set()), asyncio.timeout(CHUNK_S)
        try:
            async with limit:
                limits.add(limit)
                part = await fetch
        except TimeoutError:
            self.late.add(name)
            _allow(limits, 0.0)  # what else it owes is to be fetched elsewhere, too
            raise RefusedError(f"no chunk within {CHUNK_S:.0f} s") from None
        finally:
            limits.discard(limit)
        _allow(limits, CHUNK_S)  # the others wait behind it, on one line
        return part

    def _next(self, name: str) -> int | None:
        if self._missing:
            index = self._missing.pop()
        else:  # the last ones: better twice than to wait for the slowest
            others = (
                i
                for i, who in self._under_way.items()
                if not self._verified[i] and len(who) < 2 and name not in who
            )
            index = next(others, -1)
            if index < 0:
                return None
        self._under_way.setdefault(index, []).append(name)
        return index

    def _give_back(self, index: int, name: str) -> None:
        who = self._under_way.get(index, [])
        if name in who:
            who.remove(name)
        if not who and self._under_way.pop(index, None) is not None and not self._verified[index]:
            self._missing.append(index)
        self._changed.set()

    def _keep(self, index: int, part: Tensor, name: str, progress: Callable[[float], None]) -> None:
        if self._verified[index]:
            return
        tensor, start, length = self._parts[index]
        self._tensors[tensor][start : start + length] = part
        self._verified[index] = True
        self._left -= 1
        if index in self._missing:
            self._missing.remove(index)
        self.fetched[name] = self.fetched.get(name, 0) + 1
        self._changed.set()
        progress(self.share)

    def _digest(self, index: int) -> bytes:
        return self.described.digests[32 * index : 32 * index + 32]

    async def _fetch(self, channel: Channel, index: int, since: Callable[[], int] | None) -> Tensor:
        name, start, length = self._parts[index]

        def check(_: Mapping[str, Any], metas: Sequence[TensorMeta]) -> None:
            check_tensors(metas, [TensorSpec((length,), "float32")], "raw")

        body = {"step": self.described.step, "name": name, "start": start}
        if since is not None:
            body["since"] = since()
        answer = await channel.call("chunk", body, check_reply=check)
        return decode(answer.tensors[0])


def _allow(limits: set[asyncio.Timeout], seconds: float) -> None:
    """Let those last for so long from now on."""
    until = asyncio.get_running_loop().time() + seconds
    for limit in limits:
        if not limit.expired():
            limit.reschedule(until)


async def download(
    channel: Channel, step: int, expected: Mapping[str, int] | None = None, progress: Any = None
) -> Snapshot:
    """A snapshot of one donor's state of this step, for whoever need not catch up. One that has
    not applied the commit before it yet is waited for, instead of having its former state sent.

    `expected` (name -> elements) is what the receiver's own state has; anything else is refused
    before allocation. Raises WireError, StreamClosedError, CallFailedError (the donor has moved on
    or gives too many copies: ask again), RefusedError (a chunk was wrong, or the donor was lost).
    """
    described = Description.read((await channel.call("snapshot", {"step": step})).body, expected)
    fetching = Download(described)
    await fetching.run({channel.incarnation: channel}, progress=progress or (lambda share: None))
    await channel.call("snapshot", {"release": True})
    return fetching.snapshot()
