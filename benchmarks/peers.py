"""What a peer costs: its start, its memory while idle, and the bytes that cross the swarm.

Start to first microbatch, from a cold `swarm-peer` and from the fork server of a local swarm: the
time from starting the process until the leader issues its first microbatch to it, in a swarm that
lacks nothing but this peer. Memory: of the other peer, which has joined, holds its stage and waits.

    python benchmarks/peers.py [--rounds 5] [--microbatches 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from _helpers import children_of, cpu_seconds, memory_mib, print_results, result, whole_number
from _pipeline_config import pipeline_config
from _watched_swarm import FREE_STEPS, SOCKETS, WatchedSwarm

from peer.launch import stamp
from swarm.net.identity import claim_identity_file

POLL_S = 0.02


async def until_ready(swarm: WatchedSwarm, stage: int) -> None:
    while True:
        if (await swarm.replicas()).get(stage, {}).get("standing") == "ready":
            return
        await asyncio.sleep(POLL_S)


async def first_microbatch(swarm: WatchedSwarm, stage: int) -> float:
    while True:
        at = (await swarm.replicas()).get(stage, {}).get("first_issue")
        if at is not None:
            return float(at)
        await asyncio.sleep(POLL_S)


def note_memory(found: dict[str, list[float]], how: str, pid: int) -> None:
    memory = memory_mib(pid)
    found[f"idle peer, {how}, RSS"].append(memory["rss"])
    found[f"idle peer, {how}, PSS"].append(memory["pss"])
    found["idle peer's p2pd, RSS"] += [memory_mib(child)["rss"] for child in children_of(pid)[:1]]


async def note_idle(found: dict[str, list[float]], swarm: WatchedSwarm, seconds: float) -> None:
    """CPU that the processes of a waiting swarm use."""
    pids = {}
    for name, process in swarm.processes.items():
        who = "idle leader" if name == "leader" else "idle peer"
        pids[f"{who}, CPU"] = process.pid
        pids[f"{who}'s p2pd, CPU"] = children_of(process.pid)[0]
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    began = time.monotonic()
    await asyncio.sleep(seconds)
    passed = time.monotonic() - began
    for name, pid in pids.items():
        found[name].append(1e3 * (cpu_seconds(pid) - before[name]) / passed)


class ColdPeer:
    """`swarm-peer` as a volunteer starts it."""

    def __init__(self, folder: Path, stage: int, link: str) -> None:
        command = [
            str(Path(sys.executable).with_name("swarm-peer")), f"--stage={stage}", "--join", link,
            "--device=cpu", "--threads=1", "--listen=/ip4/127.0.0.1/tcp/0",
            f"--data-dir={folder / f'cold{stage}'}",
        ]  # fmt: skip
        with (folder / f"cold{stage}.log").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


async def one_round(options: argparse.Namespace, cold: bool, found: dict[str, list[float]]) -> None:
    how = "cold" if cold else "forked"
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        folder = Path(name)
        os.environ[SOCKETS], os.environ[FREE_STEPS] = str(folder), "1"
        identity = claim_identity_file(folder / "identity.key")
        config = stamp(pipeline_config(options, "float32"), identity.peer_id)
        identity.release()
        swarm = WatchedSwarm(
            config, folder / "run", identity_path=folder / "identity.key", threads=1, device="cpu"
        )
        swarm._wanted = []  # the leader alone
        started: list[ColdPeer] = []

        async def start(stage: int) -> int:
            if cold:
                started.append(ColdPeer(folder, stage, swarm.link))
                return started[-1].process.pid
            return (await swarm.add_peer(stage)).pid

        try:
            async with asyncio.timeout(options.timeout_s):
                await swarm.start()
                other = await start(1)
                await until_ready(swarm, 1)
                await asyncio.sleep(1.0)
                note_memory(found, how, other)
                if not cold:
                    await note_idle(found, swarm, options.idle_s)
                began = time.perf_counter()
                await start(0)
                at = await first_microbatch(swarm, 0)
                found[f"start to first microbatch, {how}"].append(at - began)
                if not cold:
                    step = await swarm.step()
                    status: dict[str, Any] = json.loads((swarm.run_dir / "status.json").read_text())
                    found["bytes through the leader per token"].append(
                        step["bytes"] / step["tokens"]
                    )
                    for boundary in status["bytes"]["boundaries"]:
                        found["bytes per boundary per token, one way"].append(
                            boundary["wire_per_token"]
                        )
        finally:
            for each in started:
                each.close()
            await swarm.stop()


async def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for cold in (True, False):
            await one_round(options, cold, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=whole_number, default=5)
    parser.add_argument("--microbatches", type=int, default=4, help="per step")
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--wire", default="float32", help="codec of the activations")
    parser.add_argument("--idle-s", type=float, default=10.0, help="time to watch an idle swarm")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of a round")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    results = []
    for name, values in found.items():
        unit = "s" if name.startswith("start") else "B" if name.startswith("bytes") else "MiB"
        unit = "ms per s" if name.endswith("CPU") else unit
        results.append(result(name, statistics.median(values), unit))
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{name:42}{statistics.median(values):10.2f} {unit:8} ({spread}, {len(values)} x)")
    print(
        f"microbatches of {options.microbatch_size} x {options.sequence}, hidden 384, activations "
        f"as {options.wire}; a boundary is crossed both ways"
    )
    print_results("peers", results)


if __name__ == "__main__":
    main()
