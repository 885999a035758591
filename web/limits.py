"""What keeps a public page harmless: headers, rates per address, nothing but reading. Plain ASGI.

Behind a reverse proxy on this machine uvicorn has put the visitor's address in place (it trusts
`X-Forwarded-For` from loopback only). Addresses are held in memory for the rates, bounded, and
never written or shown. Of IPv6 the first half counts: whoever has one has all of its other half.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = (
    (b"content-security-policy",
     b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
     b"object-src 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)  # fmt: skip
MAX_PATH = 512
MAX_QUERY = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Per address: `rate` requests a second with bursts of `burst`, `streams` open at once."""

    rate: float = 20.0
    burst: float = 120.0
    streams: int = 50
    viewers: int = 1000
    addresses: int = 4096


class Guard:
    """Wraps an app that knows GET only: a HEAD is a GET whose answer ends with its headers.

    Refuses with 405, 414 or 429; adds the headers to everything.
    """

    def __init__(
        self, app: App, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app, self._limits, self._clock = app, limits, clock
        self._tokens: dict[str, tuple[float, float]] = {}  # address -> tokens, filled at
        self._streams: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safe(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        async def send_head(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                await send_safe(message)
                # Now that it is complete, `receive` tells of a disconnect, which ends a stream too.
                await send({"type": "http.response.body"})

        client = scope.get("client")
        address = network_of(str(client[0])) if client else ""
        answer = send_safe
        if scope["method"] == "HEAD":
            scope, answer = {**scope, "method": "GET"}, send_head
        if scope["method"] != "GET":
            await _refuse(answer, 405, b"read only\n", (b"allow", b"GET, HEAD"))
        elif len(scope["path"]) > MAX_PATH or len(scope["query_string"]) > MAX_QUERY:
            await _refuse(answer, 414, b"too long\n")
        elif not self._take(address):
            await _refuse(answer, 429, b"too many requests\n", (b"retry-after", b"5"))
        elif scope["path"].endswith("/stream"):
            await self._stream(address, scope, receive, answer)
        else:
            await self._app(scope, receive, answer)

    async def _stream(self, address: str, scope: Scope, receive: Receive, send: Send) -> None:
        if self._streams.get(address, 0) >= self._limits.streams:
            await _refuse(send, 429, b"too many streams\n", (b"retry-after", b"30"))
            return
        self._streams[address] = self._streams.get(address, 0) + 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._streams[address] -= 1
            if not self._streams[address]:
                del self._streams[address]

    def _take(self, address: str) -> bool:
        now = self._clock()
        tokens, filled_at = self._tokens.pop(address, (self._limits.burst, now))
        tokens = min(tokens + (now - filled_at) * self._limits.rate, self._limits.burst)
        allowed = tokens >= 1
        self._tokens[address] = (tokens - 1 if allowed else tokens, now)
        while len(self._tokens) > self._limits.addresses:
            del self._tokens[next(iter(self._tokens))]
        return allowed


def network_of(address: str) -> str:
    """An IPv4 address itself, the /64 of an IPv6 address, and what is no address as it is."""
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))


async def _refuse(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    start = [(b"content-type", b"text/plain; charset=utf-8"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
