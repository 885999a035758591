"""The open channels of one process: dialled on demand, shared by all calls, found by incarnation.

A channel serves both directions, so whoever was dialled by a peer can call it back without an
address of its own; that is how a leader reaches replicas behind a home router.

A process that serves several stages is several replicas, and each has an incarnation and channels
of its own (`another_life`): to everybody else they are two peers at one address. Who dials says
which one it means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import torch

from swarm.errors import (
    JoinError,
    StreamClosedError,
    TransportError,
    UnreachableError,
    VersionError,
    WireError,
)
from swarm.net.channel import HEARTBEAT_S, SILENCE_S, Channel, Method, read_hello
from swarm.net.stream_limit import StreamLimit
from swarm.net.transport import Stream, Transport, until_ended
from swarm.tasks import TaskSet
from swarm.wire.codecs import allocate_bytes
from swarm.wire.frames import PROTOCOL_VERSION, protocol_name

PROTOCOL = protocol_name("channel")
VERSION_PROTOCOL = "/swarm-parallel/version"  # never changes, so that unlike versions can say so
GREET_TIMEOUT_S = 10.0
VERSION_TIMEOUT_S = 3.0
MAX_STREAMS_PER_PEER = 64  # that it has opened; a process serves a few stages at most
MAX_ASKING_PER_PEER = 4  # for the version spoken here, of one peer and of all
MAX_ASKING = 64
MAX_STREAMS = 512  # of all; peer ids cost nothing, and a process may have 1,024 files open
log = logging.getLogger(__name__)


def peer_of(incarnation: str) -> str:
    """The peer id an incarnation belongs to."""
    return incarnation.split("#", 1)[0]


class Links:
    """Channels to other peers of the run.

    `incarnation` names this life of this process. `on_close(channel)` is called as channels go.
    """

    def __init__(
        self,
        transport: Transport,
        run_id: str,
        incarnation: str,
        methods: dict[str, Method],
        *,
        on_close: Callable[[Channel], None] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
        allocate: Callable[[int], torch.Tensor] = allocate_bytes,
    ) -> None:
        self.transport, self.run_id, self.incarnation = transport, run_id, incarnation
        self.methods = methods
        self._hello = {"run": run_id, "incarnation": incarnation}
        self._front = self
        self._lives = {incarnation: self}  # of the front; others look there
        self._on_close, self._allocate = on_close, allocate
        self._heartbeat_s, self._silence_s = heartbeat_s, silence_s
        self._channels: dict[str, Channel] = {}
        self._running: dict[Channel, None] = {}  # of those, and of others to the same incarnation
        self._dials: dict[str, asyncio.Task[Channel]] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._accepted = StreamLimit("channel", MAX_STREAMS_PER_PEER, MAX_STREAMS)
        self._asking = StreamLimit("version", MAX_ASKING_PER_PEER, MAX_ASKING)
        self._tasks = TaskSet()

    @property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Where peers can be dialled, by peer id; known to all lives of this process."""
        return self._front._addresses

    @addresses.setter
    def addresses(self, known: dict[str, tuple[str, ...]]) -> None:
        self._front._addresses = known

    def another_life(self, incarnation: str, methods: dict[str, Method]) -> Links:
        """Links of another replica in this process. It is found behind the same address, by those
        who dial its incarnation, until it is closed; close it before this one."""
        life = Links(
            self.transport,
            self.run_id,
            incarnation,
            methods,
            heartbeat_s=self._heartbeat_s,
            silence_s=self._silence_s,
            allocate=self._allocate,
        )
        life._front = self._front
        self._front._lives[incarnation] = life
        return life

    def serve(self) -> None:
        """Accept channels from now on."""
        self.transport.serve(PROTOCOL, self._accept)
        self.transport.serve(VERSION_PROTOCOL, self._say_version)

    def open_channel(self, incarnation: str) -> Channel | None:
        """The channel to that incarnation (or to any life of a bare peer id), if one is open."""
        if "#" in incarnation:
            return self._channels.get(incarnation)
        for channel in self._channels.values():
            if channel.peer == incarnation and channel.ended is None:
                return channel
        return None

    def end_channels(self, incarnation: str, why: str) -> None:
        """End every channel to that incarnation: there are two where both dialled at once, and what
        waits over the one that is not found would wait for ever."""
        for channel in dict.fromkeys((*self._running, *self._channels.values())):
            if channel.incarnation == incarnation:
                channel.end(why)

    @property
    def sending(self) -> bool:
        """Whether tensors wait to be sent, or are being sent, on any channel."""
        return any(channel.sending for channel in self._channels.values())

    async def channel(self, incarnation: str, addresses: Sequence[str] = ()) -> Channel:
        """An open channel to that incarnation (or to any life of a bare peer id).

        Raises UnreachableError when it cannot be dialled, or only another life of the peer can;
        JoinError when it serves another run, VersionError when it speaks another version.
        """
        existing = self.open_channel(incarnation)
        if existing is not None and existing.ended is None:
            return existing
        if incarnation not in self._dials:
            addresses = addresses or self.addresses.get(peer_of(incarnation), ())
            dial = self._tasks.spawn(self._dial(incarnation, addresses), f"dial {incarnation[-8:]}")
            self._dials[incarnation] = dial
            dial.add_done_callback(lambda _: self._dials.pop(incarnation, None))
        return await asyncio.shield(self._dials[incarnation])

    async def _dial(self, incarnation: str, addresses: Sequence[str]) -> Channel:
        peer, loop = peer_of(incarnation), asyncio.get_running_loop()
        began = loop.time()
        try:
            stream = await self.transport.dial(peer, PROTOCOL, addresses)
        except UnreachableError as error:
            # One of another version refuses the name at once; silence would only be met again.
            if loop.time() - began < VERSION_TIMEOUT_S:
                await self._explain_version(peer, addresses)
            raise error
        channel = self._new_channel(stream)
        try:
            async with asyncio.timeout(GREET_TIMEOUT_S):
                await channel.greet(incarnation if "#" in incarnation else "")
            self._check_run(channel)
        except (TimeoutError, StreamClosedError, WireError) as error:
            channel.end(str(error))
            raise UnreachableError(f"{peer[-8:]} did not greet: {error}") from None
        except BaseException as error:  # JoinError, or cancelled
            channel.end(str(error) or "given up here")
            raise
        if "#" in incarnation and channel.incarnation != incarnation:
            channel.end("another life of the peer")
            raise UnreachableError(
                f"{incarnation[-17:]} is gone, {channel.incarnation[-8:]} answers"
            )
        self._channels[channel.incarnation] = channel
        self._tasks.spawn(self._run(channel), f"channel {incarnation[-8:]}")
        return channel

    def _new_channel(self, stream: Stream) -> Channel:
        return Channel(
            stream,
            self.methods,
            self._hello,
            heartbeat_s=self._heartbeat_s,
            silence_s=self._silence_s,
            allocate=self._allocate,
        )

    async def _accept(self, stream: Stream) -> None:
        with self._accepted.one_more(stream.peer) as room:
            if room:
                await self._welcome(stream)

    async def _welcome(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(GREET_TIMEOUT_S):
                hello = await read_hello(stream)
                # Who asks for a life that is over is shown that another one answers.
                life = self._lives.get(str(hello.get("to")), self)
                channel = life._new_channel(stream)
                await channel.answer(hello)
            self._check_run(channel)
        except (TimeoutError, StreamClosedError, WireError) as error:
            log.debug("refused a stream of %s: %s", stream.peer, error)
            return
        except JoinError as error:
            log.debug("refused a stream of %s: %s", stream.peer, error)
            await until_ended(stream, GREET_TIMEOUT_S)  # who dials reads it from the answer
            return
        await life._run(channel)

    async def _say_version(self, stream: Stream) -> None:
        with self._asking.one_more(stream.peer) as room:
            if room:
                await stream.send([PROTOCOL_VERSION.to_bytes(4, "big")])
                await until_ended(stream, VERSION_TIMEOUT_S)

    async def _run(self, channel: Channel) -> None:
        if self._tasks.closed:  # while it greeted; it would look alive as long as its peer does
            channel.end("this process stops")
            return
        incarnation = channel.incarnation
        self._channels[incarnation] = channel
        self._running[channel] = None
        try:
            await channel.run()
        finally:
            del self._running[channel]
            if self._channels.get(incarnation) is channel:
                del self._channels[incarnation]
                # Both may have dialled at once: what came over the other one stays there.
                for other in self._running:
                    if other.incarnation == incarnation and other.ended is None:
                        self._channels[incarnation] = other
            if self._on_close is not None and not self._tasks.closed:
                self._on_close(channel)

    def _check_run(self, channel: Channel) -> None:
        if channel.remote.get("run") != self.run_id:
            theirs = str(channel.remote.get("run"))[:32]
            raise JoinError(
                f"{channel.peer[-8:]} serves run {theirs}, not {self.run_id}",
                "check the join link with whoever gave it to you",
            )

    async def _explain_version(self, peer: str, addresses: Sequence[str]) -> None:
        """Raise VersionError if the peer lives but speaks another version."""
        try:
            async with asyncio.timeout(VERSION_TIMEOUT_S):
                stream = await self.transport.dial(peer, VERSION_PROTOCOL, addresses)
                try:
                    theirs = int.from_bytes(await stream.receive_exactly(4), "big")
                finally:
                    stream.abort()
        except (TransportError, TimeoutError):
            return
        if theirs != PROTOCOL_VERSION:
            who = "upgrade swarm-parallel" if theirs > PROTOCOL_VERSION else "ask them to upgrade"
            raise VersionError(
                f"{peer[-8:]} speaks protocol version {theirs}, this program {PROTOCOL_VERSION}",
                who,
            )

    def abort(self) -> None:
        """Drop every channel at once."""
        if self._front is not self:
            self._front._lives.pop(self.incarnation, None)
        self._tasks.abort()
        for channel in [*self._running, *self._channels.values()]:
            channel.end("this process stops")

    async def aclose(self) -> None:
        self.abort()
        await self._tasks.aclose()
