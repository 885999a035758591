"""What happened in a run, as JSON lines that others can follow; and its present state as one file.

Every process of a run writes its own `events.jsonl`; terminal view, `swarm status`, dashboard and
replay read them (docs/events.md has the schema). Telling what happened must never hurt what
happens: writing is buffered and bounded (two files of at most `max_bytes`), and a full disk costs
one warning and the lines that did not fit, which are counted and noted once there is room again.
Readers take what is whole and skip what is not, because a process can be killed mid-line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

KINDS = frozenset(
    {
        "run", "joined", "admitted", "leaving", "left", "expelled", "failed", "round_failed",
        "diverged", "step", "validation", "checkpoint", "finished", "dropped",
        "bad_chunk", "hold", "suspected", "move", "moved", "move_refused",
        "second", "paused", "epoch", "damaged",
    }
)  # fmt: skip
# Who asked for a checkpoint would take the line of the one before for the answer, if it came late.
_AT_ONCE = frozenset({"checkpoint"})
_BUFFER_S = 0.5
_BUFFER_LINES = 256
_MAX_TEXT = 500
_MAX_LINE = 8192
_RENAMED = {"suspect": "replica", "member": "replica", "why": "reason"}


class EventLog:
    """Appends to `path`. No method raises for what the disk does; one process per file.

    A line is on disk at the latest with the next `emit` half a second later, `flush` or `close`;
    that of a checkpoint at once.
    """

    def __init__(
        self,
        path: str | Path,
        max_bytes: int = 16 * 2**20,
        clock: Callable[[], float] = time.time,
        listen: Callable[[Mapping[str, Any]], None] = lambda line: None,
    ) -> None:
        self._listen = listen  # told of every line, also of those that the disk refuses
        self.path, self.max_bytes = Path(path), max_bytes
        self.dropped = 0  # lines lost so far
        self._unreported = 0
        self._clock = clock
        self._buffer: list[bytes] = []
        self._flushed_at = -math.inf
        self._fd: int | None = None
        self._size = 0
        self._written = 0  # bytes of lines, over all files
        self._torn = False  # the file ends within a line
        self._warned = False

    def emit(self, event: str, **facts: Any) -> dict[str, Any]:
        """Note an event; returns it as readers will see it."""
        now = self._clock()
        line = {"t": round(now, 3), "event": event[:40]}
        line.update((str(key)[:40], plain_json(value)) for key, value in facts.items())
        data = json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode(
            "utf-8", "replace"
        )
        if len(data) > _MAX_LINE:
            line = {"t": line["t"], "event": line["event"], "truncated": True}
            data = json.dumps(line, separators=(",", ":")).encode()
        self._buffer.append(data + b"\n")
        self._listen(line)
        waited = abs(now - self._flushed_at)  # the wall clock may be set back
        if waited >= _BUFFER_S or len(self._buffer) >= _BUFFER_LINES or event in _AT_ONCE:
            self.flush()
        return line

    def probe(self, point: str, **facts: Any) -> None:
        """For `Leader(probe=…)`: notes the points that are events, under the schema's names."""
        if point in KINDS:
            self.emit(point, **{_RENAMED.get(key, key): value for key, value in facts.items()})

    def flush(self) -> None:
        """Write what is buffered. What cannot be written is dropped and counted."""
        if not self._buffer:
            return
        lines, self._buffer = self._buffer, []
        self._flushed_at = self._clock()
        if self._unreported:
            note = {"t": self._flushed_at, "event": "dropped", "count": self._unreported}
            lines.insert(0, json.dumps(note, separators=(",", ":")).encode() + b"\n")
        before = self._written
        try:
            self._write(b"".join(lines))
        except OSError as error:
            fitted = self._written - before
            noted = bool(self._unreported)
            for line in lines:
                fitted -= len(line)
                if fitted >= 0 and noted:
                    self._unreported = 0  # the note itself is on disk
                elif fitted < 0 and not noted:
                    self.dropped += 1
                    self._unreported += 1
                noted = False
            if not self._warned:
                self._warned = True
                reason = error.strerror or error
                log.warning("events are not being written to %s: %s", self.path, reason)
        else:
            self._unreported, self._warned = 0, False

    def close(self) -> None:
        self.flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        if self._fd is not None and self._size + len(data) > self.max_bytes:
            os.close(self._fd)
            self._fd = None
            os.replace(self.path, _older(self.path))
        if self._fd is None:
            self._open()
        assert self._fd is not None
        if self._torn:
            self._size += os.write(self._fd, b"\n")
            self._torn = False
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            self._written += written
            self._torn = view[written - 1] != 0x0A
            view = view[written:]

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._torn = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n"


class EventTail:
    """Follows an `events.jsonl` that another process writes: each `read` gives what is new.

    Survives rotation (unless two happen between reads) and a file that does not exist yet. With
    `from_end` it leaves out what is there already, as of an earlier start of the same run.
    """

    def __init__(self, path: str | Path, from_end: bool = False) -> None:
        self.path = Path(path)
        self._inode = 0
        self._offset = 0
        if from_end:
            self.read()

    def read(self) -> list[dict[str, Any]]:
        """The events completed since the last call, oldest first. Never raises."""
        events: list[dict[str, Any]] = []
        with contextlib.suppress(OSError):
            inode = os.stat(self.path).st_ino
            if inode != self._inode:
                with contextlib.suppress(OSError):
                    older = _older(self.path)
                    if self._inode in (0, os.stat(older).st_ino):
                        self._read(older, events)
                self._inode, self._offset = inode, 0
            self._read(self.path, events)
        return events

    def _read(self, path: Path, events: list[dict[str, Any]]) -> None:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset = 0  # it was emptied
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        events += _parse(data[:whole])


def tail_events(path: str | Path, since: float = 0.0) -> list[dict[str, Any]]:
    """All events later than `since` (unix seconds), oldest first, from both files. Never raises."""
    path, events = Path(path), []
    for each in (_older(path), path):
        with contextlib.suppress(OSError):
            events += [event for event in _parse(each.read_bytes()) if event["t"] > since]
    return events


def write_status(path: str | Path, status: Mapping[str, Any]) -> bool:
    """Replace a status file: readers see the old or the new one. False when the disk refuses."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    data = json.dumps(plain_json(status, limit=None), separators=(",", ":"), ensure_ascii=False)
    try:
        temporary.write_bytes(data.encode("utf-8", "replace"))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        log.debug("cannot write %s: %s", path, error)
        return False
    return True


def read_status(path: str | Path) -> dict[str, Any] | None:
    """The status last written; None when there is none or it is no JSON object."""
    try:
        value = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _parse(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("event"), str):
            t = value.get("t")
            if isinstance(t, int | float) and not isinstance(t, bool):
                yield value


def plain_json(value: Any, depth: int = 0, limit: int | None = _MAX_TEXT) -> Any:
    """What JSON can say of a value; numbers that JSON has not (inf, nan) become null.

    Texts are cut at `limit` characters; what lies deeper than six levels becomes text.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if limit is None or len(value) <= limit else value[: limit - 1] + "…"
    if depth < 6 and isinstance(value, Mapping):
        return {str(key): plain_json(each, depth + 1, limit) for key, each in value.items()}
    if depth < 6 and isinstance(value, list | tuple):
        return [plain_json(each, depth + 1, limit) for each in value]
    return plain_json(str(value), depth, limit if limit is not None else _MAX_TEXT)
