"""What a process says of itself in the directory, at any number of addresses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from peer.launch import ANNOUNCEMENT_TTL_S, Node
from swarm.net.link import MAX_ADDRESSES, farthest_first, format_link, parse_link
from swarm.net.memory_directory import MemoryDirectory, Shared
from swarm.sim.virtual_time import run

PEER = "12D3KooWCiirNx5T6fYSJhXZwZzKQVSvvFrAB6M5VGcZzSQZpcvs"
PUBLIC = f"/ip6/2600::1/tcp/4001/p2p/{PEER}"
MANY = [*(f"/ip4/10.0.0.{number}/tcp/4001/p2p/{PEER}" for number in range(250)), PUBLIC]


def announced(addresses: list[str], **facts: object) -> dict[str, dict[str, object]]:
    """Found afterwards."""

    async def main() -> dict[str, dict[str, object]]:
        directory: Any = MemoryDirectory(Shared(), PEER)
        transport: Any = SimpleNamespace(addresses=tuple(addresses))
        await Node(SimpleNamespace(), transport, directory).announce("key", **facts)  # type: ignore[arg-type]
        found: dict[str, dict[str, object]] = await directory.lookup("key")
        await asyncio.sleep(ANNOUNCEMENT_TTL_S)
        assert not await directory.lookup("key")
        return found

    return run(main())


def test_of_many_addresses_those_that_reach_farthest_are_told() -> None:
    told = announced(MANY, stage=1)[PEER]
    assert told["stage"] == 1
    assert told["addresses"] == [PUBLIC, *MANY[: MAX_ADDRESSES - 1]]


def test_who_cannot_say_all_of_it_goes_on() -> None:
    assert announced([PUBLIC], name="x" * 20_000) == {}


def test_a_link_names_as_many_as_can_be_read() -> None:
    assert parse_link(format_link("0" * 32, farthest_first(MANY))).addresses[0] == PUBLIC
