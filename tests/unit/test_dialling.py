"""Which of a peer's addresses the daemon is given, and when."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.errors import TransportError, UnreachableError
from swarm.net.dialling import Dialler
from swarm.net.hivemind_quiet import import_hivemind
from swarm.net.names import FAMILIES, MAX_LOOKUPS, look_up
from swarm.net.p2pd import P2PDaemon
from swarm.net.p2pd_control import base58_encode
from swarm.sim.virtual_time import run

LAN, PUBLIC, SILENT = (f"/ip4/{host}/tcp/4001" for host in ("192.168.1.2", "8.8.8.8", "172.17.0.1"))
AWAY = "203.0.113.9"
MISMATCH = "failed to negotiate security protocol: peer id mismatch"


class Network:
    """Hosts whose port answers after so many seconds, each as the peer itself or as another."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answers_s: dict[str, float], right: str
    ) -> None:
        self.answers_s, self.right = answers_s, right
        self.given: list[list[str]] = []
        self.probing = 0
        monkeypatch.setattr(asyncio, "open_connection", self._open_connection)

    async def _open_connection(self, host: str, port: int) -> tuple[None, Any]:
        if host == AWAY:
            raise ConnectionRefusedError
        self.probing += 1
        try:
            await asyncio.sleep(self.answers_s.get(f"/ip4/{host}/tcp/{port}", 1000.0))
        finally:
            self.probing -= 1
        return None, SimpleNamespace(close=lambda: None)

    async def is_connected(self, peer_id: str) -> bool:
        return False

    async def connect(self, peer_id: str, addresses: Sequence[str], timeout_s: float) -> None:
        self.given.append(list(addresses))
        if self.right not in addresses:
            raise TransportError(MISMATCH)

    def dial(self, addresses: Sequence[str] = (LAN, SILENT, PUBLIC)) -> float:
        """Seconds until there is a connection."""

        async def main() -> float:
            try:
                await a_dialler(self).connect("peer", addresses)
            finally:
                await asyncio.sleep(0)  # for what was cancelled
                assert not self.probing
            return asyncio.get_running_loop().time()

        return run(main())


def a_dialler(network: Network) -> Dialler:
    return Dialler(network, 10.0)  # type: ignore[arg-type]


def test_an_address_that_is_somebody_elses_here_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network(monkeypatch, {LAN: 0.001, PUBLIC: 0.6}, right=PUBLIC)
    assert network.dial() < 1.0
    assert network.given == [[LAN], [LAN, PUBLIC]]


def test_the_nearest_is_not_kept_waiting_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, {LAN: 0.001, PUBLIC: 0.6}, right=LAN)
    assert network.dial() < 0.3
    assert network.given == [[LAN]]


def test_that_only_another_answers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, {LAN: 0.001}, right=PUBLIC)
    with pytest.raises(UnreachableError, match="another peer answered there"):
        network.dial()
    assert network.given == [[LAN]]


def test_a_name_is_asked_too_so_that_who_comes_back_there_is_found_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[Any]()

    def find(name: str, port: None, family: Any, kind: Any) -> list[Any]:
        asked.append((name, family))
        return [(family, kind, 6, "", (AWAY, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    network = Network(monkeypatch, {}, right=PUBLIC)
    for kind in ("dns", "dns4", "dns6"):
        with pytest.raises(UnreachableError, match="connection refused"):
            asyncio.run(a_dialler(network).connect("peer", [f"/{kind}/away.example/tcp/4001"]))
    assert not network.given
    assert asked == [("away.example", each) for each in FAMILIES.values()]


def test_a_name_server_that_does_not_answer_holds_up_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the threads that all share, nor other addresses; and there is a most of such names,
    beyond which the daemon looks them up."""
    answers, all_wait = threading.Event(), asyncio.Event()
    looking, loops = list[str](), list[asyncio.AbstractEventLoop]()

    def find(name: str, *_: Any) -> list[Any]:
        looking.append(name)
        if len(looking) == MAX_LOOKUPS:
            loops[0].call_soon_threadsafe(all_wait.set)
        answers.wait()
        raise socket.gaierror

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        tasks = [asyncio.create_task(look_up(f"n{i}", FAMILIES[""])) for i in range(MAX_LOOKUPS)]
        await all_wait.wait()
        assert await asyncio.to_thread(lambda: "free") == "free"
        assert await look_up("another", FAMILIES[""]) is None
        await a_dialler(network).connect("peer", [public_name])
        assert network.given == [[public_name]]
        tasks[0].cancel()
        answers.set()
        assert await asyncio.gather(*tasks[1:]) == [[]] * (MAX_LOOKUPS - 1)

    public_name = "/dns4/here.example/tcp/4001"
    monkeypatch.setattr(socket, "getaddrinfo", find)
    network = Network(monkeypatch, {}, right=public_name)
    asyncio.run(main())
    assert "here.example" not in looking


def test_an_address_of_a_kind_that_is_not_known_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import_hivemind()
    from hivemind.utils.multiaddr import Multiaddr

    daemon, asked = P2PDaemon(), list[Any]()

    async def ask(message: Any) -> None:
        asked.append(message)

    monkeypatch.setattr(daemon, "_ask", ask)
    unknown, peer = "/ip4/8.8.8.8/udp/1/quic-v1/webtransport", base58_encode(bytes(range(34)))
    asyncio.run(daemon.connect(peer, [unknown, f"{PUBLIC}/p2p/{peer}"], 1.0))
    (message,) = asked
    assert [str(Multiaddr(each)) for each in message.connect.addrs] == [PUBLIC]
    with pytest.raises(TransportError, match="no addresses"):
        asyncio.run(daemon.connect(peer, [unknown], 1.0))
    assert len(asked) == 1
