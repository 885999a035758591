"""A trainer's life: stand by while another leads, lead when nobody does, step down when succeeded.

The leader tells the other trainers that it leads; whoever has not heard so for its lease tries to
win a term. That only decides who *tries*: what is safe is the quorum's business, and a wrong early
try costs time alone. Trainers named earlier in the run config try earlier, so that they rarely
collide.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from peer.calls import count
from peer.finding import RETRY_S
from peer.leader import Leader
from peer.quorum import NO_MAJORITY, REACH_S, Quorum, SupersededError
from peer.restoring import AwayError, GoBack, Order, StandAside
from swarm.errors import DataError, RefusedError, SwarmError
from swarm.net.channel import Channel, Message, Method
from swarm.net.links import Links
from swarm.tasks import TaskSet
from swarm.terms import NO_TERM, Term
from swarm.wire.frames import no_tensors

T = TypeVar("T")
log = logging.getLogger(__name__)
LEASE_S = 5.0
LOYAL_SHARE = 0.5  # of its lease a trainer promises nobody else: over before anybody's patience is
TELL_EVERY_S = 1.0
FINISHED_AGAIN_S = 0.3
RANK_S = 2.0
ASKED_S = 1.3 * RETRY_S[1]  # somebody asks to join: longer than between two attempts of a replica
BYPASSED_S = 1.5 * RETRY_S[1]  # nobody does: longer still, or one that asks both once would count
ASIDE_S = 20.0  # for all others to begin to lead, when this one has stood aside for them
ORDER_AGAIN_S = (0.5, 1.5)
FOR_LEADER = ("join", "ready", "leave", "snapshot", "chunk", "gradient")


class Trainer(Generic[T]):
    """One of the run's trainers.

    `make_leader()` builds a leader for one term, `lead(leader)` drives it to the end of the run
    and returns what `run` returns. `on_role(text)` is told what this trainer does now. With
    `order`, an operator's, it opens an epoch with the state that it says, whoever leads; with
    `accept_loss` even without a majority.
    """

    def __init__(
        self,
        links: Links,
        quorum: Quorum,
        make_leader: Callable[[], Leader],
        lead: Callable[[Leader], Awaitable[T]],
        *,
        on_role: Callable[[str], None] = lambda text: None,
        order: Order | None = None,
        accept_loss: bool = False,
        lease_s: float = LEASE_S,
        seed: int | str | None = None,
    ) -> None:
        self.links, self.quorum = links, quorum
        self.leader: Leader | None = None
        self.finished_elsewhere = asyncio.Event()
        self.steps_elsewhere = 0  # after which another trainer finished the run
        self._make_leader, self._lead, self._on_role = make_leader, lead, on_role
        self._ordered, self._accept_loss = order, accept_loss
        self._needed: Order | None = None  # what the last term ended for, if it went back
        self._aside = False  # whether the last term ended for others to lead
        self._given_up = ""  # why it ended, if this trainer gave it up
        self._asked_at = -math.inf  # when somebody last wanted to join here
        self._asked_elsewhere_at = -math.inf  # when another trainer last said so of itself
        self._lease_s, self._random = lease_s, random.Random(seed)
        self._heard = asyncio.Event()
        self._leading: asyncio.Task[T] | None = None
        self._tasks = TaskSet()
        quorum.links = links
        quorum.on_succeeded = self._step_down
        links.methods.update(
            {
                **quorum.methods(),
                "leads": Method(self._on_leads, no_tensors),
                **{name: self._for_leader(name) for name in FOR_LEADER},
            }
        )

    @property
    def goes_back(self) -> bool:
        """Whether the operator's order is still to be carried out."""
        return self._ordered is not None

    async def run(self) -> T | None:
        """Until the run is finished: by this trainer (what `lead` returned) or another (None)."""
        patience, stands_by = self._patience(first=True), False
        while not self.finished_elsewhere.is_set():
            order, self._needed = self._needed or self._ordered, None
            at_once = self.quorum.alone or order is not None
            if not at_once and await self._somebody_leads(patience):
                if not stands_by:
                    self._on_role("another trainer leads")
                stands_by = True
                continue
            if self.finished_elsewhere.is_set():
                break
            patience, stands_by = self._patience(), False
            leader = self._make_leader()
            try:
                await leader.begin(order, accept_loss=order is not None and self._accept_loss)
            except SupersededError as error:
                log.info("did not win a term: %s", error)
                await leader.aclose()
                if order is not None:
                    await asyncio.sleep(self._random.uniform(*ORDER_AGAIN_S))
                continue
            except SwarmError as error:
                await leader.aclose()
                if order is self._ordered or not isinstance(error, DataError):
                    raise
                log.info("no going back: %s", error)  # the next term says so, if nothing changes
                self._stand_aside(isinstance(error, AwayError))
                patience = self._patience()
                continue
            self._ordered, self._accept_loss = None, False
            self._aside = False
            if self.quorum.term != leader.term or self.finished_elsewhere.is_set():
                # Another was promised meanwhile, or has finished the run: its replicas have gone.
                self._stand_aside(False)
                await leader.aclose()
                continue
            result, done = await self._lead_one_term(leader)
            if done:
                return result
            patience = self._patience()
        return None

    async def _lead_one_term(self, leader: Leader) -> tuple[T | None, bool]:
        self.leader = leader
        self._on_role(f"leading in term {leader.term.counter}")
        self._given_up = ""
        telling = self._tasks.spawn(self._tell(leader.term), "lease")
        reaching = self._tasks.spawn(self._keep_reaching(leader), "reach")
        self._leading = self._tasks.spawn(self._run_lead(leader), "lead")
        try:
            return await self._leading, True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.quorum.term == leader.term or (task is not None and task.cancelling()):
                raise  # it is this trainer that is stopped, not its term
            lost = f"giving the term up: {self._given_up}"
            self._on_role(lost if self._given_up else "another trainer leads now")
            return None, False
        except SupersededError as error:
            self._stand_aside(False)
            self._on_role(f"another trainer leads now ({error})")
            return None, False
        except GoBack as error:
            assert leader.restoring.saved is not None
            self._needed = leader.restoring.saved.newest
            self._on_role(f"going back to step {error.origin.step}: {error.message}")
            return None, False
        except StandAside as error:
            self._stand_aside(True)
            self._on_role(error.message)
            return None, False
        finally:
            telling.cancel()
            reaching.cancel()
            self.leader = self._leading = None
            # Its replicas must look for the new leader: nothing else tells them.
            for member in leader.members:
                self.links.end_channels(member.incarnation, "this trainer does not lead any more")
            await leader.aclose()

    async def _keep_reaching(self, leader: Leader) -> None:
        """End a term in which no majority can be reached: it commits nothing any more, and its
        replicas may reach another leader. So too where no replica is here, and they ask another
        trainer. Not once every step is committed.

        Looks are counted, not seconds: this process may have been stopped.
        """
        loop, in_vain, bypassed = asyncio.get_running_loop(), 0, 0
        while in_vain * TELL_EVERY_S < REACH_S:
            self.quorum.follow(leader.term, self._lease_s * LOYAL_SHARE)
            looked_at = loop.time()
            await asyncio.sleep(TELL_EVERY_S)
            needed = leader.next_step < leader.plan.num_steps
            in_vain = in_vain + 1 if needed and not self.quorum.reaches_majority() else 0
            asked = self._asked_at >= looked_at or bool(leader.members.by_name)
            bypassed = bypassed + 1 if needed and not asked else 0
            elsewhere = loop.time() - self._asked_elsewhere_at < 2 * TELL_EVERY_S
            if bypassed * TELL_EVERY_S >= BYPASSED_S and elsewhere:
                self._give_up(leader, "replicas reach another trainer, and not this one", True)
                return
        self._give_up(leader, NO_MAJORITY, False)

    def _give_up(self, leader: Leader, why: str, for_others: bool) -> None:
        if self._leading is not None and self.leader is leader:
            self._given_up = why
            self._stand_aside(for_others)
            self._leading.cancel()

    def _stand_aside(self, for_others: bool) -> None:
        """Lead no more: nobody is told any longer that we do."""
        self._aside, self.quorum.term = for_others, NO_TERM

    async def _run_lead(self, leader: Leader) -> T:
        return await self._lead(leader)

    def _step_down(self, term: Term) -> None:
        """Another trainer was promised a term above ours: stop at once."""
        log.info("succeeded by term %d of %s", term.counter, term.trainer[-8:])
        if self._leading is not None:
            self._leading.cancel()

    # ---- what replicas call ---------------------------------------------------------------------

    def _for_leader(self, name: str) -> Method:
        """A method of the leader's admission, refused while this trainer does not lead."""

        async def handle(channel: Channel, message: Message) -> Message | None:
            if name == "join":
                self._asked_at = asyncio.get_running_loop().time()
            if self.leader is None:
                raise RefusedError("this trainer does not lead now")
            return await self.leader.admission.methods()[name].handle(channel, message)

        return Method(handle, no_tensors)

    def on_channel_closed(self, channel: Channel) -> None:
        """For `Links`: a replica's connection has ended."""
        if self.leader is not None:
            self.leader.on_channel_closed(channel)

    # ---- who leads ------------------------------------------------------------------------------

    def _patience(self, *, first: bool = False) -> float:
        rank = self.quorum.trainers.index(self.quorum.me)
        least = 0.2 if first and rank == 0 else self._lease_s
        if self._aside:
            least += ASIDE_S
        return least + RANK_S * rank + self._random.uniform(0, RANK_S / 2)

    async def _somebody_leads(self, patience_s: float) -> bool:
        """Whether a leader was heard within `patience_s`."""
        self._heard.clear()
        try:
            async with asyncio.timeout(patience_s):
                await self._heard.wait()
        except TimeoutError:
            return False
        return True

    async def _on_leads(self, channel: Channel, message: Message) -> Message:
        """Another trainer says that it leads, or that the run is over."""
        term = Term.read(message.body.get("term"))
        if channel.peer not in self.quorum.trainers or term.trainer != channel.peer:
            raise RefusedError("only the run's trainers lead")
        self.quorum.heard_of(term)
        vote, body = self.quorum.vote, message.body
        if term >= vote.promised:
            self._heard.set()
            self.quorum.follow(term, self._lease_s * LOYAL_SHARE)
        if body.get("finished") is True:
            steps = count(body.get("steps"))
            # Of an earlier term too: with all steps committed, only a new epoch would go back.
            if term >= vote.promised or (
                term.epoch >= vote.promised.epoch and steps >= vote.next_step
            ):
                self._finished(steps)
        ago_s = asyncio.get_running_loop().time() - self._asked_at
        return Message({"asked": ago_s < ASKED_S})

    def _finished(self, steps: int) -> None:
        """Another trainer has led the run to its end. Nobody may be left to vote, or to serve."""
        self.steps_elsewhere = steps
        self.quorum.over = True
        self.finished_elsewhere.set()
        self._heard.set()
        leader = self.leader
        if leader is not None and leader.next_step >= steps and self._leading is not None:
            self._stand_aside(False)
            self._leading.cancel()

    async def _tell(self, term: Term) -> None:
        """Tell the others, one task each, so that a silent one delays nobody."""
        others = [trainer for trainer in self.quorum.trainers if trainer != self.quorum.me]
        for trainer in others:
            self._tasks.spawn(self._tell_one(trainer, term), "lease")

    async def _tell_one(self, trainer: str, term: Term) -> None:
        while self.quorum.term == term:
            await self.say_leads(trainer, term)
            await asyncio.sleep(TELL_EVERY_S)

    async def say_finished(self, trainer: str, term: Term, steps: int) -> None:
        """Tell one trainer that we have finished the run, until it has heard: nobody says it again
        to one that misses it, and it would wait for ever for others to vote."""
        while True:
            if await self.say_leads(trainer, term, steps):
                return
            await asyncio.sleep(FINISHED_AGAIN_S)

    async def say_leads(self, trainer: str, term: Term, finished: int | None = None) -> bool:
        """Tell one trainer that we lead in `term`, or have `finished` the run after so many steps;
        whether it has answered."""
        body: dict[str, Any] = {"term": list(term), "finished": finished is not None}
        if finished is not None:
            body["steps"] = finished
        try:
            channel = await self.links.channel(trainer, self.quorum.addresses(trainer))
            answer = await channel.call("leads", body)
        except SwarmError as error:
            log.debug("lease to %s: %s", trainer[-8:], error)
            return False
        if answer.body.get("asked") is True:
            self._asked_elsewhere_at = asyncio.get_running_loop().time()
        return True

    async def aclose(self) -> None:
        await self._tasks.aclose()
        await self.quorum.aclose()

    def abort(self) -> None:
        self._tasks.abort()
        self.quorum.abort()
        if self.leader is not None:
            self.leader.abort()
