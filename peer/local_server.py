"""The fork server itself: imports, then forks a process for every request, and buries the dead.

Run as a script by `peer.local_process`, which says why it is so, before `sys.path` is the
supervisor's; so it imports the standard library only. Messages either way are JSON, each after its
length, over a socketpair; a forked process tells its own over a pipe, and they are passed on.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

Tell = Callable[[dict[str, Any]], None]
CRASHED = 70
LENGTH = struct.Struct("!I")
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
REAP_S = 2.0
SHARED_MEMORY = "/dev/shm"
# Native threads that a fork may lose, by their names in the kernel's list. jemalloc, which pyarrow
# brings along, takes its locks before a fork; in the child, who frees memory does this one's work.
_DISPENSABLE = frozenset({"jemalloc_bg_thd"})
_MAX_NAMES, _MAX_NAME = 4, 40  # of what is said about threads
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


class _ThreadsError(Exception):
    """The imports started threads that a fork would lose; these are their names."""

    remedy = (
        "install swarm-parallel in a virtual environment without the package that starts them, "
        "or start `swarm train` and each `swarm-peer` by hand"
    )

    def __init__(self, names: Sequence[str]) -> None:
        # A name may hold anything, and be that of many: a thread without one has its process's.
        counts = Counter(name[:_MAX_NAME] for name in sorted(names)).most_common()
        said = [f"{name!r} ({n})" if n > 1 else repr(name) for name, n in counts[:_MAX_NAMES]]
        more = f" and {len(counts) - _MAX_NAMES} more" if len(counts) > _MAX_NAMES else ""
        super().__init__(
            f"the imports started threads that a fork would lose: {', '.join(said)}{more}"
        )


def packed(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


class _Unpacker:
    """Messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __call__(self, data: bytes) -> list[dict[str, Any]]:
        self._data += data
        messages = []
        while len(self._data) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            messages.append(json.loads(self._data[LENGTH.size : end]))
            del self._data[:end]
        return messages


@dataclass
class _Forked:
    number: int
    pid: int
    pipe: int
    unpack: _Unpacker = field(default_factory=_Unpacker)


class _Server:
    """The forking end: one loop, no thread that a fork would lose, no asyncio (a forked loop would
    be a shared one)."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.children: dict[int, _Forked] = {}
        self._unpack = _Unpacker()
        self._waiting: list[dict[str, Any]] = []
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)

    def prepare(self) -> None:
        """Import. Raises whatever the imports raise."""
        first, *self._waiting = self._receive()
        sys.path[:] = first["path"]
        if first["parent"]:
            _die_with_parent(first["parent"], signal.SIGTERM)
        _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
        _resolve(first["preload"])(**first["arguments"])
        if threads := _lost_by_a_fork():
            raise _ThreadsError(threads)
        gc.collect()
        gc.freeze()  # the collector leaves these objects alone, so their pages stay shared

    def serve(self) -> None:
        """Until the supervisor is gone."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._selector.register(self.connection, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._tell(ready=True)
        self._handle(self._waiting)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self.connection:
                    messages = self._receive()
                    if not messages:
                        return
                    self._handle(messages)
                elif key.fileobj == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                    self._reap()
                elif key.data.pid in self.children:
                    self._forward(key.data)

    def _receive(self) -> list[dict[str, Any]]:
        """At least one message; none at the end."""
        messages: list[dict[str, Any]] = []
        while not messages:
            try:
                data = self.connection.recv(1 << 16)
            except ConnectionError:
                return []
            if not data:
                return []
            messages = self._unpack(data)
        return messages

    def _handle(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if message["do"] == "spawn":
                self._spawn(message)
                continue
            for child in self.children.values():
                if child.number == message["number"]:
                    daemons = _children_of(child.pid) if message["daemons"] else []
                    for pid in [child.pid, *daemons]:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, message["signal"])

    def _spawn(self, message: dict[str, Any]) -> None:
        ours, theirs = os.pipe()
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._forget()
            os.close(ours)
            _run_child(message, theirs, server)
        os.close(theirs)
        os.set_blocking(ours, False)
        child = _Forked(message["number"], pid, ours)
        self.children[pid] = child
        self._selector.register(ours, selectors.EVENT_READ, child)
        self._tell(child=child.number, pid=pid)

    def _forget(self) -> None:
        """In a child: let go of everything that is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self.connection.close()
        for descriptor in (self._woken, self._waker, *(c.pipe for c in self.children.values())):
            os.close(descriptor)

    def _forward(self, child: _Forked) -> None:
        """Pass on what a child has told."""
        while True:
            try:
                data = os.read(child.pipe, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(child.pipe)
                return
            for told in child.unpack(data):
                self._tell(child=child.number, told=told)

    def _reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self.children.pop(pid, None)
            if child is None:
                continue  # an orphaned daemon
            self._forward(child)
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.pipe)
            os.close(child.pipe)
            self._tell(child=child.number, code=os.waitstatus_to_exitcode(status))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # gone: the next receive says so
            self.connection.sendall(packed(message))

    def finish_talking(self) -> None:
        """Wait until the supervisor has read all and gone. Its loop drops what it has not read when
        it writes to a socket that is closed here, as a request to fork may just then."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        while self._receive():
            pass

    def end(self) -> None:
        """Kill and reap every child, and the daemons orphaned by that."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = time.monotonic() + REAP_S
        while time.monotonic() < deadline:
            for pid in _children_of(os.getpid()) or list(self.children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                pid, _ = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            self.children.pop(pid, None)


def _run_child(message: Mapping[str, Any], pipe: int, server: int) -> NoReturn:
    """Become the process that was asked for, and exit."""
    code = CRASHED
    try:
        _die_with_parent(server, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # until it has handlers, either ends it
        os.setsid()
        atexit._clear()  # what the server's imports registered is the server's
        log = os.open(message["log"], LOG_FLAGS, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable()
        os.environ.update(message["environment"])
        _prctl(_PR_SET_NAME, ctypes.c_char_p(f"swarm {message['name']}".encode()[:15]))

        def tell(what: dict[str, Any]) -> None:
            data = memoryview(packed(what))
            while data:
                data = data[os.write(pipe, data) :]

        code = _resolve(message["target"])(message["arguments"], tell)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _die_with_parent(parent: int, number: signal.Signals) -> None:
    """Get this signal when the parent dies; end now if it has died before this line."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
    if os.getppid() != parent:
        os._exit(CRASHED)


def _prctl(option: int, value: Any) -> None:
    if sys.platform == "linux":
        zero = ctypes.c_ulong(0)
        ctypes.CDLL(None).prctl(option, value, zero, zero, zero)


def _lost_by_a_fork() -> list[str]:
    """Names of the threads that a fork here would lose: Python's, and (where there is a /proc) the
    native ones, by the kernel's names."""
    here = threading.current_thread()
    python = {each.native_id: each.name for each in threading.enumerate() if each is not here}
    native = []
    for entry in Path("/proc/self/task").glob("[0-9]*/comm"):
        if int(entry.parent.name) not in (threading.get_native_id(), *python):
            with contextlib.suppress(OSError):  # it has ended
                native.append(entry.read_text(errors="replace").rstrip("\n"))
    return [*python.values(), *(name for name in native if name not in _DISPENSABLE)]


def _children_of(parent: int) -> list[int]:
    """Direct children, from /proc (empty where there is none)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # pid (name, may hold spaces and parentheses) state ppid ...
            if int(entry.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.parent.name))
    return found


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _serve(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    server = _Server(socket.socket(fileno=descriptor))
    try:
        server.prepare()
    except Exception as error:
        what, remedy = f"{type(error).__name__}: {error}", ""
        if isinstance(error, _ThreadsError):
            what, remedy = str(error), error.remedy
        elif isinstance(error, OSError) and not os.access(SHARED_MEMORY, os.W_OK):
            remedy = f"make {SHARED_MEMORY} writable: processes share their locks there"
        server._tell(failed=what, remedy=remedy, traceback=traceback.format_exc())
        server.finish_talking()
        sys.exit(CRASHED)
    try:
        server.serve()
    finally:
        server.end()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
