"""What a leader knows of stages and peers when it plans: measured, estimated, and on the way."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer.launch import plan_of
from peer.measure import StageFacts
from peer.members import Member, Members, Offer, Standing
from peer.rebalancing import REFUSED_S, RESERVED_S, Rebalancing
from swarm.ahead import NONE
from swarm.config import load_config
from swarm.model.layout import ParameterLayout
from swarm.placement import LoadTable, PeerLoad, plan_moves
from swarm.routing import Router
from swarm.sim.virtual_time import run

EXAMPLE = Path(__file__).parents[2] / "examples/exact.toml"
SIZES = (20, 30, 40)  # of their states
SHAPES = (1.0, 2.0, 3.0)  # of the stages: multiply-adds of a microbatch, in some unit


def leader_of(*members: Member) -> Any:
    """What `Rebalancing` asks a leader for."""
    known = Members(len(SHAPES), {each.incarnation: each for each in members})
    return SimpleNamespace(
        admission=SimpleNamespace(finished=False),
        members=known,
        router=Router(),
        pipeline=SimpleNamespace(
            shared_bytes=0,
            num_stages=len(SHAPES),
            stage_cost=SHAPES.__getitem__,
            layout=lambda stage: ParameterLayout.of(torch.nn.Linear(1000, SIZES[stage])),
        ),
        plan=SimpleNamespace(optimizer=None, accumulate="float64", num_microbatches=8, ahead=NONE),
        fixed_slots=None,
    )


def member(name: str, stage: int, standing: Standing = Standing.SERVING, **offer: Any) -> Member:
    return Member(f"{name}#1", stage, (), standing, offer=Offer(**offer))


def table_of(leader: Any) -> LoadTable:
    async def drawn() -> LoadTable:
        return Rebalancing(leader).table()

    return run(drawn())


def test_a_stage_never_served_costs_what_its_shape_says_beside_those_that_were() -> None:
    """Ten rounds of the reference a second, five microbatches: a unit of shape costs two rounds.
    So the stage of three units costs six, and a device of speed 12 would do two a second."""
    leader = leader_of(member("a", 0, speed=10.0))
    leader.router.add("a#1", 0)
    leader.router.observe("a#1", 0.2)
    table = table_of(leader)
    assert [need.cost for need in table.stages] == pytest.approx([2.0, 4.0, 6.0])
    assert table.rate(PeerLoad("new", speed=12.0), 2) == pytest.approx(2.0)


class Alone:
    """A replica that is the only one of stage 0, and says of itself what is 20 times too fast."""

    def __init__(self) -> None:
        only = member("a", 0, speed=10.0)
        only.facts = StageFacts(0.01, 1000)
        self.leader = leader_of(only)
        self.leader.router.add("a#1", 0, 0.01)
        self.books = Rebalancing(self.leader)

    async def sees(self, *service_s: float) -> tuple[float, float]:
        """Commits of nine microbatches each, as somebody watches; then what the stage costs, and
        what the peer would do in stage 2, which costs three times as much."""
        for each in service_s:
            for _ in range(9):
                self.leader.router.observe("a#1", each)
                self.books.table()
            self.books.consider()
        table = self.books.table()
        return table.stages[0].cost, table.rate(table.peers[0], 2)


def test_the_only_peer_of_a_stage_that_becomes_slow_makes_it_no_dearer() -> None:
    """It was measured there before; so the peer is a fifth as fast, and would be elsewhere too."""

    async def seen() -> None:
        alone = Alone()
        assert await alone.sees() == pytest.approx((0.1, 100 / 3))
        assert await alone.sees(0.2) == pytest.approx((2.0, 5.0 / 3), rel=0.05)
        assert await alone.sees(1.0) == pytest.approx((2.0, 1.0 / 3), rel=0.05)
        assert await alone.sees(*[1.0] * 100) == pytest.approx((2.0, 1.0 / 3), rel=0.05)
        assert await alone.sees(0.2) == pytest.approx((2.0, 5.0 / 3), rel=0.05)

    run(seen())


def test_what_a_stage_costs_does_not_jump_with_what_is_measured() -> None:
    """Rates that scatter by a factor of two move it by less than that, and are forgotten."""

    async def seen() -> None:
        alone, draw = Alone(), random.Random(0)
        await alone.sees(0.2)
        for _ in range(50):
            cost, _ = await alone.sees(0.2 * draw.choice([0.7, 1.0, 1.4]))
            assert 1.4 * 0.9 < cost < 2.8
        assert (await alone.sees(*[0.2] * 8))[0] == pytest.approx(2.0, rel=0.05)

    run(seen())


@pytest.mark.parametrize("accumulate", ["float64", "float32"])
def test_a_leader_knows_in_what_gradients_are_added_up(accumulate: str) -> None:
    """Half of the accumulator's memory."""
    config = load_config(EXAMPLE)
    update = config.update.model_copy(update={"accumulate": accumulate})
    assert plan_of(config.model_copy(update={"update": update})).accumulate == accumulate


@pytest.mark.parametrize(
    ("gradients", "accumulate", "there", "back"),
    [
        ("float32", "float64", 8, 4),
        ("float32", "float32", 4, 4),
        ("bfloat16", "float64", 2, 2),
        ("int8", "float32", 66 / 64, 66 / 64),
    ],
)
def test_what_an_element_costs_in_the_averaging(
    gradients: str, accumulate: str, there: float, back: float
) -> None:
    """There to who sums it, and back: what a line's share of the sums is reckoned with."""
    config = load_config(EXAMPLE)
    wire = config.wire.model_copy(update={"gradients": gradients})
    update = config.update.model_copy(update={"accumulate": accumulate})
    plan = plan_of(config.model_copy(update={"wire": wire, "update": update}))
    assert plan.gradient_bytes == (there, back)


def test_a_joiner_counts_with_its_own_benchmark_until_it_is_measured() -> None:
    joiner = member("a", 1, speed=10.0)
    joiner.facts = StageFacts(0.5, 1000)
    leader = leader_of(joiner)
    leader.router.add("a#1", 1)
    assert table_of(leader).peers[0].rates == {1: 2.0}
    leader.router.observe("a#1", 0.25)
    assert table_of(leader).peers[0].rates == {1: 4.0}


def test_a_joiner_is_sent_where_what_it_says_of_its_memory_suffices() -> None:
    """The slowest stage is large; what others measured there says so."""
    serving = [member("a", 0, speed=1.0), *(member(name, 1, speed=1.0) for name in "bc")]
    serving += [member(name, 2, speed=1.0) for name in "defg"]
    for each in serving:
        each.facts = StageFacts(1.0, 10**9 if each.stage == 0 else 1000)

    async def placed() -> list[int | None]:
        books = Rebalancing(leader_of(*serving))
        offers = (Offer(), Offer(memory_bytes=1 << 30), Offer(memory_bytes=1))
        return [books.place("new#1", offer).stage for offer in offers]

    assert run(placed()) == [0, 1, None]


def test_the_first_joiners_too_are_sent_where_their_memory_suffices() -> None:
    """Nobody serves any stage yet: the shapes of the parameters say how large its state is."""

    async def placed() -> list[int | None]:
        books = Rebalancing(leader_of())
        least = [need.memory_bytes for need in books.table().stages]
        assert least == [24 * 1001 * size for size in SIZES]
        offers = (Offer(memory_bytes=each) for each in (least[2], least[2] - 1, least[0] - 1))
        return [books.place("new#1", offer).stage for offer in offers]

    assert run(placed()) == [2, 1, None]


def test_who_is_on_its_way_counts_there_and_not_for_ever() -> None:
    async def counted() -> list[int | None]:
        coming = member("a", 2, Standing.JOINING, speed=1.0)
        coming.joined_at = asyncio.get_running_loop().time()
        books, found = Rebalancing(leader_of(coming)), []
        for _ in range(2):
            found.append(books.table().peers[0].arriving)
            await asyncio.sleep(RESERVED_S)
        return found

    assert run(counted(), limit_s=3 * RESERVED_S) == [2, None]


@pytest.mark.parametrize(("beside", "after"), [(2, 2), (1, None)], ids=["served", "empty"])
def test_a_mover_counts_as_long_as_it_is_there_unless_it_is_the_only_one(
    beside: int, after: int | None
) -> None:
    async def counted() -> list[int | None]:
        old, other = member("a", 0, speed=1.0), member("b", beside, speed=1.0)
        coming = Member("a#2", 2, (), Standing.JOINING, offer=Offer(replaces="a#1"))
        coming.joined_at = asyncio.get_running_loop().time()
        books, found = Rebalancing(leader_of(old, other, coming)), []
        for _ in range(2):
            found.append(books.table().peers[0].arriving)
            await asyncio.sleep(3 * RESERVED_S)
        return found

    assert run(counted(), limit_s=9 * RESERVED_S) == [2, after]


@pytest.mark.parametrize("arrived", [False, True])
def test_who_gave_a_move_up_is_left_alone_for_a_while(arrived: bool) -> None:
    async def pinned() -> list[bool]:
        old, new = member("a", 0, speed=1.0), Member("a#2", 2, (), offer=Offer(replaces="a#1"))
        leader = leader_of(old)
        leader.probe, leader.next_step = (lambda *_, **__: None), 0
        books, found = Rebalancing(leader), []
        if arrived:
            books.admitted(new)
        books.left(new)
        for _ in range(2):
            found.append(books.table().peers[0].pinned)
            await asyncio.sleep(REFUSED_S)
        return found

    assert run(pinned(), limit_s=3 * REFUSED_S) == [not arrived, False]


def test_two_replicas_of_a_device_are_one_peer_with_a_second_stage() -> None:
    first, other = member("a", 0, speed=1.0), member("a", 1, speed=1.0, second=True)
    other.incarnation = "a#2"
    [peer] = table_of(leader_of(first, other)).peers
    assert (peer.stages, peer.second, peer.fetching) == ((0,), 1, None)
    other.standing = Standing.JOINING
    [peer] = table_of(leader_of(first, other)).peers
    assert (peer.stages, peer.second, peer.fetching) == ((0,), None, 1)


def test_a_mover_that_is_the_last_of_its_old_stage_stays_and_counts_in_both() -> None:
    old, new = member("a", 0), member("a", 1, replaces="a#1")
    old.leaving, new.incarnation = True, "a#2"
    alone = leader_of(old, new, member("b", 1))
    assert not alone.members.may_go(old)
    assert sorted(table_of(alone).peers[0].stages) == [0, 1]
    relieved = leader_of(old, new, member("b", 1), member("c", 0))
    assert relieved.members.may_go(old)
    assert table_of(relieved).peers[0].stages == (1,)


FLOATS = (5e-324, 1e-300, 1.1e-6, 1.0, 0.9e6, 0.9e12, 1e300, 1.7e308)


@pytest.mark.parametrize("speed", FLOATS)
@pytest.mark.parametrize("service_s", FLOATS)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])
def test_whatever_a_peer_says_of_its_device_plans_are_made_and_told(
    speed: float, service_s: float, others: bool
) -> None:
    said = member("x", 1)
    said.offer = Offer.read({"speed": speed}, "x")
    facts = {"service_s": service_s, "activation_bytes": 1}
    said.facts = StageFacts.read(facts)
    honest = [member(f"p{stage}", stage, speed=10.0) for stage in range(3)] if others else []
    for each in honest:
        each.facts = StageFacts(0.2, 1)
    leader = leader_of(said, *honest)
    leader.pipeline.layer_costs, leader.pipeline.cut = [1.0] * 6, (2, 2, 2)
    leader.pipeline.latest_boundary = 5

    async def draw_up() -> None:
        books = Rebalancing(leader)
        assert books.place("new#1", Offer(speed=10.0)).stage is not None
        assert plan_moves(books.table(), 0.0).after >= 0
        assert all(math.isfinite(each) for each in books.as_dict()["stages"])

    run(draw_up())
