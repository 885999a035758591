"""Frames: one message on a stream, as a small header and the bytes of some tensors.

    magic "SWP", version u8 | header length u32 | payload length u64 | header | payload

All integers little-endian. The header is msgpack, `[fields, [[dtype, shape, codec, nbytes], …]]`;
the payload is the tensors' bytes, one after another, in that order (docs/protocol.md).

Why this way. Tensor bytes never pass through a serializer: they are sent from the memory they are
in and received into torch-allocated memory of their own, so a lossless tensor is copied by nobody
here. The lengths come first because the end of a libp2p stream looks the same after a crash and
after success. For the same reason there is no "clean end": a stream that ends, between frames or
inside one, raises StreamClosedError, and a protocol that has an end says so in a message.

Hostile bytes (DESIGN I8). Every length is compared with its limit before it is used. The header is
first walked without building anything (`swarm.wire.limits`). Then the
tensors' descriptions are checked for themselves, then by the caller's `check`, and only then is
memory allocated, tensor by tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import torch

from swarm.errors import DeviceError, WireError
from swarm.net.transport import Stream
from swarm.spec import TensorSpec
from swarm.wire.codecs import (
    Buffer,
    TensorMeta,
    WireTensor,
    allocate_bytes,
    bytes_view,
    check_meta,
    codec_for,
    decode,
)
from swarm.wire.limits import check_msgpack

PROTOCOL_VERSION = 14
FRAME_VERSION = 1
MAGIC = b"SWP"
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 1 << 30
MAX_TENSORS = 1024

_PREFIX = struct.Struct("<3sBIQ")

Check = Callable[[dict[str, Any], tuple[TensorMeta, ...]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A received message. Its tensors' bytes are validated in size, not yet decoded."""

    header: dict[str, Any]
    tensors: tuple[WireTensor, ...]


def protocol_name(service: str) -> str:
    """The libp2p stream name of a service: `/swarm-parallel/<version>/<service>`."""
    return f"/swarm-parallel/{PROTOCOL_VERSION}/{service}"


def encode_frame(header: Mapping[str, Any], tensors: Sequence[WireTensor] = ()) -> list[Buffer]:
    """Buffers to send in this order. The tensors' bytes are referenced, not copied.

    The header may hold None, bool, int (64 bit), float, str, bytes, and lists (tuples arrive as
    lists) and str-keyed dicts of these. Raises WireError if it holds anything else or is too large.
    """
    metas = [[t.meta.dtype, t.meta.shape, t.meta.codec, t.meta.nbytes] for t in tensors]
    try:
        packed: bytes = msgpack.packb([header, metas])
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"header cannot be sent: {error}") from error
    if len(packed) > MAX_HEADER_BYTES or len(metas) > MAX_TENSORS:
        raise WireError(f"header too large: {len(packed)} bytes, {len(metas)} tensors")
    num_payload_bytes = sum(t.meta.nbytes for t in tensors)
    prefix = _PREFIX.pack(MAGIC, FRAME_VERSION, len(packed), num_payload_bytes)
    return [prefix + packed, *(t.data for t in tensors if t.meta.nbytes)]


async def read_frame(
    stream: Stream,
    check: Check,
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    allocate: Callable[[int], torch.Tensor] = allocate_bytes,
) -> Frame:
    """The next frame of `stream`.

    `check(header, metas)` is called once, before memory for any tensor is allocated, and refuses
    the frame by raising (WireError, RefusedError, …: passed on as it is). `allocate` gives uint8
    CPU memory, for example pinned.

    Raises WireError when the bytes are no valid frame, StreamClosedError when the stream ends, be
    it before the first byte, and DeviceError when there is no memory for a tensor. After an error
    or a cancellation the position in the stream is undefined: abort the stream.
    """
    magic, version, num_header_bytes, num_payload_bytes = _PREFIX.unpack(
        await stream.receive_exactly(_PREFIX.size)
    )
    if magic != MAGIC:
        raise WireError("not a swarm frame")
    if version != FRAME_VERSION:
        raise WireError(f"frame version {version}, this peer reads {FRAME_VERSION}")
    if num_header_bytes > max_header_bytes:
        raise WireError(f"header of {num_header_bytes} bytes, limit {max_header_bytes}")
    if num_payload_bytes > max_payload_bytes:
        raise WireError(f"payload of {num_payload_bytes} bytes, limit {max_payload_bytes}")
    header, metas = _parse_header(await stream.receive_exactly(num_header_bytes))
    if sum(meta.nbytes for meta in metas) != num_payload_bytes:
        raise WireError("payload length is not the sum of its tensors")
    check(header, metas)
    tensors = []
    for meta in metas:
        try:
            memory = allocate(meta.nbytes)
        except (MemoryError, RuntimeError) as error:  # torch's want of memory is one
            what = f"no memory for {meta.nbytes} bytes that came in"
            raise DeviceError(what, "free some on this machine") from error
        data = bytes_view(memory)
        if meta.nbytes:
            await stream.receive_into(data)
        tensors.append(WireTensor(meta, data, memory))
    return Frame(header, tuple(tensors))


def check_tensors(metas: Sequence[TensorMeta], specs: Sequence[TensorSpec], codec: str) -> None:
    """Raise WireError, saying what differs, unless the tensors are the expected ones in `codec`."""
    if len(metas) != len(specs):
        raise WireError(f"{len(metas)} tensors, {len(specs)} expected")
    for i, (meta, spec) in enumerate(zip(metas, specs, strict=True)):
        expected = (spec.dtype, spec.shape, codec_for(spec.dtype, codec))
        if (meta.dtype, meta.shape, meta.codec) != expected:
            raise WireError(
                f"tensor {i} is {_describe(meta.dtype, meta.shape, meta.codec)}, "
                f"{_describe(*expected)} expected"
            )


def check_indices(tensors: Sequence[WireTensor], specs: Sequence[TensorSpec]) -> None:
    """Raise WireError where a tensor holds an integer that its spec (the first tensor's is the
    first) does not allow; further tensors are not looked at.

    On the CPU: on a GPU one token id past the vocabulary costs the process its whole use of the
    device.
    """
    for i, (tensor, spec) in enumerate(zip(tensors, specs, strict=False)):
        dtype = np.dtype(spec.dtype)
        if spec.below is None or (dtype.kind == "u" and np.iinfo(dtype).max < spec.below):
            continue
        values = decode(tensor).numpy()
        for found in (int(values.min()), int(values.max())) if values.size else ():
            if not 0 <= found < spec.below:
                raise WireError(f"tensor {i} holds {found}, 0 to {spec.below - 1} expected")


def no_tensors(header: Mapping[str, Any], metas: Sequence[TensorMeta]) -> None:
    """A `check` for messages that carry a header only. Raises WireError."""
    if metas:
        raise WireError(f"{len(metas)} tensors where none belong")


def _describe(dtype: str, shape: tuple[int, ...], codec: str) -> str:
    return f"{dtype}{list(shape)} as {codec}"


def _parse_header(packed: bytes) -> tuple[dict[str, Any], tuple[TensorMeta, ...]]:
    check_msgpack(packed)
    try:
        parsed = msgpack.unpackb(packed, strict_map_key=True, object_pairs_hook=_map)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError("header is not valid msgpack") from error
    match parsed:
        case [dict() as header, list() as items] if len(items) <= MAX_TENSORS:
            return header, tuple(_parse_meta(item) for item in items)
    raise WireError("header is not [fields, tensors]")


def _map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs) or not all(type(key) is str for key in made):
        raise WireError("header has a repeated or non-text key")
    return made


def _parse_meta(item: object) -> TensorMeta:
    match item:
        case [str() as dtype, list() as shape, str() as codec, int() as nbytes]:
            if type(nbytes) is int and all(type(n) is int for n in shape):
                meta = TensorMeta(dtype, tuple(shape), codec, nbytes)
                check_meta(meta)
                return meta
    raise WireError("tensor description is malformed")
