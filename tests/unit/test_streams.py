"""A process that trains on, whatever becomes of what it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAYING = """
import sys
from peer.streams import forgive_lost_lines
print("said before", file=sys.stdout)
forgive_lost_lines()
for number in range(3):
    print("x" * 100_000)
    print("said", number, file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_full_disk_loses_lines_only(full: str) -> None:
    with open("/dev/full", "w") as device:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: device}
        done = subprocess.run(
            [sys.executable, "-c", SAYING],
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # so that a line waits in the old stream
            **streams,
        )
    assert done.returncode == 0, done
    if full == "stdout":
        assert done.stderr == "said 0\nsaid 1\nsaid 2\n"
    else:
        assert done.stdout == "said before\n" + 3 * ("x" * 100_000 + "\n")


def test_a_terminal_that_is_gone_loses_lines_only() -> None:
    """As of who disowns a process and closes the terminal."""
    ours, its = os.openpty()
    code = SAYING.replace("forgive_lost_lines()", "forgive_lost_lines()\nsys.stdin.readline()")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=its, stderr=its
    ) as process:
        os.close(its)
        heard = b""
        while b"\n" not in heard:  # which is written apart
            heard += os.read(ours, 100)
        assert heard.startswith(b"said before")
        os.close(ours)
        process.communicate(b"\n", timeout=60)
    assert process.returncode == 0


def test_who_reads_no_more_ends_it() -> None:
    """As in `swarm-peer | head`: another error than a full disk is none of ours."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAYING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert "BrokenPipeError" in process.communicate(timeout=60)[1]
    assert process.returncode != 0
