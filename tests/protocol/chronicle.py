"""What is known of a simulated run from outside: records, terms, what replicas hold and were told.

No process of the swarm knows as much. So it can say whether a stage would survive a loss, and it
notices two records in one place even if nobody else ever would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from peer.leader import Leader
from peer.member import Member
from swarm.compute import Kind
from swarm.consensus import Key, is_majority
from swarm.net.links import peer_of
from swarm.terms import NO_TERM, Record

if TYPE_CHECKING:
    from tests.protocol.simulated import Swarm

# What the protocol did because of faults, by the point that says so.
TOLD = {
    "expelled": "expelled",
    "round_failed": "averaging repeated",
    "failed": "microbatch failed",
    "epoch": "epoch opened",
    "bad_chunk": "bad chunk",
    "moved": "moved",
    "second": "second stage",
}


class Chronicle:
    """Watches one `Swarm`. `terms`: who led in which, by (epoch, counter)."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.records: dict[str, str] = {}  # hash by that of the one before, whoever has it
        self.terms: dict[tuple[int, int], str] = {}
        self.told: Counter[str] = Counter()  # of TOLD
        self._sent: Counter[tuple[str, Any, int, int]] = Counter()  # calls from hop to hop
        self._early = 0  # terms that were won while the leader before was well
        self._crashed: dict[str, int] = {}  # which life of a process has ended, until it is back
        self._woken: set[str] = set()  # processes that were stopped, until they do something
        self._left_out: set[str] = set()  # incarnations expelled while they were stopped
        self._stale: list[Leader] = []  # that woke up when another had been elected

    def passed(self, who: str, point: str, facts: dict[str, Any]) -> None:
        """Somebody passes a point of the protocol."""
        if point == "committed":
            member = self.swarm.passing(who, facts)
            commits = member.commits if member is not None else None
            self.note_record(commits.record if commits else None)
        elif point in TOLD:
            self.told[TOLD[point]] += 1
            if point == "expelled" and peer_of(facts["replica"]) in self.swarm.network.frozen:
                self._left_out.add(facts["replica"])
        elif point == "admitted":
            self._admitted(facts["replica"])
        elif point == "sent":
            life = facts.get("life", self.swarm.lives[who])
            self._sent[who, life, facts["step"], facts["index"]] += 1
        if who in self._woken and point in ("counted", "record"):
            self._woken.remove(who)
            self.told["went on after a freeze"] += 1

    def _admitted(self, incarnation: str) -> None:
        name, _, life = incarnation.partition("#")
        if int(life) > self._crashed.get(name, int(life)):
            del self._crashed[name]
            self.told["admitted after a crash"] += 1
        if incarnation in self._left_out and name not in self.swarm.network.frozen:
            self._left_out.remove(incarnation)
            self.told["admitted after a freeze"] += 1

    def crashed(self, name: str) -> None:
        """A process ends; what it comes back as is another life."""
        self._crashed[name] = self.swarm.lives[name]
        self._woken.discard(name)

    def woke(self, name: str) -> None:
        """A process that was stopped is no longer."""
        self._woken.add(name)
        trainer = self.swarm.trainers.get(name)
        leader = trainer.leader if trainer is not None else None
        if leader is not None and (leader.term.epoch, leader.term.counter) < max(self.terms):
            self._stale.append(leader)

    def begins_to_lead(self, name: str, leader: Leader) -> None:
        if not NO_TERM < leader.term == leader.quorum.term:
            self.swarm.fail(AssertionError(f"{name} leads in no term of its own"))
        network = self.swarm.network
        for other, trainer in self.swarm.trainers.items():
            if trainer.leader not in (None, leader) and other not in network.frozen:
                if frozenset((name, other)) in network.cuts:
                    self.told["leaders apart"] += 1
                else:
                    self._early += 1
        self.terms[leader.term.epoch, leader.term.counter] = name

    @property
    def effects(self) -> Counter[str]:
        """What the faults did, beyond that they were injected."""
        effects = Counter(self.swarm.network.effects) + self.told
        effects["repeated"] = sum(count - 1 for count in self._sent.values())
        effects["early takeover"] = self._early
        refused = [leader for leader in self._stale if leader.quorum.term != leader.term]
        effects["frozen leader refused"] = len(refused)
        effects["takeover"] = max(len(self.terms) - 1, 0)
        effects["answer evicted"] = self.swarm.evicted
        effects["chunks not fetched again"] = self.swarm.resumed
        return +effects

    # ---- records --------------------------------------------------------------------------------

    def note_record(self, record: Record | None) -> None:
        """No two records follow the same one, whoever holds them."""
        if record is not None:
            known = self.records.setdefault(record.predecessor, record.hash)
            if known != record.hash:  # raised here, it would be the process's to deal with
                self.swarm.fail(AssertionError(f"two records of step {record.step}"))

    def voted(self) -> None:
        """What a majority has accepted under one key is chosen, whether anybody knows or not."""
        accepted: dict[Key, list[str]] = {}
        for name, disk in self.swarm.disks.items():
            if (mine := disk.durable.accepted) is not None and mine.record is not None:
                accepted.setdefault(mine.key, []).append(name)
                if is_majority(accepted[mine.key], self.swarm.trainer_ids):
                    self.note_record(mine.record)
            self.note_record(disk.durable.committed)

    # ---- what a loss would cost -----------------------------------------------------------------

    def stays(self, name: str, replica: Member) -> bool:
        """Whether nothing is under way that takes a process's states away."""
        failing = self.swarm.computes[name].will_fail(Kind.UPDATE)
        return name not in self.swarm.leaving and not failing and not self.swarm.is_moving(name)

    def stays_for_now(self, name: str, replica: Member) -> bool:
        """Wherever it wants to go: it has not been told that it may."""
        return not replica.finished.is_set()

    def can_spare_now(self, name: str) -> bool:
        """`can_lose`, where others that will raise as well have not yet."""

        def there(other: str, replica: Member) -> bool:
            leaves = other in self.swarm.leaving or self.swarm.is_moving(other)
            return not leaves and not self.swarm.computes[other].failed[Kind.UPDATE]

        return self.can_lose(name, to=there)

    def can_lose(self, name: str, to: Callable[[str, Member], bool] | None = None) -> bool:
        """Whether others hold all that a process's stages need to go on; else only a checkpoint
        helps. Others are those for whom `to` is true, `stays` by default."""
        return all(self.can_spare(name, each, to) for each in self.swarm.replicas_of(name))

    def can_spare(
        self, name: str, replica: Member, to: Callable[[str, Member], bool] | None = None
    ) -> bool:
        """The same of one replica of a process."""
        lost = replica.server
        if lost is None:
            return not self.swarm.is_alone(name, replica)
        disks = self.swarm.disks.values()
        votes = [vote for disk in disks for vote in (disk.durable, *disk.writing.values())]
        records = [vote.committed for vote in votes if vote.committed is not None]
        newest = max(records, key=lambda each: each.position, default=None)
        next_step = newest.step + 1 if newest else 0
        # What one trainer has accepted may be committed, and not known to be.
        pending = [
            vote.accepted.record
            for vote in votes
            if vote.accepted is not None
            and vote.accepted.record is not None
            and vote.accepted.key.step == next_step
        ]
        return any(
            _has_state(other, lost.stage, next_step, newest, pending)
            for each in self.swarm.processes
            for other in self.swarm.replicas_of(each)
            if each != name and (to or self.stays)(each, other)
        )


def _has_state(
    member: Member,
    stage: int,
    next_step: int,
    newest: Record | None,
    pending: Sequence[Record],
) -> bool:
    """Whether it is, or will be by itself, at the newest state there may be of its stage."""
    server, commits = member.server, member.commits
    if server is None or commits is None or server.stage != stage or not commits.valid:
        return False
    sha256 = commits.prepared.update.facts.sha256 if commits.prepared else ""
    step = server.parts.ledger.step
    if step == next_step:
        return all(sha256 == record.gradients[stage] for record in pending)
    if newest is None or step != next_step - 1:
        return step > next_step
    return not pending and sha256 == newest.gradients[stage]
