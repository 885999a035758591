"""Training over home connections: how much of its speed a swarm keeps, per codec, and beside torch.

3 stages x 2 replicas and a leader, each in a host of the lab. Paced: 30/60 ms for forward/backward
of 4 x 1024 tokens at hidden 2048, a home GPU; 16 microbatches a step (65,536 tokens), or more
smaller ones that take as long in all (`--microbatch-size`). What crosses the wire is real. A stage
averages `--parameters` parameters at the end of every step. Shares are of the best rate on `lan`:
there the wide settings are bound by the codecs of six peers on the cores of one machine, which is
nothing that a home would see.

`--real`: a decoder of 14.4 M parameters really computes, and all peers share this machine's cores;
as many tokens a step.

    python benchmarks/wan/throughput.py [--profiles lan home] [--settings bfloat16 int8 …] [--torch]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from _helpers import Helper, end_politely, print_results, result
from _lab import FORKED, Lab
from _lab_swarm import lab_swarm
from _namespaces import DEVICE, LabError
from _pipeline_config import pipeline_config
from _profiles import PROFILES
from _wide import Sizes, wide

from swarm.config import RunConfig

HIDDEN, SEQUENCE = 2048, 1024
STAGES, REPLICAS = 3, 2
TOKENS = 65_536  # a step
FORWARD_S, BACKWARD_S = 0.030 / 4, 0.060 / 4  # a sequence
REAL_MICROBATCH, REAL_SEQUENCE = 8, 256
STEP_LIMIT_S = 1800.0
GOALS = {"home": 0.90, "poor": 0.80}  # of lan, averaging included
AHEAD, TORCH = 5.0, "torch 1F1B + DDP"
MASTER_PORT = 29_500  # every host of the lab has its ports to itself


@dataclass(frozen=True)
class Setting:
    """What crosses a boundary, and in which codec; gradients of parameters in another."""

    name: str
    width: int
    boundaries: str
    gradients: str


SETTINGS = {
    each.name: each
    for each in (
        Setting("bfloat16", HIDDEN, "bfloat16", "bfloat16"),
        Setting("int8", HIDDEN, "int8", "int8"),
        Setting("int4", HIDDEN, "int4", "int8"),
        *(
            Setting(f"subspace-{k} {codec}", k, codec, "int8")
            for k in (64, 32, 16, 8)
            for codec in ("bfloat16", "int8", "int4")
        ),
    )
}


def ideal(microbatch: int) -> float:
    """Tokens/s of the stages alone: replicas are busy but for filling and emptying the pipeline."""
    each = TOKENS / (microbatch * SEQUENCE) / REPLICAS
    return TOKENS / ((each + STAGES - 1) * microbatch * (FORWARD_S + BACKWARD_S))


def config_of(setting: Setting, options: argparse.Namespace) -> RunConfig:
    """The run: paced, or real with as many tokens a step."""
    if options.real:
        sizes = {"microbatch_size": REAL_MICROBATCH, "sequence": REAL_SEQUENCE}
        number = TOKENS // (REAL_MICROBATCH * REAL_SEQUENCE)
        run = argparse.Namespace(wire=setting.boundaries, microbatches=number, **sizes)
        thin = {} if setting.width == HIDDEN else {"subspace": setting.width}
        return pipeline_config(
            run,
            "float32",
            stages=STAGES,
            gradients=setting.gradients,
            policy=options.policy,
            **thin,
        )
    Sizes(width=setting.width, sequence=SEQUENCE, parameters=options.parameters).export()
    return wide(
        microbatches=TOKENS // (options.microbatch_size * SEQUENCE),
        microbatch_size=options.microbatch_size,
        wire={"activations": setting.boundaries, "gradients": setting.gradients},
        policy=options.policy,
    )


async def swarm_rate(
    profile: str, congestion: str, setting: Setting, options: argparse.Namespace
) -> tuple[float, int]:
    """Tokens/s, over so many steps."""
    peers = dict.fromkeys(range(STAGES), REPLICAS)
    size = options.microbatch_size
    pace = None if options.real else (FORWARD_S * size, BACKWARD_S * size)
    with (
        Lab(
            profile,
            1 + STAGES * REPLICAS,
            congestion=congestion,
            keep_window=options.keep_window,
        ) as lab,
        lab_swarm(lab, config_of(setting, options), peers, pace) as swarm,
    ):
        at: list[float] = []
        swarm._on_step = lambda step: at.append(time.monotonic())

        def enough() -> bool:
            return len(at) > 1 and (at[-1] - at[0] > options.seconds or len(at) > options.steps)

        try:
            await swarm.start()
            await swarm.until_serving(peers)
            began = time.monotonic()
            await swarm.until(lambda: at, "a first step", STEP_LIMIT_S)
            if at[0] - began > options.seconds:  # long enough for its start not to matter
                return TOKENS / (at[0] - began), 1
            await swarm.until(enough, "steps", STEP_LIMIT_S)
        finally:
            await swarm.stop()
        return TOKENS * (len(at) - 1) / (at[-1] - at[0]), len(at) - 1


def torch_rate(profile: str, congestion: str, options: argparse.Namespace) -> tuple[float, int]:
    """The same of torch, in bfloat16."""
    size = options.microbatch_size
    with Lab(
        profile, STAGES * REPLICAS, congestion=congestion, keep_window=options.keep_window
    ) as lab:
        ranks: list[Helper] = []
        try:
            for rank, host in enumerate(lab.hosts):
                ranks.append(
                    Helper(
                        str(FORKED), host.namespace, sys.executable,
                        str(Path(__file__).with_name("_paced_torch.py")),
                        "--rank", str(rank),
                        "--master", f"tcp://{lab.hosts[0].address}:{MASTER_PORT}",
                        "--interface", DEVICE,
                        "--microbatches", str(TOKENS // (size * SEQUENCE * REPLICAS)),
                        "--microbatch-size", str(size),
                        "--sequence", str(SEQUENCE),
                        "--width", str(HIDDEN),
                        "--parameters", str(options.parameters),
                        "--forward-s", str(FORWARD_S * size),
                        "--backward-s", str(BACKWARD_S * size),
                    )
                )  # fmt: skip
            for each in ranks:
                each.hear()
            seconds: list[float] = []
            while not seconds or (sum(seconds[1:]) < options.seconds > seconds[0]):
                for each in ranks:
                    each.tell(step=True)
                seconds.append(max(each.hear()["seconds"] for each in ranks))
            counted = seconds[1:] or seconds  # the first opens connections
            return TOKENS * len(counted) / sum(counted), len(counted)
        finally:
            for each in ranks:
                each.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=list(PROFILES))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--congestion", nargs="+", default=["cubic"], choices=["cubic", "bbr"])
    parser.add_argument("--microbatch-size", type=int, default=4, choices=[1, 2, 4])
    parser.add_argument("--parameters", type=int, default=0, help="of a stage")
    parser.add_argument("--seconds", type=float, default=20.0, help="to measure each for")
    parser.add_argument("--steps", type=int, default=20, help="at most, of each")
    parser.add_argument("--rounds", type=int, default=1, help="of all of it in turn; medians count")
    parser.add_argument("--policy", default="exact", choices=["exact", "delayed"])
    parser.add_argument(
        "--keep-window", action="store_true", help="hosts with tcp_slow_start_after_idle = 0"
    )
    parser.add_argument("--torch", action="store_true", help="also torch's pipelining and DDP")
    parser.add_argument("--real", action="store_true", help="a real model instead of a paced one")
    options = parser.parse_args()
    end_politely()
    if not options.real:
        alone = ideal(options.microbatch_size)
        print(f"stages alone: {alone:.0f} tokens/s; averaged: {options.parameters:,} parameters")
    print("profile   TCP    setting                tokens/s   steps")
    rates: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(options.rounds):
        for profile in options.profiles:
            for congestion in options.congestion if PROFILES[profile].emulated else ["cubic"]:
                for name in [*options.settings, *([TORCH] if options.torch else [])]:
                    if name == TORCH:
                        rate, steps = torch_rate(profile, congestion, options)
                    else:
                        running = swarm_rate(profile, congestion, SETTINGS[name], options)
                        rate, steps = asyncio.run(running)
                    print(f"{profile:9} {congestion:6} {name:22}{rate:9.0f} {steps:7}", flush=True)
                    rates.setdefault((profile, congestion, name), []).append(rate)
    medians = {key: statistics.median(found) for key, found in rates.items()}
    print_results("wan_throughput", shares(medians, options))


def shares(
    medians: dict[tuple[str, str, str], float], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """What each setting keeps of the best one on `lan`; torch is beside the best of its profile."""
    ours = {key: rate for key, rate in medians.items() if key[2] != TORCH}
    best = {
        where: max(rate for key, rate in ours.items() if key[:2] == where)
        for where in dict.fromkeys(key[:2] for key in ours)
    }
    lan = best.get(("lan", "cubic"), 0.0 if options.real else ideal(options.microbatch_size))
    model = (
        "real model"
        if options.real
        else f"{options.parameters} parameters, {options.microbatch_size} a microbatch"
    )
    results = []
    for (profile, congestion, name), rate in medians.items():
        metric = f"{profile}, {congestion}, {name}, {options.policy}, {model}"
        results.append(result(metric, rate, "tokens/s"))
        if name == TORCH:
            ahead = best[profile, congestion] / rate
            results.append(result(f"{profile}, {congestion}: best / torch", ahead, "x", AHEAD))
        elif lan:
            results.append(result(f"{metric}: share", rate / lan, "of lan", GOALS.get(profile)))
    return results


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        raise SystemExit(f"error: {error}") from None
