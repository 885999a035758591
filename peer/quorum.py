"""One trainer's vote, and its dealings with the other trainers when it leads.

What to answer and what to complete is decided by `swarm.consensus`; here a vote is made durable
before it is told, the others are asked, and whoever does not answer is asked again. With one
trainer its disk is the quorum and nobody is asked.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peer.disk import VoteDisk
from swarm.consensus import (
    COMPLETING,
    VOID_ATTEMPT,
    Answer,
    Key,
    Opening,
    Vote,
    is_majority,
    next_term,
    on_accept,
    on_committed,
    on_prepare,
    open_term,
)
from swarm.errors import RefusedError, SwarmError, WireError
from swarm.net.channel import Channel, Message, Method, no_tensors
from swarm.net.links import Links
from swarm.tasks import TaskSet
from swarm.terms import NO_TERM, Record, Term

log = logging.getLogger(__name__)
RETRY_S = (0.1, 5.0)


class SupersededError(SwarmError):
    """Another trainer has a higher term: this one must stop ordering."""


class Quorum:
    """The trainers of a run, seen from one of them.

    `links` must be set before `elect`. `addresses(peer)` gives where another trainer can be
    dialled. `on_succeeded(term)` is called when another trainer was promised a term above ours.
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
    ) -> None:
        if me not in trainers:
            raise ValueError("only the run's trainers vote")
        self.trainers, self.me = tuple(trainers), me
        self.term = NO_TERM  # the one we lead in, if any
        self._disk, self.addresses, self.on_succeeded = disk, addresses, on_succeeded
        self._highest_seen = disk.vote.promised
        self._voided = -1  # the step our term has voided
        self.random = random.Random()  # spreads retries; tests seed it
        self._changing = asyncio.Lock()
        self._tasks = TaskSet()

    @property
    def vote(self) -> Vote:
        return self._disk.vote

    @property
    def alone(self) -> bool:
        return len(self.trainers) == 1

    def methods(self) -> dict[str, Method]:
        """What other trainers may call here."""
        return {
            "prepare": Method(self._on_prepare, no_tensors),
            "accept": Method(self._on_accept, no_tensors),
            "committed": Method(self._on_committed, no_tensors),
        }

    # ---- as a leader ----------------------------------------------------------------------------

    async def elect(self, *, new_epoch: bool = False) -> Record | None:
        """Win a term of our own; returns the newest committed record, completed if need be.

        With `new_epoch` the term is of an epoch that nobody has seen, for a record that opens it.

        Raises SupersededError when another trainer holds a higher term: back off, then try again.
        """
        seen = (self.vote.promised, self._highest_seen)
        term = next_term(seen, self._incarnation, self.vote.committed, new_epoch=new_epoch)
        mine = await self._change(lambda vote: on_prepare(vote, term))
        if not mine.yes:
            raise SupersededError(mine.reason)
        votes = {self.me: mine.vote}
        if not self.alone:
            votes |= await self._ask_majority("prepare", {"term": list(term)})
        self.term, self._voided = term, -1
        opening: Opening = open_term(votes)
        log.info("term %d: %s", term.counter, opening.reason)
        if opening.base is not None:
            await self._learn(opening.base)
        if opening.complete is None:
            return self.vote.committed
        record = opening.complete
        await self._accept(Key(term, record.step, COMPLETING), record, opening.base)
        await self._learn(record)
        return record

    async def void(self, step: int) -> None:
        """Before the first averaging of `step` in this term: nothing earlier can be chosen now.

        A trainer alone needs it not, nor does a step that this term has itself begun after a
        commit of its own. Raises SupersededError.
        """
        if self.alone or self._voided >= step:
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
        self._voided = record.step + 1
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

    async def _ask_majority(self, method: str, body: Mapping[str, Any]) -> dict[str, Vote]:
        """Ask every other trainer until a majority, ourselves included, has said yes."""
        votes: dict[str, Vote] = {}
        others = [trainer for trainer in self.trainers if trainer != self.me]
        tasks = {
            self._tasks.spawn(self._ask(trainer, method, body), f"{method} {trainer[-8:]}"): trainer
            for trainer in others
        }
        pending = set(tasks)
        try:
            while not is_majority([self.me, *votes], self.trainers):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task, trainer in tasks.items():
                    if task in done:
                        votes[trainer] = task.result()
        finally:
            for task in tasks:  # those that are done take no notice
                task.cancel()
        return votes

    async def _ask(self, trainer: str, method: str, body: Mapping[str, Any]) -> Vote:
        """The trainer's yes, however long it takes. Raises SupersededError on a no."""
        pause = RETRY_S[0]
        while True:
            try:
                channel = await self.links.channel(trainer, self.addresses(trainer))
                answer = (await channel.call(method, dict(body))).body
                vote = Vote.unpack(answer["vote"])
                if answer.get("yes") is True:
                    return vote
                self._highest_seen = max(self._highest_seen, vote.promised)
                if vote.committed is not None:
                    await self._learn(vote.committed)
                raise SupersededError(f"{trainer[-8:]}: {str(answer.get('reason'))[:200]}")
            except SupersededError:
                raise
            except (SwarmError, KeyError, TypeError) as error:
                log.debug("%s of %s: %s", method, trainer[-8:], error)
            await asyncio.sleep(pause * self.random.uniform(0.7, 1.3))
            pause = min(pause * 2, RETRY_S[1])

    async def _tell_committed(self, trainer: str, record: Record) -> None:
        """Once: a trainer that misses it learns it with the next accept."""
        try:
            channel = await self.links.channel(trainer, self.addresses(trainer))
            await channel.call("committed", {"record": record.pack()})
        except SwarmError as error:
            log.debug("committed to %s: %s", trainer[-8:], error)

    # ---- as a voter -----------------------------------------------------------------------------

    async def _on_prepare(self, channel: Channel, message: Message) -> Message:
        self._from_trainer(channel)
        term = Term.read(message.body.get("term"))
        self._own_term(channel, term)
        return self._reply(await self._change(lambda vote: on_prepare(vote, term)))

    async def _on_accept(self, channel: Channel, message: Message) -> Message:
        self._from_trainer(channel)
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

    @staticmethod
    def _own_term(channel: Channel, term: Term) -> None:
        if term.trainer != channel.peer:
            raise RefusedError("a trainer leads in its own terms only")

    @staticmethod
    def _reply(answer: Answer) -> Message:
        return Message({"yes": answer.yes, "reason": answer.reason, "vote": answer.vote.pack()})

    # ---- the vote -------------------------------------------------------------------------------

    async def _change(self, decide: Callable[[Vote], Answer]) -> Answer:
        """Decide on the present vote and make the outcome durable, one at a time."""
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
