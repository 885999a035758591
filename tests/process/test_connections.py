"""Several connections to a peer, over real daemons."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import torch

from swarm.averaging import RoundFailedError
from swarm.averaging.round import Limits
from swarm.errors import ListenError, StreamClosedError
from swarm.net.identity import load_identity
from swarm.net.lanes import LANE, read_letter, start_lanes
from swarm.net.libp2p import Libp2pTransport, _Route
from swarm.net.p2pd import P2PDaemon
from swarm.net.socket_stream import SocketStream
from swarm.net.transport import Stream
from tests.conformance.networks import connected_libp2p_transports, reducers_of, route_of

SOON_S = 20.0
ELEMENTS = 1_000_000


async def echo(stream: Stream) -> None:
    while True:
        await stream.send([await stream.receive_exactly(1)])


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
                routes.add(route_of(there, accepted).peer)
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
                assert route_of(here, first).daemon is here.daemon
                await lane.connected()
                second = await here.dial(there.peer_id, "/hold/1", there.addresses, connection=1)
                assert route_of(here, second).daemon is lane.daemon
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
            assert route_of(here, again).daemon is here.daemon

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
            assert route_of(here, forged).daemon is here.lanes[0].daemon
            with pytest.raises(StreamClosedError):
                await forged.receive_exactly(1)
            honest = await other.dial(there.peer_id, "/note/1", there.addresses, connection=1)
            with pytest.raises(StreamClosedError):
                await honest.receive_exactly(1)  # its handler has returned
            assert served == [other.peer_id]

    asyncio.run(main())


def test_letters_that_never_come_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest gives way: a stranger may be as many peers as it likes."""
    monkeypatch.setattr("swarm.net.libp2p._MAX_LETTERS", 2)

    async def main() -> None:
        waiting: asyncio.Queue[str] = asyncio.Queue()

        async def begun(read: Callable[[int], Awaitable[bytes]], lane: str) -> str:
            waiting.put_nowait(lane)
            return await read_letter(read, lane)

        monkeypatch.setattr("swarm.net.libp2p.read_letter", begun)
        async with asyncio.timeout(60), connected_libp2p_transports(2, 2) as (here, there):
            there.serve("/echo/1", echo)
            silent = []
            for _ in range(2):
                silent.append(await here.dial(there.peer_id, f"/echo/1{LANE}", there.addresses))
                await silent[-1].send([b"\x01"])  # so that it is open there, and before the next
                await waiting.get()
            honest = await here.dial(there.peer_id, "/echo/1", there.addresses, connection=1)
            await honest.send([b"x"])
            assert await honest.receive_exactly(1) == b"x"
            with pytest.raises(StreamClosedError):
                await silent[0].receive_exactly(1)
            assert len(there._letters) == 1

    asyncio.run(main())


def test_a_connection_that_dies_in_silence_costs_one_attempt() -> None:
    """What comes over it stops, and it looks well. The second attempt does without it."""

    async def main() -> None:
        async with asyncio.timeout(60), connected_libp2p_transports(2, 1) as (_, there):
            passing, writers = asyncio.Event(), list[asyncio.StreamWriter]()
            passing.set()

            async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(1 << 16):
                    await passing.wait()
                    sink.write(data)
                sink.close()

            async def forward(ours: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
                _, _, host, _, port, *_ = there.addresses[0].split("/")
                theirs, on = await asyncio.open_connection(host, int(port))
                writers.extend((back, on))
                await asyncio.gather(
                    pass_on(ours, on), pass_on(theirs, back), return_exceptions=True
                )

            proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
            port = proxy.sockets[0].getsockname()[1]
            with tempfile.TemporaryDirectory() as folder:
                path = load_identity(Path(folder) / "identity.key").path
                here = await Libp2pTransport.create(path, connections=2)
            (lane,) = here.lanes
            await lane.open(there.peer_id, "/nothing", [f"/ip4/127.0.0.1/tcp/{port}"])
            await lane.connected()
            reducers = reducers_of([here, there], Limits(silence_s=0.5))
            members = list(reducers)
            local = torch.ones(ELEMENTS)
            out = {peer: torch.empty(ELEMENTS) for peer in members}

            async def attempt(name: str) -> list[type]:
                results = await asyncio.gather(
                    *(reducers[p].all_reduce(name, members, local, out[p]) for p in members),
                    return_exceptions=True,
                )
                return [type(each) for each in results]

            try:
                assert await attempt("over both") == [tuple, tuple]
                passing.clear()
                assert await attempt("while it is silent") == [RoundFailedError] * 2
                assert await lane.daemon.is_connected(there.peer_id)
                assert await attempt("once more") == [tuple, tuple]
            finally:
                passing.set()
                await here.close()
                proxy.close()
                for writer in writers:
                    writer.close()
                closed = (writer.wait_closed() for writer in writers)
                await asyncio.gather(*closed, return_exceptions=True)

    asyncio.run(main())


def test_a_daemon_that_stands_still_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.net.lanes.OPEN_S", 0.2)

    async def main() -> None:
        async with asyncio.timeout(60), connected_libp2p_transports(2, 2) as (here, there):
            there.serve("/echo/1", echo)
            process = here.lanes[0].daemon._process
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            try:
                stopped = os.WSTOPPED | os.WNOWAIT
                await asyncio.to_thread(os.waitid, os.P_PID, process.pid, stopped)
                async with asyncio.timeout(SOON_S):
                    stream = await here.dial(
                        there.peer_id, "/echo/1", there.addresses, connection=1
                    )
                    await stream.send([b"x"])
                    assert await stream.receive_exactly(1) == b"x"
            finally:
                process.send_signal(signal.SIGCONT)

    asyncio.run(main())


@pytest.mark.parametrize("what", ["fails", "cancelled"])
def test_lanes_that_do_not_all_start_leave_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a process, nor a file, nor a descriptor."""
    identity = load_identity(tmp_path / "identity.key")
    sockets = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    started: list[P2PDaemon] = []
    original = P2PDaemon._wait_until_ready

    async def main() -> None:
        third = asyncio.Event()

        async def ready(self: P2PDaemon) -> None:
            await original(self)
            started.append(self)
            if len(started) == 3:
                third.set()
                if what == "fails":
                    raise ListenError("not this one")
                await asyncio.Event().wait()

        monkeypatch.setattr(P2PDaemon, "_wait_until_ready", ready)
        starting = asyncio.create_task(start_lanes(4, identity, SOON_S, 1.0))
        await third.wait()
        if what == "cancelled":
            starting.cancel()
        with pytest.raises(ListenError if what == "fails" else asyncio.CancelledError):
            await starting

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    processes = [each._process.pid for each in started if each._process is not None]
    assert len(processes) >= 3
    assert not any(map(psutil.pid_exists, processes))
    assert list(sockets.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before
    sockets.rmdir()


def test_a_round_over_several_connections_gives_what_one_gives() -> None:
    async def main() -> None:
        async with asyncio.timeout(60), connected_libp2p_transports(4, 3) as transports:
            reducers = reducers_of(transports)
            members = list(reducers)
            local = {peer: torch.randn(ELEMENTS, dtype=torch.float64) for peer in members}
            out = {peer: torch.empty(ELEMENTS) for peer in members}
            expected = torch.zeros(ELEMENTS, dtype=torch.float64)
            for peer in members:
                expected = expected + local[peer]
            routes: set[_Route] = set()
            add = Libp2pTransport._add_stream

            def noted(
                self: Libp2pTransport, connection: socket.socket, peer: str, route: _Route
            ) -> SocketStream:
                routes.add(route)
                return add(self, connection, peer, route)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Libp2pTransport, "_add_stream", noted)
                await asyncio.gather(
                    *(reducers[p].all_reduce("1", members, local[p], out[p]) for p in members)
                )
            for peer in members:
                assert torch.equal(out[peer], expected.float())
            # Seen from both ends: the connection of each pair, and two lanes of each to each other.
            assert len(routes) == 2 * (4 * 3 // 2 + 4 * 3 * 2)

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
