"""How long a replica's device may be silent before it counts as hung. Pure.

A process whose device hangs still answers pings, so its channel lives and a step would wait for it
for ever. No time-out that somebody must guess can tell such a device from a slow one; what can is
the work itself: a replica says for how long its device has finished nothing although it has work
(`swarm.compute.WatchedCompute`), and that is compared with what kernels are known to take, its own
first, its twins' else, other stages' else. Slow is not dead: the slack for somebody who has not
been measured yet is a hundredfold, and every time a replica was given up for hung and came back its
patience doubles. Wrong verdicts cost time and never exactness, since the work is issued again.
"""

from __future__ import annotations

from collections.abc import Collection

SUSPECT_S = 2.0  # without a byte: a heartbeat is due every second, so one did not come
FLOOR_S = 10.0
UNKNOWN_S = 300.0  # nobody in the run has been measured
UPDATE_S = 60.0  # optimizer, averaging, hashing: never measured, and longer than a microbatch
SLACK_OWN = 10.0
SLACK_TWINS = 100.0
SLACK_OTHERS = 300.0
MAX_STRIKES = 10


def patience_s(
    own_s: float | None,
    twins_s: Collection[float],
    others_s: Collection[float],
    *,
    strikes: int = 0,
    updating: bool = False,
) -> float:
    """Seconds without a finished kernel after which a device counts as hung.

    `own_s` is the replica's measured service time of a microbatch, `twins_s` those of its stage,
    `others_s` of other stages. `strikes`: how often it was wrongly given up before.
    """
    if own_s is not None:
        expected = FLOOR_S + SLACK_OWN * own_s
    elif twins_s:
        expected = FLOOR_S + SLACK_TWINS * max(twins_s)
    elif others_s:
        expected = FLOOR_S + SLACK_OTHERS * max(others_s)
    else:
        expected = UNKNOWN_S
    if updating:
        expected += UPDATE_S
    return float(expected * 2 ** min(strikes, MAX_STRIKES))


def worth_waiting_s(share: int, twins_s: Collection[float]) -> float:
    """How long a step should wait for a silent replica and nothing else, before it is left out.

    As long as its twins need to compute its `share` of microbatches again, `twins_s` each: who
    waits that long and gives up then has lost at most twice what was lost by knowing the future
    (the ski rental problem; Karlin et al., Competitive Snoopy Caching, 1988).
    """
    return share / sum(1 / each for each in twins_s if each > 0) if any(twins_s) else 0.0
