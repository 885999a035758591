"""How many microbatches may be under way."""

from __future__ import annotations

import math

from swarm.credits import LONG, MOST, RECENT, SPARE, Transit, slots


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
    transit = Transit()
    for tenths in (10, 11, 10, 11, 14, 12, 13, 13, 12, 11, 90):
        transit.note(tenths / 10, [])
    assert transit.seconds == 1.4
    for _ in range(RECENT):  # what was before is forgotten
        transit.note(1.2, [])
    assert transit.seconds == 1.2


def test_what_queues_in_a_full_line_counts_no_more_than_half_again_the_rest() -> None:
    transit = Transit()
    for number in range(RECENT):
        transit.note(0.2 if number % 4 == 0 else 4.0, [])
    assert transit.seconds == MOST * 0.2


def test_a_queue_is_not_taken_for_the_line_until_it_has_stood_for_long() -> None:
    # More under way makes it longer, and that would ask for more again.
    transit = Transit()
    for _ in range(LONG // 4):
        transit.note(0.5, [])
    for _ in range(LONG // 2):
        transit.note(2.0, [])
    assert transit.seconds == MOST * 0.5


def test_a_line_that_became_longer_is_believed_in_the_end() -> None:
    transit = Transit()
    for _ in range(LONG):
        transit.note(0.5, [])
    for _ in range(LONG):
        transit.note(0.9, [])
    assert transit.seconds == 0.9


def test_one_that_lies_is_outvoted_where_it_is_one_of_many() -> None:
    transit = Transit()
    for number in range(RECENT):
        transit.note(0.4, [(9.0, 0.0, 0.0)] if number % 12 == 0 else [])
    assert transit.seconds == 0.4
