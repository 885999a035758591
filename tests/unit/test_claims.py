"""Whose a run is on this machine, and when one that has trained all its steps is over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from peer import checkpoints, commands, run_leader, show
from peer.claims import as_trainer, continued, is_over, led_alone, led_by, say_what_differs
from peer.cli.swarm_program import app
from peer.disk import FileDisk
from peer.places import refuse_another_run
from swarm.config import RunConfig, canonical_bytes, load_config, with_trainers
from swarm.consensus import Vote
from swarm.errors import ConfigError, InUseError, StorageError, SwarmError
from swarm.events import write_status
from swarm.net.identity import load_identity
from swarm.terms import Ballot, Record, Term
from tests.process.forks import toml

STEPS = 5


def known(epoch: int = 0, restored: str = "") -> Vote:
    ballot = Ballot(Term(epoch, 1, "a"), STEPS - 1, 0)
    outcome = "restored" if restored else "applied"
    made = Record(ballot, "", {}, {}, 1.0, 1.0, 0.1, outcome, 2.0, 64, checkpoint=restored)
    return Vote(committed=made)


def checkpoint(run_dir: Path, epoch: int = 0, run_id: str = "r", step: int = STEPS) -> Path:
    staging = checkpoints.begin(run_dir, step)
    stage = checkpoints.write_stage(staging, 0, {"w": torch.zeros(2)}, {})
    manifest = {"step": step, "epoch": epoch, "run_id": run_id, "config": {}, "stages": [stage]}
    return checkpoints.complete(staging, manifest)


@pytest.mark.parametrize(
    ("state", "step", "over"),
    [
        ("finished", STEPS, True),
        ("finished", STEPS - 1, False),  # a status that could not be replaced since
        ("standing by", STEPS, False),  # it was not told of an end
        ("training", STEPS, False),
        ("failed", STEPS, False),
    ],
)
def test_what_the_status_says(tmp_path: Path, state: str, step: int, over: bool) -> None:
    write_status(tmp_path / "status.json", {"state": state, "step": step})
    assert is_over(tmp_path, known()) is over


def test_what_is_on_disk(tmp_path: Path) -> None:
    assert not is_over(tmp_path, known())
    path = checkpoint(tmp_path)
    assert is_over(tmp_path, known())
    assert not is_over(tmp_path, known(epoch=1)), "the run went back, and came here another way"
    assert is_over(tmp_path, known(epoch=1, restored=checkpoints.manifest_sha256(path)))
    assert not is_over(tmp_path, known(epoch=1, restored="ab" * 32)), "it began with another"
    manifest = json.loads((path / checkpoints.MANIFEST).read_text())
    (path / manifest["stages"][0]["file"]).write_bytes(b"")
    assert not is_over(tmp_path, known()), "it is damaged"


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, RunConfig]:
    """A run's directory as a leader that has ended left it, and what it led."""
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    run_dir = tmp_path / "run"
    config, mine = as_trainer(load_config(toml(tmp_path / "a.toml", steps=2)), run_dir, None)
    run_dir.mkdir()
    (run_dir / "run.json").write_bytes(canonical_bytes(config))
    mine.release()
    return run_dir, config


def test_a_run_goes_on_with_the_identity_it_was_led_with(begun: tuple[Path, RunConfig]) -> None:
    run_dir, config = begun
    written = load_config(run_dir.parent / "a.toml")
    assert continued(written, run_dir) == run_dir
    refuse_another_run(run_dir, config)
    again, mine = as_trainer(written, run_dir, None)
    assert again == config
    write_status(run_dir / "status.json", {"state": "training", "updated_at": time.time()})
    for claim in (lambda: led_by(run_dir), lambda: as_trainer(config, run_dir, None)):
        with pytest.raises(
            InUseError, match=r"leads .*run already, or .* - see with swarm status .*run,"
        ):
            claim()
    for state, age_s in (("finished", 0.0), ("training", 60.0)):  # it leads another run by now
        write_status(run_dir / "status.json", {"state": state, "updated_at": time.time() - age_s})
        with pytest.raises(InUseError, match=rf"this machine's identity {mine.peer_id} - stop it"):
            led_by(run_dir)
    mine.release()
    led_by(run_dir).release()
    home = mine.path.parent
    mine.path.rename(home / "identity-2.key")
    mine.path.write_text("not a key")
    again, mine = as_trainer(config, run_dir, None)  # which names it
    assert (again, mine.path.name) == (config, "identity-2.key")
    mine.release()
    again, mine = as_trainer(written, run_dir, None)  # which names none
    assert (again, mine.path.name) == (config, "identity-2.key")
    with pytest.raises(InUseError, match=rf"this machine's identity {mine.peer_id} - stop it"):
        as_trainer(config, run_dir.parent / "not begun", None)
    mine.release()
    kept = home / "identity-backup.key"  # sorts before the one that others lock
    kept.write_bytes(mine.path.read_bytes())
    again, mine = as_trainer(config, run_dir, None)
    assert mine.path.name == "identity-2.key"
    mine.release()


@pytest.mark.parametrize("command", ["up", "train"])
def test_a_run_goes_on_nowhere_else(begun: tuple[Path, RunConfig], command: str) -> None:
    run_dir, _ = begun
    (run_dir.parent / "loop").symlink_to("loop")
    for other in ("other", "loop"):
        elsewhere = ("--resume", str(run_dir), "--dir", str(run_dir.parent / other))
        done = CliRunner().invoke(app, [command, str(run_dir.parent / "a.toml"), *elsewhere])
        assert done.exit_code == ConfigError.exit_code
        assert f"goes on in its own directory, {run_dir} - leave --dir out\n" in done.stderr


def test_a_run_that_another_machine_led_goes_on_here_elsewhere(
    begun: tuple[Path, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another run, with its state: its trainer is not here, and so has promised nothing."""
    run_dir, config = begun
    assert led_alone(run_dir, None)
    monkeypatch.setenv("XDG_DATA_HOME", str(run_dir.parent / "another machine"))
    assert not led_alone(run_dir, None)
    trainers = [*config.run.trainers, "another"]
    (run_dir / "run.json").write_bytes(canonical_bytes(with_trainers(config, trainers)))
    monkeypatch.setenv("XDG_DATA_HOME", str(run_dir.parent / "DATA"))
    assert not led_alone(run_dir, None), "it may be the other's directory"


@pytest.mark.parametrize("elsewhere", [True, False], ids=["another --dir", "in its own directory"])
def test_a_run_that_goes_on_with_another_identity_is_another(
    begun: tuple[Path, RunConfig], monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    def leads(*args: object, **options: object) -> None:
        raise SwarmError("it leads")

    monkeypatch.setattr(run_leader, "LeaderProcess", leads)
    run_dir, _ = begun
    options = ["--resume", str(run_dir), "--identity", str(run_dir.parent / "another.key")]
    if elsewhere:
        options += ["--dir", str(run_dir.parent / "other")]
    done = CliRunner().invoke(app, ["train", str(run_dir.parent / "a.toml"), *options])
    said = f"{run_dir} is of another run (run.trainers)\n"
    assert (said in done.stdout) == elsewhere
    refused = f"error: {run_dir} holds another run (run.trainers) - choose another directory"
    assert done.stderr.startswith("error: it leads" if elsewhere else refused)


def test_a_damaged_spare_identity_is_no_matter_to_a_directory_without_a_run(
    begun: tuple[Path, RunConfig],
) -> None:
    run_dir, config = begun
    home = run_dir.parent / "DATA" / "swarm-parallel" / "trainer"
    (home / "identity-2.key").write_text("not a key")
    written = load_config(run_dir.parent / "a.toml")
    again, mine = as_trainer(written, run_dir.parent / "new", None)
    assert (again, mine.path.name) == (config, "identity.key")
    mine.release()
    with pytest.raises(StorageError, match=r"identity-2\.key"):
        as_trainer(written, None, None)  # it may be what leads a run of this file here


def test_up_that_is_stopped_says_what_goes_on(
    begun: tuple[Path, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it has left: nothing, files, a record, checkpoints that the record names."""
    run, new = begun[0].parent / "a.toml", begun[0].parent / "new"
    left: list[Callable[[], object]] = []

    def stopped(make: Callable[[Any], Any], **options: object) -> None:
        for leave in left:
            leave()
        left.clear()
        raise KeyboardInterrupt

    def commits(vote: Vote) -> None:
        disk = FileDisk(new / "trainer")
        asyncio.run(disk.save(vote))
        disk.close()

    def last_line(*flags: object) -> str:
        done = CliRunner().invoke(app, ["up", str(run), *map(str, flags)])
        assert done.exit_code == 130, done.stderr
        return done.stdout.splitlines()[-1]

    mine = load_identity(new.parent / "DATA" / "swarm-parallel" / "trainer" / "identity.key")
    monkeypatch.setattr(show, "follow", stopped)
    monkeypatch.setattr(commands, "importing", lambda *args: contextlib.nullcontext())
    for claim in ("local_trainer", "led_by"):  # without a lock, which would outlive the command
        monkeypatch.setattr(commands, claim, lambda of: mine)
    flags = ("--peers", "0:2,1:1,2:1", "--steps", 1, "--threads", 3, "--device", "cpu", "--plain")
    assert last_line(*flags, "--dir", new / "x").endswith("stopped before it began")
    left = [new.mkdir]
    files = f"files are in {new}"
    unchanged = f"stopped before its first step was complete; {files}"
    assert last_line(*flags, "--dir", new) == unchanged
    left = [lambda: commits(known())]
    none = "stopped before its first checkpoint ([checkpoint] every)"
    assert last_line(*flags, "--dir", new) == f"{none}; {files}"
    of_this = begun[1]
    left = [
        lambda: commits(known(epoch=1)),
        lambda: checkpoint(new, epoch=1, run_id=of_this.run_id),
        lambda: checkpoint(new, epoch=2, run_id="another", step=STEPS + 1),
        lambda: (new / "run.json").write_bytes(canonical_bytes(of_this)),
    ]
    told = shlex.join(
        ["swarm", "up", str(run), *map(str, flags[:-1]), "--resume", str(new), "--plain"]
    )
    assert last_line(*flags, "--dir", new) == f"stopped; {told} goes on from step-{STEPS}"
    assert last_line(*shlex.split(told)[3:]) == unchanged, "it is taken as it is told"


def test_train_that_is_stopped_before_it_goes_back_is_still_to_do_so(
    begun: tuple[Path, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the command it tells would go on from what was to be left."""
    run_dir, config = begun
    run = run_dir.parent / "a.toml"
    left: list[Vote] = [known(epoch=1)]

    def commit() -> None:
        disk = FileDisk(run_dir / "trainer")
        asyncio.run(disk.save(left.pop()))
        disk.close()

    def stopped(main: None) -> None:
        if left:
            commit()
        raise KeyboardInterrupt

    def last_line(*flags: object) -> str:
        done = CliRunner().invoke(app, ["train", str(run), *map(str, flags)])
        assert done.exit_code == 130, done.stderr
        return done.stdout.splitlines()[-1]

    mine = load_identity(run_dir.parent / "DATA" / "swarm-parallel" / "trainer" / "identity.key")
    leader = SimpleNamespace(run=lambda **options: None, goes_back=True)
    monkeypatch.setattr(run_leader, "LeaderProcess", lambda *args, **options: leader)
    monkeypatch.setattr(commands, "until_interrupted", stopped)
    monkeypatch.setattr(commands, "as_trainer", lambda *args: (config, mine))
    commit()
    asked = ["--dir", run_dir, "--resume", checkpoint(run_dir, epoch=1), "--accept-loss", "--plain"]
    told = shlex.join(["swarm", "train", str(run), *map(str, asked)])
    pending = f"stopped before anything came of --resume; {told} tries again"
    assert last_line(*asked) == pending
    left.append(replace(known(epoch=1), voters={"a": "disk"}))
    assert last_line(*shlex.split(told)[3:]) == pending, "it is taken as it is told"
    left.append(known(epoch=2))
    plain = shlex.join(["swarm", "train", str(run), "--dir", str(run_dir), "--plain"])
    gone_on = f"stopped; {plain} goes on from here if the peers stay"
    assert last_line(*asked) == gone_on
    leader.goes_back = False  # others have gone on: nothing was to be done for it
    assert last_line(*asked) == gone_on


def test_what_makes_it_another_run_is_said(
    begun: tuple[Path, RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = begun
    with (run_dir.parent / "corpus.txt").open("a") as corpus:
        corpus.write("one line more\n" * 500)
    written = load_config(run_dir.parent / "a.toml")
    assert continued(written, run_dir) is None
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"{run_dir} is of another run (data.train_sha256, data.validation_sha256)"
    changed, mine = as_trainer(written, run_dir, None)
    mine.release()
    with pytest.raises(StorageError, match=r"holds another run \(data.train_sha256.*\) - choose"):
        refuse_another_run(run_dir, changed)
    capsys.readouterr()
    say_what_differs(changed, run_dir)
    assert capsys.readouterr().out.splitlines() == [said]
    (run_dir / "run.json").write_bytes(b"{}")
    say_what_differs(changed, run_dir)
    assert not capsys.readouterr().out
    with pytest.raises(StorageError, match=r"run holds another run - choose another directory"):
        refuse_another_run(run_dir, changed)
    (run_dir / "run.json").unlink()
    (run_dir / "run.json").mkdir()
    with pytest.raises(StorageError, match=r"cannot use .*run: Is a directory - choose"):
        refuse_another_run(run_dir, changed)
