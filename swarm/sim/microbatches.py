"""The fine resolution: every microbatch, forward and backward, through the devices (simpy).

Routes come from `swarm.routing.Router`, as a leader draws them, fed with the service times it would
measure; membership and moves are those of the fluid resolution. A device takes one task at a time
in the order of a real one; the leader keeps at most `slots` microbatches per replica of the
narrowest stage under way, as the real one does. A replica that dies takes with it what it has
counted in the step: the others of its stage compute that again, forward and backward, and nobody
else does (the rest answer from what they keep). Who leaves with a notice, or moves, hands over what
it counted. A peer that holds a second stage is two replicas on one device, as in a real swarm, and
the router gives its time away once. For some hundred peers; `fluid` is for more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import simpy

from swarm.compute import KernelQueue, Kind
from swarm.placement import StageNeed, least_slots
from swarm.routing import Router
from swarm.sim.churn import Life
from swarm.sim.fluid import Step, pipeline_fill_s, with_overhead
from swarm.sim.outcome import EXACT_PEERS, Outcome, Reach
from swarm.sim.policies import Policy
from swarm.sim.roster import Roster

FORWARD_SHARE = 1 / 3  # of a microbatch's compute; the backward takes the rest
SECOND = "#second"  # behind a peer's name: its replica of a second stage, on the same device
Waiting = Generator[simpy.Event, Any, Any]


class Device:
    """One task at a time. `run` gives an event: True when done, False if it died.

    `speed` in cost units per second; a task takes what it is when it begins. `share`: of its time,
    what is left for microbatches.
    """

    def __init__(self, env: simpy.Environment, speed: float) -> None:
        self.env, self.alive, self.speed, self.share = env, True, speed, 1.0
        self._queue: KernelQueue[tuple[Kind, float, simpy.Event]] = KernelQueue()
        self._current: simpy.Event | None = None

    def takes_s(self, cost: float) -> float:
        return cost / (self.speed * self.share)

    def run(self, kind: Kind, cost: float) -> simpy.Event:
        event = self.env.event()
        if not self.alive:
            event.succeed(False)
            return event
        self._queue.push(kind, 0, (kind, cost, event))
        if self._current is None:
            self._next()
        return event

    def die(self) -> None:
        self.alive = False
        pending = [event for _, _, event in self._queue.drain()]
        if self._current is not None:
            pending.append(self._current)
        self._current = None
        for event in pending:
            event.succeed(False)

    def _next(self) -> None:
        task = self._queue.pop()
        if task is None:
            self._current = None
            return
        kind, cost, event = task
        self._queue.began(kind)
        self._current = event
        timer = self.env.timeout(self.takes_s(cost))
        timer.callbacks.append(lambda _: self._done(event))

    def _done(self, event: simpy.Event) -> None:
        if event is self._current:
            self._next()
            event.succeed(True)


class _Swarm:
    """One run."""

    def __init__(
        self,
        needs: tuple[StageNeed, ...],
        policy: Policy,
        *,
        seconds: float,
        seed: int,
        step: Step,
        lifetime_s: float,
        second_cost: float,
        divisible: bool,
    ) -> None:
        self.env = simpy.Environment()
        self.needs, self.policy, self.step = needs, policy, step
        self.router = Router(seed)
        self.roster = Roster(needs, lifetime_s, second_cost)
        self.outcome = Outcome(policy.name, seed, seconds)
        costs = [need.cost for need in needs]
        self.alive = Reach(costs, divisible=divisible)
        self.able = Reach(costs, divisible=divisible)
        self.least_bytes = min(need.download_bytes for need in needs)
        self.devices: dict[str, Device] = {}
        self.has_been_able: set[str] = set()
        self.counted: dict[str, Counter[int]] = {}  # per replica: stage -> of this step
        self.under_way = 0
        self.slots = step.slots or least_slots(len(needs))
        self.left = 0  # of this step, replays included
        self.news = self.env.event()
        self.last_s = 0.0

    # ---- membership ---------------------------------------------------------------------------

    def live(self, life: Life) -> Waiting:
        env, roster = self.env, self.roster
        if life.joins_s > 0:
            yield env.timeout(life.joins_s)
        self._account()
        first = life.joins_s <= 0
        self.outcome.joins += 1
        self.alive.add(life.speed)
        env.process(self._becomes_able(life, 0.0 if first else self.least_bytes))
        joiner = roster.newcomer(life)
        stage = self.policy.stage_of(roster, joiner)
        self.devices[life.peer] = Device(env, life.speed)
        env.process(self._turn(life))
        self.counted[life.peer] = Counter()
        if stage is None:
            roster.homeless += 1
        else:
            arrives_s = roster.enter(joiner, stage, env.now, at_once=first)
            if arrives_s > env.now:
                env.process(self._arrive(life.peer, arrives_s))
            else:
                self._serve(life.peer, stage)
        if math.isinf(life.leaves_s):
            return
        notice_s = max(0.0, life.leaves_s - life.notice_s - env.now)
        if life.notice_s > 0:
            yield env.timeout(notice_s)
            self._account()
            roster.give_notice(life.peer, life.leaves_s)
        yield env.timeout(max(0.0, life.leaves_s - env.now))
        self._leave(life)

    def _becomes_able(self, life: Life, download_bytes: float) -> Waiting:
        after_s = download_bytes / life.link_bytes_per_s
        if self.env.now + after_s >= life.leaves_s:
            return
        yield self.env.timeout(after_s)
        self._account()
        if life.peer in self.devices:
            self.able.add(self.devices[life.peer].speed)
            self.has_been_able.add(life.peer)

    def _turn(self, life: Life) -> Waiting:
        """Its speed becomes another, again and again."""
        for turn_s, speed in life.turns:
            yield self.env.timeout(max(0.0, turn_s - self.env.now))
            device = self.devices.get(life.peer)
            if device is None:
                return
            self._account()
            able = life.peer in self.has_been_able
            for reach in (self.alive, self.able) if able else (self.alive,):
                reach.remove(device.speed)
                reach.add(speed)
            device.speed = speed
            self.roster.set_speed(life.peer, speed)

    def _leave(self, life: Life) -> None:
        self._account()
        self.outcome.leaves += 1
        device = self.devices.pop(life.peer)
        self.alive.remove(device.speed)
        if life.peer in self.has_been_able:
            self.has_been_able.remove(life.peer)
            self.able.remove(device.speed)
        self.roster.remove(life.peer)
        self._retire(life.peer)
        lost = self.counted.pop(life.peer)
        device.die()
        if not life.notice_s:
            for stage, number in lost.items():
                for _ in range(number):
                    self.outcome.redone += 1
                    self.left += 1
                    self.env.process(self._replay(stage))
        self._tell()

    def _arrive(self, name: str, arrives_s: float) -> Waiting:
        yield self.env.timeout(max(0.0, arrives_s - self.env.now))
        self._account()
        for each in self.roster.arrive(name, self.env.now):
            self._serve(each, self.roster.peers[each].stages[0])

    def _hold(self, name: str, holds_s: float) -> Waiting:
        yield self.env.timeout(max(0.0, holds_s - self.env.now))
        self._account()
        if (stage := self.roster.hold_second(name, self.env.now)) is not None:
            self.devices[name].share = 1.0 - self.roster.second_cost
            self._serve(name + SECOND, stage)

    def _serve(self, replica: str, stage: int) -> None:
        peer = self.roster.peers[_peer_of(replica)]
        self.router.add(replica, stage, 1.0 / self.roster.rate(peer, stage))
        self._tell()

    def _retire(self, name: str, *, second_only: bool = False) -> None:
        """The router gives it no more; what it has it still does."""
        self.router.remove(name + SECOND)
        if not second_only:
            self.router.remove(name)

    def tick(self) -> Waiting:
        assert self.policy.every_s is not None
        while True:
            yield self.env.timeout(self.policy.every_s)
            self._account()
            for move in self.policy.moves(self.roster, self.env.now):
                self.outcome.moves += 1
                arrives_s = self.roster.begin(move, self.env.now)
                self._retire(move.peer, second_only=move.keeps_serving)
                self.devices[move.peer].share = 1.0
                if arrives_s <= self.env.now:
                    self._serve(move.peer, move.to_stage)
                    continue
                self.env.process(self._arrive(move.peer, arrives_s))
            for second in self.policy.seconds(self.roster):
                self.outcome.seconds_fetched += 1
                holds_s = self.roster.begin_second(second, self.env.now)
                self.env.process(self._hold(second.peer, holds_s))

    # ---- work ---------------------------------------------------------------------------------

    def lead(self) -> Waiting:
        """Step after step."""
        while True:
            self.left = self.step.microbatches
            self.router.begin_step()
            for each in self.counted.values():
                each.clear()
            issued = 0
            while self.left:
                limit = self.slots * min(
                    len(self.router.replicas(stage)) for stage in range(len(self.needs))
                )
                while issued < self.step.microbatches and self.under_way < limit:
                    route = self.router.route(range(len(self.needs)), now=self.env.now)
                    if route is None:
                        break
                    issued += 1
                    self.under_way += 1
                    replicas = [choice.replica for choice in route]
                    for replica in replicas:
                        self.router.started(replica)
                    self.env.process(self._microbatch(replicas))
                self.news = self.env.event()
                yield self.news
            if self.step.averaging_s:
                yield self.env.timeout(self.step.averaging_s)

    def _tell(self) -> None:
        if not self.news.triggered:
            self.news.succeed()

    def _microbatch(self, route: list[str]) -> Waiting:
        stages = range(len(self.needs))
        for stage in stages:
            if stage and self.step.hop_s:
                yield self.env.timeout(self.step.hop_s)
            yield from self._task(route, stage, Kind.FORWARD)
        for stage in reversed(stages):
            yield from self._task(route, stage, Kind.BACKWARD)
            if stage and self.step.hop_s:
                yield self.env.timeout(self.step.hop_s)
        for replica in route:
            self.router.finished(replica)
        self.under_way -= 1
        self.outcome.did(self.env.now, self.env.now, 1)
        self.left -= 1
        self._tell()

    def _replay(self, stage: int) -> Waiting:
        """What a dead replica had counted is computed by another of its stage."""
        route = [""] * len(self.needs)
        yield from self._task(route, stage, Kind.FORWARD)
        yield from self._task(route, stage, Kind.BACKWARD)
        self.router.finished(route[stage])
        self.left -= 1
        self._tell()

    def _task(self, route: list[str], stage: int, kind: Kind) -> Waiting:
        """One forward or backward, by another replica if the one of the route has died."""
        cost = self.needs[stage].cost
        while True:
            device = self.devices.get(_peer_of(route[stage]))
            if device is not None:
                share = FORWARD_SHARE if kind is Kind.FORWARD else 1 - FORWARD_SHARE
                if (yield device.run(kind, share * cost)):
                    break
                continue
            choice = self.router.choose(stage, now=self.env.now)
            if choice is None:
                yield self.env.timeout(0.1)  # as a leader that asks again
                continue
            route[stage] = choice.replica
            self.router.started(choice.replica)
            if kind is Kind.BACKWARD:  # the new one has no forward of it
                again = self.devices[_peer_of(choice.replica)].run(
                    Kind.FORWARD, FORWARD_SHARE * cost
                )
                if not (yield again):
                    continue
        if kind is Kind.BACKWARD:
            replica = route[stage]
            self.counted[_peer_of(replica)][stage] += 1
            self.router.observe(replica, device.takes_s(cost))

    def _account(self) -> None:
        """Book the time since the last change."""
        now = self.env.now
        if now > self.last_s:
            fill_s = pipeline_fill_s(self.roster, self.step)
            rate, best, reachable = (
                with_overhead(each, self.step, fill_s)
                for each in (self.roster.throughput, self.alive.value, self.able.value)
            )
            self.outcome.pass_time(self.last_s, now, rate, best, reachable, len(self.roster.peers))
            self.last_s = now


def _peer_of(replica: str) -> str:
    return replica.removesuffix(SECOND)


def simulate(
    needs: tuple[StageNeed, ...],
    lives: Sequence[Life],
    policy: Policy,
    *,
    seconds: float,
    seed: int = 0,
    step: Step = Step(64),  # noqa: B008 (immutable)
    lifetime_s: float = math.inf,
    second_cost: float = 0.0,
    divisible: bool = False,
) -> Outcome:
    """One run of `seconds`, microbatch by microbatch. As `fluid.simulate`, but for steps of at
    least one microbatch. Raises ValueError for more than 500 lives."""
    if len(lives) > EXACT_PEERS or step.microbatches < 1:
        raise ValueError(f"for at most {EXACT_PEERS} peers and steps of at least one microbatch")
    swarm = _Swarm(
        needs,
        policy,
        seconds=seconds,
        seed=seed,
        step=step,
        lifetime_s=lifetime_s,
        second_cost=second_cost,
        divisible=divisible,
    )
    for life in lives:
        swarm.env.process(swarm.live(life))
    swarm.env.process(swarm.lead())
    if policy.every_s is not None:
        swarm.env.process(swarm.tick())
    swarm.env.run(until=seconds)
    swarm._account()
    swarm.outcome.finish(seconds)
    return swarm.outcome
