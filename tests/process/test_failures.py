"""Real processes killed, frozen and asked to leave: nothing lost, nothing counted twice.

Small versions of `swarm chaos`, each with a script of its own. Whatever happens, the run ends with
the baseline's bits, and the books (`peer.witness`) show every microbatch once per stage and step.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from peer.chaos import baseline_sha256
from peer.launch import stamp
from peer.local import LEADER
from peer.local_server import _children_of
from peer.witness import FILE, audit, lines_of, records_on_disk
from swarm.config import load_config
from swarm.net.channel import SILENCE_S
from swarm.net.identity import load_identity
from tests.process.doomed import DONOR, LIAR, LIED, MOMENTS, RECOMPUTED, SHY, Doomed, Forgetful, Shy
from tests.process.forks import Forks, toml
from tests.process.slowed import Slowed
from tests.process.stoppable import FailingKernels, Resettable, Stoppable

Script = Callable[[Stoppable], Awaitable[list[dict]]]


class Check:
    def __init__(self, forks: Forks, where: Path) -> None:
        self.forks, self.where = forks, where

    def __call__(
        self,
        peers: dict[int, int],
        script: Script,
        kind: type[Stoppable] = Stoppable,
        *,
        microbatches: int = 6,
    ) -> Stoppable:
        """Train under the script, then hold the run against its baseline and its books."""
        identity = load_identity(self.where / "identity.key")
        path = toml(self.where / "run.toml", steps=100_000, stages=len(peers))
        text = path.read_text()
        path.write_text(text.replace("microbatches = 6", f"microbatches = {microbatches}"))
        config = stamp(load_config(path), identity.peer_id, self.where / "cache")
        swarm = kind(
            config,
            self.where / "run",
            peers=peers,
            identity_path=identity.path,
            threads=1,
            device="cpu",
            cache_dir=self.where / "cache",
            server=self.forks.server,
            say=lambda line: None,
        )

        async def main() -> tuple[dict, list[dict]]:
            try:
                await swarm.start()
                await swarm.until_step(2)
                records = await script(swarm)
                swarm.enough()
                return await swarm.wait(), records
            finally:
                await swarm.stop()

        report, records = self.forks.run(main())
        books = audit(
            swarm.run_dir,
            num_steps=report["steps"],
            num_stages=len(peers),
            num_microbatches=microbatches,
            extra_records=records,
        )
        assert books.clean, books
        assert report["sha256"] == baseline_sha256(config, report["steps"], self.where / "cache")
        return swarm


@pytest.fixture
def check(forks: Forks, tmp_path: Path) -> Check:
    return Check(forks, tmp_path)


def test_killed_within_a_step_then_another_joins(check: Check) -> None:
    async def script(swarm: Stoppable) -> list[dict]:
        await swarm.within_a_step()
        swarm.kill_peer("1b")
        await swarm.until(lambda: swarm.events("left"), "the end to be noticed")
        await swarm.until_step(1)
        await swarm.add_peer(1)
        await swarm.until(lambda: swarm.num_serving(1) == 2, "the joiner")
        swarm.kill_peer("1a")  # what it alone held is the joiner's now
        await swarm.until(lambda: len(swarm.events("left")) == 2, "the second end")
        await swarm.until_step(2)
        return []

    check({0: 1, 1: 2}, script)


def test_frozen_beyond_the_silence_limit_then_thawed(check: Check) -> None:
    async def script(swarm: Stoppable) -> list[dict]:
        loop = asyncio.get_running_loop()
        await swarm.within_a_step()
        began = loop.time()
        swarm.freeze("0b")
        await swarm.until(lambda: swarm.events("left"), "the silence to be noticed")
        assert loop.time() - began > SILENCE_S - 2.0
        await swarm.until_step(2)  # its twin alone
        assert swarm.num_serving(0) == 1
        swarm.thaw("0b")
        await swarm.until(lambda: swarm.num_serving(0) == 2, "its return")
        await swarm.until_step(2)
        return []

    swarm = check({0: 2, 1: 1}, script)
    said = swarm.processes["0b"].log.read_text()
    assert "lost the leader" in said
    assert said.count("serving stage 0") == 2, said


def test_cut_off_by_its_network_then_reached_again(check: Check) -> None:
    """Only the daemon stands still: the replica works on, and nobody hears of it."""

    async def script(swarm: Stoppable) -> list[dict]:
        await swarm.within_a_step()
        (daemon,) = _children_of(swarm.processes["0b"].child.pid)
        os.kill(daemon, signal.SIGSTOP)
        await swarm.until(lambda: swarm.events("left"), "the silence to be noticed")
        await swarm.until_step(2)  # its twin alone
        assert swarm.num_serving(0) == 1
        os.kill(daemon, signal.SIGCONT)
        await swarm.until(lambda: swarm.num_serving(0) == 2, "its return")
        await swarm.until_step(2)
        return []

    swarm = check({0: 2, 1: 1}, script)
    assert swarm.processes["0b"].log.read_text().count("serving stage 0") == 2


def test_a_polite_leave_costs_nothing(check: Check) -> None:
    async def script(swarm: Stoppable) -> list[dict]:
        await swarm.within_a_step()
        swarm.stop_peer("0b")
        assert await swarm.ended("0b") == 0
        await swarm.until_step(2)
        return []

    swarm = check({0: 2, 1: 1}, script)
    assert len(swarm.events("leaving")) == 1
    for kind in ("expelled", "failed", "round_failed"):
        assert swarm.events(kind) == []
    issued = [
        (line["step"], line["index"])
        for line in lines_of(swarm.run_dir / "peers" / LEADER / FILE)
        if line["point"] == "issue"
    ]
    assert len(issued) == len(set(issued)), "a microbatch was issued again"


def test_the_leader_killed_and_started_again(check: Check) -> None:
    """Alone first, then together with a replica."""

    async def script(swarm: Stoppable) -> list[dict]:
        found: list[dict] = []
        for also in ((), ("0b",)):
            await swarm.within_a_step()
            swarm.kill_leader()
            for name in also:
                swarm.kill_peer(name)
            await swarm.ended(LEADER)
            found += records_on_disk(swarm.run_dir)
            link = swarm.link
            await swarm.restart_leader()
            assert swarm.link == link
            await swarm.until(lambda: swarm.status().get("state") == "training", "its return")
            await swarm.until_step(2)
        return found

    swarm = check({0: 2, 1: 1}, script)
    assert len(swarm.events("run")) == 3


def test_all_streams_of_a_replica_are_reset(check: Check) -> None:
    """Whatever they carried: it is the same process, and serves again within the run."""

    async def script(swarm: Stoppable) -> list[dict]:
        assert isinstance(swarm, Resettable)
        await swarm.within_a_step()
        swarm.reset("1b")
        await swarm.until_said("1b", "lost the leader", 1)
        await swarm.until_said("1b", "serving stage 1", 2)
        await swarm.until_step(2)
        return []

    swarm = check({0: 1, 1: 2}, script, Resettable)
    assert swarm.events("left")


def test_kernels_that_raise_or_give_nan_now_and_then(check: Check) -> None:
    async def script(swarm: Stoppable) -> list[dict]:
        def both_twice() -> bool:
            reasons = "".join(event["reason"] for event in swarm.events("failed"))
            return min(reasons.count(each) for each in ("a kernel has failed", "no number")) >= 2

        await swarm.until(both_twice, "two failures of each kind")
        await swarm.until_step(1)
        return []

    swarm = check({0: 1, 1: 2}, script, FailingKernels)
    assert all(process.alive or process.code == 0 for process in swarm.processes.values())


def test_killed_at_each_moment_of_its_work(check: Check) -> None:
    """One after the other joins stage 0, and dies at another point of its work."""

    async def script(swarm: Stoppable) -> list[dict]:
        assert isinstance(swarm, Doomed)
        for moment in MOMENTS:
            peer = await swarm.add_doomed(0, moment)
            assert await swarm.ended(peer.name) == -signal.SIGKILL, moment
            await swarm.until_step(1)
        return []

    check({0: 1, 1: 1}, script, Doomed)


def test_donors_that_lie_or_die(check: Check) -> None:
    async def script(swarm: Stoppable) -> list[dict]:
        assert isinstance(swarm, Shy)
        for fate in (LIAR, DONOR):
            donor = await swarm.add_doomed(1, fate)
            await swarm.until_said(donor.name, "serving stage 1", 1)
            swarm.shy.touch()  # so that the joiner has to ask that one
            joiner = await swarm.add_doomed(1, SHY)
            if fate == LIAR:
                await swarm.until((donor.data_dir / LIED).exists, "a lie")
            else:
                assert await swarm.ended(donor.name) == -signal.SIGKILL
            swarm.shy.unlink()
            await swarm.until_said(joiner.name, "serving stage 1", 1)
        await swarm.until_step(1)
        return []

    swarm = check({0: 1, 1: 1}, script, Shy)
    liars = {event["replica"].partition("#")[0] for event in swarm.events("bad_chunk")}
    assert liars == {load_identity(swarm.processes["1b"].data_dir / "identity.key").peer_id}


def test_answers_that_were_evicted_are_computed_again(check: Check) -> None:
    """The next stage dies with what it has counted, and the stage before has nothing to repeat."""

    async def script(swarm: Stoppable) -> list[dict]:
        again, victim = swarm.processes["0a"].data_dir / RECOMPUTED, "1b"
        for _ in range(5):  # until one dies that has counted something of a step under way
            await swarm.within_a_step()
            swarm.kill_peer(victim)
            await swarm.ended(victim)
            await swarm.until_step(1)
            if again.read_text():
                return []
            victim = (await swarm.add_peer(1)).name
            await swarm.until_said(victim, "serving stage 1", 1)
        raise AssertionError("nothing that was evicted was asked for")

    check({0: 1, 1: 2}, script, Forgetful)


def test_ten_times_slower_than_its_twin_is_not_dead(check: Check) -> None:
    """It gets about a tenth of the work, and stays."""

    async def script(swarm: Stoppable) -> list[dict]:
        assert isinstance(swarm, Slowed)
        swarm.slow_down("1b", 10.0)
        await swarm.until_step(2)
        since = len(swarm.routes())
        await swarm.until_step(4)
        assert 0.03 < swarm.share_of("1b", since) < 0.2  # 1/11 would be even
        assert swarm.events("left") == swarm.events("expelled") == []
        return []

    check({0: 1, 1: 2}, script, Slowed, microbatches=24)
