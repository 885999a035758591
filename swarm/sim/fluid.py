"""The coarse resolution: between two events every rate is constant, and work flows like a fluid.

The swarm does `min` over stages of the sum of its replicas' rates. What a step costs beyond its
microbatches (averaging, filling the pipeline) is spread over them. A replica that dies without
notice takes what it has counted in the step with it, half a step's share on average; its stage
computes it again, which delays the step by as much as that stage has no time to spare.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from swarm.placement import StageNeed
from swarm.sim.churn import Life
from swarm.sim.outcome import Outcome, Reach
from swarm.sim.policies import Policy
from swarm.sim.roster import Roster

# In this order when they coincide.
_LEAVE, _ABLE, _NOTICE, _TURN, _ARRIVE, _HOLD, _JOIN, _TICK = range(8)


class Step(NamedTuple):
    """What a step is: `microbatches` (0: work without steps), `averaging_s` in which nothing else
    flows, `hop_s` a tensor takes from one stage to the next, `slots` microbatches under way per
    replica of the narrowest stage (0: 2 x stages + 2; only the fine resolution knows them)."""

    microbatches: int = 0
    averaging_s: float = 0.0
    hop_s: float = 0.0
    slots: int = 0


def simulate(
    needs: tuple[StageNeed, ...],
    lives: Sequence[Life],
    policy: Policy,
    *,
    seconds: float,
    seed: int = 0,
    step: Step = Step(),  # noqa: B008 (immutable)
    lifetime_s: float = math.inf,
    second_cost: float = 0.0,
    divisible: bool = False,
) -> Outcome:
    """One run of `seconds`. `lifetime_s`: how long planners believe that peers stay; `second_cost`
    as `Roster`; `divisible` as `Reach`, needed where peers hold second stages."""
    roster = Roster(needs, lifetime_s, second_cost)
    outcome = Outcome(policy.name, seed, seconds)
    costs = [need.cost for need in needs]
    alive, able = Reach(costs, divisible=divisible), Reach(costs, divisible=divisible)
    least_download = min(need.download_bytes for need in needs)
    setbacks = _Setbacks(step)
    speeds: dict[str, float] = {}  # of those alive, as they are now
    has_been_able: set[str] = set()
    order = count()
    events: list[tuple[float, int, int, object]] = []

    def at(time_s: float, kind: int, what: object) -> None:
        if time_s <= seconds:
            heapq.heappush(events, (time_s, kind, next(order), what))

    for life in lives:
        at(max(0.0, life.joins_s), _JOIN, life)
    if policy.every_s is not None:
        at(policy.every_s, _TICK, None)

    now = fill_s = progress = 0.0  # microbatches, those done again included

    def pass_until(time_s: float) -> None:
        nonlocal now, progress
        if time_s > now:
            rate, best, reachable = (
                with_overhead(each, step, fill_s)
                for each in (roster.throughput, alive.value, able.value)
            )
            outcome.pass_time(now, time_s, rate, best, reachable, len(roster.peers))
            outcome.did(now, time_s, rate * (time_s - now))
            progress += rate * (time_s - now)
            now = time_s

    while events:
        time_s, kind, _, what = heapq.heappop(events)
        pass_until(time_s)
        if kind == _TICK:
            for move in policy.moves(roster, now):
                outcome.moves += 1
                at(roster.begin(move, now), _ARRIVE, move.peer)
            for second in policy.seconds(roster):
                outcome.seconds_fetched += 1
                at(roster.begin_second(second, now), _HOLD, second.peer)
            assert policy.every_s is not None
            at(now + policy.every_s, _TICK, None)
        elif kind == _ARRIVE:
            roster.arrive(str(what), now)
        elif kind == _HOLD:
            roster.hold_second(str(what), now)
        elif kind == _TURN:
            assert isinstance(what, tuple)
            name, speed = what
            if name in speeds:
                for reach in (alive, able) if name in has_been_able else (alive,):
                    reach.remove(speeds[name])
                    reach.add(speed)
                speeds[name] = speed
                roster.set_speed(name, speed)
        else:
            assert isinstance(what, Life)
            life = what
            if kind == _JOIN:
                outcome.joins += 1
                joiner = roster.newcomer(life)
                first = life.joins_s <= 0
                alive.add(life.speed)
                speeds[life.peer] = life.speed
                for turn_s, speed in life.turns:
                    at(max(now, turn_s), _TURN, (life.peer, speed))
                able_s = now if first else now + least_download / life.link_bytes_per_s
                if able_s < life.leaves_s:
                    at(able_s, _ABLE, life)
                at(life.leaves_s, _LEAVE, life)
                if life.notice_s > 0 and math.isfinite(life.leaves_s):
                    at(max(now, life.leaves_s - life.notice_s), _NOTICE, life)
                stage = policy.stage_of(roster, joiner)
                if stage is None:
                    roster.homeless += 1
                else:
                    arrives_s = roster.enter(joiner, stage, now, at_once=first)
                    if arrives_s > now:
                        at(arrives_s, _ARRIVE, life.peer)
            elif kind == _ABLE:
                able.add(speeds[life.peer])
                has_been_able.add(life.peer)
            elif kind == _NOTICE:
                roster.give_notice(life.peer, life.leaves_s)
            else:
                outcome.leaves += 1
                speed = speeds.pop(life.peer)
                alive.remove(speed)
                if life.peer in has_been_able:
                    has_been_able.remove(life.peer)
                    able.remove(speed)
                gone = roster.remove(life.peer)
                if gone is not None and gone.stages and not life.notice_s:
                    own = roster.rate(gone, gone.stages[0])
                    lost, back = setbacks.died(roster, gone.stages[0], own, progress)
                    outcome.redone += lost
                    outcome.did(now, now, -back)
        if step.microbatches:
            fill_s = pipeline_fill_s(roster, step)
    pass_until(seconds)
    outcome.finish(seconds)
    return outcome


def with_overhead(rate: float, step: Step, fill_s: float) -> float:
    """Microbatches/s when every step also averages and fills its pipeline."""
    if not step.microbatches or rate <= 0:
        return rate
    return step.microbatches / (step.microbatches / rate + step.averaging_s + fill_s)


def pipeline_fill_s(roster: Roster, step: Step) -> float:
    """What a step takes beyond its flow: the first microbatch passes every stage once, by replicas
    of average speed, with two hops between stages; and the last ones do not come out even at the
    slowest stage, about one microbatch of an average replica."""
    stages = [s for s in range(len(roster.needs)) if roster.present[s] > 0]
    if len(stages) < len(roster.needs):
        return 0.0
    alone = sum(roster.serving[s] / roster.present[s] for s in stages)
    slowest = min(stages, key=roster.present.__getitem__)
    uneven = roster.serving[slowest] / roster.present[slowest]
    return alone + uneven + 2 * step.hop_s * (len(stages) - 1) - 1 / roster.throughput


class _Setbacks:
    """What deaths without notice cost the step they fall into.

    Stages compute again what they lost at the same time, so a step is as late as the latest.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.number = 0
        self.lost: dict[int, float] = {}  # of this step, by stage
        self.late_s = 0.0

    def died(self, roster: Roster, stage: int, own: float, progress: float) -> tuple[float, float]:
        """A replica that did `own` of its stage's rate has died, `progress` microbatches into the
        run: how many it had counted, and by how many the swarm is set back."""
        if not self.step.microbatches:
            return 0.0, 0.0
        number, in_step = divmod(progress, self.step.microbatches)
        if number != self.number:
            self.number, self.lost, self.late_s = int(number), {}, 0.0
        flow = roster.throughput
        rate = max(flow, roster.present[stage])  # those who hold it as a second stage help
        if rate <= 0:  # nobody is left: the stage begins the step anew
            self.lost[stage] = in_step
            return in_step, in_step
        lost = in_step * own / (rate + own)
        self.lost[stage] = self.lost.get(stage, 0.0) + lost
        if flow <= 0:
            return lost, 0.0
        left = self.step.microbatches - in_step
        late_s = (left + self.lost[stage]) / rate - left / flow
        more_s = max(0.0, late_s - self.late_s)
        self.late_s += more_s
        return lost, more_s * flow
