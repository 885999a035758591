"""A trained model as a directory that others load.

A Hugging Face run becomes what `AutoModelForCausalLM` and `AutoTokenizer` load; a custom pipeline
becomes a safetensors file under its parameters' whole-model names, and a note that says what it is.
The directory appears whole or not at all: it is written in a hidden one beside its place, and
renamed. What a killed export has left of that is cleared by the next one to the same place; it can
tell, because whoever writes holds a lock that the kernel frees.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from swarm.errors import DataError, StorageError, SwarmError
from swarm.model.stage import ModelPipeline

GENERATION = "generation_config.json"


class SavedTokenizer(Protocol):
    """What export needs of a tokenizer: its files, the id that ends a document, and whether it is
    `"pretrained"`, that of the model a run began with."""

    @property
    def kind(self) -> str: ...

    @property
    def eos_id(self) -> int: ...

    def save_tokenizer(self, directory: str | Path) -> None: ...


def export_model(
    pipeline: ModelPipeline,
    tensors: Mapping[str, Tensor],
    directory: str | Path,
    tokenizer: SavedTokenizer | None = None,
) -> Path:
    """Writes the model with these parameters (by whole-model name) to a new or empty directory.

    An earlier export at that place is replaced; any other directory with content is refused, and
    the current one. A link leads to the place. Raises StorageError, and then nothing has changed.
    """
    target = Path(os.path.realpath(directory))
    missing = [name for name in pipeline.key_order if name not in tensors]
    if missing:
        raise SwarmError(f"cannot export: {len(missing)} parameters are missing, as {missing[0]}")
    state = {
        name: tensors[name].detach().to("cpu", torch.float32).contiguous()
        for name in pipeline.key_order
    }
    elsewhere = "choose another directory for the export"
    try:
        if target.exists() and any(target.iterdir()) and not _is_export(target):
            raise StorageError(f"{target} is not empty", elsewhere)
        if Path.cwd().is_relative_to(target):  # which would be gone then
            raise StorageError(f"the current directory is in {target}", elsewhere)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _staging_beside(target) as staging:
            new, former = staging / "new", staging / "former"
            new.mkdir()
            _write(pipeline, state, new, tokenizer)
            if target.exists():
                target.rename(former)
            try:
                new.rename(target)
            except BaseException:
                if former.exists():
                    former.rename(target)
                raise
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"cannot write {target}: {reason}", elsewhere) from error
    except SafetensorError as error:  # which wraps the operating system's message
        text = str(error).splitlines()[0][:200]
        raise StorageError(f"cannot write {target}: {text}", elsewhere) from error
    return target


@contextlib.contextmanager
def _staging_beside(target: Path) -> Iterator[Path]:
    """A hidden directory that is gone afterwards; what killed processes left of theirs is too."""
    prefix = f".{target.name}.swarm-export-"
    for left_over in target.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), _locked(left_over):
            shutil.rmtree(left_over, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # where there are no locks, left-overs stay
                stack.enter_context(_locked(staging))
            yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Raises OSError when another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _is_export(directory: Path) -> bool:
    return (directory / "swarm_export.json").is_file()


def _write(
    pipeline: ModelPipeline,
    state: dict[str, Tensor],
    directory: Path,
    tokenizer: SavedTokenizer | None,
) -> None:
    from swarm.model.custom import CustomPipeline

    if isinstance(pipeline, CustomPipeline):
        from safetensors.torch import save_file

        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        kind = "custom"
    else:
        _write_huggingface(pipeline, state, directory, tokenizer)
        kind = "huggingface"
    if tokenizer is not None:
        tokenizer.save_tokenizer(directory)
    note = {"format": 1, "kind": kind, "parameters": sum(t.numel() for t in state.values())}
    (directory / "swarm_export.json").write_text(json.dumps(note, indent=2) + "\n")


def _write_huggingface(
    pipeline: ModelPipeline,
    state: dict[str, Tensor],
    directory: Path,
    tokenizer: SavedTokenizer | None,
) -> None:
    from swarm.model.hf_carve import build_model
    from swarm.model.hf_config import quiet
    from swarm.model.hf_weights import load_buffers
    from swarm.model.huggingface import HuggingFacePipeline

    assert isinstance(pipeline, HuggingFacePipeline)
    model = build_model(copy.deepcopy(pipeline.config), empty=True)
    state = pipeline.plain(state)
    buffers = {key: value for key, value in model.state_dict().items() if key not in state}
    if buffers and pipeline.pretrained is not None:
        load_buffers(model, pipeline.pretrained, pipeline.copied)
    model.load_state_dict({**buffers, **state}, assign=True)
    if tokenizer is not None:
        _name_ends(model, tokenizer)
    with quiet():
        model.save_pretrained(directory)
    if pipeline.pretrained is not None and tokenizer is not None:
        _keep_generation(pipeline.pretrained, directory, tokenizer)


def _name_ends(model: Any, tokenizer: SavedTokenizer) -> None:
    """With which id a text ends. Those of the model that the run began with are of its tokens."""
    others = tokenizer.kind != "pretrained"
    generation = model.generation_config
    if others or generation.eos_token_id is None:
        generation.eos_token_id = generation.pad_token_id = tokenizer.eos_id
    if others:  # the padding of a config is left: which embedding is never trained goes by it
        for each in (generation, model.config, model.config.get_text_config(decoder=True)):
            each.eos_token_id, each.bos_token_id = tokenizer.eos_id, None


def _keep_generation(source: Path, directory: Path, tokenizer: SavedTokenizer) -> None:
    """How text is made with the model that the run began with, if its tokens mean what they did."""
    path = source / GENERATION
    if tokenizer.kind != "pretrained" or not path.is_file():
        return
    try:
        settings = {**json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"cannot read {path}: {error}", "restore it, or take it away") from None
    if settings.get("eos_token_id") is None:
        settings["eos_token_id"] = settings["pad_token_id"] = tokenizer.eos_id
    (directory / GENERATION).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
