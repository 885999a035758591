"""The portable optimizers on a GPU, and what else a mixed swarm compares: the bits of the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from swarm.ahead import Ahead
from swarm.config import OptimizerSection
from swarm.delayed_state import State, new_state
from swarm.model.layout import ParameterLayout, squared_norm_of
from swarm.optim import SGD, AdamW, numerics_fingerprint
from tests.protocol.tiny import shared_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SETTINGS = [
    each
    for nesterov in (False, True)
    for each in (
        OptimizerSection(name="adamw", nesterov=nesterov),
        OptimizerSection(name="sgd", momentum=0.9, nesterov=nesterov),
    )
]
all_settings = pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda each: each.name + "-nesterov" * each.nesterov
)
KINDS: dict[str, type[AdamW] | type[SGD]] = {"adamw": AdamW, "sgd": SGD}


@all_settings
def test_cpu_and_gpu_hold_the_same_bits(settings: OptimizerSection) -> None:
    num, num_decayed = 100_003, 70_000
    torch.manual_seed(0)
    here = torch.randn(num)
    there = here.cuda()
    on_cpu = KINDS[settings.name](num, num_decayed, settings)
    on_gpu = KINDS[settings.name](num, num_decayed, settings, "cuda")
    for step in range(1, 21):
        tiny = step % 5 == 0  # so that squares are subnormal
        gradient = torch.randn(num) * (1e-21 if tiny else 10.0 ** (step % 9 - 6))
        on_cpu.step(here, gradient, lr=0.01 / step, scale=0.37, step=step)
        on_gpu.step(there, gradient.cuda(), lr=0.01 / step, scale=0.37, step=step)
    assert torch.equal(here, there.cpu())
    for name, tensor in on_cpu.state().items():
        assert torch.equal(tensor, on_gpu.state()[name].cpu()), name


@all_settings
def test_a_portable_optimizer_has_one_fingerprint(settings: OptimizerSection) -> None:
    assert numerics_fingerprint(settings) == numerics_fingerprint(settings, "cuda")


def twins(settings: OptimizerSection, ahead: Ahead) -> list[State]:
    """A stage's state on the CPU and on the GPU, with the same first weights."""
    pipeline = shared_pipeline(1)
    here, there = (
        new_state(partial(pipeline.build_stage, 0, on), settings, ahead=ahead, device=on)
        for on in ("cpu", "cuda:0")
    )
    there.load({name: each.cuda() for name, each in here.tensors().items()}, here.updates)
    return [here, there]


@pytest.mark.parametrize("ahead", [Ahead(), Ahead(1, 4)], ids=["exact", "delayed"])
@all_settings
def test_twins_on_unlike_devices_stay_equal(settings: OptimizerSection, ahead: Ahead) -> None:
    """What the leader compares after each commit (I5), and the parameters that what waits for a
    commit is computed with."""
    here, there = twins(settings, ahead)
    draw = torch.Generator().manual_seed(2)
    for _ in range(5):
        gradient = torch.randn(here.layout.total, generator=draw)
        here.apply(gradient, lr=0.1, scale=0.37)
        there.apply(gradient.cuda(), lr=0.1, scale=0.37)
        assert here.fingerprint() == there.fingerprint()
        assert here.tensor_hashes() == there.tensor_hashes()
        waiting = there.waiting(1).parameters
        assert waiting.device.type == "cuda"
        assert torch.equal(here.waiting(1).parameters, waiting.cpu())
        assert torch.equal(waiting, there.parameters) == (not ahead.microbatches)


@pytest.mark.parametrize("num", [5, 1 << 16, 3_000_001, 50_000_000])
def test_norms_have_the_same_bits_here_and_there(num: int) -> None:
    """The leader compares them between replicas on whatever devices."""
    values = torch.randn(num, generator=torch.Generator().manual_seed(3))
    assert squared_norm_of(values) == squared_norm_of(values.cuda())


def test_norms_of_many_parameters_have_the_same_bits_here_and_there() -> None:
    layout = ParameterLayout.from_shapes(
        {f"p{i}": (n,) for i, n in enumerate([3, 70_000, 1, 1 << 17, 65, 9_000_001, 64])}
    )
    flat = torch.randn(layout.total, generator=torch.Generator().manual_seed(4))
    assert layout.squared_norms(flat) == layout.squared_norms(flat.cuda())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_add_up_to_the_same_bits_here_and_there(dtype: torch.dtype) -> None:
    def added(device: str) -> torch.Tensor:
        module = nn.ParameterDict(
            {
                "frozen": nn.Parameter(torch.ones(5, 3), requires_grad=False),
                "wide": nn.Parameter(torch.ones(70, 1001)),
                "unreached": nn.Parameter(torch.ones(7)),
                "bias": nn.Parameter(torch.ones(3)),
                "empty": nn.Parameter(torch.ones(0)),
            }
        ).to(device)
        layout = ParameterLayout.of(module)
        accumulator = torch.zeros(layout.total, dtype=dtype, device=device)
        draw = torch.Generator().manual_seed(5)
        for _ in range(3):
            for name in ("wide", "bias", "empty"):
                shape = module[name].shape
                module[name].grad = torch.randn(shape, generator=draw).to(device)
            layout.grad_into(module, accumulator)
            assert all(parameter.grad is None for parameter in module.parameters())
        return accumulator.cpu()

    assert torch.equal(added("cpu"), added("cuda:0"))
