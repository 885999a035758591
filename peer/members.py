"""The replicas a leader knows: who serves or will serve which stage, and where each one stands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from peer.calls import count
from peer.measure import StageFacts
from swarm.net.links import MAX_STREAMS

MIN_SPEED, MAX_SPEED = 1e-6, 1e12
MAX_STAGES = 1 << 16
MAX_MEMBERS = MAX_STREAMS  # what goes to all of them tells of all of them, in one header


class Standing(Enum):
    JOINING = "joining"  # fetches the state
    READY = "ready"  # has a state; takes part as soon as that is the current step's
    SERVING = "serving"  # takes part in the current step
    EXPELLED = "expelled"  # its part of this step is void; taken back when it answers


class Traffic(NamedTuple):
    """Bytes between stages so far: activations sent on, gradients returned; on the wire, and
    before the codec."""

    sent: int = 0
    sent_raw: int = 0
    returned: int = 0
    returned_raw: int = 0

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Traffic:
        """From a replica's answer. Raises WireError."""
        names = ("sent_bytes", "raw_bytes", "returned_bytes", "returned_raw_bytes")
        return cls(*(count(body.get(name)) for name in names))

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Offer:
    """What a joiner says of itself and of its device."""

    pinned: bool = False  # a person chose its stage
    replaces: str = ""  # an incarnation of the same peer that leaves once this one serves
    speed: float | None = None  # rounds of the reference per second (`peer.measure`)
    memory_bytes: int | None = None
    second: bool = False  # beside another replica of the same peer, which it helps
    left_stage: int | None = None  # the peer moved from there
    left_ago_s: float = math.inf  # so long ago, when it said so

    @classmethod
    def read(cls, body: Mapping[str, Any], peer: str) -> Offer:
        """From a `join` of that peer. What makes no sense is left out, for it is only an offer."""
        replaces, speed = str(body.get("replaces", ""))[:200], body.get("speed")
        memory, left, ago = body.get("memory_bytes"), body.get("left"), body.get("left_ago_s")
        match left, ago:
            case int(), float() if 0 <= left < MAX_STAGES and ago >= 0:
                pass
            case _:
                left, ago = None, math.inf
        return cls(
            pinned=body.get("pinned") is True,
            replaces=replaces if replaces.split("#", 1)[0] == peer else "",
            speed=speed if isinstance(speed, float) and MIN_SPEED < speed < MAX_SPEED else None,
            memory_bytes=count(memory) if isinstance(memory, int) else None,
            second=body.get("second") is True,
            left_stage=left,
            left_ago_s=ago,
        )


@dataclass(slots=True)
class Member:
    """One incarnation of a replica."""

    incarnation: str
    stage: int
    addresses: tuple[str, ...]
    standing: Standing = Standing.JOINING
    step: int = 0  # the step its state belongs to, as far as is known
    confirmed: int = 0  # the newest of which it has said so itself
    slots: int = 1
    device: str = ""
    numerics: str = ""  # fingerprint of its optimizer's steps; empty where they are portable
    counted: int = 0  # microbatches of committed steps
    traffic: Traffic = field(default_factory=Traffic)
    leaving: bool = False  # it wants to go
    leave_by: float = 0.0  # and goes then at the latest, on the leader's clock
    released: bool = False  # it was told that it may
    held_off_until: float = 0.0  # not taken in before, unless its stage has nobody else
    hold_offs: int = 0
    differed: int = 0  # times that its state or averaged gradient was wrong, as most twins say
    failures: int = 0  # resets that raised there
    following: bool = False  # it collects what is committed, and may be one commit behind
    noted: set[str] = field(default_factory=set)  # donors that it had wrong bytes from, it says
    passed_over: bool = False  # averaging began before it could be taken in
    reason: str = ""
    offer: Offer = field(default_factory=Offer)
    facts: StageFacts | None = None  # of its stage on its device, measured before it served
    joined_at: float = 0.0
    fetched: int = 0  # elements of a state that the leader, as a donor, gave it
    fetched_at: float = 0.0  # when it last did, until there were as many as the state has
    fetch_s: float = 0.0  # from joining until it had the state
    arrived: bool = False  # it came to replace another, and took part

    def row(self) -> dict[str, Any]:
        """Plain values for status and display."""
        return {
            "replica": self.incarnation,
            "stage": self.stage,
            "standing": self.standing.value,
            "step": self.step,
            "device": self.device,
            "counted": self.counted,
            "second": self.offer.second,
            "reason": self.reason,
        }


@dataclass(slots=True)
class Members:
    """All members by incarnation, in order of arrival."""

    num_stages: int
    by_name: dict[str, Member] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self.by_name.values()))

    def get(self, incarnation: str) -> Member | None:
        return self.by_name.get(incarnation)

    def of_stage(self, stage: int, *standings: Standing) -> list[Member]:
        return [
            member
            for member in self.by_name.values()
            if member.stage == stage and (not standings or member.standing in standings)
        ]

    def can_spare(self, member: Member) -> bool:
        """It wants to go, and somebody who stays serves its stage: it gets no new work."""
        others = self.of_stage(member.stage, Standing.SERVING)
        return member.leaving and any(not each.leaving for each in others)

    def may_go(self, member: Member) -> bool:
        """Whether its stage's state stays in the swarm without it."""
        if member.standing is Standing.JOINING:
            return True  # it has none to give
        others = self.of_stage(member.stage, Standing.SERVING)
        return any(each is not member and not each.released for each in others)

    def numerics(self, named: Collection[str]) -> tuple[str | None, bool]:
        """The fingerprint that the optimizer of a newcomer must have (I5), and whether that is
        certain; None: any will do.

        `named` took part in the newest commit: they hold the run's state, and were taken in with
        the run's fingerprint. What most of those present say holds, certainly once more than half
        of all have said so, for any one may say another thing now. Before one of them has come,
        who came first sets it.
        """
        holders = Counter(each.numerics for each in self if each.incarnation in named)
        if not holders:
            return next((each.numerics for each in self), None), False
        ((most, votes),) = holders.most_common(1)
        return most, 2 * votes > len(named)

    def roster(self) -> dict[str, list[str]]:
        """Addresses by incarnation, for replicas to dial each other."""
        return {name: list(member.addresses) for name, member in self.by_name.items()}
