"""Codecs on a GPU: the bytes and the values of the CPU."""

from __future__ import annotations

import pytest
import torch

from swarm.wire.blocks import dequantize, quantize
from swarm.wire.codecs import codec_names, decode, encode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("seed", [None, 2**63 + 5])
def test_cpu_and_gpu_write_the_same_bytes(bits: int, seed: int | None) -> None:
    draw = torch.Generator().manual_seed(bits)
    values = torch.randn(64 * 1_000_000 + 13, generator=draw)
    values[:6400] *= 1e-38
    values[70], values[200] = float("nan"), float("inf")
    here = quantize(values, bits, seed)
    there = quantize(values.cuda(), bits, seed)
    assert torch.equal(here, there.cpu())
    back = dequantize(there, values.numel(), bits).cpu().view(torch.int32)
    finite = ~dequantize(here, values.numel(), bits).isnan()  # NaN has many bit patterns
    expected = dequantize(here, values.numel(), bits).view(torch.int32)
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
