"""A local swarm with the live view in front of it: what `swarm up` and `swarm demo` do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peer.interrupt import handlers_as_before, run_loop
from peer.local import LocalSwarm
from peer.view import TerminalView
from swarm.events import EventTail, read_status

REFRESH_S = 0.5


def follow(make: Callable[[Callable[[str], None]], LocalSwarm], *, plain: bool) -> dict[str, Any]:
    """Run the swarm that `make(say)` gives to its end; returns the final report.

    Raises KeyboardInterrupt when the user stopped it, and whatever ended the run. Nothing of the
    swarm is left either way.
    """
    with TerminalView(plain=plain) as view, handlers_as_before():
        final = run_loop(_follow(make(view.note), view))
    if final is None:
        raise KeyboardInterrupt
    return final


class Follower:
    """Feeds a view from a run directory: `refresh` whenever there may be something new."""

    def __init__(self, view: TerminalView, run_dir: Path) -> None:
        self._view, self._run_dir = view, run_dir
        self._events = EventTail(run_dir / "events.jsonl", from_end=True)
        self._finished = False
        self._former = self._read()  # of the run's life before this one

    def _read(self) -> Mapping[str, Any]:
        return read_status(self._run_dir / "status.json") or {}

    def refresh(self) -> None:
        """Show what the run's files say."""
        status = self._read()
        if status and status != self._former:
            self.show(status)

    def show(self, status: Mapping[str, Any]) -> None:
        """Show this status and the events since the last time."""
        if status.get("state") == "failed":
            status = {**status, "reason": ""}  # the command ends with it, as its error
        events = []
        for event in self._events.read():
            self._finished = self._finished or event["event"] == "finished"
            if not (self._finished and event["event"] == "left"):  # all of them go then
                events.append(event)
        if self._view.plain:
            # A step's event has more to say than the status, which comes before it.
            status = {**status, "losses": []}
        self._view.update(status, events)


async def _follow(swarm: LocalSwarm, view: TerminalView) -> dict[str, Any] | None:
    follower = Follower(view, swarm.run_dir)

    async def keep_refreshing() -> None:
        while True:
            follower.refresh()
            await asyncio.sleep(REFRESH_S)

    refreshing = asyncio.create_task(keep_refreshing())
    try:
        return await swarm.run(lambda: view.note(f"join with: swarm-peer --join {swarm.link}"))
    finally:
        refreshing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await refreshing
        follower.refresh()
