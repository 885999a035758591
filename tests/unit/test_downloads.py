"""Which chunk is asked of which donor, when no more are missing than are on their way."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch

from peer.downloads import CHUNK_S, Download
from peer.snapshots import Description, digest
from swarm.errors import RefusedError
from swarm.sim.virtual_time import run

CHUNKS = 12
STATE = torch.arange(float(CHUNKS))


def described(chunks: int = CHUNKS) -> Description:
    digests = b"".join(digest(STATE[i : i + 1]) for i in range(chunks))
    return Description(1, 1, "", b"", (("parameters", chunks),), 1, digests)


def test_what_slow_donors_owe_is_asked_of_the_fast_one_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of three take seconds for a chunk. The third gives theirs as well, and no chunk that is
    here already is asked for again, although the slow ones still owe it."""
    download = Download(described())
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


async def fetch_from(download: Download, *donors: str) -> float:
    """How long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await download.run({each: each for each in donors})  # type: ignore[misc]
    return loop.time() - began


def test_two_that_give_nothing_do_not_keep_the_chunks_that_both_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that is left is under way from the two of them, and the third has nothing to do."""
    download = Download(described(chunks=3))

    async def fetch(donor: Any, index: int, since: object) -> torch.Tensor:
        if donor != "honest":
            await asyncio.Event().wait()
        return STATE[index : index + 1]

    monkeypatch.setattr(download, "_fetch", fetch)
    took = run(fetch_from(download, "silent", "mute", "honest"), limit_s=2 * CHUNK_S)
    assert took == pytest.approx(CHUNK_S)
    assert download.late == {"silent", "mute"}
    assert download.fetched == {"honest": 3}


def test_who_is_alone_and_gives_no_more_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it gave stays, and the next time only the rest is asked for."""
    download, asked = Download(described()), list[int]()

    async def fetch(donor: Any, index: int, since: object) -> torch.Tensor:
        asked.append(index)
        if donor == "tired" and len(asked) > 5:
            await asyncio.Event().wait()
        await asyncio.sleep(1.0)
        return STATE[index : index + 1]

    monkeypatch.setattr(download, "_fetch", fetch)

    async def main() -> float:
        with pytest.raises(RefusedError, match="no donor is left, 42% of the state is here"):
            await fetch_from(download, "tired")
        assert download.late == {"tired"}
        asked.clear()
        return await fetch_from(download, "next")

    assert run(main(), limit_s=2 * CHUNK_S) < 10.0
    assert sorted(asked) == list(range(5, CHUNKS))
    assert not download.late


def test_a_line_that_carries_a_chunk_in_minutes_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last of a window comes after much longer than the limit: it waits behind the others."""
    download, line = Download(described()), asyncio.Lock()
    chunk_s = 0.9 * CHUNK_S

    async def fetch(donor: Any, index: int, since: object) -> torch.Tensor:
        async with line:
            await asyncio.sleep(chunk_s)
        return STATE[index : index + 1]

    monkeypatch.setattr(download, "_fetch", fetch)
    took = run(fetch_from(download, "thin"), limit_s=2 * CHUNKS * CHUNK_S)
    assert took == pytest.approx(CHUNKS * chunk_s)
    assert not download.late
