"""Three trainers as processes: the leader is killed or frozen, another finishes the run, to the
bit; one that wakes leads no more."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from swarm.events import tail_events
from swarm.net.identity import load_identity
from tests.process.counted import Kernels
from tests.process.forks import Command, Forks, toml
from tests.process.lab import Host, listen_in
from tests.process.paced import PACE_S

NAMES = ("one", "two", "three")


class Trainers:
    """A run with three trainers, of which `one` leads first, and a replica per stage.

    With `hosts` that is where they run, and a replica per stage on each of those.
    """

    def __init__(
        self,
        forks: Forks,
        where: Path,
        steps: int,
        extra: str = "",
        *,
        stages: int = 3,
        hosts: Sequence[Host | None] = (None, None, None),
    ) -> None:
        self.forks, self.where, self.steps = forks, where, steps
        self.hosts = dict(zip(NAMES, hosts, strict=True))
        keys = {name: where / f"{name}.key" for name in NAMES}
        ids = [load_identity(keys[name]).peer_id for name in NAMES]
        self.run = toml(where / "run.toml", steps=steps, stages=stages, extra=extra)
        text = self.run.read_text()
        self.run.write_text(text.replace("[run]", f"[run]\ntrainers = {json.dumps(ids)}", 1))

        self.keys, self.kernels = keys, Kernels(where)
        self.first = self.lead("one")
        link = self.first.link
        self.others = {name: self.lead(name, "--join", link) for name in NAMES[1:]}
        self.peers = [
            forks.peer(
                *("--join", link, *listen_in(host), "--stage", str(stage)),
                host=host,
                pace_s=PACE_S,
                kernels=where,
            )
            for host in dict.fromkeys(hosts)
            for stage in range(stages)
        ]

    def lead(self, name: str, *more: str) -> Command:
        report, host = str(self.where / f"{name}.jsonl"), self.hosts[name]
        place = ("--identity", str(self.keys[name]), "--dir", str(self.where / name))
        options = (*listen_in(host), *place, "--report", report, *more)
        return self.forks.swarm("train", self.run, *options, host=host)

    def reported(self, name: str) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.where / f"{name}.jsonl").read_text().split("\n")[:-1]
        ]

    def steps_of(self, name: str) -> list[int]:
        """Those that it has led."""
        return [line["step"] for line in self.reported(name) if "step" in line]

    def status_of(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.where / name / "status.json").read_text())
        return status

    def events_of(self, name: str, kind: str) -> list[dict[str, Any]]:
        path = self.where / name / "events.jsonl"
        return [event for event in tail_events(path) if event["event"] == kind]

    def vote_of(self, name: str) -> bytes:
        """What its disk holds."""
        return (self.where / name / "trainer" / "trainer.msgpack").read_bytes()

    def end(self, *commands: Command) -> None:
        """All of these end well, and what was trained is what one process trains."""
        for command in commands:
            assert command.code() == 0, command
            assert command.err == "", command
        (final,) = (line for name in NAMES for line in self.reported(name) if "sha256" in line)
        baseline = self.forks.swarm("baseline", self.run)
        assert baseline.code() == 0, baseline
        assert f"{self.steps} steps, sha256 {final['sha256']}" in baseline.out

    def continue_after(self, name: str, led: Sequence[int]) -> None:
        """The others went on from where a leader was when it had reported these steps."""
        # What they had accepted by then is committed: it may hear so later.
        steps = self.steps_of(name)
        assert steps in (led, [*led, led[-1] + 1])
        later = [step for other in NAMES if other != name for step in self.steps_of(other)]
        assert len({*steps, *later}) == len(steps) + len(later)
        assert min(later) in (steps[-1] + 1, steps[-1] + 2)  # between them one that was completed

    def say_finished(self, *names: str) -> None:
        """Whoever led last, and who stood by."""
        for name in names:
            status = self.status_of(name)
            assert (status["state"], status["step"]) == ("finished", self.steps), name
            assert self.events_of(name, "finished"), name


def test_another_trainer_finishes_what_a_killed_leader_began(forks: Forks, tmp_path: Path) -> None:
    """The same step, and what was counted of it when the leader died is not computed again."""
    run = Trainers(forks, tmp_path, 20)
    run.first.says("step 3 ")
    run.kernels.hold()
    forks.until(lambda: run.kernels.held(3), "the middle of a step")
    counted = run.kernels.held(3)
    run.first.signal(signal.SIGKILL)
    assert run.first.code() == -signal.SIGKILL
    run.kernels.go_on()
    run.end(*run.others.values(), *run.peers)
    run.kernels.assert_once(counted)
    said = "".join(each.out for each in run.others.values())
    assert "another trainer led the run to its end" in said
    assert "standing by: another trainer leads" in said  # also of one that has never led
    run.say_finished(*run.others)


def test_an_operator_goes_on_without_two_trainers_that_are_gone(
    forks: Forks, tmp_path: Path
) -> None:
    """Alone the third commits nothing; with `--accept-loss` it goes on from its checkpoint."""
    forks.constants = {"peer.quorum:LOSS_S": 2.0}
    run = Trainers(forks, tmp_path, 12, "[checkpoint]\nevery = 2\n")
    run.first.says("step 4 ")
    for other in run.others.values():
        other.signal(signal.SIGKILL)
        assert other.code() == -signal.SIGKILL
    run.first.signal(signal.SIGKILL)
    assert run.first.code() == -signal.SIGKILL
    led = run.steps_of("one")
    resumed = ("--resume", str(tmp_path / "one"))
    alone = forks.swarm("train", run.run, "--accept-loss")
    assert alone.code() == 2, alone
    assert "--accept-loss alone does nothing - add --resume DIR" in alone.err
    last = run.lead("one", *resumed, "--accept-loss")
    run.end(last, *run.peers)
    assert "trainers that do not answer lose their vote: if they live, the run forks" in last.out
    origin = int(last.out.split("resuming from step ")[1].split()[0])
    assert origin % 2 == 0
    assert led[-1] <= origin <= led[-1] + 2
    kept = [step for step in led if step < origin]  # the report of its former life goes on
    assert run.steps_of("one") == [*kept, *range(origin, 12)]


def test_a_leader_that_was_frozen_stands_by_when_it_wakes(forks: Forks, tmp_path: Path) -> None:
    """It is refused by the others and by every replica: it commits nothing more."""
    run = Trainers(forks, tmp_path, 30)
    run.first.says("step 3 ")
    run.first.signal(signal.SIGSTOP, daemons=True)
    forks.until(lambda: any(run.steps_of(name) for name in NAMES[1:]), "another that leads")
    led = run.steps_of("one")
    run.first.signal(signal.SIGCONT, daemons=True)
    run.end(run.first, *run.others.values(), *run.peers)
    assert "standing by: another trainer leads" in run.first.out
    assert "another trainer led the run to its end" in run.first.out
    run.say_finished(*NAMES)
    run.continue_after("one", led)


def test_a_trainer_that_has_lost_its_disk_has_no_vote(forks: Forks, tmp_path: Path) -> None:
    """It has forgotten what it promised. With it and another alive nobody leads; with the leader
    of before, which has its disk, the run goes on, in a new epoch that names the new disk: from
    then on it votes, and its vote is needed when the other is gone."""
    forks.constants = {"peer.quorum:NAMING_S": 4.0}  # so long may a busy one take to answer
    run = Trainers(forks, tmp_path, 24, "[checkpoint]\nevery = 2\n")
    run.others["three"].says("standing by: another trainer leads")
    disk = msgpack.unpackb(run.vote_of("three"))["disk"].encode()
    forks.until(lambda: disk in run.vote_of("one") and disk in run.vote_of("two"), "its first vote")
    run.others["three"].signal(signal.SIGKILL)
    assert run.others["three"].code() == -signal.SIGKILL
    shutil.rmtree(tmp_path / "three")
    empty = run.lead("three", "--join", run.first.link)
    empty.says("standing by: another trainer leads")
    run.first.says("step 4 ")
    run.first.signal(signal.SIGKILL)
    assert run.first.code() == -signal.SIGKILL
    empty.says("this trainer does not count")
    assert not run.steps_of("two")
    saved = max(
        (path.parent for path in (tmp_path / "one").glob("checkpoints/step-*/manifest.json")),
        key=lambda path: int(path.name.removeprefix("step-")),
    )
    last = run.lead("one", "--resume", str(saved))
    forks.until(lambda: run.events_of("one", "epoch"), "the new epoch")
    disk = msgpack.unpackb(run.vote_of("three"))["disk"].encode()
    assert disk in run.vote_of("one")
    run.others["two"].signal(signal.SIGKILL)
    assert run.others["two"].code() == -signal.SIGKILL
    assert run.steps_of("one")[-1] < run.steps - 1
    run.end(last, empty, *run.peers)
