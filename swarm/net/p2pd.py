"""The libp2p daemon of hivemind's wheel: start it, talk to its control socket, notice its death.

hivemind can start the daemon itself (`P2P.create`), but then Ctrl-C in a terminal kills it before
a peer has drained (same process group), socket files stay in /tmp after a kill -9, and a busy port
is a traceback. So the child is started here, in a session of its own. It ends by itself when the
persistent control connection held below ends, so it never outlives this process, however that dies.

On Linux both unix sockets are unlinked as soon as both ends know them: a socket stays reachable
through `/proc/PID/fd/N` of an O_PATH descriptor, and nothing is left on disk after any kind of end.
Elsewhere the files stay until close; start-up sweeps those of dead processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError, ListenError, StorageError, SwarmError, TransportError
from swarm.net.hivemind_quiet import import_hivemind
from swarm.net.p2pd_control import (
    DaemonRequestError,
    base58_decode,
    base58_encode,
    prefixed,
    read_message,
    request,
)

log = logging.getLogger("swarm.net")

_PREFIX = "swarm-p2p-"
_STALE_S = 120.0
OPEN_FILES = 16_384
_P2P_CODE = b"\xa5\x03"  # of multiaddresses: 421 as a varint


class P2PDaemon:
    """One running p2pd. Create with `await P2PDaemon.start(...)`; `lost` is set if it dies."""

    def __init__(self) -> None:
        self.peer_id = ""
        self.lost = asyncio.Event()
        self.why_lost = ""
        self.control_path = ""
        self.incoming: socket.socket
        self._incoming_maddr = b""
        self._directory: Path | None = None
        self._descriptors: list[int] = []
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    @classmethod
    async def start(
        cls,
        *,
        identity_path: str | os.PathLike[str] | None,
        listen: Sequence[str],
        announce: Sequence[str],
        startup_timeout_s: float,
    ) -> P2PDaemon:
        """Start the daemon and wait until it listens. Raises ListenError, StorageError, leaving
        nothing."""
        self = cls()
        try:
            async with asyncio.timeout(startup_timeout_s):
                await self._start(identity_path, listen, announce)
        except TimeoutError:
            await self.close()
            raise ListenError(
                f"the network daemon did not start within {startup_timeout_s:.0f} s",
                "the machine may be overloaded; try again",
            ) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(
        self,
        identity_path: str | os.PathLike[str] | None,
        listen: Sequence[str],
        announce: Sequence[str],
    ) -> None:
        import_hivemind()
        import hivemind.hivemind_cli
        from hivemind.utils.multiaddr import Multiaddr

        allow_open_files()
        _check_addresses(listen, announce)
        _check_ports_free(listen)
        _sweep()
        self._directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_base()))
        control = self._directory / "control"
        incoming = self._directory / "incoming"
        arguments = [
            str(Path(hivemind.hivemind_cli.__file__).parent / "p2pd"),
            f"-listen=/unix{control}",
            "-dhtServer=1",
            "-connManager=1",
            "-relay=1",
            "-tls=1",
            "-idleTimeout=30s",
            f"-persistentConnMaxMsgSize={4 << 20}",
        ]
        if listen:
            arguments.append("-hostAddrs=" + ",".join(listen))
        else:
            arguments.append("-noListenAddrs=1")
        if not all("/127.0.0.1/" in address or "/::1/" in address for address in listen):
            arguments += ["-autonat=1", "-natPortMap=1"]
        if announce:
            arguments.append("-announceAddrs=" + ",".join(announce))
        if identity_path is not None:
            arguments.append(f"-id={os.fspath(identity_path)}")
        environment = dict(
            os.environ,
            GOLOG_LOG_LEVEL="fatal",
            GOLOG_LOG_FMT="json",
            # Two that dial each other from their listening ports within one journey of a packet
            # open one connection from both ends, and both then fail its handshake.
            LIBP2P_TCP_REUSEPORT="false",
        )
        self._process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        await self._wait_until_ready()
        self._tasks.append(asyncio.create_task(self._watch(), name="p2pd-watch"))

        self.control_path = self._hide(control, "self")
        self.incoming = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.incoming.setblocking(False)
        self.incoming.bind(str(incoming))
        self.incoming.listen(1024)
        hidden = self._hide(incoming, str(os.getpid()))
        self._incoming_maddr = Multiaddr(f"/unix{hidden}").to_bytes()
        if self._descriptors:
            self._directory.rmdir()
            self._directory = None

        self._lifeline = await self.connect_control()
        await self._exchange(self._lifeline, request("PERSISTENT_CONN_UPGRADE"))
        self.peer_id, _ = await self.identify()

    def _hide(self, path: Path, process: str) -> str:
        """Unlink the socket file, returning a path under which it can still be connected to."""
        if sys.platform != "linux":
            return str(path)
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        self._descriptors.append(descriptor)
        path.unlink()
        return f"/proc/{process}/fd/{descriptor}"

    async def _wait_until_ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        last: deque[str] = deque(maxlen=5)
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace").strip()
            if text.startswith("Peer ID:"):
                return
            last.append(text)
        raise _start_error(" ".join(last))

    async def _watch(self) -> None:
        """Drain the daemon's output; note its death."""
        assert self._process is not None
        assert self._process.stdout is not None
        last = ""
        with contextlib.suppress(ValueError):  # a line beyond the reader's limit
            while line := await self._process.stdout.readline():
                last = line.decode(errors="replace").strip()
                log.debug("p2pd: %s", last)
        code = await self._process.wait()
        if not self._closing:
            self.why_lost = f"the network daemon ended with code {code}"
            self.lost.set()

    async def connect_control(self) -> socket.socket:
        """A new non-blocking connection to the daemon. Raises TransportError if it is gone."""
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # too many open files
            raise TransportError("this process cannot open a connection", str(error)) from None
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, self.control_path)
        except OSError as error:
            connection.close()
            raise TransportError("the network daemon is gone", str(error)) from None
        except BaseException:
            connection.close()
            raise
        return connection

    async def _exchange(self, connection: socket.socket, message: Any) -> Any:
        from hivemind.proto import p2pd_pb2

        try:
            await asyncio.get_running_loop().sock_sendall(connection, prefixed(message))
            response = p2pd_pb2.Response()
            response.ParseFromString(await read_message(connection))
        except OSError as error:
            raise TransportError("the network daemon is gone", str(error)) from None
        if response.type == p2pd_pb2.Response.ERROR:
            raise DaemonRequestError(response.error.msg)
        return response

    async def _ask(self, message: Any) -> Any:
        connection = await self.connect_control()
        try:
            return await self._exchange(connection, message)
        finally:
            connection.close()

    async def identify(self) -> tuple[str, tuple[str, ...]]:
        """Peer id, and the addresses (with /p2p/ID) at which this peer believes to be reachable."""
        from hivemind.utils.multiaddr import Multiaddr

        identity = (await self._ask(request("IDENTIFY"))).identify
        peer_id = base58_encode(identity.id)
        plain = (str(Multiaddr(address)).split("/p2p/")[0] for address in identity.addrs)
        return peer_id, tuple(f"{address}/p2p/{peer_id}" for address in dict.fromkeys(plain))

    async def connect(self, peer_id: str, addresses: Sequence[str], timeout_s: float) -> None:
        """Connect to a peer at these addresses (the part after /p2p/ is cut off). Who told them may
        know more kinds than the daemon: those that make no sense to it are left out."""
        message = request("CONNECT")
        message.connect.peer = base58_decode(peer_id)
        message.connect.timeout = max(1, round(timeout_s))
        for address in addresses:
            plain = re.sub(rf"/p2p/{re.escape(peer_id)}$", "", address)
            try:
                message.connect.addrs.append(_address_bytes(plain))
            except Exception as error:
                log.debug("left out the address %r of %s: %s", address, peer_id, error)
        if not message.connect.addrs:
            raise TransportError("no addresses")
        await self._ask(message)

    async def is_connected(self, peer_id: str) -> bool:
        wanted = base58_decode(peer_id)
        return any(peer.id == wanted for peer in (await self._ask(request("LIST_PEERS"))).peers)

    async def open_stream(
        self, peer_id: str, protocol: str, timeout_s: float
    ) -> tuple[socket.socket, str]:
        """A socket that is the stream from now on, and the verified peer id of the other side."""
        message = request("STREAM_OPEN")
        message.streamOpen.peer = base58_decode(peer_id)
        message.streamOpen.proto.append(protocol)
        message.streamOpen.timeout = max(1, round(timeout_s))
        connection = await self.connect_control()
        try:
            response = await self._exchange(connection, message)
        except BaseException:
            connection.close()
            raise
        return connection, base58_encode(response.streamInfo.peer)

    def register(self, protocol: str) -> None:
        """Have the daemon pass incoming streams of `protocol` to `self.incoming`.

        Blocks for the fraction of a millisecond that the daemon takes to answer, so that a
        protocol is served once this returns; it runs at start-up only.
        """
        from hivemind.proto import p2pd_pb2

        message = request("STREAM_HANDLER")
        message.streamHandler.addr = self._incoming_maddr
        message.streamHandler.proto.append(protocol)
        message.streamHandler.balanced = False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10.0)
            try:
                connection.connect(self.control_path)
                connection.sendall(prefixed(message))
                data = connection.recv(4096)
            except OSError as error:
                raise TransportError("the network daemon is gone", str(error)) from None
        response = p2pd_pb2.Response()
        response.ParseFromString(data[1:])
        if response.type == p2pd_pb2.Response.ERROR:
            raise DaemonRequestError(response.error.msg)

    async def close(self) -> None:
        """Stop the daemon and remove what it left. Idempotent."""
        self._closing = True
        if self._process is not None:
            # While it still has its lifeline: a signal to a child that has gone reaps it, and
            # asyncio's watcher then misses it, with a warning.
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        if self._lifeline is not None:
            self._lifeline.close()
        if hasattr(self, "incoming"):
            self.incoming.close()
        if self._process is not None:
            try:
                async with asyncio.timeout(2.0):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def allow_open_files() -> None:
    """Each stream is one, and many systems allow 1024 unless asked for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_addresses(listen: Sequence[str], announce: Sequence[str]) -> None:
    from hivemind.utils.multiaddr import Multiaddr

    for option, addresses in (("--listen", listen), ("--announce", announce)):
        for address in addresses:
            try:
                Multiaddr(address)
            except Exception:
                raise ConfigError(
                    f"{option} {address!r} is not a multiaddress",
                    "write it like /ip4/0.0.0.0/tcp/4001",
                ) from None
    for address in announce:
        if "/tcp/0" in address:
            raise ConfigError(
                f"--announce {address}: 0 is no port", "name the one at which others reach you"
            )


def _check_ports_free(listen: Sequence[str]) -> None:
    """The daemon shares ports (SO_REUSEPORT) and starts when one of several is free; we do not."""
    for address in listen:
        match = re.match(r"/(ip[46])/([^/]+)/(tcp|udp)/(\d+)", address)
        if match is None or match[4] == "0":
            continue
        family = socket.AF_INET if match[1] == "ip4" else socket.AF_INET6
        kind = socket.SOCK_STREAM if match[3] == "tcp" else socket.SOCK_DGRAM
        with socket.socket(family, kind) as probe:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((match[2], int(match[4])))
            except (OSError, OverflowError) as error:
                reason = (getattr(error, "strerror", None) or str(error)).lower()
                raise _listen_error(f"{match[2]}:{match[4]}", reason) from None


def _address_bytes(address: str) -> bytes:
    """As the daemon reads it. hivemind writes the peer id of a relay as a CID, for which the daemon
    refuses all addresses told along with it."""
    from hivemind.utils.multiaddr import Multiaddr

    before, *relays = address.split("/p2p/")
    data = bytes(Multiaddr(before).to_bytes()) if before else b""
    for relay in relays:
        peer, _, after = relay.partition("/")
        peer_id = base58_decode(peer)
        data += _P2P_CODE + bytes([len(peer_id)]) + peer_id
        if after:
            data += Multiaddr(f"/{after}").to_bytes()
    return data


def _start_error(output: str) -> SwarmError:
    if match := re.search(r"listen unix (.*?): bind: (.*)", output):
        return StorageError(
            f"cannot make a socket in {Path(match[1]).parents[1]}: {match[2].strip()}",
            "free some space, or set XDG_RUNTIME_DIR to a short path elsewhere",
        )
    match = re.search(r"\[?listen (?:tcp|udp)[46]? ([^\]]*?): bind: ([^\]]*)", output)
    if match:
        return _listen_error(match[1], match[2].strip())
    last = re.sub(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d ", "", output)
    return ListenError(
        f"the network daemon did not start: {last or 'no message'}",
        "check --listen and --announce, as in /ip4/0.0.0.0/tcp/4001",
    )


def _listen_error(address: str, reason: str) -> ListenError:
    remedy = (
        "stop the other program or choose another port with --listen"
        if "in use" in reason
        else "choose an address of this machine with --listen"
    )
    return ListenError(f"cannot listen on {address}: {reason}", remedy)


def _base() -> Path:
    """A short, writable directory for sockets (a unix socket's path is limited to 107 bytes)."""
    for candidate in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        if candidate and len(candidate) < 60 and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise ListenError("no writable directory for sockets", "set TMPDIR to a short path")


def _sweep() -> None:
    """Remove socket directories of processes that died before they could."""
    for path in _base().glob(f"{_PREFIX}*"):
        match = re.match(rf"{_PREFIX}(\d+)-", path.name)
        with contextlib.suppress(OSError):
            status = path.lstat()
            if (
                not match
                or status.st_uid != os.getuid()
                or time.time() - status.st_mtime < _STALE_S
            ):
                continue
            try:
                os.kill(int(match[1]), 0)
            except ProcessLookupError:
                shutil.rmtree(path, ignore_errors=True)
