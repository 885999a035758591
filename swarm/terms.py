"""Terms, ballots and records: what leaders say and replicas remember (DESIGN, "Leaders").

A term names one leadership for good: `(epoch, counter, incarnation)`. The incarnation holds a
number drawn at process start, so no two lives share a term. A ballot adds which averaging attempt
of which step. A record is what a step became, or that the run went back to a checkpoint: such a
record opens an *epoch*. Records are ordered by (epoch, step).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from swarm.errors import WireError
from swarm.wire.limits import check_msgpack

OUTCOMES = ("applied", "skipped", "restored")
MAX_COUNTER = 1 << 40  # a hostile counter beyond it is refused, so it cannot lock the run


class Term(NamedTuple):
    """One leadership. Later ones compare greater."""

    epoch: int
    counter: int
    incarnation: str

    @classmethod
    def read(cls, value: object) -> Term:
        """From the wire. Raises WireError."""
        match value:
            case [int(epoch), int(counter), str(incarnation)] if (
                0 <= epoch < MAX_COUNTER and 0 <= counter < MAX_COUNTER and len(incarnation) < 256
            ):
                return cls(epoch, counter, incarnation)
        raise WireError("not a term")

    @property
    def trainer(self) -> str:
        """The peer id of the trainer that leads in this term."""
        return self.incarnation.split("#", 1)[0]


NO_TERM = Term(0, 0, "")


class Ballot(NamedTuple):
    """One averaging attempt. Step -1 is before the first, where a run can be taken back to."""

    term: Term
    step: int
    attempt: int

    @classmethod
    def read(cls, value: object) -> Ballot:
        """From the wire. Raises WireError."""
        match value:
            case [term, int(step), int(attempt)] if step >= -1 and 0 <= attempt < MAX_COUNTER:
                return cls(Term.read(term), step, attempt)
        raise WireError("not a ballot")


def new_incarnation(peer_id: str) -> str:
    """The name of one life of a process: never repeated, so a restarted peer is a new replica."""
    return f"{peer_id}#{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Record:
    """What a step became. Committed once a majority of trainers holds it on disk.

    `members` and `gradients` (`gradient_sha256` of the averaged one) are per stage.
    `norm` is the global gradient norm before clipping; `scale` what the gradient is multiplied
    with; `outcome` is "applied", or "skipped" when a gradient was not finite.

    A record that opens an epoch has the outcome "restored": after it the stages hold the state they
    had after its step (-1: the first weights). `fingerprints` are of that state then,
    `checkpoint` is the sha256 of the manifest it comes from (empty at -1), and `voters` names who
    votes from then on, each with the id of the disk it votes with. `base` is the step that its
    epoch began with and `saved` that of the newest complete checkpoint, in every record.
    """

    ballot: Ballot
    predecessor: str
    members: Mapping[int, tuple[str, ...]]
    gradients: Mapping[int, str]
    norm: float
    scale: float
    lr: float
    outcome: str
    loss: float
    tokens: int
    fingerprints: Mapping[int, str] = field(default_factory=dict)
    base: int = 0
    saved: int = 0
    checkpoint: str = ""
    voters: Mapping[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.ballot.step

    @property
    def epoch(self) -> int:
        return self.ballot.term.epoch

    @property
    def position(self) -> tuple[int, int]:
        """Later records of a run compare greater: (epoch, step)."""
        return self.epoch, self.step

    @property
    def restores(self) -> bool:
        """Whether this opens an epoch."""
        return self.outcome == "restored"

    def pack(self) -> bytes:
        """Canonical bytes; `hash` is taken over them."""
        packed: bytes = msgpack.packb(
            {
                "ballot": [list(self.ballot.term), self.ballot.step, self.ballot.attempt],
                "predecessor": self.predecessor,
                "members": [[stage, list(who)] for stage, who in sorted(self.members.items())],
                "gradients": [[stage, sha] for stage, sha in sorted(self.gradients.items())],
                "norm": self.norm,
                "scale": self.scale,
                "lr": self.lr,
                "outcome": self.outcome,
                "loss": self.loss,
                "tokens": self.tokens,
                "fingerprints": [
                    [stage, mark] for stage, mark in sorted(self.fingerprints.items())
                ],
                "base": self.base,
                "saved": self.saved,
                "checkpoint": self.checkpoint,
                "voters": [list(each) for each in sorted(self.voters.items())],
            }
        )
        return packed

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.pack()).hexdigest()

    @classmethod
    def unpack(cls, data: object) -> Record:
        """Raises WireError for anything that is not a record."""
        if not isinstance(data, bytes) or len(data) > 1 << 20:
            raise WireError("not a record")
        check_msgpack(data)
        try:
            value: Any = msgpack.unpackb(data)
            if value["outcome"] not in OUTCOMES:
                raise WireError("a record with an unknown outcome")
            ballot = Ballot.read(value["ballot"])
            if ballot.step < 0 and value["outcome"] != "restored":
                raise WireError("a record of no step")
            record = cls(
                ballot=ballot,
                predecessor=str(value["predecessor"]),
                members={
                    int(stage): tuple(str(each) for each in who) for stage, who in value["members"]
                },
                gradients={int(stage): str(sha) for stage, sha in value["gradients"]},
                norm=float(value["norm"]),
                scale=float(value["scale"]),
                lr=float(value["lr"]),
                outcome=value["outcome"],
                loss=float(value["loss"]),
                tokens=int(value["tokens"]),
                fingerprints={int(stage): str(mark) for stage, mark in value["fingerprints"]},
                base=int(value["base"]),
                saved=int(value["saved"]),
                checkpoint=str(value["checkpoint"]),
                voters={str(voter): str(disk) for voter, disk in value["voters"]},
            )
            record.pack()  # an integer too large for msgpack, as 1e300 makes, would have no hash
        except WireError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, msgpack.UnpackException) as error:
            raise WireError(f"not a record: {type(error).__name__}") from None
        return record
