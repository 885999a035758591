"""Pairs that are apart, and the first path around them."""

from __future__ import annotations

import random
from itertools import pairwise, product

from swarm.reach import Reach


def test_a_pair_is_apart_for_a_while_whoever_is_named_first() -> None:
    reach = Reach()
    reach.part("b", "a", until=5.0)
    reach.part("a", "b", until=3.0)  # does not end it earlier
    assert reach.apart("a", "b", 4.9)
    assert reach.apart("b", "a", 4.9)
    assert not reach.apart("a", "b", 5.0)
    reach.part("a", "c", until=5.0)
    reach.forget("b")
    assert not reach.apart("a", "b", 0.0)
    assert reach.apart("a", "c", 0.0)


def test_the_path_is_the_first_of_all_that_are_possible() -> None:
    """Against trying out every path."""
    found = 0
    for seed in range(200):
        draw = random.Random(seed)
        stages = [[f"{k}.{n}" for n in range(draw.randint(1, 3))] for k in range(4)]
        reach = Reach()
        for before, after in pairwise(stages):
            for a, b in product(before, after):
                if draw.random() < 0.5:
                    reach.part(a, b, until=1.0)
        possible = [
            list(path) for path in product(*stages)
            if not any(reach.apart(a, b, 0.0) for a, b in pairwise(path))
        ]  # fmt: skip
        assert reach.path(stages, 0.0) == next(iter(possible), None), seed
        assert reach.path(stages, 1.0) == [names[0] for names in stages]
        found += bool(possible)
    assert 20 < found < 180
    assert Reach().path([["a"], []], 0.0) is None
