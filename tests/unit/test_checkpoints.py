"""Checkpoints: whole or not there, checked when read, and exported as what was trained."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peer import checkpoints, run_dirs
from peer.export import export_checkpoint
from swarm.config import RunConfig, canonical_bytes, parse_config, run_id_of, with_pretrained_hash
from swarm.errors import ConfigError, DataError, StorageError
from swarm.model import build_pipeline
from swarm.model.export import export_model

HF_MODEL = {
    "stages": 2,
    "config": {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def a_config(**model: Any) -> RunConfig:
    data = {"source": "stdlib", "tokenizer": "bytes", "vocab_size": 256, "sequence": 8}
    if "pipeline" in model:
        data = {"source": "pipeline"}
    batch = {"microbatches": 2, "microbatch_size": 1}
    value = {"run": {"name": "tiny"}, "model": model or HF_MODEL, "data": data, "batch": batch}
    return parse_config(
        {**value, "optimizer": {"name": "sgd", "lr": 0.1}, "schedule": {"steps": 9}}
    )


def a_state(seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            f"layer{k}.weight": torch.randn(3, 5, generator=generator),
            f"layer{k}.bias": torch.ones(3),
        }
        for k in range(2)
    ]


def write(
    run_dir: Path, step: int, state: list[dict[str, Tensor]], config: dict[str, Any] | None = None,
    run_id: str = "ab",
) -> Path:  # fmt: skip
    staging = checkpoints.begin(run_dir, step)
    entries = [
        checkpoints.write_stage(staging, k, part, {"exp_avg": torch.ones(7) * k}, {"updates": step})
        for k, part in enumerate(state)
    ]
    manifest = {"step": step, "run_id": run_id, "config": config or {}, "stages": entries}
    return checkpoints.complete(staging, manifest)


def latest(run_dir: Path) -> Path | None:
    return next(iter(run_dirs.newest_first(run_dir)), None)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    state = a_state()
    directory = write(tmp_path, 7, state)
    assert directory == tmp_path / "checkpoints" / "step-7" == latest(tmp_path)
    manifest = checkpoints.load_manifest(directory)
    assert (manifest["step"], manifest["run_id"]) == (7, "ab")
    for k, part in enumerate(state):
        read = checkpoints.read_stage_parameters(directory, k)
        assert read.keys() == part.keys()
        assert all(torch.equal(read[name], part[name]) for name in part)
        assert checkpoints.read_stage_optimizer(directory, k)["exp_avg"].tolist() == [k] * 7
        assert manifest["stages"][k]["meta"] == {"updates": 7}
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-7"]


def test_views_of_a_flat_tensor_and_an_empty_optimizer_can_be_written(tmp_path: Path) -> None:
    flat = torch.arange(32, dtype=torch.float32)
    staging = checkpoints.begin(tmp_path, 1)
    parts = {"a": flat[:6].view(2, 3), "b": flat[16:20], "c": flat.view(4, 8).t()}
    entry = checkpoints.write_stage(staging, 0, parts, {})
    manifest = {"step": 1, "run_id": "", "config": {}, "stages": [entry]}
    directory = checkpoints.complete(staging, manifest)
    read = checkpoints.read_stage_parameters(directory, 0)
    assert all(torch.equal(read[name], parts[name]) for name in parts)
    assert checkpoints.read_stage_optimizer(directory, 0) == {}


def test_torn_and_incomplete_checkpoints_are_ignored(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    whole = write(tmp_path, 10, a_state())
    write(tmp_path, 9, a_state())
    root = tmp_path / "checkpoints"
    for step, name in ((11, "manifest.json"), (12, "stage-1.safetensors")):
        shutil.copytree(whole, root / f"step-{step}")
        (root / f"step-{step}" / name).unlink()
    cut = shutil.copytree(whole, root / "step-13") / "stage-0.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    shutil.copytree(whole, root / "step-14")  # its manifest says step 10
    (shutil.copytree(whole, root / "step-15") / "manifest.json").write_text("{")
    (root / "step-x").mkdir()
    staging = checkpoints.begin(tmp_path, 16)
    checkpoints.write_stage(staging, 0, a_state()[0], {})
    assert latest(tmp_path) == whole
    said: list[str] = []
    assert run_dirs.newest_first(tmp_path, said.append)[0] == whole
    assert [line.split(":")[0] for line in said] == [
        f"passed over checkpoint step-{step}" for step in range(15, 10, -1)
    ]
    assert staging.exists()
    again = checkpoints.begin(tmp_path, 17)  # the writer of step 16 was killed
    assert not staging.exists()
    checkpoints.abandon(again)
    with pytest.raises(DataError, match=r"stage-0\.safetensors has"):
        checkpoints.load_manifest(root / "step-13")


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/b", ""])
def test_a_manifest_names_no_paths(tmp_path: Path, file: str) -> None:
    directory = write(tmp_path, 1, a_state())
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["stages"][0]["file"] = file
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="is no file name"):
        checkpoints.load_manifest(directory)


@pytest.mark.parametrize("config", [None, [], "config", 1])
def test_a_manifest_has_a_config(tmp_path: Path, config: Any) -> None:
    directory = write(tmp_path, 1, a_state())
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, "config": config}))
    with pytest.raises(DataError, match="damaged: its config is no table - choose another"):
        checkpoints.load_manifest(directory)
    del manifest["config"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="is not as it was written - choose another"):
        checkpoints.load_manifest(directory)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    directory = write(tmp_path, 1, a_state())
    path = directory / "stage-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    checkpoints.read_stage_parameters(directory, 0)
    with pytest.raises(DataError, match=r"stage-1\.safetensors is damaged: it hashes to"):
        checkpoints.read_stage_parameters(directory, 1)
    with pytest.raises(DataError, match="is damaged"):
        export_checkpoint(_with_config(directory), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _with_config(directory: Path) -> Path:
    config = a_config()
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["config"] = config.model_dump(mode="json")
    manifest["run_id"] = run_id_of(canonical_bytes(config))
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def test_prune_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    for step in (1, 2, 5, 10):
        write(tmp_path, step, a_state())
    (tmp_path / "checkpoints" / "step-2" / "manifest.json").unlink()
    (tmp_path / "checkpoints" / "step-11").mkdir()
    gone = run_dirs.prune(tmp_path, 2, "ab")
    assert [path.name for path in gone] == ["step-2", "step-1"]
    left = ["step-10", "step-11", "step-5"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == left
    run_dirs.prune(tmp_path, 0, "ab")
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step-10"


@pytest.mark.parametrize("at_once", [True, False], ids=["exchange", "two-renames"])
def test_the_same_step_again_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """`at_once`: there is no moment without either. Not every file system can."""
    write(tmp_path, 3, a_state(0))
    if at_once:
        monkeypatch.delattr(os, "rename")  # so that a kill between two of them cannot be
    else:
        monkeypatch.setattr(checkpoints, "_exchange", lambda one, other: False)
    state = a_state(1)
    directory = write(tmp_path, 3, state)
    read = checkpoints.read_stage_parameters(directory, 0)
    assert torch.equal(read["layer0.weight"], state[0]["layer0.weight"])
    assert os.listdir(tmp_path / "checkpoints") == ["step-3"]


def test_killed_while_the_same_step_replaces_one_of_them_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing a large one takes its time, and it may be the only one."""
    write(tmp_path, 3, a_state(0))
    rmtree = shutil.rmtree

    def killed(path: Path, *args: Any, **options: Any) -> None:
        if path.name == ".step-3.tmp" and path.exists():
            raise KeyboardInterrupt
        rmtree(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 3, a_state(1))
    monkeypatch.undo()
    directory = latest(tmp_path)
    assert directory is not None
    checkpoints.read_stage_parameters(directory, 1)
    write(tmp_path, 4, a_state(1))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-3", "step-4"]


class Killed:
    """Kills its process the `count`-th time that it is about to touch the file system."""

    TOUCHES = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"})

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event in self.TOUCHES:
            self.count -= 1
            if self.count == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def write_until_killed(run_dir: Path, step: int, keep: int, at_once: bool, count: int) -> None:
    """In a process of its own."""
    state = a_state(step + 1)
    if not at_once:
        checkpoints._exchange = lambda one, other: False
    sys.addaudithook(Killed(count))
    write(run_dir, step, state)
    run_dirs.prune(run_dir, keep, "ab")


@pytest.mark.parametrize(
    ("step", "keep", "at_once"),
    [(6, 1, True), (5, 2, True), (5, 2, False)],
    ids=["the next step", "the same step", "the same step in two renames"],
)
def test_a_writer_killed_at_any_point_leaves_a_whole_checkpoint(
    tmp_path: Path, step: int, keep: int, at_once: bool
) -> None:
    """The newest there is, is all of before or all of what was being written; the next writer
    clears away what is left."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload([__name__])
    before = tmp_path / "before"
    write(before, 4, a_state(4))
    write(before, 5, a_state(5))
    found = []
    for count in itertools.count(1):
        run_dir = shutil.copytree(before, tmp_path / str(count))
        writer = forking.Process(
            target=write_until_killed, args=(run_dir, step, keep, at_once, count)
        )
        writer.start()
        writer.join()
        newest = latest(run_dir)
        assert newest is not None, count
        first = checkpoints.read_stage_parameters(newest, 0)["layer0.weight"]
        (seed,) = (
            seed
            for seed in (4, 5, step + 1)
            if torch.equal(first, a_state(seed)[0]["layer0.weight"])
        )
        for k, part in enumerate(a_state(seed)):
            read = checkpoints.read_stage_parameters(newest, k)
            assert all(torch.equal(read[name], part[name]) for name in part), count
            checkpoints.read_stage_optimizer(newest, k)
        found.append(seed)
        if writer.exitcode == 0:
            break
        assert writer.exitcode == -signal.SIGKILL
        last = write(run_dir, 7, a_state())
        run_dirs.prune(run_dir, 1, "ab")
        assert os.listdir(run_dir / "checkpoints") == [last.name], count
    assert len(found) > 20
    between = [] if at_once else [4]  # what had the name is away, what gets it is not there yet
    assert list(dict.fromkeys(found)) == [5, *between, step + 1]


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step"])
def test_what_becomes_visible_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Every file as it is by then, and its directory, are synced before; the name is after."""
    if again:
        write(tmp_path, 3, a_state())
    root, synced = tmp_path / "checkpoints", dict[str, Any]()
    visible: list[dict[str, Any]] = []
    fsync, rename, exchange = os.fsync, os.rename, checkpoints._exchange

    def content(path: Path) -> Any:
        return sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[str(path.relative_to(root))] = content(path)

    def note_visible(one: Path, other: Path) -> None:
        assert (one.name, other.name) == (".step-3.tmp", "step-3")
        on_disk = {str(path.relative_to(root)): content(path) for path in (one, *one.iterdir())}
        assert on_disk == synced
        visible.append(on_disk)
        synced.clear()

    def note_rename(one: Path, other: Path) -> None:
        note_visible(one, other)
        rename(one, other)

    def note_exchange(one: Path, other: Path) -> bool:
        note_visible(one, other)
        return exchange(one, other)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(checkpoints, "_exchange", note_exchange)
    write(tmp_path, 3, a_state())
    (files,) = visible
    assert len(files) == 1 + 2 * 2 + 1  # the directory, two of each stage, the manifest
    names = [".step-3.tmp", "step-3"] if again else ["step-3"]
    assert synced == {".": names}  # and only then the one before is removed


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    whole = write(tmp_path, 1, a_state())
    staging = checkpoints.begin(tmp_path, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(StorageError) as caught:
            checkpoints.write_stage(staging, 0, {"w": torch.zeros(1 << 16)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(caught.value)
    assert "cannot write" in str(caught.value)
    assert "free some space" in str(caught.value)
    checkpoints.abandon(staging)
    assert latest(tmp_path) == whole


def trained(config: RunConfig) -> list[dict[str, Tensor]]:
    pipeline = build_pipeline(config)
    generator = torch.Generator().manual_seed(5)
    return [
        {
            name: torch.randn(parameter.shape, generator=generator)
            for name, parameter in pipeline.build_stage(k).named_parameters()
        }
        for k in range(pipeline.num_stages)
    ]


def checkpointed(config: RunConfig, run_dir: Path, step: int = 4) -> list[dict[str, Tensor]]:
    state = trained(config)
    write(run_dir, step, state, config.model_dump(mode="json"), run_id_of(canonical_bytes(config)))
    return state


def test_export_of_a_run_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = checkpointed(a_config(), tmp_path / "run")
    manifest = export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert manifest["step"] == 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = {name: tensor for part in state for name, tensor in part.items()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted.pop(name)), name
    assert not wanted
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids == [97, 98]
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step-4", tmp_path / "out")  # in its place


def test_export_of_a_run_passes_over_what_is_of_another_run(tmp_path: Path) -> None:
    """It may lie there after a kill, or have been brought there."""
    config, said = a_config(), list[str]()
    (tmp_path / "run.json").write_bytes(canonical_bytes(config))
    checkpointed(config, tmp_path, 4)
    other = config.model_copy(update={"run": config.run.model_copy(update={"name": "other"})})
    checkpointed(other, tmp_path, 8)
    assert export_checkpoint(tmp_path, tmp_path / "out", say=said.append)["step"] == 4
    (line,) = said
    assert line.startswith("passed over checkpoint step-8: ")
    assert line.endswith("is of another run")


def test_export_of_a_custom_pipeline(tmp_path: Path) -> None:
    config = a_config(pipeline="swarm_digits:pipeline", stages=2)
    state = checkpointed(config, tmp_path)
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported.pop(n), t) for part in state for n, t in part.items())
    assert not exported


def test_export_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        export_checkpoint(tmp_path / "none", tmp_path / "out")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="loop is no directory"):
        export_checkpoint(tmp_path / "loop", tmp_path / "out")
    with pytest.raises(DataError, match="holds no complete checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out")
    config = a_config()
    write(tmp_path, 1, trained(config), config.model_dump(mode="json"), "another")
    with pytest.raises(DataError, match="is not that of run another"):
        export_checkpoint(tmp_path, tmp_path / "out")
    run_id = run_id_of(canonical_bytes(config))
    write(tmp_path, 2, a_state(), config.model_dump(mode="json"), run_id)
    with pytest.raises(DataError, match="lacks"):
        export_checkpoint(tmp_path, tmp_path / "out")
    broken = trained(config)
    broken[0] = {name: torch.zeros(1) for name in broken[0]}
    write(tmp_path, 3, broken, config.model_dump(mode="json"), run_id)
    with pytest.raises(DataError, match="does not fit its config"):
        export_checkpoint(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("source", ["run", "run/checkpoints/step-2"])
def test_export_of_a_run_whose_pretrained_model_has_changed(source: str, tmp_path: Path) -> None:
    """It would be of another activation. No other checkpoint is tried: none would do."""
    start, said = a_config(), list[str]()
    first = {name: tensor for part in trained(start) for name, tensor in part.items()}
    export_model(build_pipeline(start), first, tmp_path / "model")
    config = a_config(stages=2, pretrained=str(tmp_path / "model"))
    for step in (1, 2):
        checkpointed(with_pretrained_hash(config), tmp_path / "run", step)
    assert export_checkpoint(tmp_path / source, tmp_path / "out", say=said.append)["step"] == 2
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace('"silu"', '"gelu"'))
    with pytest.raises(
        DataError, match=r"the bytes hash to .* - it must be there as the run began"
    ):
        export_checkpoint(tmp_path / source, tmp_path / "other", say=said.append)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(DataError, match=r"there is no directory .*model - it must be there"):
        export_checkpoint(tmp_path / source, tmp_path / "other", say=said.append)
    assert not (tmp_path / "other").exists()
    assert not said


def resume(
    source: Path, run_dir: Path, config: RunConfig, say: Callable[[str], None] = lambda line: None
) -> int:
    from peer.resume import SavedStates
    from peer.take_over import take_over
    from swarm.model import build_pipeline

    pipeline = build_pipeline(config)
    saved = SavedStates(run_dir, config, pipeline)
    order = take_over(source, run_dir, config, pipeline, saved, say, tokenizer=None)
    return asyncio.run(order(None)).step


def test_resuming_says_why_no_checkpoint_will_do(tmp_path: Path) -> None:
    """That there is none would send the reader to look for one."""
    config, said = a_config(), list[str]()
    checkpointed(config, tmp_path / "run")
    with pytest.raises(DataError, match="another optimizer") as refused:
        resume(tmp_path / "run", tmp_path / "new", config, said.append)
    assert refused.value.message.startswith(f"cannot go on from {tmp_path / 'run'}: ")
    assert "[optimizer]" in refused.value.remedy
    assert [line.split(":")[0] for line in said] == ["passed over checkpoint step-4"]


def test_resuming_with_another_width_is_refused_in_one_line(tmp_path: Path) -> None:
    checkpointed(a_config(), tmp_path / "run")
    wider = a_config(**{**HF_MODEL, "config": {**HF_MODEL["config"], "hidden_size": 32}})  # type: ignore[dict-item]
    with pytest.raises(DataError, match="of another model") as refused:
        resume(tmp_path / "run", tmp_path / "new", wider)
    assert refused.value.message.endswith("is (256, 16) instead of (256, 32)")
    assert "[model]" in refused.value.remedy
    assert "run.seed" in refused.value.remedy
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "new").exists()


def test_a_bpe_kept_with_the_checkpoint_is_exported(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from swarm.data.tokenizer import train_bpe

    tokenizer = train_bpe(iter([b"so so so it is, it is so\n" * 20]), 280)
    value = a_config().model_dump(mode="json")
    value["data"].update(tokenizer="bpe", vocab_size=280)
    value["model"]["config"]["vocab_size"] = 280
    config = parse_config(value)
    staging = checkpoints.begin(tmp_path, 1)
    entries = [checkpoints.write_stage(staging, k, p, {}) for k, p in enumerate(trained(config))]
    manifest = {
        "step": 1, "run_id": run_id_of(canonical_bytes(config)),
        "config": config.model_dump(mode="json"), "stages": entries,
    }  # fmt: skip
    checkpoints.complete(staging, manifest, tokenizer)
    export_checkpoint(tmp_path, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("it is so").input_ids == tokenizer.encode("it is so")


def test_a_run_its_checkpoints_or_one_of_them_mean_the_run(tmp_path: Path) -> None:
    """Also where the run's own directory is called `checkpoints`, or lies in one."""
    for run in (tmp_path / "run", tmp_path / "checkpoints", tmp_path / "checkpoints" / "other"):
        step = run / "checkpoints" / "step-4"
        step.mkdir(parents=True)
        (run / "run.json").write_text("{}")
        for source in (run, run / "checkpoints", step):
            assert run_dirs.run_dir_of(source) == run.resolve()
            assert run_dirs.is_checkpoint(source) == (source == step)
    copied = tmp_path / "copied"
    copied.mkdir()
    assert run_dirs.run_dir_of(copied) == copied.resolve()
    with pytest.raises(ConfigError, match=r"run\.json is no directory"):
        run_dirs.run_dir_of(tmp_path / "run" / "run.json")


def test_checkpoints_may_lie_on_another_disk(tmp_path: Path) -> None:
    """Behind a link; while that disk is away there are not *none*."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    step = run / "checkpoints" / "step-4"
    (disk / "step-4").mkdir(parents=True)
    run.mkdir()
    (run / "checkpoints").symlink_to(Path("..") / "disk")
    for begun in (False, True):
        for source in (run, run / "checkpoints", step):
            assert run_dirs.run_dir_of(source) == run.resolve()
            assert run_dirs.is_checkpoint(source) == (source == step)
        if not begun:
            (run / "run.json").write_text("{}")
    assert run_dirs.has_any(run)
    shutil.rmtree(disk)
    assert run_dirs.run_dir_of(run) == run.resolve()
    for look in (run_dirs.has_any, run_dirs.newest_first):
        with pytest.raises(DataError, match="cannot read") as away:
            look(run)
        assert "mount the disk" in away.value.remedy
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(ConfigError, match="no directory"):
        run_dirs.run_dir_of(loop)


def test_a_link_to_a_checkpoint_means_its_run(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "step-4"
    step.mkdir(parents=True)
    (tmp_path / "newest").symlink_to(step)
    assert run_dirs.run_dir_of(tmp_path / "newest") == (tmp_path / "run").resolve()
    assert run_dirs.is_checkpoint(tmp_path / "newest")


def test_an_export_takes_the_newest_that_is_whole(tmp_path: Path) -> None:
    config, said = a_config(), list[str]()
    checkpointed(config, tmp_path)
    newest = tmp_path / "checkpoints" / "step-5"
    shutil.copytree(tmp_path / "checkpoints" / "step-4", newest)
    manifest = newest / checkpoints.MANIFEST
    manifest.write_text(manifest.read_text().replace('"step": 4', '"step": 5'))
    (part,) = newest.glob("stage-0.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert export_checkpoint(tmp_path, tmp_path / "out", say=said.append)["step"] == 4
    assert [line.split(":")[0] for line in said] == ["passed over checkpoint step-5"]
    with pytest.raises(DataError, match="is damaged"):
        export_checkpoint(newest, tmp_path / "other")
    whole = json.loads(manifest.read_text())
    for config_there in ("x", [1], None, {"run": 1}):
        manifest.write_text(json.dumps({**whole, "config": config_there}))
        said.clear()
        assert export_checkpoint(tmp_path, tmp_path / "again", say=said.append)["step"] == 4
        assert re.search("step-5 is damaged: its config|config in .*step-5: run ", said[0])
    for path in tmp_path.glob("checkpoints/*/manifest.json"):
        path.write_text('{"step": 4}')
    said.clear()
    with pytest.raises(DataError, match="holds no complete checkpoint") as refused:
        export_checkpoint(tmp_path, tmp_path / "other", say=said.append)
    assert refused.value.remedy.startswith("the lines above say what is wrong")
    assert len(said) == 2
    assert all(line.endswith("is damaged: manifest.json is not as it was written") for line in said)


def test_resuming_a_run_whose_checkpoints_cannot_be_read_touches_none(tmp_path: Path) -> None:
    config, run = a_config(), tmp_path / "run"
    checkpointed(config, run)
    (run / "run.json").write_bytes(canonical_bytes(config))
    manifest = run / "checkpoints" / "step-4" / checkpoints.MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(DataError, match="holds no complete checkpoint") as refused:
        resume(run, run, config)
    assert "the version that wrote them" in refused.value.remedy
    with pytest.raises(DataError, match="its format is 2"):
        resume(manifest.parent, run, config)
    shutil.rmtree(run / "checkpoints")
    assert resume(run, run, config) == 0
