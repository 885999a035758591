"""What a leader orders a replica to do: fence, reset, average, abort, commit (DESIGN, "One step").

Only the run's trainers are heard, and only in a term that no higher one has succeeded. What a
commit does here is in `peer.commits`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from peer.calls import count, names
from peer.commits import Commits, Prepared
from peer.parts import Part
from swarm.averaging.errors import RoundFailedError
from swarm.averaging.plan import MAX_SHARE
from swarm.compute import Kind
from swarm.errors import RefusedError, StageFailedError, WireError
from swarm.finite import finite
from swarm.ledger import Do
from swarm.net.channel import CallFailedError, Channel, Message, Method
from swarm.terms import Ballot, Record, Term
from swarm.wire.frames import no_tensors

log = logging.getLogger(__name__)


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

    def __init__(self, commits: Commits, trainers: Sequence[str]) -> None:
        self.server, self.commits, self.trainers = commits.server, commits, frozenset(trainers)
        self._round: asyncio.Task[Prepared] | None = None
        self._round_ballot: Ballot | None = None
        commits.end_round = self._stop_round
        self.on_move: Callable[[MoveOrder], str] = lambda order: "this peer does not move"

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
        seen = self.server.parts.ledger.term
        if not self.server.parts.see(term):
            what = f"term {term.counter} was succeeded by {seen.counter}"
            raise CallFailedError("refused", what, stale=True)
        if term > seen:
            self._stop_round()
            self._drop_uncounted(self.server.parts.ledger.step)
            self.server.count_anew()

    def _drop_uncounted(self, step: int) -> None:
        """Of `step` and later ones: it belongs to a term that is over, and holds slots."""
        for part in self.server.parts:
            if part.ledger.step >= step:
                for index in part.ledger.keep_counted():
                    self.server.parts.drop(part, index)

    # ---- within a step --------------------------------------------------------------------------

    async def _fence(self, channel: Channel, message: Message) -> Message:
        body = message.body
        term, index = Term.read(body.get("term")), count(body.get("index"))
        self._heed(channel, term)
        step = count(body.get("step"))
        part = self.server.parts.of(step)
        fence = part.ledger.fence(term, step, index, count(body.get("try")))
        if fence.fenced:
            self.server.parts.drop(part, index)
        return Message({"fenced": fence.fenced, "reason": fence.reason})

    async def _reset(self, channel: Channel, message: Message) -> Message:
        body = message.body
        term, step = Term.read(body.get("term")), count(body.get("step"))
        self._heed(channel, term)
        part = self.server.parts.of(step)
        ledger = part.ledger
        if step != ledger.step:
            raise RefusedError(f"this replica is at step {ledger.step}, not {step}")
        if ledger.reset(term, step, count(body.get("number"))):
            if ledger is self.server.parts.ledger:  # only the oldest step is averaged
                self._stop_round()
            self.server.parts.drop_works(part)
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

        Work that is not counted is dropped, also of later steps.
        """
        self._heed(channel, Term.read(message.body.get("term")))
        part = self.server.parts.of(count(message.body.get("step", self.server.parts.ledger.step)))
        ledger = part.ledger
        self._drop_uncounted(ledger.step)
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
        step = count(message.body.get("step", server.parts.ledger.step))
        ledger = server.parts.of(step).ledger
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
        as_it_is, early = (body.get(name) is True for name in ("nonfinite", "early"))
        share = {count(index) for index in expected}
        if ballot.step == self.server.parts.ledger.step + 1:
            await self.server.parts.commit_of(ballot.step - 1)
        if self.commits.prepared is None or self.commits.prepared.ballot != ballot:
            self._freeze(ballot, share, early)
            if self._round is None or self._round_ballot != ballot:
                self._stop_round()
                self._round_ballot = ballot
                work = self._once_counted(ballot, members, share, shares, as_it_is, early)
                self._round = self.server.tasks.spawn(work)
            current = self._round
            try:
                await asyncio.shield(current)
            except asyncio.CancelledError:
                if current.cancelled():
                    raise CallFailedError("refused", "the attempt was aborted") from None
                raise
        prepared = self.commits.prepared
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

    def _freeze(self, ballot: Ballot, expected: set[int], early: bool) -> bool:
        """Whether the ledger is frozen now: not yet, if the order is early and some of what is
        expected is still to be counted. Raises CallFailedError when it will never be."""
        frozen = self.server.parts.ledger.freeze(
            ballot.term, ballot.step, ballot.attempt, expected, early=early
        )
        if frozen.do is Do.REFUSE:
            raise CallFailedError("refused", frozen.reason)
        return frozen.do is Do.RUN

    async def _once_counted(
        self,
        ballot: Ballot,
        members: Sequence[str],
        expected: set[int],
        shares: Sequence[int] | None,
        as_it_is: bool,
        early: bool,
    ) -> Prepared:
        while not self._freeze(ballot, expected, early):
            await self.server.parts.of(ballot.step).changed.wait()
        return await self._prepare(ballot, members, shares, as_it_is)

    async def _prepare(
        self,
        ballot: Ballot,
        members: Sequence[str],
        shares: Sequence[int] | None,
        as_it_is: bool,
    ) -> Prepared:
        """Of a ledger that is frozen."""
        server, term = self.server, ballot.term
        server.probe("average", step=ballot.step)
        place = f"{server.stage}/{ballot.step}/{ballot.attempt}"
        round_id = f"{term.epoch}/{term.counter}/{term.incarnation}/{place}"
        # Beside the round: a device that computes the next step keeps both waiting for its kernel.
        marking = server.tasks.spawn(self.commits.fingerprint())
        try:
            update = await self.commits.policy.prepare(
                round_id, members, server.state, server.compute, shares
            )
            mark = self.commits.verified(await marking, ballot.step)
        except RoundFailedError as error:
            raise CallFailedError("failed", error.message, suspect=error.peer) from None
        finally:
            marking.cancel()
        if not (update.facts.finite or as_it_is or server.parts.oldest.nonfinite):
            # All that came here were numbers: what is added up here must be, too.
            mine = [server.state.accumulator]
            if not (await server.compute.run(Kind.UPDATE, lambda: finite(mine))).value:
                update.on_device = None  # the error's frames live on
                what = "what it has added up is no number"
                raise CallFailedError("nonfinite", what)
        prepared = self.commits.prepared = Prepared(ballot, update, mark)
        server.probe("prepared", step=ballot.step)
        return prepared

    async def _abort(self, channel: Channel, message: Message) -> Message:
        ballot = Ballot.read(message.body.get("ballot"))
        self._heed(channel, ballot.term)
        ledger = self.server.parts.of(ballot.step).ledger
        ledger.abort(ballot.term, ballot.step, ballot.attempt)
        if self._round_ballot is not None and self._round_ballot <= ballot:
            self._stop_round()
        prepared = self.commits.prepared
        mine = prepared.ballot if prepared else None
        # What was prepared of an earlier step is committed, or this one would not be averaged.
        if mine is not None and mine[:2] == ballot[:2] and mine <= ballot:
            self.commits.prepared = None
        return Message({})

    @property
    def averaging(self) -> bool:
        """Whether an averaging round runs, of all that this replica is to count."""
        frozen = self.server.parts.ledger.frozen_attempt is not None
        return frozen and self._round is not None and not self._round.done()

    def _stop_round(self) -> None:
        """And keep no gradient of it on the device: what comes next needs the room."""
        self.commits.make_room()
        if self._round is not None and not self._round.done():
            self._round.cancel()
        self._round = self._round_ballot = None

    # ---- commit ---------------------------------------------------------------------------------

    async def _commit(self, channel: Channel, message: Message) -> Message:
        """Apply a committed record. The answer says where this replica stands afterwards."""
        self._heed(channel, Term.read(message.body.get("term")))
        await self.commits.commit(Record.unpack(message.body.get("record")))
        return Message(
            {
                "step": self.server.parts.ledger.step,
                "fingerprint": await self.commits.mark(),
                **self.server.counted_bytes(),
            }
        )
