"""The lines of the lab of home connections (`benchmarks/wan`), without a network."""

from __future__ import annotations

import os

import pytest

from benchmarks.wan._namespaces import LabError, require_root
from benchmarks.wan._profiles import BUFFER_S, PROFILES, Line, Profile, Way


def test_a_line_passes_packets_at_its_rate_and_drops_what_its_buffer_does_not_hold() -> None:
    line = Line(12e6)  # 1,500 bytes a millisecond
    ends = [line.send(1500, 0.0) for _ in range(150)]
    passed = [end for end in ends if end is not None]
    assert passed == pytest.approx([0.001 * (n + 1) for n in range(len(passed))])
    assert len(passed) == pytest.approx(BUFFER_S / 0.001, abs=2)
    assert line.dropped == 150 - len(passed)
    assert line.send(1500, 1.0) == pytest.approx(1.001)  # idle again: no time is saved up


def test_two_homes_are_a_round_trip_apart() -> None:
    home = PROFILES["home"]
    way = Way(home, seed=0)
    assert way.travel(1.0) == pytest.approx(1.0 + home.round_trip_s / 2)


def test_loss_comes_at_its_rate_and_the_same_seed_loses_the_same() -> None:
    def lost(seed: int) -> list[int]:
        way = Way(Profile("lossy", 1e6, 1e6, 0.1, loss=0.02), seed)
        return [n for n in range(20_000) if way.travel(float(n)) is None]

    assert len(lost(1)) == pytest.approx(400, rel=0.2)
    assert lost(1) == lost(1) != lost(2)


def test_jitter_delays_and_keeps_the_order() -> None:
    way = Way(Profile("wavering", 1e6, 1e6, 0.02, jitter_s=0.05), seed=0)
    arrivals = [way.travel(0.001 * n) or 0.0 for n in range(500)]
    assert arrivals == sorted(arrivals)
    assert max(at - 0.001 * n for n, at in enumerate(arrivals)) == pytest.approx(0.06, rel=0.1)


def test_the_lab_says_that_it_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root: run it with sudo"):
        require_root()
