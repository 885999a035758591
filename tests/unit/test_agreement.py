"""Whose state counts when replicas differ, and when a device counts as hung."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.agreement import agree, decided
from swarm.compute import InlineCompute, Kind, WatchedCompute
from swarm.errors import StageFailedError
from swarm.names import brief
from swarm.patience import patience_s, worth_waiting_s
from swarm.sim.virtual_time import run

marks = st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from("xyz"), min_size=1)


@given(marks, st.permutations(list("abcdefg")))
def test_somebody_keeps_the_state_and_a_majority_is_never_told_to_start_anew(
    said: dict[str, str], arrivals: list[str]
) -> None:
    verdict = agree(said, arrivals)
    keep = [name for name in said if name not in verdict.differing]
    assert keep
    assert {said[name] for name in keep} == {verdict.agreed}
    assert verdict.tie == (2 * len(keep) <= len(said))
    for mark in said.values():
        if 2 * list(said.values()).count(mark) > len(said):
            assert verdict.agreed == mark


def test_of_two_the_one_that_came_first_is_believed() -> None:
    assert agree({"a": "x", "b": "y"}, ["b", "a"]) == ("y", ("a",), True)
    assert agree({"a": "x", "b": "y"}, ["a"]) == ("x", ("b",), True)
    assert agree({"a": "x", "b": "y", "c": "y"}, ["a", "b", "c"]) == ("y", ("a",), False)
    with pytest.raises(ValueError, match="nobody"):
        agree({}, [])


def test_it_is_decided_as_soon_as_nobody_can_change_it() -> None:
    assert not decided({"a": "x"}, 2)
    assert decided({"a": "x", "b": "y"}, 2)
    assert decided({"a": "x", "b": "x"}, 3)
    assert not decided({"a": "x", "b": "y"}, 3)
    assert not decided({}, 1)


@given(st.floats(1e-4, 1e4), st.floats(1.0, 50.0), st.integers(0, 20))
def test_fifty_times_slower_than_its_twin_is_not_hung(
    twin_s: float, factor: float, strikes: int
) -> None:
    assert patience_s(None, [twin_s], [1e-4], strikes=strikes) > factor * twin_s
    assert patience_s(twin_s, [], []) >= 10 * twin_s
    assert patience_s(twin_s, [], [], updating=True) > patience_s(twin_s, [], [])


def test_patience_doubles_with_every_wrong_verdict_up_to_a_limit() -> None:
    values = [patience_s(1.0, [], [], strikes=strikes) for strikes in range(13)]
    assert values[1] == 2 * values[0]
    assert values[-1] == values[-2] == 1024 * values[0]
    assert patience_s(None, [], []) == 300.0


def test_a_watched_device_says_for_how_long_it_has_finished_nothing() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        inner = InlineCompute(lambda kind: 4.0)
        compute = WatchedCompute(inner)
        assert compute.silent_s() == 0.0
        await asyncio.sleep(100.0)
        first = loop.create_task(compute.run(Kind.FORWARD, lambda: 1))
        second = loop.create_task(compute.run(Kind.UPDATE, lambda: 1 // 0))
        await asyncio.sleep(3.0)
        assert (compute.silent_s(), compute.updating) == (3.0, True)
        assert (await first).value == 1
        await asyncio.sleep(1.0)
        assert compute.silent_s() == 1.0
        with pytest.raises(StageFailedError):
            await second
        assert (compute.silent_s(), compute.updating) == (0.0, False)
        assert compute.counts is inner.counts
        await compute.aclose()

    run(main(), limit_s=1000)


def test_reasons_name_peers_by_their_last_letters() -> None:
    peer = "12D3KooWGBfV8gU9aBcDeFgHiJkMnPqRsTuVwXyZ1234567abcde"
    assert brief(f"lost {peer}#0a1b2c3d: silent") == "lost 67abcde#0a1b2c3d: silent".replace(
        "67abcde", peer[-8:]
    )
    assert brief("short words stay") == "short words stay"
    assert len(brief("a b " * 500)) == 160


def test_a_silent_replica_is_waited_for_as_long_as_its_share_takes_others() -> None:
    assert worth_waiting_s(10, [0.5]) == 5.0
    assert worth_waiting_s(10, [0.5, 0.5]) == 2.5
    assert worth_waiting_s(0, [0.5]) == 0.0
    assert worth_waiting_s(10, []) == worth_waiting_s(10, [0.0]) == 0.0  # nobody is measured
