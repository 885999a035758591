"""The averaged gradient of a step, from a replica that has it (`peer.snapshots` hands it out).

For who missed the round and is told the record, and for who collects every commit to catch up.
Whoever asks compares its sha256 with the one in the record before it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarm.errors import DeviceError, RefusedError
from swarm.net.channel import Channel
from swarm.spec import TensorSpec
from swarm.wire.codecs import TensorMeta, decode
from swarm.wire.frames import check_tensors

GRADIENT_CHUNK = 1 << 20  # elements; one frame of 4 MiB
CHUNK_S = 300.0  # for one; a line of 1 Mbit/s takes 34 s


async def fetch_gradient(
    channel: Channel, total: int, asked: Mapping[str, Any]
) -> tuple[Tensor, object]:
    """All `total` elements, float32, chunk by chunk, and the record that came with the first.

    `asked` is what the `gradient` call says besides `start` (docs/protocol.md); the record is that
    of a hostile peer, and empty where the step is not committed. Raises SwarmError.
    """
    record: object = b""
    try:
        gradient = torch.empty(total, dtype=torch.float32)
    except (MemoryError, RuntimeError) as error:  # torch's want of memory is one
        what = f"no memory for a gradient of {4 * total} bytes"
        raise DeviceError(what, "free some on this machine") from error
    for start in range(0, max(total, 1), GRADIENT_CHUNK):  # of no elements there is a record too
        length = min(GRADIENT_CHUNK, total - start)

        def check(_: Mapping[str, Any], metas: Sequence[TensorMeta], length: int = length) -> None:
            check_tensors(metas, [TensorSpec((length,), "float32")], "float32")

        try:
            async with asyncio.timeout(CHUNK_S):
                answer = await channel.call(
                    "gradient", {**asked, "start": start}, check_reply=check
                )
        except TimeoutError:
            raise RefusedError(f"no part of a gradient within {CHUNK_S:.0f} s") from None
        record = answer.body.get("record") or record
        gradient[start : start + length] = decode(answer.tensors[0])
    return gradient, record
