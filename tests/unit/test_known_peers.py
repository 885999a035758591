"""What a leader keeps of where its replicas were, and what it believes of such a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.known_peers import FILE, MAX_ADDRESSES, MAX_BYTES, MAX_PEERS, KnownPeers
from swarm.net.identity import load_identity


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    where = tmp_path_factory.mktemp("keys")
    return [load_identity(where / f"{i}.key").peer_id for i in range(4)]


def at(peer: str, port: int) -> str:
    return f"/ip4/10.0.0.1/tcp/{port}/p2p/{peer}"


def test_who_was_seen_last_is_asked_first_in_the_next_life(
    tmp_path: Path, peers: list[str]
) -> None:
    known = KnownPeers(tmp_path)
    assert known.addresses == []
    known.note({f"{peers[0]}#1": [at(peers[0], 1), at(peers[0], 2)]})
    known.note({f"{peers[1]}#7": [at(peers[1], 3)]})
    again = KnownPeers(tmp_path)
    assert again.addresses == [at(peers[1], 3), at(peers[0], 1), at(peers[0], 2)]
    again.note({f"{peers[0]}#2": [at(peers[0], 9)]})  # back at another port
    assert KnownPeers(tmp_path).addresses == [at(peers[0], 9), at(peers[1], 3)]
    again.note({})
    assert KnownPeers(tmp_path).addresses == [at(peers[0], 9), at(peers[1], 3)]


def test_addresses_of_others_or_of_nothing_are_not_kept(tmp_path: Path, peers: list[str]) -> None:
    known = KnownPeers(tmp_path)
    known.note({f"{peers[0]}#1": [at(peers[1], 1), "nonsense", "/ip4/10.0.0.1/tcp/5"]})
    assert known.addresses == []
    assert not (tmp_path / FILE).exists()


def test_it_is_bounded(tmp_path: Path, peers: list[str]) -> None:
    many = {f"{peers[0]}#1": [at(peers[0], port) for port in range(1, 100)]}
    known = KnownPeers(tmp_path)
    known.note(many)
    assert len(known.addresses) == MAX_ADDRESSES
    names = [peers[0][:-3] + a + b + c for a in "abcdefg" for b in "abcdefg" for c in "abcdefg"]
    file = tmp_path / FILE
    file.write_text(json.dumps({"addresses": [at(name, 1) for name in names]}))
    assert 0 < len(KnownPeers(tmp_path).addresses) <= MAX_PEERS
    file.write_text(" " * (MAX_BYTES + 1))
    assert KnownPeers(tmp_path).addresses == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"addresses": 3}', '{"addresses": [1, "x", null]}']
)
def test_a_damaged_file_is_no_file(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert KnownPeers(tmp_path).addresses == []


@pytest.mark.parametrize("where", ["gone", "file"])
def test_a_disk_that_refuses_costs_nothing(tmp_path: Path, peers: list[str], where: str) -> None:
    (tmp_path / "file").write_text("")
    known = KnownPeers(tmp_path / where)
    known.note({f"{peers[0]}#1": [at(peers[0], 1)]})
    assert known.addresses == [at(peers[0], 1)]
