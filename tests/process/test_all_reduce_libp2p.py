"""The group all-reduce over real libp2p streams: right sums, and a daemon killed in the middle."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm.averaging import RoundFailedError
from swarm.net.libp2p import Libp2pTransport
from tests.conformance.networks import reducers_of


@pytest.mark.parametrize("delay_s", [0.02, 0.06])
def test_three_members_then_one_is_lost(delay_s: float) -> None:
    async def main() -> None:
        transports = await asyncio.gather(*(Libp2pTransport.create() for _ in range(3)))
        try:
            by_peer = {t.peer_id: t for t in transports}
            reducers = reducers_of(transports)
            members = list(reducers)

            async def everyone(round_id: str, who: list[str], num: int) -> list[object]:
                local = {peer: torch.randn(num, dtype=torch.float64) for peer in who}
                out = {peer: torch.empty(num) for peer in who}
                expected = torch.zeros(num, dtype=torch.float64)
                for peer in who:
                    expected = expected + local[peer]
                results = await asyncio.gather(
                    *(reducers[p].all_reduce(round_id, who, local[p], out[p]) for p in who),
                    return_exceptions=True,
                )
                for peer, result in zip(who, results, strict=True):
                    if isinstance(result, tuple):
                        assert torch.equal(out[peer], expected.float())
                return results

            results = await everyone("1", members, 300_000)
            assert [type(result) for result in results] == [tuple] * 3
            lost = members[1]
            rest = [members[0], members[2]]
            task = asyncio.ensure_future(everyone("2", members, 6_000_000))
            await asyncio.sleep(delay_s)
            by_peer[lost].daemon._process.kill()
            async with asyncio.timeout(10):
                by_member = dict(zip(members, await task, strict=True))
            for peer in rest:
                error = by_member[peer]
                assert isinstance(error, RoundFailedError)
                assert error.peer == lost, error
            for number, num in (("3", 300_000), ("4", 1_000)):  # in parts, and directly
                results = await everyone(number, rest, num)
                assert [type(result) for result in results] == [tuple] * 2
        finally:
            await asyncio.gather(*(t.close() for t in transports))

    asyncio.run(main())
