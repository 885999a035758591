"""Whatever a replica answers, the leader raises nothing but SwarmError (DESIGN, I8)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peer import inquiries
from peer.averaging import Prepared
from peer.disk import MemoryDisk
from peer.leader import Leader
from peer.members import Member, Standing
from peer.microbatches import MAX_FAILURES
from peer.quorum import Quorum
from swarm.consensus import Vote
from swarm.errors import StageFailedError, SwarmError
from swarm.net.channel import CallFailedError, Message
from swarm.sim.virtual_time import run
from swarm.step import Step
from swarm.terms import Ballot, Record, Term
from tests.protocol.simulated import LEADER, OPTIMIZER, TinyBatches, plan, shared_pipeline

KEYS = (
    *("sha256", "norms", "finite", "fingerprint", "fenced", "reason", "step", "stage"),
    *("sent_bytes", "raw_bytes", "counted", "losses", "loss", "timings", "hashes", "silent_s"),
    *("updating", "phase", "tensors", "record", "updates", "vote", "returned_bytes", "rates"),
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["a" * 64, "counted", "absent", 0, 1, 1e308, float("nan")])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["0", "1", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(KEYS), values, max_size=8)
details = st.dictionaries(
    st.sampled_from(["hop", "suspect", "stale", "diverged", "kind", "message", "self"]), values
)
errors = st.builds(
    lambda kind, text, detail: CallFailedError(kind, text, **detail),
    st.sampled_from(["refused", "failed", "unreachable", "lost", "?"]),
    st.text(max_size=5),
    details,
)


class Odd:
    """A channel, and links with nothing but it."""

    addresses: dict[str, Any] = {}  # noqa: RUF012
    ended = None

    def __init__(self, answer: dict[str, Any] | CallFailedError) -> None:
        self.answer = answer

    def open_channel(self, incarnation: str) -> Odd:
        return self

    async def channel(self, incarnation: str, addresses: Any = ()) -> Odd:
        return self

    async def call(self, method: str, body: Any, tensors: Any = (), **_: Any) -> Message:
        if isinstance(self.answer, CallFailedError):
            raise self.answer
        return Message(self.answer)


NAMES = ("r0.0#1", "r1.0#1", "r0.1#1", "r1.1#1")


def make(answer: dict[str, Any] | CallFailedError) -> tuple[Leader, Step]:
    quorum = Quorum([LEADER], LEADER, MemoryDisk())
    chosen = plan(2, 2, optimizer=OPTIMIZER, validation_microbatches=1)
    leader = Leader(chosen, shared_pipeline(2), TinyBatches(), quorum)
    leader.links = Odd(answer)  # type: ignore[assignment]
    leader.term = quorum.term = Term(0, 1, f"{LEADER}#1")
    for name in NAMES:
        leader.members.by_name[name] = Member(name, int(name[1]), (), Standing.SERVING)
    leader.adopting = True
    return leader, leader._begin_step()


async def one_try(leader: Leader, step: Step) -> None:
    issue = step.issue(0, 0.0)
    assert issue is not None
    await leader.microbatches._drive(step, issue)


async def average(leader: Leader, step: Step) -> None:
    for index in range(2):
        issue = step.issue(index, 0.0)
        assert issue is not None
        step.acknowledge(issue)
        leader.microbatches.losses[index] = 1.0
    prepared = await leader.averager.run(step)
    if prepared is not None:
        leader._make_record(step, prepared).pack()


def test_averaging_is_not_ordered_while_a_hop_is_being_replaced() -> None:
    """The suspect has been fenced, others are asked meanwhile, and the last microbatch is given
    away."""

    async def main() -> None:
        leader, step = make({})
        leader.microbatches_of(step).adopting = False
        leader.averager._may_be_early = True  # it has had no attempt yet
        issues = [step.issue(index, 0.0) for index in range(2)]
        first = issues[0]
        assert first is not None
        step.fenced(first, first.route[1])
        leader._all_given(step)
        assert leader.averager._early is None
        step.give_back(first)
        assert step.issue(0, 0.0)
        leader._all_given(step)
        assert leader.averager._early is not None
        await leader.tasks.aclose()

    run(main(), limit_s=100)


def test_nobody_is_fenced_from_a_try_that_is_over() -> None:
    """The suspect is expelled, so the microbatch is issued again: whoever holds it may know the
    newer try already, and would be expelled for saying so."""

    async def main() -> None:
        leader, step = make({"fenced": False, "reason": "spoiled"})
        issue = step.issue(0, 0.0)
        assert issue is not None
        microbatches = leader.microbatches_of(step)
        microbatches._failures[0] = 1
        await microbatches._resolve(step, issue, 1, "failed", "a kernel failed")
        assert set(step.expelled) == {issue.route[1]}
        await leader.aclose()

    run(main(), limit_s=100)


ODD_VOTES: list[Any] = [5, [], b"", {"accepted": 3}, {"promised": 1}, {"committed": b"x"}]


@pytest.mark.parametrize(
    "odd",
    [{}, *({"vote": vote} for vote in ODD_VOTES), CallFailedError("refused", "no", stranger=b"x")],
    ids=str,
)
def test_a_trainer_that_answers_oddly_is_asked_again(
    odd: dict[str, Any] | CallFailedError,
) -> None:
    async def main() -> None:
        quorum = Quorum(["t0", "t1"], "t0", MemoryDisk())
        links = quorum.links = Odd(odd)  # type: ignore[assignment]
        asking = asyncio.ensure_future(quorum._ask("t1", "prepare", {}, asyncio.Event()))
        await asyncio.sleep(1.0)
        assert not asking.done()
        links.answer = {"vote": Vote().pack(), "disk": "its disk", "yes": True}  # type: ignore[attr-defined]
        assert await asking == Vote()

    run(main(), limit_s=100)


async def adopt(leader: Leader, step: Step) -> None:
    member = leader.members.by_name["r1.0#1"]
    step.expel(member.incarnation, "")
    await leader.admission._adopt(member, step, leader.links)  # type: ignore[arg-type]


async def take_in(leader: Leader, step: Step) -> None:
    member = leader.members.by_name["r1.0#1"]
    leader.expel(step, member.incarnation, "")
    await leader.admission._take_in(member)


async def commit(leader: Leader, step: Step) -> None:
    ballot = Ballot(leader.term, 0, 1)
    members = {0: NAMES[::2], 1: NAMES[1::2]}
    record = Record(ballot, "", members, {}, 1.0, 1.0, 0.1, "applied", 1.0, 1)
    for member in leader.members:
        await leader.admission.send_commit(member, record)


async def look(leader: Leader, step: Step) -> None:
    issue = step.issue(0, 0.0)
    assert issue is not None
    await leader.watch._look_at(step, "r1.0#1")
    await leader.watch.holder(step, issue)


async def between(leader: Leader, step: Step) -> None:
    for ask in (inquiries.validate, inquiries.stage_hashes, inquiries.fetch_states):
        with contextlib.suppress(SwarmError):
            await ask(leader)


@pytest.mark.parametrize("asks", [one_try, average, adopt, take_in, commit, look, between])
def test_no_answer_raises_anything_but_a_swarm_error(
    asks: Callable[[Leader, Step], Coroutine[Any, Any, None]],
) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies | errors)
    def check(answer: dict[str, Any] | CallFailedError) -> None:
        async def main() -> None:
            leader, step = make(answer)
            try:
                await asks(leader, step)
            except SwarmError:
                pass
            finally:
                await leader.aclose()
            assert leader.fatal is None or isinstance(leader.fatal, SwarmError)

        run(main(), limit_s=10_000)

    check()


@pytest.mark.parametrize(
    "times",
    [
        [1.7e308, 0.0, 1.7e308],
        [1.7e308, 0.0, 0.0],
        [1e6, 0.0, 0.0],
        [-1.0, 2.0, 0.0],
        [0.0, 0.0, 1.0],
        [0.1, 0.1, float("nan")],
        [float("nan"), 0.1, 0.1],
        [0.1, float("inf"), 0.1],
    ],
)
def test_times_that_make_no_sense_are_those_of_nobody(times: list[float]) -> None:
    """And they end no run."""

    async def main() -> None:
        leader, step = make({"loss": 1.0, "timings": [times, [0.1, 0.2, 0.3]]})
        issue = step.issue(0, 0.0)
        assert issue is not None
        await leader.microbatches._drive(step, issue)
        assert leader.microbatches.losses == {0: 1.0}
        assert leader.router.measured() == {issue.route[1]: (1, pytest.approx(0.3))}
        await leader.aclose()

    run(main(), limit_s=100)


@pytest.mark.parametrize(
    "norms",
    [["x"], [None], [[1.0]], [float("nan")], [float("inf")], [1e308, 1e308], [-1.0], [True]],
)
def test_norms_that_make_no_sense_cost_their_member_its_part(norms: list[Any]) -> None:
    async def main() -> None:
        body = {"sha256": "a" * 64, "norms": norms, "finite": True}
        leader, step = make(body)
        await average(leader, step)
        assert step.expelled
        assert leader.fatal is None
        await leader.aclose()

    run(main(), limit_s=100)


@pytest.mark.parametrize("liar", ["a", "c"])
def test_the_majority_says_what_the_averaged_gradient_is(liar: str) -> None:
    """Whoever answers first, and whoever came first; of two, who came first."""

    async def main() -> None:
        leader, step = make({})
        truth = {"sha256": "a" * 64, "norms": [1.0], "finite": True}
        for other in ({"norms": [2.0]}, {"finite": False}, {"sha256": "b" * 64}):
            prepared = Prepared([], 0.0)
            for member in (liar, *(name for name in "abc" if name != liar)):
                prepared.note(0, member, truth | (other if member == liar else {}))
            ((who, error),) = leader.averager._compare(step, prepared)
            assert who == liar
            assert "averaged gradient differs" in str(error)
            assert prepared.averaged[0] == ("a" * 64, True, (1.0,))
            del prepared.said[0]["b"]
            ((who, _),) = leader.averager._compare(step, prepared)
            assert who == "c"
        await leader.aclose()

    run(main(), limit_s=100)


def test_who_names_a_suspect_of_another_stage_is_one_itself() -> None:
    """Its round has members of its own stage only: naming others must not have them expelled, nor
    end the run where one is alone."""

    async def main() -> None:
        lie = CallFailedError("failed", "silent for 10 s", suspect="r1.1#1")
        leader, step = make({})
        for _ in range(2 * MAX_FAILURES):
            await leader.averager._blame(step, "r0.0#1", lie)
        assert set(step.expelled) == {"r0.0#1"}
        await leader.aclose()

    run(main(), limit_s=1000)


def test_who_refuses_to_average_again_and_again_is_left_out_for_a_while() -> None:
    async def main() -> None:
        leader, step = make({})
        member = leader.members.by_name["r0.0#1"]
        for times in (1, 2):
            await leader.averager._blame(step, "r0.0#1", CallFailedError("refused", "no"))
            assert member.hold_offs == times - 1
        await leader.aclose()

    run(main(), limit_s=100)


def test_a_replica_that_has_counted_nothing_is_not_adopted() -> None:
    """But reset: what its ledger does not tell of, its accumulator may still hold."""

    async def adopted(counted: list[int]) -> bool:
        leader, step = make({"step": 0, "counted": counted, "losses": {}})
        member = leader.members.by_name["r1.0#1"]
        step.expel(member.incarnation, "")
        try:
            return await leader.admission._adopt(member, step, leader.links)  # type: ignore[arg-type]
        finally:
            await leader.aclose()

    assert run(adopted([1]), limit_s=100)
    assert not run(adopted([]), limit_s=100)


class Lying(Odd):
    """Whatever goes by way of r0.0 fails, it says, at the next hop; what does not is computed."""

    async def call(self, method: str, body: Any, tensors: Any = (), **_: Any) -> Message:
        if method != "microbatch":
            return Message({"fenced": True})
        if body["route"][0] == "r0.0#1":
            raise CallFailedError("failed", "a kernel failed", hop=1)
        return Message({"loss": 1.0, "timings": [[0.1, 0.1, 0.0]] * 2})


def test_a_lie_about_the_next_hop_does_not_end_the_run() -> None:
    async def main() -> None:
        leader, step = make({})
        leader.links = Lying({})  # type: ignore[assignment]
        for _ in range(2 * MAX_FAILURES):
            issue = step.issue(0, 0.0, leader.microbatches._unwanted(step, 0))
            if issue is None:
                break
            await leader.microbatches._drive(step, issue)
        assert leader.microbatches.losses == {0: 1.0}
        assert not step.expelled
        await leader.aclose()

    for _ in range(4):
        run(main(), limit_s=100)


class Failing(Odd):
    """Every microbatch fails at its second hop, by whichever replica; a fence is confirmed."""

    async def call(self, method: str, body: Any, tensors: Any = (), **_: Any) -> Message:
        if method == "microbatch":
            raise CallFailedError("failed", "a kernel failed", hop=1)
        return Message({"fenced": True})


def test_a_kernel_that_others_may_run_does_not_end_the_run() -> None:
    """Three replicas of a stage fail, or say so, in turn; the fourth has not been asked yet."""

    async def main() -> None:
        leader, step = make({})
        leader.links = Failing({})  # type: ignore[assignment]
        for name in ("r1.2#1", "r1.3#1"):
            step.admit(name, 1)

        async def fail(suspect: str) -> None:
            issue = step.issue(0, 0.0, [name for name in step.replicas(1) if name != suspect])
            assert issue is not None
            assert issue.route[1] == suspect
            await leader.microbatches._drive(step, issue)

        broken = ("r1.1#1", "r1.2#1", "r1.3#1")
        for _ in range(3):
            assert not step.expelled
            for suspect in broken:
                await fail(suspect)
        assert tuple(step.expelled) == broken
        assert step.replicas(1) == ["r1.0#1"]
        with pytest.raises(StageFailedError, match="stage 1 cannot compute microbatch 0"):
            await fail("r1.0#1")
        await leader.aclose()

    run(main(), limit_s=100)
