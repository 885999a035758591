"""What a trainer must not forget: its promise and the newest record, synced before it answers.

Written whole, to a new file that replaces the old one, so a crash leaves either. One process per
directory: a second one on the same disk would vote twice (DESIGN, "Leaders").
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import Protocol

import msgpack

from swarm.consensus import Vote
from swarm.errors import StorageError, WireError


class VoteDisk(Protocol):
    """Durable memory of one trainer."""

    vote: Vote
    id: str  # of this disk, for ever

    async def save(self, vote: Vote) -> None:
        """Durable when it returns. Raises StorageError; then nothing has changed."""


class MemoryDisk:
    """For tests: outlives a simulated process, not this one."""

    def __init__(self, disk_id: str = "first disk") -> None:
        self.vote, self.id = Vote(), disk_id

    async def save(self, vote: Vote) -> None:
        self.vote = vote


class FileDisk:
    """`directory/trainer.msgpack`. Raises StorageError when another process holds it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "trainer.msgpack"
        self.vote, self.id = Vote(), ""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = open(directory / "trainer.lock", "w")  # noqa: SIM115 (held for life)
        except OSError as error:
            raise _unusable(directory, error) from None
        try:
            self._read(directory)
        except StorageError:
            self.close()
            raise

    def _read(self, directory: Path) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = self._path.read_bytes() if self._path.exists() else None
        except BlockingIOError:
            raise StorageError(
                f"another process leads with the data in {directory}", "stop it, or wait for it"
            ) from None
        except OSError as error:
            raise _unusable(directory, error) from None
        if data is not None:  # an empty file is damage, and no new disk
            try:
                value = msgpack.unpackb(data)
                self.vote, self.id = Vote.unpack(value), str(value["disk"])
            except (WireError, KeyError, TypeError, ValueError, msgpack.UnpackException):
                raise StorageError(
                    f"{self._path} is damaged",
                    "remove it: this trainer has then lost its memory (docs/operations.md)",
                ) from None

        if not self.id:
            self.id = secrets.token_hex(8)
            write_durably(self._path, self._bytes_of(self.vote))

    def _bytes_of(self, vote: Vote) -> bytes:
        packed: bytes = msgpack.packb({**vote.pack(), "disk": self.id})
        return packed

    async def save(self, vote: Vote) -> None:
        await asyncio.to_thread(write_durably, self._path, self._bytes_of(vote))
        self.vote = vote

    def close(self) -> None:
        self._lock.close()


def _unusable(directory: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot use {directory}: {error.strerror}", "choose another directory with --dir"
    )


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, synced. Raises StorageError (disk full, no permission)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        with contextlib.suppress(OSError):  # a disk that is read-only now says so again
            temporary.unlink()
        raise StorageError(
            f"cannot write {path}: {error.strerror}", "free some space or choose another directory"
        ) from None
