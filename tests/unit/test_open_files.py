"""A process that may open no more files says so as for any other peer that it cannot reach."""

from __future__ import annotations

import asyncio
import errno
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.errors import StorageError, TransportError
from swarm.net import p2pd
from swarm.net.libp2p import Libp2pTransport


def test_no_file_descriptor_is_a_transport_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes, and must not end a peer, which retries after a TransportError only."""

    def none_left(*_: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    known = {name: getattr(socket, name) for name in ("AF_UNIX", "SOCK_STREAM")}
    monkeypatch.setattr(p2pd, "socket", SimpleNamespace(**known, socket=none_left))
    with pytest.raises(TransportError, match="Too many open files"):
        asyncio.run(p2pd.P2PDaemon().connect_control())


def test_a_daemon_without_room_for_its_socket_names_the_place() -> None:
    said = "failed: listen unix /tmp/a b/swarm-p2p-1/control: bind: no space left on device"
    error = p2pd._start_error(said)
    assert isinstance(error, StorageError)
    assert str(error) == (
        "cannot make a socket in /tmp/a b: no space left on device - "
        "free some space, or set XDG_RUNTIME_DIR to a short path elsewhere"
    )


def test_who_cannot_be_accepted_waits_and_does_not_keep_the_loop_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Incoming:
        """A listening socket of a process that has no file descriptor left, at first."""

        def __init__(self) -> None:
            self.tries, self.full = 0, True
            self.ready, self.dialler = socket.socketpair()  # readable: somebody waits
            self.dialler.send(b"x")
            self.ends, self.accepted = socket.socketpair(), asyncio.Event()

        def fileno(self) -> int:
            return self.ready.fileno()

        def accept(self) -> tuple[socket.socket, str]:
            self.tries += 1
            if self.full:
                raise OSError(errno.EMFILE, "Too many open files")
            if self.dialler.fileno() < 0:
                raise BlockingIOError
            self.dialler.close()
            self.accepted.set()
            return self.ends[0], ""

        def close(self) -> None:
            for each in (self.ready, *self.ends):
                each.close()

    async def main() -> None:
        incoming = Incoming()
        daemon = p2pd.P2PDaemon()
        daemon.peer_id, daemon.incoming = "p", incoming  # type: ignore[assignment]
        transport = Libp2pTransport(daemon, (), 1.0)
        later: list[tuple[Any, ...]] = []
        monkeypatch.setattr(transport._loop, "call_later", lambda *each: later.append(each))
        for _ in range(50):  # rounds of the loop, in each of which it might be woken
            await asyncio.sleep(0)
        assert incoming.tries == 1
        (seconds,) = (after for after, call, *_ in later if call == transport._listen)
        assert seconds > 0
        monkeypatch.undo()
        incoming.full = False
        transport._listen()
        await incoming.accepted.wait()
        await transport.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 1 << 20), (p2pd.OPEN_FILES, 1 << 20)),
        ((1024, 4096), (4096, 4096)),
        ((1024, -1), (p2pd.OPEN_FILES, -1)),
        ((1 << 20, 1 << 20), None),
        ((-1, -1), None),
    ],
)
def test_as_many_files_are_asked_for_as_streams_may_take(
    limits: tuple[int, int], raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(p2pd.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(p2pd.resource, "setrlimit", lambda _, pair: asked.append(pair))
    p2pd.allow_open_files()
    assert asked == ([] if raised is None else [raised])
