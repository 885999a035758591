"""A read-only member of the swarm: finds the leader, asks it and the replicas, fills the board.

It joins the DHT as a client (it stores nothing for others), opens channels as any peer does and
calls `config` and `observe` on them, which anybody may. It answers no call and gives no order.
Whatever fails is tried again; whatever comes back goes through `web.intake` first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from swarm.config import MAX_CONFIG_BYTES, RunConfig, from_canonical
from swarm.errors import JoinError, SwarmError
from swarm.net.link import JoinLink, wrong_with_address
from swarm.net.links import Links
from swarm.net.records import leader_key, peers_key
from swarm.tasks import TaskSet
from web.board import Board
from web.intake import MAX_NAME, incarnation, read_observation, read_peer, text

log = logging.getLogger(__name__)
LEADER_S = 1.0
PEER_S = 5.0
PEERS_PER_ROUND = 64
PEERS_AT_ONCE = 8
DIRECTORY_S = 20.0
ASK_TIMEOUT_S = 5.0
LONGEST_PAUSE_S = 15.0
MAX_ADDRESSES = 4096  # peers


class Lookup(Protocol):
    """The part of a Directory that reads."""

    def prefer(self, run_id: str, trainers: Iterable[str]) -> None: ...

    async def lookup(self, key: str) -> dict[str, dict[str, object]]: ...


class Collector:
    """Keeps `board` up to date. `changed()` is called after each answer of the leader."""

    def __init__(
        self,
        link: JoinLink,
        links: Links,
        directory: Lookup,
        board: Board,
        *,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.link, self.links, self.directory, self.board = link, links, directory, board
        self._changed, self._clock = changed, clock
        self._addresses: dict[str, tuple[str, ...]] = {
            peer: tuple(where) for peer, where in link.by_peer.items()
        }
        self._trainers: tuple[str, ...] = ()
        self._next_peer = 0

    async def run(self) -> None:
        """Until cancelled. Raises JoinError when all whom the link names serve another run, or
        speak another version."""
        self._trainers = tuple((await self._config()).run.trainers)
        self.directory.prefer(self.link.run_id, self._trainers)
        tasks = TaskSet()
        try:
            tasks.spawn(self._keep(self._read_directory, DIRECTORY_S), "directory")
            tasks.spawn(self._keep(self._ask_peers, PEER_S), "peers")
            pause = LEADER_S
            while True:
                began = asyncio.get_running_loop().time()
                heard = await self._ask_leader()
                pause = LEADER_S if heard else min(pause * 1.5, LONGEST_PAUSE_S)
                spent = asyncio.get_running_loop().time() - began
                await asyncio.sleep(max(pause - spent, LEADER_S / 2))
        finally:
            await tasks.aclose()

    async def _keep(self, work: Callable[[], Any], every_s: float) -> None:
        while True:
            try:
                await work()
            except SwarmError as error:
                log.debug("%s", error)
            await asyncio.sleep(every_s)

    async def _config(self) -> RunConfig:
        """The run's config, from anybody the link names; it proves itself by the run id."""
        pause = LEADER_S
        while True:
            failures: list[SwarmError] = []
            for peer in self.link.by_peer:
                try:
                    body = await self._ask(peer, "config", {})
                    data = body.get("config")
                    if isinstance(data, bytes) and len(data) <= MAX_CONFIG_BYTES:
                        return from_canonical(data, self.link.run_id)
                except SwarmError as error:
                    log.debug("config of %s: %s", peer[-8:], error)
                    failures.append(error)
            if failures and all(isinstance(each, JoinError) for each in failures):
                raise failures[0]
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_S)

    async def _ask(self, who: str, method: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """One call, within its time. Raises SwarmError."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                peer = who.partition("#")[0]
                channel = await self.links.channel(who, self._addresses.get(peer, ()))
                return (await channel.call(method, dict(body))).body
        except TimeoutError:
            raise SwarmError(f"{who[-8:]} did not answer in time") from None

    async def _ask_leader(self) -> bool:
        """Ask the trainers until one leads. Only the run's trainers are asked and believed."""
        for trainer in self._trainers:
            try:
                body = await self._ask(trainer, "observe", self.board.cursor)
            except SwarmError as error:
                log.debug("observe %s: %s", trainer[-8:], error)
                continue
            now = self._clock()
            seen = read_observation(body, now, self.board.notes)
            if seen is None or (seen.state == "standing by" and len(self._trainers) > 1):
                continue
            self.board.leader(seen, now)
            self._changed()
            return True
        return False

    async def _ask_peers(self) -> None:
        """Some of the replicas, in turn, a few at a time."""
        seen = self.board.observation
        names = [row.incarnation for row in seen.replicas] if seen else []
        if not names:
            return
        start = self._next_peer % len(names)
        chosen = (names[start:] + names[:start])[:PEERS_PER_ROUND]
        self._next_peer = start + len(chosen)
        room = asyncio.Semaphore(PEERS_AT_ONCE)

        async def one(who: str) -> None:
            async with room:
                try:
                    body = await self._ask(who, "observe", {})
                except SwarmError as error:
                    log.debug("observe %s: %s", who[-8:], error)
                    return
                report = read_peer(body, self.board.notes, who)
                if report is not None:
                    self.board.peer(who, report, self._clock())

        await asyncio.gather(*(one(who) for who in chosen))

    async def _read_directory(self) -> None:
        """Where trainers and replicas are, what they run, and how they want to be named."""
        for key in (leader_key(self.link.run_id), peers_key(self.link.run_id)):
            for signer, record in (await self.directory.lookup(key)).items():
                self.note_record(signer, record)

    def note_record(self, signer: str, record: Mapping[str, object]) -> None:
        """A record of the directory, which anybody may have signed."""
        name, version = record.get("name", ""), record.get("version", "")
        where = dialable(record.get("addresses"), signer)
        life = record.get("incarnation", "")
        if where is None or (life and incarnation(life).partition("#")[0] != signer):
            self.board.notes.add(f"a record of {signer[-8:]} makes no sense")
            return
        self._addresses.pop(signer, None)  # the newest come last
        self._addresses[signer] = where
        if len(self._addresses) > MAX_ADDRESSES:
            del self._addresses[next(who for who in self._addresses if who not in self._trainers)]
        self.board.announced(signer, text(version, 20), text(name, MAX_NAME))


def dialable(value: object, signer: str) -> tuple[str, ...] | None:
    """Addresses of a record, if every one is an address of its signer."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > 32:
        return None
    found = tuple(each for each in value if isinstance(each, str))
    if len(found) < len(value):
        return None
    good = all(not wrong_with_address(each) and each.endswith(f"/p2p/{signer}") for each in found)
    return found if good else None
