"""The dashboard's web server on a real socket: what no ASGI client shows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.unit.web_runs import NOW, board
from web.app import create_app
from web.broadcast import Broadcast
from web.serve import listen, serve_app


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[int]:
    """The port at which an empty board is served. Streams that are open at the end are cut, which
    the log tells."""
    with listen("127.0.0.1", 0) as listening:
        app = create_app(board(), Broadcast(), clock=lambda: NOW)
        serving = asyncio.create_task(serve_app(app, listening))
        yield listening.getsockname()[1]
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def ask(port: int, *parts: bytes) -> bytes:
    """All that is answered before the server closes the connection; each further part is sent when
    an answer has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered = b""
    async with asyncio.timeout(10):
        for part in parts[:-1]:
            writer.write(part)
            answered += await reader.read(1)
        writer.write(parts[-1])
        answered += await reader.read()
    writer.close()
    await writer.wait_closed()
    return answered


def request(what: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join((what + b" HTTP/1.1", b"Host: x", *headers, b"", b""))


def test_a_head_of_the_stream_ends_and_keeps_none_open(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def run() -> None:
        async with served() as port:
            asked = request(b"HEAD /api/v1/stream", b"Connection: close")
            head, _, body = (await ask(port, asked)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"content-type: text/event-stream" in head
            assert not body

    asyncio.run(run())
    assert capfd.readouterr() == ("", "")
