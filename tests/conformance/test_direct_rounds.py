"""A direct averaging round over every `Transport`: who is done first keeps its stream until the
other has said that it has all, for libp2p may lose one that is ended sooner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarm.averaging import GroupAllReduce
from swarm.net.transport import Stream, Transport
from tests.conformance.networks import libp2p_transports, memory_transports

SOON_S = 20.0
ROUNDS = 20


class Watched:
    """A transport whose dialled streams say what had come back on them when they were closed."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.peer_id, self.serve = transport.peer_id, transport.serve
        self.connections = transport.connections
        self.back: asyncio.Queue[int] = asyncio.Queue()

    async def dial(self, *arguments: Any, connection: int) -> Stream:
        stream = await self._transport.dial(*arguments, connection=connection)
        close = stream.close

        async def noted() -> None:
            self.back.put_nowait(stream.received_bytes)
            await close()

        stream.close = noted  # type: ignore[method-assign]
        return stream


@pytest.mark.parametrize("make", [memory_transports, libp2p_transports])
def test_a_stream_is_kept_until_the_other_has_all(make: Any) -> None:
    async def check() -> None:
        async with asyncio.timeout(60.0), make(2) as peers, asyncio.timeout(SOON_S):
            addresses = {peer.peer_id: peer.addresses for peer in peers}
            watched: list[Any] = [Watched(peer) for peer in peers]
            reducers = [GroupAllReduce(each, addresses=addresses.__getitem__) for each in watched]
            for each in reducers:
                each.serve()
            members = sorted(addresses)
            for number in range(ROUNDS):  # by turns one has waited for the other
                outs = [torch.zeros(8), torch.zeros(8)]
                rounds = []
                for n in (0, 1) if number % 2 else (1, 0):
                    ones = torch.ones(8)
                    work = reducers[n].all_reduce(str(number), members, ones, outs[n])
                    rounds.append(asyncio.create_task(work))
                    await asyncio.sleep(0)
                await asyncio.gather(*rounds)
                assert all(torch.equal(out, torch.full((8,), 2.0)) for out in outs)
                assert [await each.back.get() for each in watched] == [1, 1]
            for each in reducers:
                await each.aclose()

    asyncio.run(check())
