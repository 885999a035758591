"""The dashboard as a process: a web server and a collector in one event loop.

The page answers at once and says that it waits; the network is looked for beside it, again and
again, because a dashboard that people have bookmarked must outlive the leader it watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm.errors import JoinError, ListenError, SwarmError, VersionError
from swarm.net.directory import DhtDirectory
from swarm.net.identity import Identity, claim_identity
from swarm.net.libp2p import Libp2pTransport
from swarm.net.link import JoinLink
from swarm.net.links import Links
from swarm.tasks import unless
from swarm.terms import new_incarnation
from swarm.words import clean
from web.app import create_app
from web.board import Board
from web.broadcast import Broadcast
from web.collector import Collector
from web.limits import Limits, network_of
from web.store import Store

log = logging.getLogger(__name__)
DEFAULT_PORT = 8765
TICK_S = 1.0
MAX_CONNECTIONS = 256  # of one address
PROXIES = ("127.0.0.1", "::1")  # where a reverse proxy is, with everybody's connections
MAX_LINE_CHARS = 1_000
IDLE_S = 20  # until a connection on which no request is under way is closed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Dashboard:
    """Watches the run of `link` and serves it on `host`:`port`.

    `port` None takes 8765, or any other when that is taken; 0 any. What is kept lies in
    `data_dir`. Without `show_join` the page keeps the join link, and so the leader's address, to
    itself.
    """

    def __init__(
        self,
        link: JoinLink,
        data_dir: Path,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        show_join: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self.link, self.data_dir, self.host, self.port = link, Path(data_dir), host, port
        self._line = f"swarm-peer --join {link}" if show_join else ""
        self._limits = limits or Limits()

    async def run(
        self,
        on_url: Callable[[str], None] = lambda url: None,
        on_trouble: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Until cancelled; `on_trouble` is told, once, that the swarm cannot be joined. Raises
        ListenError, StorageError, or JoinError for what time cannot mend (another run or
        version)."""
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(listen(self.host, self.port))
            identity = claim_identity(self.data_dir)
            stack.callback(identity.release)
            store = Store(self.data_dir / f"{self.link.run_id}.sqlite")
            stack.callback(store.close)
            board = Board(store, self.link.run_id, join_line=self._line)
            broadcast = Broadcast(self._limits.viewers)
            app = create_app(board, broadcast, limits=self._limits)
            on_url(url_of(listening))
            async with asyncio.TaskGroup() as group:
                group.create_task(keep_publishing(board, broadcast))
                group.create_task(serve_app(app, listening, broadcast.close))
                group.create_task(self._watch(identity, board, broadcast, on_trouble))

    async def _watch(
        self,
        identity: Identity,
        board: Board,
        broadcast: Broadcast,
        on_trouble: Callable[[str], None],
    ) -> None:
        """Be in the swarm, and come back to it."""
        pause, told = FIRST_PAUSE_S, False
        while True:
            try:
                await self._in_the_swarm(identity, board, broadcast)
                pause = FIRST_PAUSE_S
            except VersionError:
                raise
            except SwarmError as error:
                if isinstance(error, JoinError) and "serves run" in error.message:
                    raise
                log.info("%s; trying again", error)
                if not told:
                    on_trouble(clean(f"cannot join the swarm yet: {error}", MAX_LINE_CHARS))
                told = True
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _in_the_swarm(self, identity: Identity, board: Board, broadcast: Broadcast) -> None:
        """One stay: until the network daemon dies, or something fails."""
        async with contextlib.AsyncExitStack() as stack:
            transport = await Libp2pTransport.create(identity_path=identity.path, listen=())
            stack.push_async_callback(transport.close)
            directory = await DhtDirectory.create(
                transport, identity, self.link.addresses, client_mode=True
            )
            stack.push_async_callback(directory.close)
            links = Links(transport, self.link.run_id, new_incarnation(identity.peer_id), {})
            stack.push_async_callback(links.aclose)
            collector = Collector(
                self.link,
                links,
                directory,
                board,
                changed=lambda: publish(board, broadcast),
            )
            await unless(transport.lost, collector.run())


def publish(board: Board, broadcast: Broadcast) -> None:
    """Show what the board knows now."""
    now = time.time()
    broadcast.publish(board.snapshot(now), now)


async def keep_publishing(board: Board, broadcast: Broadcast) -> None:
    """Time alone changes the picture too: a run may fall silent."""
    while True:
        board.tick(time.time())
        publish(board, broadcast)
        await asyncio.sleep(TICK_S)


@contextlib.contextmanager
def listen(host: str, port: int | None) -> Iterator[socket.socket]:
    """A listening socket. Raises ListenError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = [DEFAULT_PORT, 0] if port is None else [port]
    for each in wanted:
        try:
            made = socket.create_server((host, each), family=family, backlog=1024)
        except (OSError, OverflowError, ValueError) as error:
            failure = error
            continue
        with made:
            yield made
        return
    what = (getattr(failure, "strerror", None) or str(failure)).partition(" (while ")[0].lower()
    of_the_port = getattr(failure, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
    if of_the_port or isinstance(failure, OverflowError):
        where = f"{host} port {wanted[-1]}"
        raise ListenError(f"cannot listen on {where}: {what}", "choose another --port")
    raise ListenError(
        f"cannot listen on {host}: {what}",
        "name an address of this machine, as --host 127.0.0.1, or 0.0.0.0 for all of them",
    )


def url_of(listening: socket.socket) -> str:
    """Where a browser on this machine finds it."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


async def serve_app(
    app: Any, listening: socket.socket, end_streams: Callable[[], None] = lambda: None
) -> None:
    """Serve until cancelled; then `end_streams` is called, or they would have to be cut."""
    server = _Server(
        uvicorn.Config(
            app,
            http=_Protocol,
            log_level="error",  # a warning is what any visitor can cause, as often as they like
            ws="none",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=IDLE_S,
            limit_concurrency=4096,
            h11_max_incomplete_event_size=16 << 10,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        end_streams()
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        raise


class _Server(uvicorn.Server):
    """Signals belong to whoever runs the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """uvicorn's, without the tracebacks that any visitor can cause: of a request that turns out to
    be none while it is answered, uvicorn says so in a second answer, which h11 forbids. And with an
    end to waiting for a request: uvicorn waits for ever for the first, and for the rest of one;
    and with a most of connections for one visitor, or one could take them all."""

    network = ""
    _idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        if self.client and self.client[0] not in PROXIES:
            self.network = network_of(self.client[0])
            same = (
                isinstance(each, _Protocol) and each.network == self.network
                for each in self.connections
            )
            if sum(same) > MAX_CONNECTIONS:
                transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._idle is not None:
            self._idle.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = self.loop.call_later(IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self.cycle:  # what the app still answers goes nowhere
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        with contextlib.suppress(h11.LocalProtocolError):
            super().send_400_response(msg)
        self.transport.close()
