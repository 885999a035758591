"""Which steps a joiner asks its donors for: none of them alone says where the run is."""

from __future__ import annotations

import pytest

from peer.donors import REUSE_STEPS, steps_to_ask

FAR = 10**6


@pytest.mark.parametrize(
    ("at", "held", "begun", "asked"),
    [
        ([7], [[]], None, [7, 8]),  # now; or, if that is over, soon
        ([7, 7], [[6], [6, 7]], None, [6, 7, 8]),  # a copy of two first, and a young one
        ([7, 8], [[], []], None, [7, 8, 9]),
        ([7, 7], [[2], []], None, [7, 8, 2]),  # an old copy only if there is no room for another
        ([7, 7], [[2], []], 2, [2, 7, 8]),  # of which some is here
        ([7, 7], [[], []], 2, [7, 8]),  # which nobody has any more
        ([7, 7, FAR], [[], [], [FAR]], None, [7, 8, FAR, FAR + 1]),  # fewer than half: last
        ([7, 0], [[], []], None, [0, 1, 8]),  # of two either may be behind
    ],
)
def test_the_best_step_first(
    at: list[int], held: list[list[int]], begun: int | None, asked: list[int]
) -> None:
    assert steps_to_ask(at, held, begun) == asked


def test_a_copy_is_young_for_a_few_steps() -> None:
    now = 10
    assert steps_to_ask([now], [[now - REUSE_STEPS]], None)[0] == now - REUSE_STEPS
    assert steps_to_ask([now], [[now - REUSE_STEPS - 1]], None)[0] == now
