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
        try:
            yield listening.getsockname()[1]
        finally:
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


CHUNKED, NO_CHUNK = b"Transfer-Encoding: chunked", b"zz\r\n"
WEBSOCKET = (b"Upgrade: websocket", b"Sec-WebSocket-Version: 13",
             b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"\x16\r\n\r\n"], b"400"),
        ([request(b"GET /healthz", b"Connection: upgrade, close", *WEBSOCKET)], b"200"),
        ([request(b"GET /healthz", CHUNKED) + NO_CHUNK], b"400"),
        ([request(b"HEAD /healthz", CHUNKED) + NO_CHUNK], b"400"),
        ([request(b"POST /healthz", CHUNKED) + NO_CHUNK], b"400"),
        ([request(b"GET /healthz", CHUNKED), NO_CHUNK], b"200"),
        ([request(b"GET /api/v1/stream", CHUNKED), NO_CHUNK], b"200"),
    ],
    ids=["no HTTP", "a websocket", "no body", "none of a HEAD", "none of a POST",
         "none after the answer", "none amid the answer"],
)  # fmt: skip
def test_no_visitor_fills_the_log(
    parts: list[bytes], status: bytes, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    async def run() -> None:
        async with served() as port:
            assert (await ask(port, *parts)).startswith(b"HTTP/1.1 " + status)

    asyncio.run(run())
    assert capfd.readouterr() == ("", "")
    assert not caplog.records, "asyncio has nothing to say either"


@pytest.mark.parametrize(
    "parts",
    [[b""], [b"GET /healthz HTTP/1.1"], [request(b"GET /healthz"), b"GET"]],
    ids=["nothing", "a part of one", "a part of a second one"],
)
def test_who_sends_no_request_is_not_waited_for_and_a_stream_goes_on(
    parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.serve.IDLE_S", 0.3)

    async def run() -> None:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(b"GET /api/v1/stream"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            streaming = asyncio.create_task(reader.read(-1))
            await ask(port, *parts)
            await ask(port, b"")
            assert not streaming.done()
            writer.close()
            await streaming

    asyncio.run(run())


def test_nobody_has_all_connections_but_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.serve.MAX_CONNECTIONS", 2)
    monkeypatch.setattr("web.serve.PROXIES", ())

    async def run() -> None:
        async with served() as port, contextlib.AsyncExitStack() as stack:

            async def close(writer: asyncio.StreamWriter) -> None:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

            async def is_served() -> bool:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.push_async_callback(close, writer)
                writer.write(request(b"GET /healthz"))
                try:
                    return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                except ConnectionError:
                    return False

            assert [await is_served() for _ in range(4)] == [True, True, False, False]
            monkeypatch.setattr("web.serve.PROXIES", ("127.0.0.1",))
            assert await is_served()

    asyncio.run(run())
