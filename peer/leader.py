"""The leader: drives steps and commits records (DESIGN, "One step, exactly once").

What to do is decided by `swarm.step` and `swarm.routing`; this asks, waits and records. One step:
`peer.microbatches` until every stage has counted every one of them, `peer.averaging` until all
members of all stages have prepared the same gradient, then the record is made durable, which *is*
the commit, and the replicas are told. Whoever fails on the way is asked for a fence or expelled,
its share is issued again, and the step goes on. `peer.admission` is how replicas come in,
`peer.watch` notices those that live and do nothing.

With a policy that has two steps in flight (*delayed*) the first microbatches of the next step,
as many as `Plan.ahead` says, go round from the moment the step has given away all of its own: it is
worked *ahead* until its predecessor is committed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
from collections.abc import Collection
from typing import Any

from peer.admission import Admission
from peer.averaging import Averaging, Prepared
from peer.members import Members, Standing, Traffic
from peer.microbatches import ADOPT_S, Microbatches
from peer.quorum import Quorum
from peer.rebalancing import Rebalancing
from peer.restoring import Order, Origin, Restoring, Saved
from peer.stage_server import Probe, no_probe
from peer.training import Batches, Plan, Shape, StepResult
from peer.watch import Watch
from swarm.consensus import Vote
from swarm.credits import Transit, slots
from swarm.errors import StageFailedError, SwarmError
from swarm.names import brief
from swarm.net.channel import CallFailedError, Channel
from swarm.net.links import Links
from swarm.optim import clip_scale
from swarm.placement import MovePolicy
from swarm.routing import Router
from swarm.stage_state import total
from swarm.step import Step
from swarm.tasks import TaskSet
from swarm.terms import NO_TERM, Ballot, Record

log = logging.getLogger(__name__)
HOLD_OFF_S = 20.0


class Leader:
    """Leads a run from the state its disk remembers.

    `links` must be set before `run`; `methods` of `admission` are what replicas may call here.
    `slots` bounds the microbatches in flight per replica of a stage (None: as many as it needs),
    `moves` says what a move must bring. With `same_numerics` all replicas must have one optimizer
    fingerprint (`Members.numerics`).
    """

    links: Links

    def __init__(
        self,
        plan: Plan,
        pipeline: Shape,
        batches: Batches,
        quorum: Quorum,
        *,
        seed: int = 0,
        slots: int | None = None,
        same_numerics: bool = False,
        moves: MovePolicy | None = None,
        probe: Probe = no_probe,
        saved: Saved | None = None,
    ) -> None:
        self.plan, self.pipeline, self.batches, self.quorum = plan, pipeline, batches, quorum
        self.fixed_slots = slots
        self.slots = slots if slots is not None else pipeline.num_stages + 2
        self.probe, self.same_numerics = probe, same_numerics
        self.members = Members(pipeline.num_stages)
        self.router = Router(seed, credits=self.slots)
        self.transit = Transit()
        self.tasks = TaskSet()
        self.admission = Admission(self)
        self.restoring = Restoring(self, saved)
        self.saved_step = 0  # of the newest complete checkpoint
        self.has_committed = False  # a step, in this term
        self.rebalancing = Rebalancing(self, moves or MovePolicy())
        self.term = NO_TERM
        self.record: Record | None = None  # the newest commit
        self.live: list[Step] = []  # the steps under way, oldest first
        self.averaging = False  # the oldest of them
        self.adopting = False  # in a term's first step, which an earlier leader may have begun
        self.wake = asyncio.Event()
        self.left_out = asyncio.Event()  # somebody was expelled: a round may wait for them
        self.sent_bytes = 0
        self._gone: dict[int, Traffic] = {}  # of replicas that have left, by stage
        self._tries = self.attempt = 0  # never reused within a term
        self.step_began_at = 0.0
        self.last_step_s = math.inf
        self.fatal: SwarmError | None = None
        self._doubting: asyncio.Task[None] | None = None
        self.watch = Watch(self)
        self._microbatches = [Microbatches(self) for _ in range(plan.ahead.steps_in_flight)]
        self.averager = Averaging(self)
        self._ahead: asyncio.Task[None] | None = None  # what keeps the newer of two steps going

    @property
    def next_step(self) -> int:
        """The step that is or will be trained: the one after the newest record."""
        return self.record.step + 1 if self.record else 0

    @property
    def step(self) -> Step | None:
        """The newest step under way."""
        return self.live[-1] if self.live else None

    def microbatches_of(self, step: Step) -> Microbatches:
        """Those of a step under way."""
        return self._microbatches[step.number % len(self._microbatches)]

    @property
    def microbatches(self) -> Microbatches:
        """Those of the newest step."""
        return self.microbatches_of(self.step) if self.step else self._microbatches[0]

    def is_averaged(self, step: Step) -> bool:
        """Whether an averaging attempt of `step` runs, so that nobody may come in."""
        return self.averaging and step is self.live[0]

    async def begin(self, order: Order | None = None, *, accept_loss: bool = False) -> None:
        """Win a term of our own, and with it the newest record.

        With `order` the term opens a new epoch with the state that it says. Raises SupersededError
        when another trainer holds a higher term; then the epoch may be opened or not. Raises
        DataError, with no epoch opened, when there is no going back.
        """
        saved, new_epoch = self.restoring.saved, order is not None
        above = await saved.highest_epoch() if new_epoch and saved is not None else 0
        self.record = await self.quorum.elect(
            new_epoch=new_epoch, above=above, accept_loss=accept_loss
        )
        self.term = self.quorum.term
        self.adopting = self.term.counter > 1
        if order is not None:
            origin = await order(self.record)
            self.quorum.check(self.term)
            record = self._opening(origin)
            await self.quorum.commit(record)
            self.record, self.adopting = record, False
            self.probe("epoch", epoch=record.epoch, step=origin.step, checkpoint=record.checkpoint)
        self.saved_step = self.record.saved if self.record else 0
        self.tasks.spawn(self.restoring.watch(), "is a state lost")

    def first_comes(self) -> None:
        """The first replica has come: those who served with it are on their way as well."""
        for each in self._microbatches:
            each.adopt_until = asyncio.get_running_loop().time() + ADOPT_S

    def _opening(self, origin: Origin) -> Record:
        """The record with which the run goes back."""
        return Record(
            ballot=Ballot(self.term, origin.step - 1, 1),
            predecessor=self.record.hash if self.record else "",
            members={},
            gradients={},
            norm=0.0,
            scale=1.0,
            lr=0.0,
            outcome="restored",
            loss=0.0,
            tokens=0,
            fingerprints=origin.fingerprints,
            base=origin.step,
            saved=origin.step,
            checkpoint=origin.checkpoint,
            voters=self.quorum.new_voters(),
        )

    # ---- one step -------------------------------------------------------------------------------

    async def train_step(self) -> StepResult:
        """Train and commit the next step, however many replicas come and go meanwhile.

        Waits as long as some stage has no replica. Raises SupersededError, StageFailedError (a
        microbatch cannot be computed anywhere), StorageError (nothing was committed).
        """
        loop = asyncio.get_running_loop()
        began = self.step_began_at = loop.time()
        step = self.live[0] if self.live else self._begin_step()
        self.averager.begin()
        if self._ahead is not None:
            self._ahead.cancel()  # from here on the step is looked after here
        watching = self._watch(step)
        try:
            while True:
                await self.microbatches_of(step).run(step, lambda: self._all_given(step))
                if await self.admission.hold(step, loop.time() - began):
                    continue
                await self.quorum.void(step.number)
                if not step.complete:
                    continue  # somebody was lost while the trainers were asked
                prepared = await self.averager.run(step)
                if prepared is not None:
                    break
        finally:
            for task in watching:
                task.cancel()
        record = self._make_record(step, prepared)
        await self.quorum.commit(record)
        self.record, self.has_committed = record, True
        self.adopting = self.averaging = False
        self.live.remove(step)
        self.wake.set()  # nothing of a newer step waits for it any more
        self.watch.calm(step.active)
        self.probe("record", step=record.step)
        self._announce_commit(step, record)
        self.last_step_s = loop.time() - began
        self.rebalancing.consider()
        return StepResult(
            record.step,
            record.loss,
            record.norm,
            record.tokens,
            loop.time() - began,
            record=record,
        )

    def _begin_step(self) -> Step:
        number = self.next_step + len(self.live)
        self.router.begin_step()
        step = Step(number, self.plan.num_microbatches, self.pipeline.num_stages, self.router)
        step.tries, step.attempt = self._tries, self.attempt
        before = [name for each in self.live for name in each.active]
        self.live.append(step)
        self.microbatches_of(step).begin(number, before)
        for member in self.members:
            if member.standing is Standing.SERVING and not self.members.can_spare(member):
                if before and self.adopting:
                    continue  # an earlier leader may have begun this step too: see what it counted
                step.admit(member.incarnation, member.stage)
        for stage in range(step.num_stages):
            for name in self.router.replicas(stage):
                # it leaves, or lost its place between two steps
                if not any(name in each.active for each in self.live):
                    self.router.remove(name)
        self.admission.reconcile()
        return step

    def _watch(self, step: Step) -> list[asyncio.Task[None]]:
        return [
            self.tasks.spawn(self.watch.run(step, lambda: self._owing(step)), "watch"),
            self.tasks.spawn(self.watch.listen(step), "listen"),
        ]

    def _all_given(self, step: Step) -> None:
        """All of `step`'s microbatches are given away: the next one's follow them, and its members
        know what they have to wait for before they average."""
        self.averager.begin_early(step)
        following = step.number + 1
        ahead, ends = self.plan.ahead, following >= self.plan.num_steps
        if len(self.live) < ahead.steps_in_flight and not ends and ahead.of(following):
            self._ahead = self.tasks.spawn(self._work_ahead(self._begin_step()), "ahead")

    async def _work_ahead(self, step: Step) -> None:
        """Keep a step complete, or on the way to it, until cancelled."""
        watching = self._watch(step)
        try:
            while True:
                await self.microbatches_of(step).run(step, lambda: None)
                self.wake.clear()
                await self.wake.wait()
        finally:
            for task in watching:
                task.cancel()

    def _owing(self, step: Step) -> Collection[str]:
        """Whom the step waits for."""
        if self.is_averaged(step):
            return self.averager.owing
        return {
            name
            for stage in range(self.pipeline.num_stages)
            for name in self.router.replicas(stage)
            if self.router.outstanding_of(name)
        }

    def grant_slots(self, step: Step) -> int:
        """Give each stage its credits; returns how many microbatches may be under way in all."""
        there = [step.replicas(stage) for stage in range(step.num_stages)]
        if self.fixed_slots is not None:
            given = [self.fixed_slots] * step.num_stages
        else:
            known = [[m for name in names if (m := self.members.get(name))] for names in there]
            held = [[member.slots for member in members] for members in known]
            rate = min(map(self.router.rate, range(step.num_stages)))
            given = slots(held, rate, self.transit.seconds, self.slots)
        for stage, number in enumerate(given):
            self.router.grant(stage, number)
        return min(map(operator.mul, given, map(len, there)), default=0)

    @property
    def in_flight(self) -> list[asyncio.Task[None]]:
        """The microbatches that are under way."""
        return [task for each in self._microbatches for task in each.in_flight.values()]

    # ---- who takes part -------------------------------------------------------------------------

    def expel(self, step: Step | None, replica: str, reason: str) -> None:
        """Void a replica's part of the steps under way, if `step` still is; what it had is issued
        again."""
        reason = brief(reason)
        member = self.members.get(replica)
        if member is not None and member.standing is Standing.SERVING:
            member.standing, member.reason = Standing.EXPELLED, reason
        if step not in self.live:
            return
        parts = [each for each in self.live if replica in each.active]
        if not parts:
            return
        for each in parts:
            self.microbatches_of(each).voided(each.expel(replica, reason))
            self.probe("expelled", step=each.number, replica=replica, reason=reason)
        self.left_out.set()
        self.wake.set()

    def hold_off(self, replica: str) -> None:
        """Leave it out for a while, longer each time: those whom it cannot reach (twins in a round,
        neighbours on a route) would fail with it again and again."""
        member = self.members.get(replica)
        if member is not None:
            loop = asyncio.get_running_loop()
            seconds = HOLD_OFF_S * 2 ** min(member.hold_offs, 5)
            member.hold_offs += 1
            self.watch.judged(replica)
            member.held_off_until = loop.time() + seconds
            loop.call_later(seconds, self.wake.set)

    def differed(self, step: Step | None, replica: str, reason: str) -> None:
        """From most of its twins, or from what it held before. Once may be chance; a machine that
        goes on so (bad memory, say) would have work done again in every step, and is left out."""
        member = self.members.get(replica)
        if member is not None:
            member.differed += 1
            if member.differed > 1:
                self.hold_off(replica)
                self.expel(step, replica, reason)

    def fail(self, error: BaseException) -> None:
        """End the run: the step raises this as soon as it looks."""
        if self.fatal is None:
            self.fatal = (
                error
                if isinstance(error, SwarmError)
                else StageFailedError(f"{type(error).__name__}: {error}")
            )
        self.wake.set()

    def doubt(self, error: CallFailedError) -> None:
        """A replica says that our term is stale. It may lie: only another trainer is believed.

        With one trainer there is nobody to ask, and the replica is what is wrong.
        """
        if error.detail.get("stale") is True and self._doubting is None and not self.quorum.alone:
            self._doubting = self.tasks.spawn(self._ask_trainers(), "is the term stale")
            self._doubting.add_done_callback(self._doubted)

    def _doubted(self, _: asyncio.Task[None]) -> None:
        self._doubting = None

    async def _ask_trainers(self) -> None:
        """Whether another trainer has promised a higher term; the quorum steps down if so."""
        quorum = self.quorum

        async def one(trainer: str) -> None:
            channel = await self.links.channel(trainer, quorum.addresses(trainer))
            answer = await self.watch.ask(
                channel, "prepare", {"term": list(self.term), "disk": quorum.disk_id}
            )
            quorum.heard_of(Vote.unpack(answer.get("vote")).promised)

        others = [trainer for trainer in quorum.trainers if trainer != quorum.me]
        for result in await asyncio.gather(*map(one, others), return_exceptions=True):
            if isinstance(result, SwarmError):
                log.debug("asked whether the term is stale: %s", result)

    # ---- commit ---------------------------------------------------------------------------------

    def _make_record(self, step: Step, prepared: Prepared) -> Record:
        averaged = dict(sorted(prepared.averaged.items()))
        norms = [norm for each in averaged.values() for norm in each.norms]
        norm = math.sqrt(total(norms)) if prepared.finite else math.nan
        return Record(
            ballot=Ballot(self.term, step.number, step.attempt),
            predecessor=self.record.hash if self.record else "",
            members={group.stage: group.members for group in prepared.groups},
            gradients={stage: each.sha256 for stage, each in averaged.items()},
            norm=norm,
            scale=clip_scale(norm, self.plan.clip_norm),
            lr=self.plan.lr(step.number),
            outcome="applied" if prepared.finite else "skipped",
            loss=prepared.loss,
            tokens=sum(self.microbatches_of(step).weights),
            fingerprints=prepared.fingerprints,
            base=self._base_of(step),
            saved=self.saved_step,
            voters=self.quorum.voters,
        )

    def _base_of(self, step: Step) -> int:
        """The step that the term's epoch began with; one may begin without going back, when whoever
        was to open it was stopped."""
        if self.record is None or self.record.epoch < self.term.epoch:
            return step.number
        return self.record.base

    def _announce_commit(self, step: Step, record: Record) -> None:
        self._tries = step.tries
        for hops in step.hops:
            for name in hops:
                member = self.members.get(name or "")
                if member is not None:
                    member.counted += 1
        for member in self.members:
            if member.standing is Standing.SERVING:
                member.step = record.step + 1
            self.tasks.spawn(self.admission.send_commit(member, record), "commit")

    def tell(self, replica: str, method: str, body: dict[str, Any]) -> None:
        """Order something whose answer does not matter."""

        async def order() -> None:
            channel = self.links.open_channel(replica)
            if channel is not None:
                try:
                    await channel.call(method, body)
                except SwarmError as error:
                    log.debug("%s to %s: %s", method, replica[-8:], error)

        self.tasks.spawn(order(), method)

    def traffic(self, stage: int) -> Traffic:
        """What a stage's replicas have sent over its two boundaries so far."""
        traffic = self._gone.get(stage, Traffic())
        for member in self.members.of_stage(stage):
            traffic = traffic.plus(member.traffic)
        return traffic

    # ---- coming and going -----------------------------------------------------------------------

    def on_channel_closed(self, channel: Channel) -> None:
        """A replica's connection has ended: its part of the step is void at once."""
        newer = self.links.open_channel(channel.incarnation)
        if newer is not None and newer.ended is None:
            return  # it came back before its former connection was found dead
        member = self.members.by_name.pop(channel.incarnation, None)
        if member is not None:
            gone = self._gone.get(member.stage, Traffic())
            self._gone[member.stage] = gone.plus(member.traffic)
            self.expel(self.step, channel.incarnation, str(channel.ended))
            self.router.remove(channel.incarnation)
            self.admission.forget(channel.incarnation)
            self.watch.forget(channel.incarnation)
            self.rebalancing.left(member)
            self.probe("left", replica=channel.incarnation, reason=brief(str(channel.ended)))
            self.wake.set()

    async def aclose(self) -> None:
        await self.tasks.aclose()

    def abort(self) -> None:
        self.tasks.abort()
