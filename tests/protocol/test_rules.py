"""Rules that random scenarios rarely need: each kept, and what becomes of a run without it.

What a step became is safe by several rules at once, so that one of them alone can be missing for
hundreds of seeds. Each of these swarms is led to where its rule is the only one that helps.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from peer.calls import MicrobatchCall
from peer.quorum import Quorum
from swarm.ledger import Ledger
from swarm.net.channel import CallFailedError
from swarm.terms import Term
from tests.protocol.simulated import Swarm, baseline, plan

TRAINERS = ("t0", "t1", "t2")
LEASES = dict.fromkeys(TRAINERS, 1.0)
STEP = 1


# ---- what an earlier leader left is voided before another averages -------------------------------


class LeftBehind(Swarm):
    """Two leaders die in step 1, each just before it would have been too late.

    The first has accepted its record, alone. The second, in whose group a replica is missing,
    has every gradient averaged anew, to other bits (the sums travel as int8), and proposes nothing.
    Then the first comes back: what it accepted is held by no replica any more.
    """

    def __init__(self) -> None:
        super().__init__(
            num_stages=2,
            replicas=(2, 2),
            plan=plan(4, 3),
            trainer_ids=TRAINERS,
            leases=LEASES,
            gradients="int8",
        )
        self.dead: list[str] = []
        self.prepared: set[str] = set()
        watched = self.disks["t0"].saved
        self.disks["t0"].saved = lambda: (watched(), self.accepted())

    def accepted(self) -> None:
        mine = self.disks["t0"].durable.accepted
        record = mine.record if mine is not None else None
        if not self.dead and record is not None and record.step == STEP:
            self.end("t0")
            self.later(0.01, self.kill, "r0.1")

    def end(self, trainer: str) -> None:
        """Nothing that it says from now on arrives."""
        self.dead.append(trainer)
        for other in [*self.trainers, *self.members]:
            if other != trainer:
                self.network.cut(trainer, other)
        self.later(0.0, self.kill_trainer, trainer, 10_000.0)

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if point == "prepared" and facts["step"] == STEP and self.dead == ["t0"]:
            self.prepared.add(who)
            if self.prepared == {"r0.0", "r1.0", "r1.1"}:
                self.end("t1")
                self.later(1.0, self.come_back)

    def come_back(self) -> None:
        self.network.heal()
        self.revive("t0")

    def train(self) -> None:
        self.run(limit_s=100.0)
        assert self.dead == ["t0", "t1"], "nothing was injected"
        assert len(self.chronicle.terms) == 3


def test_what_an_earlier_leader_left_is_voided_before_another_averages() -> None:
    LeftBehind().train()


def test_without_voiding_a_record_is_completed_whose_gradient_nobody_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(quorum: Quorum, step: int) -> None:
        pass

    monkeypatch.setattr(Quorum, "void", nothing)
    swarm = LeftBehind()
    with pytest.raises(TimeoutError):
        swarm.train()
    assert swarm.dead == ["t0", "t1"]


# ---- who has led orders nothing any more ---------------------------------------------------------


class Deposed(Swarm):
    """The leader is frozen within step 1, another takes over, and the first wakes while that one's
    step is under way. It has not heard of it, and orders what it likes."""

    def __init__(self) -> None:
        super().__init__(plan=plan(24, 3), trainer_ids=TRAINERS, leases=LEASES, seconds=(0.1, 0.2))
        self.old = self.frozen_at = self.awake_at = None
        self.ordering: asyncio.Task[None] | None = None

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if (who, point, facts.get("step")) == ("t0", "acknowledged", STEP) and self.old is None:
            assert self.leader is not None
            self.old, self.frozen_at = self.leader.term, self.loop.time()
            self.freeze("t0")
        counting = point == "counted" and facts["step"] == STEP and self.old is not None
        if counting and self.ordering is None and self.leader_of(who) != self.old:
            self.ordering = self.loop.create_task(self.orders(), context=self.context)

    def leader_of(self, who: str) -> Term | None:
        server = self.members[who].server
        return server.parts.ledger.term if server is not None else None

    async def orders(self) -> None:
        """All that a leader can order, of every replica, in the term that is over."""
        self.awake_at = self.loop.time()
        self.thaw("t0")
        await asyncio.sleep(0.2)  # it finds its connections ended
        assert self.old is not None
        term, links = list(self.old), self.trainers["t0"].links
        for name in ("r0.0", "r1.0", "r1.1", "r2.1"):
            member = self.members[name]
            server = member.server
            assert server is not None
            assert self.leader is not None
            channel = await links.channel(f"{name}#1")
            ballot = [term, STEP, 99]
            index = min(server.parts.ledger.counted, default=0)
            route = ["r0.0#1", "r1.0#1", "r2.0#1"]
            route[server.stage] = f"{name}#1"
            call = MicrobatchCall(
                self.old, STEP, index, 1 << 30, 99, tuple(route), server.stage, 16.0, True
            )
            for method, body in (
                ("fence", {"term": term, "step": STEP, "index": 7, "try": 1 << 30}),
                ("abort", {"ballot": ballot}),
                ("reset", {"term": term, "step": STEP, "number": 1 << 30}),
                (
                    "average",
                    {"ballot": ballot, "members": [f"{name}#1"], "expected": []},
                ),
                ("inspect", {"term": term}),
            ):
                with pytest.raises(CallFailedError, match="succeeded") as refused:
                    await channel.call(method, body)
                assert refused.value.detail.get("stale") is True
            decision = server.parts.ledger.on_call(
                call.term, call.step, call.index, call.try_, call.attempt
            )
            assert "succeeded" in decision.reason

    def train(self) -> None:
        assert self.run(limit_s=200.0)["sha256"] == baseline(3, 24)[0]
        assert self.ordering is not None, "nothing was injected"
        self.ordering.result()
        assert self.awake_at is not None
        for at, who, point, facts in self.events:
            assert (who, point) != ("t1", "expelled") or at < self.awake_at, facts
        assert len(self.chronicle.terms) == 2


def test_who_has_led_orders_nothing_any_more() -> None:
    Deposed().train()


def test_a_frozen_trainer_keeps_nobody_from_the_next_leader() -> None:
    """Replicas dial it as well, and it answers to none."""
    swarm = Deposed()
    swarm.train()
    assert swarm.frozen_at is not None
    came = [at for at, who, point, _ in swarm.events if (who, point) == ("t1", "joined")]
    assert len(came) >= 6
    assert sorted(came)[5] < swarm.frozen_at + swarm.silence_s + 2.0


def heeds_any(ledger: Ledger, term: Term) -> bool:
    """`Ledger.see` without its rule."""
    if term > ledger.term:
        return honest(ledger, term)
    return True


honest: Callable[[Ledger, Term], bool] = Ledger.see


def test_if_old_terms_were_heeded_a_deposed_leader_would_undo_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ledger, "see", heeds_any)
    swarm = Deposed()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        swarm.train()
    assert swarm.ordering is not None


# ---- who leaves is let go by the next leader -----------------------------------------------------


class LeaderLostMeanwhile(Swarm):
    """The only replica of a stage wants to go, and waits for another to serve. Meanwhile the leader
    dies; then another replica comes."""

    def __init__(self) -> None:
        super().__init__(
            num_stages=2,
            replicas=(1, 1),
            plan=plan(8, 12),
            trainer_ids=TRAINERS,
            leases=LEASES,
            seconds=(0.1, 0.2),
        )
        self.leaves: asyncio.Task[bool] | None = None

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if (who, point, facts.get("step")) == ("r1.0", "counted", STEP) and self.leaves is None:
            drain = self.members["r1.0"].drain(1000.0)
            self.leaves = self.loop.create_task(drain, context=self.contexts["r1.0"])
        if (who, point) == ("t0", "leaving"):
            self.later(0.1, self.kill_trainer, "t0", 10_000.0)
        if (who, point, facts.get("step")) == ("t1", "record", STEP + 1):
            self.later(0.0, self.start_replica, "r1.1", 1)


def test_who_leaves_is_let_go_by_the_next_leader() -> None:
    swarm = LeaderLostMeanwhile()
    assert swarm.run(num_steps=12, limit_s=500.0)["sha256"] == baseline(12, 8)[0]
    assert swarm.leaves is not None
    assert swarm.leaves.result() is True
    told = [who for _, who, point, _ in swarm.events if point == "leaving"]
    assert told == ["t0", "t1"]
    assert not [
        facts for _, who, point, facts in swarm.events if (who, point) == ("t1", "expelled")
    ]


class LeaderAway(Swarm):
    """The leader dies within a step; a replica with a twin wants to go while nobody leads."""

    def __init__(self) -> None:
        super().__init__(plan=plan(8, 6), trainer_ids=TRAINERS, leases=LEASES, seconds=(0.1, 0.2))
        self.leaves: asyncio.Task[bool] | None = None

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if (who, point, facts.get("step")) == ("r1.0", "counted", STEP) and self.leaves is None:
            self.later(0.0, self.kill_trainer, "t0", 10_000.0)
            self.later(0.5, self.ask_to_leave)
            self.leaves = self.loop.create_future()  # type: ignore[assignment]

    def ask_to_leave(self) -> None:
        member = self.members["r1.0"]
        assert member.leader is not None
        assert member.leader.ended is not None
        drain = member.drain(1000.0)
        self.leaves = self.loop.create_task(drain, context=self.contexts["r1.0"])


def test_who_leaves_while_nobody_leads_waits_for_the_next_leader() -> None:
    """What it has counted of the step counts, and is not computed again."""
    swarm = LeaderAway()
    assert swarm.run(num_steps=6, limit_s=500.0)["sha256"] == baseline(6, 8)[0]
    assert swarm.leaves is not None
    assert swarm.leaves.result() is True
    assert [who for _, who, point, _ in swarm.events if point == "leaving"] == ["t1"]
    counted = Counter(
        facts["index"]
        for _, who, point, facts in swarm.events
        if (who.partition(".")[0], point, facts.get("step")) == ("r1", "counted", STEP)
    )
    assert set(counted.values()) == {1}, counted


# ---- a trainer that is of no use ends nobody -----------------------------------------------------


class TurnedAway(Swarm):
    """Under the name of one trainer of three another run is served; then the leader dies, and is
    away for a while in which nobody can lead."""

    def __init__(self) -> None:
        super().__init__(plan=plan(8, 4), trainer_ids=TRAINERS, leases=LEASES, seconds=(0.1, 0.2))
        self.refused = False

    def on_probe(self, who: str, point: str, facts: dict[str, Any]) -> None:
        super().on_probe(who, point, facts)
        if (who, point, facts.get("step")) == ("t0", "acknowledged", STEP) and not self.refused:
            self.refused = True
            links = self.trainers["t2"].links
            links._hello["run"] = "another"
            for name in self.members:
                links.end_channels(f"{name}#1", "it was started again")
            self.later(0.0, self.kill_trainer, "t0", 20.0)


def test_a_trainer_that_serves_another_run_ends_nobody() -> None:
    swarm = TurnedAway()
    assert swarm.run(num_steps=4, limit_s=500.0)["sha256"] == baseline(4, 8)[0]
    assert swarm.refused
