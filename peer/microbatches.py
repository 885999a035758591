"""The leader's half of a step in which microbatches go round: issue, drive, resolve what fails.

What to issue is decided by `swarm.step`, along which route by `swarm.routing`; here the calls are
made and what their failure means is found out. Whoever is suspected is asked for a *fence* (not
counted there, and never will be at this try) or expelled, and only then does the microbatch go to
somebody else (DESIGN, I3). What comes from a replica may be anything: it is checked here, and what
makes no sense costs that replica its part of the step, never the leader its life.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from peer.calls import FIELDS_CODEC, MicrobatchCall
from peer.measure import MAX_SERVICE_S
from peer.members import Member
from peer.training import divisor_of
from swarm.errors import StageFailedError, StreamClosedError, SwarmError
from swarm.names import brief
from swarm.net.channel import CallFailedError
from swarm.routing import FailureKind
from swarm.step import Issue, Step
from swarm.wire.codecs import WireTensor, encode

if TYPE_CHECKING:
    from peer.leader import Leader

log = logging.getLogger(__name__)
MAX_FAILURES = 8  # of one microbatch's computation in a row: then it is not the replicas' fault
MAX_RAISED = 3  # by one replica at one microbatch, if its stage has others
AVOID_PAIR_S = 30.0
ADOPT_S = 3.0
STEP_SLACK = 2.0  # a step may take so many times as long as the one before it
RETRY_S = 0.05


class Microbatches:
    """The microbatches of a step under way of a `Leader`, one step after another."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self.in_flight: dict[int, asyncio.Task[None]] = {}
        self.losses: dict[int, float] = {}
        self.weights: list[int] = []
        self.adopting = False  # an earlier leader may have begun this step
        self.adopt_until = 0.0
        self._expected: set[str] = set()  # who may hold work of it then
        self._wires: list[list[WireTensor]] = []
        self._failures: dict[int, int] = {}
        self._raised: dict[int, list[str]] = {}  # microbatch -> where its computation raised
        self._tellers: dict[int, set[str]] = {}  # and by way of whom that was told
        self._nonfinite: dict[int, list[str]] = {}  # microbatch -> who made no number of it
        self._let_through: set[int] = set()  # because nobody of a stage does better
        self._not_before: dict[int, float] = {}
        self._fields = sorted(leader.pipeline.batch_spec)

    def begin(self, number: int, before: Collection[str] = ()) -> None:
        """Draw the batches of step `number`. `before` take part in an older one under way."""
        leader = self.leader
        self.adopting = leader.adopting
        members = leader.record.members.values() if leader.record is not None else ()
        self._expected = {name for names in members for name in names}
        if before:
            # Whoever else has counted some of it may not have been needed for that step.
            self._expected |= set(before)
            self.adopt_until = asyncio.get_running_loop().time() + ADOPT_S
        elif not self._expected:
            self._expected = {"whoever served before the first commit"}
        batches = [leader.batches.batch(number, i) for i in range(leader.plan.num_microbatches)]
        self.weights = [leader.pipeline.weight(batch) for batch in batches]
        self._wires = [self.encode(batch) for batch in batches]
        self.losses.clear()
        self._failures.clear()
        self._raised.clear()
        self._tellers.clear()
        self._nonfinite.clear()
        self._let_through.clear()
        self._not_before.clear()

    def encode(self, batch: Mapping[str, np.ndarray]) -> list[WireTensor]:
        """A microbatch's fields as they ride in a call."""
        tensors = [torch.from_numpy(np.ascontiguousarray(batch[name])) for name in self._fields]
        return [encode(tensor, FIELDS_CODEC) for tensor in tensors]

    async def run(self, step: Step, issued: Callable[[], None]) -> None:
        """Until every microbatch is counted by one replica per stage.

        `issued()` is called whenever none is left to be given away.
        """
        leader, loop = self.leader, asyncio.get_running_loop()
        while not step.complete:
            if leader.fatal is not None:
                raise leader.fatal
            leader.wake.clear()
            now = loop.time()
            if not step.empty_stages() and not self._still_gathering(step, now):
                limit = leader.grant_slots(step)
                older = any(each.waiting() for each in leader.live if each.number < step.number)
                for index in step.waiting():
                    # Those begun before may hold slots that the others wait for: they go first. So
                    # do those of an older step, which is the next to be committed.
                    begun = sum(len(each.begun) for each in leader.live)
                    if index not in step.begun and (older or begun >= limit):
                        continue
                    if index >= leader.plan.ahead.of(step.number) and step is not leader.live[0]:
                        continue  # it is computed with what the commit before makes
                    if self._not_before.get(index, 0.0) > now or index in self.in_flight:
                        continue
                    issue = step.issue(index, now, self._unwanted(step, index))
                    if issue is not None:
                        self._start(step, issue)
            if not step.waiting():
                issued()
            leader.admission.reconcile()
            await leader.wake.wait()
        issued()

    def _still_gathering(self, step: Step, now: float) -> bool:
        """Whether to wait for replicas that may hold work of this step under an earlier leader.

        Whoever comes later than this is taken in empty: exact all the same, only dearer.
        """
        if not self.adopting or now >= self.adopt_until or self._expected <= step.active.keys():
            return False
        asyncio.get_running_loop().call_at(self.adopt_until, self.leader.wake.set)
        return True

    def adopted(self, step: Step, losses: Mapping[int, float]) -> None:
        """A replica came with work of an earlier leader; what is complete by now is done."""
        for index, loss in losses.items():
            if 0 <= index < step.num_microbatches:
                self.losses[index] = loss
        for index in sorted(self.losses):
            step.confirm(index)
        self.leader.wake.set()

    def voided(self, indices: list[int]) -> None:
        """These lost a hop: nobody waits for their calls any more, and they are issued again."""
        for index in indices:
            self.losses.pop(index, None)
            task = self.in_flight.pop(index, None)
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def _unwanted(self, step: Step, index: int) -> list[str]:
        """Who does not get `index`: who takes part in another step only; and, if its stage can do
        without, who is silent, about to leave without waiting for the commit, or failed at it."""
        leader = self.leader
        ends_at = leader.step_began_at + STEP_SLACK * leader.last_step_s
        leaving = [member for member in leader.members if member.leaving]
        unwanted = {each.incarnation for each in leaving if each.leave_by <= ends_at}
        unwanted |= self.leader.watch.suspects
        unwanted.update(self._raised.get(index, ()), self._nonfinite.get(index, ()))
        if self._failures.get(index, 0) > 1:
            unwanted.update(self._tellers.get(index, ()))
        elsewhere = {name for each in leader.live for name in each.active} - step.active.keys()
        return [
            *sorted(elsewhere),
            *(
                name
                for name in sorted(unwanted & step.active.keys())
                if any(other not in unwanted for other in step.replicas(step.active[name]))
            ),
        ]

    # ---- one try --------------------------------------------------------------------------------

    def _start(self, step: Step, issue: Issue) -> None:
        leader = self.leader
        leader.averager.give_up(step)  # its members were told who counts what
        task = leader.tasks.spawn(self._drive(step, issue), f"microbatch {issue.index}")
        self.in_flight[issue.index] = task

        def ended(done: asyncio.Task[None]) -> None:
            if self.in_flight.get(issue.index) is done:
                del self.in_flight[issue.index]
            if not done.cancelled() and (error := done.exception()) is not None:
                leader.fail(error)
            leader.wake.set()

        task.add_done_callback(ended)

    async def _drive(self, step: Step, issue: Issue) -> None:
        """One try of one microbatch along its route, and what follows from its failure."""
        leader, loop = self.leader, asyncio.get_running_loop()
        began = loop.time()
        leader.probe("issue", step=step.number, index=issue.index, route=issue.route)
        for replica in issue.route:
            leader.router.started(replica)
            leader.watch.gave_work(replica)
        try:
            answer = await self._call(step, issue)
        except CallFailedError as error:
            hop = error.detail.get("hop")
            hop = hop if isinstance(hop, int) and 0 <= hop < len(issue.route) else 0
            leader.doubt(error)
            await self._resolve(step, issue, hop, error.kind, error.message)
        except SwarmError as error:
            await self._resolve(step, issue, 0, "unreachable", str(error))
        else:
            self._counted(step, issue, answer, loop.time() - began)
        finally:
            for replica in issue.route:
                leader.router.finished(replica)

    async def _call(self, step: Step, issue: Issue) -> Mapping[str, Any]:
        """The answer of the route. Raises CallFailedError of kind "timeout" when it is overdue."""
        leader = self.leader
        call = MicrobatchCall(
            leader.term,
            step.number,
            issue.index,
            issue.try_,
            step.attempt,
            issue.route,
            0,
            divisor_of(self.weights),
            issue.replay,
            issue.index in self._let_through,
        )
        channel = await leader.links.channel(issue.route[0])
        tensors = self._wires[issue.index]
        leader.sent_bytes += sum(tensor.meta.nbytes for tensor in tensors)
        pending = asyncio.ensure_future(channel.call("microbatch", call.body(), tensors))
        pending.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
        waits = 1.0
        try:
            while True:
                limit_s = leader.watch.overdue_s(issue.route) * waits
                done, _ = await asyncio.wait({pending}, timeout=limit_s)
                if done:
                    return pending.result().body
                waits *= 2
                hop = await leader.watch.holder(step, issue)
                if hop is not None and not pending.done():
                    what = f"no answer within {limit_s:.0f} s"
                    raise CallFailedError("timeout", what, hop=hop)
        finally:
            pending.cancel()

    def _counted(self, step: Step, issue: Issue, body: Mapping[str, Any], elapsed_s: float) -> None:
        leader, loss = self.leader, body.get("loss")
        if not isinstance(loss, float):
            # Every hop checks what the next one answers, so this is the first one's own doing.
            leader.expel(step, issue.route[0], "answers a microbatch without a loss")
            step.give_back(issue)
            return
        if not step.acknowledge(issue):
            step.give_back(issue)
            return
        self.losses[issue.index] = loss
        self._failures.pop(issue.index, None)
        for replica in issue.route:
            leader.watch.heard(replica)
        timings = [] if issue.replay else _timings(body, len(issue.route))
        for replica, timing in zip(issue.route, timings, strict=False):
            if timing is not None:
                leader.router.observe(replica, timing[0] + timing[1])
        known = [timing for timing in timings if timing is not None]
        if len(known) == len(issue.route):
            leader.transit.note(elapsed_s, known)
        leader.probe("acknowledged", step=step.number, index=issue.index, route=issue.route)

    # ---- what failed ----------------------------------------------------------------------------

    async def _resolve(self, step: Step, issue: Issue, hop: int, kind: str, why: str) -> None:
        """A try failed at `hop`: fence the suspect or expel it, then the microbatch may go on."""
        leader, loop = self.leader, asyncio.get_running_loop()
        suspect, why = issue.route[hop], brief(why)
        failures = self._failures[issue.index] = self._failures.get(issue.index, 0) + 1
        leader.probe("failed", step=step.number, index=issue.index, suspect=suspect, why=why)
        if kind == "failed":
            self._note_raised(step, issue, hop, why)
        elif kind == "nonfinite":
            self._note_nonfinite(step, issue, hop)
        if suspect in step.active:
            what: FailureKind = "timeout" if kind == "timeout" else "error"
            leader.router.failed(suspect, what, loop.time())
            await self._fence_or_expel(step, issue, suspect, why)
            if kind == "failed" and failures > 1:  # once it costs the stage's own work alone
                for teller in self._others_may_tell(step, issue, hop):
                    await self._fence_or_expel(step, issue, teller, why)
            if kind == "unreachable" and hop > 0 and suspect in step.active:
                # It answers us but not its upstream: keep the two apart, blame neither.
                upstream = issue.route[hop - 1]
                leader.router.avoid_pair(upstream, suspect, loop.time() + AVOID_PAIR_S)
                if suspect in step.hops[issue.index] and upstream in step.active:
                    await self._fence_or_expel(step, issue, upstream, why)
                if failures > 1:
                    self._part(step, issue.index, hop, upstream, suspect)
        step.give_back(issue)
        delay = min(RETRY_S * 2 ** min(failures - 1, 6), 2.0) if failures > 1 else 0.0
        self._not_before[issue.index] = loop.time() + delay
        loop.call_later(delay, leader.wake.set)

    def _note_raised(self, step: Step, issue: Issue, hop: int, why: str) -> None:
        """A computation raised. Everybody of the stage failed, again and again: the run ends.

        One that keeps failing where others may not is left out: it may be broken, or lie.
        """
        leader, suspect = self.leader, issue.route[hop]
        raised = self._raised.setdefault(issue.index, [])
        raised.append(suspect)
        tellers = self._tellers.setdefault(issue.index, set())
        tellers.update(issue.route[:hop])
        there = step.replicas(hop)
        told_by_all = all(
            len(before) == 1 or tellers.issuperset(before)
            for before in map(step.replicas, range(hop))
        )
        if len(raised) >= MAX_FAILURES and set(there) <= set(raised) and told_by_all:
            what = f"stage {hop} cannot compute microbatch {issue.index}: {why}"
            raise StageFailedError(what)
        if raised.count(suspect) >= MAX_RAISED and set(there) - set(raised):
            leader.hold_off(suspect)
            leader.expel(step, suspect, f"fails again and again: {why}")

    @staticmethod
    def _others_may_tell(step: Step, issue: Issue, hop: int) -> list[str]:
        """Those before `hop` who hold the microbatch and have twins: what was told by way of them
        may be a lie, so that the next try goes by way of others."""
        held = zip(issue.route[:hop], step.hops[issue.index], strict=False)
        return [
            replica
            for stage, (replica, holder) in enumerate(held)
            if replica == holder and len(step.replicas(stage)) > 1
        ]

    def _note_nonfinite(self, step: Step, issue: Issue, hop: int) -> None:
        """A replica made of numbers what is none. If everybody of its stage does, and one that is
        alone does so twice, it is the data's or the model's doing, and the step's outcome."""
        suspect, there = issue.route[hop], step.replicas(hop)
        tried = self._nonfinite.setdefault(issue.index, [])
        tried.append(suspect)
        if set(there) <= set(tried) and (len(there) > 1 or tried.count(suspect) > 1):
            self._let_through.add(issue.index)

    def _part(self, step: Step, index: int, hop: int, upstream: str, suspect: str) -> None:
        """Two that are apart, and those of them that have counted `index` stay on its route.

        Where that leaves no other way around, one of them has to start anew: the one that cannot
        reach more, provided that its stage can do without it.
        """
        leader, now = self.leader, asyncio.get_running_loop().time()

        def apart(replica: str, stage: int) -> list[bool]:
            return [leader.router.apart(replica, other, now) for other in step.replicas(stage)]

        stays = [name for name in (suspect, upstream) if step.holds(index, name)]
        opposite = {suspect: hop - 1, upstream: hop}
        if len(stays) == 1 and not all(apart(stays[0], opposite[stays[0]])):
            return
        stays.sort(key=lambda name: -sum(apart(name, opposite[name])))
        for name in stays:
            if len(step.replicas(step.active[name])) > 1:
                leader.hold_off(name)
                leader.expel(step, name, "cannot reach its neighbours")
                return

    def cannot_reset(self, member: Member, why: str) -> None:
        """Its reset raised there. Raised again and again, and nobody else there: the run ends."""
        leader = self.leader
        member.failures += 1
        alone = leader.step is not None and not leader.step.replicas(member.stage)
        if member.failures >= MAX_FAILURES and alone:
            leader.fail(StageFailedError(f"stage {member.stage} cannot begin its step: {why}"))
        asyncio.get_running_loop().call_later(RETRY_S * member.failures, leader.wake.set)

    async def _fence_or_expel(self, step: Step, issue: Issue, suspect: str, why: str) -> None:
        leader = self.leader
        if not step.is_open(issue):
            return  # issued again: who knows the newer try cannot be fenced from this one
        body = {
            "term": list(leader.term),
            "step": step.number,
            "index": issue.index,
            "try": issue.try_,
        }
        try:
            channel = leader.links.open_channel(suspect)
            if channel is None:
                raise StreamClosedError("no connection to it")
            answer = await leader.watch.ask(channel, "fence", body)
        except CallFailedError as error:
            leader.doubt(error)
            leader.expel(step, suspect, f"{why}; it answers: {error.message}")
            return
        except SwarmError as error:
            found = brief(str(error))
            leader.expel(step, suspect, why if found == why else f"{why}; {found}")
            return
        if answer.get("fenced") is True:
            step.fenced(issue, suspect)
        elif step.is_open(issue) and answer.get("reason") != "counted":
            leader.expel(step, suspect, f"{why}; {answer.get('reason')!s}")


def _timings(body: Mapping[str, Any], num_hops: int) -> list[tuple[float, float, float] | None]:
    """Per hop the seconds of forward, backward and waiting; None where they make no sense."""
    timings = body.get("timings")
    if not isinstance(timings, list) or len(timings) != num_hops:
        return []

    def checked(timing: object) -> tuple[float, float, float] | None:
        match timing:
            case [float(forward_s), float(backward_s), float(waited_s)]:
                found, served_s = (forward_s, backward_s, waited_s), forward_s + backward_s
                if min(found) >= 0 and served_s > 0 and served_s + waited_s < MAX_SERVICE_S:
                    return found
        return None

    return [checked(timing) for timing in timings]
