"""Whether a run is well, and if not, why: the first line of the page. Pure.

States, worst first: `failed`; `silent` (nothing was heard for a while); `stalled` (no step is
being committed); `degraded` (it trains, with less than it should); `healthy`; and `finished`.
Each comes with a reason in words; nothing rests on colour.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from swarm.words import duration_text

SILENT_S = 15.0
STALL_S = 30.0  # or five usual steps, whichever is longer
STALL_STEPS = 5.0
SLOW = 2.0  # times the usual step
RECENT_S = 60.0

WORDS = {
    "healthy": "Healthy",
    "degraded": "Degraded",
    "stalled": "Stalled",
    "silent": "No news",
    "failed": "Failed",
    "finished": "Finished",
}


@dataclass(frozen=True, slots=True)
class Health:
    state: str
    reason: str

    @property
    def word(self) -> str:
        return WORDS[self.state]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage's replicas, by what they do."""

    serving: int
    others: int  # joining, ready or expelled
    rate: float | None  # microbatches a second, as its replicas' service times promise


def judge(
    *,
    state: str,
    reason: str,
    silent_s: float,
    since_step_s: float | None,
    step_times: Sequence[float],
    stages: Sequence[Stage],
    lost: Collection[tuple[int | None, str]] = (),
    asked: bool = True,
) -> Health:
    """The health of a run.

    `state` and `reason` are the leader's. `silent_s` is how old its word is, `since_step_s` how
    long ago the last step was committed (None before the first), `step_times` the seconds that the
    last steps took. `lost` holds (stage, why) of replicas lost within the last minute. Without
    `asked` nobody has answered yet.
    """
    if state == "finished":
        return Health("finished", "all steps are trained")
    if state == "failed":
        return Health("failed", reason or "the leader gave up")
    if not asked:
        return Health("silent", "waiting for the leader's first word")
    if silent_s > SILENT_S:
        return Health("silent", f"the leader has not been heard for {duration_text(silent_s)}")
    if state == "saving":
        return Health("degraded", reason or "the last checkpoint is not written yet")
    if state in ("waiting", "standing by"):
        return Health("stalled", reason or "waiting for peers")
    empty = [number for number, stage in enumerate(stages) if not stage.serving]
    if empty:
        return Health("stalled", f"stage {empty[0]} has no replica that serves")
    usual = _median(step_times)
    limit = max(STALL_S, STALL_STEPS * usual if usual else 0.0)
    if since_step_s is not None and since_step_s > limit and state != "validating":
        return Health("stalled", f"no step was committed for {duration_text(since_step_s)}")
    if lost:
        stage, why = next(iter(lost))
        of = f"stage {stage} has lost a replica" if stage is not None else "a replica was lost"
        return Health("degraded", f"{of}{f': {why}' if why else ''}")
    alone = [number for number, stage in enumerate(stages) if stage.serving == 1]
    if alone and max(stage.serving for stage in stages) > 1:
        return Health("degraded", f"stage {alone[0]} has a single replica")
    if usual and len(step_times) > 3 and step_times[-1] > SLOW * usual:
        return Health("degraded", f"the last step took {step_times[-1] / usual:.1f} times as long")
    return Health("healthy", "every stage is served and steps are being committed")


def bottleneck(stages: Sequence[Stage]) -> int | None:
    """The stage that limits the run: the lowest rate, where all are known; None if unclear."""
    rates = [stage.rate for stage in stages]
    known = [rate for rate in rates if rate]
    if len(known) < len(rates) or not known or len(rates) < 2:
        return None
    low = min(known)
    return rates.index(low) if max(known) > 1.05 * low else None


def neediest(stages: Sequence[Stage]) -> tuple[int, str]:
    """Which stage one more replica helps most, and why. For where the leader does not say: its
    planner knows what stages cost, and who is on the way. Needs one stage at least."""
    counts = [stage.serving for stage in stages]
    fewest = counts.index(min(counts))
    if not counts[fewest]:
        return fewest, "nobody serves it, and the run waits"
    slow = bottleneck(stages)
    if counts[fewest] == 1 and max(counts) > 1:
        return fewest, "it has a single replica, whose loss would stop the run"
    if slow is not None:
        return slow, "it is the slowest, so the whole run gains"
    if counts[fewest] < max(counts):
        return fewest, "it has the fewest replicas"
    return fewest, "all stages are served alike; any one gains from company"


def counts_text(counts: Mapping[str, int]) -> str:
    """`2 serving, 1 joining`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nobody"


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
