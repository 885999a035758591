"""Messages to and from p2pd's control socket, as bytes.

The control protocol is that of go-libp2p-daemon (`specs/CONTROL.md`): protobuf messages prefixed by
their length as a varint, one connection per request; a connection whose STREAM_OPEN was answered is
the stream from then on, so nothing here reads a byte too many.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from swarm.errors import TransportError

_MAX_CONTROL_BYTES = 1 << 20


class DaemonRequestError(TransportError):
    """The daemon answered a request with an error."""


def base58_encode(data: bytes) -> str:
    import base58

    return str(base58.b58encode(data).decode())


def base58_decode(text: str) -> bytes:
    """Raises TransportError on what is no base58."""
    import base58

    try:
        return bytes(base58.b58decode(text))
    except ValueError:
        raise TransportError(f"not a peer id: {text!r}") from None


async def read_message(connection: socket.socket) -> bytes:
    """One varint-prefixed message, reading not a byte more. Raises ConnectionError at the end."""
    length, shift = 0, 0
    while True:
        byte = (await read_exactly(connection, 1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise ConnectionError("overlong length from the daemon")
    if length > _MAX_CONTROL_BYTES:
        raise ConnectionError("oversized message from the daemon")
    return await read_exactly(connection, length)


async def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Raises ConnectionError at the end."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes:
        part = await loop.sock_recv(connection, num_bytes - len(data))
        if not part:
            raise ConnectionError("closed by the daemon")
        data += part
    return data


def request(kind: str) -> Any:
    from hivemind.proto import p2pd_pb2

    return p2pd_pb2.Request(type=p2pd_pb2.Request.Type.Value(kind))


def prefixed(message: Any) -> bytes:
    body = message.SerializeToString()
    length, prefix = len(body), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + body
