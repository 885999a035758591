"""What seeds stochastic rounding at a boundary: pinned, since both ends of it run the same code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm.wire import boundaries
from swarm.wire.boundaries import BoundaryCodecs

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
TEXT = "RUN_SEED/STEP/INDEX/BOUNDARY/DIRECTION/PLACE"
# The first 8 bytes of `printf 7/3/5/1/forward/0 | sha256sum`, the last of them first. One line for
# the text that the others differ from in one part.
SEEDS = {
    "7/3/5/1/forward/0": 0x2F3B75913DC1C451,
    "8/3/5/1/forward/0": 0xF6264F560C34E963,
    "7/4/5/1/forward/0": 0x5A8F7B972DB9D997,
    "7/3/6/1/forward/0": 0x05B6070F95F30508,
    "7/3/5/2/forward/0": 0x17749DB93830C69F,
    "7/3/5/1/backward/0": 0xD18A2D35A056304E,
    "7/3/5/1/forward/1": 0x2F3DB9486CE9B000,
}


def drawn(
    monkeypatch: pytest.MonkeyPatch, codecs: BoundaryCodecs, *sent: object
) -> list[int | None]:
    """The seeds that three tensors are encoded with, in their order."""
    seeds: list[int | None] = []
    monkeypatch.setattr(boundaries, "pack", lambda tensor, codec, seed: seeds.append(seed))
    codecs.pack([torch.ones(2)] * 3, *sent)  # type: ignore[arg-type]
    return seeds


def test_the_seed_is_of_the_text_in_the_protocol() -> None:
    assert f"the sha256 over the text `{TEXT}`" in PROTOCOL.read_text()
    base, *others = (text.split("/") for text in SEEDS)
    changed = [[was != part for was, part in zip(base, each, strict=True)] for each in others]
    assert sorted(changed) == [[at == n for at in range(6)] for n in reversed(range(6))]


@pytest.mark.parametrize("text", SEEDS)
def test_every_part_of_it_counts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_seed, step, index, boundary, direction, place = text.split("/")
    codecs = BoundaryCodecs("int8", "int4", seed=int(run_seed))
    seeds = drawn(monkeypatch, codecs, int(boundary), direction, (int(step), int(index)))
    assert len({*seeds}) == 3
    assert seeds[int(place)] == SEEDS[text]


def test_what_rounds_to_nearest_has_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation, which is no microbatch of a step, and a run without stochastic rounding."""
    codecs = BoundaryCodecs("int8", "int8", seed=7)
    assert drawn(monkeypatch, codecs, 1, "forward", None) == [None] * 3
    assert drawn(monkeypatch, BoundaryCodecs("int8", "int8"), 1, "forward", (3, 5)) == [None] * 3
