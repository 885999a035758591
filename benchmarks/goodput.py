"""Speed under churn against the capacity that is alive at each moment, and what each fault costs.

Paced peers (`_paced_swarm`): every peer stands for a machine of its own, so a death takes exactly
its own rate away. The capacity at a moment is that of the weakest stage: its serving peers' rates
summed. A peer counts as alive from the moment it first serves until it is killed, frozen or has
left; a frozen one again once thawed, since it then could work: its way back is the protocol's cost.
Goodput is committed microbatches over the integral of the capacity, from commit to commit.

Per fault: *detection*, until the leader gives the replica up; *replay*, device time of its stage
spent on what was issued again, over the peers it had left; *averaging retry*, from the first failed
round to that step's commit. What a window lacks beyond these is the pipeline's filling and
draining and the rounds, which a run without faults pays too (the calm window).

    python benchmarks/goodput.py [--faults 6] [--every-s 30] [--kinds kill,leave,kill,freeze]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from _helpers import end_politely, print_results, result
from _paced_swarm import POLL_S as TICK_S
from _paced_swarm import PacedSwarm, now, paced_swarm

FROZEN_S = 8.0  # beyond the silence limit
AWAY_S = 3.0  # from a death to the start of another peer
Change = tuple[float, int, int]  # when, stage, one more or one less


@dataclass(slots=True)
class Struck:
    at: float
    kind: str
    name: str
    replica: str
    stage: int


@dataclass(slots=True)
class Seen:
    changes: list[Change] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    calm: tuple[float, float] = (0.0, 0.0)
    churn: tuple[float, float] = (0.0, 0.0)
    book: list[dict[str, Any]] = field(default_factory=list)


def capacity(
    changes: Sequence[Change], stages: int, rate: float, since: float, until: float
) -> float:
    """Microbatches that those alive could have trained in a time."""
    alive = [0] * stages
    total, at = 0.0, since
    for when, stage, change in [*sorted(changes), (until, 0, 0)]:
        moment = min(max(when, since), until)
        total += min(alive) * rate * (moment - at)
        at = moment
        alive[stage] += change
    return total


def goodput(
    seen: Seen, stages: int, rate: float, microbatches: int, window: tuple[float, float]
) -> tuple[float, float]:
    """Share of the capacity, and microbatches a second, between a window's outer commits."""
    commits = [line["t"] for line in seen.book if line["point"] == "record"]
    inside = [at for at in commits if window[0] <= at <= window[1]]
    if len(inside) < 2:
        return 0.0, 0.0
    done = microbatches * (len(inside) - 1)
    could = capacity(seen.changes, stages, rate, inside[0], inside[-1])
    if done > 1.05 * could:
        raise RuntimeError(f"{done} microbatches with a capacity of {could:.0f}: miscounted")
    return done / could, done / (inside[-1] - inside[0])


def cost(
    fault: Struck, seen: Seen, seconds: float, until: float, alive_after: int
) -> dict[str, float]:
    """`{detection, replays, replay, averaging}` of one fault, in seconds but for the count."""
    lines = [line for line in seen.book if fault.at <= line["t"] < until]
    gone = next((line for line in lines if line.get("replica") == fault.replica
                 and line["point"] in ("expelled", "left")), None)  # fmt: skip
    found = {"detection": 0.0, "replays": 0.0, "replay": 0.0, "averaging": 0.0}
    if gone is None:
        return found
    found["detection"] = gone["t"] - fault.at if fault.kind != "leave" else 0.0
    before = {
        (line["step"], line["index"])
        for line in seen.book
        if line["point"] == "issue" and line["t"] < gone["t"]
    }
    again = {
        (line["step"], line["index"])
        for line in lines
        if line["point"] == "issue" and line["t"] >= gone["t"]
    } & before
    found["replays"] = float(len(again))
    found["replay"] = len(again) * seconds / max(alive_after, 1)
    failed = next((line["t"] for line in lines if line["point"] == "round_failed"), None)
    if failed is not None:
        committed = [
            line["t"] for line in lines if line["point"] == "record" and line["t"] > failed
        ]
        found["averaging"] = (committed[0] if committed else until) - failed
    return found


class Churn:
    """Strikes one replica after another, and notes who is alive."""

    def __init__(self, swarm: PacedSwarm, peers: Mapping[int, int], options: Any) -> None:
        self.swarm, self.peers, self.options = swarm, peers, options
        self.seen = Seen()
        self._draw = random.Random(options.seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._alive: set[str] = set()
        self._met: set[str] = set()

    async def run(self) -> Seen:
        swarm, seen, options = self.swarm, self.seen, self.options
        await swarm.start()
        watching = asyncio.create_task(self._watch())
        try:
            await swarm.until_serving(self.peers)
            await swarm.until(lambda: swarm.step >= 2, "two steps")
            seen.calm = (now(), now() + options.calm_s)
            await asyncio.sleep(options.calm_s)
            began = now()
            kinds = itertools.cycle(options.kinds.split(","))
            for number, kind in zip(range(options.faults), kinds, strict=False):
                at = began + (number + self._draw.uniform(0.05, 0.25)) * options.every_s
                await asyncio.sleep(max(0.0, at - now()))
                await swarm.until_serving(self.peers)
                self._strike(kind)
            await asyncio.sleep(max(0.0, began + options.faults * options.every_s - now()))
            seen.churn = (began, now())
            await asyncio.gather(*self._tasks)
            seen.book = swarm.book()
            return seen
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _strike(self, kind: str) -> None:
        swarm = self.swarm
        serving = swarm.incarnations()
        name = self._draw.choice(sorted(serving))
        process = swarm.processes[name]
        stage = process.stage or 0
        self.seen.struck.append(Struck(now(), kind, name, serving[name], stage))
        if kind == "freeze":
            self._note(name, -1)
            swarm.freeze(name)
            self._tasks.append(asyncio.create_task(self._thaw(name)))
            return
        if kind == "kill":
            self._note(name, -1)
            swarm.kill_peer(name)
        else:
            swarm.stop_peer(name)
        self._tasks.append(asyncio.create_task(self._replace(name, stage)))

    async def _watch(self) -> None:
        while True:
            self._note_joiners()
            await asyncio.sleep(TICK_S)

    async def _thaw(self, name: str) -> None:
        await asyncio.sleep(FROZEN_S)
        self.swarm.thaw(name)
        self._note(name, 1)

    async def _replace(self, name: str, stage: int) -> None:
        await self.swarm.ended(name)
        self._note(name, -1)
        await asyncio.sleep(AWAY_S)
        await self.swarm.add_peer(stage)

    def _note(self, name: str, change: int, at: float = 0.0) -> None:
        """Somebody is there from now on, or is not."""
        if (name in self._alive) == (change > 0):
            return
        (self._alive.add if change > 0 else self._alive.remove)(name)
        self.seen.changes.append((at or now(), self.swarm.processes[name].stage or 0, change))

    def _note_joiners(self) -> None:
        for name, at in self.swarm.served_at.items():
            if name not in self._met:
                self._met.add(name)
                self._note(name, 1, at)


async def measure(options: argparse.Namespace, peers: Mapping[int, int]) -> Seen:
    with paced_swarm(
        peers=peers,
        microbatches=options.microbatches,
        forward_s=options.forward_s,
        backward_s=options.backward_s,
    ) as swarm:
        try:
            return await Churn(swarm, peers, options).run()
        finally:
            await swarm.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--every-s", type=float, default=30.0)
    parser.add_argument("--kinds", default="kill,leave,kill,freeze", help="in turn")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=48, help="per step")
    parser.add_argument("--forward-s", type=float, default=0.03)
    parser.add_argument("--backward-s", type=float, default=0.06)
    parser.add_argument("--calm-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end_politely()
    peers = dict.fromkeys(range(options.stages), options.replicas)
    seen = asyncio.run(measure(options, peers))
    seconds = options.forward_s + options.backward_s
    facts = (options.stages, 1 / seconds, options.microbatches)
    calm, calm_rate = goodput(seen, *facts, seen.calm)
    churn, churn_rate = goodput(seen, *facts, seen.churn)
    results = [
        result("goodput with a fault every 30 s" if options.every_s == 30.0 else "goodput",
               churn, "of the capacity alive", 0.9),
        result("the same without faults", calm, "of the capacity alive"),
    ]  # fmt: skip
    print(f"without faults {calm:.3f} of the capacity ({calm_rate:.1f} microbatches/s)")
    print(f"with faults    {churn:.3f} of the capacity ({churn_rate:.1f} microbatches/s)")
    print(f"{'fault':8}{'peer':6}{'detection':>11}{'replays':>9}{'replay':>9}{'averaging':>11}")
    ends = [*(fault.at for fault in seen.struck[1:]), seen.churn[1]]
    for fault, until in zip(seen.struck, ends, strict=True):
        left = peers[fault.stage] - 1
        costs = cost(fault, seen, seconds, until, left)
        print(
            f"{fault.kind:8}{fault.name:6}{costs['detection']:9.2f} s{costs['replays']:9.0f}"
            f"{costs['replay']:7.2f} s{costs['averaging']:9.2f} s"
        )
        number = len(results) - 1
        what = f"fault {number // 3 + 1}, {fault.kind}"
        parts = ("detection", "replay", "averaging")
        results += [result(f"{what}: {part}", costs[part], "s") for part in parts]
    print_results("goodput", results)


if __name__ == "__main__":
    main()
