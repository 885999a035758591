"""Real processes that find their places, and one that moves: the same bits as one process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from peer.chaos import baseline_sha256
from peer.launch import stamp
from peer.local import LEADER
from peer.witness import audit
from swarm.config import load_config
from swarm.net.identity import load_identity
from swarm.net.links import peer_of
from tests.process.forks import Forks, toml
from tests.process.slowed import Slowed
from tests.process.stoppable import Stoppable

PEERS = 5


def check(swarm: Stoppable, report: dict[str, Any]) -> None:
    """Every microbatch counts once, and the hash is the baseline's."""
    config = swarm.config
    books = audit(
        swarm.run_dir,
        num_steps=report["steps"],
        num_stages=config.model.stages,
        num_microbatches=config.batch.microbatches,
        extra_records=[],
    )
    assert books.clean, books
    cache = swarm.run_dir.parent / "cache"
    assert report["sha256"] == baseline_sha256(config, report["steps"], cache)


def test_a_peer_moves_to_a_stage_that_has_lost_one(forks: Forks, tmp_path: Path) -> None:
    """Five choose between two stages, the emptier one loses all but one, and a peer of the other
    moves there. Every microbatch counts once, and the hash is the baseline's."""
    identity = load_identity(tmp_path / "identity.key")
    path = toml(tmp_path / "run.toml", steps=100_000, stages=2)
    config = stamp(load_config(path), identity.peer_id, tmp_path / "cache")
    swarm = Stoppable(
        config,
        tmp_path / "run",
        peers=[(None, 1)] * PEERS,
        identity_path=identity.path,
        threads=1,
        device="cpu",
        cache_dir=tmp_path / "cache",
        server=forks.server,
        say=lambda line: None,
    )

    def serving() -> dict[str, int]:
        """Stage by peer id."""
        rows = swarm.status().get("replicas", [])
        there = [row for row in rows if row["standing"] == "serving"]
        return {row["replica"].partition("#")[0]: row["stage"] for row in there}

    async def main() -> Any:
        try:
            await swarm.start()
            await swarm.until(lambda: len(serving()) == PEERS, "five to serve")
            await swarm.until_step(2)
            stages = serving()
            counts = [list(stages.values()).count(stage) for stage in range(2)]
            thin = counts.index(min(counts))
            doomed = [peer for peer, stage in stages.items() if stage == thin][1:]
            for name, process in swarm.processes.items():
                key = process.data_dir / "identity.key"
                if name != LEADER and load_identity(key).peer_id in doomed:
                    swarm.kill_peer(name)
            await swarm.until(
                lambda: list(serving().values()).count(thin) >= 2 and swarm.events("moved"),
                "somebody to move",
            )
            await swarm.until_step(2)
            swarm.enough()
            return await swarm.wait()
        finally:
            await swarm.stop()

    report = forks.run(main())
    assert all(event["reason"] for event in swarm.events("move"))
    check(swarm, report)


def test_a_stage_whose_only_peer_is_killed_goes_on_with_those_who_hold_it_as_well(
    forks: Forks, tmp_path: Path
) -> None:
    """Three peers of two stages, all told to hold the other one too. Whoever is alone in its own
    stage is killed: nothing waits, nothing goes back, and the hash is the baseline's."""
    identity = load_identity(tmp_path / "identity.key")
    path = toml(tmp_path / "run.toml", steps=100_000, stages=2)
    config = stamp(load_config(path), identity.peer_id, tmp_path / "cache")
    swarm = Stoppable(
        config,
        tmp_path / "run",
        peers={0: 2, 1: 1},
        identity_path=identity.path,
        threads=1,
        device="cpu",
        cache_dir=tmp_path / "cache",
        second_stages=1.0,
        server=forks.server,
        say=lambda line: None,
    )

    def name_of(peer_id: str) -> str:
        keys = {name: each.data_dir / "identity.key" for name, each in swarm.processes.items()}
        return next(
            name
            for name, key in keys.items()
            if name != LEADER and load_identity(key).peer_id == peer_id
        )

    def serving(*, second: bool) -> dict[str, int]:
        """Peer -> its own stage, or the one it holds besides."""
        rows = [row for row in swarm.status()["replicas"] if row["standing"] == "serving"]
        return {peer_of(row["replica"]): row["stage"] for row in rows if row["second"] is second}

    def alone() -> list[str]:
        own = serving(second=False)
        return [peer for peer in own if list(own.values()).count(own[peer]) == 1]

    async def main() -> Any:
        try:
            await swarm.start()
            await swarm.until(
                lambda: len(serving(second=False)) == len(serving(second=True)) == 3,
                "three to hold two",
            )
            await swarm.until(alone, "one to be alone in its own stage")
            swarm.kill_peer(name_of(alone()[0]))
            await swarm.until_step(3)
            swarm.enough()
            return await swarm.wait()
        finally:
            await swarm.stop()

    report = forks.run(main())
    assert all("hold stage" in event["reason"] for event in swarm.events("second"))
    assert not swarm.events("paused")
    assert not swarm.events("epoch")
    check(swarm, report)


def test_up_has_its_peers_hold_second_stages(forks: Forks, tmp_path: Path) -> None:
    path = toml(tmp_path / "run.toml", steps=100_000, stages=2)
    up = forks.swarm("up", path, "--plain", "--threads", "1", "--second-stages", "1")
    for stage in (0, 1):  # whoever moves first because of what was measured
        up.says(f"is to hold stage {stage} besides")
    up.signal(signal.SIGINT)
    assert up.code() == 130, up


def test_six_settle_two_die_and_one_slows_down(forks: Forks, tmp_path: Path) -> None:
    """The last of three stages costs four times as much. Six that choose for themselves settle;
    two of that stage are killed, and the other four find places that are as good as the best;
    one becomes five times slower and loses its load; then the only one of a cheap stage does, and
    somebody moves there. The hash is the baseline's."""
    identity = load_identity(tmp_path / "identity.key")
    path = toml(tmp_path / "run.toml", steps=100_000)
    path.write_text(path.read_text().replace("microbatches = 6", "microbatches = 12"))
    config = stamp(load_config(path), identity.peer_id, tmp_path / "cache")
    swarm = Slowed(
        config,
        tmp_path / "run",
        peers=[(None, 1)] * 6,
        identity_path=identity.path,
        threads=1,
        device="cpu",
        cache_dir=tmp_path / "cache",
        server=forks.server,
        say=lambda line: None,
    )
    dear = 2

    async def main() -> Any:
        try:
            await swarm.start()
            # What is measured first misleads, so that two in each stage may look best for a moment.
            await swarm.until(
                lambda: len(swarm.there(dear)) >= 3 and swarm.settled(6), "the best of the six"
            )
            for name in swarm.there(dear)[:2]:
                swarm.kill_peer(name)
            slow, *_ = await swarm.until(
                lambda: swarm.settled(4) and swarm.there(dear), "the best of the survivors"
            )
            even = 1 / swarm.num_serving(dear)
            swarm.slow_down(slow, 5)
            await swarm.until_step(1)
            since = len(swarm.routes())
            await swarm.until_step(3)
            assert swarm.share_of(slow, since) < 0.7 * even
            swarm.slow_down(slow, 1)

            moved = len(swarm.events("moved"))
            cheap = next(stage for stage in (0, 1) if swarm.num_serving(stage) == 1)
            alone = next(name for name, stages in swarm.serving().items() if cheap in stages)
            swarm.slow_down(alone, 5)
            await swarm.until(
                lambda: any(event["target"] == cheap for event in swarm.events("moved")[moved:]),
                "somebody to help",
            )
            swarm.enough()
            return await swarm.wait()
        finally:
            await swarm.stop()

    report = forks.run(main())
    check(swarm, report)
