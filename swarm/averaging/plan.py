"""Who sums what: how a flat tensor is split over the members of an averaging group.

Pure. Every member computes the plan for itself from what the leader's order says, and compares the
digest of its own with that of every peer before a byte of tensor is taken. A plan is therefore made
of integers only: no float may decide a boundary.

Each member owns one contiguous part and sums it for all (reduce-scatter), so a member receives
(n-1)/n of its own size and sends as much, whatever n: the butterfly of hivemind and Moshpit
(Ryabinin et al. 2021), within one group. `shares` makes parts unequal, for members with unequal
links; 0 makes a member that sums nothing. `balanced_shares` finds them from measured rates: it is
the leader's, who sends the integers it comes to, so its floats decide nothing at two places.

Where it costs no more bytes, or hardly any, a plan is *direct*: everybody gives everybody all it
has and sums all of it, one hop instead of two. Sums are then taken everywhere in the same order and
dtype, so they are the same bits everywhere too (I4).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm.wire.codecs import codec_names, get_codec

CHUNK_ELEMENTS = 64 * 1024  # 512 KiB of float64 on the way in, 256 KiB of float32 on the way out
FIRST_ELEMENTS = 4 * 1024  # of the first and the last chunk of a part; each next one has twice that
ALIGN_ELEMENTS = 16  # parts begin on 64-byte boundaries of the float32 result
ACCUMULATE_BYTES = {"float64": 8, "float32": 4}
EXACT = "float32"  # the codec that sends contributions as they are, and sums as float32
SHARE_UNITS = 1024
NEW_RATE = 0.5  # how much the last round weighs beside those before
UNSEEN_GAINS = 1.1  # in a round that shows nothing of a link
MAX_SHARE = 1 << 20
MAX_MEMBERS = 1024
# What a member may send in a direct round that costs more bytes than parts would: all of it takes
# 52 ms at 5 Mbit/s, where a hop takes 75 ms; and by peer it is about what TCP sends at once.
DIRECT_BYTES = 32 * 1024
# At most, to each other member, by the members of a group; of more each has streams enough to fill
# a line (docs/decisions/group-all-reduce.md).
STRIPES = {2: 8, 3: 2}
CONNECTED_STRIPES = 256  # to one member by all, where they have several connections
STRIPE_BYTES = 64 * 1024  # of what goes to one member; for less no stripe more


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements `start` to `stop` of the whole tensor."""

    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """One round's split. `members` is sorted and is also the order of summation.

    Part i is `bounds[i]` to `bounds[i + 1]` and is summed by `members[i]`; in a `direct` plan every
    member sums everything, for itself.
    """

    members: tuple[str, ...]
    num_elements: int
    accumulate: str
    bounds: tuple[int, ...]
    chunk_elements: int
    codec: str = EXACT
    direct: bool = False

    def contribution_bytes(self, num_elements: int) -> int:
        """Bytes of one chunk on its way to the owner of its part."""
        return contribution_bytes(num_elements, self.accumulate, self.codec)

    def sum_bytes(self, num_elements: int) -> int:
        """Bytes of one chunk's sums on their way back."""
        return contribution_bytes(num_elements, "float32", self.codec)

    def part(self, member: int) -> Chunk:
        """What this member sums."""
        if self.direct:
            return Chunk(0, self.num_elements)
        return Chunk(self.bounds[member], self.bounds[member + 1])

    def num_chunks(self, member: int) -> int:
        return sum(1 for _ in self.chunks(member))

    def chunks(self, member: int) -> Iterator[Chunk]:
        """The chunks of one part, in the order in which they are sent and summed."""
        start = self.part(member).start
        for size in chunk_sizes(self.part(member).num_elements, self.chunk_elements):
            yield Chunk(start, start + size)
            start += size

    def replies(self, member: int) -> Iterator[Chunk]:
        """The chunks whose sums this member sends to all others."""
        return iter(()) if self.direct else self.chunks(member)

    def sent_bytes(self, member: int) -> int:
        """Tensor bytes that this member sends in one round, contributions and results."""
        others = [owner for owner in range(len(self.members)) if owner != member]
        given = (
            self.contribution_bytes(chunk.num_elements)
            for owner in others
            for chunk in self.chunks(owner)
        )
        sums = sum(self.sum_bytes(chunk.num_elements) for chunk in self.replies(member))
        return sum(given) + sums * len(others)

    def num_stripes(self, owner: int, connections: int = 1) -> int:
        """Of the stream to one member, by what goes there (`swarm.net.striped`) and how many
        `connections` there are to it."""
        given = self.contribution_bytes(self.part(owner).num_elements)
        several = max(1, min(connections, CONNECTED_STRIPES // len(self.members)))
        # As many on each: what goes in turn goes at the pace of the connection with most of them.
        most = -(-STRIPES.get(len(self.members), 1) // several) * several
        return max(1, min(most, given // STRIPE_BYTES))

    def digest(self) -> str:
        """sha256 over all of it: equal digests, equal plans."""
        fields = [
            list(self.members),
            self.num_elements,
            self.accumulate,
            list(self.bounds),
            self.chunk_elements,
            self.codec,
            self.direct,
            FIRST_ELEMENTS,
        ]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def chunk_sizes(num_elements: int, largest: int) -> Iterator[int]:
    """How a part is cut: small at first, then `largest`, small at the end.

    An owner has nothing to send before all have given its first chunk, and the last one's sums go
    out when nothing else is left to: on a slow line both take as long as a chunk.
    """
    ramp, left, size = [], num_elements, FIRST_ELEMENTS
    while size < largest and left >= 4 * size:
        ramp.append(size)
        left -= 2 * size
        size *= 2
    yield from ramp
    for start in range(0, left, largest):
        yield min(largest, left - start)
    yield from reversed(ramp)


def split(num_elements: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Bounds of parts in proportion to `shares`, rounded down to whole aligned blocks."""
    total = sum(shares)
    if not shares or min(shares) < 0 or total == 0:
        raise ValueError(f"shares must be non-negative and not all zero: {list(shares)}")
    num_blocks = -(-num_elements // ALIGN_ELEMENTS)
    bounds, passed = [0], 0
    for share in shares:
        passed += share
        bounds.append(min(num_elements, num_blocks * passed // total * ALIGN_ELEMENTS))
    return tuple(bounds)


def make_plan(
    members: Sequence[str],
    num_elements: int,
    accumulate: str,
    *,
    shares: Sequence[int] | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    codec: str = EXACT,
) -> Plan:
    """The plan of one round; equal parts without `shares`. ValueError for what makes no plan."""
    if list(members) != sorted(set(members)) or not 1 <= len(members) <= MAX_MEMBERS:
        raise ValueError("members must be sorted, distinct and at least one")
    if accumulate not in ACCUMULATE_BYTES:
        raise ValueError(f"accumulate must be one of {sorted(ACCUMULATE_BYTES)}: {accumulate!r}")
    if num_elements < 0 or chunk_elements < 1:
        raise ValueError("num_elements must not be negative, chunk_elements must be positive")
    if shares is None:
        shares = [1] * len(members)
    if len(shares) != len(members):
        raise ValueError(f"{len(shares)} shares for {len(members)} members")
    bounds = split(num_elements, shares)
    if codec not in codec_names():
        raise ValueError(f"no codec is called {codec!r}")
    direct = is_direct(len(members), num_elements, accumulate, codec)
    return Plan(tuple(members), num_elements, accumulate, bounds, chunk_elements, codec, direct)


def is_direct(num_members: int, num_elements: int, accumulate: str, codec: str) -> bool:
    """Whether everybody sums everything. Of two members each sends as much as it has either way,
    however they split it, if a sum takes as many bytes as a contribution."""
    given = contribution_bytes(num_elements, accumulate, codec)
    if num_members == 2 and given == contribution_bytes(num_elements, "float32", codec):
        return True
    return (num_members - 1) * given <= DIRECT_BYTES


def contribution_bytes(num_elements: int, accumulate: str, codec: str) -> int:
    """Bytes of `num_elements` values. Raises ValueError for codecs that compress: nobody could say
    beforehand where a part ends."""
    if codec == EXACT:
        return num_elements * ACCUMULATE_BYTES[accumulate]
    least, most = get_codec(codec).nbytes_bounds("float32", (num_elements,))
    if least != most:
        raise ValueError(f"gradients cannot be averaged as {codec}: its length varies")
    return least


def link_rates(came: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """(sent, received) bytes per second of each member, 0 unknown, from what each says of all.

    `came[i][j]`: how fast contributions of j came in at i, measured at the same time as those of
    and at all others, so that they add up to what a link carries.
    """
    return [(sum(row[j] for row in came), sum(came[j])) for j in range(len(came))]


def learned_rate(before: float, now: float, fastest: float) -> float:
    """What is believed of a link after a round that showed `now` of it, 0 for nothing.

    Nothing is seen of the downlink of who summed nothing, nor of the uplink of who summed all. Such
    a link may have become better since: it counts as a little faster each time, up to the `fastest`
    of the group, until its owner is given another part and it is measured again.
    """
    if before and now:
        return before + (now - before) * NEW_RATE
    return now or min(before * UNSEEN_GAINS, max(before, fastest))


def learned_rates(
    before: Sequence[tuple[float, float]], came: Sequence[Sequence[float]]
) -> list[tuple[float, float]]:
    """(sent, received) bytes per second as believed of each member, at least one, after a round.

    `came` is as for `link_rates`, and in its order what was believed `before`, 0 for nothing.
    """
    seen = link_rates(came)
    sent, received = (max(rates) for rates in zip(*seen, strict=True))
    return [
        (learned_rate(was[0], now[0], sent), learned_rate(was[1], now[1], received))
        for was, now in zip(before, seen, strict=True)
    ]


def balanced_shares(
    rates: Sequence[tuple[float, float]], contribution: float, result: float
) -> list[int] | None:
    """Shares with which the slowest link takes least time; None when nothing is to be gained.

    `rates` are (sent, received) bytes per second of each member, all positive; `contribution` and
    `result` the bytes of one element on its way to the owner and back. With the part w of all, one
    of n members sends (1 - w) contribution + w (n - 1) result per element, and receives
    (1 - w) result + w (n - 1) contribution. For a given time each member thus has an interval of
    feasible w, and the least time at which these can add up to 1 is found by bisection.
    """
    others = len(rates) - 1
    if others < 1 or min(min(pair) for pair in rates) <= 0:
        return None
    fastest = (max(sent for sent, _ in rates), max(received for _, received in rates))
    bounded = [(max(s, fastest[0] / 64), max(r, fastest[1] / 64)) for s, r in rates]

    def interval(rate: tuple[float, float], time: float) -> tuple[float, float]:
        low, high = 0.0, 1.0
        for speed, fixed, owned in (
            (rate[0], contribution, others * result),
            (rate[1], result, others * contribution),
        ):
            room, slope = time * speed - fixed, owned - fixed
            if slope > 0:
                high = min(high, room / slope)
            elif slope < 0:
                low = max(low, room / slope)
            elif room < 0:
                high = -1.0
        return low, high

    def feasible(time: float) -> list[tuple[float, float]] | None:
        found = [interval(rate, time) for rate in bounded]
        if any(low > high for low, high in found):
            return None
        enough = sum(low for low, _ in found) <= 1.0 <= sum(high for _, high in found)
        return found if enough else None

    even = 1.0 / len(rates)
    longest = max(
        (even * others * b + (1 - even) * a) / speed
        for rate in bounded
        for speed, a, b in ((rate[0], contribution, result), (rate[1], result, contribution))
    )
    shortest, best = 0.0, longest
    for _ in range(50):
        middle = (shortest + best) / 2
        if feasible(middle):
            best = middle
        else:
            shortest = middle
    found = feasible(best)
    if found is None or best > 0.95 * longest:
        return None
    room = sum(high - low for low, high in found)
    rest = 1.0 - sum(low for low, _ in found)
    weights = [low + (high - low) * (rest / room if room else 0.0) for low, high in found]
    return [max(0, round(weight * SHARE_UNITS)) for weight in weights]
