"""Agreement of the trainers on what each step became: multi-Paxos, one record in flight.

Pure: no I/O, no clock; `peer.quorum` carries it out, with every state on disk before it answers.
The rules and their names are those of the executable model that belongs to the design ("Leaders,
terms, records"): each was found necessary by switching it off. Lamport, "Paxos Made Simple" (2001)
is the base; what is added here is that accepting step t implies that t-1 is committed (so one
record in flight suffices), and the *empty record*, with which a leader that found nothing accepted
voids what earlier leaders may have left behind, before it lets a replica average.

A run goes back to a checkpoint by a record like any other: it is chosen for the place after the
newest one, in a term of an epoch above all that were seen, and names the step it goes back to. So
places are not steps: what a trainer has accepted is for the place after the record it knows
committed, always, and records compare by (epoch, step), which grows from place to place.

Votes count per peer id, not per incarnation: a trainer that restarts with its disk is the same
voter. One that has lost its disk is not: it has forgotten what it promised. So every disk has an
id, each trainer remembers with which disk the others vote, records name them, and a trainer with
another disk than it is known by is no voter until a record that opens an epoch names it
(`stranger`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from swarm.errors import WireError
from swarm.terms import MAX_COUNTER, NO_TERM, Record, Term

VOID_ATTEMPT = 0  # of the empty record; real attempts count from 1
MAX_TRAINERS = 64
COMPLETING = MAX_COUNTER  # the attempt under which a later leader completes an accepted record


class Key(NamedTuple):
    """Under which term and attempt something was accepted for a step. Later ones compare greater.

    `step` stands between, as in a ballot, though two keys that meet are always of one step.
    """

    term: Term
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a trainer has accepted for the place after its newest record. None: the empty record."""

    key: Key
    record: Record | None


@dataclass(frozen=True, slots=True)
class Vote:
    """A trainer's durable state, as it also stands in a promise.

    `voters`: who votes, and the id of the disk each is known to vote with (empty: not known yet).
    No entry at all: the run's trainers, of whom nothing is known yet.
    """

    promised: Term = NO_TERM
    committed: Record | None = None
    accepted: Acceptance | None = None
    voters: Mapping[str, str] = field(default_factory=dict)

    @property
    def next_step(self) -> int:
        return self.committed.step + 1 if self.committed else 0

    def pack(self) -> dict[str, Any]:
        """Plain values for disk and wire."""
        accepted: Any = None
        if self.accepted is not None:
            key, record = self.accepted.key, self.accepted.record
            accepted = [list(key.term), key.step, key.attempt, record.pack() if record else b""]
        committed = self.committed.pack() if self.committed else b""
        return {
            "promised": list(self.promised),
            "committed": committed,
            "accepted": accepted,
            "voters": dict(self.voters),
        }

    @classmethod
    def unpack(cls, value: object) -> Vote:
        """Raises WireError."""
        if not isinstance(value, dict):
            raise WireError("a vote that makes no sense")
        accepted: Acceptance | None = None
        match value.get("accepted"):
            case None:
                pass
            case [term, int(step), int(attempt), bytes(data)] if 0 <= attempt <= COMPLETING:
                key = Key(Term.read(term), step, attempt)
                accepted = Acceptance(key, Record.unpack(data) if data else None)
            case _:
                raise WireError("a vote that makes no sense")
        committed = value.get("committed")
        return cls(
            Term.read(value.get("promised")),
            Record.unpack(committed) if committed else None,
            accepted,
            _read_voters(value.get("voters", {})),
        )


def _read_voters(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_TRAINERS:
        raise WireError("voters that make no sense")
    for name, disk in value.items():
        if not isinstance(name, str) or not isinstance(disk, str) or len(name) + len(disk) > 400:
            raise WireError("voters that make no sense")
    return dict(value)


class Answer(NamedTuple):
    """A trainer's answer to a prepare or accept. `newer`: the record the asker lacks."""

    yes: bool
    vote: Vote
    reason: str = ""


def on_prepare(vote: Vote, term: Term) -> Answer:
    """A would-be leader asks for a promise. The vote in the answer must be durable first."""
    if term < vote.promised:
        return Answer(False, vote, f"term {vote.promised.counter} was promised")
    return Answer(True, replace(vote, promised=term))


class Following(NamedTuple):
    """The term that a trainer knows somebody to lead in; until when nobody else is promised one."""

    term: Term = NO_TERM
    until: float = -math.inf


def is_loyal(vote: Vote, followed: Following, term: Term, now: float) -> bool:
    """Whether who votes follows another than who asks for `term`, which may hear nothing of that
    leader. Two that do not reach each other would depose one another without end.

    Nothing depends on it but who leads. A later epoch is an order, and ends the present one.
    """
    return (
        vote.promised <= followed.term < term
        and followed.term.trainer != term.trainer
        and followed.term.epoch == term.epoch
        and now < followed.until
    )


def on_accept(vote: Vote, key: Key, record: Record | None, predecessor: Record | None) -> Answer:
    """A leader asks to accept `record` (None: the empty record) for `key.step`.

    `predecessor` is the record of the place before, committed by implication. The vote in the
    answer must be durable before the answer is sent.
    """
    if key.term < vote.promised:
        return Answer(False, vote, f"term {vote.promised.counter} was promised")
    committed = vote.committed
    if committed is not None and _place(predecessor) < committed.position:
        return Answer(False, vote, f"step {committed.step} is committed")
    if not follows(key, record, predecessor):
        return Answer(False, vote, "it does not follow its predecessor")
    here = _place(predecessor) == _place(committed)
    if here and predecessor and committed and predecessor.hash != committed.hash:
        return Answer(False, vote, f"another record of step {committed.step} is committed")
    if here and vote.accepted is not None and key < vote.accepted.key:
        return Answer(False, vote, "a later one is accepted")
    learned = vote if predecessor is None else on_committed(vote, predecessor)
    return Answer(True, replace(learned, promised=key.term, accepted=Acceptance(key, record)))


def _place(committed: Record | None) -> tuple[int, int]:
    """The place after which the next one is accepted; before all others for None."""
    return committed.position if committed else (-1, -1)


def follows(key: Key, record: Record | None, predecessor: Record | None) -> bool:
    """Whether this may stand in the place after `predecessor` (None: in the first)."""
    epoch, next_step = (0, 0) if predecessor is None else (predecessor.epoch, predecessor.step + 1)
    if record is None:
        return key.step == next_step
    if record.step != key.step:
        return False
    if record.restores:
        return record.epoch > epoch
    return record.step == next_step and record.epoch >= epoch


def on_committed(vote: Vote, record: Record) -> Vote:
    """A record is known to be committed. What was accepted for its place or before is history."""
    if vote.committed is not None and vote.committed.position >= record.position:
        return vote
    voters = vote.voters
    if record.voters:
        voters = {name: disk or voters.get(name, "") for name, disk in record.voters.items()}
    return Vote(vote.promised, record, None, voters)


def stranger(vote: Vote, trainer: str, disk: str) -> str:
    """Why `trainer`, with the disk of this id, is no voter for us; empty if it is one."""
    if vote.voters and trainer not in vote.voters:
        return "it does not vote since the run was taken back without it"
    if vote.voters.get(trainer) not in (None, "", disk):
        return "it has lost the disk it voted with, and must not vote until a new epoch names it"
    return ""


def note_disk(vote: Vote, trainers: Sequence[str], trainer: str, disk: str) -> Vote:
    """Remember with which disk a voter votes. Durable before its word counts."""
    voters = dict(vote.voters) or dict.fromkeys(trainers, "")
    if voters.get(trainer) != "":
        return vote
    return replace(vote, voters={**voters, trainer: disk})


def is_majority(voters: Iterable[str], trainers: Sequence[str]) -> bool:
    """Whether these peer ids are more than half of the run's trainers."""
    return 2 * len(set(voters) & set(trainers)) > len(trainers)


class Opening(NamedTuple):
    """What a new leader must do first: complete `complete`, or void the step after `base`."""

    base: Record | None
    complete: Record | None
    reason: str


def open_term(votes: Mapping[str, Vote]) -> Opening:
    """From the promises of a majority: the newest committed record, and what may be chosen already.

    Of several acceptances for the place after it the highest key counts; the empty record there
    means that nothing is left to complete.
    """
    base = max((vote.committed for vote in votes.values()), key=_place, default=None)
    step = base.step + 1 if base else 0
    accepted = [
        vote.accepted
        for vote in votes.values()
        if vote.accepted is not None and _place(vote.committed) == _place(base)
    ]
    if not accepted:
        return Opening(base, None, f"nothing is accepted for step {step}")
    newest = max(accepted, key=lambda each: each.key)
    counter, record = newest.key.term.counter, newest.record
    if record is None:
        return Opening(base, None, f"step {step} was voided in term {counter}")
    if record.restores:
        what = f"going back to step {record.step + 1} may be committed in term {counter}"
        return Opening(base, record, what)
    return Opening(base, record, f"step {step} may be committed in term {counter}")


def next_term(
    seen: Iterable[Term], incarnation: str, committed: Record | None = None, *, new_epoch: bool
) -> Term:
    """A term above all that were seen, in the newest epoch or a new one.

    Raises WireError when counters are exhausted.
    """
    seen = list(seen)
    counter = max((term.counter for term in seen), default=0) + 1
    epochs = [term.epoch for term in seen] + ([committed.epoch] if committed else [])
    epoch = max(epochs, default=0) + new_epoch
    if max(counter, epoch) >= MAX_COUNTER:
        raise WireError("term counters are exhausted")
    return Term(epoch, counter, incarnation)
