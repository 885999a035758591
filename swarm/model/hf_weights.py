"""First weights of a stage's modules: drawn by name, or read from a local directory.

Each module is initialised by its model's own `_init_weights` under a seed of (run seed, module
name), children first as transformers does: equal weights whatever the cut, and the whole model is
never allocated. From a directory only the stage's tensors are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
    """Fills a carved model's parameters from a Hugging Face directory. Raises ConfigError.

    `copied` names parameters that take another's weight: {their name: whose}.
    """
    get, copied = _reader(Path(directory)), copied or {}
    tensors = {name: get(copied.get(name, name)) for name, _ in model.named_parameters()}
    if any(tensor is None for tensor in tensors.values()):
        # Names differ between file and model (prefixes, fused experts): let transformers convert,
        # at the price of the whole model in memory for a moment.
        whole = _converted(directory)
        tensors = {name: whole.get(copied.get(name, name)) for name in tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = tensors[name]
            if tensor is None or tensor.shape != parameter.shape:
                raise ConfigError(
                    f"{directory} has no weights for {name} of shape {tuple(parameter.shape)}",
                    "check that its config.json belongs to its weights",
                )
            parameter.copy_(tensor)


def _reader(directory: Path) -> Callable[[str], Tensor | None]:
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
    elif single.is_file():
        with safe_open(single, "pt") as opened:
            files = dict.fromkeys(opened.keys(), single.name)
    else:
        raise ConfigError(f"no model.safetensors in {directory}", "save it with save_pretrained")

    def get(name: str) -> Tensor | None:
        if name not in files:
            return None
        with safe_open(directory / files[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    return get


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
    tensors = dict(model.named_parameters())
    missing = set(info["missing_keys"])
    outputs, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    for name in missing:  # a tied checkpoint made untied: the output starts as a copy
        if outputs is not None and tensors.get(name) is outputs.weight:
            tensors[name] = inputs.weight
        else:
            tensors.pop(name, None)
    return tensors
