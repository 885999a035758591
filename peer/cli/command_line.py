"""Commands told to people, so that a shell takes them as they are told."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

Value: TypeAlias = str | Path | float | bool | Sequence[str] | None


def command_line(*words: str | Path, **flags: Value) -> str:
    """Words, and flags by name: None, False and nothing at all are left out, True is a flag alone,
    several values repeat it."""
    line = [str(word) for word in words]
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            line.append(flag)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            line += [part for each in value for part in (flag, each)]
        elif value is not None and value is not False:
            line += [flag, str(value)]
    return shlex.join(line)
