"""One stage of the benchmark's pipeline computing without any network: its own best rate.

A helper (see `_helpers`): `{"seconds": s}` runs forward and backward of one microbatch after the
other for that long, with the code that a replica runs on its compute thread, and answers how many
per second. Started twice, the two stages compute at the same time and share the machine as they do
in the swarm. `{"accumulate": "float64"}` picks the accumulator.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import torch
from _helpers import serve_lines
from _pipeline_config import STAGES, pipeline_config

from peer.launch import keep_freed_memory
from swarm.model import build_pipeline
from swarm.stage_state import StageState


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--wire", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    config = pipeline_config(options, "float32")
    pipeline = build_pipeline(config)
    stage, last = options.stage, options.stage == STAGES - 1
    states = {
        accumulate: StageState(pipeline.build_stage(stage), config.optimizer, accumulate=accumulate)
        for accumulate in ("float32", "float64")
    }
    generator = torch.Generator().manual_seed(stage)
    batch = {
        name: torch.randint(0, 250, spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for name, spec in pipeline.batch_spec.items()
    }
    before = pipeline.boundary(stage - 1) if stage else ()
    after = () if last else pipeline.boundary(stage)
    inputs = [torch.randn(spec.shape, generator=generator) for spec in before]
    gradients = [1e-4 * torch.randn(spec.shape, generator=generator) for spec in after]
    divisor = float(options.microbatches * options.microbatch_size * options.sequence)

    def one(state: StageState, index: int) -> None:
        graph = state.forward(0, index, inputs, batch, divisor if last else None)
        state.backward(graph, gradients or None, into=state)

    def answer(order: Mapping[str, Any]) -> dict[str, Any]:
        state = states[order.get("accumulate", "float32")]
        start = now = time.perf_counter()
        cpu = time.process_time()
        count = 0
        while now - start < order["seconds"]:
            one(state, count)
            count += 1
            now = time.perf_counter()
        return {
            "stage": stage,
            "per_s": count / (now - start),
            "cpu_s": (time.process_time() - cpu) / count,
        }

    for state in states.values():
        one(state, 0)
    serve_lines(answer)


if __name__ == "__main__":
    main()
