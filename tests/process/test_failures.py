"""Real processes killed, frozen and asked to leave: nothing lost, nothing counted twice.

Small versions of `swarm chaos`, each with a script of its own. Whatever happens, the run ends with
the baseline's bits, and the books (`peer.witness`) show every microbatch once per stage and step.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from peer.chaos import baseline_sha256
from peer.launch import stamp
from peer.local import LEADER
from peer.local_server import _children_of
from peer.witness import FILE, audit, lines_of, longest_stall, records_on_disk
from swarm.config import load_config
from swarm.net.channel import SILENCE_S
from swarm.net.identity import load_identity
from tests.process.counted import Counted, Work
from tests.process.doomed import (
    DONOR,
    LIAR,
    LIED,
    MOMENTS,
    RECOMPUTED,
    REGRETTED,
    SHY,
    THRIFTY,
    Doomed,
    Forgetful,
    Shy,
    Thrifty,
)
from tests.process.forks import Forks, toml
from tests.process.slowed import Slowed
from tests.process.stoppable import NOTICED_S, FailingKernels, Resettable, Stoppable

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
        await swarm.within_a_step()
        began = time.time()
        swarm.freeze("0b")
        await swarm.until(lambda: swarm.events("left"), "the silence to be noticed")
        (left,) = swarm.events("left")
        assert SILENCE_S - 2.0 < left["t"] - began < NOTICED_S, left
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
        began = time.time()
        os.kill(daemon, signal.SIGSTOP)
        await swarm.until(lambda: swarm.events("left"), "the silence to be noticed")
        (left,) = swarm.events("left")
        assert left["t"] - began < NOTICED_S, left
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
    """Alone first, then together with a replica. Of the step that the first one leaves unfinished
    nothing that was counted is computed again."""
    counted: list[Work] = []

    async def script(swarm: Stoppable) -> list[dict]:
        assert isinstance(swarm, Counted)
        found: list[dict] = []
        for also in ((), ("0b",)):
            swarm.kernels.hold()
            await swarm.until(lambda: swarm.kernels.held(2), "the middle of a step")
            if not also:
                counted.extend(swarm.kernels.held(2))
            swarm.kill_leader()
            for name in also:
                swarm.kill_peer(name)
            await swarm.ended(LEADER)
            swarm.kernels.go_on()
            found += records_on_disk(swarm.run_dir)
            link = swarm.link
            await swarm.restart_leader()
            assert swarm.link == link
            await swarm.until(lambda: swarm.status().get("state") == "training", "its return")
            await swarm.until_step(2)
        return found

    swarm = check({0: 2, 1: 1}, script, Counted)
    assert len(swarm.events("run")) == 3
    assert isinstance(swarm, Counted)
    swarm.kernels.assert_once(counted)


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


def test_joiners_whose_downloads_last_for_steps(check: Check) -> None:
    """Nobody waits for the first. Of the second's donors one is killed: the others give what is
    left, and only that."""

    async def script(swarm: Stoppable) -> list[dict]:
        assert isinstance(swarm, Thrifty)
        await swarm.add_doomed(1, THRIFTY)
        await swarm.until_said("1c", "serving stage 1", 1)
        for name in ("1d", "1e", "1f", "1g"):  # until several donors were at the same step
            await swarm.add_doomed(1, THRIFTY)
            await swarm.until(partial(swarm.notes, name, "donors"), "the choice of donors")
            donors = swarm.notes(name, "donors")[0]["donors"]
            if len(donors) > 1:
                break
            await swarm.until_said(name, "serving stage 1", 1)
        assert len(donors) > 1, "no two donors were ever at the same step"
        joiners[1] = name
        others = [each for each in swarm.processes if each.startswith("1") and each != "1a"]
        victim = next(each for each in others if swarm.peer_id(each) in donors)
        await swarm.until(lambda: given(swarm, victim), "a chunk of the victim")
        swarm.kill_peer(victim)
        assert "downloading 100 %" not in swarm.processes[name].log.read_text()
        await swarm.until_said(name, "serving stage 1", 1)
        await swarm.until_step(2)
        return []

    def given(swarm: Thrifty, donor: str) -> list[dict]:
        kept = swarm.notes(joiners[1], "kept")
        return [line for line in kept if line["donor"].startswith(swarm.peer_id(donor))]

    joiners = ["1c", "1d"]

    swarm = check({0: 1, 1: 2}, script, Thrifty)
    assert isinstance(swarm, Thrifty)
    books = list(lines_of(swarm.run_dir / "peers" / LEADER / FILE))
    records = [line for line in books if line["point"] == "record"]
    for name in joiners:
        asked, kept = swarm.notes(name, "asked"), swarm.notes(name, "kept")
        here = {line["index"]: line["t"] for line in reversed(kept)}
        late = [line for line in asked if line["t"] > here[line["index"]]]
        assert not late, "chunks that were here were asked for again"
        admitted = next(
            line["t"]
            for line in books
            if line["point"] == "admitted" and line["replica"].startswith(swarm.peer_id(name))
        )
        began, loaded = asked[0]["t"], max(here.values())
        during = [line["t"] for line in records if began < line["t"] < loaded]
        assert len(during) >= 3, "the download was shorter than the steps"
        assert sum(loaded < line["t"] < admitted for line in records) <= 3, "it serves too late"
        first = next(line for line in records if swarm.peer_id(name) in str(line["members"]["1"]))
        if name == "1c":
            usual_s = median(later - earlier for earlier, later in itertools.pairwise(during))
            stall_s = longest_stall(swarm.run_dir, began, first["t"]).seconds
            assert stall_s < max(2 * usual_s, (loaded - began) / 2)  # a noisy machine has hiccups
        told = swarm.reported(name, first["ballot"][1] + 1)
        assert told == swarm.reported("1a", first["ballot"][1] + 1)


def test_answers_that_were_evicted_are_computed_again(check: Check) -> None:
    """The next stage dies with what it has counted, and the stage before has nothing to repeat."""

    async def script(swarm: Stoppable) -> list[dict]:
        assert isinstance(swarm, Forgetful)
        victim = await swarm.add_doomed(1, REGRETTED)
        assert await swarm.ended(victim.name) == -signal.SIGKILL
        await swarm.until_step(1)
        return []

    swarm = check({0: 1, 1: 1}, script, Forgetful)
    assert list(lines_of(swarm.processes["0a"].data_dir / RECOMPUTED))


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
