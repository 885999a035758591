"""Blockwise int8: float32 values as bytes with one bfloat16 scale per 64 of them.

What. `quantize` writes a tensor as `[scales][integers]`, `dequantize` reads it back
(docs/protocol.md states the bytes). A block's scale is its largest magnitude / 127, rounded to
bfloat16; its values are multiples of the scale, rounded to nearest even, so the error is at most
half a scale. Blocks are consecutive elements, 64 as in QLoRA (Dettmers et al. 2023), since one
outlier coarsens only its block.

Why a bfloat16 scale. It has float32's range, which float16 lacks (gradients of a mean are 1e-8),
for half the bytes: 8.25 bits a value. Rounding it moves the largest quotient to between 126.5 and
127.5, which still rounds to 127: nothing needs clipping, and what was decoded encodes to the same
bytes again.

The same bytes on every device, here and in `swarm.wire.nibbles`: division, product, maximum,
comparison, conversions and integers only, each of which IEEE 754 or integer arithmetic defines to
the bit; one operation at a time, none fused. What is divided by is a tensor, since CUDA multiplies
by the reciprocal of a number: of 4 million blocks with a 7, 32 would get another scale. NaN is
never converted to an integer. Stochastic rounding adds noise that is an integer hash of the
element's place and a seed, so the same seed gives the same bytes, in whatever pieces.

On a CPU the work goes through pieces that stay in the cache; on other devices in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 64
SCALE_BYTES = 2
LEVELS = 127.0
LEAST_SCALE = 2.0**-125  # below, a block is zero: its reciprocal would leave float32
_PIECE_BLOCKS = 4096  # 1 MiB of float32
_NAN_SCALE = 0x7FC0


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def packed_bytes(shape: Sequence[int]) -> int:
    """Bytes of a tensor of that shape: its last block is filled up with zeros."""
    return _num_blocks(math.prod(shape)) * (SCALE_BYTES + BLOCK)


def quantize(values: Tensor, seed: int | None = None) -> Tensor:
    """Contiguous float32 `values` as a flat uint8 tensor on their device.

    With a `seed` (64 bits) rounding is stochastic: up or down with a chance that makes the mean
    right, except for the largest of a block. A block that holds inf or NaN becomes NaN as a whole.
    """
    values, device = values.view(-1), values.device
    count, whole = _num_blocks(values.numel()), values.numel() // BLOCK
    packed = torch.empty(packed_bytes(values.shape), dtype=torch.uint8, device=device)
    scales = packed[: SCALE_BYTES * count].view(count, SCALE_BYTES)
    integers = packed[SCALE_BYTES * count :].view(torch.int8).view(count, BLOCK)
    blocks = values[: whole * BLOCK].view(whole, BLOCK)
    size = _PIECE_BLOCKS if device.type == "cpu" else max(whole, 1)
    work = torch.empty((min(size, max(whole, 1)), BLOCK), dtype=torch.float32, device=device)
    for start in range(0, whole, size):
        part = slice(start, min(start + size, whole))
        _quantize(blocks[part], seed, start, work, scales[part], integers[part])
    if whole < count:
        rest = values.new_zeros(1, BLOCK)
        rest.view(-1)[: values.numel() - whole * BLOCK] = values[whole * BLOCK :]
        _quantize(rest, seed, whole, work, scales[whole:], integers[whole:])
    return packed


def _quantize(
    blocks: Tensor, seed: int | None, first: int, work: Tensor, scales: Tensor, integers: Tensor
) -> None:
    """`blocks` (n, 64), of which the first is number `first`, into the packed bytes' views."""
    work = work[: len(blocks)]
    largest = torch.amax(torch.abs(blocks, out=work), 1)
    rounded = largest.div_(largest.new_full((1,), LEVELS)).to(torch.bfloat16)
    finite = rounded < math.inf  # false for NaN
    usable = finite & (rounded >= LEAST_SCALE)
    bits = torch.where(usable, rounded.view(torch.int16), 0)
    bits = torch.where(finite, bits, _NAN_SCALE)
    scales[:, 0].copy_(bits.bitwise_and(255))  # little-endian on every machine
    scales[:, 1].copy_(bits >> 8)
    inverse = torch.where(usable, torch.reciprocal(rounded.float()), 0.0)
    torch.mul(blocks, inverse.unsqueeze(1), out=work)
    if seed is not None:
        half = BLOCK // 2
        numbers = numbers_of(first, len(work), half, work.device)
        add_noise(work[:, :half], work[:, half:], numbers, seed)
        work.clamp_(-LEVELS, LEVELS)
    integers.copy_(rounded_finite(work, finite.unsqueeze(1)))


def rounded_finite(work: Tensor, finite: Tensor) -> Tensor:
    """`work`, rounded in place to nearest even; 0 where it is not finite."""
    work.round_()
    if work.device.type != "cpu" or not bool(finite.all()):
        work.copy_(torch.where(finite, work, 0.0))
    return work


def dequantize(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Float32 values, in new memory, from `packed_bytes(shape)` uint8 bytes.

    Defined for all bytes: a scale may be anything, and then so may the values (NaN for NaN).
    """
    num_elements = math.prod(shape)
    count = _num_blocks(num_elements)
    scales = packed[: SCALE_BYTES * count].view(count, SCALE_BYTES).to(torch.int32)
    scales = ((scales[:, 1] << 24) | (scales[:, 0] << 16)).view(torch.float32)
    integers = packed[SCALE_BYTES * count :].view(torch.int8).view(count, BLOCK)
    values = torch.empty((count, BLOCK), dtype=torch.float32, device=packed.device)
    size = _PIECE_BLOCKS if packed.device.type == "cpu" else max(count, 1)
    for start in range(0, count, size):
        part = slice(start, min(start + size, count))
        values[part].copy_(integers[part]).mul_(scales[part].unsqueeze(1))
    return values.view(-1)[:num_elements].view(tuple(shape))


def add_noise(lower: Tensor, upper: Tensor, numbers: Tensor, seed: int) -> None:
    """Add to float32 values uniform numbers in (-0.5, 0.5) that depend on a number, on which of the
    two it is for, and on the 64-bit `seed` alone. All of one shape; int32 `numbers` are lost.

    The hash of a number serves two values, with 16 bits each. They become odd multiples of 2^-17:
    their mean is 0, and what is an integer stays nearest to itself. The hash is of 32 bits with two
    keys; shifts and multipliers are those of `lowbias32` (C. Wellons, hash-prospector). A product
    of int32 wraps, the same on every device; one with a power of two is exact, fused with a sum or
    not.
    """
    x = numbers.bitwise_xor_(_signed(seed))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_(_signed(seed >> 32))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    upper.add_((x >> 15).bitwise_or_(1), alpha=2.0**-17)
    x.bitwise_left_shift_(16).bitwise_right_shift_(15).bitwise_or_(1)
    lower.add_(x, alpha=2.0**-17)


def numbers_of(first_row: int, rows: int, half: int, device: torch.device) -> Tensor:
    """Of the values of a row's lower half, (rows, half), all rows before `first_row` counted."""
    numbers = torch.arange(rows * half, dtype=torch.int32, device=device)
    return numbers.add_(_signed(first_row * half)).view(rows, half)


def _signed(value: int) -> int:
    """The lower 32 bits as an int32."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
