"""How replicas come into a run and back into a step, from the leader's side.

A joiner is given a stage and the addresses of those who have its state. It says `ready` when its
state is that of the current step (or learns how far behind it is), and takes part only after a
`reset` has confirmed an empty ledger. The same reset takes back a replica that was expelled from
the step and lives. Nobody is admitted while the step is being averaged.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from peer.calls import count, names
from peer.measure import StageFacts
from peer.members import MAX_MEMBERS, Member, Offer, Standing, Traffic
from peer.slots import read_slots
from swarm.agreement import agree, decided
from swarm.errors import RefusedError, SwarmError, WireError
from swarm.net.channel import CallFailedError, Channel, Message, Method
from swarm.net.link import MAX_ADDRESSES, addresses_of
from swarm.step import Step
from swarm.terms import Record
from swarm.wire.frames import no_tensors

if TYPE_CHECKING:
    from peer.leader import Leader

log = logging.getLogger(__name__)
MAX_ADDRESS_CHARS, MAX_ADDRESSES_CHARS = 200, 1300  # of a member's address, of all it has
MAX_NOTED = 8  # donors of wrong bytes in one `ready`
MAX_TAKES = 3  # of the same member within one wait
HOLD_EVERY = 10  # steps; one of so many may wait for a joiner
ODD = "this machine's optimizer steps round differently from the run's others"


class Admission:
    """The membership half of a `Leader`."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self.finished = False
        # Replicas this term has asked what they had counted in a step before it.
        self._met: set[tuple[str, int]] = set()
        self._resetting: dict[tuple[str, int], Member] = {}  # by name, and which step (`_place_of`)
        self._taken_in = asyncio.Event()  # one of them is, or will not be now
        self._hold_from = 0
        self._marks: dict[tuple[int, int], dict[str, str]] = {}  # fingerprints after (step, stage)

    def methods(self) -> dict[str, Method]:
        """What replicas may call at the leader."""
        return {
            "join": Method(self._join, no_tensors),
            "ready": Method(self._ready, no_tensors),
            "leave": Method(self._leave, no_tensors),
            **self.leader.restoring.methods(),
        }

    async def _join(self, channel: Channel, message: Message) -> Message:
        """`{stage | None, addresses, …}` -> stage, why, and the position."""
        leader, body = self.leader, message.body
        stage = body.get("stage")
        if stage is not None and not 0 <= count(stage) < leader.pipeline.num_stages:
            raise CallFailedError(
                "refused",
                f"the run's stages are 0 to {leader.pipeline.num_stages - 1}, not {stage}",
                fatal=True,
            )
        addresses = body.get("addresses")
        if not isinstance(addresses, list) or len(addresses) > MAX_ADDRESSES:
            raise WireError("a join without addresses")
        slots = read_slots(body.get("slots", 1))
        member, why = leader.members.get(channel.incarnation), ""
        if member is None:
            numerics = str(body.get("numerics", ""))[:64]
            self._check_numerics(channel.incarnation, numerics)
            if len(leader.members.by_name) >= MAX_MEMBERS:
                full = f"the run has {MAX_MEMBERS} replicas, which is all it can take"
                raise CallFailedError("refused", full, fatal=False)
            offer = Offer.read(body, channel.peer)
            if stage is None:
                stage, why = self._place(channel.incarnation, offer)
            member = Member(channel.incarnation, stage, _usable(channel.peer, addresses))
            member.numerics = numerics
            member.offer, member.joined_at = offer, asyncio.get_running_loop().time()
            if not leader.members.by_name:
                leader.first_comes()
            leader.members.by_name[channel.incarnation] = member
            leader.probe("joined", replica=member.incarnation, stage=member.stage)
            self._send_roster()
            self._send_odd_away()
        member.slots = slots
        member.device = str(body.get("device", ""))[:40]
        return Message({"stage": member.stage, "why": why, **self._position(member)})

    @property
    def _named(self) -> set[str]:
        """Who took part in the newest commit."""
        record = self.leader.record
        return {name for names in record.members.values() for name in names} if record else set()

    def _check_numerics(self, incarnation: str, numerics: str) -> None:
        """Whoever holds the run's state comes back in any case: it was taken in before. A newcomer
        whose optimizer rounds differently is refused, for good once that is certain."""
        named = self._named
        wanted, certain = self.leader.members.numerics(named)
        if not self.leader.same_numerics or incarnation in named or wanted in (None, numerics):
            return
        raise CallFailedError("refused", ODD, fatal=certain)

    def _send_odd_away(self) -> None:
        """Newcomers that were here before those who hold the state, and round differently."""
        named = self._named
        wanted, _ = self.leader.members.numerics(named)
        for each in self.leader.members if self.leader.same_numerics else ():
            if each.incarnation not in named and each.numerics != wanted:
                self.leader.links.end_channels(each.incarnation, ODD)

    def _place(self, incarnation: str, offer: Offer) -> tuple[int, str]:
        placement = self.leader.rebalancing.place(incarnation, offer)
        if placement.stage is None:
            raise CallFailedError("refused", placement.reason, fatal=True)
        return placement.stage, placement.reason

    async def _ready(self, channel: Channel, message: Message) -> Message:
        """`{step, …}`: the replica holds the state of that step. Answers `{ready, …position}`."""
        leader = self.leader
        member = leader.members.get(channel.incarnation)
        if member is None:
            raise RefusedError("join first")
        slots = read_slots(message.body.get("slots", member.slots))
        member.step = count(message.body.get("step"))
        member.slots = slots  # as many as fit beside its stage, which it did not know at `join`
        noted = message.body.get("noted")
        self._note_donors(member, names(noted if isinstance(noted, list) else [])[:MAX_NOTED])
        # One that collects each gradient as it is committed may be one commit behind: it is told.
        member.following = message.body.get("following") is True
        if member.facts is None:
            member.facts = StageFacts.read(message.body.get("facts"))
        # So many steps of another epoch say nothing: that state is given up.
        epoch = leader.record.epoch if leader.record else 0
        here = count(message.body.get("epoch", 0)) == epoch
        member.confirmed = member.step if here else 0
        ready = here and member.step + member.following >= leader.next_step
        if ready and member.standing is Standing.JOINING:
            member.standing = Standing.READY
            if member.step and not member.fetch_s:
                member.fetch_s = asyncio.get_running_loop().time() - member.joined_at
            leader.wake.set()
        return Message({"ready": ready, **self._position(member)})

    def _note_donors(self, member: Member, donors: Sequence[str]) -> None:
        """Of whom a member can have had wrong bytes, once each: anybody may say so of anybody, and
        the events are the newest so many."""
        for donor in donors:
            other = self.leader.members.get(donor)
            gives = other is not None and other.stage == member.stage and other is not member
            if (gives or donor == self.leader.links.incarnation) and donor not in member.noted:
                member.noted.add(donor)
                self.leader.probe("bad_chunk", replica=donor, by=member.incarnation)

    async def _leave(self, channel: Channel, message: Message) -> Message:
        """The replica wants to go: `finish` follows the step's commit, and it has no part in the
        next one. Until that commit it has to stay for what it has counted, so it goes on working
        if this step should end well `within_s`; otherwise it gets no new work.

        The last one of its stage stays until another serves (or its own patience is over): the
        stage's newest state would be lost with it.
        """
        leader = self.leader
        member = leader.members.get(channel.incarnation)
        if member is None or self.finished:
            return Message({"now": True, "reason": ""})
        spared = leader.members.may_go(member)
        is_last = leader.next_step >= leader.plan.num_steps  # no commit will come
        if spared and (is_last or member.standing is not Standing.SERVING):
            member.leaving = member.released = True
            return Message({"now": True, "reason": ""})
        within_s = message.body.get("within_s")
        if isinstance(within_s, float) and 0 <= within_s < math.inf:
            member.leave_by = asyncio.get_running_loop().time() + within_s
        if not member.leaving:
            member.leaving = True
            leader.probe("leaving", replica=member.incarnation)
        reason = "this step's commit" if spared else f"another replica of stage {member.stage}"
        return Message({"now": False, "reason": reason})

    def _position(self, member: Member) -> dict[str, Any]:
        """What somebody needs to catch up."""
        leader = self.leader
        holders = leader.members.of_stage(member.stage, Standing.SERVING, Standing.READY)
        donors = [each.incarnation for each in holders if each is not member]
        if leader.restoring.serves(member.stage):
            donors.append(leader.links.incarnation)
        return {
            "step": leader.next_step,
            "term": list(leader.term),
            "record": leader.record.pack() if leader.record else b"",
            "donors": donors,
            "roster": leader.members.roster(),
            "finished": self.finished,
        }

    def _send_roster(self) -> None:
        """Somebody new has come. One that asks again is told by the answer, and others nothing: a
        small call would cost a roster for each of them."""
        roster = self.leader.members.roster()
        for member in self.leader.members:
            self.leader.tell(member.incarnation, "roster", {"roster": roster})

    def reconcile(self) -> None:
        """Take into the steps under way whoever can be: called whenever something may have changed.

        Not into the one that is averaged.
        """
        leader, now = self.leader, asyncio.get_running_loop().time()
        for step in leader.live:
            if leader.is_averaged(step):
                continue
            for member in leader.members:
                place = self._place_of(member, step)
                if self._resetting.get(place) is member or not self._waits(member, step):
                    continue
                if member.held_off_until <= now or not step.replicas(member.stage):
                    self._resetting[place] = member
                    taking = self._take_in(member, step)
                    leader.tasks.spawn(taking, f"admit {member.incarnation[-8:]}")

    def _place_of(self, member: Member, step: Step) -> tuple[str, int]:
        """One reset at a time of each part that a replica has."""
        return member.incarnation, step.number % self.leader.plan.ahead.steps_in_flight

    def _waits(self, member: Member, step: Step) -> bool:
        if self.leader.members.can_spare(member) or member.incarnation in step.active:
            return False
        # One that serves may take part in another step, or could be spared when this one began.
        return member.standing is not Standing.JOINING

    async def hold(self, step: Step, worked_s: float) -> bool:
        """Before averaging: wait for those being taken in who came too late for a step before.

        At most once in `HOLD_EVERY` steps, and no longer than the step has taken so far. True when
        it has waited; then the step may have changed.
        """
        late = {place: each for place, each in self._resetting.items() if each.passed_over}
        if not late or step.number < self._hold_from:
            return False
        self._hold_from = step.number + HOLD_EVERY
        self.leader.probe("hold", step=step.number)
        try:
            async with asyncio.timeout(worked_s):
                for _ in range(MAX_TAKES):
                    while any(self._resetting.get(place) is late[place] for place in late):
                        self._taken_in.clear()
                        await self._taken_in.wait()
                    self.reconcile()  # who was being taken into the step before, into this one
        except TimeoutError:
            log.debug("step %d waits no longer for %d", step.number, len(late))
        return True

    async def _take_in(self, member: Member, step: Step | None = None) -> None:
        """Into `step`, or the newest: a reset, or what it has counted under an earlier leader."""
        leader, step = self.leader, step or self.leader.step
        if step is None:
            return
        try:
            channel = leader.links.open_channel(member.incarnation)
            if channel is None or step not in leader.live:
                return
            if leader.record is not None and member.step < leader.next_step:
                await self.send_commit(member, leader.record)
            if member.step != leader.next_step or not self._waits(member, step):
                return
            if step not in leader.live:
                return
            met = (member.incarnation, step.number)
            if leader.microbatches_of(step).adopting and met not in self._met:
                self._met.add(met)
                if await self._adopt(member, step, channel):
                    return
            body = {
                "term": list(leader.term),
                "step": step.number,
                "number": step.next_try(),
            }
            answer = (await channel.call("reset", body)).body
            if count(answer.get("step")) != step.number:
                raise WireError("a reset of another step")
            if self._may_enter(member, step):
                estimate_s = member.facts.service_s if member.facts is not None else None
                step.admit(member.incarnation, member.stage, estimate_s)
                self._admitted(member, step)
        except CallFailedError as error:
            log.debug("no reset of %s: %s", member.incarnation[-8:], error)
            leader.doubt(error)
            if error.kind == "failed":
                leader.microbatches.cannot_reset(member, error.message)
                return
            # It does not stand where it is thought to: show it the record, and it will catch up.
            member.step = 0
            if leader.record is not None:
                await self.send_commit(member, leader.record)
        except SwarmError as error:
            log.debug("could not take in %s: %s", member.incarnation[-8:], error)
        finally:
            if self._resetting.get(self._place_of(member, step)) is member:
                del self._resetting[self._place_of(member, step)]
            member.passed_over = member.standing is Standing.READY
            self._taken_in.set()

    async def _adopt(self, member: Member, step: Step, channel: Channel) -> bool:
        """In the step an earlier leader began: what a replica has counted stands, if it can."""
        leader = self.leader
        body = {"term": list(leader.term), "step": step.number}
        answer = await leader.watch.ask(channel, "inspect", body)
        if answer.get("step") != step.number or not self._may_enter(member, step):
            return False
        counted, losses = self._read_work(answer, step)
        if not counted:
            return False  # a reset costs nothing, and leaves nothing that no ledger tells of
        if not step.adopt(member.incarnation, member.stage, counted):
            return False
        last = member.stage == leader.pipeline.num_stages - 1  # nobody else knows a loss
        leader.microbatches_of(step).adopted(step, losses if last else {})
        self._admitted(member, step)
        return True

    @staticmethod
    def _read_work(answer: Mapping[str, Any], step: Step) -> tuple[list[int], dict[int, float]]:
        """What an answer to `inspect` says was counted, and the losses. Raises WireError."""
        counted, losses = answer.get("counted"), answer.get("losses")
        if not isinstance(counted, list) or not isinstance(losses, dict):
            raise WireError("an inspection that makes no sense")
        indices = sorted({count(index) for index in counted})
        if indices and indices[-1] >= step.num_microbatches:
            raise WireError("it has counted what does not exist")
        known = {str(index): index for index in indices}
        return indices, {
            known[name]: loss
            for name, loss in losses.items()
            if name in known and isinstance(loss, float)
        }

    def _may_enter(self, member: Member, step: Step) -> bool:
        leader = self.leader
        known = leader.members.get(member.incarnation) is member
        return known and step in leader.live and not leader.is_averaged(step)

    def _admitted(self, member: Member, step: Step) -> None:
        if step is self.leader.step:  # it goes on in the next one
            member.standing, member.reason, member.failures = Standing.SERVING, "", 0
        self.leader.probe("admitted", step=step.number, replica=member.incarnation)
        self.leader.rebalancing.admitted(member)
        self.leader.wake.set()

    async def send_commit(self, member: Member, record: Record) -> None:
        """Tell one member of a commit, and note where it stands afterwards."""
        leader = self.leader
        channel = leader.links.open_channel(member.incarnation)
        if channel is None or member.standing is Standing.JOINING:
            return
        body = {"record": record.pack(), "term": list(leader.term)}
        try:
            answer = (await channel.call("commit", body)).body
            stands = count(answer.get("step"))
            traffic = Traffic.read(answer)
        except WireError as error:
            self._start_anew(member, f"answers a commit with nonsense: {error}")
            return
        except SwarmError as error:
            log.debug("commit to %s: %s", member.incarnation[-8:], error)
            if isinstance(error, CallFailedError):
                leader.doubt(error)
            return
        member.step, member.traffic = stands, traffic
        member.confirmed = stands
        if member.step == record.step + 1:
            self._compare(member, record, answer)
            # One that asked after the next step began has a part in it, and goes at its commit.
            engaged = any(member.incarnation in each.active for each in leader.live)
            if member.leaving and not engaged and leader.members.may_go(member):
                member.released = True
                leader.tell(member.incarnation, "finish", {})
        elif member.step <= record.step:
            self._start_anew(member, "did not follow the commit")
        elif member.step > leader.next_step:
            self._start_anew(member, "is ahead of the run")
        leader.wake.set()

    def _start_anew(self, member: Member, reason: str) -> None:
        """It must fetch the state, then say ready."""
        self.leader.expel(self.leader.step, member.incarnation, reason)
        member.standing = Standing.JOINING

    def _compare(self, member: Member, record: Record, answer: Mapping[str, Any]) -> None:
        """Replicas of a stage at the same step hold the same bits (I5), or one must start anew.

        Decided as soon as enough have answered; what is not decided when the next step is averaged
        is decided then, and rides in its record.
        """
        leader, step = self.leader, record.step
        marks = self._marks.setdefault((step, member.stage), {})
        marks[member.incarnation] = str(answer.get("fingerprint"))[:64]
        for old in [each for each in self._marks if each[0] < step - 1]:
            del self._marks[old]
        there = [each.incarnation for each in leader.members.of_stage(member.stage)]
        expected = {*record.members.get(member.stage, ())} & {*there} | marks.keys()
        if decided(marks, len(expected)):
            verdict = agree(marks, there)
            for name in verdict.differing:
                del marks[name]
                self.diverged(name, step, tie=verdict.tie)

    def diverged(self, replica: str, step: int, *, tie: bool) -> None:
        """Its state after `step` is not its stage's: its part is void, and it fetches the state."""
        leader, current = self.leader, self.leader.step
        live = list(leader.live)
        reason = "its state differs from its twin's" if tie else "its state differs"
        leader.probe("diverged", step=step, replica=replica)
        member = leader.members.get(replica)
        tainted = any(replica in hops for each in live for hops in each.hops)
        leader.expel(current, replica, reason)
        if member is not None:
            member.standing, member.reason = Standing.JOINING, reason
            if not tie:  # or it is a guess which of two is wrong
                leader.differed(current, replica, reason)
        if tainted:
            # What it sent to its neighbours was wrong, and is in what they have counted.
            for name in sorted({name for each in live for name in each.active}):
                leader.expel(current, name, "the step starts anew")
        leader.tell(replica, "refetch", {"term": list(leader.term)})

    def fingerprint(self, step: int, stage: int) -> str | None:
        """What the stage agrees on as its state after `step`, as far as is known."""
        marks = self._marks.get((step, stage))
        if not marks:
            return None
        return agree(marks, [each.incarnation for each in self.leader.members]).agreed

    def forget(self, incarnation: str) -> None:
        for place in [each for each in self._resetting if each[0] == incarnation]:
            del self._resetting[place]


def _usable(peer: str, addresses: Sequence[object]) -> tuple[str, ...]:
    """Of a peer's own: they go to all others, who dial them, in one header with those of
    everybody else."""
    texts = [each for each in addresses if isinstance(each, str) and len(each) <= MAX_ADDRESS_CHARS]
    own = list(dict.fromkeys(addresses_of(peer, texts)))
    ends = accumulate(map(len, own))
    return tuple(each for each, end in zip(own, ends, strict=True) if end <= MAX_ADDRESSES_CHARS)
