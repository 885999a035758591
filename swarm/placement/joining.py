"""The stage of a joiner: where one more replica of its speed raises the swarm's throughput most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.placement.table import LoadTable, PeerLoad, settled_stages


@dataclass(frozen=True, slots=True)
class Placement:
    """`stage` is None where none fits; `reason` is one line for logs and the volunteer."""

    stage: int | None
    reason: str


def choose_stage(table: LoadTable, joiner: PeerLoad, now_s: float) -> Placement:
    """The stage `joiner` should take.

    Throughput is that of the slowest stage, so this is the slowest of those that fit its memory,
    once everybody under way has arrived: joiners and movers count as present where they have
    reserved, so many that join at once spread. Of several equally slow ones it takes the one with
    the fewest replicas (the death of one would cost most there), then the dearest.
    The caller enters the answer into the table as the joiner's `arriving`, with an expiry.
    `joiner` itself is not counted if it is in the table already.
    """
    others = tuple(p for p in table.peers if p.peer != joiner.peer)
    count = [0] * len(table.stages)
    for peer in others:
        for stage in settled_stages(peer, now_s):
            count[stage] += 1
    rates = LoadTable(table.stages, others).settled_rates(now_s)
    return choose_among(table, joiner, rates, count)


def choose_among(
    table: LoadTable, joiner: PeerLoad, rates: Sequence[float], replicas: Sequence[int]
) -> Placement:
    """As `choose_stage`, for a caller that keeps the settled rates and replicas per stage itself.

    Of `table` only the stages count. O(stages).
    """
    fitting = [stage for stage in range(len(rates)) if table.fits(joiner, stage)]
    if not fitting:
        least = min(need.memory_bytes for need in table.stages)
        return Placement(
            None,
            f"no stage fits: the smallest needs {_size(least)}, "
            f"this peer has {_size(joiner.memory_bytes or 0)} for it",
        )
    best = min(fitting, key=lambda s: (rates[s], replicas[s], table.rate(joiner, s), s))
    before = min(rates)
    after = min(r + table.rate(joiner, best) if s == best else r for s, r in enumerate(rates))
    if not replicas[best]:
        why = f"stage {best} has nobody"
    elif after > before:
        why = f"stage {best} is the slowest: {before:.3g} -> {after:.3g} microbatches/s"
    elif rates[best] > before:
        why = f"stage {best} is the slowest that fits its {_size(joiner.memory_bytes or 0)}"
    else:
        why = f"stage {best} is one of the slowest at {before:.3g} microbatches/s"
    return Placement(best, why)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
