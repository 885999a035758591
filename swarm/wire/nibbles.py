"""Blockwise int4: 4 bits a value and one byte of scale for at most 8 values of one token.

What. `quantize` writes a tensor as `[exponent][scales][integers]`, `dequantize` reads it back
(docs/protocol.md states the bytes). 5 bits a value; a token of a subspace of 8 is 5 bytes.

Why blocks of 8 inside a row of the last dimension. Tokens differ, their gradients a hundredfold,
so that a scale for several of them loses the small ones; and int4 is so coarse that a smaller
block is worth its scale: the error of activations is 0.066 of their norm, with 64 values a scale
it was 0.11 (docs/decisions/thin-boundaries.md).

Why a block has its own sign. Two's complement goes from -8 to 7. A block whose largest value is
positive is *turned*, its scale negative, so that the larger side always has the eighth step: all 16
codes are in use, and nothing needs clipping.

Why 8-bit scales that share an exponent. Sign, 4 bits of exponent and 3 of mantissa, below the
largest scale of the tensor: 15 octaves, and 3 more in which values get less than their four bits.
A scale is the upper 11 bits of a float32, so finding it is adding and shifting integers.

Why a block's values are apart in their row: w / 8 of them, rounded up. A row is then a matrix with
a block in each *column*; all first values of a piece's blocks are put beside each other, all second
ones, and so on, and everything goes over long stretches of memory, which reductions over 8
neighbours do not. Which values share a scale makes no difference, since channels have no order.

What was decoded encodes to the same values again. What makes the bytes the same on every device is
said in `swarm.wire.blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.wire.blocks import add_noise, numbers_of, rounded_finite

MOST_DEPTH = 8
_LOWEST, _HIGHEST = -8.0, 7.0
_PIECE = 1 << 20  # values: in less, calling the operations takes as long as they do
_SHIFT = 20  # a float32 without its lower 20 bits: sign, 8 bits of exponent, 3 of mantissa
_LEAST_TOP = 2 << 3  # of a scale of 2^-125: a reciprocal must not leave float32
_INFINITY = 0x7F800000
_MOST_CODE, _NAN_CODE, _TURNED = 126, 127, 128


class Layout(NamedTuple):
    """A tensor as `rows` of `depth` times `blocks` slots, of which the first `width` are in use.

    Column j of a row is its block j. `depth` is even, and as small as the number of blocks allows.
    """

    rows: int
    width: int
    depth: int
    blocks: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> Layout:
        width = shape[-1] if shape else 1
        blocks = max(1, -(-width // MOST_DEPTH))
        return cls(math.prod(shape[:-1]), width, 2 * -(-width // (2 * blocks)), blocks)

    @property
    def slots(self) -> int:
        return self.depth * self.blocks

    def pieces(self, device: torch.device) -> list[slice]:
        """Rows that stay in the cache of a CPU."""
        size = max(1, _PIECE // self.slots) if device.type == "cpu" else self.rows
        return [slice(at, min(at + size, self.rows)) for at in range(0, self.rows, size)]


def packed_bytes(shape: Sequence[int]) -> int:
    """Bytes of a tensor of that shape."""
    if not math.prod(shape):
        return 0
    rows, _, depth, blocks = Layout.of(shape)
    return 1 + rows * blocks * (1 + depth // 2)


def quantize(values: Tensor, seed: int | None = None) -> Tensor:
    """Contiguous float32 `values` as a flat uint8 tensor on their device.

    With a `seed` (64 bits) rounding is stochastic: up or down with a chance that makes the mean
    right, except for the largest of a block. A block that holds inf or NaN becomes NaN as a whole.
    """
    device, layout = values.device, Layout.of(values.shape)
    packed = torch.empty(packed_bytes(values.shape), dtype=torch.uint8, device=device)
    if not len(packed):
        return packed
    rows, width, depth, blocks = layout
    table = values.view(rows, width)
    if width < layout.slots:
        table = F.pad(table, (0, layout.slots - width))
    table = table.view(rows, depth, blocks)
    exponent, codes, integers = _parts(packed, layout)
    most, step = (torch.empty((rows, blocks), device=device) for _ in range(2))
    pieces, half = layout.pieces(device), depth // 2
    planes = torch.empty((depth, *table[pieces[0]][:, 0].shape), device=device)
    peaks = []
    for part in pieces:
        work = planes[:, : len(table[part])].copy_(table[part].transpose(0, 1))
        peaks.append(_steps(work, most[part], step[part]))
    exponent.copy_(_top(torch.stack(peaks).amax()) >> 3)
    floor = _floor(exponent)
    for part in pieces:
        work = planes[:, : len(table[part])]
        if len(pieces) > 1:
            work.copy_(table[part].transpose(0, 1))
        factor, finite = _scales(most[part], step[part], floor, codes[part])
        work.mul_(factor)
        if seed is not None:
            numbers = numbers_of(part.start, len(factor), half * blocks, device)
            numbers = numbers.view(-1, half, blocks).transpose(0, 1).contiguous()
            add_noise(work[:half], work[half:], numbers, seed)
            work.clamp_(_LOWEST, _HIGHEST)
        nibbles = rounded_finite(work, finite).to(torch.int8)
        both = nibbles[half:].mul_(16).bitwise_or_(nibbles[:half].bitwise_and_(15))
        integers[part].view(-1, half, blocks).copy_(both.transpose(0, 1))
    return packed


def _parts(packed: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the packed bytes: exponent (1), scales (rows, blocks), integers (rows, slots/2)."""
    num_scales = layout.rows * layout.blocks
    exponent, codes, integers = packed.split((1, num_scales, len(packed) - 1 - num_scales))
    shape = (layout.rows, layout.blocks)
    return exponent, codes.view(shape), integers.view(torch.int8).view(layout.rows, -1)


def _steps(planes: Tensor, most: Tensor, step: Tensor) -> Tensor:
    """Write the largest value of each block, and the least step it can do with; the largest step.

    `planes` has a block's values in its first dimension. The step of a block that is not finite is
    not finite.
    """
    torch.amax(planes, 0, out=most)
    least = torch.amin(planes, 0).neg_()
    larger, smaller = torch.maximum(most, least), torch.minimum(most, least)
    larger.div_(larger.new_full((1,), -_LOWEST))
    torch.maximum(larger, smaller.div_(smaller.new_full((1,), _HIGHEST)), out=step)
    return step.nan_to_num(0.0, 0.0).amax()


def _scales(most: Tensor, step: Tensor, floor: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Write the scales; what to multiply each block with (0: with nothing), and if it is finite.

    Integers that are clamped, since choosing by a mask takes several times as long.
    """
    top = _top(step)
    code = (top - floor).clamp_(1, _NAN_CODE)  # what is not finite is above all codes
    usable = (top - (_LEAST_TOP - 1)).clamp_(0, 1)
    code.mul_(usable)
    usable.mul_((_NAN_CODE - code).clamp_(0, 1))
    scale = (code + floor).clamp_(_LEAST_TOP).bitwise_left_shift_(_SHIFT).view(torch.float32)
    factor = scale.reciprocal_().mul_(usable)
    turned = (most * factor >= _HIGHEST + 0.5).to(torch.int32)
    finite = code < _NAN_CODE
    codes.copy_(code.bitwise_or_(turned << 7))
    factor.view(torch.int32).bitwise_xor_(turned.bitwise_left_shift_(31))
    return factor, finite


def _top(step: Tensor) -> Tensor:
    """The upper bits of the nearest scale; those of infinity for what is not finite."""
    magnitude = step.view(torch.int32).bitwise_and(0x7FFFFFFF).clamp_(max=_INFINITY)
    return magnitude.add_(1 << (_SHIFT - 1)).bitwise_right_shift_(_SHIFT)


def _floor(exponent: Tensor) -> Tensor:
    """What code 0 would be: `_MOST_CODE` is the largest scale with this exponent."""
    return exponent.to(torch.int32) * 8 + (7 - _MOST_CODE)


def dequantize(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Float32 values, in new memory, from `packed_bytes(shape)` uint8 bytes.

    Defined for all bytes: a scale may be anything, and then so may the values (NaN for NaN).
    """
    if not len(packed):
        return torch.empty(tuple(shape), dtype=torch.float32, device=packed.device)
    layout = Layout.of(shape)
    exponent, codes, integers = _parts(packed, layout)
    half, scales = layout.slots // 2, _all_scales(exponent)
    values = torch.empty((layout.rows, layout.slots), device=packed.device)
    for part in layout.pieces(packed.device):
        code = codes[part].to(torch.int32)
        scale = scales.index_select(0, code.view(-1)).view(-1, 1, layout.blocks)
        out = values[part]
        out[:, :half].copy_((integers[part] << 4) >> 4)
        out[:, half:].copy_(integers[part] >> 4)
        out.view(-1, layout.depth, layout.blocks).mul_(scale)
    return values[:, : layout.width].contiguous().view(tuple(shape))


def _all_scales(exponent: Tensor) -> Tensor:
    """What each of the 256 bytes of a scale says below this exponent."""
    code = torch.arange(_TURNED, dtype=torch.int32, device=exponent.device)
    top = (code + _floor(exponent)) & 0x7FF
    scale = top.bitwise_left_shift_(_SHIFT).view(torch.float32)
    scale[0], scale[_NAN_CODE] = 0.0, math.nan
    return torch.cat((scale, -scale))
