"""What a node keeps of the DHT, and whose records go where there is no room for all."""

from __future__ import annotations

import time
from typing import Any

import pytest

from swarm.net import record_store
from swarm.net.hivemind_quiet import import_hivemind
from swarm.net.record_store import RecordStore
from swarm.net.records import MAX_RECORDS_PER_KEY

import_hivemind()
from hivemind.dht.storage import DictionaryDHTValue  # noqa: E402

LEADER, PEERS, OTHER = "run/leader", "run/peers", "other"


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def new_store(clock: Clock) -> RecordStore:
    store = RecordStore(clock)
    store.keys, store.trainers = frozenset({LEADER, PEERS}), frozenset({"ann", "bob"})
    return store


def signers(store: RecordStore, key: str) -> set[str]:
    found = store.get(key)
    return set(found.value.data) if found is not None else set()


def room_for(monkeypatch: pytest.MonkeyPatch, records: int) -> bytes:
    """A budget of so many records with this value."""
    value = bytes(100)
    budget = records * record_store._size(value)
    monkeypatch.setattr(record_store, "MAX_STORED_BYTES", budget)
    return value


def test_later_records_replace_and_are_counted_once() -> None:
    clock = Clock()
    store = new_store(clock)
    end = clock.now + 60
    assert store.get(OTHER) is None
    assert store.store_subkey(OTHER, "x", b"one", end)
    assert store.store_subkey(OTHER, "x", b"one", end), "it is here already"
    assert not store.store_subkey(OTHER, "x", b"another", end)
    assert not store.store_subkey(OTHER, "x", b"earlier", end - 1)
    assert store.store_subkey(OTHER, "x", b"three", end + 1)
    assert store.get(OTHER).value.get("x") == (b"three", end + 1)
    assert store.get(OTHER).expiration_time == end + 1
    assert store.stored_bytes == record_store._size(b"three")
    assert not store.store(OTHER, b"plain", end + 9), "would hide the records under its key"
    assert not store.store_subkey(OTHER, "y", b"late", clock.now)


def test_a_dictionary_is_stored_whole_and_what_is_got_is_a_copy() -> None:
    """A lookup merges what others answer into what it got here."""
    clock = Clock()
    store = new_store(clock)
    end = clock.now + 60
    store.store_subkey(OTHER, "a", b"1", end)
    several = DictionaryDHTValue()
    for signer in "abc":
        several.store(signer, b"1", end)
    assert store.store(OTHER, several, clock.now + 1e9)
    assert store.get(OTHER).expiration_time == end, "the records', not what the answer says"
    store.get(OTHER).value.store("forged", b"1", end)
    several.store("forged", b"1", end)
    assert signers(store, OTHER) == {"a", "b", "c"}
    assert [(key, len(found.value)) for key, found in store.items()] == [(OTHER, 3)]


def test_what_has_expired_is_not_found_and_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = new_store(clock)
    value = room_for(monkeypatch, 2)
    assert store.store_subkey(OTHER, "a", value, clock.now + 30)
    assert store.store_subkey(OTHER, "b", value, clock.now + 90)
    clock.now += 31
    assert signers(store, OTHER) == {"b"}
    assert store.store_subkey(OTHER, "c", value, clock.now + 60)
    assert signers(store, OTHER) == {"b", "c"}


def test_strangers_push_nobody_out_and_the_oldest_of_theirs_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    store = new_store(clock)
    value = room_for(monkeypatch, 4)
    end = clock.now + 60
    for number in range(3):
        assert store.store_subkey(f"other{number}", "x", value, end)
    assert store.store_subkey(PEERS, "x", value, end)
    assert not store.store_subkey("more", "x", value, end + 60)
    assert store.store_subkey("other0", "x", value, end + 1), "one that is renewed takes no more"
    assert not store.store_subkey("other0", "x", value + b"+", end + 2)
    assert store.store_subkey(PEERS, "y", value, end)
    assert store.store_subkey(LEADER, "ann", value, end)
    assert [key for key, _ in store.items()] == [PEERS, "other0", LEADER]
    assert store.store_subkey(LEADER, "y", value, end)
    assert not store.store_subkey(LEADER, "z", value, end + 60), "none of a lower rank is left"
    assert store.store_subkey(LEADER, "bob", value, end)
    assert (signers(store, PEERS), signers(store, LEADER)) == ({"y"}, {"ann", "y", "bob"})
    assert store.stored_bytes == record_store.MAX_STORED_BYTES


def test_a_trainer_finds_a_place_under_a_key_that_is_full() -> None:
    clock = Clock()
    store = new_store(clock)
    end = clock.now + 60
    for number in range(MAX_RECORDS_PER_KEY):
        assert store.store_subkey(LEADER, f"s{number}", b"", end)
    assert store.store_subkey(LEADER, "s0", b"", end + 1), "renewed: not the oldest any more"
    assert not store.store_subkey(LEADER, "stranger", b"", end + 60)
    assert store.store_subkey(LEADER, "ann", b"", end)
    assert store.store_subkey(LEADER, "ann", b"", end + 1)
    found = signers(store, LEADER)
    assert len(found) == MAX_RECORDS_PER_KEY
    assert {"ann", "s0", "s2"} < found
    assert "s1" not in found


def test_keys_are_bounded_and_those_of_the_run_find_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_store, "MAX_STORED_KEYS", 3)
    clock = Clock()
    store = new_store(clock)
    stored: list[Any] = [
        store.store_subkey(f"other{number}", "x", b"", clock.now + 60) for number in range(4)
    ]
    assert stored == [True, True, True, False]
    assert store.store_subkey(PEERS, "x", b"", clock.now + 60)
    assert [key for key, _ in store.items()] == ["other1", "other2", PEERS]


def test_the_runs_keys_full_of_the_largest_records_fit() -> None:
    largest = record_store._size(bytes((16 << 10) + 8))
    assert 2 * MAX_RECORDS_PER_KEY * largest < record_store.MAX_STORED_BYTES / 4
