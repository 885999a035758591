"""Training over home connections: how much of its speed a swarm keeps, per codec, and beside torch.

3 stages x 2 replicas and a leader, each in a host of the lab. Paced: 30/60 ms for forward/backward
of 4 x 1024 tokens at hidden 2048, a home GPU; 16 microbatches a step (`--microbatches`; 65,536
tokens), or more smaller ones that take as long in all (`--microbatch-size`). What crosses the wire
is real. A stage averages `--parameters` parameters at the end of every step. Shares are of the best
rate on `lan`: there the wide settings are bound by the codecs of six peers on the cores of one
machine, which is nothing that a home would see.

`--real`: a decoder of 14.4 M parameters really computes, and all peers share this machine's cores;
as many tokens a step.

Each measurement comes with what its lab gave just before (`_measured.py`), and is kept in FILE
once it has ended: `--show` and `--plot` need no second run. Where packets are lost, cubic and BBR.

    python benchmarks/wan/throughput.py [--profiles lan home] [--settings bfloat16 int8 …] [--torch]
    python benchmarks/wan/throughput.py --show --plot PNG
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import _plots
from _helpers import (
    Helper,
    commit,
    end_politely,
    file_path,
    positive,
    print_results,
    result,
    whole_number,
)
from _kept import (
    ALIKE,
    GOALS,
    MEASURED,
    STEP,
    TORCH,
    Row,
    best,
    keep,
    kept,
    over_torch,
    policy_of,
    stamp,
    throughput,
)
from _lab import FORKED, Lab
from _lab_swarm import lab_swarm
from _measured import ended, given, measured_anew, said
from _namespaces import DEVICE, LabError, require_root
from _paced_swarm import CONNECTIONS
from _pipeline_config import pipeline_config
from _profiles import CONGESTION, PROFILES
from _wide import Sizes, wide

from swarm.config import RunConfig
from swarm.net.transport import MAX_CONNECTIONS

HIDDEN, SEQUENCE = 2048, 1024
STAGES, REPLICAS = 3, 2
MICROBATCH = 4  # sequences
FORWARD_S, BACKWARD_S = 0.030 / 4, 0.060 / 4  # a sequence
REAL_MICROBATCH, REAL_SEQUENCE = 8, 256
GRACE_S = 60.0  # after the limit
OVER_TORCH, TORCH_ON = 5.0, "home"
KEPT = Path("runs/wan/throughput.jsonl")
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
        Setting("float32", HIDDEN, "float32", "float32"),
        Setting("float16", HIDDEN, "float16", "float16"),
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


def tokens_of(options: argparse.Namespace) -> int:
    """Of a step."""
    return int(options.microbatches) * MICROBATCH * SEQUENCE


def ideal(options: argparse.Namespace) -> float:
    """Tokens/s of the stages alone: replicas are busy but for filling and emptying the pipeline."""
    size = options.microbatch_size
    each = tokens_of(options) / (size * SEQUENCE) / REPLICAS
    return tokens_of(options) / ((each + STAGES - 1) * size * (FORWARD_S + BACKWARD_S))


def config_of(setting: Setting, options: argparse.Namespace) -> RunConfig:
    """The run: paced, or real with as many tokens a step."""
    if options.real:
        sizes = {"microbatch_size": REAL_MICROBATCH, "sequence": REAL_SEQUENCE}
        number = tokens_of(options) // (REAL_MICROBATCH * REAL_SEQUENCE)
        run = argparse.Namespace(wire=setting.boundaries, microbatches=number, **sizes)
        thin = {} if setting.width == HIDDEN else {"subspace": setting.width}
        return pipeline_config(
            run,
            "float32",
            stages=STAGES,
            gradients=setting.gradients,
            policy=options.policy,
            ahead=options.ahead,
            **thin,
        )
    Sizes(width=setting.width, sequence=SEQUENCE, parameters=options.parameters).export()
    return wide(
        microbatches=tokens_of(options) // (options.microbatch_size * SEQUENCE),
        microbatch_size=options.microbatch_size,
        wire={"activations": setting.boundaries, "gradients": setting.gradients},
        policy=options.policy,
        ahead=options.ahead,
    )


def new_lab(profile: str, congestion: str, options: argparse.Namespace, seed: int) -> Lab:
    """A host for the leader and one for each replica, in both kinds of run."""
    return Lab(
        profile,
        1 + STAGES * REPLICAS,
        congestion=congestion,
        keep_window=options.keep_window,
        seed=seed,
    )


async def swarm_rate(lab: Lab, setting: Setting, options: argparse.Namespace) -> Row:
    """Tokens/s, over so many steps; none: not one had ended at the limit, so it is at most that."""
    peers = dict.fromkeys(range(STAGES), REPLICAS)
    size = options.microbatch_size
    pace = None if options.real else (FORWARD_S * size, BACKWARD_S * size)
    with lab_swarm(lab, config_of(setting, options), peers, pace) as swarm:
        at: list[float] = []
        swarm._on_step = lambda step: at.append(time.monotonic())
        try:
            await swarm.start()
            await swarm.until_serving(peers)
            began = time.monotonic()

            def late() -> bool:
                return time.monotonic() - began > options.limit

            def enough() -> bool:
                return at[-1] - at[0] > options.seconds or len(at) > options.steps

            await swarm.until(lambda: at or late(), "a first step", options.limit + GRACE_S)
            # A first step counts where it is long enough for its start not to matter; of *delayed*
            # it has nothing ahead, and has paid for what the second one has.
            if at and (options.policy == "delayed" or at[0] - began <= options.seconds):
                await swarm.until(
                    lambda: late() or (len(at) > 1 and enough()), "steps", options.limit + GRACE_S
                )
        finally:
            await swarm.stop()
        if len(at) > 1:
            return rate(len(at) - 1, at[-1] - at[0], options)
        return rate(len(at), at[0] - began if at else options.limit, options)


def torch_rate(lab: Lab, options: argparse.Namespace) -> Row:
    """The same of torch, in bfloat16. Each rank has the host of the replica in its place."""
    size = options.microbatch_size
    ranks: list[Helper] = []
    seconds: list[float] = []
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        for each in ranks:
            each.process.kill()

    late = threading.Timer(options.limit, stop)
    try:
        for rank in range(STAGES * REPLICAS):
            pipeline, stage = divmod(rank, STAGES)
            host = lab.hosts[1 + stage * REPLICAS + pipeline]
            ranks.append(
                Helper(
                    str(FORKED), host.namespace, sys.executable,
                    str(Path(__file__).with_name("_paced_torch.py")),
                    "--rank", str(rank),
                    "--master", f"tcp://{lab.hosts[1].address}:{MASTER_PORT}",
                    "--interface", DEVICE,
                    "--microbatches", str(tokens_of(options) // (size * SEQUENCE * REPLICAS)),
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
        late.start()
        while not seconds or (sum(seconds[1:]) < options.seconds > seconds[0]):
            for each in ranks:
                each.tell(step=True)
            seconds.append(max(each.hear()["seconds"] for each in ranks))
    except (RuntimeError, OSError):
        if not is_late.is_set():  # a rank died of something else
            raise
    finally:
        late.cancel()
        for each in ranks:
            each.close()
    counted = seconds[1:] or seconds  # the first opens connections
    return rate(len(counted), sum(counted) or options.limit, options)


def rate(steps: int, seconds: float, options: argparse.Namespace) -> Row:
    """`steps` of 0: less than one in this time."""
    return {"tokens_per_s": tokens_of(options) * max(steps, 1) / seconds, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=list(PROFILES))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--congestion", nargs="+", choices=CONGESTION)
    parser.add_argument(
        "--microbatches", type=int, default=STEP, metavar="N",
        help="in a step, of 4 sequences; of smaller ones as many more (tokens a step: N * 4096)",
    )  # fmt: skip
    parser.add_argument("--microbatch-size", type=int, default=MICROBATCH, choices=[1, 2, 4])
    parser.add_argument("--parameters", type=int, default=0, help="of a stage")
    parser.add_argument(
        "--connections",
        type=partial(whole_number, most=MAX_CONNECTIONS),
        nargs="+",
        default=[1],
        help="of peers, for averaging; in turn",
    )
    parser.add_argument("--seconds", type=positive, default=20.0, help="to measure each for")
    parser.add_argument("--steps", type=whole_number, default=20, help="at most, of each")
    parser.add_argument(
        "--rounds", type=whole_number, default=1, help="of all of it in turn; medians count"
    )
    parser.add_argument("--policy", default="exact", choices=["exact", "delayed"])
    parser.add_argument(
        "--ahead", type=float, metavar="SHARE", help="of a step, with `delayed`; all, unless told"
    )
    parser.add_argument(
        "--keep-window", action="store_true", help="hosts with tcp_slow_start_after_idle = 0"
    )
    parser.add_argument("--torch", action="store_true", help="also torch's pipelining and DDP")
    parser.add_argument("--real", action="store_true", help="a real model instead of a paced one")
    parser.add_argument("--limit", type=positive, default=1800.0, help="seconds for a step or more")
    parser.add_argument("--kept", type=file_path, default=KEPT, metavar="FILE")
    parser.add_argument("--show", action="store_true", help="only what is in FILE; run nothing")
    parser.add_argument("--plot", type=Path, help="also draw the shares in FILE, as PNG")
    options = parser.parse_args()
    if options.ahead is not None and options.policy != "delayed":
        parser.error("--ahead is for --policy delayed")
    options.ahead = 1.0 if options.ahead is None else options.ahead
    if not 0 < options.ahead <= 1:
        parser.error("--ahead is above 0 and at most 1")
    if options.parameters < 0:
        parser.error("--parameters is at least 0")
    if options.connections != [1] and options.real:
        parser.error("--connections is for paced peers")
    if options.microbatches < REPLICAS or options.microbatches % REPLICAS:
        parser.error(
            f"--microbatches is a multiple of {REPLICAS}: torch gives each pipeline as many"
        )
    end_politely()
    run, made_by = stamp(), commit()
    if not options.show:
        require_root()
        alone = "" if options.real else f"stages alone: {ideal(options):.0f} tokens/s; "
        print(f"{alone}{tokens_of(options):,} tokens a step")
        print(HEADER)
    for seed in range(0 if options.show else options.rounds):
        for profile in options.profiles:
            for congestion in congestions(profile, options):
                settings = [(each, n) for each in options.settings for n in options.connections]
                for name, connections in settings + ([(TORCH, 1)] if options.torch else []):
                    once = partial(measure, profile, congestion, name, connections, options, seed)
                    row = measured_anew(once)
                    keep(options.kept, {"run": run, "commit": made_by, **row})
                    print(line_of(row), flush=True)
    rows = throughput(kept(options.kept, (*MEASURED, "run", "tokens_per_s", "steps")))
    rows = [row for row in rows if row["profile"] in options.profiles]
    if options.show:
        rows = [row for row in rows if row["setting"] in (*options.settings, TORCH)]
        if not rows:
            parser.error(
                f"nothing of this is in {options.kept}: measure it, or name another --kept"
            )
        print(f"measured on {', '.join(sorted({str(row.get('commit')) for row in rows}))}")
    else:
        rows = [row for row in rows if row["run"] == run]
    print("\n".join([f"\n{HEADER}", *map(line_of, rows)]))
    shared = [r for r in rows if r["share"] is not None and r["setting"] != TORCH]
    for row in best(shared, "profile", *ALIKE, "parameters"):
        print(f"best: {line_of(row)}")
    if options.plot:
        _plots.shares(rows, options.plot)
    print_results("wan_throughput", entries(rows))


def congestions(profile: str, options: argparse.Namespace) -> Sequence[str]:
    if not PROFILES[profile].emulated:
        return CONGESTION[:1]
    return options.congestion or (CONGESTION if PROFILES[profile].lossy else CONGESTION[:1])


def measure(
    profile: str,
    congestion: str,
    setting: str,
    connections: int,
    options: argparse.Namespace,
    seed: int,
) -> Row:
    """In a lab whose losses are drawn by `seed`."""
    os.environ[CONNECTIONS] = str(connections)
    with new_lab(profile, congestion, options, seed) as lab:
        lines = given(lab)
        if setting == TORCH:
            found = torch_rate(lab, options)
        else:
            found = asyncio.run(swarm_rate(lab, SETTINGS[setting], options))
        return {
            "profile": profile,
            "congestion": congestion,
            "setting": setting,
            "policy": options.policy,
            "ahead": options.ahead if options.policy == "delayed" else 0.0,
            "microbatches": options.microbatches,
            "keep_window": options.keep_window,
            "model": "real" if options.real else "paced",
            "parameters": 0 if options.real else options.parameters,
            "connections": connections,
            "microbatch_size": REAL_MICROBATCH if options.real else options.microbatch_size,
            **found,
            "lab": {"lines": lines, "hub": ended(lab)},
        }


HEADER = (
    "profile   TCP         policy       setting                  tokens/s  steps  share   the lab"
)


def line_of(row: Row) -> str:
    """`<` stands before a rate of which only that is known. The hub: packets it lost as told,
    dropped from full buffers, and the longest that one came late."""
    window = "+keep" if row["keep_window"] else ""
    below = "" if row["steps"] else "<"
    share = f"{below}{row['share']:.3f}" if row.get("share") is not None else ""
    hub, least = row["lab"]["hub"], row.get("least", row["tokens_per_s"])
    late = ""
    if hub:
        late = f"; hub lost {hub['lost']}, dropped {hub['dropped']}"
        late += f", late {1e3 * hub['latest_s']:.0f} ms"
    extra = "".join(
        text
        for text, shown in (
            (f"   slowest round {least:,.0f}", least < row["tokens_per_s"]),
            (f"   {row['model']}", row["model"] != "paced"),
            (f"   {row['parameters']:,} averaged", row["parameters"]),
            (f"   {row['connections']} connections", row["connections"] > 1),
            (f"   {row['microbatches']} × 4,096 tokens a step", row["microbatches"] != STEP),
            (f"   {row['microbatch_size']} a microbatch", row["microbatch_size"] != MICROBATCH),
        )
        if shown
    )
    return (
        f"{row['profile']:9} {row['congestion'] + window:11} {policy_of(row):12}"
        f" {row['setting']:22}{below + format(row['tokens_per_s'], ',.0f'):>11}{row['steps']:7}"
        f"  {share:6}  {said(row['lab']['lines'])}{late}{extra}"
    )


def entries(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For the last line: rates, shares of the best one on `lan`, and how far ahead of torch. What
    is asked is asked of the best on each profile."""
    shared = [row for row in rows if row["share"] is not None and row["setting"] != TORCH]
    best_ones = best(shared, "profile", "model")
    found = []
    for row in rows:
        where = f"{row['profile']}, {row['congestion']}{', keep' if row['keep_window'] else ''}"
        sizes = f"{row['parameters']} parameters, {row['microbatches']} x 4096 tokens a step"
        sizes += f", {row['microbatch_size']} a microbatch"
        sizes += f", {row['connections']} connections" if row["connections"] > 1 else ""
        metric = f"{where}, {row['setting']}, {policy_of(row)}, {row['model']} model, {sizes}"
        if not row["steps"]:
            metric += ", at most"
        measured = [result(metric, row["tokens_per_s"], "tokens/s")]
        if row.get("least", row["tokens_per_s"]) < row["tokens_per_s"]:
            measured.append(result(f"{metric}, slowest round", row["least"], "tokens/s"))
        if row["setting"] == TORCH:
            factor = over_torch(rows, row)
            if factor is not None:
                name = f"{where}: best / torch{'' if row['steps'] else ', at least'}"
                goal = OVER_TORCH if row["profile"] == TORCH_ON else None
                measured.append(result(name, factor, "x", goal))
        elif row["share"] is not None:
            asked = row["steps"] and row["model"] == "paced" and row in best_ones
            goal = GOALS.get(row["profile"]) if asked else None
            measured.append(result(f"{metric}: share", row["share"], "of lan", goal))
        found += [{**each, "steps": row["steps"], "lab": row["lab"]} for each in measured]
    return found


if __name__ == "__main__":
    try:
        main()
    except (LabError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
