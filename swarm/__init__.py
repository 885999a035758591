"""swarm-parallel: train one large model together, exactly, on machines that come and go.

`swarm.Pipeline` makes your own modules a pipeline; the rest is run with the commands `swarm` and
`swarm-peer`. Importing this imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.model.definition import Pipeline

__all__ = ["Pipeline"]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from swarm.model.definition import Pipeline

        return Pipeline
    raise AttributeError(f"module 'swarm' has no attribute {name!r}")
