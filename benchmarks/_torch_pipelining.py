"""`torch.distributed.pipelining` over gloo, two ranks on this machine: the field's own pipeline.

The same model as `_one_process`, cut in half, with the same optimizer on each rank. Gradients are
accumulated by autograd in float32. Each rank is a helper (see `_helpers`): a line given to both is
one optimizer step.

    for rank in 0 1; do
      echo '{}' | python benchmarks/_torch_pipelining.py --rank $rank --store /tmp/store &
    done; wait
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _helpers import serve_lines
from _plain_model import Batches, Half, add_options, build, loss_sum, num_parameters
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from peer.launch import keep_freed_memory

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser, microbatches=16)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", required=True, help="a file that does not exist yet")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    rank = options.rank
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a peer does
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=options.timeout_s),
    )
    cuts = (0, options.layers // 2, options.layers)
    whole = build(options)
    half = Half(whole, cuts[rank], cuts[rank + 1])
    optimizer = torch.optim.AdamW(half.parameters(), lr=options.lr, fused=options.fused or None)
    batches = Batches(options)
    tokens_per_microbatch = options.microbatch_size * options.sequence

    def schedule(num_microbatches: int) -> Schedule1F1B | ScheduleGPipe:
        kind = Schedule1F1B if options.schedule == "1f1b" else ScheduleGPipe
        divisor = num_microbatches * tokens_per_microbatch
        return kind(
            PipelineStage(half, rank, RANKS, torch.device("cpu")),
            num_microbatches,
            loss_fn=lambda logits, targets: loss_sum(logits, targets) / divisor,
            scale_grads=False,
        )

    def step(pipeline: Schedule1F1B | ScheduleGPipe, num_microbatches: int) -> float:
        inputs, targets = batches.draw(num_microbatches * options.microbatch_size)
        losses: list[torch.Tensor] = []
        if rank == 0:
            pipeline.step(inputs)
        else:
            pipeline.step(target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return float(sum(loss.item() for loss in losses))

    pipeline = schedule(options.microbatches)
    if options.warmup:  # its first step exchanges the shapes of the activations
        step(pipeline, options.microbatches)

    def answer(_: Mapping[str, Any]) -> dict[str, Any]:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        loss = step(pipeline, options.microbatches)
        dist.barrier()
        seconds = time.perf_counter() - start
        return {
            "program": "torch_pipelining",
            "schedule": options.schedule,
            "tokens_per_s": options.microbatches * tokens_per_microbatch / seconds,
            "seconds": seconds,
            "cpu_s": (time.process_time() - cpu) / options.microbatches,
            "loss": loss,
            "accumulate": "float32",
            "parameters": num_parameters(whole),
        }

    serve_lines(answer)


if __name__ == "__main__":
    main()
