"""Whose a run is on this machine, and when one that has trained all its steps is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from peer import checkpoints
from peer.claims import as_trainer, continued, is_over, led_alone, led_by, say_what_differs
from peer.cli.swarm_program import app
from peer.places import refuse_another_run
from swarm.config import RunConfig, canonical_bytes, load_config, with_trainers
from swarm.consensus import Vote
from swarm.errors import ConfigError, InUseError, StorageError
from swarm.events import write_status
from swarm.terms import Ballot, Record, Term
from tests.process.forks import toml

STEPS = 5


def known(epoch: int = 0) -> Vote:
    ballot = Ballot(Term(epoch, 1, "a"), STEPS - 1, 0)
    return Vote(committed=Record(ballot, "", {}, {}, 1.0, 1.0, 0.1, "applied", 2.0, 64))


def checkpoint(run_dir: Path, epoch: int = 0) -> Path:
    staging = checkpoints.begin(run_dir, STEPS)
    stage = checkpoints.write_stage(staging, 0, {"w": torch.zeros(2)}, {})
    manifest = {"step": STEPS, "epoch": epoch, "run_id": "r", "config": {}, "stages": [stage]}
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
    write_status(run_dir / "status.json", {"state": "stopped"})
    mine.release()
    return run_dir, config


def test_a_run_goes_on_with_the_identity_it_was_led_with(begun: tuple[Path, RunConfig]) -> None:
    run_dir, config = begun
    written = load_config(run_dir.parent / "a.toml")
    assert continued(written, run_dir) == run_dir
    refuse_another_run(run_dir, config)
    again, mine = as_trainer(written, run_dir, None)
    assert again == config
    for claim in (lambda: led_by(run_dir), lambda: as_trainer(written, run_dir, None)):
        with pytest.raises(InUseError, match=r"run already, or another run .* - see with swarm st"):
            claim()
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
