"""Documents from files: the standard library, text, JSON lines. Streamed, and split in two parts.

Why this way: `stdlib` is real text that is on every machine with Python, so a first run downloads
nothing. Files larger than memory pass in blocks of about 1 MiB. The split needs no second copy and
no random state: a document goes to validation by the hash of its *content*, so copies of a document
never land on both sides; a handful of text files, too few for that, give the last share of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from swarm.errors import DataError

VALIDATION_SHARE = 0.05
UNREADABLE = "make it readable, or choose other data"
_FEW_FILES = 100  # below, every text file is cut; from here on whole files are dealt
_BLOCK_BYTES = 2**20
_MAX_LINE_BYTES = 2**28

# Left out of `stdlib`: tests, installed packages, what is generated for one machine, and parts that
# distributions ship separately, so that the same Python version gives the same bytes more often.
_SKIP_FOLDERS = frozenset((
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "idlelib",
    "tkinter", "turtledemo", "ensurepip", "distutils", "lib2to3", "lib-dynload",
))  # fmt: skip
_SKIP_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize", "turtle.py", "build-details")


class Block(NamedTuple):
    """A piece of a document; `last` ends the document."""

    validation: bool
    data: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: Path
    sha256: str
    size: int


def list_files(source: str, path: Path | None) -> list[Path]:
    """The files of a source in the order they are read. Raises DataError when there are none."""
    if source == "stdlib":
        return _stdlib_files()
    root = path or Path()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"no data at {root}", "set data.path to a file or a directory")
    suffix = ".txt" if source == "text" else ".jsonl"
    found = [p for p in _walk(root) if p.name.endswith(suffix) and _is_file(p)]
    if not found:
        raise DataError(f"no {suffix} files in {root}", "set data.path to where the data are")
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def _walk(root: Path) -> Iterator[Path]:
    """What lies under a directory, links to directories not followed. `rglob` would leave out what
    it cannot read without a word. Raises DataError."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}", UNREADABLE) from None

    for folder, _, names in os.walk(root, onerror=refuse):
        yield from (Path(folder, name) for name in names)


def _is_file(path: Path) -> bool:
    """Raises DataError at a link to what is not there, as on a disk that is not mounted."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", UNREADABLE) from None


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        if any(f in _SKIP_FOLDERS or f.startswith("config-") for f in folders):
            continue
        if not path.name.startswith(_SKIP_FILES) and path.is_file():
            found.append(path)
    if not found:
        raise DataError(
            f"this Python ({sys.executable}) has no library sources in {root}",
            'use a Python that has them, or data.source = "text" with data.path',
        )
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def read_blocks(source: str, files: Sequence[SourceFile], share: float) -> Iterator[Block]:
    """Every document of the files, in order, in blocks. `share` goes to validation.

    Raises DataError, naming the line, for JSON lines that cannot be read.
    """
    if source == "jsonl":
        yield from _read_json_lines(files, share)
        return
    cut_each = source == "text" and len(files) < _FEW_FILES
    for file in files:
        with _open(file.path) as stream:
            if cut_each:
                cut = _tail_start(stream, file.size)
                yield from _read_document(stream, 0, cut, False)
                yield from _read_document(stream, cut, file.size, True)
            else:
                validation = document_rank(file.sha256) < share
                yield from _read_document(stream, 0, file.size, validation)


def least_rank(source: str, files: Sequence[SourceFile]) -> float:
    """The lowest rank of any document: a share just above it gives validation at least one."""
    if source == "jsonl":
        texts = (text for file in files for text in _texts(file.path))
        return min((document_rank(_sha256(text)) for text in texts), default=1.0)
    return min((document_rank(file.sha256) for file in files), default=1.0)


def document_rank(sha256: str) -> float:
    """Where a document's hash falls in [0, 1)."""
    return int(sha256[:13], 16) / 16.0**13


def _read_document(stream: BinaryIO, start: int, stop: int, validation: bool) -> Iterator[Block]:
    if stop <= start:
        return
    stream.seek(start)
    left, carry = stop - start, b""
    while left > 0:
        data = stream.read(min(_BLOCK_BYTES, left))
        left = left - len(data) if data else 0
        data = carry + data
        cut = len(data) if left == 0 else _cut(data)
        carry = data[cut:]
        yield Block(validation, data[:cut], left == 0)


def _cut(data: bytes) -> int:
    """Where a block ends: after its last line, or at least not inside a character."""
    end = data.rfind(b"\n") + 1
    return end or _character_start(data, len(data))


def _character_start(data: bytes, position: int) -> int:
    """The last place at or before `position` where a UTF-8 character starts."""
    for back in range(min(4, position)):
        if data[position - back - 1] & 0xC0 != 0x80:  # a first byte; is its character whole?
            first = data[position - back - 1]
            length = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return position if length == back + 1 else position - back - 1
    return position


def _tail_start(stream: BinaryIO, size: int) -> int:
    """Where the last share of a text starts: a line's start if one is near, else a character's."""
    target = size - int(size * VALIDATION_SHARE)
    stream.seek(target)
    near = stream.read(min(2**16, (size - target) // 2))
    line = near.find(b"\n") + 1
    if line:
        return target + line
    ahead = 0
    while ahead < min(4, len(near)) and near[ahead] & 0xC0 == 0x80:
        ahead += 1
    return target + ahead


def _read_json_lines(files: Sequence[SourceFile], share: float) -> Iterator[Block]:
    for file in files:
        for text in _texts(file.path):
            yield Block(document_rank(_sha256(text)) < share, text, True)


def _texts(path: Path) -> Iterator[bytes]:
    with _open(path) as stream:
        number = 0
        while line := stream.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > _MAX_LINE_BYTES:
                raise _bad_line(path, number, "it is longer than 256 MiB")
            if not line.strip():
                continue
            try:
                item = json.loads(line, parse_int=float)  # an int may have too many digits
            except (ValueError, RecursionError) as error:
                raise _bad_line(path, number, f"it is not JSON ({error})") from None
            if not isinstance(item, dict) or not isinstance(item.get("text"), str):
                raise _bad_line(path, number, 'it has no field "text" with a string')
            yield item["text"].encode("utf-8", "replace")


def _bad_line(path: Path, number: int, why: str) -> DataError:
    return DataError(f"{path}, line {number}: {why}", 'every line must look like {"text": "..."}')


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", UNREADABLE) from None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
