"""The types that fields of run.toml have, and what all its sections share.

Types are strict: `"3"` is no number.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from swarm.config_errors import shown

Codec = Literal[
    "float32", "float16", "bfloat16", "int8", "int4",
    "float32+zstd", "float16+zstd", "bfloat16+zstd", "int8+zstd", "int4+zstd",
]  # fmt: skip


def like(pattern: str, wanted: str, remedy: str = "") -> AfterValidator:
    """Text that is all of `pattern`; whoever writes another is told in words what is wanted."""
    matches = re.compile(pattern).fullmatch

    def check(text: str) -> str:
        if not matches(text):
            raise ValueError(f"should be {wanted}, not {shown(text)}", remedy)
        return text

    return AfterValidator(check)


Sha256 = Annotated[str, like("[0-9a-f]{64}", "64 lowercase hexadecimal digits")]
PeerId = Annotated[
    str, like("[A-Za-z0-9_.-]{1,128}", "a peer id", "`swarm id` prints that of its machine")
]
LocalPath = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
ObjectName = Annotated[
    str,
    StringConstraints(max_length=255),
    like(
        "[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*",
        "of the form package.module:object",
        'write for example pipeline = "swarm_digits:pipeline"',
    ),
]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]


def list_to_tuple(value: Any) -> Any:
    """TOML has lists; what cannot change has tuples."""
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """A table of run.toml."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )
