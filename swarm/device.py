"""Moving microbatches to a stage's device beside its kernels.

On a GPU received tensors land in pinned memory and are copied on a stream of their own as soon as
they arrive, so the copy of the next microbatch overlaps the kernels of this one; the compute
stream waits for the copy, not the host. On a CPU there is nothing to move: decoding is part of the
compute task that needs the tensors, and so is decompression everywhere (on a GPU into pinned
memory), since it is work and not transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from swarm.wire.codecs import WireTensor, allocate_bytes, decode


class Arrivals:
    """Received tensors on their way to the device. `tensors()` is called once, on the compute
    thread, when a kernel is about to need them."""

    def __init__(self, wires: Sequence[WireTensor], uploader: Uploader) -> None:
        self._wires, self._uploader = list(wires), uploader
        self._copied: list[Tensor | None] = [None] * len(self._wires)
        self._ready: torch.cuda.Event | None = None
        if uploader.stream is not None:
            self._begin(uploader.stream)

    def _begin(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            for place, wire in enumerate(self._wires):
                if not wire.meta.codec.endswith("+zstd"):
                    self._copied[place] = decode(wire, self._uploader.device)
            self._ready = stream.record_event()

    def tensors(self) -> list[Tensor]:
        """All tensors, on the device, safe to use on the present stream."""
        if self._ready is not None:
            present = torch.cuda.current_stream(self._uploader.device)
            present.wait_event(self._ready)
            for copied in self._copied:
                if copied is not None:
                    copied.record_stream(present)
        return [
            copied if copied is not None else decode(wire, self._uploader.device)
            for copied, wire in zip(self._copied, self._wires, strict=True)
        ]


class Uploader:
    """Gives every received message its `Arrivals` on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, wires: Sequence[WireTensor]) -> Arrivals:
        """Start copying; cheap enough for the event loop."""
        return Arrivals(wires, self)


def allocator(device: str) -> Callable[[int], Tensor]:
    """Where received bytes should land for this device: pinned memory for a GPU."""
    if not device.startswith("cuda"):
        return allocate_bytes
    return partial(allocate_bytes, pinned=True)


def settle(device: torch.device) -> None:
    """Wait for the kernels queued on this thread's stream, so that a timing means something."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
