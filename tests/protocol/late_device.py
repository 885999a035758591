"""A device that runs beside its thread, as a GPU does: what a task sends is there once it has been
waited for, and whatever the task itself looks at is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from swarm.device import Departures, Downloader
from swarm.wire.codecs import Packed


class Signal:
    """Of the device; `synchronize` is what happens then."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self.synchronize = synchronize

    def query(self) -> bool:
        return False


class LateDepartures(Departures):
    ready: Any


class LateDownloader(Downloader):
    """Gives every task a signal to wait for."""

    def begin(self, packed: Sequence[Packed] = (), numbers: Sequence[Tensor] = ()) -> Departures:
        departures = LateDepartures(packed, numbers, None)
        departures.ready = Signal()
        return departures
