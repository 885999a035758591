"""Blockwise int4 against a reference that shares nothing with it, and golden bytes."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.wire import blocks, nibbles
from swarm.wire.nibbles import dequantize, packed_bytes, quantize

GOLDEN = Path(__file__).parent.parent / "golden"


def to_float32(value: Fraction) -> Fraction:
    """The nearest float32."""
    return Fraction(torch.tensor(float(value), dtype=torch.float64).float().item())


def top_of(step: Fraction) -> int:
    """The upper 11 bits of the nearest float32 with 3 bits of mantissa, ties upwards."""
    bits = int.from_bytes(struct.pack("<f", float(step)), "little")
    return (bits >> 20) + (bits >> 19 & 1)


def reference(rows: list[list[float]]) -> bytes:
    """docs/protocol.md, in rational numbers."""
    num_blocks = -(-len(rows[0]) // 8)
    depth = next(n for n in (2, 4, 6, 8) if n * num_blocks >= len(rows[0]))
    slots = depth * num_blocks
    table = [[*row, *[0.0] * (slots - len(row))] for row in rows]
    found = [[row[j::num_blocks] for j in range(num_blocks)] for row in table]
    tops = [[_least_top(block) for block in row] for row in found]
    exponent = max(top for row in tops for top in row) >> 3
    scales, integers = b"", b""
    for row, row_tops in zip(found, tops, strict=True):
        row_integers = [0] * slots
        for j, (block, top) in enumerate(zip(row, row_tops, strict=True)):
            code, q = _block(block, top, exponent)
            scales += bytes([code])
            row_integers[j::num_blocks] = q
        low, high = row_integers[: slots // 2], row_integers[slots // 2 :]
        integers += bytes((a & 15) | (b & 15) << 4 for a, b in zip(low, high, strict=True))
    return bytes([exponent]) + scales + integers


def _least_top(block: list[float]) -> int:
    """0 if the block is zero; -1 if it is not finite."""
    if not all(map(math.isfinite, block)):
        return -1
    larger, smaller = sorted((Fraction(max(block)), -Fraction(min(block))), reverse=True)
    top = top_of(max(to_float32(larger / 8), to_float32(smaller / 7), Fraction(0)))
    return top if top >= 16 else 0


def _block(block: list[float], top: int, exponent: int) -> tuple[int, list[int]]:
    if top < 0:
        return 127, [0] * len(block)
    if top == 0:
        return 0, [0] * len(block)
    code = max(top - (8 * exponent - 119), 1)
    top = code + 8 * exponent - 119
    scale = Fraction(8 + top % 8, 8) * Fraction(2) ** (top // 8 - 127)
    inverse = to_float32(1 / scale)
    turned = to_float32(Fraction(max(block)) * inverse) >= Fraction(15, 2)
    inverse = -inverse if turned else inverse
    q = [round(to_float32(Fraction(value) * inverse)) for value in block]
    assert all(-8 <= each <= 7 for each in q), "nothing needs clipping"
    return code | turned << 7, q


def golden_rows() -> list[list[float]]:
    """Ordinary, zero, tiny, huge and bad blocks; rows of 20, that is of 3 blocks of 8."""
    ordinary = [((i * 37) % 101 - 50) * 2.0 ** -(i % 7) for i in range(80)]
    positive = [0.5 + i for i in range(20)]
    even = [7.5, -7.5, 8.0, -8.0, 7.0, -7.0, 1.0] * 2 + [0.0, -0.0, 2.5, 3.5, -2.5, -3.5]
    small = [2.0**-20 * (i - 9) for i in range(20)]
    tiny = [2.0**-120, -(2.0**-130), *[2.0**-149] * 18]
    huge = [3.0e38, -1.0e37, *[1.0e36 * i for i in range(18)]]
    bad = [1.0, math.nan, math.inf, *[2.0] * 17]
    values = [*ordinary, *positive, *even, *[0.0] * 20, *small, *tiny, *bad]
    narrow = torch.tensor([values, [*values[:-20], *huge]]).view(2, -1, 20)  # as float32
    rows: list[list[list[float]]] = narrow.tolist()
    return rows[0] + rows[1]


def test_golden_bytes() -> None:
    packed = b"".join(bytes(quantize(torch.tensor(each)).numpy()) for each in _golden_tensors())
    assert packed == (GOLDEN / "int4.bin").read_bytes()
    assert packed == b"".join(reference(each) for each in _golden_tensors())


def _golden_tensors() -> list[list[list[float]]]:
    rows = golden_rows()
    return [rows[:10], rows[10:], [row[:5] for row in rows[:4]]]


@pytest.mark.parametrize("width", [1, 2, 5, 8, 9, 16, 20, 129])
def test_random_rows_and_pieces(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(width)
    values = torch.randn(13, width, generator=draw)
    values *= 10.0 ** torch.randn(13, 1, generator=draw).mul_(2)
    expected = bytes(quantize(values).numpy())
    assert expected == reference(values.tolist())
    noisy = bytes(quantize(values, seed=2**63 + 5).numpy())
    monkeypatch.setattr(nibbles, "_PIECE", 300)
    assert bytes(quantize(values).numpy()) == expected
    assert bytes(quantize(values, seed=2**63 + 5).numpy()) == noisy
    assert noisy != expected or width == 1
    packed = torch.frombuffer(bytearray(expected), dtype=torch.uint8)
    got = dequantize(packed, values.shape)
    monkeypatch.undo()
    assert torch.equal(got, dequantize(packed, values.shape))
    again = dequantize(quantize(got), values.shape)
    assert torch.equal(got.view(torch.int32), again.view(torch.int32)), "to the bit, zeros too"


def test_sizes() -> None:
    shapes = {(): 3, (0,): 0, (3, 0): 0, (7, 1): 15, (7, 5): 29, (7, 8): 36, (2, 3, 128): 481,
              (7, 9): 57, (7, 10): 57, (1000,): 626}  # fmt: skip
    assert {shape: packed_bytes(shape) for shape in shapes} == shapes


def test_a_token_does_not_suffer_from_another() -> None:
    values = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    values *= 10.0 ** torch.linspace(-4, 0, 200).unsqueeze(1)
    error = (dequantize(quantize(values), values.shape) - values).norm(dim=1)
    assert float((error / values.norm(dim=1)).max()) < 0.12


def test_far_below_the_largest_scale_values_fade() -> None:
    values = torch.ones(30, 8) * 2.0 ** -torch.arange(30.0).unsqueeze(1)
    got = dequantize(quantize(values), values.shape)
    least = 2.0**-18 * 1.25  # scale; the largest is 2^-3
    assert torch.equal(got[:15], values[:15])
    assert float((got - values).abs().max()) <= least / 2
    assert not got[19:].any()


def test_the_larger_side_has_all_its_steps() -> None:
    values = torch.tensor([[-8.0, 7, 3, 1, 0, -1, -7, 2], [8.0, -7, -3, -1, 0, 1, 7, -2]])
    assert torch.equal(dequantize(quantize(values), values.shape), values)


def test_what_is_near_the_largest_float_becomes_infinite() -> None:
    """As it does where a float32 is rounded to anything coarser."""
    largest = torch.finfo(torch.float32).max
    got = dequantize(quantize(torch.full((1, 8), largest)), (1, 8))
    assert bool(torch.isinf(got).all())
    values = torch.full((1, 8), 1.875 * 2.0**127)
    assert torch.equal(dequantize(quantize(values), (1, 8)), values)


def test_whatever_the_bytes_are() -> None:
    for exponent in (0, 1, 120, 254, 255):
        packed = torch.cat(
            (torch.tensor([exponent]), torch.arange(256), torch.arange(256).repeat_interleave(4))
        ).to(torch.uint8)
        got = dequantize(packed, (256, 8))
        assert not got[0].any()
        assert not got[128].any()
        assert bool(got[[127, 255]].isnan().all())


class Divisors(TorchDispatchMode):
    """Notes what tensors are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if "div" in str(func):
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("module", [blocks, nibbles])
def test_nothing_is_divided_by_a_number(module: ModuleType) -> None:
    """CUDA multiplies by the reciprocal of one, and the scale of some blocks is another then."""
    with Divisors() as divisors:
        module.quantize(torch.tensor(golden_rows()), seed=1)
    assert divisors.found
    assert all(isinstance(each, torch.Tensor) and each.dim() for each in divisors.found)


def test_stochastic_rounding_is_right_on_average() -> None:
    values = torch.full((8, 8), 0.3)
    values[:, 0], values[4:, 0] = -8.0, 8.0  # a scale of 1, turned or not
    mean = sum(dequantize(quantize(values, seed), (8, 8)) for seed in range(200)) / 200
    assert abs(float(mean[:, 1:].mean()) - 0.3) < 0.01
    assert bool((mean[:, 0].abs() - 8.0).abs().max() <= 0.51)
