"""Collecting the averaged gradient of every commit, for a replica that has to catch up.

From donors that keep them for as long as somebody reads a copy of their state; several at once,
each checked against the sha256 in its record, and kept in order until they are applied. The
snapshot they are applied to is `peer.joining`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from peer.gradients import fetch_gradient
from peer.stage_server import StageServer
from swarm.compute import Kind
from swarm.errors import RefusedError, SwarmError
from swarm.model.layout import gradient_sha256
from swarm.net.channel import CallFailedError, Channel
from swarm.tasks import TaskSet
from swarm.terms import Record

log = logging.getLogger(__name__)
AHEAD_BYTES = 1 << 30  # of gradients fetched before they can be applied
LEAST_BYTES = 1 << 14  # of one with its record: a stage may have hardly a parameter, or none
FOLLOW_WINDOW = 4  # gradients under way at once, each from another donor if there are several
FOLLOW_PAUSE_S = 0.2

Fetched = tuple[Record, Tensor]


class FellOffError(RefusedError):
    """Nobody keeps the gradient that comes next: only another snapshot helps."""


class Following:
    """What was committed since the state of a `StageServer`, as far as it is here.

    `ahead` holds it by step. `trusted(donor)` says who may be asked, and `blame(donor, what)` is
    told of wrong bytes, `arrived()` of every gradient. `news` is set when one has come, or none
    will.
    """

    def __init__(
        self,
        server: StageServer,
        tasks: TaskSet,
        *,
        trusted: Callable[[str], bool],
        blame: Callable[[str, str], None],
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        self.server, self._tasks = server, tasks
        self._trusted, self._blame, self._arrived = trusted, blame, arrived
        self.ahead: dict[int, Fetched] = {}  # gradients that wait for the snapshot
        self.news = asyncio.Event()
        self._taken = asyncio.Event()  # a gradient was applied, there is room for another
        self._failed: set[str] = set()  # donors that gave none, or nonsense: they are asked last
        self._task: asyncio.Task[bool] | None = None
        self._first = 0  # the step that the task began with

    @property
    def running(self) -> bool:
        """Whether what is committed is being collected."""
        return self._task is not None and not self._task.done()

    def covers(self, step: int) -> bool:
        """Whether the gradient of `step` is here, or will be: it may be collected from later on."""
        return step in self.ahead or (self.running and self._first <= step)

    def take(self, step: int) -> Fetched:
        """The gradient of `step`, which is here, to be applied."""
        self._taken.set()
        return self.ahead.pop(step)

    def drop(self) -> None:
        """Collect no more, and forget what is here."""
        self.stop()
        self.ahead.clear()

    def begin(
        self, channels: Mapping[str, Channel], base: Record | None, step: int | None = None
    ) -> asyncio.Task[bool]:
        """Collect the gradients from `step` on (None: from this state on); `base` is the record
        before. What is collected already stays."""
        self.stop()
        step = self._first = self.server.parts.ledger.step if step is None else step
        while step in self.ahead:
            base, step = self.ahead[step][0], step + 1
        self._task = self._tasks.spawn(self._follow(channels, step, base), "follow")
        self._task.add_done_callback(lambda _: self.news.set())
        return self._task

    def stop(self) -> None:
        """Collect no more; what is here stays."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _follow(
        self, channels: Mapping[str, Channel], step: int, before: Record | None
    ) -> bool:
        """Several at once, kept in order. Ends when the next one is to be had nowhere: True when
        donors say so, False when there is no donor."""
        size = max(4 * self.server.state.layout.total, LEAST_BYTES)
        under_way = dict[int, asyncio.Task[Fetched]]()
        try:
            while True:
                room = max(1, AHEAD_BYTES // size - len(self.ahead))
                for each in range(step, step + min(FOLLOW_WINDOW, room)):
                    if each not in under_way:
                        work = self._wait_for(channels, each, step)
                        under_way[each] = self._tasks.spawn(work, "gradient")
                fetched = await under_way.pop(step)
                if before is not None and fetched[0].predecessor != before.hash:
                    log.warning("records of donors do not follow each other")
                    return True
                self.ahead[step], before, step = fetched, fetched[0], step + 1
                self.news.set()
                self._arrived()
                while len(self.ahead) * size >= AHEAD_BYTES:
                    self._taken.clear()
                    await self._taken.wait()
        except FellOffError as error:
            log.debug("cannot follow: %s", error)
            return True
        except RefusedError as error:
            log.debug("cannot follow: %s", error)
            return False
        finally:
            for task in under_way.values():
                task.cancel()

    async def _wait_for(self, channels: Mapping[str, Channel], step: int, since: int) -> Fetched:
        """The gradient of `step` when it is committed. Raises RefusedError."""
        names = list(channels)
        first = step % len(names) if names else 0
        rotated = {name: channels[name] for name in names[first:] + names[:first]}
        while any(channel.ended is None for channel in rotated.values()):
            try:
                if (fetched := await self._fetch(rotated, step, since)) is not None:
                    return fetched
            except FellOffError:
                raise
            except SwarmError as error:
                log.debug("no gradient of %d: %s", step, error)
            await asyncio.sleep(FOLLOW_PAUSE_S)
        raise RefusedError("all donors are lost")

    async def _fetch(
        self, channels: Mapping[str, Channel], step: int, since: int
    ) -> Fetched | None:
        """The gradient of `step` with its record, from whoever has it. None: not committed yet.

        Raises FellOffError when those who answer do not have it, RefusedError when nobody does.
        """
        total, early, gone = self.server.state.layout.total, False, False
        there = [name for name, channel in channels.items() if channel.ended is None]
        # As with chunks: better one that was wrong before than nobody, since its bytes are checked.
        there = [name for name in there if self._trusted(name)] or there
        for name in sorted(there, key=lambda each: each in self._failed):
            channel = channels[name]
            if early and name in self._failed:
                break
            try:
                asked = {"step": step, "since": since, "committed": True}
                gradient, told = await fetch_gradient(channel, total, asked)
                record = Record.unpack(told)
            except CallFailedError as error:
                at = error.detail.get("at")
                early = early or (isinstance(at, int) and 0 <= at <= step)
                gone = gone or (isinstance(at, int) and at > step)
                continue
            except SwarmError as error:
                log.debug("no gradient of %d from %s: %s", step, name[-8:], error)
                self._failed.add(name)
                continue
            sha256 = await self.server.compute.run(
                Kind.BACKGROUND, partial(gradient_sha256, gradient)
            )
            expected = record.gradients.get(self.server.stage)
            if record.step == step and sha256.value == expected:
                return record, gradient
            self._blame(name, "gradient")
            gone = True  # what it has is not what was committed, and may never be
        if early:
            return None
        if gone:
            raise FellOffError(f"nobody keeps the gradient of step {step} any more")
        raise RefusedError("no donor answers")
