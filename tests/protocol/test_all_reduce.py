"""The group all-reduce over in-memory streams: right sums, and every way in which a round fails."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.averaging import plan as plan_module
from swarm.averaging import round as round_module
from swarm.averaging.all_reduce import PROTOCOL, GroupAllReduce, Limits, RoundFailedError
from swarm.averaging.plan import (
    CHUNK_ELEMENTS,
    EXACT,
    MAX_MEMBERS,
    balanced_shares,
    is_direct,
    link_rates,
    make_plan,
)
from swarm.averaging.progress import Link
from swarm.net import striped as striped_module
from swarm.net.links import peer_of
from swarm.net.memory import MemoryNetwork
from swarm.net.memory_stream import MemoryStream
from swarm.net.striped import dial_striped
from swarm.net.transport import Stream
from swarm.sim.virtual_time import run
from swarm.tasks import TaskSet
from swarm.wire.codecs import decode, encode
from swarm.wire.frames import encode_frame

CHUNK = 32
DIRECT, PARTS = 1000, 5000  # elements of float64: all groups here exchange them directly, or not
NAMES = [f"peer{i}#0000000{i}" for i in range(5)]


class Group:
    """Members of one network, with their inputs and outputs."""

    def __init__(
        self,
        num_members: int,
        num: int,
        dtype: torch.dtype,
        seed: int = 0,
        chunk_elements: int = CHUNK,
    ) -> None:
        self.chunk_elements = chunk_elements
        self.network = MemoryNetwork(seed=seed, latency_s=0.01)
        self.members = NAMES[:num_members]
        generator = torch.Generator().manual_seed(seed)
        self.local = {
            member: torch.randn(num, generator=generator, dtype=torch.float64).to(dtype)
            for member in self.members
        }
        self.before = {member: tensor.clone() for member, tensor in self.local.items()}
        self.out = {member: torch.full((num,), -7.0) for member in self.members}
        self.reducers = {member: self.reducer(member) for member in self.members}
        self.started: dict[str, float] = {}

    def reducer(self, member: str, limits: Limits | None = None) -> GroupAllReduce:
        transport = self.network.transport(member.split("#")[0])
        made = GroupAllReduce(transport, member, limits=limits, chunk_elements=self.chunk_elements)
        made.serve()
        return made

    def direct(self, codec: str = EXACT) -> bool:
        some = self.local[self.members[0]]
        dtype = str(some.dtype).removeprefix("torch.")
        return is_direct(len(self.members), some.numel(), dtype, codec)

    def expected(self, codec: str = EXACT) -> Tensor:
        """The sum that all members of a round hold; with a codec, of a direct one."""
        terms = [self.before[member] for member in self.members]
        if codec != EXACT:
            terms = [
                torch.cat([decode(encode(x.float(), codec)) for x in term.split(CHUNK)]).to(term)
                for term in terms
            ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total.to(torch.float32)

    async def member(self, member: str, round_id: str = "1", **options: Any) -> None:
        await self.reducers[member].all_reduce(
            round_id, self.members, self.local[member], self.out[member], **options
        )

    async def everyone(self, round_id: str = "1", **options: Any) -> list[BaseException | None]:
        return await asyncio.gather(
            *(self.member(member, round_id, **options) for member in self.members),
            return_exceptions=True,
        )

    def unchanged(self) -> bool:
        return all(torch.equal(self.local[m], self.before[m]) for m in self.members)

    async def close(self) -> None:
        for reducer in self.reducers.values():
            await reducer.aclose()
        for transport in self.network.transports.values():
            await transport.close()


def simulate(
    group: Callable[[], Group], script: Callable[[Group], Awaitable[None]], **options: Any
) -> None:
    async def main() -> None:
        made = group()
        try:
            await script(made)
        finally:
            await made.close()
        assert made.unchanged()
        assert not made.network.handler_errors

    coroutine: Coroutine[Any, Any, None] = main()
    run(coroutine, **options)


@pytest.mark.parametrize(("num_members", "stripes"), [(2, 8), (3, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_stripes_carry_the_same_sum(num_members: int, stripes: int, dtype: torch.dtype) -> None:
    async def script(group: Group) -> None:
        group.network.rate_bps = 1e8
        tasks = [asyncio.ensure_future(group.member(member)) for member in group.members]
        await asyncio.sleep(0.1)  # all have dialled, and none has sent its 3 MB
        here = group.network.transports["peer0"]
        assert len(here.streams) == 2 * stripes * (num_members - 1)  # dialled and served
        await asyncio.gather(*tasks)
        for member in group.members:
            assert torch.equal(group.out[member], group.expected())

    simulate(
        lambda: Group(num_members, 400_000, dtype, chunk_elements=CHUNK_ELEMENTS),
        script,
    )


@pytest.mark.parametrize("num_members", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num", [0, 1, 31, DIRECT, PARTS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_all_hold_the_sum_rounded_once(num_members: int, num: int, dtype: torch.dtype) -> None:
    async def script(group: Group) -> None:
        if num >= DIRECT:
            direct = num == DIRECT or num_members == 1 or (num_members, dtype) == (2, torch.float32)
            assert group.direct() is direct
        assert await group.everyone() == [None] * num_members
        expected = group.expected()
        for out in group.out.values():
            assert torch.equal(out, expected)

    simulate(lambda: Group(num_members, num, dtype), script)


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_codecs_give_all_the_same_bytes(codec: str, dtype: torch.dtype) -> None:
    """I4 with unequal parts, close to the exact sum, and the same in every run."""
    outs: list[Tensor] = []

    async def script(group: Group) -> None:
        assert await group.everyone(codec=codec, shares=[5, 0, 2]) == [None] * 3
        first, *others = group.out.values()
        assert all(torch.equal(first, other) for other in others)
        expected = group.expected()
        error = float((first - expected).norm() / expected.norm())
        assert 0 < error < {"float16": 5e-4, "bfloat16": 4e-3, "int8": 0.015}[codec]
        outs.append(first)

    for _ in range(2):
        simulate(lambda: Group(3, 40_000, dtype, chunk_elements=1024), script)
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize(("num_members", "num"), [(2, 5000), (3, 1000), (5, 500)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_directly_all_add_what_was_sent(
    codec: str, num_members: int, num: int, dtype: torch.dtype
) -> None:
    """I4: of its own contribution, too, a member adds what the others decode; and rounds once."""

    async def script(group: Group) -> None:
        assert group.direct(codec)
        assert await group.everyone(codec=codec) == [None] * num_members
        for out in group.out.values():
            assert torch.equal(out, group.expected(codec))

    simulate(lambda: Group(num_members, num, dtype), script)


@pytest.mark.parametrize("codec", ["float16", "int8"])
@pytest.mark.parametrize(("num", "direct"), [(1000, True), (20_000, False)])
def test_codecs_do_not_hide_what_is_not_finite(codec: str, num: int, direct: bool) -> None:
    async def script(group: Group) -> None:
        group.local[group.members[1]][300] = math.inf
        group.before[group.members[1]][300] = math.inf
        assert group.direct(codec) is direct
        assert await group.everyone(codec=codec) == [None] * 3
        for out in group.out.values():
            assert not bool(torch.isfinite(out[300]))
            assert bool(torch.isfinite(out[:100]).all())

    simulate(lambda: Group(3, num, torch.float64), script)


@pytest.mark.parametrize("num", [DIRECT, PARTS])
def test_members_with_unlike_codecs_or_shares_do_not_average(num: int) -> None:
    async def script(group: Group) -> None:
        one, two = group.members
        for number, (mine, theirs) in enumerate(
            [({"codec": "int8"}, {}), ({"shares": [1, 2]}, {"shares": [2, 1]})]
        ):
            results = await asyncio.gather(
                group.member(one, f"{number}", **mine),
                group.member(two, f"{number}", **theirs),
                return_exceptions=True,
            )
            assert all(isinstance(each, RoundFailedError) for each in results)

    simulate(lambda: Group(2, num, torch.float64), script)


def test_no_split_changes_an_exact_sum() -> None:
    async def script(group: Group) -> None:
        expected = group.expected()
        for number, shares in enumerate(([1, 1, 1], [7, 0, 1], [0, 1, 1000], [3, 2, 5])):
            assert await group.everyone(f"{number}", shares=shares) == [None] * 3
            assert all(torch.equal(out, expected) for out in group.out.values())

    simulate(lambda: Group(3, 5000, torch.float64), script)


def test_unequal_shares_and_rounds_at_the_same_time() -> None:
    async def script(group: Group) -> None:
        others = {member: torch.empty(5000) for member in group.members}
        both = await asyncio.gather(
            group.everyone("a", shares=[3, 0, 1]),
            *(
                group.reducers[m].all_reduce("b", group.members, group.local[m], others[m])
                for m in group.members
            ),
        )
        assert both == [[None] * 3, *[(0, 0, 0)] * 3]  # too little to measure
        for member in group.members:
            assert torch.equal(group.out[member], group.expected())
            assert torch.equal(others[member], group.expected())

    simulate(lambda: Group(3, 5000, torch.float64), script)


@pytest.mark.parametrize(
    ("uplinks", "gained"),
    [((20e6, 20e6, 20e6, 5e6), 0.7), ((20e6, 15e6, 10e6, 5e6), 0.85), ((20e6, 19e6, 22e6), 1.01)],
    ids=["one slow", "all unlike", "much alike"],
)
def test_shares_by_what_was_measured_spare_the_slow(
    uplinks: tuple[float, ...], gained: float
) -> None:
    """Buffers hold a good part of a round here, and who is fast waits for who is slow."""

    async def script(group: Group) -> None:
        peers = [member.split("#")[0] for member in group.members]
        for peer, rate in zip(peers, uplinks, strict=True):
            for other in peers:
                group.network.rates[peer, other] = rate / (len(peers) - 1)
        took, shares = [], None
        for number in range(2):
            began = asyncio.get_running_loop().time()
            came = await asyncio.gather(
                *(
                    group.reducers[m].all_reduce(
                        f"{number}", group.members, group.local[m], group.out[m], shares=shares
                    )
                    for m in group.members
                )
            )
            took.append(asyncio.get_running_loop().time() - began)
            rates = link_rates(came)
            slowest = min(range(len(peers)), key=lambda n: uplinks[n])
            assert rates[slowest][0] * 8 == pytest.approx(uplinks[slowest], rel=0.1)
            assert rates[slowest][0] == min(sent for sent, _ in rates)
            shares = balanced_shares(rates, 4, 4)
        assert took[1] <= gained * took[0], took

    def group() -> Group:
        return Group(len(uplinks), 1_500_000, torch.float32, chunk_elements=CHUNK_ELEMENTS)

    simulate(group, script)


@pytest.mark.parametrize("num", [100, PARTS])
def test_overflow_and_nan_travel(num: int) -> None:
    async def script(group: Group) -> None:
        for m in group.members:
            group.local[m][:3] = torch.tensor([1e300, -float("nan"), float("inf")])
        group.before = {m: t.clone() for m, t in group.local.items()}
        assert await group.everyone() == [None, None]
        first, second = group.out.values()
        assert first.view(torch.int32).equal(second.view(torch.int32))
        assert first[0] == float("inf")
        assert first[1].isnan()
        assert first[1].view(torch.int32) == 0x7FC00000, "the same on every processor"
        group.local = group.before  # NaN is not equal to itself
        group.local = {m: torch.zeros(1) for m in group.members}
        group.before = dict(group.local)

    simulate(lambda: Group(2, num, torch.float64), script)


@pytest.mark.parametrize("num_members", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_a_death_in_the_round_is_blamed_on_the_dead(num_members: int, seed: int) -> None:
    async def script(group: Group) -> None:
        victim = group.members[seed % num_members]
        rest = [m for m in group.members if m != victim]
        tasks = {m: asyncio.ensure_future(group.member(m)) for m in group.members}
        await asyncio.sleep(0.005 + 0.007 * seed)
        assert not any(task.done() for task in tasks.values())
        group.network.kill(victim.split("#")[0])
        tasks[victim].cancel()
        began = asyncio.get_running_loop().time()
        await asyncio.wait(tasks.values())
        assert asyncio.get_running_loop().time() - began < 3.0
        for member in rest:
            error = tasks[member].exception()
            assert isinstance(error, RoundFailedError)
            assert error.peer == victim, error
        # the same processes, without the dead one, at once
        group.members = rest
        assert await group.everyone("2") == [None] * len(rest)
        for member in rest:
            assert torch.equal(group.out[member], group.expected())

    simulate(lambda: Group(num_members, 40_000, torch.float64, seed), script)


@pytest.mark.parametrize("when_s", [0.0, 0.024])
def test_a_frozen_member_is_found_by_its_silence(when_s: float) -> None:
    async def script(group: Group) -> None:
        frozen = group.members[1]
        tasks = {m: asyncio.ensure_future(group.member(m)) for m in group.members}
        await asyncio.sleep(when_s)
        group.network.freeze(frozen.split("#")[0])
        rest = [m for m in group.members if m != frozen]
        await asyncio.wait([tasks[m] for m in rest])
        assert asyncio.get_running_loop().time() < 60.0
        for member in rest:
            error = tasks[member].exception()
            assert isinstance(error, RoundFailedError)
            assert error.peer == frozen, error
        await asyncio.wait([tasks[frozen]])  # it cannot know who is cut off

    simulate(lambda: Group(4, 40_000, torch.float64), script)


@pytest.mark.parametrize("striped", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_fails_whenever(seed: int, striped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who returns holds the sum, who raises blames the one that failed, and the rest go on."""
    if striped:  # and not directly
        monkeypatch.setattr(plan_module, "STRIPE_BYTES", 64)
        monkeypatch.setattr(striped_module, "BLOCK_BYTES", 512)
        monkeypatch.setattr(plan_module, "DIRECT_BYTES", 0)
    chance = random.Random(seed)
    blamed: list[str] = []

    async def script(group: Group) -> None:
        victim = chance.choice(group.members)
        peer = victim.split("#")[0]
        rest = [m for m in group.members if m != victim]
        tasks = {}
        fault_at = chance.uniform(0.0, 0.07)
        fault = chance.choice(["kill", "freeze", "cancel"])
        loop = asyncio.get_running_loop()

        def strike() -> None:
            if fault == "freeze":
                group.network.freeze(peer)
                return
            if fault == "kill":
                group.network.kill(peer)
            if victim in tasks:
                tasks[victim].cancel()

        loop.call_at(fault_at, strike)
        for member in chance.sample(group.members, len(group.members)):
            tasks[member] = asyncio.ensure_future(group.member(member))
            await asyncio.sleep(chance.choice([0.0, 0.02]))
        await asyncio.sleep(max(0.0, fault_at + 0.001 - loop.time()))
        await asyncio.wait(tasks.values())
        for member in rest:
            error = tasks[member].exception()
            if error is None:
                assert torch.equal(group.out[member], group.expected())
            else:
                assert isinstance(error, RoundFailedError)
                assert error.peer == victim, (fault, fault_at, error)
                blamed.append(error.peer)
        group.members = rest
        assert await group.everyone("again") == [None] * len(rest)
        for member in rest:
            assert torch.equal(group.out[member], group.expected())

    sizes = (2, 3) if striped else (3, 5)  # more do without stripes
    simulate(lambda: Group(chance.randint(*sizes), 3000, torch.float64, seed), script)
    if seed == 0:
        assert blamed


DIRECT_GROUPS = [  # members, elements, codec
    (2, 1000, EXACT),
    (2, 60_000, "int8"),
    (2, 300_000, "int8"),  # in four stripes
    (3, 1000, EXACT),
    (4, 1000, EXACT),
]
MOMENTS_S = [n / 400 for n in range(22)]  # a hop takes 5 to 15 ms, dialling two of them


def watched(codec: str, num: int) -> int:
    """Elements of a chunk, so that a long direct round has a middle."""
    return CHUNK if codec == EXACT else num // 8


@pytest.mark.parametrize("fault", ["kill", "freeze", "cancel", "cut"])
@pytest.mark.parametrize(("num_members", "num", "codec"), DIRECT_GROUPS)
def test_whatever_fails_in_a_direct_round(
    fault: str, num_members: int, num: int, codec: str
) -> None:
    """At every moment: who returns has the sum, who raises names one that failed, nothing stays."""
    ends: set[str] = set()

    async def at(moment_s: float, group: Group) -> None:
        assert group.direct(codec)
        expected = group.expected() if codec == EXACT else None
        victim, other = group.members[1], group.members[0]
        peers = [each.split("#")[0] for each in (victim, other)]
        failed = {victim, other} if fault == "cut" else {victim}
        tasks = {m: asyncio.ensure_future(group.member(m, codec=codec)) for m in group.members}
        await asyncio.sleep(moment_s)
        if fault == "freeze":
            group.network.freeze(peers[0])
        elif fault == "cut":
            group.network.cut(*peers)
        else:
            if fault == "kill":
                group.network.kill(peers[0])
            tasks[victim].cancel()
        await asyncio.wait(tasks.values())
        assert asyncio.get_running_loop().time() < 60.0
        outs = []
        for member, task in tasks.items():
            if member == victim and fault != "cut":
                continue
            error = task.exception()
            ends.add("returned" if error is None else "raised")
            if error is None:
                outs.append(group.out[member])
            else:
                assert isinstance(error, RoundFailedError)
                assert error.peer in failed, (moment_s, error)
        if not tasks[victim].cancelled() and tasks[victim].exception() is None:
            outs.append(group.out[victim])
        assert all(torch.equal(out, outs[0]) for out in outs)
        if expected is not None:
            assert all(torch.equal(out, expected) for out in outs)
        group.network.thaw(peers[0])
        group.network.heal()
        await asyncio.sleep(100)
        for reducer in group.reducers.values():
            assert not reducer._rounds
            assert not reducer._parked
        assert not any(transport.streams for transport in group.network.transports.values())
        group.members = [m for m in group.members if m != victim]
        assert await group.everyone("again", codec=codec) == [None] * len(group.members)

    later = (
        [] if num < 100_000 else [MOMENTS_S[-1] + n / 400 for n in range(1, 13)]
    )  # dialled twice
    for moment_s in MOMENTS_S + later:
        simulate(
            lambda: Group(num_members, num, torch.float64, chunk_elements=watched(codec, num)),
            partial(at, moment_s),
        )
    assert ends == {"returned", "raised"}


def test_a_direct_round_takes_one_hop() -> None:
    took, hop_s = {}, 0.01
    dialling_s = 2 * hop_s  # in memory; libp2p names the protocol along with the first bytes

    async def script(group: Group) -> None:
        group.network.jitter = 0.0
        began = asyncio.get_running_loop().time()
        assert await group.everyone() == [None] * 3
        took[group.direct()] = asyncio.get_running_loop().time() - began - dialling_s

    for num in (DIRECT, PARTS):
        simulate(partial(Group, 3, num, torch.float64), script)
    assert took[True] == pytest.approx(hop_s, rel=0.1)
    assert took[False] == pytest.approx(2 * hop_s, rel=0.1)


def test_who_is_done_first_leaves_what_the_other_needs() -> None:
    """And does not wait for it to arrive: the one whose line is slow has all it needs, itself."""

    async def script(group: Group) -> None:
        slow, fast = group.members
        group.network.rates["peer0", "peer1"] = 1e6  # 320 kB take 2.6 s
        tasks = {m: asyncio.ensure_future(group.member(m)) for m in group.members}
        await asyncio.sleep(1.0)
        assert tasks[slow].done()
        assert not tasks[fast].done()
        await asyncio.wait(tasks.values())
        for member in group.members:
            assert tasks[member].exception() is None
            assert torch.equal(group.out[member], group.expected())
        await asyncio.sleep(1.0)
        assert not any(transport.streams for transport in group.network.transports.values())

    simulate(lambda: Group(2, 80_000, torch.float32), script)


def test_no_stream_of_a_direct_round_is_ended_before_the_other_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Libp2p may lose all of a stream that is."""
    closed_at, close = list[float](), MemoryStream.close

    async def noted(self: MemoryStream) -> None:
        closed_at.append(asyncio.get_running_loop().time())
        await close(self)

    async def script(group: Group) -> None:
        slow, fast = group.members
        group.network.rates["peer0", "peer1"] = 1e6
        tasks = {m: asyncio.ensure_future(group.member(m)) for m in group.members}
        await asyncio.wait([tasks[slow]])
        assert not tasks[fast].done()
        await asyncio.wait([tasks[fast]])
        ended_at = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)  # of virtual time: what the other says, and the ends, arrive
        stripes = make_plan(group.members, 80_000, "float32").num_stripes(0)
        assert stripes > 1
        assert len(closed_at) == 2 * stripes
        assert min(closed_at) >= ended_at
        assert not any(transport.streams for transport in group.network.transports.values())

    monkeypatch.setattr(MemoryStream, "close", noted)
    simulate(lambda: Group(2, 80_000, torch.float32), script)


@pytest.mark.parametrize("num", [DIRECT, PARTS])
def test_who_dies_before_it_begins_is_named_at_once(num: int) -> None:
    """It has taken what it needed, and owes all."""

    async def script(group: Group) -> None:
        first, second = group.members
        task = asyncio.ensure_future(group.member(first))
        await asyncio.sleep(1.0)
        group.network.kill("peer1")
        await asyncio.wait([task])
        assert asyncio.get_running_loop().time() < 3.0
        error = task.exception()
        assert isinstance(error, RoundFailedError)
        assert error.peer == second

    simulate(lambda: Group(2, num, torch.float64), script)


def test_who_is_done_and_dies_is_blamed_by_who_is_not() -> None:
    async def script(group: Group) -> None:
        slow, fast = group.members
        group.network.rates["peer0", "peer1"] = 1e6
        tasks = {m: asyncio.ensure_future(group.member(m)) for m in group.members}
        await asyncio.sleep(1.0)
        assert tasks[slow].done()
        group.network.kill("peer0")
        await asyncio.wait(tasks.values())
        error = tasks[fast].exception()
        assert isinstance(error, RoundFailedError)
        assert error.peer == slow

    simulate(lambda: Group(2, 80_000, torch.float32), script)


def test_abort_everywhere_then_the_next_attempt_at_once() -> None:
    async def script(group: Group) -> None:
        for attempt in range(5):
            tasks = [asyncio.ensure_future(group.member(m, f"a{attempt}")) for m in group.members]
            await asyncio.sleep(0.007 * attempt)
            for task in tasks:
                task.cancel()
            done, _ = await asyncio.wait(tasks)
            assert all(task.cancelled() for task in done)
        began = asyncio.get_running_loop().time()
        assert await group.everyone("final") == [None] * 4
        assert asyncio.get_running_loop().time() - began < 1.0
        for out in group.out.values():
            assert torch.equal(out, group.expected())
        for reducer in group.reducers.values():
            with pytest.raises(ValueError, match="has been used"):
                await reducer.all_reduce("final", NAMES[:4], torch.ones(2), torch.ones(2))

    simulate(lambda: Group(4, 40_000, torch.float64), script)


def test_one_member_aborts_and_the_others_hear_of_it() -> None:
    async def script(group: Group) -> None:
        tasks = [asyncio.ensure_future(group.member(m)) for m in group.members]
        await asyncio.sleep(0.025)
        tasks[0].cancel()
        await asyncio.wait(tasks)
        for task in tasks[1:]:
            error = task.exception()
            assert isinstance(error, RoundFailedError)
            assert error.peer == group.members[0]

    simulate(lambda: Group(3, 40_000, torch.float64), script)


@pytest.mark.parametrize("num", [DIRECT, PARTS])
def test_a_late_starter_is_waited_for(num: int) -> None:
    async def script(group: Group) -> None:
        async def later(member: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            await group.member(member)

        await asyncio.gather(
            *(later(m, delay) for m, delay in zip(group.members, (0, 25, 12), strict=True))
        )
        for out in group.out.values():
            assert torch.equal(out, group.expected())

    simulate(lambda: Group(3, num, torch.float64), script)


@pytest.mark.parametrize("num", [DIRECT, PARTS])
def test_a_member_that_never_starts_is_named(num: int) -> None:
    async def script(group: Group) -> None:
        first, second, absent = group.members
        errors = await asyncio.gather(
            group.member(first), group.member(second), return_exceptions=True
        )
        for error in errors:
            assert isinstance(error, RoundFailedError)
            assert error.peer == absent, error
        assert not group.reducers[absent]._parked

    simulate(lambda: Group(3, num, torch.float64), script)


@pytest.mark.parametrize("num", [DIRECT, PARTS])
def test_another_life_of_a_peer_is_refused(num: int) -> None:
    async def script(group: Group) -> None:
        first, second = group.members
        group.network.kill(second.split("#")[0])
        group.reducers[second] = group.reducer(second)
        group.reducers[second].lives = {"peer1#ffffffff"}
        with pytest.raises(RoundFailedError) as caught:
            await group.member(first)
        assert caught.value.peer == second
        assert "life" in str(caught.value)

    simulate(lambda: Group(2, num, torch.float64), script)


@pytest.mark.parametrize("num", [DIRECT, PARTS])
def test_unlike_plans_fail_on_both_sides(num: int) -> None:
    async def script(group: Group) -> None:
        first, second = group.members
        group.local[second] = group.before[second] = torch.zeros(2000, dtype=torch.float64)
        group.out[second] = torch.zeros(2000)
        errors = await group.everyone()
        for error, other in zip(errors, (second, first), strict=True):
            assert isinstance(error, RoundFailedError)
            assert error.peer == other
        assert any("another" in str(error) for error in errors)

    simulate(lambda: Group(2, num, torch.float64), script)


def header(group: Group, **changes: object) -> dict[str, Any]:
    plan = make_plan(group.members, 3000, "float64", chunk_elements=CHUNK)
    return {
        "round": "1",
        "from": "stranger",
        "to": group.members[0],
        "plan": plan.digest(),
        "part": plan.part(0).num_elements,
        "accumulate": "float64",
        **changes,
    }


@pytest.mark.parametrize("words", [b"", b"\x01", b"\x01S"])
def test_streams_that_say_nothing_are_bounded(words: bytes) -> None:
    """Of one peer and of all: otherwise each keeps a file open for as long as it may be silent.
    Strangers together leave half of them to the peers of the run."""

    async def script(group: Group) -> None:
        limits = Limits(max_unread_of_one=2, max_unread=7)
        reducer = GroupAllReduce(
            group.network.transport("victim"),
            "victim#1",
            addresses=lambda peer: ("somewhere",) if peer.startswith("known") else (),
            limits=limits,
        )
        reducer.serve()
        for name in ("s1", "s2", "s3", "known1", "known2", "known3"):
            other = group.network.transport(name)
            for _ in range(9):
                stream = await other.dial("victim", PROTOCOL)
                await stream.send([words])
        await asyncio.sleep(0.1)
        assert reducer._unread.open == {"s1": 2, "s2": 1, "known1": 2, "known2": 2}
        await asyncio.sleep(limits.silence_s)
        assert not reducer._unread.open

    simulate(lambda: Group(2, 30, torch.float64), script)


@pytest.mark.parametrize(
    "changes",
    [
        {},  # right in everything, but no member
        {"from": NAMES[1]},  # a member's name on another peer's stream
        {"part": 1 << 60},
        {"part": "many"},
        {"round": "x" * 5000},
        {"more": 1},
        {"round": "unknown"},
    ],
)
def test_a_stranger_cannot_disturb_a_round(changes: dict[str, object]) -> None:
    async def script(group: Group) -> None:
        stranger = group.network.transport("stranger")
        tasks = [asyncio.ensure_future(group.member(m)) for m in group.members]
        streams = []
        for _ in range(9):  # more than may be parked for one peer
            streams.append(await dial_striped(stranger, "peer0", PROTOCOL, (), 1))
            await streams[-1].send(encode_frame(header(group, **changes)))
            await streams[-1].send([b"\x00" * 10_000])
        raw = await stranger.dial("peer0", PROTOCOL)
        await raw.send([b"\xff" * 100])
        await asyncio.gather(*tasks)
        assert len(group.reducers[group.members[0]]._parked) <= 4
        for stream in streams:
            stream.abort()
        for out in group.out.values():
            assert torch.equal(out, group.expected())

    simulate(lambda: Group(3, 3000, torch.float64), script)


def test_strangers_do_not_take_the_places_of_who_waits_for_a_late_member() -> None:
    async def script(group: Group) -> None:
        late, *others = group.members
        known = {peer_of(member): ("somewhere",) for member in group.members}
        group.reducers[late] = GroupAllReduce(
            group.network.transport(peer_of(late)),
            late,
            addresses=lambda peer: known.get(peer, ()),
            limits=Limits(max_parked=3),
            chunk_elements=CHUNK,
        )
        group.reducers[late].serve()

        async def park(name: str) -> Stream:
            transport = group.network.transport(name)
            stream = await dial_striped(transport, peer_of(late), PROTOCOL, (), 1)
            await stream.send(encode_frame(header(group, **{"from": name})))
            await asyncio.sleep(0.1)
            return stream

        waiting = [await park(f"stranger{number}") for number in range(3)]
        tasks = [asyncio.ensure_future(group.member(member)) for member in others]
        await asyncio.sleep(0.5)
        waiting.append(await park("stranger3"))  # in vain
        parked = group.reducers[late]._parked.values()
        assert sorted(parked) == [*sorted(map(peer_of, others)), "stranger2"]
        await group.member(late)
        await asyncio.gather(*tasks)
        for out in group.out.values():
            assert torch.equal(out, group.expected())
        for stream in waiting:
            stream.abort()

    simulate(lambda: Group(3, PARTS, torch.float64), script)


def test_what_is_cancelled_before_it_begins_says_nothing() -> None:
    """As when a round fails in the instant in which a stream has been dialled."""

    async def script(group: Group) -> None:
        plan = make_plan(group.members, 3000, "float64")
        nothing = memoryview(b"")
        me, other = group.members[:2]
        current = round_module.Round("1", me, plan, nothing, nothing, Limits(), TaskSet())
        begun: list[str] = []

        async def work() -> None:
            begun.append("work")

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            task = current._spawn(current._links[other], work)
            task.cancel()
            await asyncio.wait([task])
            del task
            gc.collect()
        assert not warned
        assert not begun

    simulate(lambda: Group(2, 30, torch.float64), script)


def test_a_group_may_wait_for_one_member() -> None:
    """As many as may be in a group: each has a stream waiting there."""
    assert Limits().max_parked >= MAX_MEMBERS


def test_bytes_of_a_slow_line_are_a_sign_of_life() -> None:
    """A chunk of 512 KiB may be on its way for longer than a member may be silent."""
    stream: Any = SimpleNamespace(sent_bytes=0, received_bytes=0)
    link = Link(0, "a member", dialled=stream)
    for _ in range(2):
        before = link.signs_of_life()
        stream.sent_bytes += 1
        assert link.signs_of_life() != before


def test_each_stripe_that_waits_for_a_round_counts() -> None:
    async def script(group: Group) -> None:
        late = group.members[0]
        reducer = group.reducers[late] = GroupAllReduce(
            group.network.transport(peer_of(late)),
            late,
            addresses=lambda peer: ("known",) if peer.startswith("peer") else (),
            limits=Limits(max_parked=8),
        )
        reducer.serve()

        async def park(name: str, num_stripes: int) -> list[str]:
            transport = group.network.transport(name)
            first = encode_frame(header(group, **{"from": name}))
            streams.append(
                await dial_striped(transport, peer_of(late), PROTOCOL, (), num_stripes, first)
            )
            await asyncio.sleep(0.1)
            return list(reducer._parked.values())

        streams = list[Stream]()
        assert await park("stranger1", 3) == ["stranger1"]
        assert await park("stranger2", 4) == ["stranger1", "stranger2"]
        assert await park("stranger3", 2) == ["stranger1", "stranger2"]  # of 8, 7 are taken
        assert await park("peer8", 2) == ["stranger2", "peer8"]
        assert await park("peer9", 8) == ["peer9"]
        for stream in streams:
            stream.abort()

    simulate(lambda: Group(2, PARTS, torch.float64), script)


@pytest.mark.parametrize("num", [DIRECT, PARTS])
@pytest.mark.parametrize("where", ["adding up", "what comes in"])
def test_who_has_no_memory_names_itself(
    where: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not leave the others to wait for it, and each other, in vain."""
    owner, name = (round_module, "sum_rounded") if where == "adding up" else (np, "empty")
    real, failed = getattr(owner, name), []

    def fails_once(*arguments: Any) -> Any:
        if not failed and (where == "adding up" or arguments[1:] == (np.uint8,)):
            failed.append(True)
            raise MemoryError("none left")
        return real(*arguments)

    monkeypatch.setattr(owner, name, fails_once)

    async def script(group: Group) -> None:
        began = asyncio.get_running_loop().time()
        errors = dict(zip(group.members, await group.everyone(), strict=True))
        assert asyncio.get_running_loop().time() - began < 5.0
        assert all(e is None or isinstance(e, RoundFailedError) for e in errors.values())
        [mine] = [m for m, e in errors.items() if str(e).startswith("cannot average: MemoryError")]
        named = {e.peer for e in errors.values() if e is not None}  # type: ignore[attr-defined]
        assert named == {mine}
        assert await group.everyone("again") == [None] * len(group.members)

    simulate(lambda: Group(3, num, torch.float64), script)


def test_streams_of_attempts_given_up_do_not_keep_the_next_one_out() -> None:
    """One member began five rounds that the other was never told of; the sixth is theirs."""

    async def script(group: Group) -> None:
        first, second = group.members
        abandoned = [asyncio.ensure_future(group.member(first, f"old {n}")) for n in range(5)]
        await asyncio.sleep(1.0)
        for each in abandoned:  # their streams are with the other all the same
            each.cancel()
        tasks = [asyncio.ensure_future(group.member(first, "new"))]
        await asyncio.sleep(1.0)
        assert len(group.reducers[second]._parked) <= 4
        tasks.append(asyncio.ensure_future(group.member(second, "new")))
        assert await asyncio.gather(*tasks) == [None, None]
        assert asyncio.get_running_loop().time() < 4.0
        assert torch.equal(group.out[second], group.expected())

    simulate(lambda: Group(2, PARTS, torch.float64), script)


@pytest.mark.parametrize("num", [DIRECT, PARTS])
def test_a_member_that_breaks_the_protocol_is_named(num: int) -> None:
    async def script(group: Group) -> None:
        first, second = group.members

        async def hostile(stream: Any) -> None:
            await stream.send([b"\x05" * 1000])
            await asyncio.sleep(1)

        group.network.transports["peer1"].serve(PROTOCOL, hostile)
        with pytest.raises(RoundFailedError) as caught:
            await group.member(first)
        assert caught.value.peer == second
        assert "protocol" in str(caught.value)

    simulate(lambda: Group(2, num, torch.float64), script)


def test_arguments_that_make_no_round() -> None:
    async def script(group: Group) -> None:
        reducer = group.reducers[group.members[0]]
        good, out = torch.zeros(10, dtype=torch.float64), torch.zeros(10)
        for local, result, members in [
            (good, torch.zeros(11), group.members),
            (good, good, group.members),
            (good.view(2, 5), out, group.members),
            (good.half(), out, group.members),
            (good, out, group.members[1:]),
            (good, out, group.members[::-1]),
        ]:
            with pytest.raises(ValueError, match=r"expected|elements|member|accumulate"):
                await reducer.all_reduce("bad", members, local, result)

    simulate(lambda: Group(2, 10, torch.float64), script)
