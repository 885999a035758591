"""Join links: they round-trip, and whatever else people paste is refused in one line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import JoinError
from swarm.net.link import farthest_first, format_link, parse_link, wrong_with_address

RUN = "0123456789abcdef0123456789abcdef"
PEER = "12D3KooWCXFeDz2JfyUmv3C3ecF2czRUwbpNzyx7sd3MU72RgBse"
RSA_PEER = "QmVwu3J6XHhm1m6HveUa7XxsadnyRWPqjwdmC8hiouPQXQ"

hosts = st.one_of(
    st.ip_addresses(v=4).map(lambda ip: f"/ip4/{ip}"),
    st.ip_addresses(v=6).map(lambda ip: f"/ip6/{ip}"),
    st.from_regex(r"/dns4?/[a-z][a-z0-9]{0,10}(\.[a-z]{1,8}){1,3}", fullmatch=True),
)
doors = st.integers(1, 65535).flatmap(
    lambda port: st.sampled_from([f"/tcp/{port}", f"/udp/{port}/quic-v1", f"/tcp/{port}/ws"])
)
ends = st.sampled_from(
    [f"/p2p/{PEER}", f"/p2p/{RSA_PEER}", f"/p2p/{RSA_PEER}/p2p-circuit/p2p/{PEER}"]
)
addresses = st.builds(lambda *parts: "".join(parts), hosts, doors, ends)


@settings(deadline=None)
@given(
    st.text("0123456789abcdef", min_size=32, max_size=32),
    st.lists(addresses, min_size=1, max_size=5),
)
def test_round_trip(run_id: str, where: list[str]) -> None:
    link = parse_link(f"  {format_link(run_id, where)}\n")
    assert link.run_id == run_id
    assert link.addresses == tuple(dict.fromkeys(where))
    assert parse_link(str(link)) == link
    assert set(link.by_peer) <= {PEER, RSA_PEER}


def refused(text: str) -> str:
    with pytest.raises(JoinError) as caught:
        parse_link(text)
    message = str(caught.value)
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 400
    return message


@settings(deadline=None)
@given(st.text())
def test_any_text_is_refused_in_one_line(text: str) -> None:
    refused(text)
    refused(f"swarm://{RUN}@{text}")
    refused(f"swarm://{text}@/ip4/1.2.3.4/tcp/1/p2p/{PEER}")
    refused(f"swarm://{RUN}@/ip4/1.2.3.4/tcp/1/p2p/{PEER},{text}")


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["ip4", "tcp", "p2p", "1.2.3.4", "1", PEER, "", "p2p-circuit", "ws"]))
)
def test_address_checker_never_fails(parts: list[str]) -> None:
    assert isinstance(wrong_with_address("/".join(parts)), str)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("https://example.org", "not a join link"),
        (f"swarm://{RUN}", "no @"),
        (f"swarm://{RUN[:-1]}@/ip4/1.2.3.4/tcp/1/p2p/{PEER}", "run id"),
        (f"swarm://{RUN}@/ip4/1.2.3.4/tcp/1", "must end in /p2p/PEER_ID"),
        (f"swarm://{RUN}@/ip4/1.2.3.400/tcp/1/p2p/{PEER}", "IPv4"),
        (f"swarm://{RUN}@/ip6/::g/tcp/1/p2p/{PEER}", "IPv6"),
        (
            f"swarm://{RUN}@/ip6/fe80::1%a..b/tcp/1/p2p/{PEER}",
            "has a zone, which no multiaddress can have",
        ),
        (f"swarm://{RUN}@/ip4/1.2.3.4/tcp/70000/p2p/{PEER}", "port"),
        (f"swarm://{RUN}@/ip4/1.2.3.4/tcp/0/p2p/{PEER}", "port"),
        (f"swarm://{RUN}@/ip4/1.2.3.4/tcp/1/p2p/{PEER}x", "peer id"),
        (f"swarm://{RUN}@/unix/tmp/x/p2p/{PEER}", "unknown part"),
        (f"swarm://{RUN}@/p2p/{PEER}", "network address"),
        (f"swarm://{RUN}@{'x' * 10_000}", "longer than"),
        (
            f"swarm://{RUN}@" + ",".join(f"/ip4/1.2.3.{i}/tcp/1/p2p/{PEER}" for i in range(33)),
            "more than",
        ),
    ],
)
def test_what_is_said(text: str, said: str) -> None:
    assert said in refused(text)


def test_the_addresses_that_reach_farthest_come_first() -> None:
    own, docker, lan = "/ip4/127.0.0.1/tcp/1", "/ip4/172.17.0.1/tcp/1", "/ip4/192.168.1.5/tcp/1"
    public, six, name = "/ip4/8.8.8.8/tcp/1", "/ip6/2600::1/tcp/1", "/dns4/a.example/tcp/1"
    relay, odd = "/ip4/8.8.8.8/tcp/1/p2p/R/p2p-circuit", ("/ip6zone/eth0/ip6/fe80::1", "/ip4/x", "")
    assert farthest_first([own, docker, relay, lan, *odd, public, six, "/ip6/::1/tcp/1", name]) == [
        *(public, six, name),
        *(docker, lan),
        relay,
        *(own, *odd, "/ip6/::1/tcp/1"),
    ]
