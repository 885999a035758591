"""One microbatch at one replica: what is under way, and the answers kept until the commit (I1).

What was sent forward (`y`) and back (`dx`) is kept in wire form, so a repeat costs no computation
and no encoding. `KeptAnswers` bounds their bytes: the oldest counted ones are evicted, and
recomputed from their input when somebody asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.stage_state import Graph
from swarm.wire.codecs import WireTensor


@dataclass(slots=True)
class Work:
    """The work on one microbatch. `forward` gives its `y`, `backward` its `dx`."""

    index: int
    forward: asyncio.Task[Sequence[WireTensor]] | None = None
    backward: asyncio.Task[Sequence[WireTensor]] | None = None
    graph: Graph | None = None
    loss: float | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0
    waited_s: float = 0.0  # for a commit, a slot and the device
    holds_slot: bool = False
    evicted: bool = False
    nonfinite: bool = False  # what its forward gave, let through
    kept_bytes: int = 0


@dataclass(slots=True)
class KeptAnswers:
    """The works of the current step, with a bound on the bytes of their answers."""

    limit_bytes: int
    works: dict[int, Work] = field(default_factory=dict)
    kept_bytes: int = 0
    evictions: int = 0
    _order: list[int] = field(default_factory=list)

    def keep(self, work: Work, tensors: Sequence[WireTensor]) -> None:
        num_bytes = sum(tensor.meta.nbytes for tensor in tensors)
        work.kept_bytes += num_bytes
        self.kept_bytes += num_bytes

    def counted(self, work: Work) -> None:
        """`work` may be evicted from now on; makes room if the limit is exceeded."""
        self._order.append(work.index)
        while self.kept_bytes > self.limit_bytes and self._order:
            oldest = self.works.get(self._order.pop(0))
            if oldest is not None and not oldest.evicted:
                self._forget_bytes(oldest)
                oldest.forward = oldest.backward = None
                oldest.evicted = True
                self.evictions += 1

    def drop(self, index: int, release: Callable[[Work], None]) -> None:
        """Forget one microbatch and stop what is under way for it."""
        work = self.works.pop(index, None)
        if work is None:
            return
        for task in (work.forward, work.backward):
            if task is not None and not task.done():
                task.cancel()
        self._forget_bytes(work)
        work.graph = None
        release(work)

    def give_up(self, work: Work) -> None:
        """Forget a microbatch whose own task has failed."""
        if self.works.get(work.index) is work:
            del self.works[work.index]
            self._forget_bytes(work)

    def _forget_bytes(self, work: Work) -> None:
        self.kept_bytes -= work.kept_bytes
        work.kept_bytes = 0

    def clear(self, release: Callable[[Work], None]) -> None:
        for index in list(self.works):
            self.drop(index, release)
        self._order.clear()
