"""Which of several replicas' states is the stage's (DESIGN, I5), when they should be equal. Pure.

Each member says a fingerprint of its state (the same rule decides on averaged gradients). More than
half of them decide. Without a majority (two members that differ, most often) nothing in the
fingerprints says who is right, and the true one cannot be computed from the chain without the state
itself. Both must not start anew either: the state would be lost. So the members are taken in order
of arrival and the value of the first counts. That keeps one state, and one chain of them, whatever
happens; a machine that has just come cannot displace one that has been right in every record since
it came; and it is told as what it is, a guess (`Verdict.tie`), because after it exactness (I6) is
only as good as that member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

Said = TypeVar("Said", bound=Hashable)  # a fingerprint, most often


class Verdict(NamedTuple, Generic[Said]):
    agreed: Said
    differing: tuple[str, ...]  # who says something else
    tie: bool


def agree(marks: Mapping[str, Said], by_arrival: Sequence[str]) -> Verdict[Said]:
    """What counts among `marks` (member -> what it says, at least one).

    `by_arrival` names members, the earliest first; those it lacks come last, by name.
    """
    if not marks:
        raise ValueError("nobody has said anything")
    mark, votes = Counter(marks.values()).most_common(1)[0]
    tie = 2 * votes <= len(marks)
    if tie:
        order = {name: place for place, name in enumerate(by_arrival)}
        first = min(marks, key=lambda name: (order.get(name, len(order)), name))
        mark = marks[first]
    return Verdict(mark, tuple(sorted(n for n, each in marks.items() if each != mark)), tie)


def decided(marks: Mapping[str, str], num_expected: int) -> bool:
    """Whether answers still to come cannot change who is in the majority."""
    most = max(Counter(marks.values()).values(), default=0)
    return 2 * most > num_expected or len(marks) >= num_expected
