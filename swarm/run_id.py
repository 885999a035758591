"""What a run is known by: the hash of its config's canonical form (`swarm.config` says why)."""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel

RUN_ID_HEX = 32


def canonical_bytes(config: BaseModel) -> bytes:
    """The bytes that are hashed and sent to joiners: JSON, sorted keys, no spaces, all fields."""
    return json.dumps(
        config.model_dump(mode="json"),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    ).encode("ascii")


def run_id_of(canonical: bytes) -> str:
    """The first hex digits of their sha256."""
    return hashlib.sha256(canonical).hexdigest()[:RUN_ID_HEX]
