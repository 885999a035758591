"""The arithmetic of a round, over memory that tensors share with the wire.

numpy and not torch: one thread, no dispatch. An addition and a rounding to float32 are defined to
the bit by IEEE 754, so who computes them does not matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swarm.wire.codecs import Buffer, TensorMeta, WireTensor, decode, encode

DTYPES = {"float64": torch.float64, "float32": torch.float32}
_PIECE = 1 << 18


def byte_view(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    """The bytes of a flat CPU tensor, shared. ValueError for any other tensor."""
    if (
        tensor.dim() != 1
        or tensor.dtype != dtype
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"expected a flat contiguous {dtype} tensor on the CPU, "
            f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )
    return tensor.detach().numpy().data.cast("B") if tensor.numel() else memoryview(b"")


def sum_rounded(terms: Sequence[np.ndarray], work: np.ndarray, out: np.ndarray) -> None:
    """out = float32(terms[0] + terms[1] + …), added from left to right in the terms' dtype.

    Overflow gives inf, as it does in torch; the caller looks for it once over all. Whose NaN comes
    through an addition, and with which sign one is born, differs between processors: here it is
    always the same, since in a direct round every member adds for itself.
    """
    with np.errstate(all="ignore"):
        np.add(terms[0], terms[1], out=work)
        for term in terms[2:]:
            np.add(work, term, out=work)
        np.copyto(out, work, casting="same_kind")
    nan = np.isnan(out)
    if nan.any():
        out[nan] = np.nan


def encode_chunk(values: np.ndarray, codec: str) -> Buffer:
    """The bytes of a chunk of float64 or float32 values, by way of float32."""
    return encode(torch.from_numpy(values).to(torch.float32), codec).data


def decode_chunk(data: Buffer, num_elements: int, codec: str) -> np.ndarray:
    """Fresh float32 values. Raises WireError if the bytes are not those of that many."""
    meta = TensorMeta("float32", (num_elements,), codec, len(data))
    decoded: np.ndarray = decode(WireTensor(meta, data)).numpy()
    return decoded


async def round_alone(local: Tensor, out: Tensor) -> None:
    """The all-reduce of a group of one, in pieces that leave the event loop its turns."""
    for start in range(0, local.numel(), _PIECE):
        out[start : start + _PIECE].copy_(local[start : start + _PIECE])
        await asyncio.sleep(0)
