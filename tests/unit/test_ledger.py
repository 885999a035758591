"""The ledger's rules one by one, and against the replica of the design's executable model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.ledger import Do, Ledger, Phase
from swarm.terms import Term

T1, T2 = Term(0, 1, "a#1"), Term(0, 2, "a#2")


def counted(index: int = 0, try_: int = 1) -> Ledger:
    ledger = Ledger()
    assert ledger.on_call(T1, 0, index, try_, 0).do is Do.RUN
    ledger.on_forward_done(index)
    assert ledger.on_gradient(T1, 0, index, try_).do is Do.RUN
    assert ledger.on_counted(0, index)
    return ledger


def test_a_counted_microbatch_is_repeated_not_counted_again() -> None:
    ledger = counted()
    assert ledger.on_call(T1, 0, 0, 2, 0).do is Do.REPEAT
    assert ledger.on_gradient(T1, 0, 0, 2).do is Do.REPEAT
    assert not ledger.on_counted(0, 0)
    assert ledger.counted == {0}


def test_fence_and_count_exclude_each_other() -> None:
    assert not counted().fence(T1, 0, 0, 5).fenced
    ledger = Ledger()
    ledger.on_call(T1, 0, 0, 1, 0)
    ledger.on_forward_done(0)
    assert ledger.fence(T1, 0, 0, 1).fenced
    assert ledger.on_gradient(T1, 0, 0, 1).do is Do.REFUSE
    assert ledger.on_call(T1, 0, 0, 1, 0).do is Do.REFUSE
    assert ledger.on_call(T1, 0, 0, 2, 0).do is Do.RUN


def test_a_gradient_that_was_accepted_cannot_be_fenced() -> None:
    ledger = Ledger()
    ledger.on_call(T1, 0, 0, 1, 0)
    ledger.on_forward_done(0)
    ledger.on_gradient(T1, 0, 0, 1)
    assert ledger.uncertain == {0}
    assert not ledger.fence(T1, 0, 0, 1).fenced


def test_a_fence_comes_before_its_call() -> None:
    ledger = Ledger()
    assert ledger.fence(T1, 0, 3, 4).fenced
    assert ledger.on_call(T1, 0, 3, 4, 0).do is Do.REFUSE
    assert ledger.on_call(T1, 0, 3, 5, 0).do is Do.RUN
    assert not ledger.fence(T1, 0, 3, 4).fenced  # try 5 has overtaken it


def test_a_repeat_of_a_reset_changes_nothing() -> None:
    ledger = counted(try_=1)
    assert ledger.reset(T1, 0, 7)
    assert ledger.counted == set()
    assert ledger.on_call(T1, 0, 0, 7, 0).do is Do.REFUSE
    assert ledger.on_call(T1, 0, 0, 8, 0).do is Do.RUN
    assert not ledger.reset(T1, 0, 7)
    assert ledger.entries[0].phase is Phase.FORWARD


def test_averaging_freezes_and_abort_is_for_good() -> None:
    ledger = counted()
    assert ledger.freeze(T1, 0, 1, {0, 1}).do is Do.REFUSE
    assert ledger.freeze(T1, 0, 1, {0}).do is Do.RUN
    assert ledger.freeze(T1, 0, 1, {0}).do is Do.RUN
    assert ledger.on_call(T1, 0, 1, 2, 0).do is Do.REFUSE
    assert ledger.on_gradient(T1, 0, 0, 2).do is Do.REFUSE
    ledger.abort(T1, 0, 3)
    for attempt in (1, 2, 3):
        assert ledger.freeze(T1, 0, attempt, {0}).do is Do.REFUSE
    assert ledger.freeze(T1, 0, 4, {0}).do is Do.RUN
    ledger.abort(T1, 0, 2)  # an old one does not unfreeze
    assert ledger.frozen_attempt == 4


def test_a_call_of_a_later_attempt_unfreezes() -> None:
    ledger = counted()
    ledger.freeze(T1, 0, 1, {0})
    assert ledger.on_call(T1, 0, 1, 2, 1).do is Do.RUN
    assert ledger.frozen_attempt is None
    assert ledger.freeze(T1, 0, 1, {0}).do is Do.REFUSE


def test_a_repeat_is_answered_while_averaging_and_does_not_end_it() -> None:
    ledger = counted()
    assert ledger.freeze(T1, 0, 2, {0}).do is Do.RUN
    for try_, attempt in ((1, 0), (2, 1), (3, 2), (4, 3)):
        assert ledger.on_call(T1, 0, 0, try_, attempt).do is Do.REPEAT
        assert ledger.frozen_attempt == 2
    assert ledger.on_call(T1, 0, 1, 5, 1).do is Do.REFUSE


def test_a_higher_term_takes_over_what_was_counted() -> None:
    ledger = counted()
    ledger.fence(T1, 0, 1, 50)
    ledger.freeze(T1, 0, 1, {0})
    assert ledger.see(T2)
    assert ledger.counted == {0}
    assert ledger.on_call(T2, 0, 1, 1, 0).do is Do.RUN  # its tries start anew
    assert ledger.on_call(T2, 0, 0, 2, 0).do is Do.REPEAT
    assert ledger.on_call(T1, 0, 2, 99, 0).do is Do.REFUSE
    assert not ledger.fence(T1, 0, 2, 99).fenced
    assert not ledger.reset(T1, 0, 99)
    assert ledger.freeze(T1, 0, 9, {0}).do is Do.REFUSE


def test_a_finished_forward_serves_the_new_term_and_no_old_gradient() -> None:
    ledger = Ledger()
    ledger.on_call(T1, 0, 0, 9, 0)
    ledger.on_forward_done(0)
    assert ledger.on_call(T2, 0, 0, 1, 0).do is Do.CONTINUE
    assert ledger.on_gradient(T1, 0, 0, 9).do is Do.REFUSE
    assert ledger.on_gradient(T2, 0, 0, 1).do is Do.RUN


def test_steps() -> None:
    ledger = counted()
    assert ledger.on_call(T1, 1, 0, 2, 0).do is Do.AWAIT_COMMIT
    assert ledger.on_call(T1, 2, 0, 2, 0).do is Do.REFUSE
    ledger.advance(1)
    assert ledger.on_call(T1, 0, 0, 2, 0).do is Do.REFUSE
    assert ledger.on_call(T1, 1, 0, 2, 0).do is Do.RUN
    assert not ledger.on_counted(0, 0)  # a backward of the former step


def test_what_raised_may_run_again() -> None:
    ledger = Ledger()
    ledger.on_call(T1, 0, 0, 1, 0)
    ledger.on_forward_failed(0)
    assert ledger.on_call(T1, 0, 0, 2, 0).do is Do.RUN
    ledger.on_forward_done(0)
    ledger.on_gradient(T1, 0, 0, 2)
    ledger.on_backward_failed(0)
    assert ledger.on_gradient(T1, 0, 0, 2).do is Do.REFUSE
    assert ledger.on_call(T1, 0, 0, 3, 0).do is Do.RUN


class Machine(RuleBasedStateMachine):
    """The real ledger beside the model's replica: the same answers to the same orders, but that a
    repeat of what is counted neither waits for an averaging attempt nor ends it.

    Tries grow as a leader's do; calls and fences may come late, twice and out of order.
    """

    indices, tries = st.integers(0, 2), st.integers(0, 12)

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.ledger.see(T1)  # as any order of the leader does first
        # The model (shared/model): ledger, forwards by try, fences, floor, frozen, aborted.
        self.model: set[int] = set()
        self.forwards: dict[int, int] = {}
        self.fences: dict[int, int] = {}
        self.floor = -1
        self.frozen: int | None = None
        self.aborted = 0
        self.promises: set[tuple[int, int]] = set()  # fenced: these must never be counted

    def refused(self, index: int, try_: int) -> bool:
        return try_ <= max(self.floor, self.fences.get(index, -1))

    @rule(index=indices, try_=tries, attempt=st.integers(0, 4))
    def call(self, index: int, try_: int, attempt: int) -> None:
        decision = self.ledger.on_call(T1, 0, index, try_, attempt)
        frozen = self.frozen if index not in self.model else None
        if frozen is not None and attempt >= frozen:
            self.aborted, self.frozen = max(self.aborted, frozen), None
            frozen = None
        overtaken = self.ledger.entries.get(index)
        expected = frozen is None and not self.refused(index, try_)
        if decision.do is Do.REFUSE:
            late = overtaken is not None and overtaken.attempt_try > try_
            assert not expected or late, decision
            return
        assert expected, decision
        assert (decision.do is Do.REPEAT) == (index in self.model)
        if index not in self.model:
            self.forwards[index] = try_
            self.ledger.on_forward_done(index)

    @rule(index=indices, try_=tries)
    def gradient(self, index: int, try_: int) -> None:
        decision = self.ledger.on_gradient(T1, 0, index, try_)
        accepted = self.frozen is None and not self.refused(index, try_)
        known = index in self.model or index in self.forwards
        assert (decision.do is not Do.REFUSE) == (accepted and known), decision
        if decision.do is Do.RUN:
            assert index not in self.model, "counted twice"
            assert (index, try_) not in self.promises, "counted what was fenced"
            assert self.ledger.on_counted(0, index)
            self.model.add(index)

    @rule(index=indices, try_=tries)
    def fence(self, index: int, try_: int) -> None:
        fenced = self.ledger.fence(T1, 0, index, try_).fenced
        possible = index not in self.model and self.forwards.get(index, -1) <= try_
        assert fenced == possible
        if fenced:
            self.fences[index] = max(try_, self.fences.get(index, -1))
            self.forwards.pop(index, None)
            self.promises.update((index, each) for each in range(try_ + 1))

    @rule(number=tries)
    def reset(self, number: int) -> None:
        done = self.ledger.reset(T1, 0, number)
        assert done == (number > self.floor)
        if done:
            self.model, self.forwards = set(), {}
            self.fences = {index: try_ for index, try_ in self.fences.items() if try_ > number}
            self.floor, self.frozen = number, None

    @rule(attempt=st.integers(1, 4))
    def abort(self, attempt: int) -> None:
        self.ledger.abort(T1, 0, attempt)
        self.aborted = max(self.aborted, attempt)
        if self.frozen is not None and self.frozen <= attempt:
            self.frozen = None

    @precondition(lambda self: not self.ledger.uncertain)
    @rule(attempt=st.integers(1, 4), right=st.booleans())
    def average(self, attempt: int, right: bool) -> None:
        expected = set(self.model) if right else set(self.model) ^ {0}
        frozen = self.ledger.freeze(T1, 0, attempt, expected).do is Do.RUN
        stale = attempt <= self.aborted or (self.frozen is not None and attempt < self.frozen)
        assert frozen == (right and not stale)
        if frozen:
            self.frozen = attempt

    @invariant()
    def same_ledger(self) -> None:
        assert self.ledger.counted == self.model
        assert self.ledger.frozen_attempt == self.frozen


TestAgainstModel = Machine.TestCase
TestAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
