"""A trainer's disk: what it has promised survives, and two processes never vote with one disk."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from peer.disk import FileDisk, write_durably
from swarm.consensus import Acceptance, Key, Vote
from swarm.errors import StorageError
from swarm.terms import Ballot, Record, Term

TERM = Term(0, 4, "trainer#1")
RECORD = Record(Ballot(TERM, 3, 1), "", {0: ("a#1",)}, {0: "00"}, 1.0, 1.0, 0.1, "applied", 2.0, 8)
PROMISE = Vote(TERM)
COMMITTED = Vote(TERM, RECORD, Acceptance(Key(TERM, 4, 1), None))


def test_promise_and_record_survive(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path / "trainer")
    assert disk.vote == Vote()
    asyncio.run(disk.save(PROMISE))
    asyncio.run(disk.save(COMMITTED))
    disk.close()
    again = FileDisk(tmp_path / "trainer")
    assert again.vote == COMMITTED
    again.close()
    assert sorted(os.listdir(tmp_path / "trainer")) == ["trainer.lock", "trainer.msgpack"]


def test_one_process_per_disk(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path)
    with pytest.raises(StorageError, match="another process leads"):
        FileDisk(tmp_path)
    disk.close()
    FileDisk(tmp_path).close()


@pytest.mark.parametrize("damage", [None, b"", b"\x00" * 40, b"\x81\xa8promised\xc0"])
def test_damage_is_refused(tmp_path: Path, damage: bytes | None) -> None:
    disk = FileDisk(tmp_path)
    asyncio.run(disk.save(COMMITTED))
    disk.close()
    path = tmp_path / "trainer.msgpack"
    path.write_bytes(path.read_bytes()[:-5] if damage is None else damage)
    with pytest.raises(StorageError, match="damaged"):
        FileDisk(tmp_path)


def test_what_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FileDisk(tmp_path)
    asyncio.run(disk.save(PROMISE))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        asyncio.run(disk.save(COMMITTED))
    monkeypatch.undo()
    assert disk.vote == PROMISE
    disk.close()
    again = FileDisk(tmp_path)
    assert again.vote == PROMISE
    again.close()
    assert sorted(os.listdir(tmp_path)) == ["trainer.lock", "trainer.msgpack"]


def test_a_disk_that_is_read_only_now_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(StorageError, match="Read-only file system"):
        write_durably(tmp_path / "file", b"new")


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"]
