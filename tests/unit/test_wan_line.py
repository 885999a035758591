"""The lines of the lab of home connections (`benchmarks/wan`), without a network."""

from __future__ import annotations

import os

import pytest

from benchmarks.wan._namespaces import LabError, require_root
from benchmarks.wan._profiles import (
    BUFFER_S,
    FIBRE,
    HOME,
    POOR,
    PROFILES,
    Home,
    Line,
    Profile,
    Way,
    ways,
)


def test_a_line_passes_packets_at_its_rate_and_drops_what_its_buffer_does_not_hold() -> None:
    line = Line(12e6)  # 1,500 bytes a millisecond
    ends = [line.send(1500, 0.0) for _ in range(150)]
    passed = [end for end in ends if end is not None]
    assert passed == pytest.approx([0.001 * (n + 1) for n in range(len(passed))])
    assert len(passed) == pytest.approx(BUFFER_S / 0.001, abs=2)
    assert line.dropped == 150 - len(passed)
    assert line.send(1500, 1.0) == pytest.approx(1.001)  # idle again: no time is saved up


def test_two_homes_are_a_round_trip_apart() -> None:
    assert Way(HOME, HOME, seed=0).travel(1.0) == pytest.approx(1.0 + HOME.round_trip_s / 2)


def test_between_unlike_homes_the_way_is_the_mean_of_theirs() -> None:
    there, back = Way(FIBRE, POOR, seed=0), Way(POOR, FIBRE, seed=0)
    mean_s = (FIBRE.round_trip_s + POOR.round_trip_s) / 2
    assert there.travel(1.0) == back.travel(1.0) == pytest.approx(1.0 + mean_s / 2)
    lost = sum(there.travel(float(n)) is None for n in range(20_000))
    assert lost == pytest.approx(20_000 * POOR.loss / 2, rel=0.3)


def test_loss_comes_at_its_rate_and_the_same_seed_loses_the_same() -> None:
    lossy = Home("lossy", 1e6, 1e6, 0.1, loss=0.02)

    def lost(seed: int) -> list[int]:
        way = Way(lossy, lossy, seed)
        return [n for n in range(20_000) if way.travel(float(n)) is None]

    assert len(lost(1)) == pytest.approx(400, rel=0.2)
    assert lost(1) == lost(1) != lost(2)


WAVERING = Home("wavering", 12e6, 6e6, 0.02, jitter_s=0.05)


def test_jitter_delays_and_keeps_the_order() -> None:
    way = Way(WAVERING, WAVERING, seed=0)
    arrivals = [way.travel(0.001 * n) or 0.0 for n in range(500)]
    assert arrivals == sorted(arrivals)
    assert max(at - 0.001 * n for n, at in enumerate(arrivals)) == pytest.approx(0.06, rel=0.1)


def test_packets_that_come_with_pauses_are_late_by_all_parts_of_the_jitter() -> None:
    way = Way(WAVERING, WAVERING, seed=0)
    late = [(way.travel(float(n)) or 0.0) - n - WAVERING.round_trip_s / 2 for n in range(2000)]
    assert min(late) == pytest.approx(0.0, abs=0.001)
    assert max(late) == pytest.approx(WAVERING.jitter_s, abs=0.001)
    assert sum(late) / len(late) == pytest.approx(WAVERING.jitter_s / 2, rel=0.05)


@pytest.mark.parametrize("gap_s", [0.0, 0.0003, 0.004, 0.03])
def test_a_flow_stays_in_order_all_the_way(gap_s: float) -> None:
    """From uplink to downlink, whatever its packets weigh and however they are spaced."""

    def arrivals(seed: int) -> list[float]:
        up, down = Line(WAVERING.up_bps), Line(WAVERING.down_bps)
        way = Way(WAVERING, WAVERING, seed)
        found = []
        for n in range(400):
            left = up.send((1500, 40, 900)[n % 3], n * gap_s)
            came = None if left is None else way.travel(left)
            through = None if came is None else down.send((1500, 40, 900)[n % 3], came)
            found += [] if through is None else [through]
        return found

    assert len(arrivals(3)) > 50
    assert arrivals(3) == sorted(arrivals(3)) == arrivals(3)
    assert arrivals(3) != arrivals(4)


def test_each_way_draws_for_itself() -> None:
    homes = [WAVERING] * 3
    first = [way.travel(0.0) for there in ways(homes, 5) for way in there]
    assert len(set(first)) == 9
    assert first == [way.travel(0.0) for there in ways(homes, 5) for way in there]
    assert not set(first) & {way.travel(0.0) for there in ways(homes, 6) for way in there}


def test_a_mixed_lab_has_every_kind_of_home_and_one_that_is_poor() -> None:
    mixed = PROFILES["mixed"]
    homes = [mixed.of(number) for number in range(7)]  # a leader, three stages of two replicas
    assert [home.name for home in homes if home] == [
        "home", "fibre", "poor", "home", "fibre", "home", "fibre",
    ]  # fmt: skip
    assert all(home.jitter_s for home in homes if home)
    assert mixed.of(7) == mixed.of(0)
    assert mixed.lossy
    assert mixed.emulated


def test_hosts_of_a_profile_are_alike_and_a_bridge_has_no_homes() -> None:
    assert {PROFILES["home"].of(number) for number in range(5)} == {HOME}
    assert Profile("lan").of(3) is None
    assert not PROFILES["lan"].emulated


def test_the_lab_says_that_it_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root: run it with sudo"):
        require_root()
