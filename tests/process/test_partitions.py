"""Machines that a network keeps apart: the trainers, each with replicas, and two replicas alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.process.forks import Forks, toml
from tests.process.lab import Lab, listen_in
from tests.process.paced import PACE_S
from tests.process.stoppable import NOTICED_S
from tests.process.test_trainers import NAMES, Trainers

pytestmark = pytest.mark.usefixtures("needs_root")


def test_a_cut_leaves_replicas_of_every_stage_on_both_sides(forks: Forks, tmp_path: Path) -> None:
    """The leader is on the side with one trainer of three: that side pauses, the other goes on, and
    both are one run again when the cable is back."""
    with Lab("lan", 2) as lab:
        alone, most = lab.hosts
        run = Trainers(forks, tmp_path, 100_000, stages=2, hosts=(alone, most, most))
        for peer in run.peers:
            peer.says("serving stage ")
        run.first.says("step 3 ")
        cut_at = time.time()
        lab.plug(alone, connected=False)
        forks.until(lambda: len(run.events_of("one", "left")) == 2, "the cut to be noticed")
        for left in run.events_of("one", "left"):
            assert left["t"] - cut_at < NOTICED_S, left
        forks.until(lambda: any(run.steps_of(name) for name in NAMES[1:]), "the majority")
        led = run.steps_of("one")
        lab.plug(alone, connected=True)
        run.first.says("standing by: another trainer leads")
        for peer in run.peers[:2]:
            peer.says("serving stage ", 2)

        def leading() -> list[str]:
            return [name for name in NAMES[1:] if run.status_of(name)["state"] == "training"]

        forks.until(leading, "a status that says who leads")
        (leads,) = leading()
        asked = forks.swarm("checkpoint", tmp_path / leads)
        assert asked.code() == 0, asked
        forks.end_all()
    run.continue_after("one", led)
    (saved,) = (tmp_path / leads / "checkpoints").iterdir()
    steps = ("--steps", str(int(saved.name.removeprefix("step-")) + 1))
    whole, rest = (
        forks.swarm("baseline", run.run, *steps, *more) for more in ((), ("--resume", saved))
    )
    assert (whole.code(), rest.code()) == (0, 0), (whole, rest)
    assert whole.out.splitlines()[-1] == rest.out.splitlines()[-1]


def test_two_replicas_that_cannot_reach_each_other(forks: Forks, tmp_path: Path) -> None:
    """Microbatches find their way around: all four are in use, and nobody is sent away."""
    run = toml(tmp_path / "run.toml", steps=30, stages=2)
    run.write_text(run.read_text().replace("microbatches = 6", "microbatches = 24"))
    with Lab("lan", 5) as lab:
        apart = lab.hosts[1], lab.hosts[4]
        lab.part(*apart)
        place = ("--dir", tmp_path / "run", "--report", tmp_path / "report.jsonl")
        leader = forks.swarm("train", run, *listen_in(lab.hosts[0]), *place, host=lab.hosts[0])
        peers = []
        # Those two last: as long as one of them is alone in its stage, there is no way around.
        for together in (((2, "1"), (3, "0")), ((1, "0"), (4, "1"))):
            started = [
                forks.peer(
                    *("--join", leader.link, *listen_in(lab.hosts[number]), "--stage", stage),
                    host=lab.hosts[number],
                    pace_s=PACE_S,
                )
                for number, stage in together
            ]
            for (_, stage), peer in zip(together, started, strict=True):
                peer.says(f"serving stage {stage}")
            peers += started
        for command in (leader, *peers):
            assert command.code() == 0, command
            assert command.err == "", command
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert all(row["counted"] for row in status["replicas"]), status
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert not [event for event in events if event["event"] == "expelled"]
    assert [event for event in events if "cannot reach" in event.get("reason", "")], "not apart"
    final = json.loads((tmp_path / "report.jsonl").read_text().splitlines()[-1])
    baseline = forks.swarm("baseline", run)
    assert baseline.code() == 0, baseline
    assert f"30 steps, sha256 {final['sha256']}" in baseline.out
