"""Joining while training goes on: in bounded time, without stalling it, and to the bit.

The joiner's links are slow and the chunks small, so that a download takes many steps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer import admission, downloads, gradients, joining, snapshots
from peer.disk import MemoryDisk
from peer.downloads import WINDOW
from peer.following import FOLLOW_WINDOW
from peer.inquiries import snapshot_mark
from peer.leader import Leader
from peer.member import Member
from peer.quorum import Quorum
from peer.snapshots import Donor, Snapshot
from swarm.net.channel import CallFailedError, Channel, Message
from swarm.sim.virtual_time import run
from swarm.terms import Ballot, Record, Term
from swarm.wire.codecs import decode, encode
from tests.protocol.simulated import (
    LEADER,
    Fault,
    Swarm,
    TinyBatches,
    baseline,
    plan,
    shared_pipeline,
)

JOINER = "r1.9"
NUM_PARAMETERS = 80  # of stage 1; its optimizer has two numbers for each


class Joining(Swarm):
    """A swarm that `JOINER` (and others) join while step `come_at` is committed."""

    def __init__(
        self,
        num_steps: int,
        *,
        replicas: tuple[int, ...] = (2, 2, 2),
        joiners: tuple[str, ...] = (JOINER,),
        rate_bps: float = 120e3,
        faults: tuple[Fault, ...] = (),
        seed: int = 0,
        come_at: int = 1,
    ) -> None:
        start = [Fault("record", "start", step=come_at, victim=name, stage=1) for name in joiners]
        super().__init__(
            replicas=replicas, faults=[*start, *faults], plan=plan(4, num_steps), seed=seed
        )
        self.num_steps, self.rate_bps, self.joiners = num_steps, rate_bps, joiners
        self.said: list[tuple[float, str]] = []
        self.most_copies = self.most_backlog = 0
        self.marks: dict[int, dict[str, str]] = {}  # of stage 1's states, by step and replica
        self.watch: Callable[[str], None] = lambda line: None
        for joiner in joiners:
            for number in range(replicas[1]):
                self.network.rates[f"r1.{number}", joiner] = rate_bps

    def start_replica(self, name: str, stage: int | None) -> Member:
        member = super().start_replica(name, stage)
        if name in self.joiners:
            member.say = self.say
        return member

    def say(self, line: str) -> None:
        self.said.append((asyncio.get_running_loop().time(), line))
        self.watch(line)

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if point == "admitted" and facts["replica"].startswith(self.joiners):
            for link in [each for each in self.network.rates if each[1] in facts["replica"]]:
                del self.network.rates[link]  # what it costs later is not what joining costs
        if point == "committed" and who.startswith("r1."):
            server = self.members[who].server
            assert server is not None
            mark = server.state.live[0].fingerprint()
            self.marks.setdefault(facts["step"], {})[who] = mark
        for member in self.members.values():
            if member.donor is not None:
                self.most_copies = max(self.most_copies, len(member.donor.copies))
                self.most_backlog = max(self.most_backlog, len(member.donor.backlog))

    def at(self, point: str, replica: str | None = None) -> list[tuple[float, dict[str, Any]]]:
        """When `point` was passed, by or about `replica`."""
        return [
            (t, facts)
            for t, who, each, facts in self.events
            if each == point and (replica in (None, who) or replica in str(facts.get("replica")))
        ]

    def finish(self) -> Swarm:
        """Run; the baseline's bits, every joiner serves, and no state was found to differ."""
        assert self.run(self.num_steps, limit_s=500)["sha256"] == baseline(self.num_steps)[0]
        for joiner in self.joiners:
            assert self.at("counted", joiner), f"{joiner} never took part: {self.said}"
        assert not self.at("diverged")
        for step, marks in self.marks.items():
            assert len(set(marks.values())) == 1, f"at commit {step}: {marks}"
        for joiner in self.joiners:
            step = self.at("counted", joiner)[0][1]["step"]
            assert len(self.marks[step]) > 1, f"{joiner} alone has made its first commit"
        assert self.most_copies <= snapshots.MAX_COPIES
        return self

    def once(self, line: str, do: Callable[[], None]) -> None:
        """Do something (within the run) when the joiner says `line` for the first time."""
        waiting = [line]

        def watch(said: str) -> None:
            if waiting and said.startswith(waiting[0]):
                waiting.clear()
                self.struck = asyncio.get_running_loop().time()
                asyncio.get_running_loop().call_soon(do)

        self.watch = watch

    struck = 0.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "CHUNK", 1)


async def nonsense(*_: Any) -> Message:
    return Message({"step": "x"})


async def never(*_: Any) -> Message:
    """Its device hangs, and its process answers pings."""
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("method", "answer"),
    [("snapshot", nonsense), ("snapshot", never), ("gradient", nonsense), ("gradient", never)],
    ids=["odd offer", "no offer", "odd gradient", "no gradient"],
)
def test_one_bad_donor_keeps_nobody_out(
    method: str, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.donors.OTHERS_S", 0.2)
    monkeypatch.setattr(snapshots, "WAIT_S", 0.3)  # for a commit, before a donor says no
    monkeypatch.setattr(gradients, "CHUNK_S", 1.0)
    swarm = Joining(60, rate_bps=1e6)
    seen = swarm.on_probe

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        if (point, facts.get("step")) == ("record", 0):
            methods = swarm.members["r1.0"].links.methods
            methods[method] = replace(methods[method], handle=answer)
        seen(who, point, facts)

    swarm.on_probe = probe  # type: ignore[method-assign]
    swarm.finish()


def answer_for(
    liar: str, method: str, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`answer(donor, honest, body)` is what donors called `liar` give instead of `honest()`."""
    honest = getattr(Donor, method)

    async def handle(donor: Donor, channel: Channel, message: Message) -> Message:
        async def usual() -> Message:
            return await honest(donor, channel, message)

        if donor.server.links.incarnation.startswith(liar) and "release" not in message.body:
            return await answer(donor, usual, message.body)
        return await usual()

    monkeypatch.setattr(Donor, method, handle)


def offering(at: int, first: int, last: int) -> Callable[..., Any]:
    """As if it were so many steps ahead, with copies of steps from there on; it gives none."""

    async def answer(donor: Donor, honest: Any, body: dict[str, Any]) -> Message:
        step = donor.server.parts.ledger.step + at
        if body.get("offer") is True:
            return Message({"step": step, "copies": [step + i for i in range(first, last)]})
        return await never()

    return answer


async def refusing(donor: Donor, honest: Any, body: dict[str, Any]) -> Message:
    """It offers all steps that were, and says no to each when the next is over."""
    step = donor.server.parts.ledger.step
    if body.get("offer") is True:
        return Message({"step": step, "copies": list(range(step))})
    await asyncio.sleep(0.4)
    raise CallFailedError("refused", "no")


@pytest.mark.parametrize(
    "answer",
    [offering(0, 1000, 1064), offering(1000, 0, 64), offering(1000, -64, 1), refusing],
    ids=["of steps to come", "far ahead", "of steps up to there", "and says no in the end"],
)
@pytest.mark.parametrize("donors", [2, 3])
def test_who_offers_copies_that_it_does_not_give_is_waited_for_once(
    donors: int, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.donors.OTHERS_S", 0.6)
    monkeypatch.setattr(snapshots, "WAIT_S", 0.3)
    answer_for("r1.0", "_snapshot", answer, monkeypatch)
    swarm = Joining(50, replicas=(2, donors, 2), rate_bps=1e6, come_at=12)
    swarm.finish()
    joined, loaded = swarm.at("joined", JOINER)[0][0], swarm.at("committed", JOINER)[0][0]
    assert loaded - joined < 3.5


def test_a_donor_that_needs_long_is_asked_again_when_the_others_give_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All copies of one are being read, and it says so at once; the other has a big state."""
    monkeypatch.setattr("peer.donors.OTHERS_S", 0.2)
    monkeypatch.setattr(snapshots, "WAIT_S", 0.1)

    async def full(donor: Donor, honest: Any, body: dict[str, Any]) -> Message:
        if body.get("offer") is True:
            return Message({"step": donor.server.parts.ledger.step, "copies": []})
        raise CallFailedError("refused", "all copies here are being read")

    async def slow(donor: Donor, honest: Any, body: dict[str, Any]) -> Message:
        described: Message = await honest()
        if body.get("offer") is not True:
            await asyncio.sleep(1.0)
        return described

    answer_for("r1.0", "_snapshot", full, monkeypatch)
    answer_for("r1.1", "_snapshot", slow, monkeypatch)
    Joining(60, rate_bps=1e6).finish()


def test_donors_that_describe_what_they_do_not_give_are_asked_after_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two agree on a state that is not the third's, and then give no chunk of it."""
    monkeypatch.setattr(downloads, "CHUNK_S", 1.0)
    monkeypatch.setattr(snapshots, "WAIT_S", 0.3)

    async def described(donor: Donor, honest: Any, body: dict[str, Any]) -> Message:
        told: Message = await honest()
        if body.get("offer") is True:
            return told
        return Message({**told.body, "digests": bytes(len(told.body["digests"]))})

    async def none(*_: Any) -> Message:
        return await never()

    for liar in ("r1.0", "r1.1"):
        answer_for(liar, "_snapshot", described, monkeypatch)
        answer_for(liar, "_chunk", none, monkeypatch)
    swarm = Joining(60, replicas=(2, 3, 2), rate_bps=1e6)
    swarm.finish()
    told = [line for _, line in swarm.said if line.startswith("cannot serve yet: no donor is left")]
    assert len(told) == 1, swarm.said


def note_questions(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the joiner asks its donors for a chunk, and for a gradient."""
    asked: Counter[str] = Counter()

    def noting(kind: str) -> None:
        honest = getattr(Donor, kind)

        async def answer(donor: Donor, channel: Channel, message: Message) -> Message:
            asked[kind] += channel.peer == JOINER
            return await honest(donor, channel, message)

        monkeypatch.setattr(Donor, kind, answer)

    noting("_chunk")
    noting("_gradient")
    return asked


@pytest.mark.parametrize(("donors", "rate_bps"), [(1, 90e3), (2, 50e3)])
def test_a_download_of_many_steps_stalls_training_for_less_than_one(
    donors: int, rate_bps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 0.14 s (with one donor 0.16 s), the download 5 s and more: as long as its
    connections need for the bits, and a few steps."""
    asked = note_questions(monkeypatch)
    swarm = Joining(90, replicas=(2, donors, 2), rate_bps=rate_bps)
    bits = 0  # that donors have sent to the joiner, until it serves

    def tap(source: str, target: str, data: bytes) -> bytes:
        nonlocal bits
        bits += 8 * len(data) * ((source, target) in swarm.network.rates)
        return data

    swarm.network.corrupt = tap
    swarm.finish()
    joined, admitted = swarm.at("joined", JOINER)[0][0], swarm.at("admitted", JOINER)[0]
    loaded = swarm.at("committed", JOINER)[0][0]
    walls = [result.wall_s for result in swarm.results]
    usual = sorted(walls[1:30])[14]
    step = admitted[1]["step"]
    assert loaded - joined > 5.0 > 30 * usual
    assert admitted[0] - joined < bits / (donors * rate_bps) + 6 * usual
    # And no bits but those it needs, the last chunks and gradients twice at most.
    assert asked["_chunk"] <= 3 * NUM_PARAMETERS + 2 * WINDOW
    assert asked["_gradient"] <= step + 2 * FOLLOW_WINDOW
    assert admitted[0] - loaded < 10 * usual  # caught up with more than 30 steps
    stalls = [wall - usual for wall in walls[2 : step + 1]]
    assert max(stalls) < usual
    assert sum(stalls) < usual + 0.01 * len(stalls)  # one step at most; the rest is jitter
    assert len(swarm.at("hold")) <= 1 + 90 // 10
    said = [line for _, line in swarm.said]
    assert 1 <= len([line for line in said if line.startswith("downloading")]) <= 11
    assert 1 <= len([line for line in said if line.startswith("catching up")]) <= 11


def test_a_joiner_that_is_nearly_too_slow_is_waited_for_once() -> None:
    """A gradient takes longer than a step over one connection; two donors together keep up."""
    swarm = Joining(95, rate_bps=42e3)
    swarm.finish()
    step = swarm.at("admitted", JOINER)[0][1]["step"]
    walls = [result.wall_s for result in swarm.results]
    usual = sorted(walls[1:30])[14]
    assert [facts["step"] for _, facts in swarm.at("hold")] == [step]
    assert max(walls[2 : step + 1]) < 2 * usual


def test_a_joiner_whose_connection_is_slower_than_the_steps_stalls_nobody() -> None:
    """One gradient takes longer than a step: it cannot keep up, and costs the others nothing."""
    swarm = Joining(40, rate_bps=15e3)
    assert swarm.run(40, limit_s=500)["sha256"] == baseline(40)[0]
    walls = [result.wall_s for result in swarm.results]
    usual = sorted(walls)[len(walls) // 2]
    assert max(walls[2:]) < 2 * usual
    assert swarm.most_copies == 1


def test_a_volunteer_is_told_that_its_connection_is_too_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As soon as the snapshots it may try in a row have all been in vain; in one line."""
    monkeypatch.setattr(joining, "MAX_SNAPSHOTS", 0)
    swarm = Joining(40)
    swarm.once("cannot serve yet", lambda: monkeypatch.setattr(joining, "MAX_SNAPSHOTS", 3))
    swarm.finish()
    told = [line for _, line in swarm.said if line.startswith("cannot serve yet")]
    assert len(told) == 1
    assert "too slow for this stage: each step brings an update of 0.0 MB" in told[0]


@pytest.mark.parametrize("donors", [1, 2, 3])
def test_chunks_come_from_all_donors(donors: int) -> None:
    swarm = Joining(45, replicas=(1, donors, 1))
    given: dict[str, int] = {}

    def note(member: Member) -> None:
        if member.catching_up is not None and member.catching_up.download is not None:
            given.update(member.catching_up.download.fetched)

    swarm.watch = lambda line: note(swarm.members[JOINER])
    swarm.finish()
    assert len(given) == donors
    assert min(given.values()) > sum(given.values()) / donors / 2


def test_a_donor_dies_while_it_gives() -> None:
    swarm = Joining(45)
    swarm.once("downloading 4", lambda: swarm.kill("r1.0"))
    swarm.finish()
    assert swarm.struck
    assert len(swarm.at("joined", JOINER)) == 1
    downloads = [line for _, line in swarm.said if line.startswith("downloading 0")]
    assert len(downloads) == 1  # nothing was begun anew


def test_the_only_donor_is_cut_off_and_the_download_goes_on() -> None:
    """Both connections end; what was verified is not fetched again."""
    swarm = Joining(60, replicas=(1, 1, 1))

    def cut() -> None:
        for stream in list(swarm.network.transports[JOINER].streams):
            stream.abort()

    swarm.once("downloading 5", cut)
    resumed: list[int] = []
    swarm.at_end = lambda: resumed.append(swarm.members[JOINER].catching_up.resumed)
    swarm.finish()
    assert swarm.struck
    assert resumed[0] > 50


def test_the_leader_is_lost_during_the_download() -> None:
    """The download does not need it, and the joiner finds it again."""
    swarm = Joining(60, rate_bps=1e6)
    swarm.silence_s = 1.0

    def cut() -> None:
        swarm.network.cut(JOINER, LEADER)
        asyncio.get_running_loop().call_later(3.0, swarm.network.heal, JOINER, LEADER)

    swarm.once("downloading 2", cut)
    swarm.finish()
    assert swarm.struck
    assert len(swarm.at("joined", JOINER)) == 2
    assert len([line for _, line in swarm.said if line.startswith("downloading 100")]) == 1


def test_a_joiner_looks_at_once_for_a_leader_that_it_has_lost() -> None:
    """However long its download has taken by then."""
    swarm = Joining(100, rate_bps=50e3)

    def lose() -> None:
        channel = swarm.members[JOINER].leader
        assert channel is not None
        channel.end("lost")

    swarm.once("downloading 2", lose)
    swarm.finish()
    first, again = (t for t, _ in swarm.at("joined", JOINER))
    lost = next(t for t, line in swarm.said if line.startswith("lost the leader"))
    assert lost - first > 5.0
    assert again - lost < 0.5


def test_a_joiner_dies_and_comes_back_empty() -> None:
    swarm = Joining(80)

    def die() -> None:
        swarm.kill(JOINER)
        asyncio.get_running_loop().call_later(0.5, swarm.restart, JOINER, 1)

    swarm.once("downloading 6", die)
    swarm.finish()
    assert swarm.struck
    assert swarm.lives[JOINER] == 2


def test_who_comes_to_a_full_run_is_told_so_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_MEMBERS", 6)
    swarm = Joining(60, rate_bps=1e6)
    swarm.once("cannot serve yet: the run has 6 replicas", lambda: swarm.kill("r1.1"))
    swarm.finish()
    assert swarm.struck
    told = [line for _, line in swarm.said]
    full = next(at for at, line in enumerate(told) if line.startswith("cannot serve yet"))
    assert told[full + 1] != "looking for the leader", "it has answered"


def lie(swarm: Joining, liar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of every chunk that `liar` gives is wrong."""
    honest = Donor._chunk

    async def chunk(donor: Donor, channel: Channel, message: Message) -> Message:
        answer = await honest(donor, channel, message)
        if donor.server.links.incarnation.startswith(liar):
            wrong = decode(answer.tensors[0]).clone()
            wrong.view(torch.int32)[0] ^= 1 << 12
            return Message({}, [encode(wrong, "raw")])
        return answer

    monkeypatch.setattr(Donor, "_chunk", chunk)


def test_a_wrong_chunk_is_noticed_and_its_donor_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Joining(60, rate_bps=1e6)
    lie(swarm, "r1.1", monkeypatch)
    swarm.finish()
    assert [facts["donor"] for _, facts in swarm.at("bad_chunk") if "donor" in facts] == ["r1.1#1"]
    assert [facts["replica"] for _, facts in swarm.at("bad_chunk", "r1.1#1")] == ["r1.1#1"]


def test_a_state_that_its_only_donor_got_wrong_is_found_at_the_first_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every chunk is what the donor said it would be: only the fingerprints tell."""
    honest, wrong = Donor.take, list[int]()

    async def take(donor: Donor) -> Snapshot:
        snapshot = await honest(donor)
        if not wrong:
            wrong.append(snapshot.step)
            snapshot.tensors["parameters"][0] += 1e-3
            snapshot.fingerprint = snapshot_mark(snapshot)
        return snapshot

    monkeypatch.setattr(Donor, "take", take)
    swarm = Joining(100, replicas=(1, 1, 1))
    swarm.finish()
    assert wrong
    downloads = [line for _, line in swarm.said if line.startswith("downloading 0")]
    assert len(downloads) == 2
    assert not swarm.at("bad_chunk")
    assert all(step > wrong[0] for step, marks in swarm.marks.items() if JOINER in marks)


def test_a_bit_flips_in_transit() -> None:
    """In a frame of a chunk, once: the chunk is fetched elsewhere."""
    swarm = Joining(60, rate_bps=1e6)
    flipped: list[str] = []

    def corrupt(source: str, target: str, data: bytes) -> bytes:
        if target == JOINER and source == "r1.0" and not flipped and len(data) < 200:
            marker = data.find(b"float32\x91")
            if marker > 0 and data[-8:].count(0) < 4 and b"reply" in data and b"raw" in data:
                flipped.append(source)
                return data[:-1] + bytes([data[-1] ^ 1])
        return data

    swarm.network.corrupt = corrupt
    swarm.finish()
    assert flipped == ["r1.0"]
    assert [facts["donor"] for _, facts in swarm.at("bad_chunk") if "donor" in facts] == ["r1.0#1"]


def test_three_joiners_at_once_share_copies() -> None:
    swarm = Joining(90, joiners=("r1.7", "r1.8", JOINER), rate_bps=80e3)
    swarm.finish()
    assert swarm.most_copies <= 2


def test_a_joiner_beyond_the_backlog_takes_another_snapshot() -> None:
    """Donors keep four gradients: a joiner that pauses for longer begins again, and gets in."""
    swarm = Joining(80, rate_bps=200e3)
    start = swarm.start_replica

    def start_small(name: str, stage: int | None) -> Member:
        member = start(name, stage)
        build = member._build

        async def small(which: int) -> None:
            await build(which)
            assert member.donor is not None
            member.donor.backlog_bytes = 4 * 4 * member.server.state.layout.total

        member._build = small  # type: ignore[method-assign]
        return member

    swarm.start_replica = start_small  # type: ignore[method-assign]

    def freeze() -> None:
        swarm.network.freeze(JOINER)
        asyncio.get_running_loop().call_later(1.5, swarm.network.thaw, JOINER)

    swarm.once("downloading 3", freeze)
    swarm.finish()
    assert swarm.struck
    assert swarm.most_backlog <= 5
    assert len([line for _, line in swarm.said if line.startswith("downloading 0")]) >= 2


def test_a_download_that_nothing_comes_of_is_said_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks do not come, gradients do: one line, not one per gradient; then the chunks come."""
    monkeypatch.setattr(joining, "STARVED_S", 2.0)
    monkeypatch.setattr(joining, "SAY_AGAIN_S", 4.0)
    honest, late = Donor._chunk, [12]

    async def chunk(donor: Donor, channel: Channel, message: Message) -> Message:
        if late[0] and channel.peer == JOINER:
            late[0] -= 1
            await asyncio.sleep(5.0)
        return await honest(donor, channel, message)

    monkeypatch.setattr(Donor, "_chunk", chunk)
    swarm = Joining(160, rate_bps=1e6)
    swarm.finish()
    told = [(t, line) for t, line in swarm.said if "also carries" in line]
    assert told
    assert "no more of it comes; this connection also carries 0.0 MB for every step" in told[0][1]
    assert all(later[0] - earlier[0] >= 4.0 for earlier, later in itertools.pairwise(told))


def test_a_joiner_that_falls_off_says_that_it_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not silently: the same first tenth again and again would look like a hang."""
    from peer import following

    fetch, fall = following.Following._fetch, [0]

    async def gone(self: following.Following, *args: Any) -> Any:
        if fall[0] and self.server.links.incarnation.startswith(JOINER):
            fall[0] = 0
            raise following.FellOffError("nobody keeps it any more")
        return await fetch(self, *args)

    monkeypatch.setattr(following.Following, "_fetch", gone)
    swarm = Joining(130, rate_bps=60e3)
    swarm.once("downloading 1", lambda: fall.append(fall.pop() + 1))
    swarm.finish()
    assert swarm.struck
    told = [line for _, line in swarm.said if line.startswith("beginning anew")]
    assert len(told) == 1, swarm.said


class Applicants:
    """A leader of a run whose replicas must have one fingerprint, and who asks it to take them."""

    def __init__(self, *named: str) -> None:
        """`named` took part in the newest commit; nobody: there is none."""
        quorum = Quorum([LEADER], LEADER, MemoryDisk())
        pipeline, batches = shared_pipeline(2), TinyBatches()
        self.leader = Leader(plan(2, 2), pipeline, batches, quorum, same_numerics=True)
        self.leader.term = quorum.term = Term(0, 1, f"{LEADER}#1")
        self.leader.links = SimpleNamespace(  # type: ignore[assignment]
            open_channel=lambda name: None, end_channels=self.end_channels
        )
        self.sent_away: list[str] = []
        if named:
            self.commits(*named)

    def commits(self, *names: str) -> None:
        members = {stage: tuple(f"{name}#1" for name in names[stage::2]) for stage in (0, 1)}
        ballot = Ballot(self.leader.term, self.leader.next_step, 1)
        self.leader.record = Record(ballot, "", members, {}, 1.0, 1.0, 0.1, "applied", 1.0, 1)

    def end_channels(self, name: str, why: str) -> None:
        self.sent_away.append(name)
        channel: Any = SimpleNamespace(incarnation=name, ended=why)
        self.leader.on_channel_closed(channel)

    async def join(self, peer: str, numerics: str, **facts: Any) -> str:
        """Why it was refused, or nothing."""
        channel: Any = SimpleNamespace(peer=peer, incarnation=f"{peer}#1")
        body = {"stage": 1, "addresses": [], "numerics": numerics, **facts}
        try:
            await self.leader.admission.methods()["join"].handle(channel, Message(body))
        except CallFailedError as error:
            return f"{error.message}, for ever: {error.detail['fatal']}"
        return ""

    def play(self, story: Callable[[Applicants], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            await story(self)
            await self.leader.aclose()

        run(main(), limit_s=100)


ODD = "this machine's optimizer steps round differently from the run's others, for ever: {}"
NOW, FOR_EVER = ODD.format(False), ODD.format(True)


def test_replicas_whose_optimizer_rounds_differently_are_refused() -> None:
    """As the first that was taken; one that was refused itself has no say. For good after a
    commit: until then the first may be the odd one."""

    async def story(asked: Applicants) -> None:
        assert "no stage fits" in await asked.join("small", "odd", stage=None, memory_bytes=1)
        assert not await asked.join("first", "usual")
        assert await asked.join("later", "odd") == NOW
        assert not await asked.join("twin", "usual")
        assert sorted(asked.leader.members.by_name) == ["first#1", "twin#1"]
        asked.commits("first", "twin")
        assert await asked.join("later", "odd") == FOR_EVER
        assert not asked.sent_away

    Applicants().play(story)


def test_an_odd_joiner_that_comes_to_a_new_leader_first_ends_nobody() -> None:
    """Those who hold the state are taken in, and it goes."""

    async def story(asked: Applicants) -> None:
        assert not await asked.join("liar", "odd")
        assert not asked.sent_away
        assert await asked.join("new", "usual") == NOW
        assert not await asked.join("a", "usual")
        assert asked.sent_away == ["liar#1"]
        assert not await asked.join("new", "usual")
        assert await asked.join("liar", "odd") == NOW
        assert not await asked.join("b", "usual")
        assert await asked.join("liar", "odd") == FOR_EVER
        assert sorted(asked.leader.members.by_name) == ["a#1", "b#1", "new#1"]

    Applicants("a", "b", "c").play(story)


def test_one_that_holds_the_state_and_lies_now_ends_nobody() -> None:
    """Most of those who hold it say how the run's optimizer rounds."""

    async def story(asked: Applicants) -> None:
        assert not await asked.join("new", "usual")
        assert not await asked.join("liar", "odd")
        assert asked.sent_away == ["new#1"]
        assert await asked.join("new", "usual") == NOW
        assert not await asked.join("a", "usual")
        assert not await asked.join("b", "usual")
        assert not await asked.join("new", "usual")
        assert await asked.join("later", "odd") == FOR_EVER

    Applicants("a", "b", "liar").play(story)
