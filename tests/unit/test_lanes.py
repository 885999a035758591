"""Letters, in which a peer's key says that a lane speaks for it; hostile ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm.errors import WireError
from swarm.net.identity import Identity, load_identity
from swarm.net.lanes import CONTEXT, MAX_FIELD_BYTES, read_letter, write_letter

LANE = "12D3KooWQuiteAnotherPeerIdThatLibp2pHasVerifiedAlready"


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return load_identity(tmp_path / "identity.key")


class Bytes:
    """A stream that holds these bytes; what was asked for is kept."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, list[int]()

    async def read(self, num_bytes: int) -> bytes:
        self.asked.append(num_bytes)
        if num_bytes > len(self.data):
            raise ConnectionError("closed by the daemon")
        taken, self.data = self.data[:num_bytes], self.data[num_bytes:]
        return taken


def read(letter: bytes, lane: str = LANE) -> str:
    return asyncio.run(read_letter(Bytes(letter).read, lane))


def fields(*values: bytes) -> bytes:
    return b"".join(len(each).to_bytes(2, "little") + each for each in values)


def test_a_letter_names_who_wrote_it_and_nothing_after_it_is_read(identity: Identity) -> None:
    stream = Bytes(write_letter(identity, LANE) + b"the first bytes of the stream")
    assert asyncio.run(read_letter(stream.read, LANE)) == identity.peer_id
    assert stream.data == b"the first bytes of the stream"


def test_a_letter_serves_no_other_lane(identity: Identity) -> None:
    """Who has seen one cannot speak for its writer."""
    with pytest.raises(WireError, match="speaks for nobody"):
        read(write_letter(identity, LANE), "12D3KooWSomebodyElse")


def test_a_signature_for_something_else_is_no_letter(identity: Identity) -> None:
    other = identity.sign("directory record", LANE.encode())
    with pytest.raises(WireError, match="speaks for nobody"):
        read(fields(identity.public_key, other))


def test_the_key_of_another_is_no_letter(identity: Identity, tmp_path: Path) -> None:
    victim = load_identity(tmp_path / "victim.key")
    with pytest.raises(WireError, match="speaks for nobody"):
        read(fields(victim.public_key, identity.sign(CONTEXT, LANE.encode())))


@pytest.mark.parametrize("key", [b"\x08\x01\x12\x20" + bytes(31), b"no key at all", bytes(1000)])
def test_what_is_no_key_is_no_letter(key: bytes, identity: Identity) -> None:
    with pytest.raises(WireError, match="speaks for nobody"):
        read(fields(key, identity.sign(CONTEXT, LANE.encode())))


@pytest.mark.parametrize("length", [0, MAX_FIELD_BYTES + 1, 0xFFFF])
@pytest.mark.parametrize("which", [0, 1])
def test_no_field_is_read_that_is_empty_or_too_long(
    length: int, which: int, identity: Identity
) -> None:
    before = fields(identity.public_key) if which else b""
    stream = Bytes(before + length.to_bytes(2, "little") + bytes(length))
    with pytest.raises(WireError, match=f"of {length} bytes"):
        asyncio.run(read_letter(stream.read, LANE))
    assert stream.asked[-1] == 2


def test_a_letter_that_ends_early_is_an_end(identity: Identity) -> None:
    with pytest.raises(ConnectionError):
        read(write_letter(identity, LANE)[:-1])
