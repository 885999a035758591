"""The real directory: hivemind's Kademlia DHT on the transport's own daemon and event loop.

`hivemind.DHT` would fork a process; `DHTNode` on a `P2P` that shares our p2pd does not. What the
DHT gets wrong is put right here, each found by measuring:
- a lookup returns a stale cache unless it asks for `latest`;
- a store with an earlier expiry than the present one is refused, so a record with a far expiry
  would lock its owner out: life times are bounded, checked by the nodes that store, and ours grow;
- a plain value hides all subkeys of its key: only signed records under their signer's subkey pass;
- nothing bounds what strangers store with us, or cache: `RecordStore` does, in place of both;
- a joiner that knows only a dead bootstrap fails: several are tried, and any one will do.
The clocks of DHT nodes must agree within 3 s, which is said at the join.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swarm.errors import JoinError, UnreachableError, WireError
from swarm.net.hivemind_quiet import import_hivemind
from swarm.net.identity import Identity
from swarm.net.link import group_by_peer
from swarm.net.record_store import RecordStore
from swarm.net.records import (
    CLOCK_SKEW_S,
    MAX_RECORD_BYTES,
    MAX_RECORDS_PER_KEY,
    MAX_TTL_S,
    leader_key,
    peers_key,
    seal,
    unseal,
)

if TYPE_CHECKING:
    from swarm.net.libp2p import Libp2pTransport

log = logging.getLogger("swarm.net")

_GRACE_S = 60.0
_VERIFIED_RECORDS = 4096
_TIMEOUT_S = 10.0


class DhtDirectory:
    """See Directory. Create with `await DhtDirectory.create(transport, identity, bootstrap)`."""

    def __init__(self, transport: Libp2pTransport, identity: Identity, p2p: Any, node: Any) -> None:
        self._transport, self._identity = transport, identity
        self._p2p, self._node = p2p, node
        self._store = RecordStore()
        node.protocol.storage = node.protocol.cache = self._store
        self._expires: dict[str, float] = {}
        self._closed = False

    @classmethod
    async def create(
        cls,
        transport: Libp2pTransport,
        identity: Identity,
        bootstrap: Sequence[str] = (),
        *,
        client_mode: bool = False,
        timeout_s: float = 30.0,
    ) -> DhtDirectory:
        """Join the DHT through any reachable address of `bootstrap`; without one, begin a new DHT.

        `client_mode` stores nothing for others. Raises JoinError when none is reachable.
        """
        import_hivemind()
        from hivemind.dht.node import DHTNode
        from hivemind.p2p import P2P
        from hivemind.utils.multiaddr import Multiaddr

        if identity.peer_id != transport.peer_id:
            raise ValueError("the transport runs under another identity")
        p2p = await P2P.replicate(Multiaddr(f"/unix{transport.daemon.control_path}"))
        try:
            node = await DHTNode.create(
                p2p=p2p,
                record_validator=_validator(),
                client_mode=client_mode,
                cache_on_store=False,  # what is stored here is in the cache: they are one
                cache_refresh_before_expiry=0,  # lookups ask the others in any case
            )
            self = cls(transport, identity, p2p, node)
            others = [address for address in bootstrap if transport.peer_id not in address]
            if others:
                async with asyncio.timeout(timeout_s):
                    await self.add_peers(others)
        except TimeoutError:
            await p2p.shutdown()
            raise _nobody(bootstrap, f"no answer within {timeout_s:.0f} s") from None
        except BaseException:
            await p2p.shutdown()
            raise
        return self

    async def add_peers(self, addresses: Iterable[str]) -> int:
        """Meet these peers (again), e.g. after the network was gone; how many answered.

        Raises JoinError if none did, or if this machine's clock is wrong.
        """
        from hivemind.dht.protocol import ValidationError
        from hivemind.p2p import PeerID

        addresses = list(addresses)
        reasons: list[str] = []

        async def meet(peer: str, where: list[str]) -> bool:
            try:
                await self._transport.connect(peer, where)
                answer = await self._node.protocol.call_ping(
                    PeerID.from_base58(peer), validate=True, strict=True
                )
            except UnreachableError as error:
                reasons.append(error.remedy)
                return False
            except ValidationError as error:
                if "local time" in str(error):
                    raise JoinError(
                        "this machine's clock differs from the swarm's by more than 3 s",
                        "set it, e.g. by NTP",
                    ) from None
                log.debug("%s cannot dial us back", peer)
                return True
            if answer is None:
                reasons.append("it serves no directory")
            return answer is not None

        groups = group_by_peer(addresses)
        met = await asyncio.gather(
            *(meet(peer, where) for peer, where in groups.items()), return_exceptions=True
        )
        clock = [result for result in met if isinstance(result, JoinError)]
        count = sum(result is True for result in met)
        if clock and not count:
            raise clock[0]
        if not count:
            raise _nobody(addresses, reasons[0] if reasons else "")
        await self._node.find_nearest_nodes([self._node.node_id])
        return count

    def prefer(self, run_id: str, trainers: Iterable[str]) -> None:
        """Records of this run go before strangers', those of its trainers first, where there is
        no room for all: in what is stored here, and in what a lookup finds."""
        from hivemind.dht.routing import DHTID

        keys = (leader_key(run_id), peers_key(run_id))
        self._store.keys = frozenset(DHTID.generate(source=key) for key in keys)
        self._store.trainers = frozenset(trainers)

    async def publish(self, key: str, value: Mapping[str, object], ttl_s: float) -> bool:
        """See Directory. A shorter life than the record already published has cannot be had."""
        now = time.time()
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(f"a record lives at most {MAX_TTL_S:.0f} s")
        expires = min(max(now + ttl_s, self._expires.get(key, 0.0) + 0.001), now + MAX_TTL_S)
        sealed = seal(self._identity, key, value, now, expires)
        if self._closed:
            return False
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                stored = await self._node.store(key, sealed, expires, subkey=self._identity.peer_id)
        except Exception as error:
            log.debug("cannot publish %s: %r", key, error)
            return False
        if stored:
            self._expires[key] = expires
        return bool(stored)

    async def lookup(self, key: str) -> dict[str, dict[str, object]]:
        """See Directory. At most `MAX_RECORDS_PER_KEY` records, by signer in order."""
        trainers = self._store.trainers
        if self._closed:
            return {}
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                result = await self._node.get(key, latest=True)
        except Exception as error:
            log.debug("cannot look up %s: %r", key, error)
            return {}
        if result is None or not isinstance(result.value, dict):
            return {}
        found: dict[str, dict[str, object]] = {}
        now = time.time()
        names = [name for name in result.value if isinstance(name, str)]
        for signer in sorted(names, key=lambda name: (name not in trainers, name)):
            if len(found) >= MAX_RECORDS_PER_KEY:
                break
            sealed = result.value[signer].value
            try:
                record = unseal(sealed if isinstance(sealed, bytes) else b"", signer, now)
            except WireError:
                continue
            if record.key == key:
                found[signer] = record.value
        return dict(sorted(found.items()))

    async def close(self) -> None:
        """Leave the DHT. The transport stays open. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._transport.lost.is_set():
            try:
                async with asyncio.timeout(2.0):
                    await self._node.shutdown()
            except Exception as error:
                log.debug("leaving the directory: %r", error)
        await self._p2p.shutdown()


def _nobody(addresses: Sequence[str], reason: str) -> JoinError:
    where = addresses[0] if len(addresses) == 1 else f"any of {len(addresses)} addresses"
    detail = f" ({reason})" if reason else ""
    return JoinError(
        f"no swarm answers at {where}{detail}",
        "check that the leader runs and its port is open, or ask for a new join link",
    )


def _validator() -> Any:
    """What hivemind asks before it stores or passes on a record."""
    import msgpack
    from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
    from hivemind.dht.routing import DHTID

    verified: dict[bytes, None] = {}

    class SignedRecords(RecordValidatorBase):
        def validate(self, record: DHTRecord) -> bool:
            if len(record.value) > MAX_RECORD_BYTES + 8 or len(record.subkey) > 100:
                return False
            parts = (record.key, record.subkey, record.value, repr(record.expiration_time).encode())
            digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts))
            if digest.digest() in verified:
                return True
            try:
                signer, sealed = msgpack.unpackb(record.subkey), msgpack.unpackb(record.value)
                if not isinstance(signer, str) or not isinstance(sealed, bytes):
                    return False
                found = unseal(sealed, signer, time.time(), _GRACE_S)
            except Exception:  # of whatever kind: the bytes are a stranger's
                return False
            key = DHTID.generate(source=found.key).to_bytes()
            late_s = abs(record.expiration_time - found.expires)
            if key != record.key or not late_s <= CLOCK_SKEW_S:  # as it is of a NaN
                return False
            verified[digest.digest()] = None
            if len(verified) > _VERIFIED_RECORDS:
                del verified[next(iter(verified))]
            return True

    return SignedRecords()
