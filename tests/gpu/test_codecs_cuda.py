"""Codecs on a GPU: the bytes and the values of the CPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from swarm.wire import blocks, nibbles
from swarm.wire.codecs import codec_names, decode, encode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("module", [blocks, nibbles])
@pytest.mark.parametrize("shape", [(64 * 1_000_000 + 13,), (500_000, 128), (100_000, 20), (9, 8)])
@pytest.mark.parametrize("seed", [None, 2**63 + 5])
def test_cpu_and_gpu_write_the_same_bytes(
    module: ModuleType, shape: tuple[int, ...], seed: int | None
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    flat = values.view(-1)
    flat[-6400:] *= 1e-38
    flat[20], flat[35] = float("nan"), float("inf")
    here = module.quantize(values, seed)
    there = module.quantize(values.cuda(), seed)
    assert torch.equal(here, there.cpu())
    back = module.dequantize(there, shape).cpu().view(torch.int32)
    finite = ~module.dequantize(here, shape).isnan()  # NaN has many bit patterns
    expected = module.dequantize(here, shape).view(torch.int32)
    assert torch.equal(back[finite], expected[finite])


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("shape", [(0,), (3, 1000)])
def test_a_codec_does_on_the_gpu_what_it_does_here(name: str, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    here, there = encode(values, name), encode(values.cuda(), name)
    assert bytes(here.data) == bytes(there.data)
    got = decode(there, "cuda")
    assert got.device.type == "cuda"
    assert torch.equal(got.cpu(), decode(here))
