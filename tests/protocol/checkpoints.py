"""Checkpoints of a simulated swarm: whole states in memory, which outlive every process."""

from __future__ import annotations

from peer.inquiries import snapshot_mark
from peer.member import Member
from peer.restoring import Origin
from peer.snapshots import Snapshot
from swarm.errors import DataError
from swarm.terms import Record


def snapshot_of(member: Member) -> Snapshot | None:
    """A copy of its state at its step, if it has one."""
    server, commits = member.server, member.commits
    if server is None or commits is None or not commits.valid:
        return None
    tensors = {name: each.clone() for name, each in server.state.tensors().items()}
    snapshot = Snapshot(server.parts.ledger.step, server.state.updates, "", commits.record, tensors)
    snapshot.fingerprint = snapshot_mark(snapshot)
    return snapshot


class MemorySaved:
    """What trainers find when they go back. `broken`: steps that cannot be read. `epoch`: the
    highest that is said of them."""

    def __init__(self) -> None:
        self.states: dict[int, list[Snapshot]] = {}
        self.broken: set[int] = set()
        self.epoch = 0

    def keep(self, step: int, states: list[Snapshot]) -> None:
        self.states[step] = states

    async def newest(self, record: Record | None) -> Origin:
        limit = record.step + 1 if record else 0
        for step in sorted(self.states, reverse=True):
            if step <= limit and step not in self.broken:
                marks = {k: each.fingerprint for k, each in enumerate(self.states[step])}
                return Origin(step, f"manifest {step}", marks)
        return Origin(0)

    async def highest_epoch(self) -> int:
        return self.epoch

    async def state(self, record: Record, stage: int) -> Snapshot:
        if record.step + 1 in self.broken:
            raise DataError("damaged")
        return self.states[record.step + 1][stage]


class Checkpoints(MemorySaved):
    """One every `every` steps, of what the first of each stage has that applies a commit. It is
    complete, and counts, when every stage's part is there."""

    def __init__(self, every: int, num_stages: int) -> None:
        super().__init__()
        self.every, self.num_stages = every, num_stages
        self._parts: dict[int, dict[int, Snapshot]] = {}

    def note(self, member: Member) -> int | None:
        """It has applied a commit. The step of the checkpoint that became complete with it."""
        server = member.server
        step = server.parts.ledger.step if server else 0
        if server is None or step % self.every or step in self.states:
            return None
        parts = self._parts.setdefault(step, {})
        if server.stage not in parts and (snapshot := snapshot_of(member)) is not None:
            parts[server.stage] = snapshot
        if len(parts) < self.num_stages:
            return None
        self.keep(step, [parts[stage] for stage in range(self.num_stages)])
        return step
