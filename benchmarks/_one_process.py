"""The plain torch loop that a swarm is compared with: one process, gradient accumulation, AdamW.

A helper (see `_helpers`): every line of stdin is one optimizer step, answered by one JSON line.
`--accumulate float64` adds each microbatch's gradient in float64 and rounds once per step, as a run
with `accumulate = "float64"` does; `float32` lets autograd add.

    echo '{}' | python benchmarks/_one_process.py --threads 2 --microbatches 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import torch
from _helpers import serve_lines
from _plain_model import Batches, add_options, build, loss_sum, num_parameters

from peer.launch import keep_freed_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser, microbatches=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--accumulate", choices=("float32", "float64"), default="float32")
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a peer does
    model = build(options)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, fused=options.fused or None)
    batches = Batches(options)
    tokens_per_microbatch = options.microbatch_size * options.sequence
    sums = (
        [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        if options.accumulate == "float64"
        else []
    )

    def step(num_microbatches: int) -> float:
        total = 0.0
        for _ in range(num_microbatches):
            inputs, targets = batches.draw(options.microbatch_size)
            loss = loss_sum(model(input_ids=inputs, use_cache=False).logits, targets)
            loss = loss / (num_microbatches * tokens_per_microbatch)
            loss.backward()
            total += loss.item()
            for accumulated, parameter in zip(sums, parameters, strict=bool(sums)):
                assert parameter.grad is not None
                accumulated.add_(parameter.grad)
                parameter.grad.zero_()
        for accumulated, parameter in zip(sums, parameters, strict=bool(sums)):
            assert parameter.grad is not None
            parameter.grad.copy_(accumulated)
            accumulated.zero_()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return total

    def answer(_: Mapping[str, Any]) -> dict[str, Any]:
        start, cpu = time.perf_counter(), time.process_time()
        loss = step(options.microbatches)
        seconds = time.perf_counter() - start
        tokens = options.microbatches * tokens_per_microbatch
        return {
            "program": "one_process",
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            "cpu_s": (time.process_time() - cpu) / options.microbatches,
            "loss": loss,
            "accumulate": options.accumulate,
            "parameters": num_parameters(model),
        }

    if options.warmup:
        step(options.warmup)
    serve_lines(answer)


if __name__ == "__main__":
    main()
