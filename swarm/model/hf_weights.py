"""First weights of a stage's modules: drawn by name, or read from a local directory.

Each module is initialised by its model's own `_init_weights` under a seed of (run seed, module
name), children first as transformers does: equal weights whatever the cut, and the whole model is
never allocated. From a directory only the stage's tensors are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarm.errors import ConfigError, PipelineError
from swarm.model.hf_config import quiet
from swarm.model.randomness import derive_seed


def allocate(model: nn.Module) -> None:
    """Gives parameters on the meta device memory, filled with NaN so that none is forgotten."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                data = torch.full(parameter.shape, float("nan"), dtype=torch.float32)
                module._parameters[name] = nn.Parameter(data, parameter.requires_grad)


def draw(model: Any, seed: int) -> None:
    """Fresh weights for all modules of a carved model. Raises PipelineError."""
    from transformers import PreTrainedModel

    def visit(module: nn.Module, name: str, owner: Any) -> None:
        for child_name, child in module.named_children():
            child_owner = child if isinstance(child, PreTrainedModel) else owner
            visit(child, f"{name}.{child_name}" if name else child_name, child_owner)
        torch.default_generator.manual_seed(derive_seed(seed, "init", name))
        owner._init_weights(module)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        visit(model, "", model)
    for name, parameter in model.named_parameters():
        if torch.isnan(parameter).any():
            raise PipelineError(f"{type(model).__name__} does not initialise {name}")


def load(model: Any, directory: str | Path, copied: Mapping[str, str] | None = None) -> None:
    """Fills a carved model's parameters and buffers from a Hugging Face directory. Raises
    ConfigError.

    `copied` names parameters that take another's weight: {their name: whose}.
    """
    copied = copied or {}
    names = {name: copied.get(name, name) for name, _ in model.named_parameters()}
    source = _tensors_in(Path(directory), names.values())
    for name, parameter in model.named_parameters():
        _fill(name, parameter, source.get(names[name]), directory)
    _fill_buffers(model, source, directory)


def load_buffers(model: Any, directory: str | Path) -> None:
    """What `load` does, of the buffers alone. Raises ConfigError."""
    names = [name for name, _ in model.named_parameters()]
    _fill_buffers(model, _tensors_in(Path(directory), names), directory)


def _fill_buffers(model: Any, source: Mapping[str, Tensor], directory: str | Path) -> None:
    """Those that are saved hold what was learned elsewhere and stays: the bias of a router, the
    scale of a layer. One that was not saved is what its family makes it."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent and name in source:
            _fill(name, buffer, source[name], directory)


def _fill(name: str, target: Tensor, tensor: Tensor | None, directory: str | Path) -> None:
    if tensor is None or tensor.shape != target.shape:
        raise ConfigError(
            f"{directory} has no weights for {name} of shape {tuple(target.shape)}",
            "check that its config.json belongs to its weights",
        )
    with torch.no_grad():
        target.copy_(tensor)


def _tensors_in(directory: Path, names: Iterable[str]) -> Mapping[str, Tensor]:
    """The tensors of a directory, by the names that its model has."""
    files = _Files(directory)
    if all(name in files for name in names):
        return files
    # Names differ between file and model (prefixes, fused experts): let transformers convert, at
    # the price of the whole model in memory for a moment.
    return _converted(directory)


class _Files(Mapping[str, Tensor]):
    """What the safetensors files of a directory hold, read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        index, single = (directory / f"model.safetensors{suffix}" for suffix in (".index.json", ""))
        self._files: dict[str, Path] = {}
        if index.is_file():
            try:
                held = json.loads(index.read_text())["weight_map"].items()
                self._files = {name: directory / file for name, file in held}
            except (ValueError, KeyError, TypeError, AttributeError):
                what = f"{index} does not say which file holds what"
                raise ConfigError(what, "save it with save_pretrained") from None
        elif single.is_file():
            with safe_open(single, "pt") as opened:
                self._files = dict.fromkeys(opened.keys(), single)
        else:
            what = f"no model.safetensors in {directory}"
            raise ConfigError(what, "save it with save_pretrained")

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _converted(directory: str | Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    loaded: Any
    try:
        with quiet():
            loaded = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:
        raise ConfigError(f"cannot load {directory}: {error}") from error
    model, info = loaded
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    missing = set(info["missing_keys"])
    outputs, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    for name in missing:  # a tied checkpoint made untied: the output starts as a copy
        if outputs is not None and tensors.get(name) is outputs.weight:
            tensors[name] = inputs.weight
        else:
            tensors.pop(name, None)
    return tensors
