"""Every registered codec against what `encode` and `decode` promise, hostile bytes included."""

from __future__ import annotations

import hashlib
import math
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

from swarm.errors import WireError
from swarm.spec import ITEM_BYTES
from swarm.wire import codecs
from swarm.wire.codecs import (
    Codec,
    TensorMeta,
    WireTensor,
    check_meta,
    codec_for,
    codec_names,
    decode,
    encode,
    get_codec,
    register,
)

DTYPES = tuple(ITEM_BYTES)
SHAPES = ((), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 129))
BLOCKWISE = ("int8", "int4")
FLOATS = ("float64", "float32", "float16", "bfloat16")
# The floating-point dtypes whose every value survives a codec, compressed or not; all others do.
SURVIVE = {"raw": FLOATS, "float32": FLOATS, "float16": ("float16",), "bfloat16": ("bfloat16",),
           "int8": (), "int4": ()}  # fmt: skip
STORED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def sample(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50
    return (values > 0) if dtype == "bool" else values.abs().to(getattr(torch, dtype))


def survives(dtype: str, codec: str) -> bool:
    return dtype not in FLOATS or dtype in SURVIVE[codec.removesuffix("+zstd")]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def check_codec(name: str) -> None:
    """The conformance suite of one codec: what holds for each, whatever it does to the values."""
    for dtype in DTYPES:
        for shape in SHAPES:
            _check_round_trip(name, sample(dtype, shape))
        wide = sample(dtype, (6, 10))
        for view in (wide.T, wide[::2, 1::3], wide[3], wide[:1].expand(4, 10)):
            assert same_bits(decode(encode(view, name)), decode(encode(view.contiguous(), name)))
    _check_non_finite(name)
    for dtype in ("float32", "bfloat16", "int32", "bool"):
        _check_hostile(encode(sample(dtype, (40, 9)), name))


def _check_round_trip(name: str, tensor: torch.Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    before = tensor.clone()
    wire = encode(tensor, name)
    check_meta(wire.meta)
    assert wire.meta == TensorMeta(
        dtype, tuple(tensor.shape), codec_for(dtype, name), len(wire.data)
    )
    assert wire.raw_bytes == tensor.numel() * tensor.element_size()
    assert wire.wire_bytes == len(wire.data)
    assert bytes(encode(tensor, name).data) == bytes(wire.data), "not deterministic"
    drawn = [bytes(encode(tensor, name, seed=7).data) for _ in range(2)]
    assert drawn[0] == drawn[1], "not deterministic with a seed"
    got = decode(wire)
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert got.data_ptr() % 64 == 0
    assert not got.numel() or got.data_ptr() != tensor.data_ptr()
    assert same_bits(tensor, before)
    again = encode(got, name)
    assert same_bits(decode(again), got), "what was sent once must survive being sent again"
    if survives(dtype, name):
        assert same_bits(got, tensor)
    elif name.removesuffix("+zstd") in BLOCKWISE and tensor.numel():
        _check_error(got, tensor, int4=name.startswith("int4"))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_stochastic_rounding_is_one_scale_off_at_most(name: str) -> None:
    """Also of the largest of a block, of either sign, which has nowhere to be rounded away to."""
    for seed, sign in ((0, 1), (1, 1), (2, -1), (3, -1)):
        draw = torch.Generator().manual_seed(seed)
        values = torch.randn(500, 64, generator=draw)
        values[:, 0] = sign * values.abs().amax(1)
        got = decode(encode(values, name, seed=seed))
        _check_error(got, values, int4=name == "int4", halves=2)
        assert bool((got.sign() * values.sign() >= 0).all())
        if name == "int8":  # -128 is no level
            assert bool((got.abs().amax(1) <= values.abs().amax(1) * (1 + 2**-8)).all())


def _check_error(got: torch.Tensor, tensor: torch.Tensor, *, int4: bool, halves: int = 1) -> None:
    """At most half a scale off: of int8 the largest of 64 values / 127, to 2^-8; of int4 the
    largest of a column of the row / 7 at most, to 2^-4. Or two halves."""
    values = tensor.double().reshape(-1)
    size, blocks, scale, to = 64, 1, 1 / 127, 0.502
    if int4:
        values = tensor.double().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        blocks, scale, to = -(-values.shape[1] // 8), 1 / 7, 0.532
        size = blocks * 2 * -(-values.shape[1] // (2 * blocks))
    error = got.double().reshape(values.shape) - values
    values, error = (
        torch.nn.functional.pad(each, (0, -each.shape[-1] % size)).view(-1, size // blocks, blocks)
        for each in (values, error)
    )
    largest = values.abs().amax(1, keepdim=True)
    narrow = torch.finfo(got.dtype).eps * largest  # what the logical dtype itself rounds
    assert bool((error.abs() <= largest * scale * to * halves + narrow).all())


def _check_non_finite(name: str) -> None:
    tensor = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0])
    got = decode(encode(tensor, name))
    if name.removesuffix("+zstd") in BLOCKWISE:
        block = range(64, 128) if name.startswith("int8") else range(20, 200, 25)
        for bad in tensor[:3]:
            values = torch.ones(200)
            values[70] = bad
            got = decode(encode(values, name))
            assert got.isnan().nonzero().view(-1).tolist() == list(block)
            assert float((got[~got.isnan()] - 1).abs().max()) < 0.004
        return
    torch.testing.assert_close(got, tensor, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(got[3:5]), torch.tensor([False, True]))
    if name in ("raw", "float32", "float32+zstd"):
        payload = torch.tensor([0x7FC01234, -0x12345], dtype=torch.int32).view(torch.float32)
        assert same_bits(decode(encode(payload, name)), payload)


def _check_hostile(wire: WireTensor) -> None:
    data, meta = bytes(wire.data), wire.meta
    for cut in (data[:-1], data[:1], b"", data + b"\0", data * 2):
        with pytest.raises(WireError):  # announced honestly
            decode(WireTensor(meta._replace(nbytes=len(cut)), cut))
        with pytest.raises(WireError):  # announced as the real one
            decode(WireTensor(meta, cut))
    _, most = get_codec(meta.codec).nbytes_bounds(meta.dtype, meta.shape)
    for nbytes in (-1, 0, most + 1, 1 << 62):
        with pytest.raises(WireError):
            check_meta(meta._replace(nbytes=nbytes))
    for shape in ((40, 8), (40, 9, 2), (-40, -9), (1 << 62, 1 << 62), (1,) * 17, ()):
        with pytest.raises(WireError):
            decode(WireTensor(meta._replace(shape=shape), data))
    for shape in ((1 << 40, 1 << 40, 0), (0, *[1 << 40] * 15)):  # no values, and yet too large
        with pytest.raises(WireError):
            decode(WireTensor(meta._replace(shape=shape, nbytes=0), b""))
    changes: tuple[dict[str, Any], ...] = (
        {"dtype": "float128"},
        {"dtype": ""},
        {"codec": "pickle"},
        {"codec": ""},
    )
    for change in changes:
        with pytest.raises(WireError):
            check_meta(meta._replace(**change))
    for position in range(0, len(data), max(1, len(data) // 50)):
        flipped = bytearray(data)
        flipped[position] ^= 0x41
        try:
            got = decode(WireTensor(meta, flipped))
        except WireError:
            continue
        assert (tuple(got.shape), str(got.dtype)) == (meta.shape, f"torch.{meta.dtype}")


@pytest.mark.parametrize("name", codec_names())
def test_codec(name: str) -> None:
    check_codec(name)


def test_the_codecs_of_the_protocol() -> None:
    plain = ("raw", "float32", "float16", "bfloat16", "int8", "int4")
    assert codec_names() == tuple(n for f in plain for n in (f, f"{f}+zstd"))
    for taken in ("raw", "float32"):
        with pytest.raises(ValueError, match="exists"):
            register(get_codec(taken))
    codec: Codec = get_codec("float16")
    assert codec.name == "float16"


@pytest.mark.parametrize("name", STORED)
def test_values_are_rounded_as_torch_rounds(name: str) -> None:
    tensor = sample("float32", (100, 33)) * 1e-3
    expected = tensor.to(STORED[name]).to(torch.float32)
    assert same_bits(decode(encode(tensor, name)), expected)
    assert same_bits(decode(encode(tensor, f"{name}+zstd")), expected)
    assert encode(tensor, name).wire_bytes == tensor.numel() * STORED[name].itemsize


def digest_of_blockwise() -> str:
    """sha256 over what int8 and int4 send, and what comes out of it: values of all magnitudes, in
    blocks that are whole and not."""
    digest = hashlib.sha256()
    generator = torch.Generator().manual_seed(3)
    for width in (8, 40, 384):
        # Integers, since what torch draws as floats is not the same on every kind of CPU.
        drawn = torch.randint(-(2**20), 2**20, (3, 16, width), generator=generator).float()
        tensor = drawn * 2.0 ** torch.arange(-8.0, 8.0)[:, None]
        for name in BLOCKWISE:
            for seed in (None, 7):
                sent = encode(tensor, name, seed)
                digest.update(sent.data)
                digest.update(decode(sent).numpy())
    return digest.hexdigest()


def test_blockwise_codecs_send_the_same_bytes_on_every_kind_of_cpu() -> None:
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]);"
        "from test_codecs import digest_of_blockwise;"
        "print(torch.backends.cpu.get_cpu_capability(), digest_of_blockwise())"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for capability in ("default", "avx2")
    ]
    mine = torch.backends.cpu.get_cpu_capability()
    assert said[0][0] != mine or mine == "DEFAULT", "the variable does nothing"
    assert {digest for _, digest in said} == {digest_of_blockwise()}


def test_float16_overflows_to_infinity_and_is_not_clipped() -> None:
    got = decode(encode(torch.tensor([65504.0, 65519.9, 65520.0, -1e6, 1e-8]), "float16"))
    assert got.tolist() == [65504.0, 65504.0, math.inf, -math.inf, 0.0]


def test_what_is_said_to_be_lost_is_lost() -> None:
    for codec in codec_names():
        for dtype in FLOATS:
            drawn = sample(dtype, (100, 33))
            values = torch.cat([drawn / 3, drawn * 4096])  # too fine, and too large
            assert same_bits(decode(encode(values, codec)), values) == survives(dtype, codec)


def test_contiguous_tensors_are_not_copied() -> None:
    for name, tensor in (("float32", torch.randn(9, 9)), ("bfloat16", torch.randn(4).bfloat16())):
        wire = encode(tensor, name)
        tensor.zero_()
        assert not any(bytes(wire.data))
    data = encode(torch.ones(3).requires_grad_(), "float32").data  # keeps its tensor alive
    assert bytes(data) == bytes.fromhex("0000803f" * 3)


def test_decoded_memory_is_fresh_unless_received() -> None:
    wire = encode(torch.ones(3), "float32")
    decode(wire).zero_()
    assert decode(wire).tolist() == [1, 1, 1]
    memory = codecs.allocate_bytes(12)
    view = codecs.bytes_view(memory)
    view[:] = wire.data
    assert decode(WireTensor(wire.meta, view, memory)).data_ptr() == memory.data_ptr()


def test_smooth_activations_get_smaller() -> None:
    wire = encode(sample("float32", (64, 256)), "bfloat16+zstd")
    assert wire.wire_bytes < 0.85 * 64 * 256 * 2


def test_hostile_booleans_become_booleans() -> None:
    got = decode(WireTensor(TensorMeta("bool", (3,), "raw", 3), b"\x00\x01\xff"))
    assert got.view(torch.uint8).tolist() == [0, 1, 1]


def test_dtypes_that_cannot_be_sent() -> None:
    for name in codec_names():
        with pytest.raises(WireError, match="complex64"):
            encode(torch.zeros(2, dtype=torch.complex64), name)
    with pytest.raises(WireError, match="unknown codec"):
        encode(torch.zeros(2), "int3")


def _zstd_frames() -> dict[str, bytes]:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    no_size = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4000))
    small = zstandard.ZstdCompressor().compress(bytes(4000))
    lying = bytearray(bomb)
    parameters = zstandard.get_frame_parameters(bomb)
    assert parameters.content_size == 1 << 26
    at = bytes(bomb).index((1 << 26).to_bytes(4, "little"))
    lying[at : at + 4] = (4000).to_bytes(4, "little")
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    return {
        "honest bomb": bomb,
        "lying bomb": bytes(lying),
        "size not stated": no_size,
        "two frames": small * 2,
        "cut": small[:-1],
        "skippable": skippable,
        "skippable first": skippable + small,
        "garbage": bytes(range(64)),
    }


@pytest.mark.parametrize(("codec", "numel"), [("float32+zstd", 1000), ("int8+zstd", 3840)])
@pytest.mark.parametrize("case", _zstd_frames())
def test_decompression_is_bounded(case: str, codec: str, numel: int) -> None:
    data = _zstd_frames()[case]  # the sizes they state: 4000 bytes, or more, or none
    wire = WireTensor(TensorMeta("float32", (numel,), codec, len(data)), data)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(wire)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("name", [n for n in codec_names() if n.endswith("+zstd")])
def test_a_length_that_no_compression_reaches_is_refused(name: str) -> None:
    """Before memory for what it is said to hold is asked for."""
    dtype = "int64" if name == "raw+zstd" else "float32"
    wire = WireTensor(TensorMeta(dtype, (1 << 37,), name, 1), b"x")
    with pytest.raises(WireError, match="1 bytes"):
        decode(wire)
    least, _ = get_codec(name).nbytes_bounds(dtype, (1 << 24,))
    zeros = torch.zeros(1 << 24, dtype=getattr(torch, dtype))
    assert least <= encode(zeros, name).meta.nbytes < 2 * least + 64


@pytest.mark.parametrize("name", [n for n in codec_names() if not n.startswith("raw")])
def test_random_bytes_of_the_right_length(name: str) -> None:
    """Whatever a peer sends becomes a tensor as announced, or WireError."""
    draw = random.Random(f"bytes/{name}")
    for _ in range(200):
        dtype = draw.choice(("float32", "bfloat16", "float64"))
        if codec_for(dtype, name) != name:
            continue
        shape = draw.choice(((draw.randrange(1, 200),), (draw.randrange(1, 9), draw.randrange(20))))
        low, high = get_codec(name).nbytes_bounds(dtype, shape)
        data = draw.randbytes(draw.randint(low, high))
        try:
            got = decode(WireTensor(TensorMeta(dtype, shape, name, len(data)), data))
        except WireError:
            assert name.endswith("+zstd")
            continue
        assert (got.shape, got.dtype) == (shape, getattr(torch, dtype))


def test_wire_is_little_endian_on_big_endian_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = sample("float32", (3, 5))
    little = bytes(encode(tensor, "float32").data)
    monkeypatch.setattr(codecs, "_SWAP_BYTES", True)
    swapped = bytes(encode(tensor, "float32").data)
    assert swapped == b"".join(little[i : i + 4][::-1] for i in range(0, len(little), 4))
    for name in codec_names():
        for dtype in DTYPES:
            original = sample(dtype, (3, 5))
            assert torch.equal(decode(encode(original, name)), decode(encode(original, name)))
            if survives(dtype, name):
                assert same_bits(decode(encode(original, name)), original)
