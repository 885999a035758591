"""A swarm that arranges itself: six peers that choose their stages, against the best assignment.

Paced peers (`_paced_swarm`): each stands for a machine of its own; stages cost 1, 2 and 3. All but
the devices is real: processes, streams, downloads, moves. Four questions, each against the same
swarm with its peers pinned to the best assignment of those alive, measured in the same run:

(a) six peers, all `--stage auto`: the speed they settle at;
(b) two peers of the dearest stage are killed: the speed the other four settle at;
(c) one of several peers of a stage becomes five times slower: of how many microbatches of its stage
    the last is issued before its share has fallen to what it is due;
(d) the only peer of the cheapest stage becomes five times slower, so that moves pay: the speed they
    settle at, and how soon the first is ordered.

    python benchmarks/live.py [--microbatches 48] [--steps 4]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from _helpers import print_results, result
from _paced_swarm import SPEED, PacedSwarm, now, paced_swarm

from swarm.events import tail_events
from swarm.net.links import peer_of

COSTS = (1.0, 2.0, 3.0)
THROTTLE = 5.0
NAMES = {"six": "six peers", "four": "four peers", "helped": "six, one of them 5x slower"}
WINDOW = 10  # microbatches in which a share is counted
SETTLE_S = 90.0  # of a step or a move; twice that to settle


def best(count: int) -> tuple[int, ...]:
    """Replicas per stage of the fastest assignment of equal peers."""
    return max(
        (each for each in itertools.product(range(1, count), repeat=len(COSTS))
         if sum(each) == count),
        key=lambda each: min(n / cost for n, cost in zip(each, COSTS, strict=True)),
    )  # fmt: skip


def placed(swarm: PacedSwarm) -> tuple[int, ...]:
    """Replicas that serve, per stage."""
    rows = swarm.status().get("replicas", [])
    there = Counter(row["stage"] for row in rows if row["standing"] == "serving")
    return tuple(there[stage] for stage in range(len(COSTS)))


async def speed(swarm: PacedSwarm, steps: int, microbatches: int) -> float:
    """Microbatches/s over whole steps, from now on."""
    first = swarm.step + 1
    await swarm.until(lambda: swarm.step >= first + steps, f"{steps} steps", 300.0)
    at = [line["t"] for line in swarm.book() if line["point"] == "record"]
    return steps * microbatches / (at[first + steps - 1] - at[first - 1])


async def pinned(
    options: argparse.Namespace, counts: Sequence[int], slow: int | None = None
) -> float:
    """The speed of an assignment that nobody leaves; with a slow peer in stage `slow`."""
    peers = [(stage, None) for stage, count in enumerate(counts) for _ in range(count)]
    with swarm_of(options, peers) as swarm:
        try:
            await swarm.start()
            await swarm.until(lambda: placed(swarm) == tuple(counts), "all to serve")
            if slow is not None:
                slow_down(swarm, names_in(swarm, slow)[0])
                await pass_steps(swarm, 2)
            return await speed(swarm, options.steps, options.microbatches)
        finally:
            await swarm.stop()


def swarm_of(options: argparse.Namespace, peers: Sequence[tuple[int | None, int | None]]) -> Any:
    return paced_swarm(
        peers=peers,
        microbatches=options.microbatches,
        forward_s=options.forward_s,
        backward_s=2 * options.forward_s,
        costs=COSTS,
    )


async def alone(options: argparse.Namespace) -> dict[str, Any]:
    """Six peers that find their own places; what they reach, before and after two are killed."""
    found: dict[str, Any] = {}
    with swarm_of(options, [(None, None)] * 6) as swarm:
        try:
            await swarm.start()
            await settle(swarm, 6)
            found["six"] = await speed(swarm, options.steps, options.microbatches)
            found["shift"] = await throttle(swarm)
            for name in names_in(swarm, len(COSTS) - 1)[:2]:
                swarm.kill_peer(name)
            await settle(swarm, 4)
            found["four"] = await speed(swarm, options.steps, options.microbatches)
            found["moves"] = swarm.status()["placement"]["moves"]
            return found
        finally:
            await swarm.stop()


def names_in(swarm: PacedSwarm, stage: int) -> list[str]:
    """Processes that serve a stage."""
    there = {row["replica"] for row in swarm.status()["replicas"] if row["stage"] == stage}
    return [name for name, incarnation in swarm.incarnations().items() if incarnation in there]


async def helped(options: argparse.Namespace) -> dict[str, Any]:
    """Six peers that find their own places, and the only one of the first stage becomes slow: how
    soon somebody is told to move, and the speed once all who move because of it have moved."""
    with swarm_of(options, [(None, None)] * 6) as swarm:
        try:
            await swarm.start()
            await settle(swarm, 6)
            await swarm.until(lambda: under_way(swarm) >= 10, "a step to be under way")
            began = now()
            slow = names_in(swarm, 0)[0]
            slow_down(swarm, slow)
            await swarm.until(lambda: told(swarm, began), "a move", SETTLE_S)
            first_s = told(swarm, began)[0]["t"] - began
            await settle(swarm, 6)
            stages = [stage for stage in range(len(COSTS)) if slow in names_in(swarm, stage)]
            return {
                "first move": first_s,
                "slow one in": stages,
                "helped": await speed(swarm, options.steps, options.microbatches),
            }
        finally:
            await swarm.stop()


def told(swarm: PacedSwarm, since: float) -> list[dict[str, Any]]:
    """The moves that the leader has ordered."""
    events = tail_events(swarm.run_dir / "events.jsonl", since)
    return [event for event in events if event["event"] == "move"]


async def settle(swarm: PacedSwarm, count: int) -> None:
    """Until so many peers serve, and three steps have passed with nobody under way or told to
    move."""
    quiet = 0
    async with asyncio.timeout(2 * SETTLE_S):
        while quiet < 3:
            at = now()
            await pass_steps(swarm, 1)
            rows = swarm.status()["replicas"]
            peers = {peer_of(row["replica"]) for row in rows if row["standing"] == "serving"}
            still = len(peers) == count and all(row["standing"] == "serving" for row in rows)
            quiet = quiet + 1 if still and not told(swarm, at) else 0


async def pass_steps(swarm: PacedSwarm, count: int) -> None:
    goal = swarm.step + count
    await swarm.until(lambda: swarm.step >= goal, f"{count} more steps", SETTLE_S)


def slow_down(swarm: PacedSwarm, name: str) -> None:
    """From now on its device takes `THROTTLE` times as long."""
    (swarm.processes[name].data_dir / SPEED).write_text(str(THROTTLE))


async def throttle(swarm: PacedSwarm) -> float:
    """Slow one peer of the dearest stage down for three steps; how soon its load has shifted."""
    stage = len(COSTS) - 1
    name = names_in(swarm, stage)[0]
    replica = swarm.incarnations()[name]
    count = placed(swarm)[stage]
    due = (1 / THROTTLE) / (count - 1 + 1 / THROTTLE)
    await swarm.until(lambda: under_way(swarm) >= 10, "a step to be under way")
    before = len(issues(swarm))
    slow_down(swarm, name)
    await pass_steps(swarm, 3)
    (swarm.processes[name].data_dir / SPEED).unlink()
    mine = [issue["route"][stage] == replica for issue in issues(swarm)[before:]]
    for start in range(len(mine) - WINDOW):
        if sum(mine[start : start + WINDOW]) <= due * WINDOW + 1:
            return float(start)
    return float(len(mine))


def issues(swarm: PacedSwarm) -> list[dict[str, Any]]:
    return [line for line in swarm.book() if line["point"] == "issue"]


def under_way(swarm: PacedSwarm) -> int:
    return int(swarm.status().get("microbatches", {}).get("done", 0))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    found = await alone(options)
    for move in found["moves"]:
        print(f"{move['what']:13} {move['from']} -> {move['to']}  {move['reason']}", flush=True)
    dearest = len(COSTS) - 1  # a slow peer is worth most where there are most others
    return {**found, **await helped(options),
            "best six": await pinned(options, best(6)),
            "best four": await pinned(options, best(4)),
            "best helped": await pinned(options, best(6), slow=dearest)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=48, help="per step")
    parser.add_argument("--steps", type=int, default=4, help="measured each time")
    parser.add_argument("--forward-s", type=float, default=0.02)
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    for name in ("six", "four", "helped"):
        print(
            f"{NAMES[name]}: {found[name]:.2f} microbatches/s, pinned to the best assignment "
            f"{found[f'best {name}']:.2f}"
        )
    print(f"a peer 5x slower: its load had shifted after {found['shift']:.0f} microbatches")
    before = 1 / (THROTTLE * 3 * options.forward_s * COSTS[0])
    print(
        f"the only one of a stage 5x slower, at most {before:.2f} microbatches/s: first move after "
        f"{found['first move']:.1f} s, and it ends in stage {found['slow one in']}"
    )
    print_results(
        "live",
        [
            result("six auto peers, settled", found["six"] / found["best six"],
                   "of the best assignment", 0.95),
            result("two of a stage killed", found["four"] / found["best four"],
                   "of the survivors' best assignment", 0.9),
            result("load shifted from a peer 5x slower", found["shift"], "microbatches", 10,
                   at_most=True),
            result("the only peer of a stage 5x slower, after the moves",
                   found["helped"] / found["best helped"], "of the best assignment", 0.9),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
