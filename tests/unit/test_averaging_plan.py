"""The split of a tensor over an averaging group."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.averaging import Averaging, Prepared
from peer.orders import read_shares
from swarm.averaging.plan import (
    DIRECT_BYTES,
    FIRST_ELEMENTS,
    MAX_SHARE,
    STRIPES,
    balanced_shares,
    chunk_sizes,
    learned_rate,
    learned_rates,
    link_rates,
    make_plan,
    split,
)
from swarm.averaging.round import Limits
from swarm.errors import WireError
from swarm.net.striped import MAX_STRIPES
from swarm.step import Group


@given(st.integers(0, 10_000), st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_parts_and_chunks_cover_everything_once(
    num_elements: int, shares: list[int], data: st.DataObject
) -> None:
    if not sum(shares):
        shares[0] = 1
    members = [f"m{i}" for i in range(len(shares))]
    chunk_elements = data.draw(st.integers(1, 3000))
    plan = make_plan(members, num_elements, "float64", shares=shares, chunk_elements=chunk_elements)
    position = 0
    for member in range(len(members)):
        if plan.direct:
            position = 0
        chunks = list(plan.chunks(member))
        assert len(chunks) == plan.num_chunks(member)
        for chunk in chunks:
            assert chunk.start == position
            assert 0 < chunk.num_elements <= chunk_elements
            position = chunk.stop
        assert plan.part(member).stop == position
        if not shares[member] and not plan.direct:
            assert not chunks
    assert position == num_elements
    sent = sum(plan.sent_bytes(m) for m in range(len(members)))
    of_an_element = 8 * len(members) if plan.direct else 8 + 4
    assert sent == (len(members) - 1) * num_elements * of_an_element
    assert len(list(plan.replies(0))) == (0 if plan.direct else plan.num_chunks(0))


@given(st.integers(0, 1_000_000), st.integers(1024, 1 << 17))
def test_chunks_are_small_at_both_ends(num_elements: int, largest: int) -> None:
    sizes = list(chunk_sizes(num_elements, largest))
    assert sum(sizes) == num_elements
    assert all(0 < size <= largest for size in sizes)
    if num_elements >= 4 * FIRST_ELEMENTS and largest > FIRST_ELEMENTS:
        assert sizes[0] == sizes[-1] == FIRST_ELEMENTS
    assert len(sizes) <= num_elements / largest + 32


def test_shares_are_proportional_and_aligned() -> None:
    assert split(1600, [1, 3, 0]) == (0, 400, 1600, 1600)
    assert all(bound % 16 == 0 for bound in split(100_003, [5, 7, 1])[:-1])


@pytest.mark.parametrize(
    ("num_members", "num_elements", "accumulate", "codec", "direct"),
    [
        (2, 10_000_000, "float32", "float32", True),
        (2, 10_000_000, "float64", "int8", True),
        (2, 10_000_000, "float64", "float32", False),
        (3, 10_000_000, "float32", "int8", False),
        (2, DIRECT_BYTES // 8, "float64", "float32", True),
        (2, DIRECT_BYTES // 8 + 1, "float64", "float32", False),
        (5, DIRECT_BYTES // 16, "float32", "float32", True),
        (5, DIRECT_BYTES // 16 + 1, "float32", "float32", False),
        (5, DIRECT_BYTES // 16 + 1, "float64", "float16", True),
    ],
)
def test_when_everybody_sums_everything(
    num_members: int, num_elements: int, accumulate: str, codec: str, direct: bool
) -> None:
    """Whatever the shares, and at the cost of no more bytes, or few."""
    members = [f"m{i}" for i in range(num_members)]
    for shares in ([1] * num_members, [1] + [0] * (num_members - 1)):
        plan = make_plan(members, num_elements, accumulate, shares=shares, codec=codec)
        assert plan.direct is direct
        sent = plan.sent_bytes(0)
        if direct and num_elements > DIRECT_BYTES:
            parts = replace(plan, direct=False)
            assert sent == pytest.approx(parts.sent_bytes(0), rel=1e-3)  # int8 fills up blocks
        elif direct:
            assert sent <= DIRECT_BYTES


@pytest.mark.parametrize(
    ("num_members", "num_elements", "codec", "expected"),
    [
        (1, 1_000_000, "float32", 1),
        (2, 10, "float32", 1),
        (2, 32_768, "float32", 2),  # of 64 KiB
        (2, 1_000_000, "float32", 8),
        (2, 200_000, "int8", 3),  # all to the other
        (3, 1_000_000, "float32", 2),
        (4, 1_000_000, "float32", 1),
    ],
)
def test_stripes_where_there_is_much_for_few(
    num_members: int, num_elements: int, codec: str, expected: int
) -> None:
    members = [f"m{number}" for number in range(num_members)]
    plan = make_plan(members, num_elements, "float32", codec=codec)
    assert plan.num_stripes(0) == expected


@pytest.mark.parametrize(
    ("num_members", "connections", "expected"),
    [
        *((2, 1, 8), (2, 3, 9), (2, 4, 8), (2, 7, 14), (2, 16, 16)),
        *((3, 3, 3), (4, 4, 4), (4, 16, 16), (100, 16, 2), (1024, 16, 1)),
    ],
)
def test_as_many_stripes_on_each_connection_unless_members_are_many(
    num_members: int, connections: int, expected: int
) -> None:
    """All of a group may wait for one member, who holds a bounded number of streams."""
    members = sorted(f"m{number}" for number in range(num_members))
    plan = make_plan(members, num_members * 500_000, "float32")
    assert plan.num_stripes(0, connections) == expected
    assert num_members * expected <= Limits().max_parked


def test_stripes_go_by_what_a_member_sums() -> None:
    plan = make_plan(["a", "b"], 1_000_000, "float64", shares=[1, 1023])
    assert [plan.num_stripes(owner) for owner in range(2)] == [1, 8]
    assert max(STRIPES.values()) <= MAX_STRIPES


def test_digest_tells_plans_apart() -> None:
    plans = [
        make_plan(["a", "b"], 100, "float64"),
        make_plan(["a", "c"], 100, "float64"),
        make_plan(["a", "b"], 101, "float64"),
        make_plan(["a", "b"], 100, "float32"),
        make_plan(["a", "b"], 100, "float64", shares=[1, 2]),
        make_plan(["a", "b"], 100, "float64", chunk_elements=7),
        make_plan(["a", "b"], 100, "float64", codec="int8"),
        replace(make_plan(["a", "b"], 100, "float64"), direct=False),
    ]
    assert len({plan.digest() for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("members", "accumulate", "shares"),
    [
        ([], "float64", None),
        (["b", "a"], "float64", None),
        (["a", "a"], "float64", None),
        (["a", "b"], "float16", None),
        (["a", "b"], "float64", [1]),
        (["a", "b"], "float64", [0, 0]),
        (["a", "b"], "float64", [-1, 2]),
    ],
)
def test_what_is_no_plan(members: list[str], accumulate: str, shares: list[int] | None) -> None:
    with pytest.raises(ValueError, match=r"members|accumulate|shares"):
        make_plan(members, 10, accumulate, shares=shares)


@pytest.mark.parametrize("codec", ["int8+zstd", "float32+zstd"])
def test_sums_are_not_compressed(codec: str) -> None:
    with pytest.raises(ValueError, match="its length varies"):
        make_plan(["a", "b"], 1000, "float64", codec=codec)


def times(
    shares: list[int], rates: list[tuple[float, float]], contribution: float, result: float
) -> float:
    """Seconds per element of the slowest direction of any member."""
    others, total = len(rates) - 1, sum(shares)
    found = []
    for share, (sent, received) in zip(shares, rates, strict=True):
        own = share / total
        found.append(((1 - own) * contribution + own * others * result) / sent)
        found.append(((1 - own) * result + own * others * contribution) / received)
    return max(found)


def test_even_links_are_left_alone() -> None:
    assert balanced_shares([(5.0, 9.0)] * 4, 8, 4) is None
    assert balanced_shares([(5.0, 9.0), (0.0, 0.0)], 8, 4) is None
    assert balanced_shares([(5.0, 9.0)], 8, 4) is None


def test_the_slow_link_sums_less() -> None:
    rates = [(2.5e6, 12.5e6)] * 3 + [(0.6e6, 2.5e6)]
    shares = balanced_shares(rates, 4, 4)
    assert shares is not None
    assert shares[3] < shares[0] == shares[1] == shares[2]
    assert times(shares, rates, 4, 4) < 0.75 * times([1] * 4, rates, 4, 4)


@given(
    st.lists(st.tuples(st.floats(1.0, 1e9), st.floats(1.0, 1e9)), min_size=2, max_size=8),
    st.sampled_from([(8.0, 4.0), (4.0, 4.0), (1.03, 1.03)]),
)
def test_shares_never_make_it_slower(
    rates: list[tuple[float, float]], sizes: tuple[float, float]
) -> None:
    shares = balanced_shares(rates, *sizes)
    if shares is None:
        return
    fastest = tuple(max(each) for each in zip(*rates, strict=True))
    bounded = [(max(s, fastest[0] / 64), max(r, fastest[1] / 64)) for s, r in rates]
    assert all(0 <= share <= 1024 for share in shares)
    assert times(shares, bounded, *sizes) <= 1.02 * times([1] * len(rates), bounded, *sizes)
    split(1000, shares)


def test_a_link_is_what_comes_from_it_and_to_it_together() -> None:
    came = [(0, 30, 10), (20, 0, 10), (0, 0, 0)]  # the third sums nothing
    assert link_rates(came) == [(20, 40), (30, 30), (20, 0)]


def test_the_leader_learns_links_round_by_round() -> None:
    leader: Any = SimpleNamespace(plan=SimpleNamespace(gradient_bytes=(4.0, 4.0)))
    averaging = Averaging(leader)
    members = ("a", "b", "c")

    def round_of(*rows: list[int]) -> None:
        prepared = Prepared([Group(0, members, {})], 0.0)
        for member, row in zip(members, rows, strict=True):
            prepared.note_rates(member, {"rates": row})
        averaging._learn_rates(prepared)

    assert averaging._shares(members) is None
    round_of([0, 8_000, 1_000], [8_000, 0, 1_000], [8_000, 8_000, 0])
    shares = averaging._shares(members)
    assert shares is not None
    assert shares[2] < shares[0] == shares[1]
    round_of([0, 8_000, 3_000], [8_000, 0, 3_000], [0, 0, 0])
    assert averaging._rates["c"] == (4_000.0, 16_000.0)  # half way; of what it gets nothing
    round_of([], [], [])  # of a policy that does not measure
    assert averaging._rates["c"] == (4_000.0, 16_000.0)
    for odd in (None, [-1, 0, 0], [0.5], ["x"], [1 << 63], [0] * 1025):
        with pytest.raises(WireError):
            Prepared([], 0.0).note_rates("a", {"rates": odd})


def test_links_are_learned_evenly_at_first_then_the_slowest_sums_least() -> None:
    unknown = [(0.0, 0.0)] * 3
    assert balanced_shares(unknown, 4, 4) is None
    rates = learned_rates(unknown, [[0, 900.0, 90.0], [900.0, 0, 90.0], [900.0, 900.0, 0]])
    assert rates == [(1800.0, 990.0), (1800.0, 990.0), (180.0, 1800.0)]
    shares = balanced_shares(rates, 4, 4)
    assert shares is not None
    assert shares[0] == shares[1] > shares[2] == 0
    rates = learned_rates(rates, [[0, 900.0, 180.0], [900.0, 0, 180.0], [0, 0, 0]])
    assert rates[2][0] == 270.0, "half way"
    assert rates[2][1] == 1800.0, "unseen, and no other is faster"


def test_a_link_that_became_better_is_tried_again() -> None:
    """Who sums nothing receives no contributions: its downlink is never seen, and was slow once."""
    links = [(8_000.0, 8_000.0), (8_000.0, 8_000.0), (8_000.0, 10.0)]
    shares = balanced_shares(links, 4, 4)
    assert shares is not None
    assert shares[2] == 0
    believed = links[2][1]
    rounds = 0
    while shares is not None and not shares[2]:
        believed, rounds = learned_rate(believed, 0, 8_000.0), rounds + 1
        shares = balanced_shares([*links[:2], (8_000.0, believed)], 4, 4)
    assert rounds < 100
    assert learned_rate(7_900.0, 0, 8_000.0) == 8_000.0  # as fast as the fastest at most
    assert learned_rate(9_000.0, 0, 8_000.0) == 9_000.0
    assert learned_rate(0.0, 0, 8_000.0) == 0.0


@pytest.mark.parametrize("shares", [[1, 1, 1], [0, 0, 1], [MAX_SHARE] * 3], ids=str)
def test_shares_of_an_order_make_a_plan(shares: list[int]) -> None:
    """The bounds of what `read_shares` lets through, the smallest and the largest of it."""
    assert read_shares(shares, 3) == shares
    assert make_plan(["a", "b", "c"], 1000, "float64", shares=shares).bounds[-1] == 1000


ODD_SHARES = {
    "no list": 3,
    "text": "111",
    "bytes": b"111",
    "a map": {0: 1, 1: 1, 2: 1},
    "empty": [],
    "too few": [1, 1],
    "too many": [1, 1, 1, 1],
    "no number": [1, 1, None],
    "text in it": [1, 1, "1"],
    "a list in it": [1, 1, [1]],
    "a boolean": [1, 1, True],
    "a fraction": [1, 1, 0.5],
    "a whole float": [1, 1, 1.0],
    "not a number": [1, 1, math.nan],
    "infinite": [1, 1, math.inf],
    "negative": [1, 1, -1],
    "negative, of a good sum": [2, 2, -1],
    "nobody sums": [0, 0, 0],
    "just too large": [MAX_SHARE, MAX_SHARE, MAX_SHARE + 1],
    "64 bits": [0, 1, (1 << 63) - 1],
    "more than 64 bits": [0, 1, 1 << 200],
}


@pytest.mark.parametrize("shares", ODD_SHARES.values(), ids=ODD_SHARES)
def test_shares_of_an_order_that_make_no_plan_are_refused(shares: object) -> None:
    """As nonsense of whoever sent it, before a round begins (I8)."""
    with pytest.raises(WireError):
        read_shares(shares, 3)
    assert read_shares(None, 3) is None, "evenly"
