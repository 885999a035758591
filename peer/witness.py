"""Processes that write down what they did, so that others can check the books of a run.

A leader and peers of a local swarm as in `peer.local_entry`, unchanged but for a `witness.jsonl`
each. A line is handed to the kernel before what it tells of has any effect elsewhere, so it
survives the process's kill -9. Every replica writes which microbatches lie in the accumulator that
it gives to an averaging attempt, before it answers; the leader writes each record it committed.
`audit` holds the two against each other: in the committed attempt of every step, the members of
each stage together must have counted every microbatch exactly once.

    class Watched(LocalSwarm):
        leader_target, peer_target = WITNESSED_LEADER, WITNESSED_PEER
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer import local_entry

if TYPE_CHECKING:
    from peer.run_leader import LeaderProcess
    from peer.run_peer import PeerProcess

WITNESSED_LEADER = "peer.witness:leader"
WITNESSED_PEER = "peer.witness:peer"
FILE = "witness.jsonl"
POINTS = frozenset(
    {
        "issue",
        "acknowledged",
        "failed",
        "suspected",
        "expelled",
        "round_failed",
        "hold",
        "paused",
        "admitted",
        "left",
        "diverged",
        "epoch",
    }
)


class Witness:
    """Appends lines to a file, each with one write."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, point: str, **facts: Any) -> None:
        line = json.dumps({"t": time.time(), "point": point, **facts}, default=str)
        os.write(self._fd, b"\n" + line.encode() + b"\n")


def leader(
    arguments: Mapping[str, Any],
    tell: local_entry.Tell,
    make: type[LeaderProcess] | None = None,
) -> int:
    """As `local_entry.leader`, with a witness."""
    from peer.run_leader import LeaderProcess
    from peer.training import StepResult

    witness = Witness(Path(arguments["run_dir"]) / "peers" / "leader" / FILE)

    base: Any = make or LeaderProcess

    class WitnessedLeader(base):
        def __init__(self, *args: Any, **options: Any) -> None:
            on_step = options.pop("on_step")

            def committed(result: StepResult) -> None:
                if result.record is not None:
                    witness.write("record", **record_line(result.record))
                on_step(result)

            super().__init__(*args, on_step=committed, **options)

        def _note(self, point: str, **facts: Any) -> None:
            if point in POINTS:
                witness.write(point, **facts)
            super()._note(point, **facts)

    return local_entry.leader(arguments, tell, WitnessedLeader)


def peer(
    arguments: Mapping[str, Any],
    tell: local_entry.Tell,
    make: type[PeerProcess] | None = None,
) -> int:
    """As `local_entry.peer`, with a witness."""
    from peer.run_peer import PeerProcess
    from swarm.terms import Ballot

    witness = Witness(Path(arguments["data_dir"]) / FILE)

    base: Any = make or PeerProcess
    member: Any = base.member_type
    orders: Any = member.orders_type

    class WitnessedOrders(orders):
        async def _prepare(self, ballot: Ballot, *args: Any, **options: Any) -> Any:
            server = self.server
            witness.write(
                "prepare",
                ballot=[list(ballot.term), ballot.step, ballot.attempt],
                stage=server.stage,
                replica=server.links.incarnation,
                counted=sorted(server.parts.ledger.counted),
            )
            return await super()._prepare(ballot, *args, **options)

    class WitnessedMember(member):
        orders_type = WitnessedOrders

    class WitnessedPeer(base):
        member_type = WitnessedMember

    return local_entry.peer(arguments, tell, WitnessedPeer)


def record_line(record: Any) -> dict[str, Any]:
    """What of a record the books need."""
    ballot = record.ballot
    return {
        "ballot": [list(ballot.term), ballot.step, ballot.attempt],
        "members": {str(stage): list(who) for stage, who in sorted(record.members.items())},
        "tokens": record.tokens,
    }


def records_on_disk(run_dir: Path) -> list[dict[str, Any]]:
    """The newest records of a run's only trainer, which does not run now.

    A leader that is killed between its commit and its line about it leaves only this. What the
    only trainer has accepted is committed: its next life completes it.
    """
    from peer.disk import FileDisk

    disk = FileDisk(run_dir / "trainer")
    try:
        vote = disk.vote
        accepted = vote.accepted.record if vote.accepted is not None else None
        return [record_line(each) for each in (vote.committed, accepted) if each is not None]
    finally:
        disk.close()


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines, also while the file grows."""
    try:
        data = path.read_bytes()
    except OSError:
        return
    for line in data.splitlines():
        if line:
            try:
                yield json.loads(line)
            except ValueError:
                continue  # cut off by a kill, or still being written


@dataclass(slots=True)
class Audit:
    """`unwitnessed` names (step, stage, replica) of whom no word was found. `epochs`: how often the
    run went back to a checkpoint, and `again` how many of its steps were committed once more."""

    steps: int = 0
    microbatches: int = 0
    lost: int = 0
    duplicated: int = 0
    unwitnessed: list[tuple[int, int, str]] = field(default_factory=list)
    epochs: int = 0
    again: int = 0

    @property
    def clean(self) -> bool:
        return not (self.lost or self.duplicated or self.unwitnessed)


def audit(
    run_dir: Path,
    *,
    num_steps: int,
    num_stages: int,
    num_microbatches: int,
    extra_records: Iterable[Mapping[str, Any]] = (),
) -> Audit:
    """Hold the records of steps 0 to `num_steps` - 1 against what their members had counted.

    Of a run that went back to a checkpoint a step has several records; that of the newest epoch is
    what became of it.
    """
    told = list(lines_of(run_dir / "peers" / "leader" / FILE))
    records: dict[int, Mapping[str, Any]] = {}
    committed: set[tuple[int, int]] = set()  # epoch and step
    for line in [*extra_records, *(each for each in told if each["point"] == "record")]:
        step, epoch = int(line["ballot"][1]), int(line["ballot"][0][0])
        if not line["members"]:
            continue  # it opens an epoch, and trains nothing
        committed.add((epoch, step))
        if step not in records or epoch >= int(records[step]["ballot"][0][0]):
            records[step] = line
    counted: dict[str, list[int]] = {}
    for path in sorted((run_dir / "peers").glob(f"*/{FILE}")):
        for line in lines_of(path):
            if line["point"] == "prepare":
                counted[_key(line["ballot"], line["replica"])] = line["counted"]
    opened = {int(line["epoch"]) for line in told if line["point"] == "epoch"}
    found = Audit(steps=num_steps, epochs=len(opened), again=len(committed) - len(records))
    for step in range(num_steps):
        record = records.get(step)
        for stage in range(num_stages):
            found.microbatches += num_microbatches
            if record is None:
                found.unwitnessed.append((step, stage, "no record"))
                continue
            times: Counter[int] = Counter()
            for replica in record["members"][str(stage)]:
                ledger = counted.get(_key(record["ballot"], replica))
                if ledger is None:
                    found.unwitnessed.append((step, stage, replica))
                else:
                    times.update(ledger)
            found.lost += sum(times[index] == 0 for index in range(num_microbatches))
            found.duplicated += sum(number - 1 for number in times.values())
    return found


@dataclass(frozen=True, slots=True)
class Stall:
    """A time without an acknowledged microbatch, in unix seconds, and what the leader wrote in it.

    `committed`: when a step was committed in it, if one was.
    """

    began: float
    ended: float
    committed: float | None = None
    noted: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def longest_stall(run_dir: Path, since: float, until: float) -> Stall:
    """The longest one between two moments (unix seconds)."""
    lines = sorted(
        (
            line
            for line in lines_of(run_dir / "peers" / "leader" / FILE)
            if "t" in line and since <= line["t"] <= until
        ),
        key=lambda line: line["t"],
    )
    acknowledged = [line["t"] for line in lines if line["point"] == "acknowledged"]
    pairs = itertools.pairwise([since, *acknowledged, until])
    began, ended = max(pairs, key=lambda pair: pair[1] - pair[0])
    inside = [line for line in lines if began < line["t"] < ended]
    commits = [line["t"] for line in inside if line["point"] == "record"]
    noted = Counter(line["point"] for line in inside)
    return Stall(began, ended, commits[0] if commits else None, dict(sorted(noted.items())))


def _key(ballot: Any, replica: str) -> str:
    return json.dumps([ballot, replica])
