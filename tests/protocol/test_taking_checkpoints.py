"""A leader takes real checkpoints of a simulated swarm: one replica of each stage gives its state,
and its twin where that one dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer import checkpointing, checkpoints, run_dirs
from peer.checkpointing import Checkpointer
from peer.leader import Leader
from peer.snapshots import Donor
from swarm.config import RunConfig, parse_config
from swarm.model.layout import model_sha256, sha256_of
from swarm.net.channel import Channel, Message
from tests.protocol.simulated import Swarm, baseline

STEPS = 3


def config() -> RunConfig:
    return parse_config(
        {
            "run": {"name": "tiny"},
            "model": {"pipeline": "tests.protocol.tiny:TINY", "stages": 3},
            "data": {"source": "pipeline"},
            "batch": {"microbatches": 4, "microbatch_size": 4},
            "optimizer": {"name": "adamw", "lr": 0.01},
            "schedule": {"steps": STEPS},
            "checkpoint": {"keep": STEPS},
        }
    )


class Taking(Swarm):
    """Two replicas per stage; a checkpoint after every step. `asked` for a state and `giving` it,
    chunk by chunk, are the replicas of each of them; `kill_at` is the chunk of stage 1, of the
    checkpoint of step 2, instead of which its donor is killed."""

    run_dir: Path
    kill_at = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked: list[list[str]] = []
        self.giving: list[list[str]] = []
        self.taken: list[Path | None] = []
        self.killed = ""

    async def at_record(self, leader: Leader) -> None:
        await super().at_record(leader)
        if leader.next_step:
            self.asked.append([])
            self.giving.append([])
            self.taken.append(
                await Checkpointer(config(), self.pipeline, self.run_dir).take(leader)
            )

    def name_of_donor(self, donor: Donor) -> str:
        (name,) = (name for name, each in self.members.items() if each.server is donor.server)
        return name

    async def is_killed_at(self, name: str) -> None:
        """Does not return for who dies with this chunk."""
        of_stage = [each for each in self.giving[-1] if each.startswith("r1.")]
        if not self.killed and len(self.giving) == 2 and len(of_stage) == self.kill_at:
            self.killed = name
            self.later(0.0, self.kill, name)
            await asyncio.Event().wait()


@pytest.fixture
def taking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Taking:
    swarm = Taking(chunk=8)
    swarm.run_dir = tmp_path
    snapshot, chunk = Donor._snapshot, Donor._chunk

    async def asked(self: Donor, channel: Channel, message: Message) -> Message:
        if "release" not in message.body and swarm.asked:
            swarm.asked[-1].append(swarm.name_of_donor(self))
        return await snapshot(self, channel, message)

    async def giving(self: Donor, channel: Channel, message: Message) -> Message:
        swarm.giving[-1].append(name := swarm.name_of_donor(self))
        await swarm.is_killed_at(name)
        return await chunk(self, channel, message)

    async def at_once(write: Callable[..., Any], *args: Any) -> Any:
        return write(*args)

    monkeypatch.setattr(Donor, "_snapshot", asked)
    monkeypatch.setattr(Donor, "_chunk", giving)
    # A thread has no place under virtual time.
    monkeypatch.setattr(checkpointing, "asyncio", SimpleNamespace(to_thread=at_once))
    return swarm


def sha256_in(checkpoint: Path, swarm: Swarm) -> str:
    hashes = {
        name: "x".join(map(str, tensor.shape)) + ":" + sha256_of(tensor)
        for stage in range(swarm.num_stages)
        for name, tensor in checkpoints.read_stage_parameters(checkpoint, stage).items()
    }
    return model_sha256(hashes, swarm.pipeline.key_order)


def test_one_replica_of_each_stage_gives_its_part(taking: Taking) -> None:
    assert taking.run(STEPS)["sha256"] == baseline(STEPS)[0]
    for asked, giving in zip(taking.asked, taking.giving, strict=True):
        assert [name[:2] for name in sorted(asked)] == ["r0", "r1", "r2"]
        assert set(giving) == set(asked)
        assert len(giving) > 3 * len(asked)  # so there is a twin that could have given some
    saved = run_dirs.newest_first(taking.run_dir)[::-1]
    assert saved == taking.taken
    assert [sha256_in(path, taking) for path in saved] == [
        baseline(step)[0] for step in range(1, STEPS + 1)
    ]


@pytest.mark.parametrize("kill_at", [1, 2, 5])
def test_a_replica_dies_while_it_gives_and_its_twin_does(taking: Taking, kill_at: int) -> None:
    taking.kill_at = kill_at
    assert taking.run(STEPS)["sha256"] == baseline(STEPS)[0]
    first, second = (name for name in taking.asked[1] if name.startswith("r1."))
    assert taking.killed == first
    assert {first, second} == {"r1.0", "r1.1"}
    assert first not in taking.members
    path = taking.run_dir / "checkpoints" / "step-2"
    assert taking.taken[1] == path
    assert sha256_in(path, taking) == baseline(2)[0]
