"""Shape and dtype of a tensor that crosses a boundary: what a stage expects before it allocates."""

from __future__ import annotations

import math
from dataclasses import dataclass

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's shape and dtype name (`"float32"`, `"uint8"`, …), without its data. Integers that
    index something are 0 or more and below `below`."""

    shape: tuple[int, ...]
    dtype: str
    below: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


def token_dtype(vocab_size: int) -> str:
    """Narrowest dtype tokens of this vocabulary ride in: it is what the call header costs."""
    if vocab_size <= 2**8:
        return "uint8"
    return "uint16" if vocab_size <= 2**16 else "int32"
