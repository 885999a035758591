"""Which microbatches of a step need not wait for the commit before it (*delayed*).

A part of the run, pure: leader, replicas and baseline ask the same object.
"""

from __future__ import annotations

from dataclasses import dataclass

# Two thirds of a step ahead balance in full: farther off, the loss is too little of a parabola.
MAX_BALANCE = 2.0


@dataclass(frozen=True, slots=True)
class Ahead:
    """Which of a step's `num_microbatches` are computed before the commit of the step before: the
    first `microbatches`, from the step `since` on."""

    microbatches: int = 0
    num_microbatches: int = 0
    since: int = 0

    def of(self, step: int) -> int:
        """How many of a step's are."""
        return self.microbatches if step >= self.since else 0

    @property
    def steps_in_flight(self) -> int:
        """How many steps are counted before the oldest of them is committed."""
        return 2 if self.microbatches else 1

    @property
    def balance(self) -> float:
        """How many updates beyond V_s the others are computed."""
        others = self.num_microbatches - self.microbatches
        return min(self.microbatches / others, MAX_BALANCE) if others > 0 else 0.0


NONE = Ahead()
