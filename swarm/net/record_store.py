"""What a node keeps of the DHT: all of it within one budget, and its own run's records first.

Takes the place of hivemind's `storage` and of its `cache`. Theirs bound neither bytes nor subkeys;
and of two, `rpc_find` answers from whichever lives longer, so one record in the cache would hide
all that are stored under its key.

Whoever signs costs nothing to make, so nobody can be given a share. A record has a rank instead:
one by a trainer of this run, one under a key of this run, any other. Where there is no room it
takes that of the oldest of a lower rank, and is refused if there is none: no flood pushes out
records of its own rank or above, and what is renewed in time stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from swarm.net.records import MAX_RECORDS_PER_KEY

MAX_STORED_BYTES = 32 << 20  # a run's two keys, full of the largest records, take 7 MiB
MAX_STORED_KEYS = 1000  # a run has two; hivemind goes through all for each node that it meets
_RECORD_BYTES = 1024  # what a record takes in memory beside its value, at most
_SWEEP_S = 5.0

_Name = tuple[Any, str]  # DHT key, signer


class _Record(NamedTuple):
    value: bytes
    expires: float


class RecordStore:
    """What hivemind's node asks of a storage. Records come here validated; times are Unix seconds.

    `keys` and `trainers` are those of the run.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        from hivemind.dht.storage import DictionaryDHTValue
        from hivemind.utils.timed_storage import ValueWithExpiration

        self._dictionary, self._found = DictionaryDHTValue, ValueWithExpiration
        self._clock = clock
        self._next_sweep = 0.0
        self._records: dict[_Name, _Record] = {}  # the oldest first
        self._signers: dict[Any, dict[str, None]] = {}  # of each key, the oldest first
        self.keys: frozenset[Any] = frozenset()
        self.trainers: frozenset[str] = frozenset()
        self.stored_bytes = 0

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """One record, or a dictionary of them, each with its own time. Whether all are here."""
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        if not isinstance(value, self._dictionary):
            return False
        stored = [self.store_subkey(key, each, *record) for each, record in value.items()]
        return all(stored)

    def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Whether this record is here now: not where a later one is, or there is no room."""
        now, name = self._clock(), (key, subkey)
        self._sweep(now)
        present = self._records.get(name)
        if expiration_time <= now:
            return False
        if present is not None and present.expires >= expiration_time:
            return present.value == value
        if not self._make_room(name, _size(value) - (_size(present.value) if present else 0)):
            return False
        if present is not None:
            self._drop(name)
        self._records[name] = _Record(value, expiration_time)
        self._signers.setdefault(key, {})[subkey] = None
        self.stored_bytes += _size(value)
        return True

    def get(self, key: Any) -> Any:
        """The live records under a key, in a dictionary that is the caller's to change, or None."""
        found, now = self._dictionary(), self._clock()
        for signer in self._signers.get(key, ()):
            value, expires = self._records[key, signer]
            if expires > now:
                found.store(signer, value, expires)
        return self._found(found, found.latest_expiration_time) if found else None

    def items(self) -> Iterator[tuple[Any, Any]]:
        found = ((key, self.get(key)) for key in list(self._signers))
        return ((key, value) for key, value in found if value is not None)

    def _rank(self, name: _Name) -> int:
        key, signer = name
        return 0 if key not in self.keys else 1 if signer not in self.trainers else 2

    def _make_room(self, name: _Name, more_bytes: int) -> bool:
        """False if it takes more than those of a lower rank, which may be gone all the same."""
        key, rank = name[0], self._rank(name)
        if name not in self._records:
            beside = [(key, signer) for signer in self._signers.get(key, ())]
            if len(beside) >= MAX_RECORDS_PER_KEY and not self._drop_below(rank, beside):
                return False
        while self.stored_bytes + more_bytes > MAX_STORED_BYTES or (
            key not in self._signers and len(self._signers) >= MAX_STORED_KEYS
        ):
            if not self._drop_below(rank, self._records):
                return False
        return True

    def _drop_below(self, rank: int, names: Collection[_Name]) -> bool:
        """Drop the oldest of the lowest rank, if that is below `rank`."""
        for lower in range(rank):
            for name in names:
                if self._rank(name) == lower:
                    self._drop(name)
                    return True
        return False

    def _drop(self, name: _Name) -> None:
        key, signer = name
        self.stored_bytes -= _size(self._records.pop(name).value)
        del self._signers[key][signer]
        if not self._signers[key]:
            del self._signers[key]

    def _sweep(self, now: float) -> None:
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_S
        for name in [name for name, record in self._records.items() if record.expires <= now]:
            self._drop(name)


def _size(value: bytes) -> int:
    return len(value) + _RECORD_BYTES
