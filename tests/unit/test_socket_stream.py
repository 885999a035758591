"""A stream over a socket whose other end is here: cancelled at any moment, it stays in step."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

from swarm.net.socket_stream import SocketStream

NUM_BYTES = 200  # more than are taken without letting others run


def pair() -> tuple[SocketStream, SocketStream]:
    here, there = socket.socketpair()
    for end in (here, there):
        end.setblocking(False)
    return tuple(SocketStream(end, "p", lambda stream: None) for end in (here, there))  # type: ignore[return-value]


async def cut_short(call: Coroutine[Any, Any, Any]) -> Any:
    """What it comes to in its first step; it is cancelled if that is not its last. Or None."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


def test_a_receive_that_is_cancelled_loses_nothing() -> None:
    async def main() -> None:
        sender, receiver = pair()
        data = bytes(range(NUM_BYTES))
        await sender.send([data])
        received, cancelled = b"", 0
        for _ in range(2 * NUM_BYTES):
            byte = await cut_short(receiver.receive_exactly(1))
            received += byte or b""
            cancelled += byte is None
        assert received == data
        assert cancelled
        sender.abort()
        receiver.abort()

    asyncio.run(asyncio.wait_for(main(), 10.0))


def test_a_send_that_is_cancelled_before_it_has_begun_sends_nothing() -> None:
    async def main() -> None:
        sender, receiver = pair()
        sent, cancelled = list[bytes](), 0

        async def send(number: int) -> bytes:
            await sender.send([bytes([number])])
            return bytes([number])

        for number in range(NUM_BYTES):
            byte = await cut_short(send(number))
            sent += [byte] if byte else []
            cancelled += byte is None
        assert cancelled
        assert await receiver.receive_exactly(len(sent)) == b"".join(sent)
        sender.abort()
        receiver.abort()

    asyncio.run(asyncio.wait_for(main(), 10.0))
