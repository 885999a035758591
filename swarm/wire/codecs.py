"""Codecs: a tensor as bytes for the wire, and bytes of a stranger as a tensor.

What. `encode(tensor, codec)` gives a `WireTensor` (description + bytes), `decode` gives it back.
Float codecs store every value as `float32`, `float16` or `bfloat16`; `+zstd` splits the values
into byte planes (all first bytes, then all second bytes, …) and compresses them with zstd level 1,
without loss. `raw` stores any dtype as it is; integers and booleans go raw whatever codec is asked
for, unless it is `raw+zstd`, which is for them alone. `int8` and `int4` are blockwise with
per-block scales (`swarm.wire.blocks`, `swarm.wire.nibbles`); their `+zstd` compresses the bytes in
order. `meta.dtype` is the *logical* dtype, the one `decode` returns: a bfloat16 tensor survives the
codecs `bfloat16`, `float32` and `raw` bit for bit.

Why this way. Training compares hashes (DESIGN I6), so the lossless path must not touch a bit, and
costs no copy: a contiguous CPU tensor in its own dtype is sent from its own memory, and a received
one is handed out in the torch-allocated memory it was received into (kernels round by alignment).
Sign and exponent bytes of activations repeat, mantissa bytes do not; splitting the planes lets a
fast entropy coder see that (the byte-shuffle filter of HDF5 and Blosc). Bytes on the wire are
little-endian on every machine.

Numbers. Conversion rounds to nearest even. float16 overflows as IEEE 754 says: magnitudes of 65520
and more become ±inf, never a clipped finite value, so an overflow is seen as `found_inf` instead
of training on with wrong gradients. inf stays inf and NaN stays NaN in the float codecs (bit for
bit when the wire dtype is the logical dtype); in int8 and int4 either makes its block NaN.

Hostile bytes (I8). `check_meta` bounds what a peer may announce before anything is allocated;
decompression produces exactly the expected number of bytes or fails; booleans other than 0 and 1
are normalised. Whatever the bytes are, `decode` returns a tensor of `meta.dtype` and `meta.shape`
or raises WireError.

Another codec is one more small object with the methods of `Codec`, given to `register`.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import zstandard

from swarm.errors import WireError
from swarm.spec import ITEM_BYTES
from swarm.wire import blocks, nibbles

Buffer = bytes | bytearray | memoryview

MAX_DIMS = 16
MAX_TENSOR_BYTES = 1 << 40

_TORCH_DTYPE: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_DTYPE_NAME = {dtype: name for name, dtype in _TORCH_DTYPE.items()}
_SWAP_BYTES = sys.byteorder == "big"
_ZSTD_LEVEL = 1
_local = threading.local()  # zstd contexts may not be shared between threads


class TensorMeta(NamedTuple):
    """What a peer says of a tensor: logical dtype, shape, codec, and the length of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    codec: str
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WireTensor:
    """A tensor in wire form. `data` may be memory of the encoded tensor: do not modify that.

    `memory` is set on received tensors: torch-allocated uint8 storage behind `data`, which
    `decode` hands out without a copy when wire and logical dtype agree.
    """

    meta: TensorMeta
    data: Buffer
    memory: torch.Tensor | None = None

    @property
    def raw_bytes(self) -> int:
        """Bytes of the logical tensor, before the codec."""
        return math.prod(self.meta.shape) * ITEM_BYTES[self.meta.dtype]

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross the wire."""
        return self.meta.nbytes


class Codec(Protocol):
    """One way of writing a tensor as bytes. Stateless, safe to use from several threads."""

    @property
    def name(self) -> str: ...

    def accepts(self, dtype: str) -> bool:
        """Whether tensors of this logical dtype can be encoded."""

    def nbytes_bounds(self, dtype: str, shape: Sequence[int]) -> tuple[int, int]:
        """The least and the most bytes an encoded tensor may have."""

    def pack(self, tensor: torch.Tensor, seed: int | None) -> torch.Tensor:
        """A detached tensor of an accepted dtype as one, contiguous, whose memory is to be sent, on
        the same device and without waiting for that. It may be the tensor itself.

        A codec that can round stochastically does so with a `seed`; the others ignore it.
        """

    def seal(self, packed: torch.Tensor) -> Buffer:
        """The bytes to send, of what `pack` gave, by now on the CPU. It may be that memory."""

    def decode(self, wire: WireTensor, device: torch.device) -> torch.Tensor:
        """The tensor; `wire.meta` has passed `check_meta` and fits `wire.data`."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A tensor half way to its bytes: `values` have to be brought to the CPU (`swarm.device`)."""

    dtype: str
    shape: tuple[int, ...]
    codec: Codec
    values: torch.Tensor

    def seal(self, values: torch.Tensor) -> WireTensor:
        """The tensor in wire form, of its `values` on the CPU."""
        data = self.codec.seal(values)
        return WireTensor(TensorMeta(self.dtype, self.shape, self.codec.name, len(data)), data)


def pack(tensor: torch.Tensor, codec: str, seed: int | None = None) -> Packed:
    """The first half of `encode`, on the tensor's device, for which it does not wait."""
    dtype = _DTYPE_NAME.get(tensor.dtype)
    if dtype is None:
        raise WireError(f"tensors of {tensor.dtype} cannot be sent")
    chosen = get_codec(codec_for(dtype, codec))
    return Packed(dtype, tuple(tensor.shape), chosen, chosen.pack(tensor.detach(), seed))


def encode(tensor: torch.Tensor, codec: str, seed: int | None = None) -> WireTensor:
    """Write `tensor` with `codec`, or with `raw` where `codec` is not for its dtype.

    A `seed` makes int8 and int4 round stochastically; equal seeds give equal bytes.
    Copies nothing if it need not: the bytes of a contiguous CPU tensor in the wire dtype *are* its
    memory, kept alive by the result, and must not be modified while the result is in use.
    Raises WireError for an unknown codec or a dtype that cannot be sent.
    """
    packed = pack(tensor, codec, seed)
    return packed.seal(packed.values.cpu())


def decode(wire: WireTensor, device: str | torch.device = "cpu") -> torch.Tensor:
    """The tensor in torch-allocated memory. Raises WireError if the bytes are not what they say.

    A received tensor (`wire.memory` set) whose wire dtype is its logical dtype comes back as a
    view of the receive buffer: decode it once, or do not modify the result in place. In every
    other case the memory is fresh.
    """
    check_meta(wire.meta)
    if len(wire.data) != wire.meta.nbytes:
        raise WireError(f"tensor has {len(wire.data)} bytes, {wire.meta.nbytes} announced")
    return get_codec(wire.meta.codec).decode(wire, torch.device(device))


def check_meta(meta: TensorMeta) -> None:
    """Raise WireError unless dtype, shape, codec and nbytes are possible together.

    Says nothing of what the caller expects; that is `swarm.wire.frames.check_tensors`.
    """
    if meta.dtype not in ITEM_BYTES:
        raise WireError("unknown tensor dtype")
    if len(meta.shape) > MAX_DIMS or any(not 0 <= n <= MAX_TENSOR_BYTES for n in meta.shape):
        raise WireError("tensor shape out of bounds")
    extent = math.prod(n or 1 for n in meta.shape)  # torch refuses what overflows, empty or not
    if extent * ITEM_BYTES[meta.dtype] > MAX_TENSOR_BYTES:
        raise WireError("tensor too large")
    codec = get_codec(meta.codec)
    if not codec.accepts(meta.dtype):
        raise WireError(f"codec {codec.name} cannot hold {meta.dtype}")
    low, high = codec.nbytes_bounds(meta.dtype, meta.shape)
    if not low <= meta.nbytes <= high:
        bounds = str(low) if low == high else f"{low} to {high}"
        raise WireError(f"tensor announces {meta.nbytes} bytes, {bounds} expected")


def codec_for(dtype: str, codec: str) -> str:
    """The codec really used for tensors of `dtype` when a run asks for `codec`."""
    return codec if get_codec(codec).accepts(dtype) else "raw"


# Tensors as little-endian bytes ------------------------------------------------------------------


def allocate_bytes(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Fresh uint8 CPU memory from torch's allocator, 64-byte aligned, not initialised; `pinned`
    for what a GPU is to copy, where the machine has so much to give."""
    if pinned and num_bytes > 0:
        with contextlib.suppress(RuntimeError):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8)


def bytes_view(memory: torch.Tensor) -> memoryview:
    """Writable view of a contiguous CPU tensor's memory; keeps the tensor alive."""
    return memory.reshape(-1).view(torch.uint8).numpy().data


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the bytes of each item reversed (only big-endian machines need it)."""
    item = tensor.element_size()
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).reshape(-1, item)
    return flat.flip(1).reshape(-1).view(tensor.dtype).reshape(tensor.shape)


def _from_bytes(memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Torch-allocated little-endian bytes as a tensor; no copy, except for booleans."""
    if dtype is torch.bool:
        return memory.ne(0).reshape(shape)
    tensor = memory.view(dtype).reshape(shape)
    return _swapped(tensor) if _SWAP_BYTES and tensor.element_size() > 1 else tensor


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Not waited for where the memory is pinned: torch keeps that until it has been copied."""
    return tensor if device == tensor.device else tensor.to(device, non_blocking=True)


# Codecs ------------------------------------------------------------------------------------------


_LOSSY = "float32", "float64"  # as what is sent, and what is to arrive


class Uncompressed(Codec, Protocol):
    """A codec whose bytes have a known length and may be compressed."""

    def planes(self, dtype: str) -> int:
        """Into how many planes its bytes are split before they are compressed: the bytes of an
        item of what `pack` gives."""

    def finish(self, memory: torch.Tensor, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        """The logical tensor from its bytes, in torch-allocated uint8 CPU memory."""


@dataclass(frozen=True, slots=True)
class PlainCodec:
    """Values one after another. `wire_dtype` None means the logical dtype (`raw`). Who asks for
    float32 asks for no loss, so float64 is not for it."""

    name: str
    wire_dtype: str | None

    def accepts(self, dtype: str) -> bool:
        if self.wire_dtype is None:
            return True
        return _TORCH_DTYPE[dtype].is_floating_point and (self.wire_dtype, dtype) != _LOSSY

    def stored(self, dtype: str) -> torch.dtype:
        return _TORCH_DTYPE[self.wire_dtype or dtype]

    def nbytes_bounds(self, dtype: str, shape: Sequence[int]) -> tuple[int, int]:
        nbytes = math.prod(shape) * ITEM_BYTES[self.wire_dtype or dtype]
        return nbytes, nbytes

    def planes(self, dtype: str) -> int:
        return self.stored(dtype).itemsize

    def pack(self, tensor: torch.Tensor, seed: int | None) -> torch.Tensor:
        return tensor.to(self.stored(_DTYPE_NAME[tensor.dtype])).contiguous()

    def seal(self, packed: torch.Tensor) -> Buffer:
        swap = _SWAP_BYTES and packed.element_size() > 1
        return bytes_view(_swapped(packed) if swap else packed)

    def decode(self, wire: WireTensor, device: torch.device) -> torch.Tensor:
        return self.finish(_memory_of(wire), wire.meta, device)

    def finish(self, memory: torch.Tensor, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        """The logical tensor from its plain bytes; widened on the device, after the transfer."""
        stored = _from_bytes(memory, self.stored(meta.dtype), meta.shape)
        return _to_device(stored, device).to(_TORCH_DTYPE[meta.dtype])


def _memory_of(wire: WireTensor) -> torch.Tensor:
    """The bytes in torch-allocated memory: where they were received, or a copy."""
    if wire.memory is not None:
        return wire.memory
    memory = allocate_bytes(len(wire.data))
    bytes_view(memory)[:] = wire.data
    return memory


class Quantizer(Protocol):
    """A module that writes float32 values as bytes: `swarm.wire.blocks`, `swarm.wire.nibbles`."""

    def packed_bytes(self, shape: Sequence[int]) -> int: ...

    def quantize(self, values: torch.Tensor, seed: int | None = None) -> torch.Tensor: ...

    def dequantize(self, packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Integers with a scale per block; quantised where the tensor is, sent packed."""

    name: str
    quantizer: Quantizer

    def accepts(self, dtype: str) -> bool:
        return _TORCH_DTYPE[dtype].is_floating_point

    def planes(self, dtype: str) -> int:
        return 1

    def nbytes_bounds(self, dtype: str, shape: Sequence[int]) -> tuple[int, int]:
        nbytes = self.quantizer.packed_bytes(shape)
        return nbytes, nbytes

    def pack(self, tensor: torch.Tensor, seed: int | None) -> torch.Tensor:
        return self.quantizer.quantize(tensor.to(torch.float32).contiguous(), seed)

    def seal(self, packed: torch.Tensor) -> Buffer:
        return bytes_view(packed)

    def decode(self, wire: WireTensor, device: torch.device) -> torch.Tensor:
        return self.finish(_memory_of(wire), wire.meta, device)

    def finish(self, memory: torch.Tensor, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        values = self.quantizer.dequantize(_to_device(memory, device), meta.shape)
        return values.to(_TORCH_DTYPE[meta.dtype])


@dataclass(frozen=True, slots=True)
class ZstdCodec:
    """The bytes of another codec, split into planes and compressed."""

    name: str
    plain: Uncompressed

    def accepts(self, dtype: str) -> bool:
        return self.plain.accepts(dtype)

    def nbytes_bounds(self, dtype: str, shape: Sequence[int]) -> tuple[int, int]:
        size, _ = self.plain.nbytes_bounds(dtype, shape)
        if size == 0:
            return 0, 0
        # The least block is 4 bytes for 128 KiB; the most an encoder needs for what cannot be
        # compressed is ZSTD_COMPRESSBOUND of zstd.h.
        return 1 + (size >> 15), size + (size >> 8) + (max(0, (128 << 10) - size) >> 11)

    def pack(self, tensor: torch.Tensor, seed: int | None) -> torch.Tensor:
        return self.plain.pack(tensor, seed)

    def seal(self, packed: torch.Tensor) -> Buffer:
        plain = self.plain.seal(packed)
        if not len(plain):
            return b""
        planes = np.frombuffer(plain, np.uint8).reshape(-1, packed.element_size()).T
        return _compressor().compress(np.ascontiguousarray(planes).data)

    def decode(self, wire: WireTensor, device: torch.device) -> torch.Tensor:
        meta = wire.meta
        size, _ = self.plain.nbytes_bounds(meta.dtype, meta.shape)
        plain = _decompress(wire.data, size) if size else b""
        memory = allocate_bytes(size, pinned=device.type == "cuda")
        count = self.plain.planes(meta.dtype)
        memory.numpy().reshape(-1, count)[...] = np.frombuffer(plain, np.uint8).reshape(count, -1).T
        return self.plain.finish(memory, meta, device)


class PackedIntegers(ZstdCodec):
    """Of integers and booleans only: they are few and repeat themselves, as token ids do, where
    floating-point values would take long and shrink little."""

    def accepts(self, dtype: str) -> bool:
        return not _TORCH_DTYPE[dtype].is_floating_point


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    return _local.compressor


def _decompress(data: Buffer, size: int) -> bytes:
    """Exactly `size` bytes out of one zstd frame that says so itself, or WireError."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        if zstandard.get_frame_parameters(data).content_size != size:
            raise WireError(f"compressed tensor does not hold the {size} bytes expected")
        plain: bytes = _local.decompressor.decompress(
            data, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError:
        raise WireError("compressed tensor is damaged") from None
    if len(plain) != size:
        raise WireError("compressed tensor is damaged")
    return plain


_registry: dict[str, Codec] = {}


def register(codec: Codec) -> None:
    """Make a codec known under its name, once per process, before any frame is read."""
    if codec.name in _registry:
        raise ValueError(f"codec {codec.name} exists")
    _registry[codec.name] = codec


def get_codec(name: str) -> Codec:
    """Raises WireError for a name that no codec has."""
    codec = _registry.get(name)
    if codec is None:
        raise WireError("unknown codec", f"known: {', '.join(codec_names())}")
    return codec


def codec_names() -> tuple[str, ...]:
    """All registered names, in order of registration."""
    return tuple(_registry)


_raw = PlainCodec("raw", None)
register(_raw)
register(PackedIntegers("raw+zstd", _raw))
_uncompressed: tuple[Uncompressed, ...] = (
    *(PlainCodec(name, name) for name in ("float32", "float16", "bfloat16")),
    BlockCodec("int8", blocks),
    BlockCodec("int4", nibbles),
)
for _codec in _uncompressed:
    register(_codec)
    register(ZstdCodec(f"{_codec.name}+zstd", _codec))
