"""One picture for all viewers: encoded once, sent as what has changed, whole when asked.

A viewer that comes, or falls behind, gets the whole picture; everybody else gets the difference to
the one before, computed and encoded once for all of them. So a viewer costs a queue entry and a
write a second, and one that does not read costs nothing: its queue is cut and it starts anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi.sse import ServerSentEvent

QUEUE = 8


def encode(value: Any) -> str:
    """JSON on one line."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What turns picture `old` into `new`: whole sections that differ, except that replicas come
    row by row (null: gone) and the feed as its new lines only."""
    found: dict[str, Any] = {}
    for section, value in new.items():
        before = old.get(section)
        if value == before:
            continue
        if section == "replicas" and isinstance(before, Mapping):
            rows = {key: row for key, row in value.items() if before.get(key) != row}
            rows.update(dict.fromkeys(before.keys() - value.keys()))
            found[section] = rows
        elif section == "feed" and before:
            last = before[-1]["n"]
            found[section] = [line for line in value if line["n"] > last]
        else:
            found[section] = value
    return found


class Broadcast:
    """The present picture and who watches it. `limit` is the most viewers at once."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.number = 0
        self.picture: dict[str, Any] = {}
        self._whole = ""
        self._viewers: dict[int, asyncio.Queue[ServerSentEvent | None]] = {}
        self._next = 0
        self._closed = False

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def full(self) -> bool:
        """Whether one more viewer would be too many."""
        return len(self._viewers) >= self.limit

    def whole(self) -> str:
        """The whole picture, encoded."""
        if not self._whole:
            self._whole = encode({"n": self.number, "whole": True, **self.picture})
        return self._whole

    def publish(self, picture: dict[str, Any], now: float) -> bool:
        """Show this picture from now on (unix time). False when nothing has changed."""
        change = difference(self.picture, picture)
        if self.number and not change:
            return False
        self.number += 1
        self.picture, self._whole = picture, ""
        line = ServerSentEvent(raw_data=encode({"n": self.number, "at": round(now, 3), **change}))
        for queue in self._viewers.values():
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(line)
        return True

    def close(self) -> None:
        """End every stream, so that a server can stop in order."""
        self._closed = True
        for queue in self._viewers.values():
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)

    async def watch(self) -> AsyncIterator[ServerSentEvent]:
        """The whole picture, then every change, until `close`."""
        queue: asyncio.Queue[ServerSentEvent | None] = asyncio.Queue(QUEUE)
        self._next += 1
        mine = self._next
        self._viewers[mine] = queue
        try:
            yield ServerSentEvent(raw_data=self.whole())
            while True:
                line = await queue.get()
                if self._closed:
                    return
                yield ServerSentEvent(raw_data=self.whole()) if line is None else line
        finally:
            del self._viewers[mine]
