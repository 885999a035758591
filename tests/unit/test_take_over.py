"""Which checkpoint `--resume` goes on from, and that none is lost by it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peer import checkpoints
from peer.checkpointing import stage_layout, write_state
from peer.inquiries import snapshot_mark
from peer.resume import PARENT, SavedStates, take_over
from peer.snapshots import Snapshot
from swarm.config import RunConfig, parse_config
from swarm.errors import DataError, StorageError
from swarm.model import build_pipeline
from swarm.optim import make_optimizer


def a_config(lr: float = 0.1) -> RunConfig:
    return parse_config(
        {
            "run": {"name": "tiny"},
            "model": {"pipeline": "swarm_digits:pipeline", "stages": 2},
            "data": {"source": "pipeline"},
            "batch": {"microbatches": 2, "microbatch_size": 1},
            "optimizer": {"name": "sgd", "lr": lr},
            "schedule": {"steps": 9},
        }
    )


def write(run_dir: Path, config: RunConfig, step: int, epoch: int = 0) -> Path:
    pipeline = build_pipeline(config)
    staging = checkpoints.begin(run_dir, step)
    entries = []
    for stage in range(pipeline.num_stages):
        layout = stage_layout(pipeline, stage)
        tensors = {"parameters": torch.full((layout.total,), float(step))}
        for name, each in make_optimizer(config.optimizer, layout, "cpu").state().items():
            tensors[f"optimizer.{name}"] = each.clone()
        snapshot = Snapshot(step, step, "", None, tensors)
        snapshot.fingerprint = snapshot_mark(snapshot)
        entries.append(write_state(staging, pipeline, stage, snapshot))
    facts: dict[str, Any] = {"run_id": config.run_id, "config": {}, "stages": entries}
    return checkpoints.complete(staging, {"step": step, "epoch": epoch, **facts})


def resume(
    source: Path, run_dir: Path, config: RunConfig, say: Callable[[str], None] = lambda line: None
) -> int:
    return take_over(source, run_dir, config, build_pipeline(config), say).step


@pytest.mark.parametrize("changed", [True, False], ids=["new-run", "same-run"])
def test_the_same_command_goes_on_with_what_came_of_it(tmp_path: Path, changed: bool) -> None:
    """Wherever the other run lies by now, and whatever became of the file that names it."""
    source, run, said = tmp_path / "source", tmp_path / "run", list[str]()
    write(source, a_config(), 4)
    config = a_config(0.2 if changed else 0.1)
    assert resume(source, run, config, said.append) == 4
    assert (run / PARENT).exists() == changed
    assert said == []
    write(run, config, 6, epoch=1)
    assert resume(source, run, config, said.append) == 6
    assert said == [f"{run} has checkpoints of its own, not taking those of {source}"]
    source.rename(tmp_path / "elsewhere")
    source.symlink_to("elsewhere")
    (run / PARENT).write_text("{")
    assert resume(source, run, config) == 6
    assert resume(source / "checkpoints", run, config) == 6
    for manifest in run.glob("checkpoints/*/manifest.json"):
        os.truncate(manifest, 10)
    with pytest.raises(DataError, match=f"{run} holds no complete checkpoint"):
        resume(source, run, config)
    assert {path.stat().st_size for path in run.glob("checkpoints/*/manifest.json")} == {10}
    assert resume(source / "checkpoints" / "step-4", run, config) == 4  # to begin again


def test_a_disk_that_is_full_leaves_a_directory_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    write(source, a_config(), 4)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(StorageError, match="No space left"):
        resume(source, run, a_config(0.2))
    monkeypatch.undo()
    assert not (run / PARENT).exists()
    assert not checkpoints.has_any(run)


def test_checkpoints_of_another_run_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    """A kill between the first checkpoint and `run.json` leaves a directory that says not whose."""
    write(tmp_path, a_config(), 4)
    with pytest.raises(DataError, match="is of another run") as refused:
        resume(tmp_path, tmp_path, a_config(0.2))
    assert "--dir" in refused.value.remedy


def test_links_that_lead_to_each_other_are_a_disk_that_is_away(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    (tmp_path / "checkpoints").symlink_to("checkpoints")
    with pytest.raises(DataError, match=r"cannot read .*checkpoints: Too many levels"):
        resume(tmp_path, tmp_path, a_config())


def test_a_linked_checkpoint_that_is_torn_is_not_the_run(tmp_path: Path) -> None:
    write(tmp_path / "run", a_config(), 4)
    torn = tmp_path / "run" / "checkpoints" / "step-6"
    torn.symlink_to(tmp_path / "torn")
    (tmp_path / "torn").mkdir()
    assert checkpoints.is_checkpoint(torn)
    with pytest.raises(DataError, match="is not a complete checkpoint"):
        resume(torn, tmp_path / "run", a_config())


def test_a_run_that_lost_a_stage_waits_where_no_checkpoint_can_be_read(tmp_path: Path) -> None:
    """From step 0 it would write over what may yet be mended. It says why once, not each second."""
    config, said = a_config(), list[str]()
    saved = SavedStates(tmp_path, config, build_pipeline(config), say=said.append)
    assert asyncio.run(saved.newest(None)).step == 0
    path = write(tmp_path, config, 4)
    shutil.copytree(path, tmp_path / "copy")
    os.truncate(path / checkpoints.MANIFEST, 10)
    for _ in range(3):
        with pytest.raises(DataError, match="no checkpoint in"):
            asyncio.run(saved.newest(None))
    assert [line.split(":")[0] for line in said] == ["passed over checkpoint step-4"]
    shutil.rmtree(path)
    shutil.move(tmp_path / "copy", path)
    assert asyncio.run(saved.newest(None)).step == 4
