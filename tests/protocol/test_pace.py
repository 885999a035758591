"""What faults cost in time, in virtual seconds: nobody is idle who could work.

Two stages of two replicas, kernels of 30 and 60 ms, 24 microbatches a step: about 1.2 s a step, of
which filling and draining the pipeline is 0.09 s.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from swarm.net.channel import HEARTBEAT_S, SILENCE_S
from tests.protocol.simulated import Fault, Swarm, baseline, plan

MICROBATCHES, STEPS = 24, 12
IDEAL_S = MICROBATCHES / 2 * 0.09 + 0.09
SHARE = MICROBATCHES // 2


class Paced(Swarm):
    """A swarm whose steps are timed."""

    def __init__(self, *faults: Fault, steps: int = STEPS, **more: object) -> None:
        super().__init__(
            num_stages=2,
            replicas=(2, 2),
            plan=plan(MICROBATCHES, steps),
            seconds=(0.03, 0.06),
            faults=list(faults),
            **more,  # type: ignore[arg-type]
        )
        assert self.run(steps)["sha256"] == baseline(steps, MICROBATCHES)[0]
        assert self.fired == list(faults), "nothing was injected"

    def times(self, point: str, **facts: object) -> list[float]:
        return [
            at
            for at, _, passed, told in self.events
            if passed == point and all(told.get(key) == value for key, value in facts.items())
        ]

    def seconds_of_steps(self) -> list[float]:
        """Of each step but the first, from commit to commit."""
        at = self.times("record")
        return [after - before for before, after in itertools.pairwise(at)]

    def kernels(self, step: int, kind: str = "forward") -> Counter[str]:
        return Counter(
            who for _, who, point, told in self.events if point == kind and told["step"] == step
        )


def test_without_faults_only_filling_and_draining_is_lost() -> None:
    assert statistics.mean(Paced().seconds_of_steps()) < 1.06 * IDEAL_S


@pytest.mark.parametrize("share", [0.8, 1.25], ids=["kernels_longer", "wires_longer"])
def test_sending_overlaps_with_computing(share: float) -> None:
    """Two stages of one replica; a microbatch is on the wire, each way, for `share` of the time
    that its kernels take. A step takes what the slower of the two takes, not both."""
    microbatches, steps, kernels_s = 32, 5, 0.03 + 0.06
    links = (("r0.0", "r1.0"), ("r1.0", "r0.0"))

    class Thin(Swarm):
        """Its links are made thin after the first step, which shows what a microbatch weighs."""

        def on_probe(self, who: str, point: str, facts: dict) -> None:
            super().on_probe(who, point, facts)
            if (point, facts.get("step")) == ("record", 0):
                for link in links:
                    bits = 8 * sent[link] / microbatches
                    self.network.rates[link] = bits / (share * kernels_s)
                sent.clear()

    sent: Counter[tuple[str, str]] = Counter()  # bytes, since the first step
    swarm = Thin(2, (1, 1), plan=plan(microbatches, steps), seconds=(0.03, 0.06))
    usual = swarm.network.transmit

    def transmit(source: str, target: str, num_bytes: int, now: float) -> float:
        sent[source, target] += num_bytes
        return usual(source, target, num_bytes, now)

    swarm.network.transmit = transmit  # type: ignore[method-assign]
    assert swarm.run(steps)["sha256"] == baseline(steps, microbatches)[0]
    # Of whatever comes last, one more: the other stage, or the way back.
    computing_s, sending_s = (microbatches + 1) * kernels_s, (microbatches + 1) * share * kernels_s
    for link in links:
        busy_s = 8 * sent[link] / swarm.network.rates[link] / (steps - 1)
        assert busy_s == pytest.approx(microbatches * share * kernels_s, rel=0.05)
    # In the first step with thin links too few are under way: it shows how many it takes.
    step_s = statistics.mean(result.wall_s for result in swarm.results[2:])
    assert step_s <= 1.15 * max(computing_s, sending_s) < computing_s + sending_s


def test_after_a_death_and_a_join_steps_are_as_quick_as_before() -> None:
    """Whoever was ahead when the joiner came is not short of work in every step from then on."""
    swarm = Paced(Fault("counted", "kill", replica="r1.1", step=2, count=8, duration_s=2.0))
    seconds = swarm.seconds_of_steps()
    admitted = swarm.times("admitted", replica="r1.1#2")[0]
    after = [s for s, at in zip(seconds, swarm.times("record"), strict=False) if at > admitted]
    assert len(after) >= 4
    assert max(after) < 1.1 * IDEAL_S
    for step in range(STEPS - 3, STEPS):
        assert set(swarm.kernels(step).values()) == {SHARE}, swarm.kernels(step)


def test_a_death_costs_what_the_dead_had_counted() -> None:
    swarm = Paced(Fault("counted", "kill", replica="r1.1", step=2, count=8))
    alone = MICROBATCHES * 0.09
    assert swarm.kernels(2)["r1.0"] == MICROBATCHES
    assert swarm.seconds_of_steps()[1] < alone + 0.09 + 0.1


def test_leaving_costs_nothing() -> None:
    """It works until the commit it has to wait for anyway, and is not there afterwards."""
    leaving: list[asyncio.Task[None]] = []

    class Leaving(Paced):
        def on_probe(self, who: str, point: str, facts: dict) -> None:
            super().on_probe(who, point, facts)
            if (who, point, facts.get("step")) == ("r1.1", "counted", 3) and not leaving:
                drain = self.members["r1.1"].drain(30.0)
                leaving.append(asyncio.get_running_loop().create_task(drain))

    swarm = Leaving()
    assert leaving[0].done()
    assert max(swarm.seconds_of_steps()[:3]) < 1.1 * IDEAL_S
    assert set(swarm.kernels(3).values()) == {SHARE}
    assert swarm.kernels(4) == {"r0.0": SHARE, "r0.1": SHARE, "r1.0": MICROBATCHES}
    assert not swarm.times("expelled")


@pytest.mark.parametrize("goes", [False, True], ids=["stays", "goes"])
def test_no_new_work_for_whoever_leaves_before_the_step_ends(goes: bool) -> None:
    """Only what it had done is computed again, if it does not stay until the commit: by its twin,
    from what its neighbour kept."""

    class Leaving(Paced):
        async def depart(self) -> None:
            loop = asyncio.get_running_loop()
            asked = loop.time()
            assert not await self.members["r1.1"].drain(1.5)
            assert loop.time() - asked == pytest.approx(1.5)
            if goes:
                self.kill("r1.1")

        def on_probe(self, who: str, point: str, facts: dict) -> None:
            super().on_probe(who, point, facts)
            if (who, point, facts.get("step")) == ("r1.1", "counted", 3) and not gone:
                gone.append(asyncio.get_running_loop().create_task(self.depart()))

    gone: list[asyncio.Task[None]] = []
    swarm = Leaving()
    gone[0].result()
    for point in ("forward", "backward"):
        ran = swarm.kernels(3, point)
        assert 0 < ran["r1.1"] < SHARE
        assert ran["r0.0"] + ran["r0.1"] == MICROBATCHES, ran
        assert ran["r1.0"] == MICROBATCHES - (0 if goes else ran["r1.1"]), ran


# ---- silence -------------------------------------------------------------------------------------


def frozen(step_count: int, seconds: float) -> Paced:
    fault = Fault("counted", "freeze", replica="r1.1", step=3, count=step_count, duration_s=seconds)
    return Paced(fault)


def test_the_silent_get_no_new_work_and_are_not_waited_for() -> None:
    """Frozen early in a step: its twin goes on, and it is given up once all wait for it."""
    for count in (2, 10):
        swarm = frozen(count, 30.0)
        struck = swarm.times("counted", step=3)
        at = next(t for t, who, p, f in swarm.events if p == "suspected")
        began = [t for t, who, p, f in swarm.events if who == "r1.1" and t < at - 0.5][-1]
        assert 1.0 < at - began < 2.5
        expelled = swarm.times("expelled", replica="r1.1#1")[0]
        assert expelled - began < 3.5
        assert swarm.times("left", replica="r1.1#1")[0] - began < 5.1
        # The twin was at work for as long as there was something it could begin.
        done = [t for t in struck if began < t < began + 1.0]
        assert len(done) >= (8 if count == 2 else 1)


CUTS = [
    pytest.param(Fault("counted", "cut_leader", replica="r1.1", step=3, count=2), id="leader"),
    pytest.param(
        Fault("counted", "partition", replica="r1.1", step=3, count=2, side=("r1.1",)),
        id="everybody",
    ),
]


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_is_noticed_within_five_seconds(cut: Fault) -> None:
    """Also where only the leader is cut off: then the work goes on, and only averaging waits."""
    swarm = Paced(replace(cut, duration_s=8.0), steps=5)
    assert (swarm.heartbeat_s, swarm.silence_s) == (HEARTBEAT_S, SILENCE_S), "not as by default"
    [began] = swarm.times("fault")
    for point, limit_s in (("suspected", 2.5), ("expelled", 5.0), ("left", 5.0)):
        noticed = swarm.times(point, replica="r1.1#1")[0]
        assert began < noticed <= began + limit_s, (point, noticed - began)
    assert {told["replica"] for _, _, point, told in swarm.events if point == "expelled"} == {
        "r1.1#1"
    }
    # The step in which it struck took what it takes without, the silence, and the share again.
    assert max(swarm.seconds_of_steps()) < 5.0 + 2 * IDEAL_S


def test_a_short_silence_changes_nothing() -> None:
    swarm = frozen(2, 1.0)
    assert not swarm.times("suspected")
    assert not swarm.times("expelled")


def test_the_suspected_that_wakes_goes_on_with_what_it_had() -> None:
    """A step so long that its others are busy all the while: suspected, trusted again."""
    fault = Fault("counted", "freeze", replica="r1.1", step=1, count=3, duration_s=3.0)
    swarm = Swarm(
        num_stages=2,
        replicas=(2, 2),
        plan=plan(MICROBATCHES, 3),
        seconds=(0.3, 0.6),
        faults=[fault],
    )
    assert swarm.run(3)["sha256"] == baseline(3, MICROBATCHES)[0]
    points = [point for _, _, point, told in swarm.events if told.get("replica") == "r1.1#1"]
    assert "suspected" in points
    assert "expelled" not in points
    issued = [told["index"] for _, _, p, told in swarm.events if p == "issue" and told["step"] == 1]
    assert len(issued) == len(set(issued)), "a microbatch was issued again"


# ---- slow is not dead ----------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [44, 88, 160])
def test_a_replica_ten_times_slower_gets_a_tenth_of_its_twins_work(microbatches: int) -> None:
    """In a whole swarm, its neighbours at full speed: nobody is left out, and nobody waits long."""
    steps = 4
    swarm = Swarm(
        num_stages=3,
        replicas=(2, 2, 2),
        plan=plan(microbatches, steps),
        seconds=(0.03, 0.06),
        speed={"r1.1": 10.0},
    )
    assert swarm.run(steps)["sha256"] == baseline(steps, microbatches)[0]
    ended = max(at for at, _, point, _ in swarm.events if point == "committed")
    points = {point for at, _, point, _ in swarm.events if at <= ended}
    assert not points & {"expelled", "suspected", "failed", "left"}
    work = Counter(
        who
        for _, who, point, told in swarm.events
        if point == "forward" and who.startswith("r1.") and told["step"] > 0
    )
    assert 0.05 <= work["r1.1"] / work["r1.0"] <= 0.15, work
    ideal_s = microbatches / (1 / 0.09 + 1 / 0.9)
    walls = [result.wall_s for result in swarm.results[1:]]
    assert statistics.mean(walls) < 1.35 * ideal_s, (walls, ideal_s)
