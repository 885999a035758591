"""A run is found by mDNS, in a process of its own, and false peer ids are not believed.

Runs where the extra `lan` is installed; for `.ci/run` it must be.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets

import psutil
import pytest

from peer import lan
from swarm.errors import ConfigError
from swarm.net.libp2p import Libp2pTransport
from swarm.net.link import parse_link
from tests.process.required import LAN

RUN, OTHER_RUN = secrets.token_hex(16), secrets.token_hex(16)  # others may run this test too
STRANGER = "12D3KooWCXFeDz2JfyUmv3C3ecF2czRUwbpNzyx7sd3MU72RgBse"
LOOPBACK = ("127.0.0.1",)

needs_lan = pytest.mark.skipif(
    importlib.util.find_spec("libp2p") is None and not os.environ.get(LAN),
    reason="pip install '.[lan]'",
)


@needs_lan
def test_announced_run_is_found_and_its_peer_proven() -> None:
    async def main() -> None:
        transport = await Libp2pTransport.create()
        address = transport.addresses[0]
        announcements: list[lan.Announcement] = []
        try:
            false = address.replace(transport.peer_id, STRANGER)
            dead = f"/ip4/127.0.0.1/tcp/9/p2p/{transport.peer_id}"
            announcements += await asyncio.gather(
                *(
                    lan.announce_on_lan(run, [where], interfaces=LOOPBACK)
                    for run, where in ((RUN, address), (RUN, false), (OTHER_RUN, dead))
                )
            )
            links = await lan.find_on_lan(RUN, 60.0, interfaces=LOOPBACK)
            assert [parse_link(link).run_id for link in links] == [RUN]
            assert parse_link(links[0]).addresses == (address,)
            assert await lan.find_on_lan(OTHER_RUN, 4.0, interfaces=LOOPBACK) == []
        finally:
            for announcement in announcements:
                await announcement.close()
            await transport.close()

    asyncio.run(main())
    helpers = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert not [command for command in helpers if "peer.lan" in command]


@needs_lan
def test_helper_ends_with_its_parent() -> None:
    async def main() -> None:
        announcement = await lan.announce_on_lan(
            RUN, [f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"], interfaces=LOOPBACK
        )
        helper = announcement._helper
        assert helper.stdin is not None
        helper.stdin.close()  # what the end of the parent does
        async with asyncio.timeout(10):
            await helper.wait()
        await announcement.close()

    asyncio.run(main())


def test_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lan.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -c constraints\.txt '\.\[lan\]'"):
        asyncio.run(lan.find_on_lan(None, 1.0))


def test_hostile_records_are_ignored() -> None:
    good = f"/ip4/10.0.0.1/tcp/4001/p2p/{STRANGER}"
    properties: dict[bytes, bytes | None] = {b"swarm": RUN.encode(), b"dnsaddr": good.encode()}
    assert lan._announced(properties) == (RUN, [good])
    assert lan._announced({**properties, b"swarm": b"\xff" * 32}) == ("", [])
    assert lan._announced({**properties, b"swarm": None}) == ("", [])
    bad = {b"dnsaddr2": b"/unix/x", b"dnsaddr3": b"\xff", b"dnsaddr4": None, b"x": b"/ip4/1.2.3.4"}
    assert lan._announced({**properties, **bad}) == (RUN, [good])
    many = {b"dnsaddr%d" % n: good.replace("4001", str(n + 1)).encode() for n in range(50)}
    assert len(lan._announced({**properties, **many})[1]) == lan.MAX_ADDRESSES
    assert lan._worth_announcing([good, f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"]) == [good]


def test_many_who_announce_a_run_make_no_link_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anyone on the network can announce, under as many peer ids as he likes."""
    told = [
        {"run": RUN, "addresses": [f"/ip4/10.0.{n}.{m}/tcp/1/p2p/{STRANGER}" for m in range(8)]}
        for n in range(5)
    ]

    async def start(arguments: object) -> None:
        return None

    async def read(helper: object) -> object:
        return told.pop(0) if told else None

    monkeypatch.setattr(lan, "require_lan", lambda: None)
    monkeypatch.setattr(lan, "_start", start)
    monkeypatch.setattr(lan, "_read", read)
    monkeypatch.setattr(lan, "_stop", start)
    (link,) = asyncio.run(lan.find_on_lan(RUN, 60.0))
    assert len(parse_link(link).addresses) == 32
