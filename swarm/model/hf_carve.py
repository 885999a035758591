"""Cutting a Hugging Face decoder without touching its forward.

A stage keeps the model's own `forward` and the full-length list of layers, but foreign layers are
replaced: the one before its first own layer returns what the previous stage sent, whatever it is
given; the one after its last own layer ends the forward and hands its input out. So embeddings,
positions, scalings and dropouts before the layers have no effect on later stages, and rotary
embeddings, masks, layer types and soft-caps stay the library's own business.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swarm.errors import PipelineError
from swarm.model.hf_config import TINY_SEQUENCE, decoder_config, quiet, tiny_config
from swarm.model.randomness import seeded

_constructing = threading.Lock()


@dataclass(frozen=True)
class Anatomy:
    """Where things are in a family's models. Names are dotted module paths from the root.

    `before` and `after` are the modules with parameters that run before and after the layers.
    `returns` is how many values a layer returns in a tuple, 0 for a bare tensor.
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    returns: int
    hidden_dtype: torch.dtype


class Reached(Exception):
    """Ends a forward after the stage's last layer, with what that layer returned."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Inbox:
    """What the previous stage sent, for the forward that is running."""

    hidden: Tensor | None = None


class ForeignLayer(nn.Module):
    """Stands where another stage's layer is. `role`: "pass", "source" or "sink"."""

    def __init__(self, layer: nn.Module, role: str, returns: int, inbox: Inbox) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # models ask layers for their attention_type, …
            if not name.startswith("_") and isinstance(value, bool | int | float | str):
                setattr(self, name, value)
        self.role, self.returns, self.inbox = role, returns, inbox

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.role == "sink":
            raise Reached(hidden_states)
        if self.role == "source":
            assert self.inbox.hidden is not None
            hidden_states = self.inbox.hidden
        if self.returns:
            return (hidden_states, *([None] * (self.returns - 1)))
        return hidden_states


class AbsentModule(nn.Module):
    """Stands where a module before or after the layers is another stage's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.zero = isinstance(module, nn.Embedding)

    def forward(self, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.zero or not value.is_floating_point():
            return torch.zeros((), device=value.device)  # no shape: it promotes nothing
        return value


def build_model(config: Any, *, empty: bool) -> Any:
    """The family's causal model in float32; `empty` leaves its parameters on the meta device.

    Buffers are real in either case, since many are computed when a model is constructed.
    """
    from transformers import AutoModelForCausalLM

    with quiet(), seeded("skeleton"), _empty_parameters() if empty else nullcontext():
        try:
            return AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
        except Exception as error:  # each family checks in its own way, or not at all
            reason = f"{type(error).__name__}: {error}"
            raise PipelineError(
                f"cannot build a {config.model_type} model: {reason}", "check [model.config]"
            ) from error


@contextmanager
def _empty_parameters() -> Iterator[None]:
    from transformers.initialization import no_init_weights

    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            module._parameters[name] = empty

    with _constructing, no_init_weights():
        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


def find_layers(model: nn.Module, count: int) -> str:
    """Path of the first list of `count` layers whose parent is a decoder."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name
    raise PipelineError(f"found no list of {count} layers in {type(model).__name__}")


def trace(config: Any, autocast: torch.dtype | None = None) -> Anatomy:
    """Runs a tiny model of the family once and sees what is called before and after its layers."""
    tiny = tiny_config(config)
    model = build_model(tiny, empty=False).eval()
    path = find_layers(model, decoder_config(tiny).num_hidden_layers)
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    units = dict(_units(model, path))
    calls: dict[str, set[str]] = {name: set() for name in units}
    state = {"phase": "before"}
    outputs: list[Any] = []

    def unit_hook(name: str) -> Any:
        return lambda *_: calls[name].add(state["phase"])

    def enter(*_: Any) -> None:
        state["phase"] = "inside"

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)
        state["phase"] = "after" if len(outputs) == len(layers) else "between"

    for name, unit in units.items():
        unit.register_forward_pre_hook(unit_hook(name))
    for layer in layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    tokens = torch.zeros(1, TINY_SEQUENCE, dtype=torch.long)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            model(input_ids=tokens, use_cache=False)
    except Exception as error:
        raise PipelineError(f"a tiny {config.model_type} does not run: {error}") from error
    if len(outputs) != len(layers):
        raise PipelineError(f"{config.model_type} does not call each of its layers once")
    first = outputs[0]
    hidden = first[0] if isinstance(first, tuple) else first
    if not isinstance(hidden, Tensor):
        raise PipelineError(f"{config.model_type} layers return {type(first).__name__}")
    placed = _place(model, path, units, calls)
    returns = len(first) if isinstance(first, tuple) else 0
    return Anatomy(path, placed["before"], placed["after"], returns, hidden.dtype)


def _units(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that do not contain the layers, and their parts."""
    for name, module in model.named_modules():
        if name and not f"{layers}.".startswith(f"{name}.") and not name.startswith(f"{layers}."):
            yield name, module


def _place(
    model: nn.Module, layers: str, units: dict[str, nn.Module], calls: dict[str, set[str]]
) -> dict[str, tuple[str, ...]]:
    """Gives every parameter outside the layers to the modules before or after them."""
    placed: dict[str, list[str]] = {"before": [], "after": []}
    for name, phases in calls.items():
        if any(name.startswith(f"{other}.") for side in placed.values() for other in side):
            continue
        has_parameters = any(True for _ in units[name].parameters())
        if has_parameters and phases in ({"before"}, {"after"}):
            placed[phases.pop()].append(name)
    homes = [*placed["before"], *placed["after"], layers]
    for key, _ in model.named_parameters():
        if not any(key.startswith(f"{home}.") for home in homes):
            raise PipelineError(
                f"{type(model).__name__} cannot be cut: {key} is used on more than one stage",
                "use another model, or [model] stages = 1",
            )
    return {side: tuple(names) for side, names in placed.items()}


def carve(model: Any, anatomy: Anatomy, start: int, end: int) -> Inbox:
    """Leaves only layers `start` to `end` (and what runs before or after, at the ends)."""
    layers = model.get_submodule(anatomy.layers)
    count, inbox = len(layers), Inbox()
    for index in range(count):
        if not start <= index < end:
            role = "source" if index == start - 1 else "sink" if index == end else "pass"
            layers[index] = ForeignLayer(layers[index], role, anatomy.returns, inbox)
    absent = (anatomy.before if start > 0 else ()) + (anatomy.after if end < count else ())
    for name in absent:
        parent, _, child = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, child, AbsentModule(getattr(holder, child)))
    return inbox
