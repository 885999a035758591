"""Blockwise int8 against a reference that shares nothing with it, and golden bytes."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from swarm.wire import blocks
from swarm.wire.blocks import dequantize, packed_bytes, quantize

GOLDEN = Path(__file__).parent.parent / "golden"


def to_float32(value: Fraction) -> Fraction:
    """The nearest float32 of a value in its normal range, ties to even."""
    return nearest(value, 24)


def nearest(value: Fraction, digits: int) -> Fraction:
    if not value:
        return value
    exponent = math.floor(math.log2(abs(value))) - digits + 1
    while abs(value) >= Fraction(2) ** (exponent + digits):
        exponent += 1
    while abs(value) < Fraction(2) ** (exponent + digits - 1):
        exponent -= 1
    return round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent


def bfloat16_bytes(value: Fraction) -> bytes:
    return struct.pack("<f", float(value))[2:]


def reference(values: list[float]) -> bytes:
    """docs/protocol.md, in rational numbers."""
    scales, integers = b"", b""
    padded = [*values, *[0.0] * (-len(values) % 64)]
    for start in range(0, len(padded), 64):
        block = padded[start : start + 64]
        q = [0] * 64
        if not all(map(math.isfinite, block)):
            scales += b"\xc0\x7f"
        else:
            exact = [Fraction(value) for value in block]
            scale = nearest(to_float32(max(map(abs, exact)) / 127), 8)
            if scale < Fraction(1, 2**125):
                scale = Fraction(0)
            else:
                inverse = to_float32(1 / scale)
                q = [round(to_float32(value * inverse)) for value in exact]
            scales += bfloat16_bytes(scale)
        integers += struct.pack("<64b", *q)
    return scales + integers


def golden_values() -> list[float]:
    """Ordinary, zero, tiny, huge and bad blocks, and a short last one."""
    ordinary = [((i * 37) % 101 - 50) * 2.0 ** -(i % 7) for i in range(128)]
    ties = [127.0, *[i + 0.5 for i in range(63)]]
    tiny = [2.0**-119, -(2.0**-140), *[0.0] * 62]
    least = [2.0**-117, -(2.0**-120), *[2.0**-149] * 62]
    huge = [3.0e38, -1.0e38, *[1.0e31 * i for i in range(62)]]
    bad = [1.0, math.nan, *[2.0] * 62]
    infinite = [1.0, -math.inf, *[2.0] * 62]
    values = [*ordinary, *ties, *[0.0] * 64, *tiny, *least, *huge, *bad, *infinite, 1.5, -0.0, 3.0]
    return torch.tensor(values).tolist()  # as float32


def test_golden_bytes() -> None:
    packed = bytes(quantize(torch.tensor(golden_values())).numpy())
    assert packed == (GOLDEN / "int8.bin").read_bytes()
    assert packed == reference(golden_values())


def test_pieces_and_the_rest_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(8)
    values = torch.randn(64 * 9 + 13, generator=draw) * torch.rand(1, generator=draw)
    expected = bytes(quantize(values).numpy())
    assert expected == reference(values.tolist())
    noisy = bytes(quantize(values, seed=2**63 + 5).numpy())
    monkeypatch.setattr(blocks, "_PIECE_BLOCKS", 2)
    assert bytes(quantize(values).numpy()) == expected
    assert bytes(quantize(values, seed=2**63 + 5).numpy()) == noisy != expected
    packed = torch.frombuffer(bytearray(expected), dtype=torch.uint8)
    got = dequantize(packed, values.shape)
    monkeypatch.undo()
    assert torch.equal(got, dequantize(packed, values.shape))
    assert len(expected) == packed_bytes(values.shape) == 10 * 66


def hashed(number: int, seed: int) -> int:
    """`lowbias32` with two keys, in Python's integers."""
    x = (number ^ seed) & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x ^= seed >> 32
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def noise(rows: int, width: int, seed: int, first: int = 0) -> torch.Tensor:
    got, half = torch.zeros(rows, width), width // 2
    numbers = blocks.numbers_of(first, rows, half, got.device)
    blocks.add_noise(got[:, :half], got[:, half:], numbers, seed)
    return got


def odd(bits: int) -> float:
    """Of 16 bits, two's complement."""
    return (2 * (bits - (1 << 16) if bits >= 1 << 15 else bits) + 1) * 2.0**-17


def test_the_noise_is_the_documented_hash() -> None:
    for seed in (0, 1, 0xDEADBEEF12345678, 2**64 - 1):
        for first in (0, 5, 2**27 - 1):
            got = noise(3, 32, seed, first)
            for row, values in enumerate(got.tolist()):
                hashes = [hashed((first + row) * 16 + column, seed) for column in range(16)]
                assert values[:16] == [odd(each & 0xFFFF) for each in hashes]
                assert values[16:] == [odd(each >> 16) for each in hashes]


def test_stochastic_rounding_is_right_on_average() -> None:
    values = torch.full((64,), 0.3)
    values[0] = 127.0  # a scale of 1
    mean = sum(dequantize(quantize(values, seed), (64,)) for seed in range(200)) / 200
    assert abs(float(mean[1:].mean()) - 0.3) < 0.01
    assert float(mean[0]) == pytest.approx(127.0, abs=0.51)


def test_integers_stay_what_they_are() -> None:
    values = torch.arange(-127, 128).float().repeat(3000, 1).view(-1, 2)
    assert torch.equal((values + noise(len(values), 2, 3)).round(), values)


def test_noise_is_even() -> None:
    drawn = noise(1 << 10, 64, 7)
    assert -0.5 < float(drawn.min()) < -0.499
    assert 0.499 < float(drawn.max()) < 0.5
    assert abs(float(drawn.mean())) < 0.005
    halves = torch.corrcoef(torch.stack((drawn[:, :32].flatten(), drawn[:, 32:].flatten())))
    assert abs(float(halves[0, 1])) < 0.02
    counts = torch.histc(drawn, 16, -0.5, 0.5)
    assert float((counts - 4096).abs().max()) < 300
