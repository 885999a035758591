"""First weights of a stage's modules: drawn by name, or read from a local directory.

Each module is initialised by its model's own `_init_weights` under a seed of (run seed, module
name), children first as transformers does: equal weights whatever the cut, and the whole model is
never allocated. From a directory only the stage's tensors are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarm.errors import ConfigError, PipelineError
from swarm.model.hf_config import decoder_config, quiet
from swarm.model.hf_files import WeightFiles
from swarm.model.randomness import derive_seed

CHECK_CONFIG = "check that its config.json belongs to its weights"


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


def load(
    model: Any,
    directory: Path,
    copied: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fills a carved model's parameters and buffers from a Hugging Face directory. Raises
    ConfigError.

    `copied` names parameters that take another's weight: {their name: whose}. `dtype` is what the
    model computes in: a number that is infinite there is refused as one that is so in the file.
    """
    copied = copied or {}
    source = _tensors_in(directory, model, copied)
    for name, parameter in model.named_parameters():
        _fill(name, parameter, source.get(copied.get(name, name)), directory, dtype)
    _fill_buffers(model, source, directory, dtype)


def load_buffers(model: Any, directory: Path, copied: Mapping[str, str]) -> None:
    """What `load` does, of the buffers alone. Raises ConfigError."""
    _fill_buffers(model, _tensors_in(directory, model, copied), directory, torch.float32)


def check_weights(model: Any, directory: Path, layers: str, copied: Mapping[str, str]) -> None:
    """Raises ConfigError where the headers of the files tell that `load` would, of any stage, or
    that they have layers that the whole model lacks; `layers` is the path of its own."""
    files = WeightFiles(directory)
    _check_layers(model, layers, files, directory)
    _check_headers(model, files, copied, directory)


def _check_layers(model: Any, layers: str, names: Iterable[str], directory: Path) -> None:
    """Weights of further layers belong to a larger model than the config tells of, unless the
    family has those that predict further tokens there."""
    text = decoder_config(model.config)
    spared = model._keys_to_ignore_on_load_unexpected or ()
    predicting = getattr(text, "num_nextn_predict_layers", None) or 0
    bare = layers.removeprefix(f"{model.base_model_prefix}.")  # as the model without its head saves
    numbered = re.compile(rf"(?:{re.escape(layers)}|{re.escape(bare)})\.(\d+)\.")
    count = text.num_hidden_layers
    for name in names:
        found = numbered.match(name)
        if found is None or int(found[1]) < count + predicting:
            continue
        if not any(re.search(pattern, name) for pattern in spared):
            what = f"{directory} has weights for {name} but its config.json only {count} layers"
            raise ConfigError(what, CHECK_CONFIG)


def _check_headers(
    model: Any, files: WeightFiles, copied: Mapping[str, str], directory: Path
) -> bool:
    """Whether the files have the names that the model has. If so, shapes and dtypes are checked."""
    names = {name: copied.get(name, name) for name, _ in model.named_parameters()}
    if missing := [name for name, whose in names.items() if whose not in files]:
        if files.keys() <= model.state_dict().keys():  # nothing by another name: no conversion
            raise _unfit(missing[0], model.get_parameter(missing[0]), directory)
        files.check_floating(name for name in files if name.endswith(".weight"))
        return False
    for name, parameter in model.named_parameters():
        if files.headers[names[name]].shape != parameter.shape:
            raise _unfit(name, parameter, directory)
    state = model.state_dict().items()
    learned = [name for name, each in state if each.is_floating_point() and name in files]
    files.check_floating([*names.values(), *learned])
    return True


def _fill_buffers(
    model: Any, source: Mapping[str, Tensor], directory: Path, dtype: torch.dtype
) -> None:
    """Those that are saved hold what was learned elsewhere and stays: the bias of a router, the
    scale of a layer. One that was not saved is what its family makes it."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent and name in source:
            _fill(name, buffer, source[name], directory, dtype)


def _fill(
    name: str, target: Tensor, tensor: Tensor | None, directory: Path, dtype: torch.dtype
) -> None:
    if tensor is None or tensor.shape != target.shape:
        raise _unfit(name, target, directory)
    with torch.no_grad():
        target.copy_(tensor)
    if not target.is_floating_point() or not target.numel():
        return
    low, high = (float(each) for each in torch.aminmax(target.detach()))  # NaN if there is one
    most = torch.finfo(dtype).max
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(
            f"{directory}: {name} has NaN or infinity", "copy it again, or use another model"
        )
    if low < -most or high > most:
        raise ConfigError(
            f"{directory}: {name} has numbers too large for {str(dtype).removeprefix('torch.')}",
            'set model.dtype to "float32"',
        )


def _unfit(name: str, target: Tensor, directory: Path) -> ConfigError:
    what = f"{directory} has no weights for {name} of shape {tuple(target.shape)}"
    return ConfigError(what, CHECK_CONFIG)


def _tensors_in(directory: Path, model: Any, copied: Mapping[str, str]) -> Mapping[str, Tensor]:
    """The tensors of a directory, by the names that its model has."""
    files = WeightFiles(directory)
    if _check_headers(model, files, copied, directory):
        return files
    # Names differ between file and model (prefixes, fused experts): let transformers convert, at
    # the price of the whole model in memory for a moment.
    return _converted(directory)


def _converted(directory: Path) -> dict[str, Tensor]:
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
