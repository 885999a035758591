"""Bytes on the wire: over a boundary per token, and of a replica's averaging per step, per codec.

The kernel counts them at the devices of the lab's hosts (`lan`, a bridge): IP packets, with all
that libp2p and TCP add, token ids, targets, acknowledgements, pings and orders. Beside them the
tensors' own bytes, as the peers count them and the leader reports. A byte-level Llama of 1.2 M
parameters in training (`benchmarks/convergence.py`), since what zstd makes of a tensor depends on
its values.

Boundaries: 3 stages of one replica; the host of the last one receives activations and sends
gradients. Averaging: one stage of two replicas, the mean of what each sends.

    python benchmarks/wan/wire_bytes.py [--codecs bfloat16 int8 …] [--subspace 32] [--steps 8]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).parent.parent))

from _helpers import end_politely, print_results, result
from _lab import Lab
from _lab_swarm import lab_swarm
from _measured import Traffic, given, said, traffic_of
from _namespaces import LabError, require_root
from convergence import SEQUENCE, SIZE, STAGES, sections

from swarm.averaging.plan import make_plan
from swarm.config import RunConfig, parse_config
from swarm.config_types import Codec

CODECS = get_args(Codec)
THIN = ("float32", "float16", "bfloat16", "int8", "int4")  # of a subspace
GRADIENTS = (
    ("float32", "float64"),
    ("float32", "float32"),
    ("float16", "float64"),
    ("bfloat16", "float64"),
    ("int8", "float64"),
)  # and in what they are summed
BESIDE = "bfloat16"
HIDDEN, MICROBATCHES, WARM_UP_STEPS, LIMIT_S = 128, 16, 2, 600.0
MICROBATCH_TOKENS = SEQUENCE * SIZE


class Counted(NamedTuple):
    """By host of a peer what the kernel counted, and what the leader reports of all boundaries."""

    hosts: list[Traffic]
    reported: list[Mapping[str, Any]]
    lines: list[dict[str, Any]]  # what the lab gave before


def config_of(
    wire: Mapping[str, str], stages: int, subspace: int | None = None, accumulate: str = "float64"
) -> RunConfig:
    described = sections("exact", HIDDEN, 0, 100_000, 3e-3, MICROBATCHES)
    described["model"]["stages"] = stages
    if subspace is not None:
        described["model"]["subspace"] = subspace
    described["wire"] = dict(wire)
    described["update"]["accumulate"] = accumulate
    return parse_config(described, "the run")


async def count(config: RunConfig, peers: Mapping[int, int], steps: int) -> Counted:
    """What so many steps took."""
    at: list[list[Traffic]] = []
    with Lab("lan", 1 + sum(peers.values()), bursts=False) as lab:
        lines = given(lab)
        with lab_swarm(lab, config, peers, None) as swarm:
            swarm._on_step = lambda step: at.append([traffic_of(host) for host in lab.hosts[1:]])
            try:
                await swarm.start()
                await swarm.until_serving(peers)
                await swarm.until(lambda: len(at) > WARM_UP_STEPS + steps, "steps", LIMIT_S)
                reported = swarm.status()["bytes"]["boundaries"]
            finally:
                await swarm.stop()
    ends = zip(at[WARM_UP_STEPS], at[WARM_UP_STEPS + steps], strict=True)
    hosts = [Traffic(b.received - a.received, b.sent - a.sent) for a, b in ends]
    return Counted(hosts, reported, lines)


def boundaries(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes per token over one boundary."""
    wanted = [(codec, codec, None) for codec in options.codecs]
    wanted += [(f"subspace-{k} {codec}", codec, k) for k in options.subspace for codec in THIN]
    tokens = options.steps * MICROBATCHES * MICROBATCH_TOKENS
    found: dict[str, tuple[float, float]] = {}
    results = []
    print(f"{'bytes a token':24}{'forward':>9}{'back':>9}{'tensors forward':>17}{'back':>9}")
    for name, codec, k in wanted:
        config = config_of({"activations": codec}, STAGES, k)
        counted = asyncio.run(count(config, dict.fromkeys(range(STAGES), 1), options.steps))
        last, row = counted.hosts[-1], counted.reported[-1]
        found[name] = forward, back = last.received / tokens, last.sent / tokens
        # Replicas tell of a step's bytes only after it, so these are of fewer steps than tokens.
        tensors, back_tensors = (
            4 * (k or HIDDEN) * row[f"{way}wire_bytes"] / row[f"{way}raw_bytes"]
            for way in ("", "back_")
        )
        print(f"{name:24}{forward:9.1f}{back:9.1f}{tensors:17.1f}{back_tensors:9.1f}"
              f"   {said(counted.lines)}", flush=True)  # fmt: skip
        for which, value in (("forward", forward), ("back", back)):
            entry = result(f"{name}: {which}", value, "bytes a token")
            results.append({**entry, "lab": {"lines": counted.lines}})
    if beside := sum(found.get(BESIDE, ())):
        results += [
            result(f"{name}: both, of {BESIDE}", sum(both) / beside, "ratio")
            for name, both in found.items()
        ]
    return results


def averaging(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes that one of two replicas of the whole model sends in a step."""
    results = []
    print(f"{'bytes a step and replica':34}{'sent':>12}{'of which tensors':>18}{'a parameter':>13}")
    for codec, accumulate in GRADIENTS:
        config = config_of({"gradients": codec}, 1, accumulate=accumulate)
        counted = asyncio.run(count(config, {0: 2}, options.steps))
        sent = statistics.fmean(host.sent for host in counted.hosts) / options.steps
        parameters = num_parameters(config)
        plan = make_plan(["a", "b"], parameters, accumulate, codec=codec)
        name = f"{codec}, summed in {accumulate}"
        print(
            f"{name:34}{sent:12,.0f}{plan.sent_bytes(0):18,}{sent / parameters:13.2f}"
            f"   {said(counted.lines)}",
            flush=True,
        )
        entry = result(f"{name}: sent", sent, "bytes a step")
        results.append({**entry, "lab": {"lines": counted.lines}})
    return results


def num_parameters(config: RunConfig) -> int:
    from swarm.model import build_pipeline

    stage = build_pipeline(config).build_stage(0)
    return sum(math.prod(parameter.shape) for _, parameter in stage.named_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codecs", nargs="*", default=CODECS, choices=CODECS)
    parser.add_argument("--subspace", nargs="*", type=int, default=[32], metavar="K")
    parser.add_argument("--steps", type=int, default=8, help="to count, of each")
    parser.add_argument("--no-averaging", action="store_true")
    options = parser.parse_args()
    if options.steps < 1 or not set(options.subspace) <= set(range(1, HIDDEN)):
        parser.error(f"--steps is at least 1, --subspace 1 to {HIDDEN - 1}")
    require_root()
    end_politely()
    results = boundaries(options)
    if not options.no_averaging:
        results += averaging(options)
    print_results("wan_wire_bytes", results)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
