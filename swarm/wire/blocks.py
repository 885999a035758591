"""Blockwise quantisation: float32 values as int8 or int4 with one bfloat16 scale per 64 of them.

What. `quantize` writes a flat tensor as `[scales][integers]`, `dequantize` reads it back
(docs/protocol.md states the bytes). A block's scale is its largest magnitude / 127 (7 for int4),
rounded to bfloat16; its values are multiples of the scale, rounded to nearest even, so the error
is at most half a scale. Blocks are consecutive elements, 64 as in QLoRA (Dettmers et al. 2023),
since one outlier coarsens only its block. int4 is linear and not its NF4: gradients are not normal
and a product decodes faster than a table.

Why a bfloat16 scale. It has float32's range, which float16 lacks (gradients of a mean are 1e-8),
for half the bytes: 8.25 and 4.25 bits a value. Rounding it moves the largest quotient to between
126.5 and 127.5 (6.97 and 7.03), which still rounds to 127 (7): nothing needs clipping, and what
was decoded encodes to the same bytes again.

The same bytes on every device: division, product, maximum, comparison and conversions only, each
of which IEEE 754 or integer arithmetic defines to the bit; one operation at a time, none fused.
What is divided by is a tensor, since CUDA multiplies by the reciprocal of a number: of 4 million
int4 blocks, 32 would get another scale. NaN is never converted to an integer. Stochastic rounding
adds noise that is an integer hash of the element's number and a seed, so the same seed gives the
same bytes, in whatever pieces.

On a CPU the work goes through pieces that stay in the cache; on other devices in one piece.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 64
SCALE_BYTES = 2
LEVELS = {8: 127.0, 4: 7.0}
_PIECE_BLOCKS = 4096  # 1 MiB of float32
_LEAST_SCALE = 2.0**-125  # below, a block is zero: its reciprocal would leave float32
_NAN_SCALE = 0x7FC0


def num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def packed_bytes(num_elements: int, bits: int) -> int:
    """Bytes of `num_elements` values: the last block is filled up with zeros."""
    return num_blocks(num_elements) * (SCALE_BYTES + BLOCK * bits // 8)


def quantize(values: Tensor, bits: int, seed: int | None = None) -> Tensor:
    """Flat contiguous float32 `values` as a flat uint8 tensor on their device.

    With a `seed` (64 bits) rounding is stochastic: up or down with a chance that makes the mean
    right, except for the largest of a block. A block that holds inf or NaN becomes NaN as a whole.
    """
    count, device = num_blocks(values.numel()), values.device
    packed = torch.empty(packed_bytes(values.numel(), bits), dtype=torch.uint8, device=device)
    scales = packed[: SCALE_BYTES * count].view(torch.int16)
    integers = packed[SCALE_BYTES * count :].view(torch.int8).view(count, BLOCK * bits // 8)
    whole = values.numel() // BLOCK
    blocks = values[: whole * BLOCK].view(whole, BLOCK)
    size = _PIECE_BLOCKS if device.type == "cpu" else max(whole, 1)
    work = torch.empty((min(size, max(whole, 1)), BLOCK), dtype=torch.float32, device=device)
    for start in range(0, whole, size):
        part = slice(start, min(start + size, whole))
        _quantize(blocks[part], bits, seed, start, work, scales[part], integers[part])
    if whole < count:
        rest = values.new_zeros(1, BLOCK)
        rest.view(-1)[: values.numel() - whole * BLOCK] = values[whole * BLOCK :]
        _quantize(rest, bits, seed, whole, work, scales[whole:], integers[whole:])
    return packed


def _quantize(
    blocks: Tensor,
    bits: int,
    seed: int | None,
    first: int,
    work: Tensor,
    scales: Tensor,
    integers: Tensor,
) -> None:
    """`blocks` (n, 64), of which the first is number `first`, into the packed bytes' views."""
    work = work[: len(blocks)]
    levels = LEVELS[bits]
    largest = torch.amax(torch.abs(blocks, out=work), 1)
    rounded = largest.div_(largest.new_full((1,), levels)).to(torch.bfloat16)
    finite = rounded < math.inf  # false for NaN
    usable = finite & (rounded >= _LEAST_SCALE)
    bits_of_scale = torch.where(usable, rounded.view(torch.int16), 0)
    scales.copy_(torch.where(finite, bits_of_scale, _NAN_SCALE))
    inverse = torch.where(usable, torch.reciprocal(rounded.float()), 0.0)
    torch.mul(blocks, inverse.unsqueeze(1), out=work)
    if seed is not None:
        work.add_(_noise(seed, first * BLOCK, work.shape, work.device)).clamp_(-levels, levels)
    work.round_()
    if work.device.type != "cpu" or not bool(finite.all()):
        work.copy_(torch.where(finite.unsqueeze(1), work, 0.0))
    if bits == 8:
        integers.copy_(work)
    else:
        nibbles = work.to(torch.int8)
        half = BLOCK // 2
        nibbles.bitwise_and_(15)
        torch.mul(nibbles[:, half:], 16, out=integers)
        integers.bitwise_or_(nibbles[:, :half])


def dequantize(packed: Tensor, num_elements: int, bits: int) -> Tensor:
    """Flat float32 values, in new memory, from `packed_bytes(num_elements, bits)` uint8 bytes.

    Defined for all bytes: a scale may be anything, and then so may the values (NaN for NaN).
    """
    count = num_blocks(num_elements)
    scales = packed[: SCALE_BYTES * count].view(torch.bfloat16)
    integers = packed[SCALE_BYTES * count :].view(torch.int8).view(count, BLOCK * bits // 8)
    values = torch.empty((count, BLOCK), dtype=torch.float32, device=packed.device)
    size = _PIECE_BLOCKS if packed.device.type == "cpu" else max(count, 1)
    for start in range(0, count, size):
        part = slice(start, min(start + size, count))
        out = values[part]
        if bits == 8:
            out.copy_(integers[part])
        else:
            half = BLOCK // 2
            out[:, :half].copy_((integers[part] << 4) >> 4)
            out[:, half:].copy_(integers[part] >> 4)
        out.mul_(scales[part].float().unsqueeze(1))
    return values.view(-1)[:num_elements]


def _noise(seed: int, first: int, shape: torch.Size, device: torch.device) -> Tensor:
    """Uniform in [-0.5, 0.5), by element number: a 32-bit integer hash with two keys.

    Shifts and multipliers are those of `lowbias32` (C. Wellons, hash-prospector); a product of
    int32 wraps, the same on every device.
    """
    x = torch.arange(math.prod(shape), dtype=torch.int32, device=device)
    x.add_(_signed(first)).bitwise_xor_(_signed(seed))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_(_signed(seed >> 32))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return (x >> 8).to(torch.float32).mul_(2.0**-24).view(shape)


def _signed(value: int) -> int:
    """The lower 32 bits as an int32."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
