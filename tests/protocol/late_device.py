"""A device that runs beside its thread, as a GPU does: what a task sends is there when it is ready
and no sooner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from swarm.device import Departures, Downloader
from swarm.wire.codecs import Packed, WireTensor


class Ready:
    """The device's signal."""

    def __init__(self) -> None:
        self.waited_for = False

    def synchronize(self) -> None:
        self.waited_for = True


class LateDepartures(Departures):
    ready: Any

    def __init__(self, packed: Sequence[Packed], numbers: Sequence[Tensor]) -> None:
        super().__init__(packed, numbers, None)
        self.ready = Ready()

    def wires(self) -> list[WireTensor]:
        assert self.ready.waited_for
        return super().wires()

    def numbers(self) -> list[float]:
        assert self.ready.waited_for
        return super().numbers()


class LateDownloader(Downloader):
    def begin(self, packed: Sequence[Packed], numbers: Sequence[Tensor] = ()) -> Departures:
        return LateDepartures(packed, numbers)
