"""`torch.distributed.pipelining` 1F1B and DDP over gloo, paced: what people use, in the same lab.

3 stages x 2 pipelines, one rank per host of the lab: rank = pipeline * 3 + stage. A stage waits for
as long as a forward or backward takes, passes bfloat16 of the large model's shape on, and DDP
averages its parameters at the end of the step. A line given to all ranks is one step (`_helpers`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from _helpers import serve_lines
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

STAGES, PIPELINES = 3, 2
LIMIT = timedelta(hours=1)


class _Pace(torch.autograd.Function):
    """Takes its time in both directions: also in a first stage, whose `x` needs no gradient, since
    `always` does."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, always: Tensor, forward_s: float, backward_s: float
    ) -> Tensor:
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        time.sleep(context.backward_s)
        return gradients[0], None, None, None


class _Stage(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.weight = nn.Parameter(torch.ones(max(options.parameters, 1)))
        # No parameter: DDP need not wait for the pace of the last backward to average `weight`.
        self.always = torch.zeros((), requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        options = self.options
        passed: Tensor = _Pace.apply(x, self.always, options.forward_s, options.backward_s)
        return passed * self.weight[0].to(passed.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--master", required=True, help="tcp://address:port")
    parser.add_argument("--interface", required=True)
    parser.add_argument("--microbatches", type=int, required=True, help="of one pipeline")
    parser.add_argument("--microbatch-size", type=int, required=True)
    parser.add_argument("--sequence", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--parameters", type=int, required=True, help="of a stage")
    parser.add_argument("--forward-s", type=float, required=True)
    parser.add_argument("--backward-s", type=float, required=True)
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = options.rank
    dist.init_process_group(
        "gloo", init_method=options.master, rank=rank, world_size=STAGES * PIPELINES, timeout=LIMIT
    )
    stage = rank % STAGES
    mine = None
    for pipeline in range(PIPELINES):  # every rank takes part in making every group
        group = dist.new_group([pipeline * STAGES + n for n in range(STAGES)], timeout=LIMIT)
        mine = group if pipeline == rank // STAGES else mine
    twins = None
    for each in range(STAGES):
        group = dist.new_group([p * STAGES + each for p in range(PIPELINES)], timeout=LIMIT)
        twins = group if each == stage else twins
    module = DistributedDataParallel(_Stage(options), process_group=twins)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-9)
    shape = (options.microbatch_size, options.sequence, options.width)
    part = PipelineStage(module, stage, STAGES, torch.device("cpu"), group=mine)
    schedule = Schedule1F1B(
        part, options.microbatches, loss_fn=lambda y, target: y.float().square().sum()
    )
    whole = (options.microbatches * options.microbatch_size, *shape[1:])
    x = torch.ones(whole, dtype=torch.bfloat16)
    target = torch.zeros(whole[0])

    def answer(_: Mapping[str, Any]) -> dict[str, Any]:
        dist.barrier()
        began = time.perf_counter()
        if stage == 0:
            schedule.step(x)
        elif stage == STAGES - 1:
            schedule.step(target=target)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        dist.barrier()
        return {"seconds": time.perf_counter() - began}

    print("{}", flush=True)
    serve_lines(answer)


if __name__ == "__main__":
    main()
