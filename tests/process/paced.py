"""Peers whose kernels wait: what stands for a slower machine costs none of this one's time.

While a test waits for what others notice, a run at full speed would only take the two cores from
them, and its baseline would have to train all those steps again.
"""

from __future__ import annotations

import time
from typing import Any

PACE_S = 0.03


def pace(more_s: float = PACE_S) -> None:
    """From now on every forward in this process takes so much longer."""
    from swarm.stage_state import StageState

    forward = StageState.forward

    def slower(self: StageState, *args: Any) -> Any:
        time.sleep(more_s)
        return forward(self, *args)

    StageState.forward = slower  # type: ignore[method-assign]
