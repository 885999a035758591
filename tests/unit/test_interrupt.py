"""Signals of a command: the first lets it leave, and one that is ignored changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from peer.interrupt import until_interrupted


@pytest.fixture
def hangups_ignored() -> Iterator[None]:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


async def hang_up_itself() -> str:
    os.kill(os.getpid(), signal.SIGHUP)
    for _ in range(5):  # in which a handler, if there were one, would run
        await asyncio.sleep(0)
    return "finished"


async def hang_up_and_wait() -> str:
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.Event().wait()
    return "never"


def test_a_hangup_ends_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        until_interrupted(hang_up_and_wait())


def test_under_nohup_it_does_not(hangups_ignored: None) -> None:
    assert until_interrupted(hang_up_itself()) == "finished"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
