"""The swarm's speed beside what else two cores could do: the same model, 64 microbatches a step.

Two stages of one thread, one replica each, real processes over libp2p, against
(a) one process with two threads, the plain torch loop,
(b) torch.distributed.pipelining, Schedule1F1B over gloo, two ranks of one thread, 16 microbatches,
(c) the slower stage's own rate while the other computes too, without a network, times B/(B+S-1).
Sides take turns within one run and sleep meanwhile; ratios are taken within a round, and their
medians reported, so what else the machine does hits both. Accumulators are float32 on every side;
what float64 costs is measured on the stages alone.

    python benchmarks/pipeline.py [--rounds 5] [--microbatches 64] [--wire float32]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from _helpers import Helper, children_of, cpu_seconds, print_results, result, whole_number
from _pipeline_config import STAGES, pipeline_config
from _watched_swarm import SOCKETS, WatchedSwarm

from peer.launch import stamp
from swarm.net.identity import claim_identity_file

TORCH_MICROBATCHES = 16


class Sides:
    """Everything that is compared, started once."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        sizes = [
            f"--microbatch-size={options.microbatch_size}",
            f"--sequence={options.sequence}",
        ]
        step = [f"--microbatches={options.microbatches}"]
        self.cpu: dict[str, list[float]] = defaultdict(list)  # seconds per microbatch
        self.seconds = options.stage_seconds
        self.one = Helper("_one_process.py", *sizes, *step, "--threads=2", threads=2)
        store = f"--store={folder / 'store'}"
        self.ranks = [
            Helper(
                "_torch_pipelining.py", *sizes, store, f"--rank={rank}",
                f"--microbatches={options.torch_microbatches}",
            )
            for rank in range(2)
        ]  # fmt: skip
        self.stages = [
            Helper("_stage_alone.py", *sizes, *step, f"--stage={stage}") for stage in range(STAGES)
        ]

    def one_process(self) -> float:
        return self._run("one process", [self.one])[0]["tokens_per_s"]

    def torch_pipelining(self) -> float:
        return min(answer["tokens_per_s"] for answer in self._run("torch 1F1B", self.ranks))

    def stages_alone(self, accumulate: str) -> list[float]:
        """Microbatches per second of each stage while the other computes too."""
        name = f"stages alone, {accumulate}"
        answers = self._run(name, self.stages, accumulate=accumulate, seconds=self.seconds)
        return [answer["per_s"] for answer in answers]

    def _run(self, name: str, helpers: list[Helper], **order: Any) -> list[dict[str, Any]]:
        for helper in helpers:
            helper.tell(**order)
        answers = [helper.hear() for helper in helpers]
        self.cpu[name].append(sum(answer["cpu_s"] for answer in answers))
        return answers

    def close(self) -> None:
        for helper in (self.one, *self.ranks, *self.stages):
            helper.close()


def breakdown(step: dict[str, Any], timeline: dict[str, Any]) -> dict[str, float]:
    """Seconds of one step at one stage, by what its compute thread did; they sum to the step."""
    spans, parts = timeline["spans"], timeline["parts"]
    busy = dict.fromkeys(("FORWARD", "BACKWARD", "UPDATE"), 0.0)
    for kind, start, end, _ in spans:
        busy[kind] = busy.get(kind, 0.0) + end - start
    work = [span for span in spans if span[0] in ("FORWARD", "BACKWARD")]
    fill = work[0][1] - step["start"]
    tail = step["end"] - work[-1][2] - busy["UPDATE"]
    codec = parts.get("encode", 0.0) + parts.get("decode", 0.0)
    accumulate = parts.get("accumulate", 0.0)
    total = step["end"] - step["start"]
    return {
        "forward": busy["FORWARD"],
        "backward": busy["BACKWARD"] - accumulate - codec,
        "accumulate": accumulate,
        "codec": codec,
        "waiting for input": total - fill - tail - sum(busy.values()),
        "until the first input": fill,
        "update": busy["UPDATE"],
        "the rest of the commit": tail,
        "compute thread's CPU": sum(span[3] for span in spans),
    }


class Swarm:
    """The swarm side, with the CPU time of all its processes."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        os.environ[SOCKETS] = str(folder)
        identity = claim_identity_file(folder / "identity.key")
        peer_id = identity.peer_id
        identity.release()
        config = stamp(pipeline_config(options, options.accumulate), peer_id)
        self.swarm = WatchedSwarm(
            config,
            folder / "run",
            identity_path=folder / "identity.key",
            threads=1,
            device="cpu",
        )

    def pids(self) -> dict[str, int]:
        found = {}
        for name, process in self.swarm.processes.items():
            found[name] = process.pid
            for number, child in enumerate(children_of(process.pid)):
                found[f"{name} p2pd" + (f" {number}" if number else "")] = child
        return found

    async def step(self) -> dict[str, Any]:
        pids = self.pids()
        cpu = {name: cpu_seconds(pid) for name, pid in pids.items()}
        step = await self.swarm.step()
        step["cpu"] = {name: cpu_seconds(pid) - cpu[name] for name, pid in pids.items()}
        timelines = [
            await self.swarm.timeline(stage, step["start"], step["end"]) for stage in range(STAGES)
        ]
        step["breakdown"] = [breakdown(step, timeline) for timeline in timelines]
        return step


async def measure(options: argparse.Namespace) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {
        name: [] for name in ("swarm", "one", "torch", "alone", "float64", "cpu")
    }
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        folder = Path(name)
        swarm = Swarm(options, folder)
        try:
            await swarm.swarm.start()
            sides = None if options.only_swarm else Sides(options, folder)
            try:
                await swarm.step()  # warm-up
                for number in range(options.rounds):
                    round_begun = time.monotonic()
                    step = await swarm.step()
                    found["swarm"].append(step)
                    said = f"round {number}: swarm {step['tokens'] / step['seconds']:.0f}"
                    if sides is not None:
                        for name, accumulate in (("alone", "float32"), ("float64", "float64")):
                            found[name].append(
                                await asyncio.to_thread(sides.stages_alone, accumulate)
                            )
                        found["one"].append(await asyncio.to_thread(sides.one_process))
                        found["torch"].append(await asyncio.to_thread(sides.torch_pipelining))
                        said += f", one process {found['one'][-1]:.0f}"
                        said += f", torch pipelining {found['torch'][-1]:.0f}"
                        said += ", stages alone " + " ".join(f"{r:.3f}" for r in found["alone"][-1])
                    print(said, flush=True)
                    now = time.monotonic()
                    if now - begun + (now - round_begun) > options.limit_s:
                        print(
                            f"stopped after {number + 1} rounds, to end in {options.limit_s:.0f} s"
                        )
                        break
            finally:
                if sides is not None:
                    sides.close()
                    found["cpu"] = [dict(sides.cpu)]
        finally:
            await swarm.swarm.stop()
    return found


def show_breakdown(steps: list[dict[str, Any]]) -> None:
    print(f"\nwhere a step goes, seconds (medians of {len(steps)} steps)")
    print(f"{'':28}" + "".join(f"{f'stage {k}':>10}" for k in range(STAGES)))
    for name in steps[0]["breakdown"][0]:
        values = [
            statistics.median(step["breakdown"][stage][name] for step in steps)
            for stage in range(STAGES)
        ]
        print(f"{name:28}" + "".join(f"{value:10.3f}" for value in values))
    whole = statistics.median(step["seconds"] for step in steps)
    print(f"{'whole step':28}{whole:10.3f}")
    print("CPU of each process, seconds per step")
    for name in steps[0]["cpu"]:
        value = statistics.median(step["cpu"].get(name, 0.0) for step in steps)
        print(f"  {name:26}{value:10.3f}")


def show_cpu(swarm: list[float], others: dict[str, list[float]]) -> None:
    """CPU time hardly depends on what else the machine does, so it explains a noisy run."""
    print("CPU seconds per microbatch, all processes of a side")
    for name, values in {"swarm": swarm, **others}.items():
        print(f"  {name:26}{statistics.median(values):10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=whole_number, default=5)
    parser.add_argument("--microbatches", type=int, default=64, help="per step of the swarm")
    parser.add_argument("--torch-microbatches", type=int, default=TORCH_MICROBATCHES)
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--wire", default="float32", help="codec of the activations")
    parser.add_argument("--accumulate", default="float32", help="of the swarm; others use float32")
    parser.add_argument("--stage-seconds", type=float, default=15.0)
    parser.add_argument(
        "--limit-s", type=float, default=1680.0, help="rounds beyond this are left out"
    )
    parser.add_argument("--only-swarm", action="store_true", help="only where its time goes")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    steps = found["swarm"]
    tokens_per_microbatch = options.microbatch_size * options.sequence
    swarm = [step["tokens"] / step["seconds"] for step in steps]
    cpu = [sum(step["cpu"].values()) / options.microbatches for step in steps]
    results = [result("swarm", statistics.median(swarm), "tokens/s")]
    if not options.only_swarm:
        fill = options.microbatches / (options.microbatches + STAGES - 1)
        bound = [min(rates) * tokens_per_microbatch * fill for rates in found["alone"]]
        cpu_of = {name: statistics.median(each) for name, each in found["cpu"][0].items()}
        float32_cpu = cpu_of["stages alone, float32"]

        def ratio(others: list[float]) -> float:
            return statistics.median(a / b for a, b in zip(swarm, others, strict=True))

        results += [
            result("one process, 2 threads", statistics.median(found["one"]), "tokens/s"),
            result("torch 1F1B over gloo", statistics.median(found["torch"]), "tokens/s"),
            result("slower stage alone x B/(B+S-1)", statistics.median(bound), "tokens/s"),
            result("swarm / one process", ratio(found["one"]), "x", 1.0),
            result("swarm / torch 1F1B", ratio(found["torch"]), "x", 1.4),
            result("swarm / slower stage's bound", ratio(bound), "x", 0.95),
            result(
                "CPU of the swarm / of its stages alone", statistics.median(cpu) / float32_cpu, "x"
            ),
            result(
                "CPU of the stages with float64 / float32 accumulators",
                cpu_of["stages alone, float64"] / float32_cpu,
                "x",
            ),
        ]
    show_breakdown(steps)
    show_cpu(cpu, found["cpu"][0] if found["cpu"] else {})
    print(
        f"\n{options.microbatches} microbatches of {options.microbatch_size} x {options.sequence} "
        f"a step (torch {options.torch_microbatches}); activations as {options.wire}; accumulate: "
        f"swarm {options.accumulate}, others float32; medians of {len(steps)} rounds"
    )
    for each in results:
        goal = "" if each["goal"] is None else f"  goal {each['goal']}"
        met = {None: "", True: "  met", False: "  MISSED"}[each["met"]]
        print(f"{each['metric']:54}{each['value']:12.3f} {each['unit']}{goal}{met}")
    print_results("pipeline", results)


if __name__ == "__main__":
    main()
