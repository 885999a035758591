"""A fork server: local processes that start in 20 ms, because what they import is there already.

Importing torch, hivemind and transformers costs each process 2 to 3 s of CPU and 300 MB of its own;
a swarm of seven on two cores would need ten seconds to begin. So one process imports, runs nothing
and has no thread that a fork would lose, and every process of the swarm is forked from it, sharing
its memory pages.

`multiprocessing`'s "forkserver" is close, but leaves a socket file and a helper process behind
after a kill -9, passes pickles, re-imports the main module, and shares one server among all users
of the interpreter. What is needed is small, so it is here:

- Nothing outlives the supervisor. The server ends when its socketpair does (any death of the
  supervisor), and every process it forks gets a parent-death signal from the server (its parent,
  whose one loop forks, so the signal means what it says). The server is also the *subreaper*:
  a daemon orphaned by a kill -9 becomes its child, and is killed and reaped with the rest.
- The server and its children live in sessions of their own: Ctrl-C in a terminal reaches the
  supervisor only, which then stops the others in order.
- Signals are sent by the server, the parent of them all: a process id cannot be reused before its
  parent has reaped it, so no signal ever meets a stranger.

This is the supervisor's end; `peer.local_server` is the server. Linux; elsewhere there is no
parent-death signal nor subreaper, and only the end of the socketpair is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer import local_server
from peer.local_server import LENGTH, LOG_FLAGS, REAP_S, Tell, packed
from swarm.errors import StorageError, SwarmError


class ForkServerError(Exception):
    """The server could not start, or has ended; the text says why."""


@dataclass(eq=False)
class Child:
    """A forked process. `code` is its exit code, negative for the signal that killed it."""

    name: str
    log: Path
    pid: int = 0
    code: int | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    on_message: Tell = lambda message: None
    _number: int = 0

    @property
    def alive(self) -> bool:
        return self.code is None


class ForkServer:
    """The supervisor's end. Importing begins at once; `connect`, `spawn`, and in the end `aclose`.

    The server first calls `preload` ("package.module:function") with `arguments`.
    """

    def __init__(
        self, preload: str, arguments: Mapping[str, Any], *, environment: Mapping[str, str]
    ) -> None:
        self.children: list[Child] = []
        self.lost = asyncio.Event()
        self.failure = ""
        self.remedy = ""  # of the failure, where a person has one
        self.traceback = ""
        self._socket, theirs = socket.socketpair()
        self._writer: asyncio.StreamWriter | None = None
        self._ready = False
        self._reading: asyncio.Task[None] | None = None
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", local_server.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        # The parent-death signal follows the thread that forked, and only the main thread lasts.
        lasting = threading.current_thread() is threading.main_thread()
        first = {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "preload": preload,
            "arguments": dict(arguments),
            "parent": os.getpid() if lasting else 0,
        }
        with contextlib.suppress(OSError):  # ended already: noticed when it is read from
            self._socket.sendall(packed(first))

    async def connect(self) -> None:
        """Begin to talk to it, in this event loop. What is spawned waits for the imports."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._reading = asyncio.create_task(self._read(reader), name="fork-server")

    def close(self) -> None:
        """End a server that has not been connected to. Nothing if it has been."""
        if self._writer is None:
            self._socket.close()
            self._process.kill()
            self._process.wait()

    async def spawn(
        self,
        name: str,
        target: str,
        arguments: Mapping[str, Any],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        on_message: Tell = lambda message: None,
    ) -> Child:
        """Fork a process that runs `target(arguments, tell)` and exits with what that returns.

        `tell(dict)` in the child is `on_message(dict)` here. Raises ForkServerError, StorageError,
        and SwarmError where the server failed and there is a remedy. A cancelled caller may leave a
        process that `aclose` ends.
        """
        child = Child(name, log, on_message=on_message, _number=len(self.children))
        self.children.append(child)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(log, LOG_FLAGS, 0o600))  # the child can say nothing without it
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise StorageError(
                f"cannot make {log}: {why}", "choose another directory with --dir"
            ) from None
        self._send(
            do="spawn",
            number=child._number,
            name=name,
            target=target,
            arguments=dict(arguments),
            log=_absolute(log),
            environment=dict(environment or {}),
        )
        lost = asyncio.ensure_future(self.lost.wait())
        started = asyncio.ensure_future(child.started.wait())
        try:
            await asyncio.wait((lost, started), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            started.cancel()
        if not child.started.is_set():
            if self.remedy:
                raise SwarmError(f"cannot start processes: {self.failure}", self.remedy)
            raise ForkServerError(self.failure)
        return child

    def signal(self, child: Child, number: int, *, daemons: bool = False) -> None:
        """Send a signal; `daemons`: also to what the child started. Nothing if it has ended."""
        if child.alive and child.pid:
            self._send(do="signal", number=child._number, signal=int(number), daemons=daemons)

    def kill(self) -> None:
        """End every process at once, the server's own last. Never blocks; then `aclose`."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def aclose(self) -> None:
        """Kill what still runs and end the server; nothing of it is left. Idempotent."""
        self.close()
        self.kill()
        if not self._ready:
            self._process.kill()  # it is importing, and has forked nothing
        try:
            await asyncio.to_thread(self._process.wait, REAP_S + 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._end_all("the process server was closed")

    def _send(self, **message: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(packed(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._take(json.loads(await reader.readexactly(length)))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._end_all(f"the process server ended (pid {self.pid})")

    def _take(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self.failure, self.remedy = message["failed"], message["remedy"]
            self.traceback = message["traceback"]
            return
        if "ready" in message:
            self._ready = True
            return
        child = self.children[message["child"]]
        if "pid" in message:
            child.pid = message["pid"]
            child.started.set()
        elif "told" in message:
            child.on_message(message["told"])
        else:
            child.code = message["code"]
            child.ended.set()

    def _end_all(self, why: str) -> None:
        self.failure = self.failure or why
        for child in self.children:
            if child.alive:
                child.code = -signal.SIGKILL
                child.ended.set()
        self.lost.set()


def _absolute(path: Path) -> str:
    return os.path.abspath(path)
