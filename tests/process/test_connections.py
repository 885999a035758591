"""Several connections to a peer, over real daemons."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import torch

from swarm.averaging import GroupAllReduce
from swarm.errors import StreamClosedError
from swarm.net.identity import load_identity
from swarm.net.lanes import LANE, read_letter
from swarm.net.libp2p import Libp2pTransport
from swarm.net.transport import Stream
from tests.conformance.networks import connected_libp2p_transports

SOON_S = 20.0
ELEMENTS = 1_000_000


async def hold(stream: Stream) -> None:
    await asyncio.Event().wait()


def test_streams_are_spread_over_connections_and_are_all_of_one_peer() -> None:
    async def main() -> None:
        async with asyncio.timeout(60), connected_libp2p_transports(2, 3) as (here, there):
            came: asyncio.Queue[Stream] = asyncio.Queue()

            async def note(stream: Stream) -> None:
                came.put_nowait(stream)
                await hold(stream)

            there.serve("/note/1", note)
            routes = set()
            for number in range(4):  # the fourth is the first connection again
                dialled = await here.dial(
                    there.peer_id, "/note/1", there.addresses, connection=number
                )
                assert dialled.peer == there.peer_id
                await dialled.send([b"x"])
                accepted = await came.get()
                assert accepted.peer == here.peer_id
                assert await accepted.receive_exactly(1) == b"x"
                routes.add(there._streams[accepted].peer)  # type: ignore[index]
            assert len(routes) == here.connections == 3

    asyncio.run(main())


def test_nobody_waits_for_a_connection_that_is_not_there_yet() -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = load_identity(Path(folder) / "identity.key").path
            here = await Libp2pTransport.create(path, connections=2)
        there = await Libp2pTransport.create()
        there.serve("/hold/1", hold)
        try:
            async with asyncio.timeout(SOON_S):
                (lane,) = here.lanes
                first = await here.dial(there.peer_id, "/hold/1", there.addresses, connection=1)
                assert here._streams[first].daemon is here.daemon  # type: ignore[index]
                await lane.connected()
                second = await here.dial(there.peer_id, "/hold/1", there.addresses, connection=1)
                assert here._streams[second].daemon is lane.daemon  # type: ignore[index]
        finally:
            await here.close()
            await there.close()

    asyncio.run(main())


def test_where_a_lanes_daemon_has_died_its_streams_end_and_the_first_connection_is_taken() -> None:
    async def main() -> None:
        async with asyncio.timeout(60), connected_libp2p_transports(2, 2) as (here, there):
            there.serve("/hold/1", hold)
            (lane,) = here.lanes
            stream = await here.dial(there.peer_id, "/hold/1", there.addresses, connection=1)
            assert lane.daemon._process is not None
            lane.daemon._process.kill()
            with pytest.raises(StreamClosedError):
                await stream.receive_exactly(1)
            await lane.daemon.lost.wait()
            assert not here.lost.is_set()
            again = await here.dial(there.peer_id, "/hold/1", there.addresses, connection=1)
            assert here._streams[again].daemon is here.daemon  # type: ignore[index]

    asyncio.run(main())


def test_a_lane_that_speaks_for_nobody_is_not_served() -> None:
    async def main() -> None:
        async with asyncio.timeout(60), connected_libp2p_transports(3, 2) as (here, there, other):
            served: list[str] = []

            async def note(stream: Stream) -> None:
                served.append(stream.peer)

            there.serve("/note/1", note)
            # The letter of another's lane, as somebody who has seen it could send it.
            here.lanes[0]._letter = other.lanes[0]._letter
            forged = await here.dial(there.peer_id, "/note/1", there.addresses, connection=1)
            assert here._streams[forged].daemon is here.lanes[0].daemon  # type: ignore[index]
            with pytest.raises(StreamClosedError):
                await forged.receive_exactly(1)
            honest = await other.dial(there.peer_id, "/note/1", there.addresses, connection=1)
            with pytest.raises(StreamClosedError):
                await honest.receive_exactly(1)  # its handler has returned
            assert served == [other.peer_id]

    asyncio.run(main())


def test_a_letter_that_never_comes_takes_no_more_than_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.net.libp2p._MAX_LETTERS_OF_ONE", 2)

    async def main() -> None:
        waiting: asyncio.Queue[str] = asyncio.Queue()

        async def begun(read: Callable[[int], Awaitable[bytes]], lane: str) -> str:
            waiting.put_nowait(lane)
            return await read_letter(read, lane)

        monkeypatch.setattr("swarm.net.libp2p.read_letter", begun)
        async with asyncio.timeout(60), connected_libp2p_transports(2, 1) as (here, there):
            there.serve("/hold/1", hold)
            silent = [
                await here.dial(there.peer_id, f"/hold/1{LANE}", there.addresses) for _ in range(2)
            ]
            for each in silent:  # so that their streams are open there, in this order
                await each.send([b"\x01"])
                await waiting.get()
            one_more = await here.dial(there.peer_id, f"/hold/1{LANE}", there.addresses)
            with pytest.raises(StreamClosedError):
                await one_more.receive_exactly(1)
            assert there._letters.open.total() == 2

    asyncio.run(main())


def test_a_round_over_several_connections_gives_what_one_gives() -> None:
    async def main() -> None:
        async with asyncio.timeout(60), connected_libp2p_transports(4, 3) as transports:
            by_peer = {each.peer_id: each for each in transports}
            members = sorted(by_peer)
            reducers = {
                peer: GroupAllReduce(each, addresses=lambda other: by_peer[other].addresses)
                for peer, each in by_peer.items()
            }
            for reducer in reducers.values():
                reducer.serve()
            local = {peer: torch.randn(ELEMENTS, dtype=torch.float64) for peer in members}
            out = {peer: torch.empty(ELEMENTS) for peer in members}
            expected = torch.zeros(ELEMENTS, dtype=torch.float64)
            for peer in members:
                expected = expected + local[peer]
            daemons: set[object] = set()
            add = Libp2pTransport._add_stream

            def noted(self: Libp2pTransport, *arguments: object) -> Stream:
                daemons.add(arguments[-1])
                return add(self, *arguments)  # type: ignore[arg-type]

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Libp2pTransport, "_add_stream", noted)
                await asyncio.gather(
                    *(reducers[p].all_reduce("1", members, local[p], out[p]) for p in members)
                )
            for peer in members:
                assert torch.equal(out[peer], expected.float())
            # Seen from both ends: the connection of each pair, and two lanes of each to each other.
            assert len(daemons) == 2 * (4 * 3 // 2 + 4 * 3 * 2)

    asyncio.run(main())


def test_the_end_of_a_transport_is_that_of_all_its_daemons() -> None:
    async def main() -> None:
        async with connected_libp2p_transports(2, 3) as (here, _):
            daemons = [here.daemon, *(lane.daemon for lane in here.lanes)]
            processes = [each._process.pid for each in daemons if each._process is not None]
            assert len(processes) == 3
            await here.close()
            assert not any(map(psutil.pid_exists, processes))

    asyncio.run(main())


@pytest.mark.parametrize(("connections", "identity"), [(0, True), (17, True), (2, False)])
def test_what_makes_no_connections_is_refused(
    connections: int, identity: bool, tmp_path: Path
) -> None:
    path = load_identity(tmp_path / "identity.key").path if identity else None
    with pytest.raises(ValueError, match=f"{connections} connections"):
        asyncio.run(Libp2pTransport.create(path, connections=connections))
