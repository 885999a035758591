"""Where a run's replicas were last, so that a leader that comes back elsewhere finds them.

Replicas find their leader by its link, or in the directory, which lives in the run's processes. A
leader that is started again at another address is in nobody's link, and would begin a directory of
its own, alone, while its replicas look for it in theirs. So it keeps their addresses in the run's
directory, and enters the replicas' directory through whichever of them answers. That is all they
are for: an address proves nothing, who answers there has to prove its peer id, and records stay
signed. A file that is damaged or cannot be written costs nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from swarm.net.link import addresses_of, group_by_peer, wrong_with_address
from swarm.net.links import peer_of

log = logging.getLogger(__name__)
FILE = "peers.json"
MAX_PEERS = 64
MAX_ADDRESSES = 8  # of each
MAX_BYTES = 1 << 20


class KnownPeers:
    """The peers of the run in `run_dir`, those seen last first."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._by_peer = group_by_peer(_read(self._path))
        self._bound()
        self._seen: set[str] = set()

    @property
    def addresses(self) -> list[str]:
        return [address for addresses in self._by_peer.values() for address in addresses]

    def note(self, present: Mapping[str, Sequence[str]]) -> None:
        """Addresses of who is there now, by incarnation; written if there is anything new."""
        if present.keys() == self._seen:
            return
        self._seen = {*present}
        found = {
            peer_of(name): mine[:MAX_ADDRESSES]
            for name, addresses in present.items()
            if (mine := addresses_of(peer_of(name), addresses))
        }
        before = dict(self._by_peer)
        self._by_peer = {**found, **{k: v for k, v in before.items() if k not in found}}
        self._bound()
        if self._by_peer != before:
            self._write()

    def _bound(self) -> None:
        self._by_peer = {
            peer: addresses[:MAX_ADDRESSES]
            for peer, addresses in list(self._by_peer.items())[:MAX_PEERS]
        }

    def _write(self) -> None:
        temporary = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps({"addresses": self.addresses}))
            os.replace(temporary, self._path)
        except OSError as error:
            log.debug("cannot write %s: %s", self._path, error)
            with contextlib.suppress(OSError):
                temporary.unlink()


def _read(path: Path) -> list[str]:
    """The addresses in the file that make sense; none when there is no such file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return []
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    listed = value.get("addresses") if isinstance(value, dict) else None
    if not isinstance(listed, list):
        return []
    return [each for each in listed if isinstance(each, str) and not wrong_with_address(each)]
