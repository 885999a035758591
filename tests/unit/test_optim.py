"""Portable optimizers: as torch's, and with the same bits on every kind of CPU."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from swarm.errors import ConfigError, WireError
from swarm.model import ParameterLayout
from swarm.optim import SGD, AdamW, clip_scale, make_optimizer, numerics_fingerprint, power


@dataclass(frozen=True)
class Settings:
    name: str = "AdamW"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False


class Layout:
    names = ("w", "v", "bias")
    shapes = ((30, 50), (7, 3), (50,))
    offsets = (0, 1504, 1536)
    total = 1600
    num_decayed = 1536


NADAM = Settings(nesterov=True)
SGD_KINDS = [
    Settings("SGD"),
    Settings("SGD", momentum=0.9),
    Settings("SGD", momentum=0.9, nesterov=True),
    Settings("SGD", weight_decay=0.0, momentum=0.5),
]


def run(settings: Settings, steps: int = 5, num: int = 3000, chunk: int = 1 << 16) -> str:
    generator = torch.Generator().manual_seed(3)
    kind = {"AdamW": AdamW, "SGD": SGD}[settings.name]
    optimizer = kind(num, 2100, settings, chunk_elements=chunk)
    # integers, because random floats differ between CPU capabilities themselves
    draw = [
        torch.randint(-(2**20), 2**20, (num,), generator=generator).float() * 2.0**-20
        for _ in range(steps + 1)
    ]
    parameters = draw[0].clone()
    for step in range(1, steps + 1):
        optimizer.step(parameters, draw[step], lr=0.003 / step, scale=0.37, step=step)
    digest = hashlib.sha256(parameters.numpy().tobytes())
    for tensor in optimizer.state().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("settings", [Settings(), Settings(weight_decay=0.0), NADAM, *SGD_KINDS])
def test_agrees_with_torch(settings: Settings) -> None:
    torch.manual_seed(0)
    mine = torch.randn(Layout.total)
    reference = [mine[:1536].clone(), mine[1536:].clone()]
    groups = [
        {"params": [reference[0]], "weight_decay": settings.weight_decay},
        {"params": [reference[1]], "weight_decay": 0.0},
    ]
    theirs: torch.optim.Optimizer
    if settings == NADAM:  # its momentum grows to beta1 so fast that it is constant
        theirs = torch.optim.NAdam(
            groups, lr=0.01, betas=settings.betas, momentum_decay=1e6, decoupled_weight_decay=True
        )
    elif settings.name == "AdamW":
        theirs = torch.optim.AdamW(groups, lr=0.01, betas=settings.betas, eps=settings.eps)
    else:
        theirs = torch.optim.SGD(
            groups, lr=0.01, momentum=settings.momentum, nesterov=settings.nesterov
        )
    optimizer = make_optimizer(settings, Layout())
    for step in range(1, 51):
        gradient = torch.randn(Layout.total)
        kept = gradient.clone()
        reference[0].grad, reference[1].grad = gradient[:1536] * 0.5, gradient[1536:] * 0.5
        for group in theirs.param_groups:
            group["lr"] = 0.01 / step
        theirs.step()
        optimizer.step(mine, gradient, lr=0.01 / step, scale=0.5, step=step)
        assert torch.equal(gradient, kept)
    assert torch.allclose(mine, torch.cat(reference), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("settings", [Settings(), NADAM, *SGD_KINDS])
def test_chunks_and_threads_do_not_change_bits(settings: Settings) -> None:
    expected = run(settings)
    assert {run(settings, chunk=chunk) for chunk in (7, 256, 1000)} == {expected}
    before = torch.get_num_threads()
    hashes = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            hashes.add(run(settings, steps=2, num=200_000))
    finally:
        torch.set_num_threads(before)
    assert len(hashes) == 1


def test_same_bits_on_every_cpu_capability() -> None:
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]);"
        "from test_optim import NADAM, SGD_KINDS, Settings, run;"
        "print(torch.backends.cpu.get_cpu_capability(), file=sys.stderr);"
        "print([run(s) for s in [Settings(), NADAM, *SGD_KINDS]])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, os.path.dirname(__file__)],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        for capability in ("default", "avx2")
    ]
    mine = torch.backends.cpu.get_cpu_capability()
    assert runs[0].stderr != f"{mine}\n" or mine == "DEFAULT", "the variable does nothing"
    expected = f"{[run(s) for s in [Settings(), NADAM, *SGD_KINDS]]}\n"
    assert {each.stdout for each in runs} == {expected}


@pytest.mark.parametrize(
    "settings",
    [Settings(), SGD_KINDS[2], *(Settings(n) for n in ("RAdam", "Adagrad", "Rprop", "Adafactor"))],
)
def test_state_moves_to_another_replica(settings: Settings) -> None:
    torch.manual_seed(1)
    first, second = make_optimizer(settings, Layout()), make_optimizer(settings, Layout())
    mine = torch.randn(Layout.total)
    names = {name: tensor.shape for name, tensor in first.state().items()}
    second.load_state(first.state())
    for step in range(1, 9):
        if step in (1, 4):
            second.load_state({k: v.clone() for k, v in first.state().items()})
            other = mine.clone()
        gradient = torch.randn(Layout.total)
        first.step(mine, gradient, lr=0.01, scale=1.0, step=step)
        second.step(other, gradient, lr=0.01, scale=1.0, step=step)
    assert torch.equal(mine, other)
    assert names == {name: tensor.shape for name, tensor in first.state().items()}
    assert all(t.dtype == torch.float32 and t.dim() == 1 for t in first.state().values())
    with pytest.raises(WireError):
        first.load_state({"other": torch.zeros(3)})
    wrong = {name: torch.zeros(5) for name in names}
    if wrong:
        with pytest.raises(WireError):
            first.load_state(wrong)


@pytest.mark.parametrize("name", ["RAdam", "Adagrad", "RMSprop"])
def test_torch_optimizer_follows_torch_and_spares_biases_the_decay(name: str) -> None:
    torch.manual_seed(2)
    settings = Settings(name, weight_decay=0.5, eps=1e-4, momentum=0.3)
    options = {
        "RAdam": {"betas": settings.betas},
        "RMSprop": {"momentum": settings.momentum},
    }.get(name, {})
    mine = torch.randn(Layout.total)
    theirs = [
        mine[start : start + math.prod(shape)].view(shape).clone()
        for start, shape in zip(Layout.offsets, Layout.shapes, strict=True)
    ]
    groups = [{"params": theirs[:2]}, {"params": theirs[2:], "weight_decay": 0.0}]
    reference = getattr(torch.optim, name)(
        groups, lr=1.0, weight_decay=0.5, eps=settings.eps, foreach=False, **options
    )
    optimizer = make_optimizer(settings, Layout())
    for step in range(1, 11):
        gradient = torch.randn(Layout.total)
        for each, start in zip(theirs, Layout.offsets, strict=True):
            each.grad = (gradient[start : start + each.numel()] * 0.5).view(each.shape)
        for group in reference.param_groups:
            group["lr"] = 0.01 / step
        reference.step()
        optimizer.step(mine, gradient, lr=0.01 / step, scale=0.5, step=step)
    for each, start in zip(theirs, Layout.offsets, strict=True):
        ours = mine[start : start + each.numel()].view(each.shape)
        assert torch.allclose(ours, each, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["ASGD", "RAdam", "Rprop", "Adafactor", "Adadelta", "NAdam"])
def test_what_is_frozen_stays_as_it_is(name: str) -> None:
    """It has no gradient, lies behind what is decayed, and no optimizer may shrink it."""
    module = torch.nn.Linear(4, 4)
    module.bias.requires_grad_(False)
    layout = ParameterLayout.of(module)
    flat = torch.ones(layout.total)
    gradient = torch.zeros(layout.total)
    layout.slices(gradient)["weight"].fill_(0.5)
    optimizer = make_optimizer(Settings(name, weight_decay=0.1), layout)
    for step in range(1, 4):
        optimizer.step(flat, gradient, lr=0.1, scale=1.0, step=step)
    assert torch.equal(layout.slices(flat)["bias"], torch.ones(4))
    assert not torch.equal(layout.slices(flat)["weight"], torch.ones(4, 4))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_a_stage_may_have_no_parameters(name: str) -> None:
    optimizer, nothing = (
        make_optimizer(Settings(name), ParameterLayout.of(torch.nn.Tanh())),
        torch.zeros(0),
    )
    optimizer.step(nothing, nothing, lr=0.1, scale=1.0, step=1)
    optimizer.load_state(optimizer.state())
    assert sum(each.numel() for each in optimizer.state().values()) == 0


@pytest.mark.parametrize("name", ["Nope", "Optimizer", "lr_scheduler", "LBFGS", "SparseAdam"])
def test_unusable_names_are_config_errors(name: str) -> None:
    with pytest.raises(ConfigError):
        make_optimizer(Settings(name), Layout())


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ConfigError):
        make_optimizer(Settings("SGD", nesterov=True), Layout())


def test_fingerprint_tells_settings_apart_and_repeats() -> None:
    settings = Settings("RAdam")
    assert numerics_fingerprint(settings) == numerics_fingerprint(settings)
    assert numerics_fingerprint(settings) != numerics_fingerprint(replace(settings, eps=1e-3))


def test_clip_scale_and_power() -> None:
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(1.0, 1.0) == 1.0
    assert clip_scale(4.0, 1.0) == 0.25
    assert clip_scale(4.0, 0.0) == 1.0
    assert clip_scale(float("inf"), 1.0) == 1.0
    assert power(0.9, 0) == 1.0
    assert power(0.9, 1000) == pytest.approx(0.9**1000, rel=1e-13)
