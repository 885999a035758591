"""Codecs: how fast they are and how much smaller they make what crosses a boundary.

One tensor of the size of a boundary of the demo decoder (microbatch 8, sequence 256, hidden 384) is
encoded and decoded by each codec, the codecs taking turns, the best of the rounds. Ratios are of
logical float32 bytes to wire bytes, on normal noise and on the residual stream, and its gradient,
of a small transformer that has been trained for some seconds on the running Python's sources.

Then the blockwise codecs alone, on noise of the sizes that cross the boundaries recommended for
thin lines and of a wide one: a small tensor pays a codec's fixed costs for less.

    python -m benchmarks.codecs [--rounds 7] [--steps 40]
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from _helpers import print_results, result, whole_number

from swarm.wire.codecs import codec_for, codec_names, decode, encode

MICROBATCH, SEQUENCE, HIDDEN = 8, 256, 384
STEP_MICROBATCHES = 64
BLOCKWISE = ("int8", "int4")
BOUNDARIES = ((4, 1024, 8), (4, 1024, 32), (4, 1024, 2048))  # subspaces of 8 and 32; none
BLOCKWISE_GOAL_MBPS = 1000.0  # encode and decode together, one thread
ZSTD_RATIO_GOAL = 1.4  # bfloat16+zstd against bfloat16, trained activations


def trained_boundary(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An activation between two layers and the loss's gradient of it, each (batch, seq, hidden)."""
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    text = torch.tensor(list(source), dtype=torch.long)
    embed, head = nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, 256)
    layers = [
        nn.TransformerEncoderLayer(HIDDEN, 6, 2 * HIDDEN, 0.0, batch_first=True, norm_first=True)
        for _ in range(2)
    ]
    modules = nn.ModuleList([embed, *layers, head])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-3)
    boundary = torch.empty(0)
    for step in range(steps + 1):
        batch, sequence = (MICROBATCH, SEQUENCE) if step == steps else (4, 128)
        starts = torch.randint(len(text) - sequence - 1, (batch,)).tolist()
        rows = torch.stack([text[s : s + sequence + 1] for s in starts])
        causal = nn.Transformer.generate_square_subsequent_mask(sequence)
        boundary = layers[0](embed(rows[:, :-1]), src_mask=causal, is_causal=True)
        boundary.retain_grad()
        logits = head(layers[1](boundary, src_mask=causal, is_causal=True))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert boundary.grad is not None
    return boundary.detach(), boundary.grad / STEP_MICROBATCHES


def timed(
    rounds: int, tensor: torch.Tensor, names: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Least seconds to encode and to decode, per codec (and with `~`, rounding stochastically)."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name, times in taken.items():
            start = time.perf_counter()
            wire = encode(tensor, name.removesuffix("~"), 1 if name.endswith("~") else None)
            middle = time.perf_counter()
            decode(wire)
            times.append((middle - start, time.perf_counter() - middle))
    return {
        name: (min(t[0] for t in times[1:]), min(t[1] for t in times[1:]))
        for name, times in taken.items()
    }


def error(tensor: torch.Tensor, codec: str) -> float:
    """Relative error of a round trip, by norm."""
    got = decode(encode(tensor, codec))
    return float((got.double() - tensor.double()).norm() / tensor.double().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=whole_number, default=7)
    parser.add_argument(
        "--steps", type=whole_number, default=40, help="training steps of the small net"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    activation, gradient = trained_boundary(options.steps)
    samples = {
        "noise": torch.randn(MICROBATCH, SEQUENCE, HIDDEN),
        "activation": activation,
        "gradient": gradient,
    }
    stochastic = [f"{name}~" for name in BLOCKWISE]
    names = [name for name in codec_names() if codec_for("float32", name) == name]
    seconds = timed(options.rounds, activation, [*names, *stochastic])
    megabytes = activation.numel() * 4 / 1e6
    results: list[dict[str, Any]] = []

    def add(metric: str, value: float, unit: str, goal: float | None = None) -> None:
        results.append(result(metric, value, unit, goal))

    print(f"{megabytes:.1f} MB of float32, {options.threads} thread(s); MB/s of logical bytes")
    kinds = "  ".join(samples)
    print(f"{'codec':15} {'encode':>9} {'decode':>9}   ratio: {kinds}   error: {kinds}")
    ratios: dict[str, dict[str, float]] = {}
    for name, (encode_s, decode_s) in seconds.items():
        if name.removesuffix("~") in BLOCKWISE:
            both = megabytes / (encode_s + decode_s)
            add(f"{name} encode and decode", both, "MB/s", BLOCKWISE_GOAL_MBPS)
        if name.endswith("~"):
            print(f"{name:15} {megabytes / encode_s:9.0f} {megabytes / decode_s:9.0f}")
            continue
        ratios[name] = {
            kind: wire.raw_bytes / wire.wire_bytes
            for kind, wire in ((kind, encode(tensor, name)) for kind, tensor in samples.items())
        }
        shown = "  ".join(f"{ratios[name][kind]:{len(kind)}.2f}" for kind in samples)
        errors = {kind: error(tensor, name) for kind, tensor in samples.items()}
        lost = "  ".join(f"{errors[kind]:{max(len(kind), 7)}.1e}" for kind in samples)
        speeds = f"{megabytes / encode_s:9.0f} {megabytes / decode_s:9.0f}"
        print(f"{name:15} {speeds}          {shown}        {lost}")
        add(f"{name} encode", megabytes / encode_s, "MB/s")
        add(f"{name} decode", megabytes / decode_s, "MB/s")
        for kind in samples:
            add(f"{name} ratio {kind}", ratios[name][kind], "x")
            add(f"{name} error {kind}", errors[kind], "relative")
    smaller = ratios["bfloat16+zstd"]["activation"] / ratios["bfloat16"]["activation"]
    add("bfloat16+zstd against bfloat16, activation", smaller, "x", ZSTD_RATIO_GOAL)
    print(
        "raw and float32 are sent from the tensor's own memory: encoding copies nothing.\n"
        f"The gradient is that of a mean over {STEP_MICROBATCHES} microbatches, as in a step."
    )
    print(f"{'boundary':15} {'codec':6} {'encode':>9} {'decode':>9} {'together':>9}")
    for sizes in BOUNDARIES:
        boundary = torch.randn(sizes)
        shape, megabytes = " x ".join(map(str, sizes)), boundary.numel() * 4 / 1e6
        each_s = timed(options.rounds, boundary, [*BLOCKWISE, *stochastic])
        for name, (encode_s, decode_s) in each_s.items():
            rates = [megabytes / taken for taken in (encode_s, decode_s, encode_s + decode_s)]
            print(f"{shape:15} {name:6} " + " ".join(f"{rate:9.0f}" for rate in rates))
            for what, rate in zip(("encode", "decode", "encode and decode"), rates, strict=True):
                add(f"{name} {what}, {shape}", rate, "MB/s")
    print_results("codecs", results)


if __name__ == "__main__":
    main()
