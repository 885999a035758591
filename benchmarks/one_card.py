"""A swarm of two stages on one GPU beside a plain torch loop on it: same model, same batches.

The whole Hugging Face model with AdamW and clipping against two replicas that share the card
(`_one_card`). Sides take turns within one run; ratios are taken within a round, and the median is
reported. Both compute as an exact run does (no TF32, deterministic kernels) and add gradients up in
float32; `--accumulate float64` shows what the swarm's default costs. 110 M parameters by default.

    python benchmarks/one_card.py [--device cuda:0] [--rounds 5]

Without a GPU it measures nothing; that it works shows `--device cpu` with a small model:

    python benchmarks/one_card.py --device cpu --hidden 64 --layers 2 --sequence 32 --microbatches 4
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys

from _helpers import print_results, result, whole_number
from _one_card import compare, run_config

from peer.launch import be_exact, choose_device

GOAL = 0.95
APART = 1e-3  # of losses that are the same up to rounding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:i")
    parser.add_argument("--rounds", type=whole_number, default=5)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--accumulate", choices=("float32", "float64"), default="float32")
    options = parser.parse_args()
    device = choose_device(options.device)
    if options.device == "auto" and device == "cpu":
        print("no GPU here: nothing is measured")
        print_results("one_card", [])
        return
    be_exact(device, None)
    run = run_config(
        hidden=options.hidden,
        layers=options.layers,
        sequence=options.sequence,
        microbatches=options.microbatches,
        microbatch_size=options.microbatch_size,
        accumulate=options.accumulate,
    )
    found = asyncio.run(compare(run, device, options.rounds))
    if not found.apart < APART:
        sys.exit(f"the sides do not train the same: losses differ by {found.apart:.1e}")
    tokens = options.microbatches * options.microbatch_size * options.sequence
    plain, swarm = (tokens / statistics.median(seconds) for seconds in found.seconds)
    ratio = statistics.median(found.ratios)
    print(f"on {device}, {options.accumulate} accumulators, losses apart by {found.apart:.1e}")
    print(f"{'plain torch loop':24} {plain:12,.0f} tokens/s")
    print(f"{'two stages':24} {swarm:12,.0f} tokens/s")
    rounds = ", ".join(f"{each:.3f}" for each in found.ratios)
    print(f"{'two stages / plain loop':24} {ratio:12.3f}   (rounds: {rounds})")
    print_results(
        "one_card",
        [
            result("two stages / plain loop", ratio, "x", GOAL if device != "cpu" else None),
            result("plain loop", plain, "tokens/s"),
            result("two stages", swarm, "tokens/s"),
        ],
    )


if __name__ == "__main__":
    main()
