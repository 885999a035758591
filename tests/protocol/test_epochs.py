"""Going back to a checkpoint: a stage's state is lost at any point, and the run ends with the same
parameters; who of several trainers leads, or dies meanwhile, changes nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from peer.inquiries import held_hashes
from peer.leader import Leader
from peer.publish import Status
from peer.restoring import AwayError, Origin, Saved
from peer.snapshots import Snapshot
from swarm.consensus import Vote
from swarm.errors import DataError, StorageError
from swarm.terms import Record
from tests.protocol.checkpoints import MemorySaved, snapshot_of
from tests.protocol.faults import LEADER, Fault
from tests.protocol.rivals import FIVE, Rival
from tests.protocol.scenario import LIMIT_S, MAX_DRAWS, TRAINERS
from tests.protocol.shrink import failure_of
from tests.protocol.simulated import SlowDisk, Swarm, baseline, plan

STEPS = 6
ALONE = ("t0",)


class EpochSwarm(Swarm):
    """A `Swarm` with checkpoints every `every` steps (0: none) whose stages may die whole.

    `at` is where stage `lost` dies: the `count`-th time one of it passes that point of `step`. It
    is back, empty, after `back_s`.
    """

    every = 2
    lost, point, step, count, back_s = 0, "", 0, 1, 5.0
    everybody_dies = False
    leader_dies_at = ""  # a point of the leader's, after the loss

    def __post_init__(self) -> None:
        super().__post_init__()
        self.leases = dict.fromkeys(self.trainer_ids, 1.0)
        self.saved = MemorySaved()
        self.epochs: list[tuple[int, int]] = []
        self.paused: list[int] = []
        self.deaths = self.leader_deaths = 0
        self.gone: set[str] = set()  # trainers that never come back

    def revive(self, name: str) -> None:
        if name not in self.gone:
            super().revive(name)

    def saved_of(self, name: str) -> Saved | None:
        return self.saved

    async def at_record(self, leader: Leader) -> None:
        await super().at_record(leader)
        if self.results:
            # Commits are applied while the next step begins: a checkpoint waits for them.
            await asyncio.sleep(0.5)
        step = leader.next_step
        if self.every and step and step % self.every == 0 and step not in self.saved.states:
            states = self.copies(step)
            if states is not None:
                self.saved.keep(step, states)
                leader.saved_step = step

    def copies(self, step: int) -> list[Snapshot] | None:
        """Every stage's state after the last commit, from whoever has applied it."""
        found: dict[int, Snapshot] = {}
        for member in self.members.values():
            server = member.server
            if server is None or server.parts.ledger.step != step:
                continue
            if (snapshot := snapshot_of(member)) is not None:
                found[server.stage] = snapshot
        if len(found) < self.pipeline.num_stages:
            return None
        return [found[stage] for stage in range(self.pipeline.num_stages)]

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if point == "epoch":
            self.epochs.append((facts["epoch"], facts["step"]))
        if point == "paused":
            self.paused.append(facts["stage"])
        if self.deaths and who in self.trainers and point == self.leader_dies_at:
            self.leader_dies_at, self.leader_deaths = "", self.leader_deaths + 1
            self.later(0.0, self.kill_trainer, who, 3.0)
        of_stage = who.startswith(f"r{self.lost}.") or self.everybody_dies
        if of_stage and point == self.point and facts.get("step") == self.step:
            self.count -= 1
            if self.count == 0:
                self.deaths += 1
                self.later(0.0, self.lose)

    def lose(self) -> None:
        for name in list(self.members):
            stage = int(name[1 : name.index(".")])
            if self.everybody_dies or stage == self.lost:
                self.kill(name)
                self.later(self.back_s, self.restart, name, stage)


class ConnectedTwice(EpochSwarm):
    """The leader and each replica have two channels, as where both dialled at once; what a replica
    joined over is not the one that its leader finds."""

    async def at_record(self, leader: Leader) -> None:
        await super().at_record(leader)
        if leader.next_step == 2 and not self.deaths:
            for member in leader.members:
                await leader.links._dial(member.incarnation, ())


def swarm_of(
    trainers: tuple[str, ...] = ALONE, kind: type[EpochSwarm] = EpochSwarm, **more: Any
) -> EpochSwarm:
    return kind(num_stages=3, replicas=(2, 1, 2), plan=plan(4, STEPS), trainer_ids=trainers, **more)


def run_exactly(swarm: EpochSwarm, *, surely: bool = True) -> None:
    expected, _ = baseline(STEPS, swarm.plan.num_microbatches)
    assert swarm.run(STEPS, limit_s=LIMIT_S)["sha256"] == expected
    assert swarm.deaths or not surely, "nothing was lost"


POINTS = ["forward", "backward", "counted", "average", "prepared", "commit", "committed"]


@pytest.mark.parametrize("trainers", [ALONE, TRAINERS], ids=["one", "three"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_all_replicas_of_a_stage_die(point: str, stage: int, trainers: tuple[str, ...]) -> None:
    swarm = swarm_of(trainers)
    swarm.lost, swarm.point, swarm.step = stage, point, 3
    run_exactly(swarm)
    assert swarm.epochs == [(1, 2)]
    assert stage in swarm.paused


@pytest.mark.parametrize("trainers", [ALONE, TRAINERS], ids=["one", "three"])
def test_who_is_connected_twice_comes_back_too(trainers: tuple[str, ...]) -> None:
    swarm = swarm_of(trainers, ConnectedTwice)
    swarm.lost, swarm.point, swarm.step = 2, "backward", 3
    run_exactly(swarm)
    assert swarm.epochs == [(1, 2)]


def test_everybody_dies() -> None:
    swarm = swarm_of()
    swarm.point, swarm.step, swarm.everybody_dies = "backward", 5, True
    run_exactly(swarm)
    assert swarm.epochs == [(1, 4)]


def test_without_a_checkpoint_the_run_begins_again() -> None:
    swarm = swarm_of()
    swarm.every, swarm.point, swarm.step = 0, "forward", 3
    run_exactly(swarm)
    assert swarm.epochs == [(1, 0)]


def test_first_weights_that_differ_are_fetched_where_the_run_begins_again_too() -> None:
    """As between kinds of CPU; here of one of three replicas, from the epoch on."""
    swarm = EpochSwarm(num_stages=3, replicas=(2, 1, 3), plan=plan(4, STEPS), trainer_ids=ALONE)
    swarm.every, swarm.point, swarm.step, swarm.lost = 0, "forward", 3, 1
    seen, differing = swarm.on_probe, list[str]()

    def probe(who: str, point: str, facts: dict[str, Any]) -> None:
        seen(who, point, facts)
        if point == "epoch":
            catching_up = swarm.members["r2.1"].catching_up
            assert catching_up is not None
            weights = catching_up._first_weights
            assert weights is not None

            def others() -> dict[str, Any]:
                differing.append("r2.1")
                return {name: each + 1e-3 for name, each in weights().items()}

            catching_up._first_weights = others

    swarm.on_probe = probe  # type: ignore[method-assign]
    run_exactly(swarm)
    assert differing == ["r2.1"], "drawn once, and then fetched"
    assert swarm.epochs == [(1, 0)]


def test_before_the_first_commit_nothing_is_lost() -> None:
    swarm = swarm_of()
    swarm.point, swarm.step = "counted", 0
    run_exactly(swarm)
    assert swarm.epochs == []


def test_a_damaged_checkpoint_gives_way_to_the_one_before() -> None:
    swarm = swarm_of()
    swarm.point, swarm.step = "forward", 5
    swarm.saved.broken.add(4)
    run_exactly(swarm)
    assert swarm.epochs == [(1, 2)]


@pytest.mark.parametrize("trainers", [ALONE, TRAINERS], ids=["one", "three"])
def test_an_epoch_is_later_than_those_of_all_checkpoints(trainers: tuple[str, ...]) -> None:
    """They may be from before the trainer lost its disk; what comes now has to outrank them."""
    swarm = swarm_of(trainers)
    swarm.point, swarm.step = "forward", 5
    swarm.saved.epoch = 7
    run_exactly(swarm)
    assert swarm.epochs == [(8, 4)]


@pytest.mark.parametrize("trainers", [ALONE, TRAINERS], ids=["one", "three"])
@pytest.mark.parametrize("point", ["paused", "epoch", "joined", "admitted"])
def test_the_leader_dies_while_it_opens_an_epoch(point: str, trainers: tuple[str, ...]) -> None:
    swarm = swarm_of(trainers)
    swarm.point, swarm.step, swarm.leader_dies_at = "forward", 3, point
    run_exactly(swarm)
    assert swarm.leader_deaths == 1
    assert swarm.epochs[0] == (1, 2)


class LeaderAway(EpochSwarm):
    """Its only trainer is killed after the second step, and back when replicas look for it at
    longer intervals."""

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if point == "committed" and facts["step"] == 1 and not self.leader_deaths:
            self.leader_deaths += 1
            self.later(0.0, self.kill_trainer, *ALONE, 40.0)


def test_a_leader_that_comes_back_misses_nobody_who_is_only_looking_for_it() -> None:
    swarm = swarm_of(kind=LeaderAway)
    run_exactly(swarm, surely=False)
    assert swarm.leader_deaths == 1
    assert swarm.paused == swarm.epochs == []


def test_a_replica_of_the_old_epoch_comes_back_late_and_drops_its_state() -> None:
    """It holds the state that was lost, but the run has gone back without it."""
    swarm = swarm_of()
    swarm.point, swarm.step, swarm.lost, swarm.back_s = "forward", 3, 2, 2.0
    late: list[str] = []

    def freeze_one() -> None:
        # One of stage 2 is cut off instead of killed: nobody reaches it until later.
        name = "r2.1"
        swarm.network.freeze(name)
        late.append(name)
        swarm.later(60.0, swarm.network.thaw, name)
        swarm.kill("r2.0")
        swarm.later(2.0, swarm.restart, "r2.0", 2)

    swarm.lose = freeze_one  # type: ignore[method-assign]
    run_exactly(swarm)
    assert late
    assert swarm.epochs == [(1, 2)]


def test_a_holder_that_was_only_cut_off_saves_the_steps() -> None:
    """It is back before the leader's patience ends: the run goes on, and nothing is lost."""
    swarm = swarm_of()
    swarm.point, swarm.step, swarm.lost = "forward", 3, 1

    def freeze() -> None:
        swarm.network.freeze("r1.0")
        swarm.later(8.0, swarm.network.thaw, "r1.0")
        swarm.start_replica("r1.9", 1)

    swarm.lose = freeze  # type: ignore[method-assign]
    run_exactly(swarm)
    assert swarm.epochs == []


class OwnSaved(MemorySaved):
    """The checkpoints of one trainer: those of the steps that it led."""

    async def newest(self, record: Record | None) -> Origin:
        origin = await super().newest(record)
        if record is not None and origin.step < record.saved:
            raise AwayError(f"the newest checkpoint, of step {record.saved}, is away")
        return origin


class SavedApart(EpochSwarm):
    """Every trainer has a disk of its own for the checkpoints it writes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.own = {name: OwnSaved() for name in self.trainer_ids}

    def saved_of(self, name: str) -> Saved:
        return self.own[name]

    async def at_record(self, leader: Leader) -> None:
        self.saved = self.own[leader.quorum.me]
        await super().at_record(leader)


def test_an_order_is_refused_to_a_trainer_without_the_newest_checkpoint() -> None:
    """It may have been away when that was written: only the others' records tell it of that."""
    swarm = swarm_of(TRAINERS, SavedApart)
    swarm.point, swarm.step, swarm.back_s = "forward", 3, LIMIT_S
    lost = swarm.lose

    def order() -> None:
        lost()
        swarm.kill_trainer("t1", 1.0)
        swarm.order = swarm.own["t1"].newest

    swarm.lose = order  # type: ignore[method-assign]
    with pytest.raises(DataError, match="the newest checkpoint, of step 2, is away"):
        swarm.run(STEPS, limit_s=LIMIT_S)


@pytest.mark.parametrize("owner", TRAINERS)
def test_a_leader_stands_aside_for_the_trainer_that_has_the_checkpoint(owner: str) -> None:
    """That one comes back last, when another leads already: whatever its rank, its turn comes."""
    swarm = swarm_of(TRAINERS, SavedApart)
    swarm.point, swarm.step = "forward", 3
    lost = swarm.lose

    def all_die() -> None:
        lost()
        (writer,) = (name for name, saved in swarm.own.items() if saved.states)
        swarm.own[writer], swarm.own[owner] = swarm.own[owner], swarm.own[writer]
        for name in TRAINERS:
            swarm.kill_trainer(name, 30.0 if name == owner else 1.0)

    swarm.lose = all_die  # type: ignore[method-assign]
    run_exactly(swarm)
    assert swarm.epochs == [(1, 2)]


class FailingSaved(MemorySaved):
    """The first looks fail, each for another want."""

    def __init__(self, leader_says: Callable[[], str]) -> None:
        super().__init__()
        self.leader_says = leader_says
        self.wants = [MemoryError(), RuntimeError("no room"), OSError("disk"), StorageError("full")]
        self.said: list[str] = []

    async def newest(self, record: Record | None) -> Origin:
        self.said.append(self.leader_says())
        if self.wants:
            raise self.wants.pop(0)
        return await super().newest(record)


def test_a_look_for_checkpoints_that_fails_is_followed_by_another() -> None:
    swarm = swarm_of()
    swarm.point, swarm.step = "forward", 3
    swarm.saved = saved = FailingSaved(
        lambda: swarm.leader.restoring.trouble if swarm.leader is not None else ""
    )
    run_exactly(swarm)
    assert swarm.epochs == [(1, 2)]
    wants = ["MemoryError()", "RuntimeError('no room')", "OSError('disk')", "full"]
    assert saved.said[:5] == ["", *wants]


class FailingStates(MemorySaved):
    """There is no memory for what is read first."""

    reads = 0

    async def state(self, record: Record, stage: int) -> Snapshot:
        self.reads += 1
        if self.reads == 1:
            raise MemoryError
        return await super().state(record, stage)


def test_a_state_that_could_not_be_read_is_read_again() -> None:
    swarm = swarm_of()
    swarm.point, swarm.step, swarm.saved = "forward", 3, FailingStates()
    run_exactly(swarm)
    assert swarm.epochs == [(1, 2)]


class SlowSaved(MemorySaved):
    """The look after the election takes so long that the others elect somebody else."""

    looks = 0

    async def newest(self, record: Record | None) -> Origin:
        self.looks += 1
        await asyncio.sleep(30.0 if self.looks == 2 else 0.0)
        return await super().newest(record)


def test_who_looks_for_long_after_its_election_leaves_the_epoch_to_another() -> None:
    swarm = swarm_of(TRAINERS)
    swarm.saved = SlowSaved()
    swarm.point, swarm.step = "forward", 3
    run_exactly(swarm)
    assert [step for _, step in swarm.epochs] == [2]
    assert swarm.epochs[0][0] > 1


def test_who_is_succeeded_while_it_opens_an_epoch_does_not_lead() -> None:
    """The record that opens it is chosen, and being written at home, as another trainer wins the
    next term."""
    swarm = swarm_of(FIVE)
    swarm.point, swarm.step = "forward", 3

    def opens(vote: Vote) -> bool:
        accepted = vote.accepted
        return accepted is not None and accepted.record is not None and accepted.record.restores

    rival = Rival(swarm, "t0", opens, 0.5)
    run_exactly(swarm)
    assert rival.has_led
    assert swarm.epochs == [(1, 2)]


def test_an_epoch_that_begins_without_going_back_has_passed_what_was_there() -> None:
    """Whoever was to open it was refused after it had won its term."""
    swarm = swarm_of(TRAINERS, SavedApart)
    swarm.point, swarm.step = "backward", 3
    begun: list[Leader] = []

    def refused() -> None:
        leader = swarm.leader
        assert leader is not None
        begun.append(leader)
        leader.tasks.spawn(elect(leader), "an epoch that nobody opens")

    async def elect(leader: Leader) -> None:
        await leader.quorum.elect(new_epoch=True)
        leader.term = leader.quorum.term

    swarm.lose = refused  # type: ignore[method-assign]
    run_exactly(swarm)
    assert begun
    record = swarm.disks["t0"].vote.committed
    assert record is not None
    assert (record.epoch, record.base) == (1, 3)


def test_nobody_comes_and_the_run_waits() -> None:
    swarm = swarm_of()
    swarm.point, swarm.step, swarm.lost, swarm.back_s = "forward", 3, 1, 300.0
    lose, told = swarm.lose, list[str]()

    def lose_and_look() -> None:
        lose()
        swarm.later(60.0, look)

    def look() -> None:
        assert swarm.leader is not None
        status = Status("id", "name", STEPS, swarm.pipeline)
        status.lead(swarm.leader)
        status.state = "training"
        told.append(f"{status.as_dict()['state']}: {status.as_dict()['reason']}")

    swarm.lose = lose_and_look  # type: ignore[method-assign]
    run_exactly(swarm)
    why = "waiting for a peer in stage 1, whose state is lost: then from the checkpoint"
    assert told == [f"waiting: {why}"]
    opened = [now for now, _, point, _ in swarm.events if point == "epoch"]
    assert swarm.paused == [1]
    assert opened[0] > 290.0


class Farewell(EpochSwarm):
    """The replicas of a stage go first when the run is over, the others much later."""

    async def _take_down(self) -> None:
        assert self.leader is not None
        self.leader.admission.finished = True
        await self.stop("r1.0")
        await asyncio.sleep(60.0)
        assert self.leader.fatal is None
        await super()._take_down()


def test_a_finished_run_misses_nobody() -> None:
    swarm = swarm_of(kind=Farewell)
    run_exactly(swarm, surely=False)
    assert swarm.paused == []


def lose_disk(swarm: EpochSwarm, name: str, away_s: float = 1.0) -> None:
    """The trainer dies with its disk and comes back as if it had never voted."""
    swarm.kill_trainer(name, away_s)
    swarm.disks[name] = SlowDisk("other disk")


def test_a_trainer_that_lost_its_disk_does_not_vote_and_the_others_go_on() -> None:
    swarm = swarm_of(TRAINERS)
    swarm.point, swarm.step = "forward", 3
    lines: list[str] = []
    swarm.trainers_say = lines.append
    swarm.lose = lambda: lose_disk(swarm, "t0")  # type: ignore[method-assign]
    run_exactly(swarm)
    assert swarm.epochs == []
    assert any("t0 does not count" in line for line in lines)
    assert swarm.disks["t1"].vote.voters["t0"] != swarm.disks["t0"].id


def test_a_new_epoch_names_the_new_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is back with an empty disk when a stage is lost: from then on it votes again.

    Its disk once told, nothing is waited for: the others would try to lead meanwhile.
    """
    monkeypatch.setattr("peer.quorum.NAMING_S", 1000.0)
    swarm = swarm_of(TRAINERS)
    swarm.point, swarm.step = "forward", 3
    lost = swarm.lose

    def both() -> None:
        lose_disk(swarm, "t2")
        lost()

    swarm.lose = both  # type: ignore[method-assign]
    run_exactly(swarm)
    assert swarm.epochs == [(1, 2)]
    for name in TRAINERS:
        assert swarm.disks[name].vote.voters["t2"] == swarm.disks["t2"].id


def test_an_operator_goes_on_without_the_majority() -> None:
    """Two of three trainers are gone for good; the third is told to accept that."""
    swarm = swarm_of(TRAINERS)
    swarm.point, swarm.step = "forward", 3
    stands: list[bool] = []  # whether the order does, for whoever stops the trainer then

    def two_are_gone() -> None:
        swarm.gone = {"t0", "t1"}
        swarm.order = swarm.saved.newest
        for name in TRAINERS:
            swarm.kill_trainer(name, 5.0)
        swarm.later(6.0, look)

    def look() -> None:
        stands.append(swarm.trainers["t2"].goes_back)

    swarm.at_end = look
    swarm.lose = two_are_gone  # type: ignore[method-assign]
    run_exactly(swarm)
    assert swarm.epochs == [(1, 2)]
    assert stands == [True, False]
    assert list(swarm.disks["t2"].vote.voters) == ["t2"]


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_stages_are_lost_and_leaders_die_at_random(first: int) -> None:
    epochs = leaders = 0
    struck: Counter[str] = Counter()
    for seed in range(first, first + 20):
        swarm = run_random(seed)
        epochs, leaders = epochs + len(swarm.epochs), leaders + swarm.leader_deaths
        struck.update(fault.action for fault in swarm.fired)
        struck["stage lost"] += swarm.deaths
    assert epochs > 10
    assert leaders > 3
    assert struck.keys() == {"stage lost", *OF_EPOCHS}
    assert struck["stage lost"] > 10, struck


def run_random(seed: int) -> EpochSwarm:
    """Draws again until something has struck. Of a failure, the faults that it needs are noted."""
    for number in range(MAX_DRAWS):
        swarm = random_swarm(seed, number)
        try:
            run_exactly(swarm, surely=False)
        except Exception as error:
            error.add_note(f"random_swarm({seed}, {number}) with {fewest(seed, number, error)}")
            raise
        if swarm.deaths or swarm.fired:
            return swarm
    raise AssertionError(f"seed {seed} injects nothing, whatever is drawn")


def fewest(seed: int, number: int, error: Exception) -> list[Fault]:
    """Without any of these it does not fail in the same way."""
    faults = random_swarm(seed, number).faults
    for fault in list(faults):
        swarm = random_swarm(seed, number)
        swarm.faults = [each for each in faults if each != fault]
        try:
            run_exactly(swarm, surely=False)
        except Exception as other:
            if failure_of(other) == failure_of(error):
                faults = swarm.faults
    return faults


OF_EPOCHS = ("kill", "freeze", "partition")


def random_swarm(seed: int, number: int) -> EpochSwarm:
    r = random.Random(f"epochs/{seed}/{number}")
    replicas = [r.choice((1, 1, 2)) for _ in range(r.choice((1, 2, 3)))]
    swarm = EpochSwarm(
        num_stages=len(replicas),
        replicas=replicas,
        seed=seed,
        plan=plan(r.choice((2, 4)), STEPS),
        slots=r.choice((None, 1, 2)),
        latency_s=r.choice((0.0005, 0.002, 0.02)),
        seconds=r.choice(((0.05, 0.1), (0.2, 0.4))),
        trainer_ids=r.choice((ALONE, TRAINERS, TRAINERS)),
    )
    for _ in range(r.randint(0, 3)):
        action = r.choice(OF_EPOCHS)
        who, side = LEADER if action == "kill" else r.choice(swarm.trainer_ids), ()
        if action == "partition":
            everybody = [*swarm.trainer_ids, *(f"r{k}.0" for k in range(len(replicas)))]
            side = tuple(r.sample(everybody, r.randint(1, len(everybody) - 1)))
        when, how_long = r.uniform(0.5, 30.0), r.choice((0.5, 3.0, 20.0))
        fault = Fault("", action, victim=who, at_s=when, duration_s=how_long, side=side)
        swarm.faults.append(fault)
    swarm.every = r.choice((0, 1, 2, 3))
    swarm.lost, swarm.step = r.randrange(len(replicas)), r.randint(0, STEPS - 1)
    swarm.point, swarm.count = r.choice(POINTS), r.randint(1, 2)
    swarm.back_s = r.choice((0.5, 5.0, 30.0))
    swarm.everybody_dies = r.random() < 0.3
    swarm.leader_dies_at = r.choice(("", "paused", "epoch", "joined", "admitted", "record"))
    return swarm


class LostAtTheEnd(Swarm):
    """The only replica of stage 1 dies between the last commit and the asking for its hashes."""

    ends = 0

    async def settle(self) -> bool:
        self.ends += 1
        if self.ends == 1:
            self.kill("r1.0")
            self.later(1.0, self.restart, "r1.0", 1)
            assert self.leader is not None
            await held_hashes(self.leader)
            raise AssertionError("hashes of a stage that nobody holds")
        return await super().settle()


@pytest.mark.parametrize("every", [1, 2])
def test_a_stage_that_is_lost_at_the_very_end_is_trained_again(every: int) -> None:
    swarm = LostAtTheEnd(replicas=(2, 1, 1), plan=plan(6), checkpoint_every=every)
    assert swarm.run(3)["sha256"] == baseline(3, 6)[0]
    assert (swarm.ends, swarm.effects["epoch opened"]) == (2, 1)
