"""Terms, ballots, records: order, canonical bytes, hostile bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.calls import MicrobatchCall
from swarm.errors import WireError
from swarm.terms import MAX_COUNTER, Ballot, Record, Term, new_incarnation

GOLDEN = Path(__file__).parent.parent / "golden"
TERM = Term(0, 3, "trainer#1a")
RECORD = Record(
    Ballot(TERM, 7, 2),
    "ab" * 32,
    {0: ("a#1", "b#1"), 1: ("c#1",)},
    {0: "00", 1: "11"},
    1.5,
    0.25,
    1e-3,
    "applied",
    2.5,
    64,
)


def test_the_bytes_of_records_and_of_microbatch_calls() -> None:
    """They are part of the protocol, and a record's hash is taken over them: with other bytes here
    `PROTOCOL_VERSION` is to grow."""
    record = replace(
        RECORD,
        fingerprints={0: "22", 1: "33"},
        base=4,
        saved=6,
        checkpoint="cd" * 32,
        voters={"trainer": "disk"},
    )
    call = MicrobatchCall(TERM, 7, 5, 1, 2, ("a#1", "c#1"), 1, 64.0, replay=True)
    assert record.pack() == (GOLDEN / "record.bin").read_bytes()
    assert msgpack.packb(call.body()) == (GOLDEN / "microbatch_call.bin").read_bytes()


def test_terms_order_by_epoch_counter_incarnation() -> None:
    assert Term(1, 0, "a#1") > Term(0, 9, "z#9") > Term(0, 9, "a#1") > Term(0, 8, "z#9")
    assert TERM.trainer == "trainer"
    assert new_incarnation("p") != new_incarnation("p")


@pytest.mark.parametrize(
    "value",
    [None, [], [0, 1], [0, 1, 2], [-1, 0, "a"], [0, MAX_COUNTER, "a"], [0, 1, "a" * 256], "term"],
)
def test_what_is_no_term(value: object) -> None:
    with pytest.raises(WireError):
        Term.read(value)
    with pytest.raises(WireError):
        Ballot.read([value, 0, 0])


def test_a_record_survives_its_bytes() -> None:
    assert Record.unpack(RECORD.pack()) == RECORD
    assert Record.unpack(RECORD.pack()).hash == RECORD.hash
    skipped = Record(RECORD.ballot, "", {}, {}, math.nan, 1.0, 0.0, "skipped", math.nan, 0)
    assert math.isnan(Record.unpack(skipped.pack()).norm)


def test_the_hash_does_not_depend_on_the_order_of_stages() -> None:
    turned = Record(
        RECORD.ballot,
        RECORD.predecessor,
        dict(reversed(list(RECORD.members.items()))),
        dict(reversed(list(RECORD.gradients.items()))),
        *(1.5, 0.25, 1e-3, "applied", 2.5, 64),
    )
    assert turned.hash == RECORD.hash


def nested(depth: int) -> list[Any]:
    """Lists in lists: deeper than Python can turn into text."""
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def test_records_that_contradict_themselves() -> None:
    fields = msgpack.unpackb(RECORD.pack())
    for change in (
        {"outcome": "maybe"},
        {"predecessor": nested(900)},
        {"ballot": [list(TERM), -1, 0]},
        {"members": 3},
        {"members": [[math.inf, ["a"]]]},
        {"gradients": [[0]]},
        {"norm": "large"},
        {"tokens": None},
        {"tokens": 1e300},
        {"members": [[1e300, ["a"]]]},
    ):
        with pytest.raises(WireError):
            Record.unpack(msgpack.packb({**fields, **change}))
    for name in fields:
        with pytest.raises(WireError):
            Record.unpack(msgpack.packb({k: v for k, v in fields.items() if k != name}))
    with pytest.raises(WireError):
        Record.unpack("text")
    with pytest.raises(WireError):
        Record.unpack(bytes(2 << 20))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 250), st.integers(0, 255))
def test_hostile_bytes_are_a_wire_error_or_a_record(junk: bytes, at: int, byte: int) -> None:
    packed = bytearray(RECORD.pack())
    packed[at % len(packed)] = byte
    for data in (junk, bytes(packed), bytes(packed[:at])):
        try:
            assert len(Record.unpack(data).hash) == 64
        except WireError:
            continue
