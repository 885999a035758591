"""The first line of the page: whether a run is well, and where one more peer helps most."""

from __future__ import annotations

from typing import Any

import pytest

from web.health import Stage, bottleneck, judge, neediest

TWO = (Stage(2, 0, 10.0), Stage(2, 0, 10.0))
WELL: dict[str, Any] = {
    "state": "training",
    "reason": "",
    "silent_s": 0.5,
    "since_step_s": 1.0,
    "step_times": [1.0] * 10,
    "stages": TWO,
}


def test_healthy() -> None:
    assert judge(**WELL).state == "healthy"


@pytest.mark.parametrize(
    ("state", "change", "says"),
    [
        ("silent", {"silent_s": 60.0}, "not been heard for 1:00"),
        ("silent", {"asked": False}, "first word"),
        ("failed", {"state": "failed", "reason": "disk full"}, "disk full"),
        ("finished", {"state": "finished", "silent_s": 1e6}, "all steps"),
        ("stalled", {"state": "waiting", "reason": "waiting for a peer in stage 1"}, "in stage 1"),
        ("stalled", {"stages": (Stage(1, 0, 1.0), Stage(0, 1, None))}, "stage 1 has no replica"),
        ("stalled", {"since_step_s": 100.0}, "no step was committed for 1:40"),
        ("degraded", {"state": "saving", "reason": "the last checkpoint"}, "the last checkpoint"),
        ("degraded", {"lost": [(0, "silent for 5 s")]}, "stage 0 has lost a replica: silent"),
        ("degraded", {"stages": (Stage(1, 0, 1.0), Stage(3, 0, 1.0))}, "single replica"),
        ("degraded", {"step_times": [1.0] * 9 + [5.0]}, "5.0 times as long"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(state: str, change: dict[str, Any], says: str) -> None:
    health = judge(**{**WELL, **change})
    assert health.state == state
    assert says in health.reason
    assert health.word


def test_slow_runs_are_not_stalled_within_a_few_of_their_steps() -> None:
    slow = {**WELL, "step_times": [60.0] * 5, "since_step_s": 250.0}
    assert judge(**slow).state == "healthy"
    assert judge(**{**slow, "since_step_s": 301.0}).state == "stalled"
    assert judge(**{**slow, "state": "validating", "since_step_s": 301.0}).state == "healthy"


def test_one_replica_each_is_no_trouble() -> None:
    assert judge(**{**WELL, "stages": (Stage(1, 0, 1.0), Stage(1, 0, 1.0))}).state == "healthy"


def test_the_bottleneck() -> None:
    assert bottleneck((Stage(2, 0, 10.0), Stage(2, 0, 5.0), Stage(1, 0, 8.0))) == 1
    assert bottleneck((Stage(2, 0, 10.0), Stage(2, 0, None))) is None
    assert bottleneck((Stage(2, 0, 10.0), Stage(2, 0, 10.1))) is None
    assert bottleneck((Stage(2, 0, 10.0),)) is None
    assert bottleneck(()) is None


@pytest.mark.parametrize(
    ("stages", "stage", "why"),
    [
        ((Stage(2, 0, 9.0), Stage(0, 1, None)), 1, "nobody serves"),
        ((Stage(2, 0, 1.0), Stage(1, 0, 9.0)), 1, "single replica"),
        ((Stage(2, 0, 9.0), Stage(3, 0, 4.0)), 1, "slowest"),
        ((Stage(3, 0, None), Stage(2, 0, None)), 1, "fewest"),
        ((Stage(2, 0, 9.0), Stage(2, 0, 9.0)), 0, "alike"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_help_is_needed(stages: tuple[Stage, ...], stage: int, why: str) -> None:
    assert neediest(stages)[0] == stage
    assert why in neediest(stages)[1]
