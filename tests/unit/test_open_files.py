"""A process that may open no more files says so as for any other peer that it cannot reach."""

from __future__ import annotations

import asyncio
import errno
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.errors import TransportError
from swarm.net import p2pd


def test_no_file_descriptor_is_a_transport_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes, and must not end a peer, which retries after a TransportError only."""

    def none_left(*_: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    known = {name: getattr(socket, name) for name in ("AF_UNIX", "SOCK_STREAM")}
    monkeypatch.setattr(p2pd, "socket", SimpleNamespace(**known, socket=none_left))
    with pytest.raises(TransportError, match="Too many open files"):
        asyncio.run(p2pd.P2PDaemon().connect_control())


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
