"""Checkpoints on disk: each stage's state right after one record, complete or not there at all.

`RUN_DIR/checkpoints/step-N/` holds per stage the parameters (`stage-K.safetensors`, under their
whole-model names, in their shapes) and the optimizer's flat tensors (`stage-K.optimizer.safetensors`;
apart, so that an export reads only what it needs and no name can collide), and `manifest.json`, which
names every file with size and sha256. It is built under a hidden name and renamed after everything
is synced, so a killed writer leaves nothing that looks complete (DESIGN, "Leaders, terms, records").

    staging = begin(run_dir, step)
    entries = [write_stage(staging, k, parameters, optimizer, {"updates": …}) for k …]
    complete(staging, {"step": step, "run_id": …, "config": …, "stages": entries})

Which of a run's checkpoints count, and which may go, is `peer.run_dirs`. All of it blocks: call it
from a thread.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm.errors import DataError, StorageError

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")  # a plain name: no path from outside
_RENAME_EXCHANGE = 2  # linux/fs.h
_FREE_SPACE = "free some space, or lower [checkpoint] keep in the next run"


def begin(run_dir: str | Path, step: int) -> Path:
    """An empty hidden directory for checkpoint `step`; what killed writers left is removed.

    One writer per run. Raises StorageError.
    """
    root = Path(run_dir) / "checkpoints"
    staging = root / f".step-{step}.tmp"
    with _storage(root):
        root.mkdir(parents=True, exist_ok=True)
        for left_over in root.glob(".step-*"):
            _discard(left_over)
        staging.mkdir()
    return staging


def write_stage(
    directory: Path,
    stage: int,
    parameters: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    meta: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write one stage, synced; returns its entry for the manifest. Raises StorageError.

    `optimizer` names flat tensors as `FlatOptimizer.state` does. `meta` is JSON (updates applied,
    fingerprint, …) and comes back with the entry.
    """
    file, optimizer_file = f"stage-{stage}.safetensors", f"stage-{stage}.optimizer.safetensors"
    return {
        "stage": stage,
        **_save(directory, file, parameters),
        "optimizer": _save(directory, optimizer_file, optimizer),
        "meta": dict(meta or {}),
    }


def complete(staging: Path, manifest: Mapping[str, Any], tokenizer: Any = None) -> Path:
    """Make a checkpoint real: manifest, sync, rename. Returns `checkpoints/step-N`.

    `manifest` has `step`, `run_id`, `config` (the canonical config as a dict), `stages`, the
    entries of `write_stage` for stages 0, 1, …, and if not 0 the `epoch`. A `tokenizer` (anything
    with `save_tokenizer`) is kept beside them, so that an export needs no data. A checkpoint of
    the same step is replaced. Raises StorageError; then there is no new checkpoint, and `staging`
    is gone.
    """
    value = {"format": FORMAT, **manifest}
    _check(value, staging)
    final = staging.parent / f"step-{value['step']}"
    try:
        with _storage(staging):
            if tokenizer is not None:
                tokenizer.save_tokenizer(staging)
                value["tokenizer"] = _entry(staging / TOKENIZER)
            data = json.dumps(value, indent=1, allow_nan=False).encode()
            (staging / MANIFEST).write_bytes(data)
            for path in (*staging.iterdir(), staging):
                _sync(path)
            replaced = _put(staging, final)
            _sync(final.parent)
            if replaced is not None:  # only now: a kill while it goes must not leave neither
                with contextlib.suppress(OSError):
                    _discard(replaced)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return final


def abandon(staging: Path) -> None:
    """Remove a checkpoint that will not be completed. Never raises."""
    shutil.rmtree(staging, ignore_errors=True)


def is_complete(directory: str | Path) -> bool:
    """Whether it has a manifest that can be read, and its files in full."""
    try:
        load_manifest(directory)
    except DataError:
        return False
    return True


def load_manifest(directory: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there in full. Raises DataError."""
    directory = Path(directory)
    try:
        value = json.loads((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{directory} is not a complete checkpoint", "choose another") from None
    except (OSError, ValueError, RecursionError) as error:
        what = f"cannot read {directory / MANIFEST}: {error}"
        raise DataError(what, "choose another") from None
    try:
        _check(value, directory)
    except (TypeError, KeyError, AttributeError):
        what = f"checkpoint {directory} is damaged: {MANIFEST} is not as it was written"
        raise DataError(what, "choose another") from None
    except (ValueError, OSError) as error:
        raise DataError(f"checkpoint {directory} is damaged: {error}", "choose another") from None
    return value


def manifest_sha256(directory: str | Path) -> str:
    """What a record names a checkpoint by. Raises OSError."""
    return hashlib.sha256((Path(directory) / MANIFEST).read_bytes()).hexdigest()


def read_stage_parameters(directory: str | Path, stage: int) -> dict[str, Tensor]:
    """One stage's parameters by whole-model name, checked against the manifest.

    Raises DataError where the bytes are not those that were written.
    """
    return _load(Path(directory), load_manifest(directory)["stages"][stage])


def read_stage_optimizer(directory: str | Path, stage: int) -> dict[str, Tensor]:
    """One stage's flat optimizer tensors, checked as the parameters are."""
    return _load(Path(directory), load_manifest(directory)["stages"][stage]["optimizer"])


def _check(manifest: Any, directory: Path) -> None:
    """Raises ValueError (or what a malformed one provokes) unless files and manifest agree."""
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}, this version reads {FORMAT}")
    stages: Sequence[Any] = manifest["stages"]
    if type(manifest["step"]) is not int or not stages:
        raise ValueError("it names no step or no stages")
    if type(manifest.get("epoch", 0)) is not int:
        raise ValueError("its epoch is no number")
    if not isinstance(manifest["config"], dict):
        raise ValueError("its config is no table")
    entries = []
    for number, entry in enumerate(stages):
        if entry["stage"] != number:
            raise ValueError(f"stage {number} is missing")
        entries += [entry, entry["optimizer"]]
    if "tokenizer" in manifest:
        entries.append(manifest["tokenizer"])
    for entry in entries:
        name = entry["file"]
        if not _FILE.fullmatch(name):
            raise ValueError(f"{name!r} is no file name")
        if not isinstance(entry["sha256"], str):
            raise ValueError(f"it has no sha256 of {name}")
        size = (directory / name).stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"{name} has {size} bytes instead of {entry['bytes']}")


def _save(directory: Path, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    path = directory / name
    plain = {key: _owned(tensor) for key, tensor in tensors.items()}
    with _storage(path):
        save_file(plain, path, metadata={"format": "pt"})
        _sync(path)
        return _entry(path)


def _owned(tensor: Tensor) -> Tensor:
    """On the CPU and contiguous; a view of a larger tensor is copied, as safetensors wants it."""
    tensor = tensor.detach().to("cpu")
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor.contiguous() if whole else tensor.clone(memory_format=torch.contiguous_format)


def _load(directory: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    path = directory / entry["file"]
    try:
        found = _entry(path)
        if found["sha256"] != entry["sha256"]:
            raise DataError(
                f"{path} is damaged: it hashes to {found['sha256'][:12]}… instead of"
                f" {str(entry['sha256'])[:12]}…",
                "use another checkpoint",
            )
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read {path}: {error}", "use another checkpoint") from None


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"file": path.name, "bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def remove(directory: Path) -> None:
    """Delete a checkpoint: hidden first, so that a half-deleted one never looks whole. Raises
    OSError where it stays."""
    hidden = _hide(directory)
    with contextlib.suppress(OSError):
        _discard(hidden)


def _discard(path: Path) -> None:
    """Of a link, a person's to another disk, only the link goes."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def _put(staging: Path, final: Path) -> Path | None:
    """Give `staging` its `final` name; where the one that had it is now."""
    if not os.path.lexists(final):
        os.rename(staging, final)
        return None
    if _exchange(staging, final):
        return staging
    hidden = _hide(final)
    try:
        os.rename(staging, final)
    except OSError:
        os.rename(hidden, final)
        raise
    return hidden


def _exchange(one: Path, other: Path) -> bool:
    """Whether the two have exchanged their names at once, so that a kill leaves one of them there.

    Python has no call for it (`renameat2`, Linux); some file systems cannot.
    """
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = [os.fsencode(path.absolute()) for path in (one, other)]
    here = 0  # a directory's number, which absolute names do not need
    return call is not None and call(here, names[0], here, names[1], _RENAME_EXCHANGE) == 0


def _hide(directory: Path) -> Path:
    """Where it is now."""
    hidden = directory.with_name(f".{directory.name}.old")
    if os.path.lexists(hidden):
        _discard(hidden)
    os.rename(directory, hidden)
    return hidden


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}", _FREE_SPACE) from None
    except SafetensorError as error:  # which wraps the operating system's message
        text = str(error).splitlines()[0][:200]
        raise StorageError(f"cannot write {path}: {text}", _FREE_SPACE) from None
