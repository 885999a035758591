"""Which checkpoint `--resume` goes on from, and that none is lost by it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peer import checkpoints, run_dirs
from peer.checkpointing import write_state
from peer.inquiries import snapshot_mark
from peer.resume import PARENT, SavedStates
from peer.snapshots import Snapshot
from peer.take_over import source_of, take_over
from swarm.config import RunConfig, canonical_bytes, parse_config
from swarm.data.tokenizer import Tokenizer, train_bpe
from swarm.errors import DataError, StorageError
from swarm.model import build_pipeline
from swarm.optim import make_optimizer
from swarm.terms import Ballot, Record, Term


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


def write(
    run_dir: Path, config: RunConfig, step: int, epoch: int = 0, tokenizer: Tokenizer | None = None
) -> Path:
    pipeline = build_pipeline(config)
    staging = checkpoints.begin(run_dir, step)
    entries = []
    for stage in range(pipeline.num_stages):
        layout = pipeline.layout(stage)
        tensors = {"parameters": torch.full((layout.total,), float(step))}
        for name, each in make_optimizer(config.optimizer, layout, "cpu").state().items():
            tensors[f"optimizer.{name}"] = each.clone()
        snapshot = Snapshot(step, step, "", None, tensors)
        snapshot.fingerprint = snapshot_mark(snapshot)
        entries.append(write_state(staging, pipeline, stage, snapshot))
    facts: dict[str, Any] = {"run_id": config.run_id, "config": {}, "stages": entries}
    return checkpoints.complete(staging, {"step": step, "epoch": epoch, **facts}, tokenizer)


def resume(source: Path, run_dir: Path, config: RunConfig, record: Record | None = None) -> int:
    """The step that a run is to go on from whose newest record is `record`."""
    pipeline = build_pipeline(config)
    saved, alone = SavedStates(run_dir, config, pipeline), len(config.run.trainers) <= 1
    order = take_over(
        source, run_dir, config, pipeline, saved, record=record, alone=alone, tokenizer=None
    )
    return asyncio.run(order(record)).step


@pytest.mark.parametrize("kept", ["equal", "none", "other", "damaged"])
def test_weights_go_on_with_the_tokenizer_they_were_trained_with(tmp_path: Path, kept: str) -> None:
    """One of the same size has the same shapes, and other ids. The run itself checks its data."""
    texts = {"ours": b"some words and some more ", "other": b"text of another kind entirely "}
    ours, other = (train_bpe(iter([text * 99]), 260) for text in texts.values())
    theirs = {"equal": ours, "none": None}.get(kept, other)
    config, source, run = a_config(0.2), tmp_path / "source", tmp_path / "run"
    pipeline = build_pipeline(config)

    def step_of(named: Path, run_dir: Path, mine: RunConfig = config) -> int:
        saved = SavedStates(run_dir, mine, pipeline)
        order = take_over(named, run_dir, mine, pipeline, saved, tokenizer=ours)
        return asyncio.run(order(None)).step

    why = "cannot read" if kept == "damaged" else "was trained with another tokenizer"
    write(source, a_config(), 2)  # without one, and not taken instead
    path = write(source, a_config(), 4, tokenizer=theirs)
    if kept == "damaged":
        file = path / checkpoints.TOKENIZER
        file.write_bytes(b"?" * file.stat().st_size)
    for named in (source, path):
        if kept in ("equal", "none"):
            assert step_of(named, tmp_path / f"of-{named.name}") == 4
            continue
        with pytest.raises(DataError, match=why):
            step_of(named, run)
        assert not run.exists()
    assert step_of(path, source, a_config()) == 4


def test_the_same_command_goes_on_with_what_came_of_it(tmp_path: Path) -> None:
    source, run, config = tmp_path / "source", tmp_path / "run", a_config(0.2)
    write(source, a_config(), 4)
    assert resume(source, run, config) == 4
    write(run, config, 6, epoch=1)
    assert resume(source, run, config) == 6
    assert resume(source / "checkpoints", run, config) == 6
    for manifest in run.glob("checkpoints/*/manifest.json"):
        os.truncate(manifest, 10)
    with pytest.raises(DataError, match=f"{run} holds no complete checkpoint"):
        resume(source, run, config)
    assert {path.stat().st_size for path in run.glob("checkpoints/*/manifest.json")} == {10}


@pytest.mark.parametrize("why", ["same-run", "moved", "torn", "another", "step"])
def test_own_checkpoints_of_other_origin_are_neither_replaced_nor_taken(
    tmp_path: Path, why: str
) -> None:
    """All in a directory are of one training: a lost stage may go back to any of them."""
    source, run = tmp_path / "source", tmp_path / "run"
    config = a_config(0.1 if why == "same-run" else 0.2)
    write(source, a_config(), 4)
    assert resume(source, run, config) == 4
    write(run, config, 6, epoch=1)
    if why == "moved":
        source.rename(tmp_path / "elsewhere")
        source.symlink_to("elsewhere")
    if why == "torn":
        (run / PARENT).write_text("{")
    if why == "another":
        source = tmp_path / "second"
        write(source, a_config(), 8)
    if why == "step":
        source = write(source, a_config(), 8)
    with pytest.raises(DataError, match=f"{run} has checkpoints of its own") as refused:
        resume(source, run, config)
    assert f"--resume {run}," in refused.value.remedy
    assert sorted(os.listdir(run / "checkpoints")) == ["step-4", "step-6"]
    assert resume(run, run, config) == 6


def test_the_same_checkpoint_by_name_goes_on_with_what_came_of_it(tmp_path: Path) -> None:
    config = a_config(0.2)
    named = write(tmp_path / "source", a_config(), 4)
    for _ in range(2):
        assert resume(named, tmp_path / "run", config) == 4
    write(tmp_path / "run", config, 6, epoch=1)
    assert resume(named, tmp_path / "run", config) == 6


def test_another_run_in_the_same_place_is_another_origin(tmp_path: Path) -> None:
    source, run, config = tmp_path / "source", tmp_path / "run", a_config(0.2)
    source.mkdir()
    (source / "run.json").write_bytes(canonical_bytes(a_config()))
    write(source, a_config(), 4)
    for _ in range(2):
        assert resume(source, run, config) == 4
    (source / "run.json").write_bytes(canonical_bytes(a_config(0.3)))
    with pytest.raises(DataError, match="has checkpoints of its own"):
        resume(source, run, config)


def test_killed_before_the_parents_state_was_there_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / PARENT).write_text('{"path": "runs/parent", "step": 4}')
    with pytest.raises(DataError, match="has not got the state") as refused:
        resume(tmp_path, tmp_path, a_config())
    assert "--resume runs/parent/checkpoints/step-4 again" in refused.value.remedy


def test_going_back_is_told_the_highest_epoch_there(tmp_path: Path) -> None:
    """Whatever is trained from then on is of a later epoch, and so newer."""
    config = a_config()
    write(tmp_path, config, 6, epoch=1)
    write(tmp_path, config, 8, epoch=3)
    older = write(tmp_path, config, 4, epoch=2)
    for named, step in ((tmp_path, 8), (older, 4)):
        assert resume(named, tmp_path, config) == step
    saved = SavedStates(tmp_path, config, build_pipeline(config))
    assert asyncio.run(saved.highest_epoch()) == 3


def test_those_of_another_run_are_passed_over_and_kept_from_pruning(tmp_path: Path) -> None:
    config = a_config()
    write(tmp_path, config, 4)
    write(tmp_path, a_config(0.2), 100, epoch=5)
    write(tmp_path, a_config(0.2), 2)
    assert resume(tmp_path, tmp_path, config) == 4
    write(tmp_path, config, 6)
    gone = run_dirs.prune(tmp_path, 1, config.run_id)
    assert [path.name for path in gone] == ["step-4"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-100", "step-2", "step-6"]


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
    assert not run_dirs.has_any(run)


def test_checkpoints_of_another_run_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    """A kill between the first checkpoint and `run.json` leaves a directory that says not whose."""
    write(tmp_path, a_config(), 4)
    for named in (tmp_path, tmp_path / "checkpoints" / "step-4"):
        with pytest.raises(DataError, match=r"is of another run|holds no complete checkpoint"):
            resume(named, tmp_path, a_config(0.2))


@pytest.mark.parametrize("whose", [None, b'{"run": {"na', b"", b"\xff"])
def test_a_directory_that_no_longer_says_whose_it_is_hides_no_checkpoint(
    tmp_path: Path, whose: bytes | None
) -> None:
    """A torn `run.json` would hash to a run that never was, and all of them be of another."""
    write(tmp_path / "run", a_config(), 4)
    if whose is not None:
        (tmp_path / "run" / "run.json").write_bytes(whose)
    assert resume(tmp_path / "run", tmp_path / "new", a_config(0.2)) == 4


def test_a_checkpoint_on_another_disk_is_replaced_and_pruned_as_a_link(tmp_path: Path) -> None:
    config = a_config()
    path, away = write(tmp_path / "run", config, 4), tmp_path / "away"
    for _ in range(2):
        shutil.rmtree(away, ignore_errors=True)
        shutil.move(path, away)
        path.symlink_to(away)
        write(tmp_path / "run", config, 4)
        assert not path.is_symlink()
    shutil.rmtree(away)
    shutil.move(path, away)
    path.symlink_to(away)
    write(tmp_path / "run", config, 6)
    assert run_dirs.prune(tmp_path / "run", 1, config.run_id) == [path]
    write(tmp_path / "run", config, 8)
    assert sorted(os.listdir(path.parent)) == ["step-6", "step-8"]
    assert (away / checkpoints.MANIFEST).exists()


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
    assert run_dirs.is_checkpoint(torn)
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
        with pytest.raises(DataError, match="holds no complete checkpoint"):
            asyncio.run(saved.newest(None))
    assert [line.split(":")[0] for line in said] == ["passed over checkpoint step-4"]
    shutil.rmtree(path)
    shutil.move(tmp_path / "copy", path)
    assert asyncio.run(saved.newest(None)).step == 4
    write(tmp_path, a_config(0.2), 6)
    assert asyncio.run(saved.newest(None)).step == 4
    assert "of another run" in said[-1]


def test_the_directory_above_a_checkpoint_is_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, a_config(), 4)
    monkeypatch.chdir(path.parent)
    for named in ("..", f"{path}/../..", f"{path.parent}/.."):
        assert not run_dirs.is_checkpoint(named)
    assert run_dirs.is_checkpoint("step-4")


def a_record(saved: int, *, epoch: int = 0, base: int = 0, step: int = 9) -> Record:
    """The newest one of a run whose newest checkpoint is of step `saved`."""
    return Record(
        ballot=Ballot(Term(epoch, 1, "t"), step, 1),
        predecessor="",
        members={},
        gradients={},
        norm=0.0,
        scale=1.0,
        lr=0.0,
        outcome="applied",
        loss=0.0,
        tokens=0,
        base=base,
        saved=saved,
    )


def newest(run_dir: Path, config: RunConfig, record: Record) -> int:
    saved = SavedStates(run_dir, config, build_pipeline(config))
    return asyncio.run(saved.newest(record)).step


def trained_by(names: list[str]) -> RunConfig:
    config = a_config()
    run = config.run.model_copy(update={"trainers": tuple(names)})
    return config.model_copy(update={"run": run})


def test_what_the_records_know_of_is_not_trained_again_from_step_0(tmp_path: Path) -> None:
    config, path = a_config(), tmp_path / "run"
    assert newest(path, config, a_record(saved=0)) == 0
    with pytest.raises(DataError, match="of step 8, is not here any more") as refused:
        newest(path, config, a_record(saved=8))
    assert "bring it back" in refused.value.remedy
    write(path, config, 4)
    assert newest(path, config, a_record(saved=8)) == 4  # nobody else could have a newer one


def test_one_that_went_bad_after_it_was_read_gives_way_to_the_one_before(tmp_path: Path) -> None:
    config = a_config()
    write(tmp_path, config, 4)
    path = write(tmp_path, config, 8)
    saved, record = SavedStates(tmp_path, config, build_pipeline(config)), a_record(saved=8)
    origin = asyncio.run(saved.newest(record))
    assert origin.step == 8
    for file in path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    epoch = replace(record, checkpoint=origin.checkpoint)
    with pytest.raises(DataError):
        asyncio.run(saved.state(epoch, 0))  # the stage read last is still in memory
    assert asyncio.run(saved.newest(epoch)).step == 4


def test_joiners_of_two_stages_do_not_take_each_others_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, barrier = a_config(), threading.Barrier(2)
    met: list[int] = []
    write(tmp_path, config, 4)
    saved = SavedStates(tmp_path, config, build_pipeline(config))
    origin = asyncio.run(saved.newest(None))
    read = checkpoints.read_stage_parameters

    def slow(directory: Path, stage: int) -> dict[str, torch.Tensor]:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(barrier.wait(0.1))
        return read(directory, stage)

    async def ask() -> list[str]:
        record = replace(a_record(saved=4), checkpoint=origin.checkpoint)
        both = await asyncio.gather(saved.state(record, 0), saved.state(record, 1))
        return [each.fingerprint for each in both]

    monkeypatch.setattr(checkpoints, "read_stage_parameters", slow)
    assert asyncio.run(ask()) == [origin.fingerprints[stage] for stage in (0, 1)]
    assert not met, "two threads read at once"


def test_another_trainers_checkpoint_is_not_taken_for_one_of_an_epoch_that_was_left(
    tmp_path: Path,
) -> None:
    """Both are of step 8; with an older one a lost stage would go back further than need be."""
    config = trained_by(["t", "u"])
    write(tmp_path, config, 2)
    path, record = write(tmp_path, config, 8), a_record(saved=8, epoch=1, base=6)
    with pytest.raises(DataError, match="of step 8, is with another trainer"):
        newest(tmp_path, config, record)
    os.truncate(path / checkpoints.MANIFEST, 10)  # here it was, then: damaged, it gives way
    assert newest(tmp_path, config, record) == 2


def test_checkpoints_that_the_disk_knows_nothing_of_are_gone_on_from(tmp_path: Path) -> None:
    """By a lone trainer; others may have begun without this one."""
    source, run = tmp_path / "source", tmp_path / "run"
    assert source_of(None, None, run, alone=True) is None
    write(source, a_config(), 4)
    assert source_of(None, None, source, alone=True) == source
    assert source_of(None, None, source, alone=False) is None
    resume(source, run, a_config(0.2))
    assert source_of(None, None, run, alone=True) == run
    with pytest.raises(DataError, match="may not have begun to") as refused:
        source_of(None, None, run, alone=False)
    assert f"--resume {run}," in refused.value.remedy
    assert source_of(run, None, run, alone=False) == run
    write(run, a_config(0.2), 6, epoch=1)
    assert source_of(None, None, run, alone=False) is None
    assert source_of(None, a_record(saved=0), run, alone=True) is None


def test_a_run_whose_checkpoints_are_away_takes_none_of_its_parents_again(tmp_path: Path) -> None:
    parent, run = tmp_path / "parent", tmp_path / "run"
    named = write(parent, a_config(), 4)
    run.mkdir()
    for source in (parent, run):
        with pytest.raises(DataError, match="has a checkpoint of step 6, which is not in"):
            source_of(source, a_record(saved=6), run, alone=True)
    assert source_of(named, a_record(saved=6), run, alone=True) == named
    assert source_of(parent, a_record(saved=0), run, alone=True) == parent


def test_a_copy_of_this_runs_checkpoint_keeps_its_epoch(tmp_path: Path) -> None:
    config, run = a_config(), tmp_path / "run"
    assert resume(write(tmp_path / "copy", config, 6, 3), run, config) == 6
    assert run_dirs.highest_epoch(run) == 3
    assert not (run / PARENT).exists()


def test_a_checkpoint_that_was_renamed_gets_its_name_again(tmp_path: Path) -> None:
    """By another one nobody finds it who is to be given a stage's state."""
    config, pipeline = a_config(), build_pipeline(a_config())
    named = write(tmp_path, config, 4, epoch=2).rename(tmp_path / "checkpoints" / "step-4.keep")
    write(tmp_path, config, 8, epoch=2)
    for _ in range(2):  # stopped before anybody was told
        saved = SavedStates(tmp_path, config, pipeline)
        order = take_over(
            named, tmp_path, config, pipeline, saved, record=a_record(saved=8), tokenizer=None
        )
        origin = asyncio.run(order(None))
        record = replace(a_record(saved=4), checkpoint=origin.checkpoint)
        for stage in range(pipeline.num_stages):
            state = asyncio.run(saved.state(record, stage))
            assert state.fingerprint == origin.fingerprints[stage]
    assert sorted(os.listdir(named.parent)) == ["step-4", "step-4.keep", "step-8"]
    assert run_dirs.highest_epoch(tmp_path) == 2


def test_a_copy_by_another_name_replaces_no_other_state_of_its_step(tmp_path: Path) -> None:
    config = a_config()
    named = write(tmp_path, config, 4).rename(tmp_path / "checkpoints" / "before")
    there = write(tmp_path, config, 4, epoch=1)
    sha256 = checkpoints.manifest_sha256(there)
    with pytest.raises(DataError, match=r"step-4 is there already.* - move it out of"):
        resume(named, tmp_path, config)
    assert checkpoints.manifest_sha256(there) == sha256
    os.truncate(there / checkpoints.MANIFEST, 10)  # damaged, it is no loss
    assert resume(named, tmp_path, config) == 4
    assert checkpoints.is_complete(there)


def test_a_copy_by_another_name_leaves_its_equal_as_records_name_it(tmp_path: Path) -> None:
    config = a_config()
    there = write(tmp_path, config, 4)
    shutil.copytree(there, named := there.parent / "step-4.keep")
    sha256 = checkpoints.manifest_sha256(there)
    assert resume(named, tmp_path, config) == 4
    assert checkpoints.manifest_sha256(there) == sha256


def test_a_link_to_a_checkpoint_beside_it_is_that_checkpoint(tmp_path: Path) -> None:
    named = write(tmp_path, a_config(), 4)
    sha256 = checkpoints.manifest_sha256(named)
    link = tmp_path / "checkpoints" / "best"
    link.symlink_to("step-4")
    assert resume(link, tmp_path, a_config()) == 4
    assert checkpoints.manifest_sha256(named) == sha256


def test_what_lies_beside_a_parents_checkpoints_is_not_taken_for_its_own(tmp_path: Path) -> None:
    source, config = tmp_path / "source", a_config()
    write(source, config, 4)
    write(source, a_config(0.3), 8)
    (source / "run.json").write_bytes(canonical_bytes(config))
    assert resume(source, tmp_path / "run", a_config(0.2)) == 4


def test_a_run_that_went_back_and_forth_goes_on_from_what_it_has_passed_through(
    tmp_path: Path,
) -> None:
    """To step 4, where step 6 was written anew, then by name to step 10."""
    config, record = a_config(), a_record(saved=10, epoch=2, base=10)
    for step, epoch in ((4, 0), (8, 0), (10, 0), (6, 1), (12, 1)):
        write(tmp_path, config, step, epoch)
    assert newest(tmp_path, config, record) == 10
    assert resume(tmp_path, tmp_path, config, record) == 10
    assert newest(tmp_path, config, a_record(saved=4, epoch=1, base=4)) == 12
    write(tmp_path, config, 14, epoch=2)
    assert newest(tmp_path, config, a_record(saved=10, epoch=2, base=10, step=13)) == 14
    with pytest.raises(DataError, match="of step 2, is not here any more"):
        newest(tmp_path, config, a_record(saved=2, epoch=9, base=2))


def test_what_was_left_behind_takes_no_place_of_what_the_run_went_back_to(tmp_path: Path) -> None:
    """With one of them damaged, the run would begin anew."""
    config = a_config()
    for step, epoch in ((4, 0), (8, 0), (12, 0), (6, 1)):
        write(tmp_path, config, step, epoch)
    record = a_record(saved=4, epoch=1, base=4)

    def left() -> list[int]:
        run_dirs.prune(tmp_path, 2, config.run_id, record)
        return sorted(int(name[5:]) for name in os.listdir(tmp_path / "checkpoints"))

    assert left() == [4, 6, 12]
    write(tmp_path, config, 8, epoch=1)
    assert left() == [6, 8]


def test_what_a_run_has_gone_forth_to_is_kept(tmp_path: Path) -> None:
    """Of an epoch before the one that it left for it."""
    config = a_config()
    for step, epoch in ((4, 0), (10, 0), (6, 1), (8, 1), (12, 2)):
        write(tmp_path, config, step, epoch)
    run_dirs.prune(tmp_path, 2, config.run_id, a_record(saved=10, epoch=2, base=10))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-10", "step-12", "step-8"]


def test_one_that_was_brought_here_is_newer_than_what_the_disk_knows(tmp_path: Path) -> None:
    config, record = a_config(), a_record(saved=4, step=5)
    for step, epoch in ((4, 0), (12, 0), (16, 1)):
        write(tmp_path, config, step, epoch)
    assert newest(tmp_path, config, record) == 16


@pytest.mark.parametrize("names", [["t"], ["t", "u"]], ids=["alone", "two"])
def test_an_order_is_weighed_against_the_newest_record(tmp_path: Path, names: list[str]) -> None:
    """A checkpoint of the run that is named is wanted, whatever there is. A parent's state is only
    to begin with, and a directory's own has to be the newest, or damaged."""
    config, run, child = trained_by(names), tmp_path / "run", tmp_path / "child"
    named, parent = write(run, config, 4), write(tmp_path / "parent", a_config(0.3), 2)
    later = a_record(saved=8)
    assert resume(named, run, config, later) == 4
    assert resume(parent, child, config) == 2
    shutil.rmtree(child)
    which = "by now - start without --resume" if names[1:] else f"which is not in {child} - copy it"
    with pytest.raises(DataError, match=f"the run has a checkpoint of step 8,? {which}"):
        resume(parent, child, config, later)
    assert not child.exists()
    if len(names) > 1:
        with pytest.raises(DataError, match="of step 8, is with another trainer"):
            resume(run, run, config, later)
    os.truncate(write(run, config, 8) / checkpoints.MANIFEST, 10)
    assert resume(run, run, config, later) == 4


def test_the_same_command_again_does_not_go_back_from_what_others_lead(tmp_path: Path) -> None:
    source, run, config = tmp_path / "source", tmp_path / "run", a_config(0.2)
    write(source, a_config(), 4)
    assert resume(source, run, config) == 4
    record = a_record(saved=4)
    assert source_of(source, record, run, alone=False) is None
    assert source_of(source, a_record(saved=0), run, alone=False) == source  # it was never heard
    assert source_of(source, record, run, alone=True) == source
    assert source_of(run, record, run, alone=False) == run
