"""What crosses the wires, per codec: counted by the network devices of hosts in the lab.

The swarm of `throughput.py` (3 stages x 2 replicas and a leader, hidden 2048, sequence 1024), on
`lan`, 8,192 tokens a step. Every replica's host has a device of its own, whose counter of sent
bytes is read between two commits: tensors, token ids, headers, encryption, acknowledgements, TCP
and IP, heartbeats. A replica of the first stage sends activations, of the last gradients, of the
middle both; each carries half of the microbatches. Beside that stands what the swarm itself counts
at a boundary, per token.

(i) codecs of the boundaries, with nothing to average; (ii) codecs of the averaging, a million
parameters a stage, with boundaries that send next to nothing: two members send each other a half
of the contributions and a half of the sums.

    python benchmarks/wan/bytes.py [--settings bfloat16 int8 …] [--gradients float32 int8 …]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from _helpers import end_politely, print_results, result
from _lab import Host, Lab
from _lab_swarm import lab_swarm
from _namespaces import DEVICE, LabError
from _wide import STAGES, Sizes, wide

HIDDEN, SEQUENCE, MICROBATCHES, REPLICAS, STEPS = 2048, 1024, 8, 2, 3
TOKENS = SEQUENCE * MICROBATCHES
STEP_LIMIT_S = 300.0
PARAMETERS = 1_000_000
USUAL = "bfloat16"  # what the others stand beside
GRADIENTS = ("float32", "float16", "bfloat16", "int8")
THIN = ("int4", 8)  # boundaries, where averaging is looked at


class Measured(NamedTuple):
    sent: list[float]  # bytes a step, of a replica of each stage
    forward: float  # bytes per token at a boundary, as the swarm counts them
    back: float


def settings() -> dict[str, tuple[str, int]]:
    """Codec and width, by name."""
    full = ("float32", "bfloat16", "float16", "int8", "int4")
    thin = ("bfloat16", "int8", "int4")
    return {codec: (codec, HIDDEN) for codec in full} | {
        f"subspace-{k} {codec}": (codec, k) for k in (64, 32, 16, 8) for codec in thin
    }


def sent_bytes(host: Host) -> int:
    """What the host's device has sent since it was made."""
    command = ["ip", "-n", host.namespace, "-s", "-j", "link", "show", "dev", DEVICE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)[0]["stats64"]["tx"]["bytes"])


async def measure(codec: str, width: int, gradients: str, parameters: int) -> Measured:
    Sizes(width=width, sequence=SEQUENCE, parameters=parameters).export()
    wire = {"activations": codec, "gradients": gradients}
    config = wide(microbatches=MICROBATCHES, microbatch_size=1, wire=wire)
    peers = dict.fromkeys(range(STAGES), REPLICAS)
    with (
        Lab("lan", 1 + STAGES * REPLICAS) as lab,
        lab_swarm(lab, config, peers, (0.01, 0.01)) as swarm,
    ):
        at: list[list[int]] = []
        swarm._on_step = lambda step: at.append([sent_bytes(host) for host in lab.hosts[1:]])
        try:
            await swarm.start()
            await swarm.until_serving(peers)
            # The first step opens connections.
            await swarm.until(lambda: len(at) > STEPS, "steps", STEP_LIMIT_S)
            first = swarm.status()["bytes"]["boundaries"][0]
        finally:
            await swarm.stop()
    per_step = [(b - a) / STEPS for a, b in zip(at[0], at[STEPS], strict=True)]
    stages = [per_step[REPLICAS * stage :][:REPLICAS] for stage in range(STAGES)]
    return Measured(
        [sum(each) / REPLICAS for each in stages],
        4 * width * first["wire_per_token"] / first["raw_per_token"],
        4 * width * first["back_wire_per_token"] / first["back_raw_per_token"],
    )


def row(name: str, found: Measured, usual: Measured | None) -> None:
    sent = "".join(f"{each / 1e6:10.3f}" for each in found.sent)
    share = f"{found.sent[1] / usual.sent[1]:9.3f}" if usual else ""
    print(f"{name:22}{found.forward:9.1f}{found.back:9.1f}{sent}{share}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = settings()
    parser.add_argument("--settings", nargs="*", default=list(known), choices=list(known))
    parser.add_argument("--gradients", nargs="*", default=list(GRADIENTS), choices=list(GRADIENTS))
    options = parser.parse_args()
    end_politely()
    results: list[dict[str, Any]] = []
    print("                        bytes/token there, back    MB a step sent by a replica of stage")
    print("                          forward     back         0         1         2  / bf16")
    usual = asyncio.run(measure(*known[USUAL], "float32", 0))
    for name in options.settings:
        codec, width = known[name]
        found = usual if name == USUAL else asyncio.run(measure(codec, width, "float32", 0))
        row(name, found, usual)
        for what, value in (("forward", found.forward), ("back", found.back)):
            results.append(result(f"{name}, {what}", value, "bytes/token"))
        results.append(result(f"{name}, a middle replica", found.sent[1], "bytes/step"))
    print(f"averaging {PARAMETERS:,} parameters a stage, boundaries subspace-{THIN[1]} {THIN[0]}")
    averaged = asyncio.run(measure(*THIN, USUAL, PARAMETERS)) if options.gradients else None
    for name in options.gradients:
        found = averaged if name == USUAL and averaged else None
        found = found or asyncio.run(measure(*THIN, name, PARAMETERS))
        row(name, found, averaged)
        metric = f"averaging in {name}, a middle replica"
        results.append(result(metric, found.sent[1], "bytes/step"))
    print_results("wan_bytes", results)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        raise SystemExit(f"error: {error}") from None
