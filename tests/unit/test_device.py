"""Where tensors land that come and go: for a GPU in pinned memory, from the device to the frame.

What pinned memory is good for waits for a GPU: `tests/gpu/test_device_cuda.py`.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer import run_peer
from peer.run_peer import PeerOptions, PeerProcess
from swarm import device
from swarm.device import Downloader, allocator
from swarm.net.channel import Channel, Message, Method, no_tensors
from swarm.net.links import Links
from swarm.net.memory import MemoryNetwork
from swarm.wire.codecs import allocate_bytes, decode, encode, pack

LINK: Any = SimpleNamespace(run_id="0" * 32, addresses=(), by_peer={})


@pytest.mark.parametrize(
    ("name", "pinned"), [("cuda:0", True), ("cuda", True), ("cpu", False)], ids=str
)
def test_memory_for_a_gpu_is_pinned(
    name: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def without_a_gpu(size: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", without_a_gpu)
    memory = allocator(name)(64)
    assert (memory.dtype, memory.shape) == (torch.uint8, (64,))
    allocator(name)(0)
    assert asked == [pinned, False], "there is no pinned memory of no bytes"


@pytest.mark.parametrize(
    ("name", "num_bytes", "pinned"),
    [
        ("cuda:0", 64, True),
        ("cuda:0", 0, False),
        ("cuda:0", (1 << 30) + 8, False),
        ("cpu", 64, False),
    ],
)
def test_what_leaves_a_gpu_is_pinned_unless_the_machine_would_miss_the_memory(
    name: str, num_bytes: int, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object, bool]] = []

    def empty(shape: object, *, dtype: object, pin_memory: bool = False) -> None:
        asked.append((shape, dtype, pin_memory))

    monkeypatch.setattr(torch, "empty", empty)
    device.host_memory((num_bytes // 8,), torch.float64, torch.device(name))
    assert asked == [((num_bytes // 8,), torch.float64, pinned)]


def test_a_machine_with_no_memory_to_pin_has_other(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refused(shape: tuple[int, ...], *, pin_memory: bool = False, **options: Any) -> Any:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", refused)
    memory = device.host_memory((3, 4), torch.float64, torch.device("cuda:0"))
    assert (memory.shape, memory.dtype) == ((3, 4), torch.float64)


def test_what_a_cpu_sends_is_there_at_once_and_copied_nowhere() -> None:
    values = torch.arange(6.0).view(2, 3)
    departures = Downloader(torch.device("cpu")).begin([pack(values, "float32")], [values.sum()])
    assert departures.ready is None
    assert departures.numbers() == [15.0]
    (wire,) = departures.wires()
    assert torch.equal(decode(wire), values)
    values[0, 0] = 7.0
    assert torch.equal(decode(wire), values)
    assert departures.then(lambda: 5) == 5


@pytest.mark.parametrize(("name", "pinned"), [("cuda:0", True), ("cpu", False)], ids=str)
def test_what_a_peer_receives_lands_where_its_device_wants_it(
    name: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the links that a peer opens for its device, of the process and of a further replica."""
    landed: list[tuple[int, bool]] = []

    def allocate(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
        landed.append((num_bytes, pinned))
        return allocate_bytes(num_bytes)

    async def give(channel: Channel, message: Message) -> Message:
        return Message({}, [encode(torch.ones(3), "float32")])

    async def main() -> None:
        network = MemoryNetwork()
        other = Links(network.transport("other"), LINK.run_id, "other#1",
                      {"give": Method(give, no_tensors)})  # fmt: skip
        other.serve()

        class Peer(PeerProcess):
            async def _open(self) -> Any:
                transport: Any = network.transport("peer")
                transport.lost = asyncio.Event()
                return SimpleNamespace(transport=transport, close=other.aclose)

            async def _fetch_config(self, links: Links) -> Any:
                for each in (links, links.another_life("peer#2", {})):
                    channel = await each.channel("other#1")
                    await channel.call("give", {}, check_reply=lambda header, metas: None)
                    await each.aclose()
                raise EOFError("that was all")

        identity: Any = SimpleNamespace(peer_id="peer", release=lambda: None)
        with pytest.raises(EOFError):
            await Peer(LINK, identity, PeerOptions(), say=lambda line: None).run()

    monkeypatch.setattr(device, "allocate_bytes", allocate)
    monkeypatch.setattr(run_peer, "choose_device", lambda wanted: name)
    monkeypatch.setattr(run_peer, "be_exact", lambda device, threads: None)
    monkeypatch.setattr(run_peer, "keep_freed_memory", lambda: None)
    asyncio.run(main())
    assert landed == [(12, pinned)] * 2
