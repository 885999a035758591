"""Directory records: signed, versioned, bounded (DESIGN, Membership and state; I8).

Anyone can write to the directory, so a record proves itself: `header = [version, key, issued,
expires, value]` in msgpack, signed by the peer whose id is its subkey. A record cannot be moved to
another key, made to live longer than `MAX_TTL_S`, or be written in another's name; what breaks a
rule is dropped by the nodes that would store it and by those that read it. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from swarm.errors import WireError
from swarm.net.identity import Identity, verify

RECORD_VERSION = 1
MAX_RECORD_BYTES = 16 << 10
MAX_RECORDS_PER_KEY = 200
MAX_KEY_CHARS = 200
MAX_TTL_S = 3600.0
CLOCK_SKEW_S = 5.0
_CONTEXT = "directory record"


@dataclass(frozen=True)
class Record:
    key: str
    issued: float
    expires: float
    value: dict[str, object]


def leader_key(run_id: str) -> str:
    """The directory key under which a run's leader announces itself."""
    return f"{run_id}/leader"


def peers_key(run_id: str) -> str:
    """The directory key under which a run's replicas announce themselves."""
    return f"{run_id}/peers"


def pack_header(key: str, value: Mapping[str, object], issued: float, expires: float) -> bytes:
    """Raises ValueError for what no reader would accept: a mistake of the caller."""
    if not 0 < expires - issued <= MAX_TTL_S:
        raise ValueError(f"a record lives at most {MAX_TTL_S:.0f} s")
    if len(key) > MAX_KEY_CHARS:
        raise ValueError(f"a directory key has at most {MAX_KEY_CHARS} characters")
    body = msgpack.packb(dict(value), use_bin_type=True)
    header: bytes = msgpack.packb(
        [RECORD_VERSION, key, float(issued), float(expires), body], use_bin_type=True
    )
    if len(header) > MAX_RECORD_BYTES - 1024:
        raise ValueError(
            f"a record may have {MAX_RECORD_BYTES - 1024} bytes, this has {len(header)}"
        )
    return header


def unpack_header(header: bytes, now: float, grace_s: float = 0.0) -> Record:
    """Raises WireError for anything but a live record of this version.

    `grace_s` widens the times: a node that passes records on must not drop a whole answer because
    one record in it has just expired or its writer's clock is a little off.
    """
    if len(header) > MAX_RECORD_BYTES:
        raise WireError(f"record of {len(header)} bytes")
    fields = _unpack(header)
    if not isinstance(fields, list) or len(fields) != 5 or fields[0] != RECORD_VERSION:
        raise WireError("record of another version")
    _, key, issued, expires, body = fields
    if (
        not isinstance(key, str)
        or not isinstance(issued, float)
        or not isinstance(expires, float)
        or not isinstance(body, bytes)
    ):
        raise WireError("malformed record")
    if not 0 < expires - issued <= MAX_TTL_S or issued > now + CLOCK_SKEW_S + grace_s:
        raise WireError("record that lives too long")
    if expires <= now - grace_s:
        raise WireError("expired record")
    value = _unpack(body)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise WireError("malformed record")
    return Record(key, issued, expires, value)


def seal(
    identity: Identity, key: str, value: Mapping[str, object], issued: float, expires: float
) -> bytes:
    """The bytes to publish. Raises ValueError if they would be refused."""
    header = pack_header(key, value, issued, expires)
    parts = [header, identity.public_key, identity.sign(_CONTEXT, header)]
    sealed: bytes = msgpack.packb(parts, use_bin_type=True)
    return sealed


def unseal(sealed: bytes, signer: str, now: float, grace_s: float = 0.0) -> Record:
    """The record in these bytes. Raises WireError unless `signer` signed it and it is live."""
    if len(sealed) > MAX_RECORD_BYTES:
        raise WireError(f"record of {len(sealed)} bytes")
    parts = _unpack(sealed)
    if (
        not isinstance(parts, list)
        or len(parts) != 3
        or not all(isinstance(part, bytes) for part in parts)
    ):
        raise WireError("malformed record")
    header, public_key, signature = parts
    record = unpack_header(header, now, grace_s)
    if not verify(signer, public_key, _CONTEXT, header, signature):
        raise WireError("record not signed by its subkey")
    return record


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises what it likes on hostile bytes
        raise WireError(f"malformed record: {error!r}"[:200]) from None
