"""A random swarm with random faults, as data: drawn from a seed, run, printed, and read again.

`draw(seed)` decides shape, speeds and faults; `Scenario.run` decides every ordering by the seed
within it and asserts everything that is promised. What is printed when one fails is the scenario
itself, which runs the same wherever it is read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peer.snapshots import CHUNK
from tests.protocol.faults import ACTIONS, LEADER, MOVER, Fault
from tests.protocol.moving import MovingSwarm
from tests.protocol.simulated import Swarm
from tests.protocol.tiny import ALL, Place, TinyBatches, baseline, plan

TRAINERS = ("t0", "t1", "t2")
REPLICA_POINTS = (
    *("forward", "sent", "backward", "counted"),
    *("average", "prepared", "commit", "committed"),
)
LEADER_POINTS = ("issue", "acknowledged", "failed", "expelled", "admitted", "record")
MOVING_POINTS = ("move", "moved", "joined", "leaving", "admitted", "second")
LIMIT_S = 1500.0  # of virtual time
HEARTBEAT_S = 2.0  # as rarely as the silence allowed permits: half of all frames would be pings
DISK_S = 0.002
DELAYED_FROM = 1_000_000  # seeds from here on draw swarms that train with the delayed policy
MOVING_FROM = 2_000_000  # and from here on those whose peers move, some with several stages
MAX_DRAWS = 8


class NothingHappenedError(AssertionError):
    """None of the scenario's faults has struck: it shows nothing."""


@dataclass(frozen=True)
class Scenario:
    """`replicas` per stage; `slow` gives replicas that are slower, by a factor.

    With `costs`, of a microbatch in each stage, peers are processes that move where they are needed
    (`tests.protocol.moving`); `then` are the costs after the first commit. Who is `pinned` stays;
    who is of `both` serves the next stage as well, and stays. `second_share` as of a `MovePolicy`.
    """

    seed: int = 0
    replicas: tuple[int, ...] = (2, 2)
    trainers: int = 1
    microbatches: int = 4
    steps: int = 3
    slots: int | None = None
    kept_bytes: int = 1 << 30
    latency_s: float = 0.001
    seconds: tuple[float, float] = (0.010, 0.020)
    slow: tuple[tuple[str, float], ...] = ()
    leases: tuple[float, ...] = ()
    poisoned: tuple[Place, ...] = ()
    checkpoints: int = 0  # one every so many steps; 0: none
    chunk: int = CHUNK  # elements of a state that a donor gives at once
    faults: tuple[Fault, ...] = ()
    policy: str = "exact"
    ahead: int = ALL  # with the delayed policy
    since: int = 0  # the first step of which any are ahead
    twins_bps: float = 0.0  # of the links between replicas of a stage, if not as all
    costs: tuple[float, ...] = ()
    then: tuple[float, ...] = ()
    pinned: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    second_share: float = 0.0

    @property
    def trainer_ids(self) -> tuple[str, ...]:
        return (LEADER,) if self.trainers == 1 else TRAINERS[: self.trainers]

    @property
    def names(self) -> list[str]:
        return [f"r{stage}.{i}" for stage, n in enumerate(self.replicas) for i in range(n)]

    def swarm(self) -> Swarm:
        kind: Callable[..., Swarm] = Swarm
        if self.costs:
            kind = functools.partial(
                MovingSwarm,
                costs=self.costs,
                then=self.then,
                pinned=self.pinned,
                both=self.both,
                second_share=self.second_share,
            )
        swarm = kind(
            num_stages=len(self.replicas),
            replicas=self.replicas,
            seed=self.seed,
            plan=plan(self.microbatches, self.steps),
            faults=list(self.faults),
            seconds=self.seconds,
            heartbeat_s=HEARTBEAT_S,
            disk_s=DISK_S,
            slots=self.slots,
            kept_bytes=self.kept_bytes,
            speed=dict(self.slow),
            latency_s=self.latency_s,
            checkpoint_every=self.checkpoints,
            policy=self.policy,
            ahead=self.ahead,
            since=self.since,
            batches=TinyBatches(poisoned=self.poisoned),
            trainer_ids=self.trainer_ids,
            leases=dict(zip(self.trainer_ids, self.leases, strict=False)),
            chunk=self.chunk,
        )
        if self.twins_bps:
            swarm.thin_between_twins(self.twins_bps)
        return swarm

    def run(self, swarm: Swarm | None = None) -> Swarm:
        """Raises AssertionError, TimeoutError, DeadlockError or whatever else went wrong."""
        swarm = swarm or self.swarm()
        expected, _ = baseline(
            self.steps, self.microbatches, self.poisoned, self.policy, self.ahead, self.since
        )
        result = swarm.run(self.steps, limit_s=LIMIT_S)
        assert result["sha256"] == expected, "other parameters than the baseline"
        if not swarm.fired:
            raise NothingHappenedError("no fault has struck")
        return swarm

    # ---- as text --------------------------------------------------------------------------------

    def __str__(self) -> str:
        """One line of JSON; what is as by default is left out."""
        return json.dumps(_plain(self))

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """What `str` gave. Raises ValueError."""
        try:
            fields: dict[str, Any] = {k: _tuples(v) for k, v in json.loads(text).items()}
            faults = tuple(Fault(**dict(each)) for each in json.loads(text).get("faults", ()))
            faults = tuple(dataclasses.replace(f, side=tuple(f.side)) for f in faults)
            scenario = cls(**{**fields, "faults": faults})
        except (TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"no scenario: {error}") from None
        for fault in faults:
            if fault.action not in ACTIONS:
                raise ValueError(f"no action {fault.action!r}")
        return scenario


def _plain(value: Any) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    plain: dict[str, Any] = {}
    for each in dataclasses.fields(value):
        mine = getattr(value, each.name)
        if mine != each.default or each.name == "seed":
            is_faults = each.name == "faults"
            plain[each.name] = [_plain(fault) for fault in mine] if is_faults else mine
    return plain


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


# ---- drawing -------------------------------------------------------------------------------------

# How often each comes, of 30.
OF_REPLICAS = "kill 6 freeze 2 start 2 leave 3 raise 2 nan 1 cut 2 cut_leader 1 deaf 1 reset 1"
OF_REPLICAS += " lose 3 late 2 sever 2 corrupt 2"
OF_TRAINERS = "kill 6 freeze 4 disk_full 3 deaf 4 partition 5 lose 3 late 1 sever 3 corrupt 1"
OF_ONE_TRAINER = "kill 10 freeze 6 disk_full 3 lose 3 late 2 sever 3 corrupt 3"


def _weights(text: str) -> dict[str, int]:
    words = text.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def draw(seed: int, number: int = 0) -> Scenario:
    """The scenario of a seed. `number` > 0: another one, for a seed whose faults did not fire."""
    r = random.Random(f"{seed}/{number}")
    if seed >= MOVING_FROM:
        return _draw_moving(r, seed)
    several, saved = r.random() < 0.5, r.random() < 0.12
    counts = (1, 1, 2) if saved else (1, 2, 2, 2, 3, 4)
    replicas = tuple(r.choice(counts) for _ in range(r.choice((1, 2, 2, 3, 3, 4, 5))))
    scenario = Scenario(
        seed=seed,
        replicas=replicas,
        trainers=3 if several else 1,
        microbatches=r.choice((2, 4, 6)),
        steps=r.choice((2, 3, 3)) + (r.choice((1, 2)) if saved else 0),
        checkpoints=r.choice((1, 2)) if saved else 0,
        slots=r.choice((None, None, 1, 2)),
        kept_bytes=r.choice((1 << 30, 1 << 30, 1 << 30, 400)),
        latency_s=r.choice((0.0005, 0.002, 0.02)),
        seconds=r.choice(((0.01, 0.02), (0.01, 0.02), (0.05, 0.1), (0.2, 0.4))),
        leases=tuple(r.choice((0.5, 1.0, 5.0)) for _ in TRAINERS) if several else (),
        # A stage has some 200 elements: with latency, a download of many steps.
        chunk=random.Random(f"{seed}/{number}/chunk").choice((CHUNK, CHUNK, 32, 8)),
    )
    names = scenario.names
    slow = tuple((name, r.choice((3.0, 10.0))) for name in names if r.random() < 0.25)
    poisoned = ((r.randrange(scenario.steps), 0),) if r.random() < 0.1 else ()
    faults: list[Fault] = []
    for _ in range(r.randint(1, 5)):
        of_trainers = r.random() < (0.5 if several else 0.2)
        fault = _fault(r, scenario, names, len(faults), of_trainers=of_trainers)
        # Twice, it may be all of a stage at one microbatch; then it is the step's outcome.
        if fault.action != "nan" or all(each.action != "nan" for each in faults):
            faults.append(fault)
    scenario = dataclasses.replace(scenario, slow=slow, poisoned=poisoned, faults=tuple(faults))
    if seed >= DELAYED_FROM:  # a step more: at the run's end there is none to work ahead
        scenario = dataclasses.replace(scenario, policy="delayed", steps=scenario.steps + 1)
        twins_bps = r.choice((0.0, 20_000.0, 60_000.0, 200_000.0))  # so that averaging takes time
        ahead = random.Random(f"{seed}/{number}/ahead").choice((ALL, ALL, 1, 2))
        since = _since(seed, number)
        return dataclasses.replace(scenario, twins_bps=twins_bps, ahead=ahead, since=since)
    return scenario


def _since(seed: int, number: int = 0) -> int:
    return random.Random(f"{seed}/{number}/since").choice((0, 0, 1, 2))


def _draw_moving(r: random.Random, seed: int) -> Scenario:
    """Stages of unlike cost, so that some have too many peers; then others are dear."""
    several, saved, delayed = r.random() < 0.5, r.random() < 0.2, r.random() < 0.3
    replicas = tuple(r.choice((1, 1, 1, 2, 2, 3)) for _ in range(r.choice((2, 2, 2, 3, 3, 4))))
    if sum(replicas) < len(replicas) + 1:
        replicas = (2, *replicas[1:])
    costs = tuple(r.choice((1.0, 1.0, 2.0, 5.0)) for _ in replicas)
    scenario = Scenario(
        seed=seed,
        replicas=replicas,
        trainers=3 if several else 1,
        microbatches=r.choice((2, 2, 4)),
        steps=r.choice((3, 4, 5)),
        checkpoints=r.choice((1, 2)) if saved else 0,
        slots=r.choice((None, None, 1, 2)),
        kept_bytes=r.choice((1 << 30, 1 << 30, 1 << 30, 400)),
        latency_s=r.choice((0.0005, 0.002, 0.02)),
        seconds=r.choice(((0.01, 0.02), (0.05, 0.1), (0.2, 0.4))),
        leases=tuple(r.choice((0.5, 1.0, 5.0)) for _ in TRAINERS) if several else (),
        chunk=r.choice((CHUNK, CHUNK, 32, 8)),
        policy="delayed" if delayed else "exact",
        since=_since(seed) if delayed else 0,
        costs=costs,
        then=tuple(r.sample(costs, len(costs))),
        second_share=r.choice((0.0, 0.0, 0.5, 1.0)),
    )
    names = scenario.names
    pinned = tuple(name for name in names if r.random() < 0.1)
    both = tuple(name for name in names if r.random() < 0.1)
    slow = tuple((name, r.choice((3.0, 10.0))) for name in names if r.random() < 0.2)
    faults: list[Fault] = []
    for _ in range(r.randint(1, 5)):
        of_trainers = r.random() < (0.4 if several else 0.2)
        fault = _fault(r, scenario, names, len(faults), of_trainers=of_trainers)
        if r.random() < 0.4:  # it strikes when somebody moves, often whoever does
            fault = _of_moves(r, fault)
        if fault.action != "nan" or all(each.action != "nan" for each in faults):
            faults.append(fault)
    return dataclasses.replace(scenario, pinned=pinned, both=both, slow=slow, faults=tuple(faults))


def _of_moves(r: random.Random, fault: Fault) -> Fault:
    victim, other = fault.victim, fault.other
    if fault.action not in ("start", "disk_full") and (victim is None or r.random() < 0.6):
        victim, other = MOVER, None if other is None else LEADER
    return dataclasses.replace(
        fault,
        point=r.choice(MOVING_POINTS),
        replica=None,
        step=None,
        at_s=None,
        victim=victim,
        other=other,
    )


def _fault(
    r: random.Random, scenario: Scenario, names: list[str], number: int, *, of_trainers: bool
) -> Fault:
    several = scenario.trainers > 1
    text = OF_REPLICAS if not of_trainers else OF_TRAINERS if several else OF_ONE_TRAINER
    weights = _weights(text)
    action = r.choices(list(weights), list(weights.values()))[0]
    more: dict[str, Any] = {}
    points = (*REPLICA_POINTS, *REPLICA_POINTS, *LEADER_POINTS)
    if action == "start":
        stage = r.randrange(len(scenario.replicas))
        more["victim"], more["stage"] = f"r{stage}.{5 + number}", r.choice((None, stage))
    elif of_trainers:
        more["victim"] = r.choice((LEADER, LEADER, *scenario.trainer_ids))
        points = (*LEADER_POINTS, "record", "record", "commit", "prepared", *REPLICA_POINTS)
    elif r.random() < 0.6:
        more["victim"] = r.choice(names)
    if action in ("cut", "deaf", "lose", "sever", "corrupt"):
        more["other"] = r.choice((None, LEADER, *([LEADER] if of_trainers else []), *names))
        if of_trainers and r.random() < 0.5:
            more["other"] = r.choice(scenario.trainer_ids)
        if more["other"] == more.get("victim"):
            more["other"] = None
    if action == "partition":
        everybody = [*scenario.trainer_ids, *names]
        more["side"] = tuple(sorted(r.sample(everybody, r.randint(1, len(everybody) - 1))))
        if r.random() < 0.5:  # the leader and a replica of every stage here, the others there
            some = [name for name in names if name.endswith(".0") and r.random() < 0.9]
            more["side"] = (LEADER, *some)
    if action == "nan":
        points = ("forward", "backward", "counted")
    if action == "raise":
        points = ("forward", "backward", "forward", "backward", "average", "commit")
    elif action in ("lose", "corrupt", "sever") and r.random() < 0.7:
        points = ("counted", "prepared", "committed", "average", "forward", "record", "issue")
    if action in ("late", "sever"):
        more["late_s"] = r.choice((0.05, 0.3, 1.5))
    if action in ("kill", "leave"):
        more["duration_s"] = r.choice((0.5 if scenario.checkpoints else 0.0, 0.5, 1.0, 6.0))
    elif action == "lose":
        more["duration_s"] = r.choice((0.05, 0.3, 1.0, 3.0))
    else:
        more["duration_s"] = r.choice((0.3, 1.0, 3.0, 3.0, 7.0, 7.0, 15.0))
    point = r.choice(points)
    if r.random() < (0.4 if of_trainers else 0.15):
        when = r.choice((r.uniform(0.1, 1.0), r.uniform(0.2, 3.0), r.uniform(0.2, 8.0)))
        return Fault("", action, at_s=round(when, 3), **more)
    replica = None
    if point in REPLICA_POINTS and not of_trainers and r.random() < 0.6:
        replica = more.get("victim") or r.choice(names)
        if action == "start" or r.random() < 0.2:
            replica = r.choice(names)
    if replica is None and more.get("victim") is None:
        more["victim"] = r.choice(names)
    step = r.choice((None, *range(scenario.steps)))
    return Fault(point, action, replica, step, count=r.randint(1, 3), **more)


def run_seed(seed: int) -> tuple[Scenario, Swarm]:
    """Run a seed to the end, drawing again until something has happened. Raises what went wrong,
    with the scenario noted on it."""
    for number in range(MAX_DRAWS):
        scenario = draw(seed, number)
        try:
            return scenario, scenario.run()
        except NothingHappenedError:
            continue
        except BaseException as error:
            error.add_note(f"seed {seed}: {scenario}")
            raise
    raise NothingHappenedError(f"seed {seed} injects nothing, whatever is drawn")


def faults_by_kind(swarm: Swarm) -> Counter[str]:
    """What has struck: each action, and whether a trainer or a replica was its victim."""
    return Counter(fault.action for fault in swarm.fired)
