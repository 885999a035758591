"""From kill -9 of a replica to the next microbatch that its stage has acknowledged again.

Paced peers (`_paced_swarm`), so the recomputation is known: one forward and one backward. What is
timed is the first acknowledgement of a microbatch issued after the leader gave up the dead replica,
preferring those that it had held (replays), and includes the other stages and all waiting. Beside
it, the same kill in `torch.distributed.pipelining` over gloo: what the survivor does, and when; and
what it does when the other rank is frozen.

    python benchmarks/recovery.py [--kills 20]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _helpers import Helper, end_politely, print_results, result
from _paced_swarm import PacedSwarm, now, paced_swarm

PEERS = {0: 2, 1: 2}
TORCH_TIMEOUT_S = 20  # of its process group; torch's default is half an hour


def recovery_s(book: list[dict[str, Any]], replica: str, killed_at: float) -> dict[str, float]:
    """`{detected, recovered, replays}` from the leader's lines; `recovered` missing if not yet."""
    lines = [line for line in book if line["t"] >= killed_at]
    gone = next((n for n, line in enumerate(lines) if line.get("replica") == replica), None)
    if gone is None:
        return {}
    found = {"detected": lines[gone]["t"] - killed_at}
    step = lines[gone].get("step")
    earlier = {
        (line["step"], line["index"])
        for line in book
        if line["point"] == "issue" and line["t"] < lines[gone]["t"] and line["step"] == step
    }
    issued = [(line["step"], line["index"]) for line in lines[gone:] if line["point"] == "issue"]
    replayed = [each for each in issued if each in earlier]
    waited_for = set(replayed or issued)
    found["replays"] = float(len(set(replayed)))
    for line in lines[gone:]:
        if line["point"] == "acknowledged" and (line["step"], line["index"]) in waited_for:
            found["recovered"] = line["t"] - killed_at
            break
    return found


async def kill_and_time(
    swarm: PacedSwarm, draw: random.Random, compute_s: float
) -> dict[str, float]:
    await swarm.until_serving(PEERS)
    step = swarm.step
    await swarm.until(lambda: swarm.step > step, "the next step")
    await asyncio.sleep(draw.uniform(0.0, 2.0))  # somewhere within a step
    serving = swarm.incarnations()
    name = draw.choice(sorted(serving))
    replica, stage = serving[name], swarm.processes[name].stage
    killed_at = now()
    swarm.kill_peer(name)
    facts: dict[str, float] = {}

    def recovered() -> bool:
        facts.update(recovery_s(swarm.book(), replica, killed_at))
        return "recovered" in facts

    await swarm.until(recovered, f"{name} to be made up for")
    facts["beyond"] = facts["recovered"] - compute_s
    facts["stage"] = float(stage or 0)
    await asyncio.sleep(0.5)  # replays go on being counted
    facts["replays"] = recovery_s(swarm.book(), replica, killed_at)["replays"]
    await swarm.add_peer(stage)
    return facts


async def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    draw = random.Random(options.seed)
    found = []
    with paced_swarm(
        peers=PEERS,
        microbatches=options.microbatches,
        forward_s=options.forward_s,
        backward_s=options.backward_s,
    ) as swarm:
        try:
            await swarm.start()
            await swarm.until(lambda: swarm.step >= 1, "the first step")
            for number in range(options.kills):
                facts = await kill_and_time(swarm, draw, options.forward_s + options.backward_s)
                found.append(facts)
                print(
                    f"kill {number + 1:2}, stage {facts['stage']:.0f}: given up after "
                    f"{facts['detected']:.3f} s, acknowledged after {facts['recovered']:.3f} s "
                    f"({facts['replays']:.0f} replays)",
                    flush=True,
                )
        finally:
            await swarm.stop()
    return found


def strike_torch(number: int, limit_s: float) -> tuple[str, float]:
    """What rank 0 of a torch pipeline does when rank 1 gets this signal within a step."""
    with tempfile.TemporaryDirectory() as name:
        ranks: list[Helper] = []
        try:
            for rank in (0, 1):
                where = ("--rank", str(rank), "--store", str(Path(name) / "s"))
                options = ("--microbatches", "8", "--timeout-s", str(TORCH_TIMEOUT_S))
                ranks.append(Helper("_torch_pipelining.py", *where, *options))
            for _ in range(2):  # one to warm up, one to know how long a step takes
                for each in ranks:
                    each.tell(step=True)
                step_s = max([each.hear()["seconds"] for each in ranks])
            for each in ranks:
                each.tell(step=True)
            time.sleep(step_s / 3)
            ranks[1].process.send_signal(number)
            struck_at = time.monotonic()
            said: list[str] = []

            def listen() -> None:
                try:
                    ranks[0].hear()
                    said.append("went on")
                except (RuntimeError, ValueError) as error:
                    lines = [line for line in str(error).splitlines() if "rror" in line]
                    said.append(f"ended: {lines[-1][-160:] if lines else 'without a word'}")

            listener = threading.Thread(target=listen, daemon=True)
            listener.start()
            listener.join(limit_s)
            seconds = time.monotonic() - struck_at
            return (said[0] if said else f"hung for the {limit_s:.0f} s it was watched"), seconds
        finally:
            for each in ranks:
                each.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=32, help="per step")
    parser.add_argument("--forward-s", type=float, default=0.02)
    parser.add_argument("--backward-s", type=float, default=0.04)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torch-limit-s", type=float, default=40.0, help="0 leaves torch out")
    options = parser.parse_args()
    end_politely()
    found = asyncio.run(measure(options))
    beyond = [each["beyond"] for each in found]
    detected = [each["detected"] for each in found]
    results = [
        result("recovery beyond recomputation, median", statistics.median(beyond), "s", 1.0,
               at_most=True),
        result("recovery beyond recomputation, longest", max(beyond), "s"),
        result("kill to given up, median", statistics.median(detected), "s"),
        result("replayed microbatches per kill, mean",
               statistics.mean(each["replays"] for each in found), "microbatches"),
    ]  # fmt: skip
    print()
    for each in results:
        print(f"{each['metric']:42}{each['value']:10.3f} {each['unit']}")
    if options.torch_limit_s > 0:
        for name, number in (("kill -9", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
            what, seconds = strike_torch(number, options.torch_limit_s)
            print(
                f"torch.distributed.pipelining, {name} of rank 1: rank 0 {what} ({seconds:.1f} s)"
            )
            metric = f"torch pipelining, {name} of rank 1: rank 0 noticed or was given up after"
            results.append(result(metric, seconds, "s"))
    print_results("recovery", results)


if __name__ == "__main__":
    main()
