"""Which replicas cannot reach each other, and routes around that. Pure; time is an argument.

Two that reach the leader but not each other (a firewall, a cut line) are both worth having: nobody
is left out for it, they are only not neighbours on a route for a while (DESIGN, "One step").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


class Reach:
    """Everybody reaches everybody, but for pairs that were parted."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}

    def part(self, a: str, b: str, until: float) -> None:
        """These two cannot reach each other, as far as is known until then."""
        pair = _pair(a, b)
        self._until[pair] = max(until, self._until.get(pair, -math.inf))

    def apart(self, a: str, b: str, now: float) -> bool:
        return self._until.get(_pair(a, b), -math.inf) > now

    def forget(self, replica: str) -> None:
        """It is gone; what comes back under another name starts anew."""
        self._until = {pair: t for pair, t in self._until.items() if replica not in pair}

    def path(self, candidates: Sequence[Sequence[str]], now: float) -> list[str] | None:
        """One name of each, neighbours within reach, the first such path in order of preference.

        Backwards, so that dead ends are found once: O(stages x replicas^2), not exponential.
        """
        alive: list[Sequence[str]] = []
        for names in reversed(candidates):
            if alive:
                names = [n for n in names if any(not self.apart(n, m, now) for m in alive[-1])]
            if not names:
                return None
            alive.append(names)
        path: list[str] = []
        for names in reversed(alive):
            # Exists: whatever was chosen before has a neighbour left here.
            path.append(next(n for n in names if not path or not self.apart(path[-1], n, now)))
        assert not any(self.apart(a, b, now) for a, b in pairwise(path))
        return path


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a <= b else (b, a)
