"""Peers that choose their stage and move, under virtual time: where they settle, and the same bits.

Every run ends with the parameters of the one-process run (I6), whatever moved and died on the way.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from peer.leader import Leader
from peer.member import Member as ReplicaMember
from peer.members import Offer, Standing
from peer.rebalancing import Rebalancing
from peer.restoring import Origin, Saved
from peer.run_leader import LeaderProcess
from peer.snapshots import Snapshot
from swarm.errors import DataError
from swarm.net.links import peer_of
from swarm.placement import MovePolicy, StageNeed, estimate_memory
from swarm.terms import Record
from tests.protocol.adaptive import AdaptiveSwarm
from tests.protocol.simulated import OPTIMIZER, baseline, plan

MICROBATCHES = 6
Act = Callable[[AdaptiveSwarm, Mapping[str, Any]], None]


def best(swarm: AdaptiveSwarm) -> float:
    """Microbatches/s of the best assignment of those who are there: all of them are tried."""
    names = sorted(swarm.hosts)
    stages = range(swarm.num_stages)
    return max(
        swarm.rate_of(dict(zip(names, ([stage] for stage in chosen), strict=True)))
        for chosen in itertools.product(stages, repeat=len(names))
    )


def run(swarm: AdaptiveSwarm, num_steps: int, **when: Act) -> list[tuple[str, Mapping[str, Any]]]:
    """Train; `when` names an event of the leader at whose first time something is done. Returns
    the leader's events. At the end the peers must be placed as well as they can be."""
    told: list[tuple[str, Mapping[str, Any]]] = []
    reached: list[float] = []
    probe = swarm.on_probe

    def on_probe(who: str, point: str, facts: dict[str, Any]) -> None:
        probe(who, point, facts)
        if who == "leader":
            told.append((point, facts))
            if (act := when.pop(point, None)) is not None:
                swarm.later(0.0, act, swarm, facts)

    swarm.on_probe = on_probe  # type: ignore[method-assign]

    def at_end() -> None:
        reached.append(swarm.rate_of(swarm.stages()) / best(swarm))
        swarm.settled = swarm.stages()
        assert swarm.leader is not None
        rebalancing = swarm.leader.rebalancing  # it asks for help where it would send who comes
        assert rebalancing.as_dict()["help"]["stage"] == rebalancing.place("new#1", Offer()).stage

    swarm.at_end = at_end
    assert swarm.run(num_steps)["sha256"] == baseline(num_steps, MICROBATCHES)[0]
    assert not when, f"never happened: {list(when)}"
    assert reached[0] >= 0.95, swarm.settled
    return told


def count(told: list[tuple[str, Mapping[str, Any]]], what: str) -> int:
    return sum(point == what for point, _ in told)


def test_six_that_come_at_once_spread() -> None:
    swarm = AdaptiveSwarm(plan=plan(MICROBATCHES, 3))
    told = run(swarm, 3)
    assert count(told, "move") == 0
    stages = Counter(facts["stage"] for point, facts in told if point == "joined")
    assert set(stages.values()) == {2}
    assert sum("taking stage" in line for line in swarm.said) == 6


def test_peers_move_to_the_dear_stage_and_nothing_is_replayed() -> None:
    swarm = AdaptiveSwarm(plan=plan(MICROBATCHES, 8), costs=(1.0, 1.0, 4.0))
    told = run(swarm, 8)
    assert count(told, "move") == count(told, "moved") == 2
    assert count(told, "expelled") == count(told, "failed") == 0
    assert sorted(stage for [stage] in swarm.settled.values()) == [0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("peers", "slower"), [(2, {"p0": 3.0}), (3, {"p1": 2.0, "p2": 3.0})], ids=["two", "three"]
)
def test_those_that_are_alone_in_their_stages_change_places(
    peers: int, slower: dict[str, float]
) -> None:
    """A slow one has the dear stage. Each goes on serving its own until the other has come."""
    swarm = AdaptiveSwarm(
        plan=plan(MICROBATCHES, 10),
        num_stages=peers,
        peers=((),) * peers,
        costs=(4.0, 2.0, 1.0)[:peers],
        speed=slower,
    )
    told = run(swarm, 10)
    assert count(told, "move") == count(told, "moved") >= 2
    assert not {point for point, _ in told} & {"expelled", "failed", "paused", "epoch"}


def test_the_slow_peer_is_not_left_alone_in_a_stage() -> None:
    """One of six is five times slower."""
    swarm = AdaptiveSwarm(plan=plan(MICROBATCHES, 6), costs=(1.0, 2.0, 3.0), speed={"p0": 5.0})
    run(swarm, 6)


def test_what_is_measured_is_a_replicas_own_compute_alone() -> None:
    """Neither the queues before the dear stage, nor the time that lies downstream."""
    swarm = AdaptiveSwarm(
        plan=plan(30, 2), peers=((0,), (1,), (2,), (2,)), costs=(1.0, 2.0, 9.0), speed={"p2": 2.0}
    )
    measured: dict[str, float | None] = {}
    estimated: dict[str, float | None] = {}
    probe = swarm.on_probe

    def on_probe(who: str, point: str, facts: dict[str, Any]) -> None:
        probe(who, point, facts)
        if point == "admitted" and swarm.leader is not None:
            new = swarm.leader.members.get(facts["replica"])
            assert new is not None
            estimated.setdefault(peer_of(new.incarnation), swarm.leader.rebalancing.rate(new))

    def at_end() -> None:
        assert swarm.leader is not None
        for name, member in swarm.members.items():
            measured[name] = swarm.leader.router.measured_s(member.links.incarnation)

    swarm.on_probe, swarm.at_end = on_probe, at_end  # type: ignore[method-assign]
    assert swarm.run(2)["sha256"] == baseline(2, 30)[0]
    unit = sum(swarm.seconds)
    own = {"p0": unit, "p1": 2 * unit, "p2": 18 * unit, "p3": 9 * unit}
    assert measured == pytest.approx(own)
    # Before the first microbatch: what each found out about the stage it was to take.
    assert estimated == pytest.approx({name: 1 / seconds for name, seconds in own.items()})


def test_status_says_what_another_cut_would_gain() -> None:
    """Two peers alike, each given its stage; the layers of the second one cost three times as much
    as those of the first."""
    swarm = AdaptiveSwarm(
        plan=plan(MICROBATCHES, 2), num_stages=2, peers=((0,), (1,)), costs=(1.0, 3.0)
    )
    said: list[dict[str, Any]] = []

    def at_end() -> None:
        assert swarm.leader is not None
        said.append(swarm.leader.rebalancing.as_dict())

    swarm.at_end = at_end
    swarm.run(2)
    slowest, best = min(said[0]["stages"]), said[0]["best"]
    assert said[0]["recut"]["gain"] > 0.2
    assert said[0]["recut"]["cut"][0] > swarm.pipeline.cut[0]
    assert slowest <= best


def kill(swarm: AdaptiveSwarm, facts: Mapping[str, Any]) -> None:
    swarm.kill(peer_of(facts["replica"]))


def test_two_of_a_stage_are_killed_and_the_rest_settles_anew() -> None:
    swarm = AdaptiveSwarm(plan=plan(MICROBATCHES, 14), costs=(1.0, 2.0, 3.0))
    struck: list[str] = []

    def kill_two(swarm: AdaptiveSwarm, facts: Mapping[str, Any]) -> None:
        there = [name for name, stages in swarm.stages().items() if stages == [2]]
        if len(there) < 3:  # not settled yet
            swarm.later(0.5, kill_two, swarm, facts)
            return
        struck.extend(there[:2])
        for name in struck:
            swarm.kill(name)

    told = run(swarm, 14, record=kill_two)
    assert len(struck) == 2
    assert count(told, "moved") >= 2


def test_a_mover_that_dies_costs_a_replica_and_no_more() -> None:
    swarm = AdaptiveSwarm(plan=plan(MICROBATCHES, 10), costs=(1.0, 1.0, 4.0))
    told = run(swarm, 10, move=kill)
    assert count(told, "moved") >= 1


def test_a_move_that_takes_long_is_not_given_up_while_more_of_the_state_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The download takes several times as long as may pass without any of it."""
    monkeypatch.setattr("peer.host.MOVE_S", 12.0)
    swarm = AdaptiveSwarm(plan=plan(MICROBATCHES, 15), seconds=(0.05, 0.1), latency_s=0.2, chunk=1)
    ordered: dict[str, float] = {}
    lasted: list[float] = []
    probe = swarm.on_probe

    def on_probe(who: str, point: str, facts: dict[str, Any]) -> None:
        probe(who, point, facts)
        if point == "record" and facts["step"] == 2:
            swarm.costs = (1.0, 1.0, 4.0)  # by now a state cannot be drawn anew
        if point == "move":
            ordered[peer_of(facts["replica"])] = swarm.loop.time()
        if point == "moved":
            lasted.append(swarm.loop.time() - ordered[peer_of(facts["replica"])])

    swarm.on_probe = on_probe  # type: ignore[method-assign]
    assert swarm.run(15)["sha256"] == baseline(15, MICROBATCHES)[0]
    assert max(lasted, default=0.0) > 24.0, "no move has taken long"


def test_a_move_is_not_given_up_while_the_step_lasts_that_is_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step takes longer than may pass without any more of the download, which is soon done."""
    monkeypatch.setattr("peer.host.MOVE_S", 20.0)
    swarm = AdaptiveSwarm(plan=plan(30, 4), costs=(1.0, 1.0, 4.0), seconds=(1.0, 2.0))
    swarm.at_end = lambda: setattr(swarm, "settled", swarm.stages())
    assert swarm.run(4)["sha256"] == baseline(4, 30)[0]
    told = Counter(what for _, _, what, _ in swarm.events)
    assert told["move"] == told["moved"] == 2
    assert told["move_refused"] == 0
    assert sorted(stage for [stage] in swarm.settled.values()) == [0, 1, 2, 2, 2, 2]
    records = [at for at, _, what, _ in swarm.events if what == "record"]
    assert min(b - a for a, b in itertools.pairwise(records)) > 100.0


def test_a_mover_that_starts_again_in_its_old_stage_counts_there() -> None:
    """Killed while it moves: where it was to go, somebody else is wanted at once."""
    swarm = AdaptiveSwarm(plan=plan(MICROBATCHES, 14), costs=(1.0, 1.0, 4.0))

    def kill_and_restart(swarm: AdaptiveSwarm, facts: Mapping[str, Any]) -> None:
        name = peer_of(facts["replica"])
        swarm.kill(name)
        swarm.start_peer(name, (facts["source"],), pinned=True)

    told = run(swarm, 14, move=kill_and_restart)
    assert count(told, "move") >= 3, "both who were told at first, and another"


@pytest.mark.parametrize("point", ["move", "moved"])
def test_the_leader_dies_during_a_move(point: str) -> None:
    swarm = AdaptiveSwarm(plan=plan(MICROBATCHES, 10), costs=(1.0, 1.0, 4.0))
    run(swarm, 10, **{point: lambda swarm, facts: swarm.kill_trainer("leader", 1.0)})
    assert swarm.lives["leader"] == 2


def test_a_stage_that_loses_its_own_goes_on_with_those_who_hold_it_as_well() -> None:
    """Every peer holds the next stage too. Both whose own stage is 1 die, and nothing waits;
    another moves there, without its second stage, and gets one again."""
    moves = MovePolicy(hysteresis_s=5.0, horizon_s=600.0, second_share=1.0)
    swarm = AdaptiveSwarm(plan=plan(MICROBATCHES, 20), moves=moves)
    told: list[str] = []
    held: list[list[list[int]]] = []
    probe = swarm.on_probe

    def own(name: str) -> int | None:
        first = [m for m in swarm.hosts[name].members if not m.second]
        return first[0].serves if first else None

    def kill_both() -> None:
        hosts = swarm.hosts.values()
        if not all([m.took_part.is_set() for m in each.members] == [True] * 2 for each in hosts):
            swarm.later(0.1, kill_both)
            return
        held.append(sorted(swarm.stages().values()))
        doomed = [name for name in swarm.hosts if own(name) == 1]
        told.append(f"killed {len(doomed)}")
        for name in doomed:
            swarm.kill(name)

    def on_probe(who: str, point: str, facts: dict[str, Any]) -> None:
        probe(who, point, facts)
        if who == "leader":
            told.append(point)
            if point == "second" and told.count("second") == 1:
                swarm.later(0.1, kill_both)

    swarm.on_probe = on_probe  # type: ignore[method-assign]
    swarm.at_end = lambda: held.append(sorted(swarm.stages().values()))
    assert swarm.run(20)["sha256"] == baseline(20, MICROBATCHES)[0]
    assert held[0] == [[0, 1], [0, 1], [0, 2], [0, 2], [1, 2], [1, 2]]
    assert held[1] in ([[0, 1], [0, 1], [0, 2], [1, 2]], [[0, 1], [0, 2], [0, 2], [1, 2]])
    assert "moved" in told
    assert "killed 2" in told
    assert "epoch" not in told
    assert "paused" not in told
    assert told.count("second") >= 7


@pytest.mark.parametrize(("rest_s", "again"), [(0.0, True), (1000.0, False)], ids=["no", "long"])
def test_a_new_leader_lets_those_rest_who_moved_under_the_old_one(
    rest_s: float, again: bool
) -> None:
    """Two have moved to the dear stage; the leader dies, and another stage is the dear one. Three
    are wanted there, two have not moved yet."""
    moves = MovePolicy(hysteresis_s=rest_s, horizon_s=600.0)
    swarm = AdaptiveSwarm(plan=plan(MICROBATCHES, 12), costs=(1.0, 1.0, 4.0), moves=moves)
    moved: set[str] = set()  # under the first leader
    asked: list[str] = []  # by the second
    probe = swarm.on_probe

    def on_probe(who: str, point: str, facts: dict[str, Any]) -> None:
        probe(who, point, facts)
        if who != "leader":
            return
        if point == "moved" and len(moved) < 2:
            moved.add(peer_of(facts["replica"]))
            if len(moved) == 2:
                swarm.costs = (4.0, 1.0, 1.0)
                swarm.later(0.0, swarm.kill_trainer, "leader", 1.0)
        if point in ("move", "move_refused") and swarm.lives["leader"] == 2:
            asked.append(peer_of(facts["replica"]))

    swarm.on_probe = on_probe  # type: ignore[method-assign]
    assert swarm.run(12)["sha256"] == baseline(12, MICROBATCHES)[0]
    assert len(moved) == 2
    assert asked
    assert bool(moved & set(asked)) is again


@pytest.mark.parametrize("accumulate", ["float64", "float32"])
def test_a_stage_needs_memory_for_as_many_microbatches_as_it_may_hold(accumulate: str) -> None:
    swarm = AdaptiveSwarm(plan=plan(30, 2, accumulate=accumulate))
    needs: list[StageNeed] = []

    def at_end() -> None:
        assert swarm.leader is not None
        needs.extend(swarm.leader.rebalancing.table().stages)
        facts = next(m.facts for m in swarm.members.values() if m.facts and m.serves == 1)
        built = swarm.leader.pipeline.build_stage(1, "meta")
        expected = estimate_memory(
            sum(each.numel() for each in built.parameters()),
            optimizer=OPTIMIZER.name,
            accumulate=accumulate,
            activation_bytes=facts.activation_bytes,
            slots=2 * swarm.num_stages + 2,
        )
        assert needs[1].memory_bytes == expected.total

    swarm.at_end = at_end
    swarm.run(2)
    assert needs


def test_peers_that_were_given_their_stages_stay_and_may_serve_several() -> None:
    swarm = AdaptiveSwarm(
        plan=plan(MICROBATCHES, 4), peers=((0, 2), (1,), (0, 1, 2)), costs=(1.0, 1.0, 4.0)
    )
    told: list[str] = []
    probe = swarm.on_probe

    def on_probe(who: str, point: str, facts: dict[str, Any]) -> None:
        probe(who, point, facts)
        told.append(point)

    swarm.on_probe = on_probe  # type: ignore[method-assign]
    assert swarm.run(4)["sha256"] == baseline(4, MICROBATCHES)[0]
    assert "move" not in told


def test_a_peer_throttled_five_times_loses_its_load_within_ten_microbatches() -> None:
    swarm = AdaptiveSwarm(plan=plan(60, 1), peers=((0,), (0,), (1,), (1,), (2,), (2,)))
    routes: list[tuple[str, ...]] = []
    throttled_at: list[int] = []
    probe = swarm.on_probe

    def on_probe(who: str, point: str, facts: dict[str, Any]) -> None:
        probe(who, point, facts)
        if point == "issue":
            routes.append(tuple(peer_of(name) for name in facts["route"]))
        if point == "acknowledged" and not throttled_at and len(routes) >= 25:
            throttled_at.append(len(routes))
            swarm.speed = {"p2": 5.0}

    swarm.on_probe = on_probe  # type: ignore[method-assign]
    assert swarm.run(1)["sha256"] == baseline(1, 60)[0]
    before = [route[1] for route in routes[5 : throttled_at[0]]]
    assert abs(before.count("p2") - len(before) / 2) <= 2
    after = [route[1] for route in routes[throttled_at[0] + 10 :]]
    assert after.count("p2") <= len(after) / 4 + 1, after  # a sixth is its due
    assert "p2" in after, "slow is not dead"


def test_a_slow_stage_does_not_fill_the_others_memory() -> None:
    """Credits per stage: nobody holds more than its slots, nor waits for them."""
    swarm = AdaptiveSwarm(
        plan=plan(30, 1), peers=((0,), (1,), (2,), (2,), (2,)), costs=(1.0, 1.0, 12.0)
    )
    held: dict[int, int] = {}

    def at_end() -> None:
        for member in swarm.members.values():
            assert member.server is not None
            slots = member.server.slots
            assert slots.limit is not None
            assert slots.most_held <= slots.limit
            held[member.server.stage] = slots.most_held

    swarm.at_end = at_end
    assert swarm.run(1)["sha256"] == baseline(1, 30)[0]
    assert held[0] <= 7  # five replicas, and two to spare


class FirstWeights:
    """What a trainer without a checkpoint can go back to."""

    async def newest(self, record: Record | None) -> Origin:
        return Origin(0)

    async def highest_epoch(self) -> int:
        return 0

    async def state(self, record: Record, stage: int) -> Snapshot:
        raise DataError("there is none")


class Restorable(AdaptiveSwarm):
    def saved_of(self, name: str) -> Saved | None:
        return FirstWeights()


def test_a_stage_that_has_lost_everybody_is_filled_from_the_others() -> None:
    """Both of its peers die and nobody joins: another moves there, and the run goes back for it."""
    swarm = Restorable(plan=plan(MICROBATCHES, 4))

    def kill_stage(swarm: AdaptiveSwarm, facts: Mapping[str, Any]) -> None:
        for name in [name for name, stages in swarm.stages().items() if stages == [1]]:
            swarm.kill(name)

    told = run(swarm, 4, record=kill_stage)
    assert count(told, "move") == 1
    assert count(told, "epoch") == 1
    assert len(swarm.settled) == 4


def test_a_plan_that_fails_keeps_no_lost_stage_from_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both of its peers die and another comes, while the stage after it is empty and every plan of
    moves raises an error."""
    swarm = Restorable(plan=plan(MICROBATCHES, 4))
    failed: list[float] = []

    def fails(books: Rebalancing) -> None:
        failed.append(asyncio.get_running_loop().time())
        raise ZeroDivisionError

    def kill_stages(swarm: AdaptiveSwarm, facts: Mapping[str, Any]) -> None:
        monkeypatch.setattr(Rebalancing, "consider", fails)
        for name, stages in list(swarm.stages().items()):
            if stages in ([1], [2]):
                swarm.kill(name)
        swarm.start_peer("new", (1,), pinned=True)
        swarm.later(200.0, fill, swarm)

    def fill(swarm: AdaptiveSwarm) -> None:
        monkeypatch.undo()
        swarm.start_peer("late", (2,), pinned=True)

    told = run(swarm, 4, record=kill_stages)
    assert failed
    assert count(told, "epoch") == 1
    went_back = next(at for at, _, what, _ in swarm.events if what == "epoch")
    assert went_back - failed[0] < 60.0


def test_a_stage_that_is_empty_before_the_first_commit_is_filled_from_the_others() -> None:
    """No state is lost yet, and no commit would ever come."""
    peers = ((0,), (1,), (2,), (), (), ())
    swarm = Restorable(plan=plan(MICROBATCHES, 4), peers=peers, seconds=(0.1, 0.2))
    told = run(swarm, 4, issue=lambda swarm, facts: swarm.kill("p1") or swarm.kill(other(swarm)))
    assert count(told, "move") == 1
    assert count(told, "epoch") == 0


def other(swarm: AdaptiveSwarm) -> str:
    """Who came to stage 1 besides."""
    (name,) = (name for name, stages in swarm.stages().items() if stages == [1])
    return name


def test_a_joiner_that_never_comes_to_serve_keeps_nobody_from_its_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It joins the empty stage, and then hangs."""
    catch_up = ReplicaMember._catch_up

    async def hangs(member: ReplicaMember, *arguments: Any) -> None:
        if peer_of(member.links.incarnation) == "hung":
            await asyncio.Event().wait()
        await catch_up(member, *arguments)

    monkeypatch.setattr(ReplicaMember, "_catch_up", hangs)
    peers = ((0,), (1,), (2,), (), (), ())
    swarm = Restorable(plan=plan(MICROBATCHES, 4), peers=peers, seconds=(0.1, 0.2))

    def empty(swarm: AdaptiveSwarm, facts: Mapping[str, Any]) -> None:
        swarm.kill("p1")
        swarm.kill(other(swarm))
        swarm.start_peer("hung", (1,), pinned=True)

    told = run(swarm, 4, issue=empty, moved=lambda swarm, facts: swarm.kill("hung"))
    assert count(told, "move") == 1


class Gathering(Restorable):
    """Two come to every stage, both of stage 1 die, and the first step waits as in `swarm up`."""

    async def at_record(self, leader: Leader) -> None:
        await super().at_record(leader)
        if leader.record is None:
            while sum(each.standing is Standing.READY for each in leader.members) < len(self.peers):
                leader.wake.clear()
                await leader.wake.wait()
            for name in [name for name, stages in self.stages().items() if stages == [1]]:
                self.kill(name)
            while leader.members.of_stage(1):
                leader.wake.clear()
                await leader.wake.wait()
            waits: Any = SimpleNamespace(start_with={})
            await LeaderProcess._await_peers(waits, leader)


def test_a_stage_that_is_empty_before_the_first_step_is_filled_from_the_others() -> None:
    """Nobody serves yet: all have a state, and wait."""
    swarm = Gathering(plan=plan(MICROBATCHES, 4))
    told = run(swarm, 4)
    assert count(told, "move") == 1
    assert len(swarm.settled) == 4
