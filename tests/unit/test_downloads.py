"""Which chunk is asked of which donor, when no more are missing than are on their way."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch

from peer.downloads import Download
from peer.snapshots import Description, digest
from swarm.sim.virtual_time import run

CHUNKS = 12
STATE = torch.arange(float(CHUNKS))


def test_what_slow_donors_owe_is_asked_of_the_fast_one_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of three take seconds for a chunk. The third gives theirs as well, and no chunk that is
    here already is asked for again, although the slow ones still owe it."""
    digests = b"".join(digest(STATE[i : i + 1]) for i in range(CHUNKS))
    download = Download(Description(1, 1, "", b"", (("parameters", CHUNKS),), 1, digests))
    asked: Counter[tuple[str, int]] = Counter()

    async def fetch(donor: Any, index: int, since: object) -> torch.Tensor:
        asked[donor, index] += 1
        await asyncio.sleep(0.01 if donor == "fast" else 2.0)
        return STATE[index : index + 1]

    monkeypatch.setattr(download, "_fetch", fetch)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await download.run({each: each for each in ("slow", "slower", "fast")})  # type: ignore[dict-item]
        return loop.time() - began

    assert run(main()) < 1.0
    assert set(asked.values()) == {1}
    assert {index for donor, index in asked if donor == "fast"} == set(range(CHUNKS))
    assert torch.equal(download.snapshot().tensors["parameters"], STATE)
