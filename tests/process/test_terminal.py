"""The live view where it is meant for: a process on a terminal, and a Ctrl-C typed there.

The terminal is a pseudo-terminal, whose other end this test reads. All other tests see lines.
"""

from __future__ import annotations

import os
import pty
import re
import select
import termios
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.process.forks import LIMIT_S, Forks, toml

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CTRL_C = b"\x03"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """One that reads what is written to it, and types. 100 columns wide, 30 lines high."""

    def __init__(self) -> None:
        self._ours, self._theirs = pty.openpty()
        self.name = os.ttyname(self._theirs)
        termios.tcsetwinsize(self._theirs, (30, 100))
        self._read = bytearray()

    @property
    def raw(self) -> str:
        return self._read.decode(errors="replace")

    @property
    def text(self) -> str:
        """Without colours and what moves the cursor."""
        return ESCAPES.sub("", self.raw)

    def shows(self, *patterns: str) -> None:
        """Read until it has shown all of them."""
        while wanted := [each for each in patterns if not re.search(each, self.text)]:
            assert self._more(), f"ended without {wanted}:\n{self.text}"

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until_left(self) -> None:
        """Read on until no process has it any more."""
        while self._more():
            pass

    def _more(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], LIMIT_S)
        assert ready, f"nothing more in {LIMIT_S} s:\n{self.text}"
        try:
            self._read += os.read(self._ours, 1 << 16)
        except OSError:  # what a terminal says when the last of the others has gone
            return False
        self._let_go()  # whoever wrote this has it
        return True

    def _let_go(self) -> None:
        if self._theirs >= 0:
            os.close(self._theirs)
            self._theirs = -1

    def close(self) -> None:
        self._let_go()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def test_a_run_is_watched_on_a_terminal_and_ends_with_ctrl_c(
    forks: Forks, terminal: Terminal, tmp_path: Path
) -> None:
    run = toml(tmp_path / "run.toml", steps=100_000, stages=2)
    up = forks.swarm("up", run, terminal=terminal.name, TERM="xterm-256color", COLUMNS="")
    terminal.shows(
        r"small  \S+ training",
        r"step [1-9]\d* of 100000",
        r"loss +\d\.\d{4}",
        *(rf" stage {stage} " for stage in range(2)),
        r"in flight +\S+ done",  # a replica's tile
    )
    assert HIDE_CURSOR in terminal.raw, "that are lines, and no live view"
    tops = {line for line in terminal.text.splitlines() if re.search(" stage 0 .* stage 1 ", line)}
    assert {len(top) for top in tops} == {100}, tops
    above = psutil.Process(forks.server.pid)  # what loses its parent becomes its child
    processes = above.children(recursive=True)
    assert [each.name() for each in processes].count("p2pd") == 3
    terminal.type(CTRL_C)
    terminal.until_left()
    assert up.code() == 130, terminal.text
    assert "Traceback" not in terminal.text
    assert (
        "stopped before its first checkpoint ([checkpoint] every); files are in " in terminal.text
    )
    assert terminal.raw.rindex(SHOW_CURSOR) > terminal.raw.rindex(HIDE_CURSOR)
    _, left = psutil.wait_procs({*processes, *above.children(recursive=True)}, timeout=0.5)
    assert left == []
