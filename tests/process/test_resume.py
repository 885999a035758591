"""Real processes that go back to a checkpoint: all killed, another cut, a stage lost and found.

Whatever is lost, the run ends with the parameters of one that was never interrupted.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peer import checkpoints, local_entry, restoring, run_dirs
from peer.local import LocalSwarm
from swarm.config import RunConfig
from swarm.errors import SwarmError
from tests.process.forks import Forks, toml
from tests.process.paced import PACE_S
from tests.process.test_exact_real import Swarms, baseline, recut

STEPS = 8
EVERY = "[checkpoint]\nevery = 3\n"
LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")


class Impatient(LocalSwarm):
    """Its leader waits only a second for a stage that has lost its connections."""

    leader_target = "tests.process.test_resume:impatient_leader"


def impatient_leader(arguments: Any, tell: Any) -> int:
    restoring.GRACE_S = 1.0
    return local_entry.leader(arguments, tell)


class Runs(Swarms):
    """Local swarms that share an identity, a data cache and, if asked to, a run directory."""

    def run_in(
        self,
        config: RunConfig,
        name: str,
        peers: dict[int, int],
        *,
        steps: int = STEPS,
        resume: Path | None = None,
        kill_at: int | None = None,
        kind: type[LocalSwarm] = LocalSwarm,
        script: Callable[[LocalSwarm, int], None] = lambda swarm, step: None,
    ) -> dict[str, Any] | None:
        """The report; None of a swarm whose processes are all killed after step `kill_at`.

        `script` is told each step.
        """
        said: list[str] = []

        def on_step(swarm: LocalSwarm, step: int) -> None:
            if step == kill_at:
                for name in swarm.processes:
                    swarm.kill_peer(name)
            script(swarm, step)

        async def main() -> dict[str, Any] | None:
            swarm = kind(
                config,
                self.where / name,
                peers=peers,
                identity_path=self.identity.path,
                steps=steps,
                threads=1,
                device="cpu",
                cache_dir=self.cache,
                resume=resume,
                server=self.forks.server,
                say=said.append,
                on_step=lambda step: on_step(swarm, step["step"]),
            )
            try:
                await swarm.start()
                return await swarm.wait()
            except SwarmError:
                if kill_at is None:
                    raise
                return None
            finally:
                await swarm.stop()

        return self.forks.run(main())

    def events(self, name: str) -> list[dict[str, Any]]:
        text = (self.where / name / "events.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def runs(forks: Forks, tmp_path: Path) -> Runs:
    return Runs(forks, tmp_path)


def test_all_are_killed_and_resume_with_other_counts_or_another_cut(
    runs: Runs, tmp_path: Path
) -> None:
    """Of the checkpoints of steps 3, 6 and 8 only the newest is kept: the file says so."""
    config = runs.config(toml(tmp_path / "run.toml", steps=50, extra=EVERY + "keep = 1\n"))
    expected = baseline(config, STEPS, runs.cache)
    assert runs.run_in(config, "one", {0: 1, 1: 2, 2: 1}, kill_at=4) is None
    assert [path.name for path in (tmp_path / "one" / "checkpoints").iterdir()] == ["step-3"]

    # Another cut is another file: a new run, which says where it comes from.
    other = recut(config, (1, 2))
    report = runs.run_in(other, "two", {0: 2, 1: 1}, resume=tmp_path / "one")
    assert report is not None
    assert report["sha256"] == expected
    parent = json.loads((tmp_path / "two" / "parent.json").read_text())
    assert (parent["run_id"], parent["step"]) == (config.run_id, 3)
    assert json.loads((tmp_path / "two" / "status.json").read_text())["parent"] == parent

    # The same file: the same run, in a new epoch; steps 0 to 2 are not trained again.
    trained: list[int] = []
    report = runs.run_in(
        config,
        "one",
        {0: 2, 1: 1, 2: 1},
        resume=tmp_path / "one",
        script=lambda swarm, step: trained.append(step),
    )
    assert report is not None
    assert report["sha256"] == expected
    assert report["run_id"] == config.run_id
    assert trained == [3, 4, 5, 6, 7]
    assert not (tmp_path / "one" / "parent.json").exists()
    opened = [each for each in runs.events("one") if each["event"] == "epoch"]
    assert [(each["epoch"], each["step"]) for each in opened] == [(1, 3)]
    written = [each["step"] for each in runs.events("one") if each["event"] == "checkpoint"]
    assert written[-2:] == [6, 8]  # who is killed may not have written down that of 3
    for name in ("one", "two"):
        (kept,) = (tmp_path / name / "checkpoints").iterdir()
        assert kept.name == "step-8"


def test_train_resumes_with_other_volunteers_and_another_cut(forks: Forks, tmp_path: Path) -> None:
    """The commands as people give them, all of them killed: a changed file is a new run."""
    first = toml(tmp_path / "first.toml", steps=100_000, extra=EVERY)
    begun = forks.swarm("train", first, *LOCAL)
    peers = [forks.peer("--join", begun.link, *LOCAL, pace_s=PACE_S) for _ in range(3)]
    (run_dir,) = (tmp_path / "runs").iterdir()
    forks.until(lambda: run_dirs.newest_first(run_dir), "a checkpoint")
    for command in (begun, *peers):
        command.signal(signal.SIGKILL, daemons=True)
    for command in (begun, *peers):
        assert command.code() == -signal.SIGKILL, command
    newest = checkpoints.load_manifest(run_dirs.newest_first(run_dir)[0])
    step = newest["step"]
    steps = ("--steps", str(step + 4))

    second = toml(tmp_path / "second.toml", steps=100_000, stages=2, extra=EVERY)
    options = (*LOCAL, *steps, "--report", "report.jsonl")
    more = forks.swarm("train", second, *options, "--resume", run_dir)
    peers = [forks.peer("--join", more.link, *LOCAL, "--stage", "0") for _ in range(3)]
    for peer in peers:  # before there is anybody to train with
        peer.says("serving stage 0")
    peers.append(forks.peer("--join", more.link, *LOCAL, "--stage", "1"))
    for command in (more, *peers):
        assert command.code() == 0, command
        assert command.err == "", command
    assert f"resuming from step {step}\n" in more.out
    *trained, final = map(json.loads, (tmp_path / "report.jsonl").read_text().splitlines())
    assert [line["step"] for line in trained if "step" in line] == list(range(step, step + 4))
    oracle = forks.swarm("baseline", first, *steps)
    assert oracle.code() == 0, oracle
    assert f"{step + 4} steps, sha256 {final['sha256']}" in oracle.out
    (new_dir,) = {*(tmp_path / "runs").iterdir()} - {run_dir}
    parent = json.loads((new_dir / "parent.json").read_text())
    assert (parent["run_id"], parent["step"]) == (newest["run_id"], step)
    assert final["run_id"] != newest["run_id"]


def test_a_stage_is_lost_and_a_new_peer_takes_it_from_the_checkpoint(
    runs: Runs, tmp_path: Path
) -> None:
    """One is enough, though the run began with two."""
    config = runs.config(toml(tmp_path / "run.toml", steps=50, extra=EVERY))
    expected = baseline(config, STEPS, runs.cache)
    joining: list[asyncio.Task[Any]] = []

    def script(swarm: LocalSwarm, step: int) -> None:
        if step == 4 and not joining:
            swarm.kill_peer("1a")
            swarm.kill_peer("1b")
            joining.append(asyncio.create_task(swarm.add_peer(1)))

    report = runs.run_in(config, "one", {0: 1, 1: 2, 2: 1}, kind=Impatient, script=script)
    assert report is not None
    assert report["sha256"] == expected
    events = runs.events("one")
    assert [each["stage"] for each in events if each["event"] == "paused"] == [1]
    assert [each["step"] for each in events if each["event"] == "epoch"] == [3]


def test_a_checkpoint_is_written_when_asked_for(forks: Forks, tmp_path: Path) -> None:
    """The run has none of its own; it goes on from that one, to the bit."""
    run, where = toml(tmp_path / "run.toml", steps=100_000, stages=1), tmp_path / "first"
    begun = forks.swarm("up", run, "--dir", where, "--threads", "1", "--plain")
    begun.says("step 2 ")
    asked = forks.swarm("checkpoint", where)
    assert asked.code() == 0, asked
    assert asked.err == ""
    (saved,) = (where / "checkpoints").iterdir()
    assert asked.out.endswith(f"wrote {saved}\n")
    begun.signal(signal.SIGINT)
    assert begun.code() == 130, begun
    step = int(saved.name.removeprefix("step-"))
    steps = ("--steps", str(step + 2), "--threads", "1")
    more = forks.swarm("up", run, *steps, "--resume", where)
    oracle = forks.swarm("baseline", run, *steps)
    assert (more.code(), oracle.code()) == (0, 0), (more, oracle)
    assert f"resuming from step {step}" in more.out
    assert [line for line in more.out.splitlines() if line.startswith("finished:")] == [
        line for line in oracle.out.splitlines() if line.startswith("finished:")
    ]
    over = forks.swarm("checkpoint", where)
    assert over.code() == 3, over
    assert over.err.count("\n") == 1, over.err


def test_up_and_baseline_resume(forks: Forks, tmp_path: Path) -> None:
    run, where = toml(tmp_path / "run.toml", steps=50), tmp_path / "first"
    begun = forks.swarm("up", run, "--steps", "2", "--dir", where, "--threads", "1")
    assert begun.code() == 0, begun
    more = forks.swarm("up", run, "--steps", "4", "--resume", where, "--threads", "1")
    assert more.code() == 0, more
    assert f"swarm export {where} " in more.out
    assert "resuming from step 2" in more.out
    oracle = forks.swarm("baseline", run, "--steps", "4", "--resume", where / "checkpoints/step-2")
    assert oracle.code() == 0, oracle
    assert "resuming from step 2" in oracle.out
    assert [line for line in more.out.splitlines() if line.startswith("finished:")] == [
        line for line in oracle.out.splitlines() if line.startswith("finished:")
    ]
    fewer = forks.swarm("baseline", run, "--steps", "1", "--resume", where)
    assert fewer.code() == 0, fewer
    assert fewer.out.splitlines()[-1] == oracle.out.splitlines()[-1], "it says what it hashes"
    newest = where / "checkpoints" / "step-4"
    (newest / "manifest.json").write_text(
        (newest / "manifest.json").read_text().replace('"updates"', '"updatez"')
    )
    before = forks.swarm("baseline", run, "--steps", "4", "--resume", where)
    assert before.code() == 0, before
    assert "passed over checkpoint step-4: " in before.out
    assert "resuming from step 2" in before.out
    assert before.out.splitlines()[-1] == oracle.out.splitlines()[-1]
    again = forks.swarm("up", run, "--steps", "4", "--resume", where, "--threads", "1", "--plain")
    assert again.code() == 0, again
    assert "passed over checkpoint step-4: " in again.out
    assert "paused" not in again.out  # step 2 is also what its peers are given
    assert oracle.out.splitlines()[-1] in again.out
    for path in where.glob("checkpoints/*/manifest.json"):
        path.unlink()
    wider = toml(tmp_path / "wider.toml", steps=60)
    child = tmp_path / "child"
    refused = forks.swarm("up", wider, "--resume", where, "--dir", child)
    assert refused.code() != 0
    assert "holds no complete checkpoint" in refused.err
    assert not (child / "run.json").exists()  # so that the same command can be given again
    shutil.rmtree(where / "checkpoints")
    gone = forks.swarm("up", run, "--resume", where)
    assert gone.code() != 0
    assert "the run has a checkpoint of step 2, which is not in" in gone.err
    nothing = forks.swarm("up", run, "--resume", tmp_path / "nowhere")
    assert nothing.code() != 0
    assert nothing.err.count("\n") == 1, nothing.err
