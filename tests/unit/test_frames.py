"""Frames: the format is pinned by golden bytes, and no bytes do more harm than WireError."""

from __future__ import annotations

import asyncio
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import DeviceError, StreamClosedError, WireError
from swarm.net.transport import Buffer
from swarm.spec import TensorSpec
from swarm.wire import frames
from swarm.wire.codecs import TensorMeta, WireTensor, codec_names, decode, encode
from swarm.wire.frames import (
    Frame,
    check_indices,
    check_tensors,
    encode_frame,
    no_tensors,
    protocol_name,
    read_frame,
)

GOLDEN = Path(__file__).parent.parent / "golden"
HEADER = {"op": "forward", "step": 7, "try": 0, "loss": -0.5, "tokens": b"\x00\xff", "ok": True,
          "route": ["a", "b"], "none": None, "big": 2**63, "neg": -5}  # fmt: skip
TENSOR = torch.arange(6, dtype=torch.float32).reshape(2, 3)


class BytesStream:
    """A stream that has received `data` and then ended."""

    peer = "peer"
    received_bytes = sent_bytes = 0

    def __init__(self, data: Buffer) -> None:
        self.data = memoryview(data)
        self.at = 0

    async def receive_exactly(self, num_bytes: int) -> bytes:
        if self.at + num_bytes > len(self.data):
            raise StreamClosedError("stream ended")
        self.at += num_bytes
        return bytes(self.data[self.at - num_bytes : self.at])

    async def receive_into(self, buffer: memoryview) -> None:
        buffer[:] = await self.receive_exactly(len(buffer))

    async def send(self, parts: Any) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError


def accept(header: dict[str, Any], metas: tuple[TensorMeta, ...]) -> None:
    pass


def read(data: Buffer, check: frames.Check = accept, **limits: Any) -> Frame:
    return asyncio.run(read_frame(BytesStream(data), check, **limits))


def frame_bytes(packed: bytes, body: bytes = b"", **changed: Any) -> bytes:
    fields = {"magic": b"SWP", "version": 1, "header": len(packed), "payload": len(body)}
    return struct.pack("<3sBIQ", *(fields | changed).values()) + packed + body


def golden_frames() -> dict[str, bytes]:
    """The frames as they are written today; `tests/golden` holds them as they must stay."""
    tensors = {
        "header_only": [],
        "float32": [encode(TENSOR, "float32")],
        "half": [encode(TENSOR, "float16"), encode(TENSOR, "bfloat16")],
        "mixed": [
            encode(TENSOR.bfloat16(), "bfloat16"),
            encode(torch.arange(3, dtype=torch.uint8), "float16"),
            encode(torch.tensor(True), "raw"),
            encode(torch.empty(0, 4), "float32+zstd"),
        ],
        "zstd": [encode(TENSOR.repeat(20, 1), "bfloat16+zstd")],
    }
    return {name: b"".join(encode_frame(HEADER, wires)) for name, wires in tensors.items()}


NAMES = tuple(golden_frames())


@pytest.mark.parametrize("name", [n for n in NAMES if n != "zstd"])
def test_golden_frames_are_written_bit_for_bit(name: str) -> None:
    assert golden_frames()[name] == (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_golden_frames_are_read(name: str) -> None:
    # What zstd writes may change with its version; what it wrote before must stay readable.
    frame, now = read((GOLDEN / f"{name}.bin").read_bytes()), read(golden_frames()[name])
    assert frame.header == now.header == HEADER
    assert len(frame.tensors) == len(now.tensors)
    for old, new in zip(frame.tensors, now.tensors, strict=True):
        assert torch.equal(decode(old), decode(new))


def test_golden_values_do_not_come_from_our_own_encoder() -> None:
    frame = read((GOLDEN / "float32.bin").read_bytes())
    assert bytes(frame.tensors[0].data) == struct.pack("<6f", *range(6))
    assert (GOLDEN / "float32.bin").read_bytes()[:4] == b"SWP\x01"


def test_stream_name() -> None:
    assert protocol_name("stage") == f"/swarm-parallel/{frames.PROTOCOL_VERSION}/stage"


def test_frames_follow_each_other_and_the_end_is_stream_closed() -> None:
    stream = BytesStream(b"".join(golden_frames().values()))

    async def read_all() -> None:
        for _ in NAMES:
            await read_frame(stream, accept)
        with pytest.raises(StreamClosedError):
            await read_frame(stream, accept)

    asyncio.run(read_all())


@pytest.mark.parametrize("codec", codec_names())
def test_tensors_travel(codec: str) -> None:
    sent = [torch.randn(4, 5), torch.arange(3), torch.tensor(2.5), torch.zeros(0, 7)]
    specs = [TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in sent]

    def check(header: dict[str, Any], metas: tuple[TensorMeta, ...]) -> None:
        check_tensors(metas, specs, codec)

    frame = read(b"".join(encode_frame({}, [encode(t, codec) for t in sent])), check)
    for tensor, wire in zip(sent, frame.tensors, strict=True):
        got = decode(wire)
        assert torch.equal(got, decode(encode(tensor, codec)))
        assert got.data_ptr() % 64 == 0


def test_tensor_bytes_are_not_copied() -> None:
    tensor = torch.randn(50)
    parts = encode_frame({"a": 1}, [encode(tensor, "float32")])
    tensor.zero_()
    assert not any(parts[1])
    frame = read(b"".join(parts))
    assert frame.tensors[0].memory is not None
    assert decode(frame.tensors[0]).data_ptr() == frame.tensors[0].memory.data_ptr()


def test_nothing_is_allocated_when_check_refuses() -> None:
    allocated = []

    def allocate(num_bytes: int) -> torch.Tensor:
        allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    data = b"".join(encode_frame({}, [encode(TENSOR, "float32")]))
    with pytest.raises(WireError, match="1 tensors where none belong"):
        read(data, no_tensors, allocate=allocate)
    assert not allocated
    read(data, allocate=allocate)
    assert allocated == [24]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory")])
def test_no_memory_is_an_error_of_ours(error: Exception) -> None:
    def allocate(num_bytes: int) -> torch.Tensor:
        raise error

    data = b"".join(encode_frame(HEADER, [encode(TENSOR, "float32")]))
    with pytest.raises(DeviceError, match="no memory for 24 bytes"):
        read(data, allocate=allocate)


def test_check_tensors_says_what_differs() -> None:
    spec = TensorSpec((2, 3), "float32")
    meta = encode(TENSOR, "float16").meta
    check_tensors([meta], [spec], "float16")
    check_tensors([encode(torch.zeros(2, dtype=torch.int32), "raw").meta],
                  [TensorSpec((2,), "int32")], "float16+zstd")  # fmt: skip
    for metas, codec, text in (
        ([], "float16", "0 tensors, 1 expected"),
        ([meta._replace(shape=(3, 2))], "float16", r"\[3, 2\] as float16, float32\[2, 3\]"),
        ([meta._replace(dtype="bfloat16")], "float16", "bfloat16"),
        ([meta], "bfloat16", "as float16, .* as bfloat16 expected"),
    ):
        with pytest.raises(WireError, match=text):
            check_tensors(metas, [spec], codec)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_check_indices_says_what_is_out_of_range(dtype: str) -> None:
    def wire(*values: int) -> WireTensor:
        return encode(torch.tensor([values, values], dtype=getattr(torch, dtype)), "raw")

    spec, free = TensorSpec((2, 2), dtype, 200), TensorSpec((2, 2), dtype)
    check_indices([wire(0, 199), wire(255, 0), encode(TENSOR, "float32")], [spec, free])
    check_indices([wire()], [spec])
    wrong = {200: "holds 200, 0 to 199 expected", 255: "holds 255"}
    if dtype.startswith("int"):
        wrong |= {-1: "holds -1, 0 to 199", 2**31 - 1: f"holds {2**31 - 1}", -(2**31): "holds -2"}
    for value, text in wrong.items():
        with pytest.raises(WireError, match=f"^tensor 1 {text}"):
            check_indices([wire(1, 2), wire(3, value)], [spec, spec])


META = ["float32", [2, 3], "float32", 24]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a swarm frame"),
        (frame_bytes(b"\x92\x80\x90", version=2), "frame version 2, this peer reads 1"),
        (frame_bytes(b"\x92\x80\x90", header=1 << 31), "header of 2147483648 bytes, limit 1048576"),
        (frame_bytes(b"\x92\x80\x90", payload=1 << 63), "payload of .* bytes, limit"),
        (frame_bytes(b"\x92\x80\x90", payload=5), "not the sum"),
        (frame_bytes(b""), "cut off"),
        (frame_bytes(b"\x92\x80"), "cut off"),
        (frame_bytes(b"\x92\x80\x90\x00"), "followed by other bytes"),
        (frame_bytes(b"\xdd\xff\xff\xff\xff"), "cut off"),
        (frame_bytes(b"\xdd\x00\x00\xff\xff" * 1000), "cut off or nested too deep"),
        (frame_bytes(b"\x91" * 600 + b"\x90"), "nested too deep"),
        (frame_bytes(b"\xdd\x00\x01\x00\x00" + b"\x00" * 65536), "too many items"),
        (frame_bytes(b"\xc6\xff\xff\xff\xff"), "cut off"),
        (frame_bytes(b"\x92\x81\xa1t\xd6\xff\x00\x00\x00\x00\x90"), "not allowed"),
        (frame_bytes(b"\x92\x81\xa1x\xc1\x90"), "not allowed"),
        (frame_bytes(b"\x92\x81\xa1\xff\x01\x90"), "not valid msgpack"),
        (frame_bytes(b"\x92\x81\x01\x01\x90"), "not valid msgpack|non-text"),
        (frame_bytes(b"\x92\x81\xc4\x01a\x01\x90"), "non-text key"),
        (frame_bytes(b"\x92\x81\x90\x01\x90"), "not valid msgpack|non-text"),
        (frame_bytes(b"\x92\x82\xa1a\x01\xa1a\x02\x90"), "repeated"),
        (frame_bytes(b"\x80"), "not \\[fields, tensors\\]"),
        (frame_bytes(b"\x92\x90\x90"), "not \\[fields, tensors\\]"),
        (frame_bytes(msgpack.packb([{}, [["uint8", [0], "raw", 0]] * 1025])), "not \\[fields"),
        (frame_bytes(msgpack.packb([{}, [META[:3]]])), "malformed"),
        (frame_bytes(msgpack.packb([{}, [[*META[:3], True]]])), "malformed"),
        (frame_bytes(msgpack.packb([{}, [["float32", [2, 3.0], "float32", 24]]])), "malformed"),
        (frame_bytes(msgpack.packb([{}, [["float32", [2, 2], "float32", 24]]])), "16 expected"),
        (frame_bytes(msgpack.packb([{}, [["object", [2, 3], "float32", 24]]])), "unknown tensor"),
        (frame_bytes(msgpack.packb([{}, [["float32", [2, 3], "lzma", 24]]])), "unknown codec"),
        (frame_bytes(msgpack.packb([{}, [META]]), bytes(23)), "not the sum"),
    ],
)  # fmt: skip
def test_malformed_frames_give_one_short_reason(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason) as caught:
        read(data)
    assert len(str(caught.value)) < 200


def test_limits_can_be_lowered() -> None:
    data = golden_frames()["float32"]
    with pytest.raises(WireError, match="limit 10"):
        read(data, max_header_bytes=10)
    with pytest.raises(WireError, match="limit 23"):
        read(data, max_payload_bytes=23)


@pytest.mark.parametrize(
    "header", [{"a": {1, 2}}, {"a": 2**64}, {"a": "\ud800"}, {"a": b"x" * (1 << 20)}]
)
def test_headers_that_cannot_be_sent(header: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="header"):
        encode_frame(header)


def survives(data: bytes) -> None:
    """Reading and decoding `data` gives tensors or one of the two errors, in bounded memory."""
    allocated = []

    def allocate(num_bytes: int) -> torch.Tensor:
        allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    try:
        frame = read(data, allocate=allocate, max_payload_bytes=1 << 16)
        for wire in frame.tensors:
            if wire.raw_bytes < 1 << 20:
                decode(wire)
    except (WireError, StreamClosedError):
        pass
    assert sum(allocated) <= 1 << 16


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(st.dictionaries(st.text(), JSON, max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_header_travels(header: dict[str, Any]) -> None:
    assert read(b"".join(encode_frame(header)), no_tensors).header == header


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes(data: bytes) -> None:
    survives(data)


@given(st.binary(max_size=200), st.binary(max_size=20))
@settings(max_examples=150, deadline=None)
def test_arbitrary_headers(packed: bytes, payload: bytes) -> None:
    survives(frame_bytes(packed, payload))


@given(st.lists(JSON, max_size=5) | JSON, st.binary(max_size=20))
@settings(max_examples=100, deadline=None)
def test_arbitrary_descriptions(metas: Any, payload: bytes) -> None:
    survives(frame_bytes(msgpack.packb([{}, metas]), payload))


@given(
    st.sampled_from(NAMES), st.lists(st.integers(0, 10**6), min_size=1, max_size=4), st.integers(0)
)
@settings(max_examples=250, deadline=None)
def test_flipped_bits(name: str, bits: list[int], cut: int) -> None:
    data = bytearray((GOLDEN / f"{name}.bin").read_bytes())
    for bit in bits:
        data[bit // 8 % len(data)] ^= 1 << bit % 8
    survives(bytes(data))
    survives(bytes(data[: cut % len(data)]))


def test_hostile_header_allocates_little() -> None:
    nested = b"\x92\x80" + b"\xdc\xff\xff" * 14
    data = frame_bytes(nested + b"\x00" * (frames.MAX_HEADER_BYTES - len(nested)))
    tracemalloc.start()
    try:
        survives(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * frames.MAX_HEADER_BYTES


def test_received_wire_tensor_can_be_sent_on() -> None:
    data = golden_frames()["half"]
    frame = read(data)
    assert all(isinstance(wire, WireTensor) for wire in frame.tensors)
    assert b"".join(encode_frame(frame.header, frame.tensors)) == data
