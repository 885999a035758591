"""Moving microbatches to a stage's device and back beside its kernels.

On a GPU received tensors land in pinned memory and are copied on a stream of their own as soon as
they arrive, so the copy of the next microbatch overlaps the kernels of this one; the compute
stream waits for the copy, not the host. What a task sends is copied on another stream of its own,
into pinned memory again, and the compute thread queues the kernels of the next tasks meanwhile
(`swarm.compute.Launched`): a GPU that has to wait for Python between two tasks loses a third of its
time to that. On a CPU there is nothing to move: decoding is part of the compute task that needs the
tensors, and so is decompression everywhere (on a GPU into pinned memory), since it is work and not
transfer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from swarm.compute import Launched
from swarm.wire.codecs import Packed, WireTensor, allocate_bytes, decode

T = TypeVar("T")
MAX_PINNED_BYTES = 1 << 30  # of one tensor
PIECE = 1 << 22  # elements of a large tensor that are copied at a time


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


class Departures:
    """What a task sends, and numbers that it has to know, on their way from the device. `ready` is
    None where there is nothing to wait for; `wires` and `numbers` wait for it."""

    def __init__(
        self, packed: Sequence[Packed], numbers: Sequence[Tensor], stream: torch.cuda.Stream | None
    ) -> None:
        self._packed = list(packed)
        self._values = [each.values for each in packed]
        self._numbers = [each.detach() for each in numbers]
        self.ready: torch.cuda.Event | None = None
        if stream is not None:
            self._begin(stream)

    def _begin(self, stream: torch.cuda.Stream) -> None:
        if self._numbers:
            self._numbers = [torch.stack([each.double() for each in self._numbers])]
        computed = torch.cuda.current_stream(stream.device).record_event()
        with torch.cuda.stream(stream):
            stream.wait_event(computed)
            self._values = [_leaving(each, stream) for each in self._values]
            self._numbers = [_leaving(each, stream) for each in self._numbers]
            self.ready = stream.record_event()

    def wires(self) -> list[WireTensor]:
        """The tensors in wire form."""
        self._wait()
        return [each.seal(values) for each, values in zip(self._packed, self._values, strict=True)]

    def numbers(self) -> list[float]:
        self._wait()
        return [number for each in self._numbers for number in each.view(-1).tolist()]

    def then(self, finish: Callable[[], T]) -> T | Launched[T]:
        """What a task returns that ends with `finish`, which waits for the device."""
        return finish() if self.ready is None else Launched(finish, self.ready.query)

    def done(self, value: T) -> T | Launched[T]:
        """What a task returns that has its `value`, but for the kernels behind it."""

        def finish() -> T:
            self._wait()
            return value

        return self.then(finish)

    def _wait(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()


def _leaving(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """A copy in pinned memory, once `stream` has come so far."""
    there = host_memory(tensor.shape, tensor.dtype, tensor.device)
    there.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return there


class Downloader:
    """Gives everything that a task sends its `Departures` from one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, packed: Sequence[Packed] = (), numbers: Sequence[Tensor] = ()) -> Departures:
        """Start copying what the present stream will have computed by then, with scalar tensors.
        Belongs on the compute thread."""
        return Departures(packed, numbers, self._stream)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory on the CPU, not initialised, for what comes from a device or goes to it. Pinned
    for a GPU, up to `MAX_PINNED_BYTES` a tensor (torch rounds it up to a power of two and keeps
    it), where the machine has so much to give; other memory does as well, slower."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cuda" and 0 < num_bytes <= MAX_PINNED_BYTES:
        with contextlib.suppress(RuntimeError):
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    return torch.empty(tuple(shape), dtype=dtype)


def to_host(tensor: Tensor) -> Tensor:
    """A copy of a device's tensor on the CPU. Blocking; belongs on the compute thread."""
    there = host_memory(tensor.shape, tensor.dtype, tensor.device)
    return there.copy_(tensor)


@cache
def _landing_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Landing:
    """A flat tensor of a GPU on its way to the CPU, piece by piece, beside the kernels that come
    after it: `tensor`, of which `wait(n)` waits for the first `n` elements, on any thread. Begun on
    the compute thread, which waits for it where the memory is not pinned."""

    def __init__(self, leaving: Tensor) -> None:
        self.tensor = host_memory(leaving.shape, leaving.dtype, leaving.device)
        self._pieces: list[torch.cuda.Event] = []
        stream = _landing_stream(leaving.device)
        stream.wait_stream(torch.cuda.current_stream(leaving.device))
        with torch.cuda.stream(stream):
            for here, there in zip(leaving.split(PIECE), self.tensor.split(PIECE), strict=True):
                there.copy_(here, non_blocking=True)
                self._pieces.append(stream.record_event())
        leaving.record_stream(stream)

    def wait(self, num_elements: int) -> None:
        self._pieces[min(max(num_elements - 1, 0) // PIECE, len(self._pieces) - 1)].synchronize()


def allocator(device: str) -> Callable[[int], Tensor]:
    """Where received bytes should land for this device: pinned memory for a GPU."""
    if not device.startswith("cuda"):
        return allocate_bytes
    return partial(allocate_bytes, pinned=True)
