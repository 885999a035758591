"""A path that a run.toml names, as this machine reads it.

`~` is expanded where a path is used and never in the config: what is hashed is what the file says,
so that a run's id does not hang on whose home it is.
"""

from __future__ import annotations

from pathlib import Path


def expanded(path: str) -> Path:
    """The path with `~` or `~somebody` as this machine knows them; as it is where it does not."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
