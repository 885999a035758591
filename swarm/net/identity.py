"""A peer's identity: a libp2p private key in a file, and signatures that anyone can check.

The file holds libp2p's private-key protobuf, what p2pd reads with `-id`. New keys are Ed25519: made
in microseconds, 64-byte signatures, and the peer id contains the public key. RSA keys, which
hivemind writes, are read too. Encodings: libp2p specs, `peer-ids/peer-ids.md`.

Signatures carry a context ("directory record", ...), so none can be replayed for another purpose,
and can never be mistaken for one of libp2p's own handshakes, which are made with the same key.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa

from swarm.errors import InUseError, StorageError

_RSA, _ED25519 = 0, 1
_MAX_KEY_BYTES = 8192
_MAX_IDENTITIES = 1000
_NAME = re.compile(r"identity(-[1-9][0-9]{0,2})?\.key")
_ELSEWHERE = "choose another place, by XDG_DATA_HOME or the flag that names it"
_MAX_RSA_EXPONENT = 1 << 32  # one as long as the key takes a hundred times as long to check


@dataclass(frozen=True)
class Identity:
    """A private key in `path`. `public_key` is libp2p's protobuf, which hashes to `peer_id`."""

    path: Path
    peer_id: str
    public_key: bytes
    _key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
    _lock: int | None = None

    def sign(self, context: str, data: bytes) -> bytes:
        message = _message(context, data)
        if isinstance(self._key, ed25519.Ed25519PrivateKey):
            return self._key.sign(message)
        return self._key.sign(message, padding.PKCS1v15(), hashes.SHA256())

    def release(self) -> None:
        """Give up the claim on the file; another process may then take this identity."""
        if self._lock is not None:
            os.close(self._lock)
            object.__setattr__(self, "_lock", None)


def verify(peer_id: str, public_key: bytes, context: str, data: bytes, signature: bytes) -> bool:
    """Whether `peer_id` signed this. False for anything malformed; never raises."""
    if len(public_key) > _MAX_KEY_BYTES or peer_id_of(public_key) != peer_id:
        return False
    message = _message(context, data)
    try:
        kind, body = _decode(public_key)
        if kind == _ED25519:
            ed25519.Ed25519PublicKey.from_public_bytes(body).verify(signature, message)
            return True
        key = serialization.load_der_public_key(body)
        if kind != _RSA or not isinstance(key, rsa.RSAPublicKey) or key.key_size > 8192:
            return False
        if key.public_numbers().e > _MAX_RSA_EXPONENT:
            return False
        key.verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
        return True
    except (InvalidSignature, ValueError, TypeError):
        return False


def peer_id_of(public_key: bytes) -> str:
    """The base58 peer id of a public key protobuf: the key itself if short, else its sha256."""
    if len(public_key) <= 42:
        multihash = b"\x00" + bytes([len(public_key)]) + public_key
    else:
        multihash = b"\x12\x20" + hashlib.sha256(public_key).digest()
    return str(base58.b58encode(multihash).decode())


def is_peer_id(text: str) -> bool:
    """Whether this has the form of a peer id (multihash, base58)."""
    if not 40 <= len(text) <= 64 or not text.isascii():
        return False
    try:
        data = base58.b58decode(text)
    except ValueError:
        return False
    return (data[:2] == b"\x12\x20" and len(data) == 34) or (
        data[:1] == b"\x00" and len(data) == data[1] + 2
    )


def load_identity(path: str | os.PathLike[str], *, create: bool = True) -> Identity:
    """Read the key file, making one (mode 0600) if there is none. Raises StorageError."""
    path = Path(path)
    try:
        if create and not path.exists():
            _create(path)
        with path.open("rb") as file:
            data = file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise _no_access(path, error) from None
    try:
        identity = _parse(path, data)
    except (ValueError, TypeError):
        raise StorageError(
            f"{path} is not a libp2p private key",
            "name another file, or move it away: where there is none, a new identity is made",
        ) from None
    try:
        # Only now: a file that was named by mistake stays as it is.
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise _no_access(path, error) from None
    return identity


def identity_files(data_dir: str | os.PathLike[str]) -> list[Path]:
    """The files that `claim_identity` made in this directory, in its order; a copy that somebody
    keeps beside them under another name is none of them."""
    found = [path for path in Path(data_dir).glob("identity*.key") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def claim_identity(data_dir: str | os.PathLike[str]) -> Identity:
    """The first identity in this directory that no other process uses.

    `identity.key`, then `identity-2.key`, ...: two peers of one machine are two peers, and each
    comes back as itself. The claim is a lock on the file, which ends with this process.
    """
    directory = Path(data_dir)
    for number in range(1, _MAX_IDENTITIES):
        path = directory / ("identity.key" if number == 1 else f"identity-{number}.key")
        identity = _claim(path)
        if identity is not None:
            return identity
    raise StorageError(f"all identities in {directory} are in use", _ELSEWHERE)


def claim_identity_file(path: str | os.PathLike[str]) -> Identity:
    """This identity and no other. Raises InUseError, StorageError."""
    identity = _claim(Path(path))
    if identity is None:
        raise InUseError(
            f"the identity {path} is in use by another process", "stop it or use another --identity"
        )
    return identity


def _claim(path: Path) -> Identity | None:
    identity = load_identity(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:  # it was there a moment ago
        raise _no_access(path, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise StorageError(
            f"cannot lock {path}: {(error.strerror or str(error)).lower()}",
            "keep it on a local disk, by XDG_DATA_HOME or the flag that names it",
        ) from None
    object.__setattr__(identity, "_lock", descriptor)
    return identity


def _no_access(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot read or write the identity {path}: {(error.strerror or str(error)).lower()}",
        _ELSEWHERE,
    )


def _create(path: Path) -> None:
    """Write a new key so that others see the whole file or none, and the first writer wins."""
    key = ed25519.Ed25519PrivateKey.generate()
    seed = key.private_bytes_raw()
    data = _encode(_ED25519, seed + key.public_key().public_bytes_raw())
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _parse(path: Path, data: bytes) -> Identity:
    kind, body = _decode(data)
    key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
    if kind == _ED25519 and len(body) in (64, 96):
        key = ed25519.Ed25519PrivateKey.from_private_bytes(body[:32])
        public_key = _encode(_ED25519, key.public_key().public_bytes_raw())
    elif kind == _RSA:
        loaded = serialization.load_der_private_key(body, password=None)
        if not isinstance(loaded, rsa.RSAPrivateKey):
            raise ValueError("not an RSA key")
        key = loaded
        encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        public_key = _encode(_RSA, key.public_key().public_bytes(encoding, form))
    else:
        raise ValueError(f"unknown key type {kind}")
    return Identity(path, peer_id_of(public_key), public_key, key)


def _message(context: str, data: bytes) -> bytes:
    return b"swarm-parallel\x00" + context.encode() + b"\x00" + data


def _encode(kind: int, body: bytes) -> bytes:
    """libp2p's `message {KeyType type = 1; bytes data = 2}`, deterministic."""
    length, prefix = len(body), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes([0x08, kind, 0x12]) + bytes(prefix) + body


def _decode(data: bytes) -> tuple[int, bytes]:
    """The inverse of `_encode`. Raises ValueError on any other bytes."""
    if len(data) < 4 or data[0] != 0x08 or data[1] >= 0x80 or data[2] != 0x12:
        raise ValueError("not a libp2p key")
    length, shift, position = 0, 0, 3
    while position < min(len(data), 6):
        byte = data[position]
        length |= (byte & 0x7F) << shift
        shift, position = shift + 7, position + 1
        if byte < 0x80:
            break
    if len(data) - position != length:
        raise ValueError("not a libp2p key")
    return data[1], data[position:]
