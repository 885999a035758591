"""How many streams others may have open here."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)
SAY_EVERY_S = 60.0


class StreamLimit:
    """Of each peer and of all: a peer id costs nothing, so a limit for each alone would be none.

    Where it can be told who is `known`, all the others together have half of it: otherwise as many
    as they like to be could keep those out.
    """

    def __init__(
        self,
        what: str,
        of_one: int,
        of_all: int,
        known: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        self._what, self._of_one, self._of_all, self._known = what, of_one, of_all, known
        self.open: Counter[str] = Counter()  # by peer id
        self._said_at = -SAY_EVERY_S

    @contextlib.contextmanager
    def one_more(self, peer: str) -> Iterator[bool]:
        """Around a stream of this peer: whether there is room for it."""
        total = self.open.total()
        full = total >= self._of_all or (
            not self._known(peer) and self._of_strangers() >= self._of_all // 2
        )
        if full or self.open[peer] >= self._of_one:
            now, level = time.monotonic(), logging.DEBUG
            if full and now - self._said_at >= SAY_EVERY_S:
                self._said_at, level = now, logging.WARNING
            log.log(level, "refused a %s stream of %s: %d are open", self._what, peer[-8:], total)
            yield False
            return
        self.open[peer] += 1
        try:
            yield True
        finally:
            self.open[peer] -= 1
            self.open += Counter()  # without those at 0

    def _of_strangers(self) -> int:
        return sum(number for peer, number in self.open.items() if not self._known(peer))
