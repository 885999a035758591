"""The trainers' agreement: each rule by hand, and random schedules against what must never be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.consensus import (
    COMPLETING,
    VOID_ATTEMPT,
    Acceptance,
    Following,
    Key,
    Vote,
    is_loyal,
    is_majority,
    next_term,
    note_disk,
    on_accept,
    on_committed,
    on_prepare,
    open_term,
    stranger,
)
from swarm.errors import WireError
from swarm.terms import MAX_COUNTER, NO_TERM, Ballot, Record, Term

TRAINERS = ("a", "b", "c")
T1, T2 = Term(0, 1, "a#1"), Term(0, 2, "b#1")


def record(step: int, term: Term = T1, attempt: int = 1, mark: str = "") -> Record:
    ballot = Ballot(term, step, attempt)
    return Record(ballot, mark, {0: ("r#1",)}, {0: "00"}, 1.0, 1.0, 0.1, "applied", 2.0, 8)


def restored(step: int, epoch: int = 1, counter: int = 2, mark: str = "") -> Record:
    """Opens `epoch` with the state after `step`."""
    ballot = Ballot(Term(epoch, counter, "c#1"), step, 1)
    return Record(ballot, mark, {}, {}, 0.0, 1.0, 0.0, "restored", 0.0, 0, base=step + 1)


def test_a_promise_refuses_older_terms_and_keeps_what_was_accepted() -> None:
    accepted = on_accept(Vote(), Key(T1, 0, 1), record(0), None).vote
    promised = on_prepare(accepted, T2)
    assert promised.yes
    assert promised.vote.accepted == accepted.accepted
    assert not on_prepare(promised.vote, T1).yes
    assert not on_accept(promised.vote, Key(T1, 0, 2), record(0), None).yes


@pytest.mark.parametrize(
    ("asked", "now", "promised", "loyal"),
    [
        (Term(1, 6, "b#1"), 2.4, Term(1, 5, "a#1"), True),
        (Term(1, 6, "b#1"), 2.5, Term(1, 5, "a#1"), False),
        (Term(2, 6, "b#1"), 2.4, Term(1, 5, "a#1"), False),
        (Term(1, 6, "a#2"), 2.4, Term(1, 5, "a#1"), False),
        (Term(1, 4, "b#1"), 2.4, Term(1, 5, "a#1"), False),
        (Term(1, 7, "b#1"), 2.4, Term(1, 6, "c#1"), False),
        (Term(1, 6, "b#1"), 2.4, Term(1, 4, "c#1"), True),
    ],
    ids=[
        "a-rival",
        "silent-for-long",
        "an-order",
        "the-leader-itself",
        "stale",
        "another-was-promised-a-later-one",
        "the-leader-was-promised-by-others",
    ],
)
def test_who_follows_a_leader_is_loyal_to_it(
    asked: Term, now: float, promised: Term, loyal: bool
) -> None:
    followed = Following(Term(1, 5, "a#1"), until=2.5)
    assert is_loyal(Vote(promised), followed, asked, now) is loyal


def test_who_follows_nobody_is_loyal_to_nobody() -> None:
    assert not is_loyal(Vote(), Following(), T1, 0.0)


def test_accepting_a_step_implies_that_the_one_before_is_committed() -> None:
    vote = on_accept(Vote(), Key(T1, 1, 1), record(1), record(0)).vote
    assert vote.committed == record(0)
    assert vote.next_step == 1
    assert not on_accept(Vote(), Key(T1, 1, 1), record(1), None).yes
    assert not on_accept(vote, Key(T1, 0, 1), record(0), None).yes


def test_a_lower_key_never_replaces_a_higher_one() -> None:
    vote = on_accept(Vote(), Key(T1, 0, 5), record(0, attempt=5), None).vote
    assert not on_accept(vote, Key(T1, 0, 4), record(0, attempt=4), None).yes
    assert on_accept(vote, Key(T1, 0, COMPLETING), record(0, attempt=5), None).yes


def test_the_highest_acceptance_counts_and_the_empty_record_completes_nothing() -> None:
    low = Vote(T2, None, Acceptance(Key(T1, 0, 1), record(0)))
    void = Vote(T2, None, Acceptance(Key(T2, 0, VOID_ATTEMPT), None))
    assert open_term({"a": low, "b": Vote(T2)}).complete == record(0)
    assert open_term({"a": low, "b": void}).complete is None
    newer = Vote(T2, record(0), None)
    opening = open_term({"a": low, "b": newer})
    assert opening.base == record(0)
    assert opening.complete is None


def test_what_is_committed_makes_its_acceptance_history() -> None:
    vote = on_accept(Vote(), Key(T1, 0, 1), record(0), None).vote
    learned = on_committed(vote, record(0))
    assert learned == Vote(T1, record(0), None)
    assert on_committed(learned, record(0)) is learned


def test_majorities_count_peer_ids_of_trainers_only() -> None:
    assert is_majority(["a", "b"], TRAINERS)
    assert not is_majority(["a", "a", "x"], TRAINERS)
    assert is_majority(["a"], ["a"])


def test_terms_are_above_all_seen_and_bounded() -> None:
    assert next_term([T1, T2, NO_TERM], "c#9", new_epoch=False) == Term(0, 3, "c#9")
    assert next_term([T1, T2], "c#9", restored(4, 7), new_epoch=True) == Term(8, 3, "c#9")
    for seen in (Term(0, MAX_COUNTER - 1, "x"), Term(MAX_COUNTER - 1, 1, "x")):
        with pytest.raises(WireError):
            next_term([seen], "c#9", new_epoch=True)


@given(st.integers(0, 3), st.booleans(), st.booleans())
def test_votes_survive_disk_and_wire(step: int, accepted: bool, empty: bool) -> None:
    acceptance = Acceptance(Key(T2, step, 1), None if empty else record(step, T2))
    vote = Vote(T2, record(step - 1) if step else None, acceptance if accepted else None)
    assert Vote.unpack(vote.pack()) == vote


json_like = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries({}, optional={
        "promised": json_like, "committed": json_like, "accepted": json_like
    })
)  # fmt: skip
def test_hostile_votes_are_refused(value: dict) -> None:
    try:
        Vote.unpack(value)
    except WireError:
        return


def test_going_back_is_accepted_in_a_new_epoch_alone() -> None:
    vote = Vote(T1, record(7), None)
    back = restored(3, epoch=1)
    assert on_accept(vote, Key(back.ballot.term, 3, 1), back, record(7)).yes
    same = restored(3, epoch=0)
    assert not on_accept(vote, Key(same.ballot.term, 3, 1), same, record(7)).yes
    assert not on_accept(vote, Key(back.ballot.term, 4, 1), back, record(7)).yes
    assert not on_accept(vote, Key(back.ballot.term, 3, 1), back, None).yes


def test_a_new_run_may_begin_with_the_state_of_another() -> None:
    first = restored(9, epoch=1)
    assert on_accept(Vote(), Key(first.ballot.term, 9, 1), first, None).vote.accepted
    assert not on_accept(Vote(), Key(T1, 9, 1), record(9), None).yes


def test_before_the_first_step_only_a_return_can_be() -> None:
    fresh = restored(-1)
    vote = on_accept(
        Vote(T1, record(7), None), Key(fresh.ballot.term, -1, 1), fresh, record(7)
    ).vote
    assert on_committed(vote, fresh).next_step == 0
    with pytest.raises(WireError):
        Record.unpack(record(-1).pack())


def test_records_of_an_older_epoch_are_history_whatever_their_step() -> None:
    back = restored(3)
    vote = on_committed(Vote(T1, record(7), None), back)
    assert vote.committed == back
    assert on_committed(vote, record(8)) is vote
    assert not on_accept(vote, Key(T2, 8, 1), record(8, T2), record(7)).yes
    late = Term(1, 3, "b#1")
    assert not on_accept(vote, Key(late, 4, 1), record(4, T2), back).yes
    assert on_accept(vote, Key(late, 4, 1), record(4, late), back).yes


def test_a_return_that_was_accepted_is_completed_and_one_of_an_older_place_is_not() -> None:
    back = restored(3)
    accepted = Vote(back.ballot.term, record(7), Acceptance(Key(back.ballot.term, 3, 1), back))
    assert open_term({"a": accepted, "b": Vote(T1, record(7), None)}).complete == back
    assert open_term({"a": accepted, "b": Vote(T1, record(8), None)}).complete is None
    other = restored(2, epoch=2)
    assert open_term({"a": accepted, "b": Vote(T1, other, None)}).complete is None


def hash_of(base: Record | None) -> str:
    return base.hash if base else ""


class World:
    """Three voters and any number of leaderships, each step of which may be lost."""

    def __init__(self) -> None:
        self.votes = dict.fromkeys(TRAINERS, Vote())
        self.chosen: dict[str, Record] = {}  # by the hash of the record in the place before
        self.accepted: dict[tuple[Key, str], set[str]] = {}

    def accept(self, trainer: str, key: Key, value: Record | None, base: Record | None) -> bool:
        answer = on_accept(self.votes[trainer], key, value, base)
        self.votes[trainer] = answer.vote
        if answer.yes and value is not None:
            who = self.accepted.setdefault((key, value.hash), set())
            who.add(trainer)
            if is_majority(who, TRAINERS):
                known = self.chosen.setdefault(hash_of(base), value)
                assert known.hash == value.hash, "two records in one place"
                assert base is None or base.position < value.position, "no order among records"
                assert value.predecessor.split()[0] == str(hash_of(base)[:8] or None), (
                    "of another place"
                )
        return answer.yes


def run_schedule(rng: random.Random) -> int:
    """Leaders come and go at any point and some go back to a checkpoint; every message may be lost;
    answers may be lost too. Returns how many records were chosen."""

    def some() -> list[str]:
        return [name for name in TRAINERS if rng.random() < reach]

    reach = rng.choice((0.5, 0.7))
    world = World()
    for leadership in range(rng.randint(1, 9)):
        leader = rng.choice(TRAINERS)
        reached = some()
        going_back = rng.random() < 0.4
        term = next_term(
            [world.votes[name].promised for name in {leader, *reached}],
            f"{leader}#{leadership}",
            world.votes[leader].committed,
            new_epoch=going_back,
        )
        votes = {}
        for trainer in sorted({leader, *reached}):
            answer = on_prepare(world.votes[trainer], term)
            world.votes[trainer] = answer.vote
            if answer.yes:
                votes[trainer] = answer.vote
        if not is_majority(votes, TRAINERS):
            continue
        opening = open_term(votes)
        base, begun = opening.base, False
        steps: list[str] = ["complete"] if opening.complete else []
        steps += ["back"] if going_back else []
        steps += ["train"] * rng.randint(0, 3)
        for attempt, what in enumerate(steps, start=1):
            if what == "train" and not begun:
                empty = Key(term, base.step + 1 if base else 0, VOID_ATTEMPT)
                reached = some()
                yes = [each for each in reached if world.accept(each, empty, None, base)]
                if not is_majority(yes, TRAINERS):
                    break
            begun = begun or what != "complete"
            mark = f"{hash_of(base)[:8] or None} {leadership}"
            if what == "complete":
                assert opening.complete is not None
                value, number = opening.complete, COMPLETING
            elif what == "back":
                to = rng.randint(-1, base.step if base else 3)
                value = restored(to, term.epoch, term.counter, mark)
                number = 1
            else:
                value = record(base.step + 1 if base else 0, term, attempt, mark)
                number = attempt
            reached = some()
            key = Key(term, value.step, number)
            yes = [each for each in reached if world.accept(each, key, value, base)]
            if not is_majority(yes, TRAINERS):
                break
            base = value
            for trainer in some():
                world.votes[trainer] = on_committed(world.votes[trainer], value)
    places = len(world.chosen)
    at, seen = "", 0
    while at in world.chosen:
        at, seen = world.chosen[at].hash, seen + 1
    assert seen == places, "a record that follows nothing"
    return places


@pytest.mark.parametrize("block", range(10))
def test_no_schedule_commits_two_records_in_one_place(block: int) -> None:
    chosen = 0
    for seed in range(400 * block, 400 * (block + 1)):
        try:
            chosen += run_schedule(random.Random(seed))
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    assert chosen > 400


def test_a_trainer_with_another_disk_is_no_voter_until_an_epoch_names_it() -> None:
    vote = note_disk(Vote(), TRAINERS, "a", "disk 1")
    assert vote.voters == {"a": "disk 1", "b": "", "c": ""}
    assert stranger(vote, "a", "disk 1") == ""
    assert stranger(vote, "b", "any") == ""
    assert "lost" in stranger(vote, "a", "disk 2")
    assert note_disk(vote, TRAINERS, "a", "disk 2") is vote
    named = replace(restored(3), voters={"a": "disk 2", "b": "disk 3", "c": ""})
    after = on_committed(note_disk(vote, TRAINERS, "c", "disk 4"), named)
    assert stranger(after, "a", "disk 2") == ""
    assert after.voters["c"] == "disk 4"  # known here, not yet where the record was made
    assert Vote.unpack(after.pack()) == after


def test_who_is_left_out_of_an_epoch_votes_no_more() -> None:
    vote = on_committed(Vote(), replace(restored(3), voters={"a": "disk 1"}))
    assert "without it" in stranger(vote, "b", "disk 2")
    assert not is_majority(["b", "c"], tuple(vote.voters))


def test_voters_ride_in_every_record_so_whoever_missed_the_epoch_learns_them() -> None:
    later = replace(record(4, Term(1, 3, "a#2")), voters={"a": "disk 2", "b": "", "c": ""})
    key = Key(Term(1, 3, "a#2"), 5, 1)
    answer = on_accept(Vote(voters={"a": "disk 1", "b": "", "c": ""}), key, None, later)
    assert answer.yes
    assert stranger(answer.vote, "a", "disk 2") == ""
