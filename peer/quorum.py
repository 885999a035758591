"""One trainer's vote, and its dealings with the other trainers when it leads.

What to answer and what to complete is decided by `swarm.consensus`; here a vote is made durable
before it is told, the others are asked, and whoever does not answer is asked again. With one
trainer its disk is the quorum and nobody is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peer.disk import VoteDisk
from swarm.consensus import (
    COMPLETING,
    VOID_ATTEMPT,
    Answer,
    Following,
    Key,
    Opening,
    Vote,
    is_loyal,
    is_majority,
    next_term,
    note_disk,
    on_accept,
    on_committed,
    on_prepare,
    open_term,
    stranger,
)
from swarm.errors import RefusedError, SwarmError, WireError
from swarm.net.channel import CallFailedError, Channel, Message, Method
from swarm.net.links import Links
from swarm.tasks import TaskSet
from swarm.terms import NO_TERM, Record, Term
from swarm.wire.frames import no_tensors

log = logging.getLogger(__name__)
RETRY_S = (0.1, 5.0)
NAMING_S = 2.0  # for trainers that a new epoch could name with the disk they have now
REACH_S = 10.0  # without a connection to a majority, until people are told, and a term is over
LOSS_S = 10.0  # after which those that have not answered are lost, if the operator accepts it
NO_MAJORITY = "no majority of the run's trainers can be reached"


class SupersededError(SwarmError):
    """Another trainer has a higher term: this one must stop ordering."""


class Quorum:
    """The trainers of a run, seen from one of them.

    `links` must be set before `elect`. `addresses(peer)` gives where another trainer can be
    dialled. `on_succeeded(term)` is called when another trainer was promised a term above ours, and
    `say(line)` told once why a trainer does not count (`swarm.consensus.stranger`).
    """

    links: Links

    def __init__(
        self,
        trainers: Sequence[str],
        me: str,
        disk: VoteDisk,
        *,
        addresses: Callable[[str], Sequence[str]] = lambda peer: (),
        on_succeeded: Callable[[Term], None] = lambda term: None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        if me not in trainers:
            raise ValueError("only the run's trainers vote")
        self.trainers, self.me = tuple(trainers), me
        self.term = NO_TERM  # the one we lead in, if any
        self.over = False  # the run is finished: nobody may be left to vote
        self._disk, self.addresses, self.on_succeeded = disk, addresses, on_succeeded
        self._highest_seen = disk.vote.promised
        self._voided = -1  # the step our term has voided
        self._followed = Following()
        self._strangers: dict[str, str] = {}  # trainers with another disk than they are known by
        self._forced: tuple[str, ...] = ()  # who answered, where an operator gives up the rest
        self._say, self._said = say, set[str]()
        self.random = random.Random()  # spreads retries; tests seed it
        self._changing = asyncio.Lock()
        self._tasks = TaskSet()

    @property
    def vote(self) -> Vote:
        return self._disk.vote

    @property
    def alone(self) -> bool:
        return self.electorate == (self.me,)

    @property
    def electorate(self) -> tuple[str, ...]:
        """Of whom a majority decides."""
        return self._forced or tuple(self.vote.voters) or self.trainers

    @property
    def disk_id(self) -> str:
        return self._disk.id

    @property
    def voters(self) -> dict[str, str]:
        """What a record of ours says of who votes, and with which disk."""
        known = self.vote.voters or dict.fromkeys(self.trainers, "")
        return {**known, self.me: self._disk.id}

    def new_voters(self) -> dict[str, str]:
        """What a record of ours that opens an epoch says of it: with the disks they have now."""
        present = {**self.voters, **self._strangers}
        return {name: present.get(name, "") for name in self.electorate}

    def methods(self) -> dict[str, Method]:
        """What other trainers may call here."""
        return {
            "prepare": Method(self._on_prepare, no_tensors),
            "accept": Method(self._on_accept, no_tensors),
            "committed": Method(self._on_committed, no_tensors),
        }

    # ---- as a leader ----------------------------------------------------------------------------

    async def elect(
        self, *, new_epoch: bool = False, above: int = 0, accept_loss: bool = False
    ) -> Record | None:
        """Win a term of our own; returns the newest committed record, completed if need be.

        With `new_epoch` the term is of an epoch that nobody has seen, for a record that opens it,
        and later than epoch `above`, of which this trainer's disk may know nothing.
        With `accept_loss` those who answer within some seconds are the voters from then on: this
        forks the run if the others live.

        Raises SupersededError when another trainer holds a higher term: back off, then try again.
        """
        seen = (self.vote.promised, self._highest_seen, Term(above, 0, ""))
        term = next_term(seen, self._incarnation, self.vote.committed, new_epoch=new_epoch)
        self._forced = ()
        await self._change(lambda vote: Answer(True, self._noted(vote, self.me, self._disk.id)))
        if reason := stranger(self.vote, self.me, self._disk.id):
            self._tell_once(f"this trainer does not count: {reason}")
            raise SupersededError(reason)
        self._highest_seen = max(self._highest_seen, term)  # asked for once, whatever comes of it
        votes, ask = dict[str, Vote](), {"term": list(term)}
        if accept_loss:
            votes = await self._ask_majority("prepare", ask, within_s=LOSS_S)
            self._forced = tuple(sorted((self.me, *votes)))
        elif not self.alone:
            votes = await self._ask_majority("prepare", ask, stay_s=NAMING_S if new_epoch else 0.0)
        # The last to promise: who is refused for a leader can follow it, since it promised nothing.
        mine = await self._change(lambda vote: on_prepare(vote, term))
        if not mine.yes:
            raise SupersededError(mine.reason)
        votes[self.me] = mine.vote
        if self.vote.promised != term:
            raise SupersededError(f"term {self.vote.promised.counter} was promised meanwhile")
        self.term, self._voided = term, -1
        opening: Opening = open_term(votes)
        log.info("term %d: %s", term.counter, opening.reason)
        if opening.base is not None:
            await self._learn(opening.base)
        record = opening.complete
        if record is not None:
            await self._accept(Key(term, record.step, COMPLETING), record, opening.base)
            await self._learn(record)
        if not is_majority(votes, self.electorate):
            raise SupersededError("others vote now than did before")
        self.check(term)
        return self.vote.committed

    def check(self, term: Term) -> None:
        """Raises SupersededError unless we still lead in `term`: another may have been promised in
        any pause since it was won, and nobody is told of that who does not lead yet."""
        if self.term != term:
            raise SupersededError("another trainer was promised a term meanwhile")

    def has_voided(self, step: int) -> bool:
        """Whether this term's leader may have `step` averaged."""
        return self.alone or self._voided >= step

    async def void(self, step: int) -> None:
        """Before the first averaging of `step` in this term: nothing earlier can be chosen now.

        A trainer alone needs it not, nor does a step that this term has itself begun after a
        commit of its own. Raises SupersededError.
        """
        if self.has_voided(step):
            return
        await self._accept(Key(self.term, step, VOID_ATTEMPT), None, self.vote.committed)
        self._voided = step

    async def commit(self, record: Record) -> None:
        """Durable at a majority when it returns: that is the commit.

        Never gives up within the term: the record may be chosen already. Raises SupersededError,
        StorageError (our own disk; nothing was promised).
        """
        if record.ballot.term != self.term:
            raise ValueError("a record of another term")
        key = Key(self.term, record.step, record.ballot.attempt)
        await self._accept(key, record, self.vote.committed)
        await self._learn(record)
        self._forced, self._voided = (), record.step + 1
        for trainer in self.trainers:
            if trainer != self.me:
                self._tasks.spawn(self._tell_committed(trainer, record), "committed")

    async def _accept(self, key: Key, record: Record | None, base: Record | None) -> None:
        mine = await self._change(lambda vote: on_accept(vote, key, record, base))
        if not mine.yes:
            raise SupersededError(mine.reason)
        if self.alone:
            return
        await self._ask_majority(
            "accept",
            {
                "key": [list(key.term), key.step, key.attempt],
                "record": record.pack() if record else b"",
                "predecessor": base.pack() if base else b"",
            },
        )
        if self.vote.promised != key.term:  # tested where it is decided, with no await between
            raise SupersededError(f"term {self.vote.promised.counter} was promised meanwhile")

    async def _ask_majority(
        self,
        method: str,
        body: Mapping[str, Any],
        *,
        stay_s: float = 0.0,
        within_s: float | None = None,
    ) -> dict[str, Vote]:
        """Ask every other trainer until a majority, ourselves included, has said yes.

        Those that have not said a word by then are waited for, `stay_s` at most. With `within_s`
        whoever answers by then is enough.
        """
        votes: dict[str, Vote] = {}
        asked = [trainer for trainer in self._forced or self.trainers if trainer != self.me]
        heard = {trainer: asyncio.Event() for trainer in asked}
        tasks = {
            self._tasks.spawn(
                self._ask(trainer, method, body, heard[trainer]), f"{method} {trainer[-8:]}"
            ): trainer
            for trainer in asked
        }
        pending = set(tasks)

        async def until_enough() -> None:
            nonlocal pending
            while pending and (within_s or not is_majority([self.me, *votes], self.electorate)):
                done, pending = await asyncio.wait(
                    pending, timeout=REACH_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    votes[tasks[task]] = task.result()
                if self.over and (method == "prepare" or not done):
                    raise SupersededError("another trainer has finished the run")
                if not done and not self.reaches_majority():
                    self._tell_once(NO_MAJORITY)

        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await until_enough()
            if stay_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(stay_s):
                        for event in heard.values():
                            await event.wait()
        finally:
            for task in tasks:  # those that are done take no notice
                task.cancel()
        return votes

    def reaches_majority(self) -> bool:
        """Whether connections to one are open. However slow it answers, its heartbeats come."""
        there = [name for name in self.trainers if self.links.open_channel(name) is not None]
        return is_majority([self.me, *there], self.electorate)

    async def _ask(
        self, trainer: str, method: str, body: Mapping[str, Any], heard: asyncio.Event
    ) -> Vote:
        """The trainer's yes, however long it takes; `heard` is set when its disk is known.

        Raises SupersededError on a no.
        """
        pause = RETRY_S[0]
        while True:
            try:
                channel = await self.links.channel(trainer, self.addresses(trainer))
                answer = (await channel.call(method, {**body, "disk": self._disk.id})).body
                vote = Vote.unpack(answer["vote"])
                counts = await self._counts(trainer, answer.get("disk"))
                heard.set()
                if counts:
                    if answer.get("yes") is True:
                        return vote
                    self._highest_seen = max(self._highest_seen, vote.promised)
                    if vote.committed is not None:
                        await self._learn(vote.committed)
                    raise SupersededError(f"{trainer[-8:]}: {str(answer.get('reason'))[:200]}")
            except SupersededError:
                raise
            except CallFailedError as error:
                await self._refused(trainer, error)
            except (SwarmError, KeyError, TypeError) as error:
                log.debug("%s of %s: %s", method, trainer[-8:], error)
            await asyncio.sleep(pause * self.random.uniform(0.7, 1.3))
            pause = min(pause * 2, RETRY_S[1])

    # ---- who counts -----------------------------------------------------------------------------

    def _noted(self, vote: Vote, trainer: str, disk: str) -> Vote:
        return note_disk(vote, self.trainers, trainer, disk)

    async def _counts(self, trainer: str, disk: object) -> bool:
        """Whether that trainer, with that disk, is a voter; it is remembered if it is."""
        if not isinstance(disk, str) or not 0 < len(disk) <= 64:
            raise WireError("a trainer without a disk")
        if reason := stranger(self.vote, trainer, disk):
            self._strangers[trainer] = disk
            self._tell_once(f"trainer {trainer[-8:]} does not count: {reason}")
            return False
        self._strangers.pop(trainer, None)
        await self._change(lambda vote: Answer(True, self._noted(vote, trainer, disk)))
        return True

    async def _refused(self, trainer: str, error: CallFailedError) -> None:
        """We do not count for that trainer. One of us may lack the record that says who votes."""
        if "stranger" not in error.detail:
            log.debug("refused by %s: %s", trainer[-8:], error)
            return
        self._tell_once(f"this trainer does not count for {trainer[-8:]}: {error.message}")
        theirs = error.detail["stranger"]
        if isinstance(theirs, bytes) and theirs:
            try:
                record = Record.unpack(theirs)
            except WireError as odd:
                log.debug("a record of %s: %s", trainer[-8:], odd)
                return
            await self._learn(record)
        if reason := stranger(self.vote, self.me, self._disk.id):
            raise SupersededError(reason)
        if self.vote.committed is not None:
            await self._tell_committed(trainer, self.vote.committed)

    def _tell_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    async def _tell_committed(self, trainer: str, record: Record) -> None:
        """Once: a trainer that misses it learns it with the next accept."""
        try:
            channel = await self.links.channel(trainer, self.addresses(trainer))
            await channel.call("committed", {"record": record.pack()})
        except SwarmError as error:
            log.debug("committed to %s: %s", trainer[-8:], error)

    # ---- as a voter -----------------------------------------------------------------------------

    async def _on_prepare(self, channel: Channel, message: Message) -> Message:
        await self._from_voter(channel, message)
        term = Term.read(message.body.get("term"))
        self._own_term(channel, term)
        now = asyncio.get_running_loop().time()
        if is_loyal(self.vote, self._leader(), term, now):
            # With the vote: who asks may not know of an epoch.
            return self._reply(Answer(False, self.vote, "another trainer leads"))
        return self._reply(await self._change(lambda vote: on_prepare(vote, term)))

    def follow(self, term: Term, seconds: float) -> None:
        """A trainer, another or this one, says that it leads in `term`: for so long nobody else is
        promised one."""
        if term >= self._followed.term:
            self._followed = Following(term, asyncio.get_running_loop().time() + seconds)

    def _leader(self) -> Following:
        """Whom we follow, while that connection lasts; ourselves while we reach a majority."""
        term = self._followed.term
        if term == self.term:
            there = self.reaches_majority()
        else:
            there = self.links.open_channel(term.trainer) is not None
        return self._followed if there else Following()

    async def _on_accept(self, channel: Channel, message: Message) -> Message:
        await self._from_voter(channel, message)
        body = message.body
        match body.get("key"):
            case [term, int(step), int(attempt)] if step >= -1 and 0 <= attempt <= COMPLETING:
                key = Key(Term.read(term), step, attempt)
            case _:
                raise WireError("an accept without a key")
        self._own_term(channel, key.term)
        record = Record.unpack(body["record"]) if body.get("record") else None
        base = Record.unpack(body["predecessor"]) if body.get("predecessor") else None
        if record is not None and record.step != key.step:
            raise WireError("a record of another step than its key")
        return self._reply(await self._change(lambda vote: on_accept(vote, key, record, base)))

    async def _on_committed(self, channel: Channel, message: Message) -> Message:
        self._from_trainer(channel)
        await self._learn(Record.unpack(message.body.get("record")))
        return Message({})

    def _from_trainer(self, channel: Channel) -> None:
        if channel.peer not in self.trainers:
            raise RefusedError("only the run's trainers vote")

    async def _from_voter(self, channel: Channel, message: Message) -> None:
        self._from_trainer(channel)
        if not await self._counts(channel.peer, message.body.get("disk")):
            committed = self.vote.committed
            reason = stranger(self.vote, channel.peer, str(message.body.get("disk")))
            mine = committed.pack() if committed else b""
            raise CallFailedError("refused", reason, stranger=mine)

    @staticmethod
    def _own_term(channel: Channel, term: Term) -> None:
        if term.trainer != channel.peer:
            raise RefusedError("a trainer leads in its own terms only")

    def _reply(self, answer: Answer) -> Message:
        return Message(
            {
                "yes": answer.yes,
                "reason": answer.reason,
                "vote": answer.vote.pack(),
                "disk": self._disk.id,
            }
        )

    # ---- the vote -------------------------------------------------------------------------------

    async def _change(self, decide: Callable[[Vote], Answer]) -> Answer:
        """Decide on the present vote and make the outcome durable, one at a time.

        Begun, it is carried out, also when whoever asked is gone: a write that goes on in its
        thread after the next one has begun could end after it, and undo what was told.
        """
        return await asyncio.shield(self._tasks.spawn(self._carry_out(decide), "vote"))

    async def _carry_out(self, decide: Callable[[Vote], Answer]) -> Answer:
        async with self._changing:
            answer = decide(self._disk.vote)
            if answer.yes and answer.vote != self._disk.vote:
                await self._disk.save(answer.vote)
        if answer.yes:
            self.heard_of(answer.vote.promised)
        return answer

    def heard_of(self, term: Term) -> None:
        """Some trainer leads, or means to lead, in `term`: a lower term of ours is over."""
        self._highest_seen = max(self._highest_seen, term)
        if self.term != NO_TERM and term > self.term:
            self.term = NO_TERM
            self.on_succeeded(term)

    async def _learn(self, record: Record) -> None:
        def decide(vote: Vote) -> Answer:
            return Answer(True, on_committed(vote, record))

        await self._change(decide)

    @property
    def _incarnation(self) -> str:
        return self.links.incarnation

    async def aclose(self) -> None:
        await self._tasks.aclose()

    def abort(self) -> None:
        self._tasks.abort()
