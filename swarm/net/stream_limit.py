"""How many streams others may have open here."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator

log = logging.getLogger(__name__)


class StreamLimit:
    """Of each peer and of all: a peer id costs nothing, so a limit for each alone would be none."""

    def __init__(self, what: str, of_one: int, of_all: int) -> None:
        self._what, self._of_one, self._of_all = what, of_one, of_all
        self.open: Counter[str] = Counter()  # by peer id

    @contextlib.contextmanager
    def one_more(self, peer: str) -> Iterator[bool]:
        """Around a stream of this peer: whether there is room for it."""
        total = self.open.total()
        if self.open[peer] >= self._of_one or total >= self._of_all:
            level = logging.WARNING if total == self._of_all else logging.DEBUG
            log.log(level, "refused a %s stream of %s: %d are open", self._what, peer[-8:], total)
            yield False
            return
        self.open[peer] += 1
        try:
            yield True
        finally:
            self.open[peer] -= 1
            self.open += Counter()  # without those at 0
