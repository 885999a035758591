"""One training step as its leader sees it: who has which microbatch, and what to do next.

Pure: no I/O, no clock; `peer.leader` carries out what this decides. It follows DESIGN, "One step,
exactly once": a microbatch is done when one replica per stage has counted it; it is given to a
second replica of a stage only after the first has confirmed a fence or was expelled (I3); an
expelled replica's contribution is void, and what it had counted is issued again with its hop
replaced, so the surviving hops answer from what they kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from swarm.routing import Router


@dataclass(frozen=True, slots=True)
class Issue:
    """A microbatch to send along `route` as try number `try_`."""

    index: int
    try_: int
    route: tuple[str, ...]
    replay: bool  # some hop of the route has had it before


class Group(NamedTuple):
    """One stage's averaging group: its members, and what each must have counted."""

    stage: int
    members: tuple[str, ...]
    ledgers: dict[str, list[int]]


@dataclass(slots=True)
class Step:
    """The state of one step under one term. `router` outlives the step and holds the rates."""

    number: int
    num_microbatches: int
    num_stages: int
    router: Router
    tries: int = 0  # the last try number drawn; never reused within a term
    attempt: int = 0  # the last averaging attempt
    active: dict[str, int] = field(default_factory=dict)  # replica -> stage
    expelled: dict[str, str] = field(default_factory=dict)  # replica -> reason
    hops: list[list[str | None]] = field(default_factory=list)
    open: dict[int, int] = field(default_factory=dict)  # microbatch -> try under way
    done: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)  # issued, not done since: may hold slots somewhere

    def __post_init__(self) -> None:
        self.hops = [[None] * self.num_stages for _ in range(self.num_microbatches)]

    # ---- who takes part -------------------------------------------------------------------------

    def admit(self, replica: str, stage: int, service_s: float | None = None) -> None:
        """A replica with this step's state and an empty ledger takes part from now on."""
        self.expelled.pop(replica, None)
        self.active[replica] = stage
        self.router.add(replica, stage, service_s)

    def adopt(self, replica: str, stage: int, counted: Collection[int]) -> bool:
        """A replica takes part with what an earlier leader of this step had it count.

        False, and nothing changed, when somebody else of its stage has counted one of those too:
        then its part must be void.
        """
        if any(self.hops[index][stage] not in (None, replica) for index in counted):
            return False
        self.admit(replica, stage)
        for index in counted:
            self.hops[index][stage] = replica
        return True

    def confirm(self, index: int) -> None:
        """The loss of an adopted microbatch is known. If all its hops were adopted, it is done;
        one that has been issued since is done when its route answers."""
        if index not in self.begun and None not in self.hops[index]:
            self.done.add(index)

    def expel(self, replica: str, reason: str) -> list[int]:
        """Void a replica's contribution to the step. Returns the microbatches to issue again.

        One that does not take part is left as it is, but never stays on a route.
        """
        if self.active.pop(replica, None) is not None:
            self.expelled[replica] = reason
        self.router.remove(replica)
        again = []
        for index, hops in enumerate(self.hops):
            if replica in hops:
                hops[hops.index(replica)] = None
                self.done.discard(index)
                self.open.pop(index, None)
                again.append(index)
        return again

    def replicas(self, stage: int) -> list[str]:
        """Who takes part in `stage`, sorted."""
        return sorted(name for name, theirs in self.active.items() if theirs == stage)

    def empty_stages(self) -> list[int]:
        served = set(self.active.values())
        return [stage for stage in range(self.num_stages) if stage not in served]

    # ---- microbatches ---------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        return len(self.done) == self.num_microbatches

    def waiting(self) -> list[int]:
        """Microbatches that are neither done nor under way, lowest first."""
        return [
            index
            for index in range(self.num_microbatches)
            if index not in self.done and index not in self.open
        ]

    @property
    def placed(self) -> bool:
        """Whether every microbatch has a whole route: one that a replica has fenced lacks a hop
        until it is issued again."""
        return not self.waiting() and all(None not in hops for hops in self.hops)

    def issue(self, index: int, now: float, exclude: Sequence[str] = ()) -> Issue | None:
        """Draw the missing hops of a microbatch and open a new try. None: no such route now."""
        for stage in range(self.num_stages):
            for name in self.router.replicas(stage):
                # It could be given work and never be voided.
                if self.active.get(name) != stage and name not in exclude:
                    self.router.remove(name)
        hops = self.hops[index]
        kept = {stage: name for stage, name in enumerate(hops) if name is not None}
        stages = range(self.num_stages)
        draw = partial(self.router.route, stages, exclude, now, kept, patient=not kept)
        drawn = draw()
        if drawn is None:  # better two who could not reach each other than nobody
            drawn = draw(reluctantly=True)
        if drawn is None:
            return None
        self.begun.add(index)
        self.hops[index] = [choice.replica for choice in drawn]
        self.open[index] = self.next_try()
        route = tuple(choice.replica for choice in drawn)
        return Issue(index, self.tries, route, bool(kept))

    def next_try(self) -> int:
        """A number no try or reset of this term has had."""
        self.tries += 1
        return self.tries

    def acknowledge(self, issue: Issue) -> bool:
        """Every hop of the route has counted it. False when the route has changed since."""
        if self.open.get(issue.index) != issue.try_ or tuple(self.hops[issue.index]) != issue.route:
            return False
        del self.open[issue.index]
        self.done.add(issue.index)
        self.begun.discard(issue.index)
        return True

    def is_open(self, issue: Issue) -> bool:
        """Whether that try is under way still: no other of its microbatch can be."""
        return self.open.get(issue.index) == issue.try_

    def give_back(self, issue: Issue) -> None:
        """A try failed without anybody being to blame, or after the blame was settled."""
        if self.is_open(issue):
            del self.open[issue.index]

    def fenced(self, issue: Issue, replica: str) -> None:
        """`replica` has confirmed that it has not counted `issue` and never will at this try."""
        hops = self.hops[issue.index]
        if self.is_open(issue) and replica in hops:
            hops[hops.index(replica)] = None

    def holds(self, index: int, replica: str) -> bool:
        """`replica` takes part, and is on the route of `index`."""
        return replica in self.active and replica in self.hops[index]

    # ---- averaging ------------------------------------------------------------------------------

    def next_attempt(self) -> int:
        self.attempt += 1
        return self.attempt

    def groups(self) -> list[Group]:
        """Per stage, the members and the microbatches each must have counted once all are done.

        ValueError while one is still to be given away.
        """
        if not self.placed:
            lacks = [n for n, hops in enumerate(self.hops) if None in hops] or self.waiting()
            raise ValueError(f"step {self.number} lacks {lacks[:5]}")
        counted: dict[str, list[int]] = {name: [] for name in self.active}
        for index, hops in enumerate(self.hops):
            for name in hops:
                assert name is not None
                counted[name].append(index)
        return [
            Group(stage, tuple(members), {name: counted[name] for name in members})
            for stage in range(self.num_stages)
            for members in [self.replicas(stage)]
        ]
