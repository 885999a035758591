"""Where a name leads, looked up in a thread of its own.

The event loop's threads save votes and hash gradients, and a process that ends waits for them: a
name server that does not answer, for a name that any peer may tell, must hold up neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

MAX_LOOKUPS = 8  # at once; whoever looks up one more asks another time
FAMILIES = {"": socket.AF_UNSPEC, "4": socket.AF_INET, "6": socket.AF_INET6}  # of dns, dns4, dns6
_under_way: set[str] = set()


async def look_up(name: str, family: socket.AddressFamily) -> list[str] | None:
    """Its IP addresses; None where that name, or as many as may be, is being looked up already."""
    if name in _under_way or len(_under_way) >= MAX_LOOKUPS:
        return None
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def tell(found: list[str]) -> None:
        _under_way.discard(name)
        if not answer.done():
            answer.set_result(found)

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
            found = list(dict.fromkeys(str(info[4][0]) for info in infos))
        except (OSError, UnicodeError):  # it may be no name
            found = []
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, found)

    _under_way.add(name)
    threading.Thread(target=ask, name="look up", daemon=True).start()
    return await answer
