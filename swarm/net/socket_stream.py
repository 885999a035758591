"""A `Stream` over one connected unix socket, copying nothing in this process.

asyncio's own streams copy every byte into a bytearray, lose received bytes when a write fails, and
wake a task per chunk. Here the event loop's reader and writer callbacks call `recv_into` and
`sendmsg` on the caller's buffers: tensor bytes are copied once, by the kernel, and back-pressure is
simply not reading. Per stream the kernel holds some 200 KiB and the daemon behind the socket
one yamux window (16 MiB at most).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from swarm.errors import StreamClosedError
from swarm.net.transport import Buffer

_MAX_PARTS = 64
_WRITE_BYTES = 1 << 20
_YIELD_EVERY = 64


class SocketStream:
    """A stream over a connected, non-blocking unix socket. See `Stream` for the contract.

    A receive that is cancelled loses nothing: bytes already taken are given to the next receive.
    A send that is cancelled aborts the stream if it has begun, for the other side may have got half
    a message.
    """

    def __init__(
        self, connection: socket.socket, peer: str, on_end: Callable[[SocketStream], None]
    ) -> None:
        self.peer = peer
        self.received_bytes = self.sent_bytes = 0
        self.completed = False  # ended by `close`
        self._socket = connection
        self._descriptor = connection.fileno()
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._ended = ""
        self._pushed_back = b""
        self._receiving: asyncio.Future[None] | None = None
        self._sending: asyncio.Future[None] | None = None
        self._unyielded = 0

    def __repr__(self) -> str:
        return f"<SocketStream to {self.peer} {self._ended or 'open'}>"

    async def send(self, parts: Sequence[Buffer]) -> None:
        if self._unyielded >= _YIELD_EVERY:
            await self._let_others_run()
        if self._ended:
            raise StreamClosedError(self._ended)
        if self._sending is not None:
            raise RuntimeError("one sender at a time")
        queue: list[memoryview] = []
        for part in parts:
            view = memoryview(part)
            if view.nbytes:
                queue.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
        queue.reverse()
        if self._send_some(queue):
            self._unyielded += 1
            return
        done: asyncio.Future[None] = self._loop.create_future()
        self._sending = done

        def writable() -> None:
            try:
                if not done.done() and self._send_some(queue):
                    done.set_result(None)
            except StreamClosedError as error:
                done.set_exception(error)
            if done.done():
                self._loop.remove_writer(self._descriptor)

        self._loop.add_writer(self._descriptor, writable)
        try:
            await done
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._sending = None
            if not self._ended:
                self._loop.remove_writer(self._descriptor)

    def _send_some(self, queue: list[memoryview]) -> bool:
        """Write until the socket is full; True when the queue (last first) is empty."""
        while queue:
            batch, size = [], 0
            for view in reversed(queue[-_MAX_PARTS:]):
                batch.append(view[: _WRITE_BYTES - size])
                size += len(batch[-1])
                if size >= _WRITE_BYTES:
                    break
            try:
                written = self._socket.sendmsg(batch)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise StreamClosedError(f"stream to {self.peer} ended", str(error)) from None
            self.sent_bytes += written
            while written:
                view = queue.pop()
                if len(view) > written:
                    queue.append(view[written:])
                    break
                written -= len(view)
        return True

    async def receive_exactly(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        await self.receive_into(memoryview(buffer))
        return bytes(buffer)

    async def receive_into(self, buffer: memoryview) -> None:
        if self._unyielded >= _YIELD_EVERY:
            await self._let_others_run()
        if self._receiving is not None:
            raise RuntimeError("one receiver at a time")
        view = memoryview(buffer)
        if not view.nbytes:
            return
        view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        filled = min(len(self._pushed_back), len(view))
        if filled:
            view[:filled] = self._pushed_back[:filled]
            self._pushed_back = self._pushed_back[filled:]
        if filled < len(view):
            if self._ended:
                raise StreamClosedError(self._ended)
            filled += self._receive_some(view[filled:])
        if filled == len(view):
            self._unyielded += 1
            return
        await self._receive_rest(view, filled)

    async def _receive_rest(self, view: memoryview, filled: int) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._receiving = done

        def readable() -> None:
            nonlocal filled
            try:
                if not done.done():
                    filled += self._receive_some(view[filled:])
                    if filled == len(view):
                        done.set_result(None)
            except StreamClosedError as error:
                done.set_exception(error)
            if done.done():
                self._loop.remove_reader(self._descriptor)

        self._loop.add_reader(self._descriptor, readable)
        try:
            await done
        except asyncio.CancelledError:
            self._pushed_back = bytes(view[:filled])
            raise
        finally:
            self._receiving = None
            if not self._ended:
                self._loop.remove_reader(self._descriptor)

    def _receive_some(self, view: memoryview) -> int:
        try:
            received = self._socket.recv_into(view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise StreamClosedError(f"stream from {self.peer} ended", str(error)) from None
        if received == 0:
            raise StreamClosedError(f"stream from {self.peer} ended")
        self.received_bytes += received
        return received

    async def _let_others_run(self) -> None:
        """Where data never makes us wait. Before any of it is taken or given: who is cancelled here
        has done nothing."""
        self._unyielded = 0
        await asyncio.sleep(0)

    async def close(self) -> None:
        self.completed = self.completed or not self._ended
        self._end("closed")

    def abort(self) -> None:
        self._end("aborted")

    def _end(self, how: str) -> None:
        if self._ended:
            return
        self._ended = f"stream with {self.peer} {how} here"
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        for waiter in (self._receiving, self._sending):
            if waiter is not None and not waiter.done():
                waiter.set_exception(StreamClosedError(self._ended))
        self._socket.close()
        self._on_end(self)
