"""What a leader orders a replica to do: fence, reset, average, abort, commit (DESIGN, "One step").

Only the run's trainers are heard, and only in a term that no higher one has succeeded. A step's
result is *prepared* (averaged, hashed, kept) before anything changes; parameters change at the
commit alone (I4), and a replica that has no result of its own for a committed record fetches the
averaged gradient from a member and checks it against the record's hash.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peer.calls import count, names
from peer.stage_server import Part, StageServer
from swarm.averaging.errors import RoundFailedError
from swarm.averaging.plan import MAX_SHARE
from swarm.averaging.policy import Update, UpdatePolicy
from swarm.compute import Kind
from swarm.errors import RefusedError, StageFailedError, SwarmError, WireError
from swarm.finite import finite
from swarm.ledger import Do
from swarm.model.layout import sha256_of
from swarm.net.channel import CallFailedError, Channel, Message, Method, no_tensors
from swarm.spec import TensorSpec
from swarm.stage_state import GradientFacts
from swarm.terms import Ballot, Record, Term
from swarm.wire.codecs import TensorMeta, decode
from swarm.wire.frames import check_tensors

log = logging.getLogger(__name__)
GRADIENT_CHUNK = 1 << 20  # elements; one frame of 4 MiB


@dataclass(slots=True)
class Prepared:
    """An averaged gradient that waits for its record, or that was committed last."""

    ballot: Ballot
    update: Update
    mark: str = ""  # fingerprint of the state it was computed with


def left_behind(mine: Record, newest: Record) -> bool:
    """Whether a state of `mine` is not on the way to `newest`: the run went back, and on anew."""
    return newest.restores or (newest.epoch > mine.epoch and newest.predecessor != mine.hash)


class MoveOrder(NamedTuple):
    """A stage to serve instead of this one, and why. `beside`: the device holds both meanwhile;
    `also`: for good, as a second stage."""

    stage: int
    reason: str
    beside: bool
    memory_bytes: int  # of a replica there, as the leader estimates it
    also: bool = False


def read_shares(value: object, num_members: int) -> list[int] | None:
    """How an averaging order splits the work; None: evenly. Raises WireError."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != num_members:
        raise WireError("shares that are not those of the members")
    shares = [count(share) for share in value]
    if not 0 < sum(shares) <= MAX_SHARE * num_members:
        raise WireError("shares out of bounds")
    return shares


class Orders:
    """Carries out a leader's orders on one `StageServer`."""

    def __init__(self, server: StageServer, policy: UpdatePolicy, trainers: Sequence[str]) -> None:
        self.server, self.policy, self.trainers = server, policy, frozenset(trainers)
        self.prepared: Prepared | None = None
        self.committed: Prepared | None = None  # of the last record, until the next
        self.record: Record | None = None  # the last one applied here
        self.behind: Record | None = None  # the newest record this state has not reached
        self.fell_behind = asyncio.Event()
        self.valid = True  # False: the state is not that of the ledger's step, and must be fetched
        self._round: asyncio.Task[Prepared] | None = None
        self._round_ballot: Ballot | None = None
        self.commit_lock = asyncio.Lock()
        self._mark: tuple[int, str] | None = None  # the step and fingerprint of the state
        self.on_commit: Callable[[Record, Prepared], None] = lambda record, prepared: None
        self.on_invalid: Callable[[], None] = lambda: None
        self.on_move: Callable[[MoveOrder], str] = lambda order: "this peer does not move"
        self.before_commit: Callable[[Record], Awaitable[None]] | None = None  # catch up to it

    def methods(self) -> dict[str, Method]:
        return {
            "fence": Method(self._fence, no_tensors),
            "reset": Method(self._reset, no_tensors),
            "average": Method(self._average, no_tensors),
            "abort": Method(self._abort, no_tensors),
            "commit": Method(self._commit, no_tensors),
            "inspect": Method(self._inspect, no_tensors),
            "stand": Method(self._stand, no_tensors),
            "move": Method(self._move, no_tensors),
        }

    def _heed(self, channel: Channel, term: Term) -> None:
        """Raises unless the order comes from a trainer, in a term of its own that is not stale."""
        if channel.peer not in self.trainers or term.trainer != channel.peer:
            raise RefusedError("only the run's trainers give orders, each in its own term")
        seen = self.server.ledger.term
        if not self.server.see(term):
            what = f"term {term.counter} was succeeded by {seen.counter}"
            raise CallFailedError("refused", what, stale=True)
        if term > seen:
            self._stop_round()

    # ---- within a step --------------------------------------------------------------------------

    async def _fence(self, channel: Channel, message: Message) -> Message:
        body = message.body
        term, index = Term.read(body.get("term")), count(body.get("index"))
        self._heed(channel, term)
        step = count(body.get("step"))
        part = self.server.part_of(step)
        fence = part.ledger.fence(term, step, index, count(body.get("try")))
        if fence.fenced:
            self.server.drop(part, index)
        return Message({"fenced": fence.fenced, "reason": fence.reason})

    async def _reset(self, channel: Channel, message: Message) -> Message:
        body = message.body
        term, step = Term.read(body.get("term")), count(body.get("step"))
        self._heed(channel, term)
        part = self.server.part_of(step)
        ledger = part.ledger
        if step != ledger.step:
            raise RefusedError(f"this replica is at step {ledger.step}, not {step}")
        if ledger.reset(term, step, count(body.get("number"))):
            if ledger is self.server.ledger:  # only the oldest step is averaged
                self._stop_round()
            self.server.drop_works(part)
            part.clearing = self.server.tasks.spawn(self._clear(part), "clear")
        if part.clearing is not None:
            # The order's connection may end: the ledger is empty, so the accumulator must be.
            await asyncio.shield(part.clearing)
        return Message({"step": ledger.step})

    async def _clear(self, part: Part) -> None:
        """Empty the accumulator, as the ledger is. Raises StageFailedError; only a reset helps."""
        try:
            await self.server.compute.run(Kind.UPDATE, part.state.clear)
        except StageFailedError:
            part.ledger.spoil()
            raise

    async def _inspect(self, channel: Channel, message: Message) -> Message:
        """What a new leader asks first: where this replica stands, and what it has counted.

        Work that is not counted is dropped, also of later steps: it holds slots, and belongs to a
        term that is over.
        """
        self._heed(channel, Term.read(message.body.get("term")))
        part = self.server.part_of(count(message.body.get("step", self.server.ledger.step)))
        ledger = part.ledger
        for each in self.server.parts:
            if each.ledger.step >= ledger.step:
                for index in each.ledger.keep_counted():
                    self.server.drop(each, index)
        counted = ledger.counted | ledger.uncertain
        losses = {
            str(index): work.loss
            for index, work in part.kept.works.items()
            if work.loss is not None and index in counted
        }
        return Message(
            {
                "stage": self.server.stage,
                "step": ledger.step,
                "counted": sorted(counted),
                "losses": losses,
            }
        )

    async def _stand(self, channel: Channel, message: Message) -> Message:
        """For a leader that wonders: whether the device works, and how far a microbatch is."""
        server, index = self.server, count(message.body.get("index", 0))
        step = count(message.body.get("step", server.ledger.step))
        ledger = server.part_of(step).ledger
        entry = ledger.entries.get(index) if ledger.step == step else None
        return Message(
            {
                "silent_s": float(server.compute.silent_s()),
                "updating": server.compute.updating,
                "sending": server.links.sending,
                "phase": entry.phase.value if entry else "absent",
            }
        )

    async def _move(self, channel: Channel, message: Message) -> Message:
        """The leader wants this peer in another stage; it may say no. The answer says why not."""
        body = message.body
        self._heed(channel, Term.read(body.get("term")))
        stage, need = count(body.get("stage")), count(body.get("memory_bytes", 0))
        reason = str(body.get("reason", ""))[:200]
        beside, also = (body.get(name) is True for name in ("beside", "also"))
        refusal = self.on_move(MoveOrder(stage, reason, beside, need, also))
        return Message({"refusal": refusal[:200]})

    # ---- averaging ------------------------------------------------------------------------------

    async def _average(self, channel: Channel, message: Message) -> Message:
        body = message.body
        ballot = Ballot.read(body.get("ballot"))
        self._heed(channel, ballot.term)
        members = names(body.get("members"))
        expected = body.get("expected")
        if not isinstance(expected, list):
            raise WireError("an averaging order without a ledger")
        shares = read_shares(body.get("shares"), len(members))
        as_it_is = body.get("nonfinite") is True
        if ballot.step == self.server.ledger.step + 1:
            await self.server.commit_of(ballot.step - 1)
        if self.prepared is None or self.prepared.ballot != ballot:
            frozen = self.server.ledger.freeze(
                ballot.term, ballot.step, ballot.attempt, {count(index) for index in expected}
            )
            if frozen.do is Do.REFUSE:
                raise CallFailedError("refused", frozen.reason)
            if self._round is None or self._round_ballot != ballot:
                self._stop_round()
                self._round_ballot = ballot
                work = self._prepare(ballot, members, shares, as_it_is)
                self._round = self.server.tasks.spawn(work)
            try:
                await asyncio.shield(self._round)
            except asyncio.CancelledError:
                if self._round is None or self._round.cancelled():
                    raise CallFailedError("refused", "the attempt was aborted") from None
                raise
        prepared = self.prepared
        if prepared is None or prepared.ballot != ballot:
            raise CallFailedError("refused", "the attempt was aborted")
        facts = prepared.update.facts
        return Message(
            {
                "sha256": facts.sha256,
                "norms": facts.squared_norms,
                "finite": facts.finite,
                "fingerprint": prepared.mark,
                "rates": list(prepared.update.rates),
            }
        )

    async def _prepare(
        self,
        ballot: Ballot,
        members: Sequence[str],
        shares: Sequence[int] | None,
        as_it_is: bool,
    ) -> Prepared:
        server, term = self.server, ballot.term
        server.probe("average", step=ballot.step)
        place = f"{server.stage}/{ballot.step}/{ballot.attempt}"
        round_id = f"{term.epoch}/{term.counter}/{term.incarnation}/{place}"
        mark = (await server.compute.run(Kind.UPDATE, server.state.fingerprint)).value
        if self._mark is None or self._mark[0] != ballot.step:
            self._mark = (ballot.step, mark)  # a state that came from a donor
        if self._mark[1] != mark:
            self.start_anew()
            what = "its state has changed since the last commit"
            raise CallFailedError("refused", what, diverged=True)
        try:
            update = await self.policy.prepare(
                round_id, members, server.state, server.compute, shares
            )
        except RoundFailedError as error:
            raise CallFailedError("failed", error.message, suspect=error.peer) from None
        if not (update.facts.finite or as_it_is or server.oldest.nonfinite):
            # All that came here were numbers: what is added up here must be, too.
            mine = [server.state.accumulator]
            if not (await server.compute.run(Kind.UPDATE, lambda: finite(mine))).value:
                what = "what it has added up is no number"
                raise CallFailedError("nonfinite", what)
        self.prepared = Prepared(ballot, update, mark)
        server.probe("prepared", step=ballot.step)
        return self.prepared

    async def _abort(self, channel: Channel, message: Message) -> Message:
        ballot = Ballot.read(message.body.get("ballot"))
        self._heed(channel, ballot.term)
        ledger = self.server.part_of(ballot.step).ledger
        ledger.abort(ballot.term, ballot.step, ballot.attempt)
        if self._round_ballot is not None and self._round_ballot <= ballot:
            self._stop_round()
        mine = self.prepared.ballot if self.prepared else None
        # What was prepared of an earlier step is committed, or this one would not be averaged.
        if mine is not None and mine[:2] == ballot[:2] and mine <= ballot:
            self.prepared = None
        return Message({})

    @property
    def averaging(self) -> bool:
        """Whether an averaging round runs."""
        return self._round is not None and not self._round.done()

    def _stop_round(self) -> None:
        if self._round is not None and not self._round.done():
            self._round.cancel()
        self._round = self._round_ballot = None

    # ---- commit ---------------------------------------------------------------------------------

    async def _commit(self, channel: Channel, message: Message) -> Message:
        """Apply a committed record. The answer says where this replica stands afterwards."""
        record = Record.unpack(message.body.get("record"))
        self._heed(channel, Term.read(message.body.get("term")))
        await self.commit(record)
        return Message(
            {
                "step": self.server.ledger.step,
                "fingerprint": await self.mark(),
                **self.server.counted_bytes(),
            }
        )

    async def mark(self) -> str:
        """The fingerprint of the state as it was when it became that of the ledger's step."""
        step = self.server.ledger.step
        if self._mark is None or self._mark[0] != step:
            value = (
                await self.server.compute.run(Kind.UPDATE, self.server.state.fingerprint)
            ).value
            if self.server.ledger.step != step or not self.valid:
                return value
            self._mark = (step, value)
        return self._mark[1]

    async def commit(self, record: Record) -> None:
        """Apply `record` if it is the next one; note it when this state is further behind.

        Cancelling the caller (its connection may end) does not stop it half way.
        """
        if self.before_commit is not None and record.step >= self.server.ledger.step:
            await self.before_commit(record)
        await self.commit_next(record)

    async def commit_next(self, record: Record) -> None:
        """`commit`, for who has caught up to it."""
        await asyncio.shield(self.server.tasks.spawn(self._commit_next(record), "commit"))

    async def _commit_next(self, record: Record) -> None:
        async with self.commit_lock:
            step, mine = self.server.ledger.step, self.record
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
            if not await self._continues(record):
                self.start_anew()
                self._note_behind(record)
                return
            try:
                prepared = await self._result_for(record)
            except SwarmError as error:
                log.debug("no averaged gradient for step %d: %s", step, error)
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
            return state.fingerprint()

        self.server.drop_works(self.server.part_of(record.step))
        try:
            mark = (await self.server.compute.run(Kind.UPDATE, update)).value
        except StageFailedError as error:
            log.warning("the update of step %d failed: %s", record.step, error)
            self.invalidate()
            self._note_behind(record)
            return
        self.record, self.committed, self.prepared = record, prepared, None
        self._mark = (record.step + 1, mark)
        self._stop_round()
        self.on_commit(record, prepared)
        self.server.committed()
        self.server.probe("committed", step=record.step)

    async def _result_for(self, record: Record) -> Prepared:
        expected = record.gradients[self.server.stage]
        if self.prepared is not None and self.prepared.update.facts.sha256 == expected:
            return self.prepared
        for member in record.members[self.server.stage]:
            if member == self.server.links.incarnation:
                continue
            try:
                gradient = await self._fetch_gradient(member, record.step)
            except SwarmError as error:
                log.debug("gradient of step %d not at %s: %s", record.step, member[-8:], error)
                continue
            compute = self.server.compute
            found = (await compute.run(Kind.BACKGROUND, partial(sha256_of, gradient))).value
            if found == expected:
                facts = GradientFacts(expected, [], record.outcome == "applied")
                mine = gradient.to(self.server.state.device)
                return Prepared(record.ballot, Update(mine, facts))
        raise RefusedError(f"nobody has the averaged gradient of step {record.step}")

    def invalidate(self) -> None:
        """The state here is of no use any more: nothing is applied to it until it is replaced."""
        self.valid = False
        self.record = self.prepared = self.committed = self._mark = None
        self._stop_round()
        self.server.advance(0)
        self.on_invalid()

    def start_anew(self) -> None:
        """The state here is not the stage's: have it fetched."""
        self.invalidate()
        self.fell_behind.set()

    def _note_behind(self, record: Record) -> None:
        if self.behind is None or record.position >= self.behind.position:
            self.behind = record
        self.fell_behind.set()

    # ---- the averaged gradient, for those who missed a round ------------------------------------

    async def _fetch_gradient(self, member: str, step: int) -> Tensor:
        total = self.server.state.layout.total
        gradient = torch.empty(total, dtype=torch.float32)
        channel = await self.server.links.channel(member)
        for start in range(0, total, GRADIENT_CHUNK):
            length = min(GRADIENT_CHUNK, total - start)

            def check(
                _: Mapping[str, Any], metas: Sequence[TensorMeta], length: int = length
            ) -> None:
                check_tensors(metas, [TensorSpec((length,), "float32")], "float32")

            answer = await channel.call(
                "gradient", {"step": step, "start": start}, check_reply=check
            )
            gradient[start : start + length] = decode(answer.tensors[0])
        return gradient
