"""The leader's half of a step in which each stage's members average: attempts, answers, blame.

An attempt ends with every member of every stage having prepared the same bytes, or is aborted and
repeated under a higher number; who is to blame is expelled, and its share computed again first.

Once all microbatches are given away, and if nothing fails, it is known what each member will have
counted. So the first attempt of a step is ordered *early*: each member begins as soon as its ledger
holds that much, and on a long line the last answer's way to the leader and the order's way back
cost nothing. Where a microbatch is given away once more, or who takes part has changed, the attempt
is given up, without blame, and another one ordered when the step is complete.

Members also say a fingerprint of the state they hold, before anything is committed: one whose state
is not its stage's (`swarm.agreement`) must not have a part in the gradient (DESIGN, I5).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from peer.calls import count
from peer.microbatches import MAX_FAILURES, RETRY_S
from swarm.agreement import agree
from swarm.averaging.plan import MAX_MEMBERS, balanced_shares, learned_rates
from swarm.averaging.progress import MAX_RATE
from swarm.errors import RefusedError, StageFailedError, StreamClosedError, WireError
from swarm.names import brief
from swarm.net.channel import CallFailedError
from swarm.stage_state import total
from swarm.step import Group, Step
from swarm.terms import Ballot

if TYPE_CHECKING:
    from peer.leader import Leader

log = logging.getLogger(__name__)
MAX_NORMS = 1 << 20  # parameters in a stage
CONFIRM_S = 10.0  # after which who owes an early attempt is sent the order again
MAX_SQUARED = 1e100  # float32 values cannot reach it


class Averaged(NamedTuple):
    """What a member says of its stage's averaged gradient."""

    sha256: str
    finite: bool
    norms: tuple[float, ...]  # squared, of each parameter; none unless finite


@dataclass(slots=True)
class Prepared:
    """An averaging attempt, as it was when it began: who dies later changes nothing in it."""

    groups: list[Group]
    loss: float
    said: dict[int, dict[str, Averaged]] = field(default_factory=dict)
    marks: dict[int, dict[str, str]] = field(default_factory=dict)  # of the state before
    averaged: dict[int, Averaged] = field(default_factory=dict)  # what each stage agrees on
    fingerprints: dict[int, str] = field(default_factory=dict)  # the same
    rates: dict[str, list[int]] = field(default_factory=dict)  # by member: how fast others sent

    @property
    def finite(self) -> bool:
        return all(each.finite for each in self.averaged.values())

    def note(self, stage: int, member: str, body: Mapping[str, Any]) -> None:
        """A member's answer. Raises WireError (nonsense)."""
        sha256, norms, mark = body.get("sha256"), body.get("norms"), body.get("fingerprint", "")
        if not isinstance(sha256, str) or len(sha256) != 64 or not isinstance(norms, list):
            raise WireError("an averaging answer that makes no sense")
        finite = body.get("finite") is True
        if len(norms) > MAX_NORMS or not isinstance(mark, str) or len(mark) > 64:
            raise WireError("an averaging answer that makes no sense")
        if finite and not all(isinstance(n, float) and 0 <= n < MAX_SQUARED for n in norms):
            raise WireError("squared norms that make no sense")
        said = Averaged(sha256, finite, tuple(norms) if finite else ())
        self.said.setdefault(stage, {})[member] = said
        self.marks.setdefault(stage, {})[member] = mark

    def note_rates(self, member: str, body: Mapping[str, Any]) -> None:
        """How fast the contributions of each member came in at this one. Raises WireError."""
        rates = body.get("rates")
        if not isinstance(rates, list) or len(rates) > MAX_MEMBERS:
            raise WireError("an averaging answer that makes no sense")
        self.rates[member] = [min(count(rate), MAX_RATE) for rate in rates]


@dataclass(slots=True)
class Attempt:
    """What has been ordered: of whom, and who has to answer."""

    step: Step
    ballot: Ballot
    groups: list[Group]
    early: bool
    calls: dict[asyncio.Task[Mapping[str, Any]], tuple[int, str]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether an order has been answered with an error."""
        return any(task.done() and task.exception() is not None for task in self.calls)


class Averaging:
    """The averaging attempts of a `Leader`."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self._early: Attempt | None = None  # of a step that is not complete yet
        self._may_be_early = False  # the step has had no attempt yet
        self.owing: set[str] = set()  # asked, and not prepared yet
        self._rates: dict[str, tuple[float, float]] = {}  # bytes/s sent and received, by member
        self._suspects: dict[str, int] = {}  # named by others in failed rounds of this step
        self._refusals: dict[str, int] = {}  # to average, in this step
        self._nonfinite: set[str] = set()  # whose sums alone were no numbers, in this step

    def begin(self) -> None:
        """A step is the oldest under way now."""
        self._early, self._may_be_early = None, True
        self._suspects.clear()
        self._refusals.clear()
        self._nonfinite.clear()
        present = {member.incarnation for member in self.leader.members}
        self._rates = {name: each for name, each in self._rates.items() if name in present}

    def begin_early(self, step: Step) -> None:
        """All of `step` is given away: order its averaging, unless it is complete anyway, a hop is
        being replaced, or an earlier leader may have a hand in it."""
        leader = self.leader
        sure = leader.quorum.has_voided(step.number) and not leader.microbatches_of(step).adopting
        if self._may_be_early and sure and step.placed and not step.complete:
            self._early = self._begin(step, early=True)

    def give_up(self, step: Step) -> None:
        """A microbatch of `step` is given away: no early order knows of it."""
        if self._early is not None and self._early.step is step:
            early, self._early = self._early, None
            self._abort(early)

    def _begin(self, step: Step, *, early: bool) -> Attempt:
        leader, self._may_be_early = self.leader, False
        number = leader.attempt = step.next_attempt()
        ballot = Ballot(leader.term, step.number, number)
        attempt = Attempt(step, ballot, step.groups(), early)
        for group in attempt.groups:
            shares = self._shares(group.members)
            for member in group.members:
                order = self._order(group, member, attempt, shares)
                task = leader.tasks.spawn(order, f"average {member[-8:]}")
                attempt.calls[task] = (group.stage, member)
        return attempt

    def _abort(self, attempt: Attempt) -> None:
        """Its orders end with an answer all the same: one may say that a state is wrong."""
        ballot = attempt.ballot
        body = {"ballot": [list(ballot.term), ballot.step, ballot.attempt]}
        members = {member for _, member in attempt.calls.values()}
        for replica in sorted(members | attempt.step.active.keys()):
            self.leader.tell(replica, "abort", body)

    def _begun(self, step: Step) -> Attempt:
        """The attempt to wait for, now that the step is complete."""
        early, self._early = self._early, None
        if early is not None:
            if early.groups == step.groups() and not early.failed:
                return early
            self._abort(early)
        return self._begin(step, early=False)

    async def run(self, step: Step) -> Prepared | None:
        """One averaging attempt over all stages. None: aborted, and the step goes on."""
        leader = self.leader
        leader.averaging = True
        attempt = self._begun(step)
        groups, calls = attempt.groups, attempt.calls
        losses = leader.microbatches_of(step).losses
        prepared = Prepared(groups, total(losses.values()))
        for _, member in calls.values():
            leader.watch.heard(member)
        confirming = leader.tasks.spawn(self._confirm(attempt), "averaging goes on")
        try:
            failed = await self._gather(step, calls, prepared)
        finally:
            confirming.cancel()
        for group in groups:
            if not failed and not step.active.keys() & set(group.members):
                gone = StreamClosedError(f"all replicas of stage {group.stage} are gone")
                failed.append((group.members[0], gone))
        if not failed:
            failed = self._compare(step, prepared)
        if not failed:
            self._learn_rates(prepared)
            return prepared
        leader.averaging = False
        self._abort(attempt)
        for member, error in failed:
            if not attempt.early:  # there it may be for waiting for a twin that still computed
                await self._blame(step, member, error)
        return None

    async def _confirm(self, attempt: Attempt) -> None:
        """Whoever still owes an early attempt is told after a while that nothing is missing any
        more: one that has not counted what its route has answered for would wait for ever."""
        if not attempt.early:
            return
        await asyncio.sleep(CONFIRM_S)
        order = replace(attempt, early=False)

        async def ask(group: Group, member: str) -> None:
            try:
                await self._order(group, member, order, self._shares(group.members))
            except CallFailedError as error:
                if error.kind == "refused":  # else its round failed, maybe through another
                    self.leader.expel(attempt.step, member, error.message)

        await asyncio.gather(
            *(ask(g, name) for g in attempt.groups for name in self.owing.intersection(g.members)),
            return_exceptions=True,
        )

    async def _gather(
        self,
        step: Step,
        calls: Mapping[asyncio.Task[Mapping[str, Any]], tuple[int, str]],
        prepared: Prepared,
    ) -> list[tuple[str, BaseException]]:
        """Wait for all, or for the first that fails. Who is left out meanwhile has failed too."""
        leader, pending = self.leader, set(calls)
        failed: list[tuple[str, BaseException]] = []
        while pending and not failed:
            self.owing = {calls[task][1] for task in pending}
            woken: asyncio.Future[Any] = asyncio.ensure_future(leader.left_out.wait())
            try:
                await asyncio.wait({*pending, woken}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                woken.cancel()
            leader.left_out.clear()
            done = [task for task in pending if task.done()]
            for task in sorted(done, key=lambda each: calls[each]):
                pending.discard(task)
                stage, member = calls[task]
                if (error := task.exception()) is not None:
                    failed.append((member, error))
                    continue
                try:
                    prepared.note(stage, member, task.result())
                    prepared.note_rates(member, task.result())
                except WireError as nonsense:
                    failed.append((member, nonsense))
            for task in sorted(pending, key=lambda each: calls[each]):
                member = calls[task][1]
                if not failed and member not in step.active:
                    failed.append((member, StreamClosedError("left out of the step")))
        self.owing = set()
        return failed

    def _shares(self, members: Sequence[str]) -> list[int] | None:
        """How the members split the sums, by what their links have done; None: evenly."""
        rates = [self._rates.get(member, (0.0, 0.0)) for member in members]
        return balanced_shares(rates, *self.leader.plan.gradient_bytes)

    def _learn_rates(self, prepared: Prepared) -> None:
        """What a round has shown of its members' links."""
        for group in prepared.groups:
            came = [prepared.rates[member] for member in group.members]
            if any(len(row) != len(group.members) for row in came):
                continue
            before = [self._rates.get(member, (0.0, 0.0)) for member in group.members]
            self._rates.update(zip(group.members, learned_rates(before, came), strict=True))

    async def _order(
        self, group: Group, member: str, attempt: Attempt, shares: list[int] | None
    ) -> Mapping[str, Any]:
        channel = self.leader.links.open_channel(member)
        if channel is None:
            raise StreamClosedError("no connection to it")
        ballot = attempt.ballot
        body = {
            "ballot": [list(ballot.term), ballot.step, ballot.attempt],
            "early": attempt.early,
            "members": list(group.members),
            "expected": group.ledgers[member],
            "shares": shares,
            "nonfinite": member in self._nonfinite,
        }
        try:
            return (await channel.call("average", body)).body
        except CallFailedError as error:
            # At once, also in an attempt that is given up: its microbatches may be issued again
            # without this being known, but not what its neighbours made of them.
            if error.detail.get("diverged") is True and attempt.step in self.leader.live:
                self.leader.admission.diverged(member, attempt.step.number - 1, tie=False)
            raise

    def _compare(self, step: Step, prepared: Prepared) -> list[tuple[str, BaseException]]:
        """Whose gradient or state is not its stage's. A state that is not has its member start
        anew, and voids its part of the step."""
        failed: list[tuple[str, BaseException]] = []
        arrivals = [member.incarnation for member in self.leader.members]
        for stage in sorted(prepared.said):
            gradient = agree(prepared.said[stage], arrivals)
            prepared.averaged[stage] = gradient.agreed
            what = "its averaged gradient differs from its twin" + ("'s" if gradient.tie else "s'")
            for name in gradient.differing:
                if not gradient.tie:
                    self.leader.differed(step, name, what)
                failed.append((name, RefusedError(what)))
            state = agree(prepared.marks[stage], arrivals)
            prepared.fingerprints[stage] = state.agreed
            for name in state.differing:
                self.leader.admission.diverged(name, step.number - 1, tie=state.tie)
                failed.append((name, RefusedError("its state differs from its twins'")))
        return failed

    async def _blame(self, step: Step, member: str, error: BaseException) -> None:
        """Expel who is to blame for a failed round; when that is unclear, only repeat it."""
        leader = self.leader
        leader.probe("round_failed", step=step.number, member=member, why=brief(str(error)))
        if not isinstance(error, CallFailedError):
            leader.expel(step, member, str(error))
            return
        leader.doubt(error)
        if error.kind == "refused":
            # Once may be a misunderstanding; one that goes on would keep the step from its end.
            self._refusals[member] = self._refusals.get(member, 0) + 1
            if self._refusals[member] > 1:
                leader.hold_off(member)
        if error.detail.get("diverged") is True:
            return
        if error.kind == "nonfinite":
            # Others of its stage compute its share. Left to itself it may say so once a step.
            self._nonfinite.add(member)
            leader.hold_off(member)
        if error.kind in ("refused", "nonfinite"):
            leader.expel(step, member, error.message)
            return
        suspect = error.detail.get("suspect")
        if not isinstance(suspect, str) or step.active.get(suspect) != step.active.get(member):
            suspect = member  # its own computation failed, or it named who was not in its round
        if suspect in step.active:
            count = self._suspects[suspect] = self._suspects.get(suspect, 0) + 1
            alone = len(step.replicas(step.active[suspect])) == 1
            if alone and count >= MAX_FAILURES:
                stage = step.active[suspect]
                raise StageFailedError(f"stage {stage} cannot average its step: {error.message}")
            if leader.links.open_channel(suspect) is None or (count > 1 and not alone):
                leader.hold_off(suspect)
                leader.expel(step, suspect, f"averaging: {error.message}")
        await asyncio.sleep(RETRY_S)
