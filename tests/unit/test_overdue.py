"""Whom an overdue microbatch is taken from: its holder, never a line that still carries it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peer.watch import Stand, Watch
from swarm.errors import StreamClosedError
from swarm.step import Issue, Step


class Told(Watch):
    """Asked replicas answer what the test says; an exception is no answer."""

    def __init__(self, stands: list[Stand | Exception], *, sending: bool) -> None:
        leader: Any = SimpleNamespace(links=SimpleNamespace(sending=sending))
        super().__init__(leader)
        self.stands = stands

    async def _stand(self, replica: str, step: Step | None, index: int = 0) -> Stand:
        stand = self.stands[int(replica)]
        if isinstance(stand, Exception):
            raise stand
        return stand


def at(phase: str, *, sending: bool = False, silent_s: float = 0.0) -> Stand:
    return Stand(silent_s, False, sending, phase)


@pytest.mark.parametrize(
    ("stands", "sending", "hop"),
    [
        ([at("waiting"), at("waiting"), at("forward")], False, 2),
        ([at("waiting"), at("waiting"), at("absent")], False, 1),
        ([at("waiting"), at("waiting"), at("counted")], False, 1),
        ([at("waiting"), at("forward", silent_s=3.0), at("absent")], False, None),
        ([at("waiting"), at("waiting", sending=True), at("absent")], False, None),
        ([at("waiting"), at("waiting"), at("counted", sending=True)], False, None),
        ([at("waiting"), at("waiting", sending=True), StreamClosedError("gone")], False, 2),
        ([at("absent", sending=True), at("absent"), at("absent")], False, 0),
        ([at("absent"), at("absent"), at("absent")], True, None),
    ],
    ids=[
        "its device owes it",
        "the next has not got it, and nothing is on its way",
        "answered, and the answer came to nothing",
        "its device works at something",
        "on its way down",
        "on its way back",
        "the next is gone",
        "lost on the way from here",
        "on its way from here",
    ],
)
def test_holder(stands: list[Stand | Exception], sending: bool, hop: int | None) -> None:
    issue = Issue(0, 1, ("0", "1", "2"), False)
    assert asyncio.run(Told(stands, sending=sending).holder(None, issue)) == hop  # type: ignore[arg-type]
