"""The commits of one replica: what is prepared for the next, what was applied, what is missing.

A step's result is *prepared* (averaged, hashed, kept) before anything changes; parameters change at
the commit alone (I4). A record is applied when it continues the chain of records and states that
led here (I5). A replica that has no result of its own for it fetches the averaged gradient from a
member and checks it against the record's hash; one that is further behind, or on another chain,
notes so, and `peer.joining` fetches the state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from peer.gradients import fetch_gradient
from peer.stage_server import StageServer
from swarm.averaging.policy import Update, UpdatePolicy
from swarm.compute import Kind
from swarm.errors import RefusedError, StageFailedError, SwarmError
from swarm.model.layout import gradient_sha256
from swarm.net.channel import CallFailedError
from swarm.stage_state import GradientFacts
from swarm.terms import Ballot, Record

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Prepared:
    """An averaged gradient that waits for its record, or that was committed last."""

    ballot: Ballot
    update: Update
    mark: str = ""  # fingerprint of the state it was computed with


def left_behind(mine: Record, newest: Record) -> bool:
    """Whether a state of `mine` is not on the way to `newest`: the run went back, and on anew."""
    return newest.restores or (newest.epoch > mine.epoch and newest.predecessor != mine.hash)


class Commits:
    """What is committed on one `StageServer`. Who puts another state in place holds `lock`."""

    def __init__(self, server: StageServer, policy: UpdatePolicy) -> None:
        self.server, self.policy = server, policy
        self.prepared: Prepared | None = None
        self.committed: Prepared | None = None  # of the last record, until the next
        self.record: Record | None = None  # the last one applied here
        self.behind: Record | None = None  # the newest record this state has not reached
        self.fell_behind = asyncio.Event()
        self.valid = True  # False: the state is not that of the ledger's step, and must be fetched
        self.lock = asyncio.Lock()
        self._mark: tuple[int, str] | None = None  # the step and fingerprint of the state
        self.end_round: Callable[[], None] = lambda: None  # of averaging: the state is another
        self.on_commit: Callable[[Record, Prepared], None] = lambda record, prepared: None
        self.on_invalid: Callable[[], None] = lambda: None
        self.before_commit: Callable[[Record], Awaitable[None]] | None = None  # catch up to it

    async def mark(self) -> str:
        """The fingerprint of the state as it was when it became that of the ledger's step."""
        step = self.server.parts.ledger.step
        if self._mark is None or self._mark[0] != step:
            value = await self.fingerprint()
            if self.server.parts.ledger.step != step or not self.valid:
                return value
            self._mark = (step, value)
        return self._mark[1]

    async def fingerprint(self) -> str:
        """That of the state as it is now."""
        return (await self.server.compute.run(Kind.UPDATE, self.server.state.fingerprint)).value

    def verified(self, value: str, step: int) -> str:
        """The fingerprint `value` of the state, that of `step`.

        Raises CallFailedError, and gives the state up, when it has changed since the last commit.
        """
        if self._mark is None or self._mark[0] != step:
            self._mark = (step, value)  # a state that came from a donor
        if self._mark[1] != value:
            self.start_anew()
            what = "its state has changed since the last commit"
            raise CallFailedError("refused", what, diverged=True)
        return value

    async def commit(self, record: Record) -> None:
        """Apply `record` if it is the next one; note it when this state is further behind.

        Cancelling the caller (its connection may end) does not stop it half way.
        """
        if self.before_commit is not None and record.step >= self.server.parts.ledger.step:
            await self.before_commit(record)
        await self.commit_next(record)

    async def commit_next(self, record: Record) -> None:
        """`commit`, for who has caught up to it."""
        await asyncio.shield(self.server.tasks.spawn(self._commit_next(record), "commit"))

    async def _commit_next(self, record: Record) -> None:
        async with self.lock:
            step, mine = self.server.parts.ledger.step, self.record
            if mine is not None and record.position <= mine.position:
                return
            if mine is not None and left_behind(mine, record):
                self.start_anew()
            if record.restores or record.step > step or not self.valid:
                self._note_behind(record)
                return
            if record.step < step:
                return
            self.server.probe("commit", step=step)
            try:
                if not await self._continues(record):
                    self.start_anew()
                    self._note_behind(record)
                    return
                prepared = await self._result_for(record)
            except SwarmError as error:  # or its kernel: the state is as it was
                log.debug("step %d cannot be committed now: %s", step, error)
                self._note_behind(record)
                return
            await self._apply(record, prepared)

    async def _continues(self, record: Record) -> bool:
        """Whether `record` belongs to the chain of records and states that lead here (I5)."""
        if self.record is not None and record.predecessor != self.record.hash:
            log.warning("record %d does not follow the one before it here", record.step)
            return False
        agreed = record.fingerprints.get(self.server.stage, "")
        if agreed and agreed != await self.mark():
            log.warning("the state of step %d is not what its stage agreed on", record.step)
            return False
        return True

    async def _apply(self, record: Record, prepared: Prepared) -> None:
        state = self.server.state

        def update() -> str:
            if record.outcome == "applied":
                self.policy.apply(state, prepared.update, lr=record.lr, scale=record.scale)
            else:
                state.skip()
            prepared.update.on_device = None
            return state.fingerprint()

        self.server.parts.drop_works(self.server.parts.of(record.step))
        try:
            mark = (await self.server.compute.run(Kind.UPDATE, update)).value
        except StageFailedError as error:
            log.warning("the update of step %d failed: %s", record.step, error)
            self.invalidate()
            self._note_behind(record)
            return
        self.record, self.committed, self.prepared = record, prepared, None
        self._mark = (record.step + 1, mark)
        self.end_round()
        self.on_commit(record, prepared)
        self.server.parts.committed()
        self.server.probe("committed", step=record.step)

    async def _result_for(self, record: Record) -> Prepared:
        expected = record.gradients[self.server.stage]
        if self.prepared is not None and self.prepared.update.facts.sha256 == expected:
            return self.prepared
        for member in record.members[self.server.stage]:
            if member == self.server.links.incarnation:
                continue
            try:
                channel = await self.server.links.channel(member)
                total, asked = self.server.state.layout.total, {"step": record.step}
                gradient, _ = await fetch_gradient(channel, total, asked)
            except SwarmError as error:
                log.debug("gradient of step %d not at %s: %s", record.step, member[-8:], error)
                continue
            compute = self.server.compute
            found = (await compute.run(Kind.BACKGROUND, partial(gradient_sha256, gradient))).value
            if found == expected:
                facts = GradientFacts(expected, [], record.outcome == "applied")
                return Prepared(record.ballot, Update(gradient, facts))
        raise RefusedError(f"nobody has the averaged gradient of step {record.step}")

    def make_room(self) -> None:
        """Of what is prepared nothing is left on the device: more of its step is to be computed."""
        if self.prepared is not None:
            self.prepared.update.on_device = None

    def invalidate(self) -> None:
        """The state here is of no use any more: nothing is applied to it until it is replaced."""
        self.valid = False
        self.record = self.prepared = self.committed = self._mark = None
        self.end_round()
        self.server.parts.advance(0)
        self.on_invalid()

    def start_anew(self) -> None:
        """The state here is not the stage's: have it fetched."""
        self.invalidate()
        self.fell_behind.set()

    def _note_behind(self, record: Record) -> None:
        if self.behind is None or record.position >= self.behind.position:
            self.behind = record
        self.fell_behind.set()
