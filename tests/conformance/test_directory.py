"""One conformance suite for every `Directory`, and what only the real one can be asked."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from swarm.errors import JoinError
from swarm.net import record_store
from swarm.net.directory import DhtDirectory
from swarm.net.identity import Identity, claim_identity, load_identity
from swarm.net.libp2p import Libp2pTransport
from swarm.net.records import (
    MAX_RECORD_BYTES,
    MAX_RECORDS_PER_KEY,
    MAX_TTL_S,
    leader_key,
    seal,
)
from swarm.net.transport import Directory
from tests.conformance.networks import dht_directories, memory_directories

Check = Callable[[list[Directory]], Coroutine[Any, Any, None]]


async def check_records_of_several_peers(peers: list[Directory]) -> None:
    assert await peers[0].lookup("run/peers") == {}
    for number, peer in enumerate(peers):
        assert await peer.publish("run/peers", {"stage": number, "at": ["x", b"y", 1.5]}, 60.0)
    for peer in peers:
        found = await peer.lookup("run/peers")
        assert list(found) == sorted(found)
        assert sorted(record["stage"] for record in found.values()) == [0, 1, 2]  # type: ignore[type-var]
        assert all(record["at"] == ["x", b"y", 1.5] for record in found.values())
    assert await peers[1].lookup("run/other") == {}


async def check_later_record_replaces(peers: list[Directory]) -> None:
    for number in range(3):
        assert await peers[0].publish("key", {"number": number}, 60.0)
        found = await peers[2].lookup("key")
        assert [record["number"] for record in found.values()] == [number]


async def check_a_shorter_life_also_replaces(peers: list[Directory]) -> None:
    assert await peers[0].publish("key", {"number": 1}, 600.0)
    assert await peers[0].publish("key", {"number": 2}, 5.0)
    assert [r["number"] for r in (await peers[1].lookup("key")).values()] == [2]


async def check_expired_is_never_returned(peers: list[Directory]) -> None:
    assert await peers[0].publish("key", {"number": 1}, 2.0)
    assert len(await peers[1].lookup("key")) == 1
    await asyncio.sleep(2.1)
    assert await peers[1].lookup("key") == {}
    assert await peers[0].lookup("key") == {}


async def check_bounds_are_the_callers_mistake(peers: list[Directory]) -> None:
    for value, ttl_s in (
        ({"big": bytes(MAX_RECORD_BYTES)}, 60.0),
        ({}, MAX_TTL_S + 1),
        ({}, 0.0),
    ):
        with pytest.raises(ValueError, match="record"):
            await peers[0].publish("key", value, ttl_s)
    assert await peers[0].publish("key", {"fits": bytes(MAX_RECORD_BYTES - 2048)}, 60.0)
    assert len(await peers[2].lookup("key")) == 1


async def check_closed_finds_nothing(peers: list[Directory]) -> None:
    assert await peers[0].publish("key", {"number": 1}, 60.0)
    await peers[0].close()
    await peers[0].close()
    assert await peers[0].publish("key", {"number": 2}, 60.0) is False
    assert await peers[0].lookup("key") == {}


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
@pytest.mark.parametrize("kind", ["memory", "dht"])
def test_directory(kind: str, check: Check, tmp_path: Path) -> None:
    make = memory_directories if kind == "memory" else dht_directories(tmp_path)

    async def main() -> None:
        async with asyncio.timeout(60.0), make(3) as peers:
            await check(peers)

    asyncio.run(main())


def test_one_live_bootstrap_of_several_suffices_and_none_is_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        identities = [claim_identity(tmp_path) for _ in range(3)]
        first, second, third = [
            await Libp2pTransport.create(identity_path=identity.path) for identity in identities
        ]
        try:
            directory = await DhtDirectory.create(first, identities[0])
            assert await directory.publish("key", {"here": 1}, 60.0)
            gone = await Libp2pTransport.create()
            dead = list(gone.addresses)
            await gone.close()
            joined = await DhtDirectory.create(second, identities[1], [*dead, *first.addresses])
            assert len(await joined.lookup("key")) == 1

            begun = time.monotonic()
            with pytest.raises(JoinError) as caught:
                await DhtDirectory.create(third, identities[2], dead)
            assert time.monotonic() - begun < 10
            assert "\n" not in str(caught.value)
            assert "no swarm answers" in str(caught.value)

            # The first peer dies: those who know each other go on.
            await directory.close()
            await first.close()
            assert await joined.publish("key", {"here": 2}, 60.0)
            found = await joined.lookup("key")
            assert found[identities[1].peer_id] == {"here": 2}
            await joined.close()
        finally:
            for transport in (first, second, third):
                await transport.close()

    asyncio.run(main())


def test_forged_and_oversized_records_are_refused_by_those_who_store(tmp_path: Path) -> None:
    """Writes with hivemind's own node, as a hostile peer would."""

    async def main() -> None:
        async with dht_directories(tmp_path)(2) as peers:
            honest, hostile = peers
            assert isinstance(honest, DhtDirectory)
            assert isinstance(hostile, DhtDirectory)
            victim, attacker = honest._identity, hostile._identity
            assert await honest.publish("key", {"true": 1}, 60.0)
            now = time.time()
            far = now + 1e8
            good = seal(attacker, "key", {"a": 1}, now, now + 60)
            node = hostile._node
            node.protocol.record_validator = None
            put = node.protocol.call_store
            from hivemind.dht.routing import DHTID
            from hivemind.p2p import PeerID

            target, key = PeerID.from_base58(victim.peer_id), DHTID.generate(source="key")
            other = DHTID.generate(source="other")

            for key_id, value, expires, subkey in (
                (key, b"plain value over all subkeys", far, None),
                (key, good, far, attacker.peer_id),  # lives longer than signed
                (key, good, now + 60, victim.peer_id),  # in another's name
                (other, good, now + 60, attacker.peer_id),  # under another key
                (key, good[:-1] + bytes([good[-1] ^ 1]), now + 60, attacker.peer_id),
                (key, good, math.nan, attacker.peer_id),  # would never expire
                (key, bytes(1 << 20), now + 60, attacker.peer_id),
                (key, b"\xc1", now + 60, attacker.peer_id),
            ):
                packed = msgpack.packb(value)
                assert await put(target, [key_id], [packed], expires, [subkey]) == [False]
            assert await put(
                target, [key], [msgpack.packb(good)], now + 60, [attacker.peer_id]
            ) == [True]
            assert await honest.lookup("key") == {
                victim.peer_id: {"true": 1},
                attacker.peer_id: {"a": 1},
            }
            assert await honest.publish("key", {"true": 2}, 60.0)

    asyncio.run(main())


async def flood(
    peers: list[Directory],
    signers: list[Identity],
    key: str,
    value: dict[str, object],
    cached: bool,
) -> list[bool]:
    """Have the second of these peers store a record of each signer with the first: its answers."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

    there, here = peers[0], peers[1]
    assert isinstance(there, DhtDirectory)
    assert isinstance(here, DhtDirectory)
    now = time.time()
    answers = await here._node.protocol.call_store(
        PeerID.from_base58(there._identity.peer_id),
        [DHTID.generate(source=key)] * len(signers),
        [msgpack.packb(seal(signer, key, value, now, now + MAX_TTL_S)) for signer in signers],
        now + MAX_TTL_S,
        [signer.peer_id for signer in signers],
        in_cache=cached,
    )
    return list(answers)


def strangers(folder: Path, count: int) -> list[Identity]:
    return [load_identity(folder / f"stranger-{number}.key") for number in range(count)]


@pytest.mark.parametrize("cached", [False, True])
def test_strangers_are_bounded_in_signers_and_bytes(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with dht_directories(tmp_path)(2) as peers:
            signers = strangers(tmp_path, MAX_RECORDS_PER_KEY + 1)
            stored = await flood(peers, signers, "key", {}, cached)
            assert stored == [True] * MAX_RECORDS_PER_KEY + [False]

            assert isinstance(peers[0], DhtDirectory)
            budget = peers[0]._store.stored_bytes + 20 * MAX_RECORD_BYTES
            monkeypatch.setattr(record_store, "MAX_STORED_BYTES", budget)
            large: dict[str, object] = {"x": bytes(MAX_RECORD_BYTES - 2048)}
            taken: list[bool] = []
            for number in range(4):
                # Every other one goes the other way: the budget is of both together.
                way = cached ^ bool(number % 2)
                taken += await flood(peers, signers[:8], f"other{number}", large, way)
            assert 20 <= sum(taken) <= 22, "of 32"

    asyncio.run(main())


def test_a_record_in_the_cache_hides_none_that_is_stored(tmp_path: Path) -> None:
    """hivemind answers from whichever of its two stores has the later end."""

    async def main() -> None:
        async with dht_directories(tmp_path)(2) as peers:
            honest, hostile = peers
            assert isinstance(honest, DhtDirectory)
            assert isinstance(hostile, DhtDirectory)
            assert await honest.publish("key", {"true": 1}, 60.0)
            (stranger,) = strangers(tmp_path, 1)
            assert await flood(peers, [stranger], "key", {}, True) == [True]
            from hivemind.dht.routing import DHTID
            from hivemind.p2p import PeerID

            key = DHTID.generate(source="key")
            answer = await hostile._node.protocol.call_find(
                PeerID.from_base58(honest._identity.peer_id), [key]
            )
            assert set(answer[key][0].value.data) == {honest._identity.peer_id, stranger.peer_id}

    asyncio.run(main())


def test_strangers_under_the_leaders_key_do_not_keep_trainers_out(tmp_path: Path) -> None:
    run_id = "0" * 32
    key = leader_key(run_id)

    async def main() -> None:
        async with dht_directories(tmp_path)(2) as peers:
            signers = strangers(tmp_path, MAX_RECORDS_PER_KEY)
            for cached in (False, True):
                await flood(peers, signers, key, {}, cached)
            trainer = peers[1]
            assert isinstance(trainer, DhtDirectory)
            me = trainer._identity.peer_id
            for peer in peers:
                assert isinstance(peer, DhtDirectory)
                peer.prefer(run_id, [me])
            assert await trainer.publish(key, {"addresses": []}, 60.0)
            found = await peers[0].lookup(key)
            assert me in found
            assert len(found) == MAX_RECORDS_PER_KEY

    asyncio.run(main())


def test_a_lookup_that_is_cut_keeps_the_trainers(tmp_path: Path) -> None:
    """Nodes answer with different strangers, and all of them come together in a lookup."""
    run_id = "0" * 32
    key = leader_key(run_id)
    by_name = sorted(strangers(tmp_path, MAX_RECORDS_PER_KEY + 2), key=lambda each: each.peer_id)
    now = time.time()
    sealed = {
        each.peer_id: SimpleNamespace(value=seal(each, key, {}, now, now + 60)) for each in by_name
    }

    async def get(asked: str, latest: bool) -> Any:
        return SimpleNamespace(value=sealed)

    async def main() -> None:
        async with dht_directories(tmp_path)(1) as [directory]:
            assert isinstance(directory, DhtDirectory)
            directory._node.get = get
            last = by_name[-1].peer_id
            assert last not in await directory.lookup(key), "before a config nothing is known"
            directory.prefer(run_id, [last])
            found = await directory.lookup(key)
            assert last in found
            assert list(found) == sorted(found)
            assert len(found) == MAX_RECORDS_PER_KEY

    asyncio.run(main())


def test_clock_that_is_off_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        identities = [claim_identity(tmp_path) for _ in range(2)]
        transports = [await Libp2pTransport.create(identity_path=i.path) for i in identities]
        try:
            import hivemind.dht.protocol as protocol

            answer = protocol.DHTProtocol.rpc_ping

            @functools.wraps(answer)  # hivemind reads what it takes and gives from its annotations
            async def from_the_past(self: Any, request: Any, context: Any) -> Any:
                response = await answer(self, request, context)
                response.dht_time -= 60
                return response

            monkeypatch.setattr(protocol.DHTProtocol, "rpc_ping", from_the_past)
            directory = await DhtDirectory.create(transports[0], identities[0])
            with pytest.raises(JoinError, match="clock"):
                await DhtDirectory.create(transports[1], identities[1], transports[0].addresses)
            await directory.close()  # until here it is held, or it would not answer for long
        finally:
            for transport in transports:
                await transport.close()

    asyncio.run(main())
