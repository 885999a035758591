"""Received tensors on their way to a GPU: in pinned memory, on a stream of their own, and neither
early nor late for the kernels that need them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm import device as device_module
from swarm.device import Arrivals, Landing, Uploader, allocator
from swarm.wire.codecs import WireTensor, bytes_view, decode, encode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda:0"
NUM = 1 << 20
LONG, SHORT = 1_000_000_000, 20_000_000  # cycles: about half a second, and 10 ms
CODECS = ["float32", "bfloat16", "int8", "int4", "float32+zstd"]
COPIED = [codec for codec in CODECS if "zstd" not in codec]  # as soon as they arrive


def received(values: Tensor, codec: str) -> WireTensor:
    """As a frame of a peer on the GPU leaves it."""
    sent = encode(values, codec)
    memory = allocator(DEVICE)(sent.meta.nbytes)
    bytes_view(memory)[:] = sent.data
    return WireTensor(sent.meta, bytes_view(memory), memory)


def busy(cycles: int) -> None:
    """A kernel of the present stream that takes so long."""
    torch.cuda._sleep(cycles)


def begin_behind(uploader: Uploader, wire: WireTensor) -> Arrivals:
    """With the copy's stream at work, so that the copy is late."""
    with torch.cuda.stream(uploader.stream):
        busy(SHORT)
    return uploader.begin([wire])


@pytest.fixture
def uploader() -> Uploader:
    """One whose stream has memory already: to get more would wait for all kernels."""
    made = Uploader(torch.device(DEVICE))
    for codec in CODECS:
        for _ in range(2):
            made.begin([received(torch.ones(NUM), codec)])
    torch.cuda.synchronize()
    return made


def test_received_bytes_are_in_pinned_memory() -> None:
    memory = received(torch.ones(3), "float32").memory
    assert memory is not None
    assert memory.is_pinned()
    assert not allocator("cpu")(12).is_pinned()


@pytest.mark.parametrize("codec", COPIED)
def test_a_copy_goes_on_beside_the_kernels_of_another_microbatch(
    uploader: Uploader, codec: str
) -> None:
    values = torch.randn(NUM, generator=torch.Generator().manual_seed(1))
    wire, present = received(values, codec), torch.cuda.current_stream()
    assert uploader.stream is not None
    assert uploader.stream != present
    busy(LONG)
    arrivals = uploader.begin([wire])
    uploader.stream.synchronize()
    assert not present.query(), "it has waited for the kernel"
    (there,) = arrivals.tensors()
    assert there.device == torch.device(DEVICE)
    assert torch.equal(there.cpu(), decode(encode(values, codec)))


@pytest.mark.parametrize("codec", CODECS)
def test_kernels_wait_for_a_copy_that_is_late(uploader: Uploader, codec: str) -> None:
    """Or they read what lay there before: every round brings another number."""
    wanted = [2.0**n for n in range(10)]
    found = torch.zeros(len(wanted), device=DEVICE)
    for n, number in enumerate(wanted):
        wire = received(torch.full((NUM,), number), codec)
        (there,) = begin_behind(uploader, wire).tensors()
        found[n] = there.mean()
    assert found.tolist() == pytest.approx(wanted, rel=0.1)


def test_memory_is_not_given_away_while_a_kernel_has_yet_to_read_it(uploader: Uploader) -> None:
    read = torch.full((NUM,), 7.0, device=DEVICE)
    first, second = (received(torch.full((NUM,), each), "float32") for each in (0.0, 1.0))
    (there,) = uploader.begin([first]).tensors()
    busy(LONG)
    read.copy_(there)
    del there  # nobody but that kernel needs it
    kept = uploader.begin([second])
    assert not read.any()
    assert all(each.all() for each in kept.tensors())


def test_a_tensor_lands_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "PIECE", NUM // 8)
    expected = torch.randn(NUM + 3)
    leaving = expected.cuda()
    busy(SHORT)
    leaving.mul_(2)  # after which it is what is to leave
    landing = Landing(leaving)
    del leaving
    later = torch.zeros(NUM + 3, device=DEVICE)  # must not take its place before it has left
    for there in (1, NUM // 3, NUM + 3):
        landing.wait(there)
        assert torch.equal(landing.tensor[:there], 2 * expected[:there])
    landing.wait(0)
    assert not later.any()
