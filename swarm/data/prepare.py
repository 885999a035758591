"""From files to token shards in the cache, once per content and tokenizer, whoever comes first.

Why this way: the folder's name is a hash of what went in, so a finished one is never changed and
needs no lock to be read. It is built beside its place and renamed, so a killed process leaves no half
folder; a file lock keeps several processes of one machine from building the same thing. Reading all
files for their hash is remembered by size and time of change, except for files that changed within
the last seconds, whose next change might not show.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.data import sources
from swarm.data.shards import SHARD_BYTES, Part, PartWriter, intact
from swarm.data.sources import UNREADABLE, SourceFile
from swarm.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    byte_tokenizer,
    load_pretrained,
    load_tokenizer_file,
    train_bpe,
)
from swarm.errors import DataError, StorageError
from swarm.spec import token_dtype

_FORMAT = 1
_BPE_FORMAT = 2  # how it learns
_RACY_S = 3.0
_ENCODE_BYTES = 2**20  # documents are encoded together up to this much text

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A finished folder of the cache."""

    directory: Path
    train: Part
    validation: Part
    tokenizer: Tokenizer


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    except RuntimeError:  # a user without an entry in passwd, as in containers
        raise StorageError("this user has no home directory", "set XDG_CACHE_HOME") from None
    return root / "swarm-parallel"


def prepare_tokens(
    source: str,
    path: Path | None,
    tokenizer: str,
    vocab_size: int,
    cache_dir: Path,
    report: Report = lambda line: None,
    shard_bytes: int = SHARD_BYTES,
    pretrained: Path | None = None,
) -> Prepared:
    """The shards of a source; built unless the cache has them.

    The tokenizer "pretrained" is that of the directory `pretrained`.

    Raises DataError for what is wrong with the data, StorageError for what is wrong with the cache.
    """
    with _storage(cache_dir):
        root = cache_dir / "data"
        root.mkdir(parents=True, exist_ok=True)
    files, stamp = _hashed(root, source, path)
    given = load_pretrained(pretrained, vocab_size) if pretrained is not None else None
    made_by: Any = [tokenizer, given.eos_id, _digest(given)] if given is not None else tokenizer
    if tokenizer == "bpe":
        made_by = [tokenizer, _BPE_FORMAT]
    recipe = [_FORMAT, source, made_by, vocab_size, shard_bytes, [f.sha256 for f in files]]
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]
    final = root / key
    prepared = _load(final, tokenizer, vocab_size, given)
    if prepared is not None:
        return prepared
    with _storage(cache_dir), _locked(root / f"{key}.lock"):
        prepared = _load(final, tokenizer, vocab_size, given)  # another process may have been first
        if prepared is not None:
            return prepared
        _clear_left_overs(root, key)
        building = Path(tempfile.mkdtemp(prefix=f"{key}.tmp-", dir=root))
        try:
            report(f"preparing {len(files)} files of {source} data")
            _build(building, source, files, tokenizer, vocab_size, report, shard_bytes, given)
            if stamp != _stamp([f.path for f in files]):
                raise DataError("the data changed while they were read", "try again")
            shutil.rmtree(final, ignore_errors=True)  # damaged, or _load had taken it
            building.rename(final)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        prepared = _load(final, tokenizer, vocab_size, given)
    if prepared is None:
        raise StorageError(f"what was written to {final} reads back changed", "check the disk")
    return prepared


def _clear_left_overs(root: Path, key: str) -> None:
    """Remove what killed processes were building: of `key`, whose lock is ours, and of others."""
    for left_over in root.glob("*.tmp-*"):
        whose = left_over.name.partition(".tmp-")[0]
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            if whose != key:
                stack.enter_context(_locked(root / f"{whose}.lock", wait=False))
            shutil.rmtree(left_over, ignore_errors=True)


def _build(
    directory: Path,
    source: str,
    files: list[SourceFile],
    kind: str,
    vocab_size: int,
    report: Report,
    shard_bytes: int,
    given: Tokenizer | None,
) -> None:
    share = sources.VALIDATION_SHARE
    tokenizer = given or byte_tokenizer()
    if kind == "bpe":
        report(f"training a tokenizer of {vocab_size} tokens")
        blocks = sources.read_blocks(source, files, share)
        tokenizer = train_bpe((b.data for b in blocks if not b.validation), vocab_size)
        tokenizer.save_tokenizer(directory)
    train, validation = _write(directory, source, files, share, tokenizer, shard_bytes)
    if not validation.tokens:  # few documents, none with a low hash: take the lowest
        share = math.nextafter(sources.least_rank(source, files), 1.0)
        for path in directory.glob("*.bin"):
            path.unlink()
        train, validation = _write(directory, source, files, share, tokenizer, shard_bytes)
    index = {"train": train.to_json(), "validation": validation.to_json()}
    with (directory / "index.json").open("x", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _write(
    directory: Path,
    source: str,
    files: list[SourceFile],
    share: float,
    tokenizer: Tokenizer,
    shard_bytes: int,
) -> tuple[Part, Part]:
    dtype = token_dtype(tokenizer.vocab_size)
    writers = [PartWriter(directory, n, dtype, shard_bytes) for n in ("train", "validation")]
    waiting: list[sources.Block] = []

    def encode() -> None:
        import numpy as np

        end = np.array([tokenizer.eos_id], dtype=dtype)
        encoded = tokenizer.encode_blocks([block.data for block in waiting])
        for block, tokens in zip(waiting, encoded, strict=True):
            writers[block.validation].append(tokens)
            if block.last:
                writers[block.validation].append(end)
        waiting.clear()

    try:
        waiting_bytes = 0
        for block in sources.read_blocks(source, files, share):
            waiting.append(block)
            waiting_bytes += len(block.data)
            if waiting_bytes >= _ENCODE_BYTES:
                encode()
                waiting_bytes = 0
        encode()
        train, validation = (writer.finish() for writer in writers)
    finally:
        for writer in writers:
            writer.close()
    return train, validation


def _digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.files[TOKENIZER_FILE]).hexdigest()


def _load(directory: Path, kind: str, vocab_size: int, given: Tokenizer | None) -> Prepared | None:
    """The folder if it is whole, else None."""
    try:
        index = json.loads((directory / "index.json").read_text(encoding="utf-8"))
        parts = [Part.from_json(index[name]) for name in ("train", "validation")]
        tokenizer = given or byte_tokenizer()
        if kind == "bpe":
            tokenizer = load_tokenizer_file(directory / "tokenizer.json", vocab_size)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not all(intact(directory, part) for part in parts):
        return None
    return Prepared(directory, parts[0], parts[1], tokenizer)


def _hashed(root: Path, source: str, path: Path | None) -> tuple[list[SourceFile], str]:
    """The source's files with their hashes, remembered in the cache while nothing changes."""
    paths = sources.list_files(source, path)
    stamp = _stamp(paths)
    memo = root / f"files-{stamp[:32]}.json"
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
        if len(known) == len(paths):
            return [SourceFile(p, *k) for p, k in zip(paths, known, strict=True)], stamp
    except (OSError, ValueError, TypeError):
        pass
    files = []
    newest = 0.0
    for file in paths:
        try:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                stat = os.fstat(stream.fileno())
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}", UNREADABLE) from None
        newest = max(newest, stat.st_mtime)
        files.append(SourceFile(file, digest, stat.st_size))
    if newest < time.time() - _RACY_S:  # the file system's clock, not the protocol's
        with _storage(root):
            _write_atomically(memo, [(f.sha256, f.size) for f in files])
    return files, stamp


def _stamp(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}", UNREADABLE) from None
        line = [str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ino]
        digest.update(json.dumps(line).encode())
    return digest.hexdigest()


def _write_atomically(path: Path, value: Any) -> None:
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Held by one process at a time; the kernel frees it when that process dies.

    Without `wait` it raises OSError while another holds it.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _storage(directory: Path) -> Iterator[None]:
    """Turns what the operating system says about the cache into one line with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            remedy = "free some space, or set XDG_CACHE_HOME to another disk"
        else:
            remedy = "set XDG_CACHE_HOME to a directory that can be written"
        raise StorageError(f"cannot write to {directory}: {error.strerror}", remedy) from None
