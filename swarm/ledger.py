"""What one replica has counted in the current step, and what it therefore answers (DESIGN, I1, I3).

Pure: no I/O, no clock. Every method is one atomic decision that takes the facts, changes the state
and returns what to do with the reason; `peer.stage_server` carries it out. The rules are those of
the executable model that belongs to the design ("One step, exactly once").

A microbatch is ABSENT, then FORWARD (queued or computing), WAITING (its gradient is awaited),
BACKWARD (its gradient was accepted, so it will be counted) and COUNTED. A fence moves it back to
ABSENT, unless it is BACKWARD or COUNTED already: fence and count exclude each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from swarm.terms import NO_TERM, Term

SPOILED = "what was accumulated here is spoiled: it needs a reset"


class Phase(Enum):
    ABSENT = "absent"
    FORWARD = "forward"
    WAITING = "waiting"
    BACKWARD = "backward"
    COUNTED = "counted"


class Do(Enum):
    """What a replica does with a call."""

    RUN = "run"  # first time: forward, send on, backward, count
    CONTINUE = "continue"  # the forward runs or is done: go on from there along the new route
    REPEAT = "repeat"  # counted: send the kept y on, answer with the kept dx, add nothing
    AWAIT_COMMIT = "await commit"  # of the step after ours: its commit is on the way
    AWAIT_COUNT = "await count"  # of what the leader expects: some of it is still computed
    REFUSE = "refuse"


class Decision(NamedTuple):
    do: Do
    reason: str


class Fence(NamedTuple):
    """`fenced`: not counted here, and every try up to the fence is refused for good."""

    fenced: bool
    reason: str


@dataclass(slots=True)
class Entry:
    phase: Phase = Phase.ABSENT
    attempt_try: int = -1  # the highest try seen


@dataclass(slots=True)
class Ledger:
    """One replica's ledger for `step` under the highest `term` it has seen.

    Tries are numbers the leader draws ever larger within a term. A replica with several steps under
    way has a ledger for each, which take turns: the next one here is `step + stride`.
    """

    step: int = 0
    stride: int = 1
    term: Term = NO_TERM
    entries: dict[int, Entry] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)
    floor: int = -1  # tries up to here were refused for all by a reset
    frozen_attempt: int | None = None
    aborted_attempt: int = 0
    spoiled: bool = False  # the sum is not that of the entries: only a reset helps

    @property
    def counted(self) -> set[int]:
        return {index for index, entry in self.entries.items() if entry.phase is Phase.COUNTED}

    @property
    def uncertain(self) -> set[int]:
        """Accepted gradients whose backward still runs: they will be counted."""
        return {index for index, entry in self.entries.items() if entry.phase is Phase.BACKWARD}

    def see(self, term: Term) -> bool:
        """Take notice of a term; False when a higher one has been seen: refuse what carried it.

        A new term starts with fresh try numbers and unfreezes; what was counted stays counted, and
        finished forwards may serve the new leader.
        """
        if term < self.term:
            return False
        if term > self.term:
            self.term = term
            self.fences.clear()
            self.floor = -1
            self.frozen_attempt = None
            self.aborted_attempt = 0
            for entry in self.entries.values():
                entry.attempt_try = -1
        return True

    def on_call(self, term: Term, step: int, index: int, try_: int, attempt: int) -> Decision:
        """A call of microbatch `index` arrives; `attempt` is the leader's averaging attempt."""
        if not self.see(term):
            return Decision(Do.REFUSE, f"term {term.counter} has been succeeded")
        if step == self.step + self.stride:
            return Decision(Do.AWAIT_COMMIT, f"step {self.step} is not committed here yet")
        if step != self.step:
            return Decision(Do.REFUSE, f"this replica is at step {self.step}, not {step}")
        counted = index in self.entries and self.entries[index].phase is Phase.COUNTED
        if self.frozen_attempt is not None and not counted:  # a repeat adds nothing
            if attempt < self.frozen_attempt:
                return Decision(Do.REFUSE, f"averaging attempt {self.frozen_attempt} has begun")
            self.abort(term, step, self.frozen_attempt)
        if self.spoiled:
            return Decision(Do.REFUSE, SPOILED)
        if (refusal := self._refusal(index, try_)) is not None:
            return Decision(Do.REFUSE, refusal)
        entry = self.entries.setdefault(index, Entry())
        if try_ < entry.attempt_try:
            return Decision(Do.REFUSE, f"try {entry.attempt_try} has overtaken try {try_}")
        entry.attempt_try = try_
        if entry.phase is Phase.ABSENT:
            entry.phase = Phase.FORWARD
            return Decision(Do.RUN, "new")
        if entry.phase in (Phase.FORWARD, Phase.WAITING):
            return Decision(Do.CONTINUE, "the forward is under way or done")
        return Decision(Do.REPEAT, "counted")

    def on_forward_done(self, index: int) -> None:
        entry = self.entries.get(index)
        if entry is not None and entry.phase is Phase.FORWARD:
            entry.phase = Phase.WAITING

    def on_forward_failed(self, index: int) -> None:
        """The forward raised: nothing is left of it, a later try may run again."""
        entry = self.entries.get(index)
        if entry is not None and entry.phase in (Phase.FORWARD, Phase.WAITING):
            entry.phase = Phase.ABSENT

    def on_gradient(self, term: Term, step: int, index: int, try_: int) -> Decision:
        """The gradient for try `try_` arrived. RUN: compute the backward now, it will count."""
        if term < self.term or step != self.step:
            return Decision(Do.REFUSE, "of an older term or step")
        if self.frozen_attempt is not None:
            return Decision(Do.REFUSE, f"averaging attempt {self.frozen_attempt} has begun")
        if self.spoiled:
            return Decision(Do.REFUSE, SPOILED)
        if (refusal := self._refusal(index, try_)) is not None:
            return Decision(Do.REFUSE, refusal)
        entry = self.entries.get(index)
        if entry is None or entry.phase in (Phase.ABSENT, Phase.FORWARD):
            return Decision(Do.REFUSE, "its forward is gone")
        if entry.phase is Phase.WAITING:
            entry.phase = Phase.BACKWARD
            return Decision(Do.RUN, "first gradient")
        return Decision(Do.REPEAT, "counted already")

    def on_counted(self, step: int, index: int) -> bool:
        """The backward is in the accumulator; False when a reset or commit came between."""
        entry = self.entries.get(index)
        if step != self.step or entry is None or entry.phase is not Phase.BACKWARD:
            return False
        entry.phase = Phase.COUNTED
        return True

    def on_backward_failed(self, index: int) -> None:
        """The backward raised: not counted, forward gone as well. Something may have been added
        all the same; then `spoil` follows."""
        entry = self.entries.get(index)
        if entry is not None and entry.phase is Phase.BACKWARD:
            entry.phase = Phase.ABSENT

    def spoil(self) -> None:
        """Something was added to the accumulator that does not belong there, or half of it:
        everything counted here is void."""
        self.spoiled = True

    def fence(self, term: Term, step: int, index: int, try_: int) -> Fence:
        """The leader wants to give the microbatch to somebody else."""
        if not self.see(term):
            return Fence(False, f"term {term.counter} has been succeeded")
        if step != self.step:
            return Fence(False, f"this replica is at step {self.step}, not {step}")
        if self.spoiled:
            return Fence(False, SPOILED)
        entry = self.entries.get(index)
        if entry is not None:
            if entry.phase in (Phase.BACKWARD, Phase.COUNTED):
                return Fence(False, "counted")
            if entry.attempt_try > try_:
                return Fence(False, f"try {entry.attempt_try} has overtaken")
            del self.entries[index]
        self.fences[index] = max(try_, self.fences.get(index, -1))
        return Fence(True, "not counted")

    def keep_counted(self) -> list[int]:
        """Forget what is not counted and will not be; returns it. For a leader that takes over.

        Its calls are of a term that succeeds those under way, so nothing forgotten can be counted.
        """
        given_up = [
            index
            for index, entry in self.entries.items()
            if entry.phase not in (Phase.BACKWARD, Phase.COUNTED)
        ]
        for index in given_up:
            del self.entries[index]
        return given_up

    def reset(self, term: Term, step: int, number: int) -> bool:
        """Taken back after an expulsion: forget the step's work, refuse tries up to `number`.

        A repeat of the same number changes nothing. True when the caller must drop accumulator
        and kept answers; raises nothing. False also when it does not apply.
        """
        if not self.see(term) or step != self.step or number <= self.floor:
            return False
        self.entries.clear()
        # A fence above the number was drawn later, and its promise stands.
        self.fences = {index: try_ for index, try_ in self.fences.items() if try_ > number}
        self.floor = number
        self.frozen_attempt = None
        self.spoiled = False
        return True

    def freeze(
        self, term: Term, step: int, attempt: int, expected: set[int], *, early: bool = False
    ) -> Decision:
        """Averaging begins. RUN when the ledger is what the leader expects, else REFUSE.

        An `early` order came before all of it could be counted: AWAIT_COUNT as long as some lacks
        and nothing is there besides.
        """
        if not self.see(term):
            return Decision(Do.REFUSE, f"term {term.counter} has been succeeded")
        if step != self.step:
            return Decision(Do.REFUSE, f"this replica is at step {self.step}, not {step}")
        if self.spoiled:
            return Decision(Do.REFUSE, SPOILED)
        if attempt <= self.aborted_attempt:
            return Decision(Do.REFUSE, f"attempt {self.aborted_attempt} was aborted")
        if self.frozen_attempt is not None and attempt < self.frozen_attempt:
            return Decision(Do.REFUSE, f"attempt {self.frozen_attempt} has begun")
        if self.uncertain or self.counted != expected:
            missing = sorted(expected - self.counted)[:5]
            surplus = sorted((self.counted | self.uncertain) - expected)[:5]
            if early and not surplus:
                return Decision(Do.AWAIT_COUNT, f"lacks {missing}")
            return Decision(Do.REFUSE, f"ledger differs: lacks {missing}, has besides {surplus}")
        self.frozen_attempt = attempt
        return Decision(Do.RUN, "ledger as expected")

    def abort(self, term: Term, step: int, attempt: int) -> None:
        """An averaging attempt is given up; it and those before it can never begin again."""
        if term != self.term or step != self.step:
            return
        self.aborted_attempt = max(self.aborted_attempt, attempt)
        if self.frozen_attempt is not None and self.frozen_attempt <= attempt:
            self.frozen_attempt = None

    def advance(self, step: int) -> None:
        """A commit was applied (or a state taken over): an empty ledger for `step`."""
        self.step = step
        self.entries.clear()
        self.fences.clear()
        self.floor = -1
        self.frozen_attempt = None
        self.aborted_attempt = 0
        self.spoiled = False

    def _refusal(self, index: int, try_: int) -> str | None:
        if try_ <= self.floor:
            return f"tries up to {self.floor} were refused by a reset"
        if try_ <= self.fences.get(index, -1):
            return f"try {try_} was fenced"
        return None
