"""Streams and connections to other peers' daemons, opened by one of ours.

p2pd remembers whom it could not dial, and refuses to try again for seconds, then for minutes; here
a peer that comes back is found at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from swarm.errors import TransportError, UnreachableError
from swarm.net.names import FAMILIES, look_up
from swarm.net.p2pd import P2PDaemon

_GRACE_S = 0.25
_BACKOFF_POLL_S = 0.5
_TCP_ADDRESS = re.compile(r"/(?:ip[46]|dns([46]?))/([^/]+)/tcp/(\d{1,5})(?:/|$)")
Result = TypeVar("Result")


class Dialler:
    """Dials with one daemon. Each attempt takes `timeout_s` at most; cancelled, it leaves nothing
    open."""

    def __init__(self, daemon: P2PDaemon, timeout_s: float) -> None:
        self.daemon, self.timeout_s = daemon, timeout_s

    async def open(self, peer_id: str, protocol: str, addresses: Sequence[str]) -> socket.socket:
        """A stream to that peer, connecting first if need be. Raises UnreachableError."""

        async def attempt() -> tuple[socket.socket, str]:
            # A stream to a peer that is not connected makes p2pd dial by itself; see _connect.
            if addresses and not await self.daemon.is_connected(peer_id):
                await self._connect(peer_id, addresses)
            return await self.daemon.open_stream(peer_id, protocol, self.timeout_s)

        connection, peer = await self._in_time(peer_id, attempt)
        if peer != peer_id:
            connection.close()
            raise UnreachableError(f"cannot reach {peer_id}", f"{peer} answered instead")
        return connection

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Be connected to a peer without opening a stream. Raises UnreachableError."""

        async def attempt() -> None:
            if not await self.daemon.is_connected(peer_id):
                await self._connect(peer_id, addresses)

        await self._in_time(peer_id, attempt)

    async def _in_time(self, peer_id: str, attempt: Callable[[], Awaitable[Result]]) -> Result:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await attempt()
        except TimeoutError:
            reason = f"no answer within {self.timeout_s:.0f} s"
            raise UnreachableError(f"cannot reach {peer_id}", reason) from None
        except TransportError as error:
            raise UnreachableError(f"cannot reach {peer_id}", _short(error.message)) from None

    async def _connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Connect to the addresses whose port answers.

        After a refused dial p2pd refuses to try that address again for 5 s, after more of them for
        minutes; so a port is tried with a plain TCP connection first, and a peer that comes back
        is found at once. Only what p2pd has dialled by itself may have to be waited for.

        Who answers first may be another: the address that a peer has in its own network is often
        somebody else's in ours. So the ports that answer later are tried too.
        """
        ports = _Ports(addresses, self.timeout_s / 2)
        try:
            if not await ports.more(than=0):
                raise TransportError("connection refused")
            while True:
                given = list(ports.open)
                try:
                    return await self.daemon.connect(peer_id, given, self.timeout_s)
                except TransportError as error:
                    if "dial backoff" in error.message:
                        await asyncio.sleep(_BACKOFF_POLL_S)
                    elif not await ports.more(than=len(given)):
                        raise
        finally:
            ports.close()


class _Ports:
    """Of these addresses, those in `open` whose TCP port has accepted so far, and those that cannot
    be asked so. Asks until `timeout_s` have passed, or `close()`."""

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        self.open: list[str] = []
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._waiting: set[asyncio.Task[None]] = set()
        for address in addresses:
            match = _TCP_ADDRESS.match(address)
            if match is None or "/p2p-circuit" in address or int(match[3]) > 65535:
                self.open.append(address)
            else:
                self._waiting.add(asyncio.create_task(self._probe(address, *match.groups())))

    async def _probe(self, address: str, named: str | None, host: str, port: str) -> None:
        found = [host] if named is None else await look_up(host, FAMILIES[named])
        if found is None:  # it cannot be asked now; p2pd looks it up by itself
            self.open.append(address)
            return
        for each in found:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(each, int(port))
                writer.close()
                self.open.append(address)
                return

    async def more(self, *, than: int) -> bool:
        """Whether there are more than so many, once none has followed the last for _GRACE_S: p2pd
        dials all that it is given at once, and the nearest wins."""
        loop = asyncio.get_running_loop()
        while self._waiting and (left_s := self._deadline - loop.time()) > 0:
            some = len(self.open) > than
            done, self._waiting = await asyncio.wait(
                self._waiting,
                timeout=min(left_s, _GRACE_S) if some else left_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if some and not done:
                break
        return len(self.open) > than

    def close(self) -> None:
        for task in self._waiting:
            task.cancel()


def _short(reason: str) -> str:
    """The daemon's reason in a line a person can read."""
    for words, said in (
        ("protocols not supported", "it does not serve this protocol"),
        ("connection refused", "connection refused"),
        ("no route to host", "no route to host"),
        ("peer id mismatch", "another peer answered there"),
        ("no addresses", "no address known"),
        ("not found", "no address known"),
        ("dial to self", "that is this peer itself"),
        ("timeout", "no answer in time"),
        ("deadline exceeded", "no answer in time"),
    ):
        if words in reason.lower():
            return said
    return " ".join(reason.split())[:200]
