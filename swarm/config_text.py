"""Text made from the config's own fields: the commented run.toml, and the table in docs/run.md.

Both come from the field descriptions in `swarm.config_fields`, so neither can say something else
than the code does. `python -m swarm.config_text` writes docs/run.md and examples/demo.toml again; a
test compares them.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarm.config import RunConfig

WIDTH = 92

# The demo: a byte-level Llama of 1.2 M parameters that two cores teach in a few minutes.
DEMO: dict[str, dict[str, Any]] = {
    "run": {"name": "demo", "seed": 0},
    "model": {"stages": 3, "dtype": "float32", "recompute": False},
    "data": {"source": "stdlib", "tokenizer": "bytes", "vocab_size": 256, "sequence": 128},
    "batch": {"microbatches": 8, "microbatch_size": 4},
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "schedule": {"kind": "cosine", "warmup_steps": 20, "steps": 300},
    "validation": {"every": 50, "microbatches": 4},
}
DEMO_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
# What a key looks like that is left out by default.
SAMPLES: dict[str, str] = {
    "run.trainers": '["12D3KooW...", "12D3KooX...", "12D3KooY..."]',
    "model.pretrained": '"path/to/model"',
    "model.pretrained_sha256": '"..."',
    "model.pipeline": '"my_package.my_module:pipeline"',
    "model.cut": "[2, 2, 2]",
    "model.subspace": "32",
    "model.subspace_layers": "4",
    "data.path": '"corpus/"',
    "wire.forward": '"int8"',
    "wire.backward": '"bfloat16"',
    "wire.boundaries": '[{ boundary = 0, forward = "int4", backward = "int8" }]',
    "data.train_sha256": '"..."',
    "data.validation_sha256": '"..."',
}

DOC_HEAD = """\
# run.toml

One file defines a run. Everything in it is hashed into the run id, so all who take part train the
same numbers; what does not change the numbers is a flag of a command. `swarm init` writes a
commented file to start from, and `examples/` has more. An unknown key is refused by name.

The tables below are generated from `swarm/config_fields.py` by `python -m swarm.config_text`.
"""


def default_toml() -> str:
    """The commented run.toml that `swarm init` writes; it loads, and is the demo."""
    lines = [
        "# A run of swarm-parallel. Everything here is hashed into the run id; what does not",
        "# change the numbers is a flag of a command. Keys that are commented out show their form.",
    ]
    for section, info in RunConfig.model_fields.items():
        model = _section(info)
        values = DEMO.get(section, {})
        lines += ["", *_comment(_doc(model)), f"[{section}]"]
        for name, field in model.model_fields.items():
            if name == "config":
                continue  # a table of its own, after the section's plain keys
            lines += _comment(field.description or "")
            value = values.get(name, field.get_default(call_default_factory=True))
            if value is None or value == ():
                lines.append(f"# {name} = {SAMPLES[f'{section}.{name}']}")
            else:
                lines.append(f"{name} = {_toml(value)}")
        if section == "model":
            lines += ["", *_comment(model.model_fields["config"].description or "")]
            lines.append("[model.config]")
            lines += [f"{name} = {_toml(value)}" for name, value in DEMO_MODEL.items()]
    return "\n".join(lines) + "\n"


def docs_markdown() -> str:
    """The whole of docs/run.md."""
    parts = [DOC_HEAD]
    for section, info in RunConfig.model_fields.items():
        model = _section(info)
        rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            cells = (f"`{name}`", _type_of(field), _default_of(field), field.description or "")
            rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        parts.append("\n".join([f"## [{section}]", "", _doc(model), "", *rows, ""]))
    return "\n".join(parts)


def _section(info: FieldInfo) -> type[BaseModel]:
    model = info.annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return model


def _doc(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def _toml(value: Any) -> str:
    """A plain value as TOML; JSON writes these the same way, but for tuples and small floats."""
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"  # model.stages may be left out all the same; its description says when
    value = field.get_default(call_default_factory=True)
    return "left out" if value is None or value == () else f"`{_toml(value)}`"


def _type_of(field: FieldInfo) -> str:
    low, high = _bounds(field.metadata)
    limits = " ".join(limit for limit in (low, high) if limit)
    return f"{_kind(field.annotation)} {limits}".strip()


def _bounds(metadata: list[Any]) -> tuple[str, str]:
    low = high = ""
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            low = f"≥ {item.ge}"
        elif isinstance(item, annotated_types.Gt):
            low = f"> {item.gt}"
        elif isinstance(item, annotated_types.Lt):
            high = f"< {item.lt}"
        elif isinstance(item, annotated_types.Le) and isinstance(item.le, float | int):
            high = f"≤ {item.le}" if item.le <= 1024 else ""  # larger ones only stop nonsense
    return low, high


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return _kind(next(arg for arg in get_args(annotation) if arg is not NoneType))
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin is tuple:
        return f"list of {_kind(get_args(annotation)[0])}"
    if origin is dict:
        return "table"
    if issubclass(annotation, BaseModel):
        return "table"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[annotation]


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    (root / "docs" / "run.md").write_text(docs_markdown(), encoding="utf-8")
    (root / "examples" / "demo.toml").write_text(default_toml(), encoding="utf-8")


if __name__ == "__main__":
    main()
