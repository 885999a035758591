"""One line for a run.toml that is wrong: the dotted name, what is wrong, and what was meant.

Pydantic reports a list with URLs; a person fixes one thing at a time. The first error is shown and
the rest counted. For an unknown key the closest known one is offered, first in the same section,
then under the names other trainers use for it.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "grad_clip": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "optimizer": "optimizer.name",
    "warmup": "schedule.warmup_steps",
    "max_steps": "schedule.steps",
    "num_steps": "schedule.steps",
    "min_lr": "schedule.final_ratio",
    "batch_size": "batch.microbatch_size",
    "micro_batch_size": "batch.microbatch_size",
    "gradient_accumulation_steps": "batch.microbatches",
    "seq_len": "data.sequence",
    "sequence_length": "data.sequence",
    "block_size": "data.sequence",
    "dataset": "data.source",
    "num_stages": "model.stages",
    "activation_checkpointing": "model.recompute",
    "codec": "wire.activations",
    "hidden_size": "model.config.hidden_size",
    "num_hidden_layers": "model.config.num_hidden_layers",
}
# Where pydantic speaks of Python's types.
TOML_WORDS = {
    "tuple_type": "should be a list",
    "model_type": "should be a table",
    "dict_type": "should be a table",
    "bool_type": "should be true or false",
    "invalid-json-value": "should be a number, text, true or false, a list or a table",
}
JSON_TAGS = ("dict", "list", "float", "int", "str", "bool")


def describe(error: ValidationError, root: type[BaseModel]) -> tuple[str, str]:
    """(message, remedy) of the first error, unknown keys first: they often explain the others."""
    errors = error.errors(include_url=False)
    errors.sort(key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    name = _dotted(first["loc"])
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown key {name}{more}", _meant(first["loc"], root)
    if first["type"] == "missing":
        return f"{name} is missing{more}", "docs/run.md lists every key"
    if first["type"] == "value_error":
        reason, *remedy = first["ctx"]["error"].args
        # Checks across fields name the keys themselves; those of one field do not.
        said = f"{name} {reason}" if len(first["loc"]) > 1 else reason
        return said + more, "".join(remedy)
    message = TOML_WORDS.get(first["type"], first["msg"])
    message = message.removeprefix("Input ").removeprefix("String ")
    if first["type"] == "greater_than_equal":  # pydantic writes 1e-37 with all its zeros
        message = f"should be greater than or equal to {first['ctx']['ge']:g}"
    if first["type"] == "too_long":
        message = f"should have at most {first['ctx']['max_length']} items"
    return f"{name} {message}, not {shown(first['input'])}{more}", _meaning(first["loc"])


def _meaning(location: tuple[int | str, ...]) -> str:
    if location[:2] == ("model", "config"):
        return "Hugging Face's documentation of its model_type says what it may be"
    return "docs/run.md says what it may be"


def _meant(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    if guess := closest_key(location, root):
        return f"did you mean {guess}?"
    if _in_a_list(location):
        return f"a table there has {', '.join(section_fields(root, location[:-1]))}"
    return "docs/run.md lists every key"


def closest_key(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    """The dotted name that an unknown key at `location` most likely meant; empty if none is."""
    parents, key = location[:-1], str(location[-1])
    siblings = section_fields(root, parents)
    known = known_keys(root)
    if found := difflib.get_close_matches(key, siblings, n=1, cutoff=0.7):
        return _dotted((*parents, found[0]))
    if _in_a_list(location):  # what is said of one boundary is meant for no more than that one
        return ""
    if key in ELSEWHERE:
        return ELSEWHERE[key]
    if same := [name for name in known if name.rsplit(".", 1)[-1] == key]:
        return same[0]
    last = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    found = difflib.get_close_matches(key, list(last), n=1, cutoff=0.8)
    return last[found[0]] if found else ""


def _in_a_list(location: tuple[int | str, ...]) -> bool:
    return any(isinstance(part, int) for part in location)


def section_fields(root: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    model: Any = root
    for part in path:
        if isinstance(part, int):
            model = get_args(model)[0]
        else:
            field = model.model_fields.get(part)
            model = field.annotation if field is not None else None
        if get_origin(model) is tuple:
            continue
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return list(model.model_fields)


def known_keys(root: type[BaseModel]) -> list[str]:
    """Every key as `section.field`, in the order of the file."""
    return [
        f"{section}.{field}"
        for section in root.model_fields
        for field in section_fields(root, [section])
    ]


def _dotted(location: tuple[int | str, ...]) -> str:
    """`("model", "cut", 1)` as `model.cut[1]`; the union tags pydantic adds are left out."""
    name = ""
    if location[:2] == ("model", "config"):  # free JSON: pydantic adds the types it tried
        location = tuple(part for part in location if part not in JSON_TAGS)
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() or "-" in part:
            name += f".{part}" if name else part
    return name or "the file"


def shown(value: object) -> str:
    """A value as a line names it: in TOML's words, and no more of it than 60 characters."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, datetime.date | datetime.time):
        text = str(value)
    else:
        text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else text[:57] + "..."
