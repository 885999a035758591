"""How many microbatches may be under way."""

from __future__ import annotations

import math

from swarm.credits import SPARE, Transit, slots


def test_short_lines_need_one_per_replica_and_some_to_spare() -> None:
    assert slots([[8, 8], [8, 8], [8, 8]], rate=22.0, transit_s=0.002, least=2) == [3 + SPARE] * 3


def test_what_is_on_the_way_is_added() -> None:
    # 22 microbatches a second that are 0.25 s on their way: 5.5 more in all, 3 per replica
    assert slots([[9, 9]] * 3, rate=22.0, transit_s=0.25, least=2) == [3 + 3 + SPARE] * 3


def test_a_stage_with_few_replicas_holds_more_at_each() -> None:
    assert slots([[99], [99, 99, 99]], rate=0.0, transit_s=0.0, least=2) == [4 + SPARE, 2 + SPARE]


def test_never_more_than_a_replica_can_hold() -> None:
    assert slots([[8, 3], [8, 8]], rate=100.0, transit_s=math.pi, least=5) == [3, 8]


def test_an_empty_stage_gets_the_least() -> None:
    assert slots([[], [8]], rate=0.0, transit_s=0.0, least=5) == [5, 5]


def test_transit_is_what_no_replica_did() -> None:
    transit = Transit()
    assert transit.seconds == 0.0
    transit.note(1.0, [(0.1, 0.2, 0.3), (0.1, 0.1, 0.0)])
    assert math.isclose(transit.seconds, 0.2)
    transit.note(0.5, [(0.1, 0.2, 9.0)])  # one that lies
    assert transit.seconds == 0.0


def test_nine_of_ten_are_on_their_way_no_longer() -> None:
    """Those of the step before; in the first step there are none, and the least counts."""
    transit = Transit()
    for tenths in (10, 14, 11, 16, 19, 12, 13, 15, 18, 17):
        transit.note(tenths / 10, [])
    assert transit.seconds == 1.0
    transit.begin_step()
    assert transit.seconds == 1.8
    transit.note(1.3, [])
    assert transit.seconds == 1.8
    transit.begin_step()
    assert transit.seconds == 1.3
    transit.begin_step()  # one in which nothing was answered
    assert transit.seconds == 1.3


def test_a_line_that_is_full_does_not_ask_for_ever_more() -> None:
    """At most twice the least of two steps."""
    transit = Transit()
    transit.note(0.2, [])
    transit.note(4.0, [])
    transit.begin_step()
    assert transit.seconds == 2 * 0.2
    transit.note(4.0, [])
    assert transit.seconds == 2 * 0.2
    transit.begin_step()
    assert transit.seconds == 4.0
