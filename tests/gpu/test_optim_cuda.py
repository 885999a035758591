"""The portable optimizers on a GPU: the same bits as on the CPU."""

from __future__ import annotations

import pytest
import torch

from swarm.config import OptimizerSection
from swarm.optim import SGD, AdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


SETTINGS = OptimizerSection(name="sgd", momentum=0.9, nesterov=True)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_cpu_and_gpu_hold_the_same_bits(kind: type[AdamW] | type[SGD]) -> None:
    num, num_decayed = 100_003, 70_000
    torch.manual_seed(0)
    here = torch.randn(num)
    there = here.cuda()
    on_cpu = kind(num, num_decayed, SETTINGS)
    on_gpu = kind(num, num_decayed, SETTINGS, "cuda")
    for step in range(1, 21):
        gradient = torch.randn(num) * 10.0 ** (step % 9 - 6)
        on_cpu.step(here, gradient, lr=0.01 / step, scale=0.37, step=step)
        on_gpu.step(there, gradient.cuda(), lr=0.01 / step, scale=0.37, step=step)
    assert torch.equal(here, there.cpu())
    for name, tensor in on_cpu.state().items():
        assert torch.equal(tensor, on_gpu.state()[name].cpu()), name
