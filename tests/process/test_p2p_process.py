"""What a real process leaves behind, and what its peers see when it is killed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swarm.errors import ConfigError, ListenError, StreamClosedError, UnreachableError
from swarm.net.libp2p import Libp2pTransport
from swarm.net.transport import Stream

CHILD = """
import asyncio
from swarm.net.libp2p import Libp2pTransport

async def hold(stream):
    await asyncio.sleep(600)

async def main():
    transport = await Libp2pTransport.create()
    transport.serve("/hold/1", hold)
    print(transport.addresses[0], transport.daemon._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def sockets_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets go; a short path of its own, so that leftovers of others do not count."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path)


@pytest.fixture
def child(sockets_in: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address, daemon = process.stdout.readline().split()
    yield process, address, int(daemon)
    process.kill()
    process.wait()
    process.stdout.close()


def test_peers_are_told_what_is_announced(sockets_in: Path) -> None:
    """And nothing else, as where a router forwards a port."""

    async def main() -> None:
        transport = await Libp2pTransport.create(announce=["/ip4/192.0.2.7/tcp/4001"])
        try:
            expected = f"/ip4/192.0.2.7/tcp/4001/p2p/{transport.peer_id}"
            assert transport.addresses == (expected,)
        finally:
            await transport.close()

    asyncio.run(main())


def wait_for_end_of(pid: int) -> None:
    """The daemon of a killed process ends by itself; 1 to 3 s is what it takes."""
    try:
        psutil.Process(pid).wait(10)
    except psutil.NoSuchProcess:
        return


def test_kill_is_seen_at_once_and_leaves_nothing(
    child: tuple[subprocess.Popen[str], str, int], sockets_in: Path
) -> None:
    process, address, daemon = child
    peer_id = address.rpartition("/p2p/")[2]

    async def main() -> float:
        transport = await Libp2pTransport.create()
        stream = await transport.dial(peer_id, "/hold/1", [address])
        waiting = asyncio.create_task(stream.receive_exactly(1))
        await asyncio.sleep(0.1)
        killed = time.monotonic()
        process.kill()
        with pytest.raises(StreamClosedError):
            await waiting
        seen_s = time.monotonic() - killed
        await asyncio.to_thread(wait_for_end_of, daemon)
        with pytest.raises(UnreachableError):
            await transport.dial(peer_id, "/hold/1", [address])
        await transport.close()
        return seen_s

    assert asyncio.run(main()) < 2.0  # 20 ms when the machine is idle
    assert list(sockets_in.iterdir()) == []


def test_close_leaves_nothing(sockets_in: Path) -> None:
    async def main() -> int:
        transport = await Libp2pTransport.create()
        daemon = transport.daemon._process
        assert daemon is not None
        await transport.close()
        return daemon.pid

    before = len(os.listdir("/proc/self/fd"))
    assert not psutil.pid_exists(asyncio.run(main()))
    assert list(sockets_in.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_peer_that_reads_nothing_does_not_keep_a_transport_from_closing() -> None:
    async def main() -> None:
        transport, other = await Libp2pTransport.create(), await Libp2pTransport.create()

        async def hold(stream: Stream) -> None:
            await asyncio.sleep(600)

        other.serve("/hold/1", hold)
        stream = await transport.dial(other.peer_id, "/hold/1", other.addresses)
        sending = asyncio.create_task(stream.send([bytes(64 << 20)]))
        done, _ = await asyncio.wait([sending], timeout=1.0)
        assert not done  # all buffers on the way are full
        process = transport.daemon._process
        assert process is not None
        async with asyncio.timeout(20):
            await transport.close()
        with pytest.raises(StreamClosedError):
            await sending
        assert not psutil.pid_exists(process.pid)
        await other.close()

    asyncio.run(main())


def test_leftovers_of_dead_processes_are_swept(sockets_in: Path) -> None:
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                             capture_output=True, text=True, check=True)  # fmt: skip
    dead = sockets_in / f"swarm-p2p-{process.stdout.strip()}-abc"
    alive = sockets_in / f"swarm-p2p-{os.getpid()}-abc"
    for path in (dead, alive):
        path.mkdir()
        (path / "control").touch()
        os.utime(path, (0, 0))

    async def main() -> None:
        await (await Libp2pTransport.create()).close()

    asyncio.run(main())
    assert list(sockets_in.iterdir()) == [alive]


def test_death_of_the_daemon_is_noticed() -> None:
    async def main() -> None:
        transport, other = await Libp2pTransport.create(), await Libp2pTransport.create()
        accepted: asyncio.Queue[Stream] = asyncio.Queue()

        async def hold(stream: Stream) -> None:
            accepted.put_nowait(stream)
            await asyncio.sleep(600)

        other.serve("/hold/1", hold)
        stream = await transport.dial(other.peer_id, "/hold/1", other.addresses)
        process = transport.daemon._process
        assert process is not None
        process.kill()
        async with asyncio.timeout(10):
            await transport.lost.wait()
            with pytest.raises(StreamClosedError):
                await stream.receive_exactly(1)
        with pytest.raises(UnreachableError, match="ended with code"):
            await transport.dial(other.peer_id, "/hold/1", other.addresses)
        await transport.close()
        await other.close()

    asyncio.run(main())


def test_what_cannot_be_listened_on_is_one_line() -> None:
    async def listen(address: str) -> None:
        await (await Libp2pTransport.create(listen=[address])).close()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"127.0.0.1:{port}: address already in use"):
            asyncio.run(listen(f"/ip4/127.0.0.1/tcp/{port}"))
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1:4001"):
        asyncio.run(listen("/ip4/192.0.2.1/tcp/4001"))
    with pytest.raises(ConfigError, match="multiaddress"):
        asyncio.run(listen("tcp://0.0.0.0:4001"))


def test_a_peer_that_comes_back_on_its_port_is_found_again(tmp_path: Path) -> None:
    """p2pd alone refuses to dial an address for 5 s after a refused attempt, then for longer."""
    from swarm.net.identity import load_identity

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}"
    identity = load_identity(tmp_path / "identity.key")

    async def hold(stream: Stream) -> None:
        await stream.receive_exactly(1)

    async def main() -> None:
        transport = await Libp2pTransport.create()
        for _ in range(2):
            for _ in range(3):
                with pytest.raises(UnreachableError):
                    await transport.dial(identity.peer_id, "/hold/1", [address])
            other = await Libp2pTransport.create(identity.path, listen=[address])
            other.serve("/hold/1", hold)
            await transport.dial(identity.peer_id, "/hold/1", [address])
            await other.close()
        await transport.close()

    asyncio.run(main())


def test_the_address_of_a_relay_hides_no_other() -> None:
    async def hold(stream: Stream) -> None:
        await stream.receive_exactly(1)

    async def main() -> None:
        here, there, relay = [await Libp2pTransport.create() for _ in range(3)]
        there.serve("/hold/1", hold)
        relayed = f"{relay.addresses[0]}/p2p-circuit/p2p/{there.peer_id}"
        await here.dial(there.peer_id, "/hold/1", [relayed, *there.addresses])
        for each in (here, there, relay):
            await each.close()

    asyncio.run(main())


def test_hivemind_stays_silent() -> None:
    script = (
        "import asyncio, logging\n"
        "from swarm.net.libp2p import Libp2pTransport\n"
        "async def main():\n"
        "    await (await Libp2pTransport.create()).close()\n"
        "asyncio.run(main())\n"
        "import hivemind.utils.logging as h\n"
        "h.get_logger('hivemind.x').error('noise')\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == ""
