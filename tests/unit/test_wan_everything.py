"""`everything.py` when it is interrupted, or a command takes too long: whoever is ended cleans up.

The real script in a folder of its own, beside a stand-in of a measurement; no root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMESPACES = """
class LabError(Exception):
    pass


def require_root():
    pass
"""
MEASUREMENT = """
import os, pathlib, time

here = pathlib.Path(__file__).parent
try:
    (here / "measuring").write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)  # not signal.pause(): a signal just before it would be waited for in vain
finally:
    (here / "cleaned up").touch()
"""


class Started:
    """`everything.py` with one measurement, which is under way."""

    def __init__(self, folder: Path) -> None:
        self.cleaned_up = folder / "cleaned up"
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "everything.py"), "line"],
            env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.measurement = int((folder / "measuring").read_text())  # a pipe: once it is there

    def ends(self) -> tuple[int, str, str]:
        """Its code, and what it has said; its measurement has cleaned up by then."""
        out, errors = self.process.communicate()
        assert self.cleaned_up.exists()
        return self.process.returncode, out, errors


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    folder = tmp_path / "benchmarks" / "wan"
    folder.mkdir(parents=True)
    shutil.copy(BENCHMARKS / "wan" / "everything.py", folder)
    (folder / "_namespaces.py").write_text(NAMESPACES)
    (folder / "line.py").write_text(MEASUREMENT)
    os.mkfifo(folder / "measuring")
    made = Started(folder)
    yield made
    if not made.cleaned_up.exists():
        os.kill(made.measurement, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "")],
    ids=["ctrl-c", "told to end"],
)
def test_interrupted_it_ends_its_measurement_as_ctrl_c_does(
    started: Started, number: signal.Signals, code: int, line: str
) -> None:
    os.killpg(started.process.pid, number)  # as a terminal does
    ended, _, errors = started.ends()
    assert (ended, errors) == (code, line)


def test_a_measurement_that_takes_too_long_cleans_up(started: Started) -> None:
    """`timeout` is told that the time is over, as its own clock would tell it."""
    pid = started.process.pid
    (limit,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    os.kill(limit, signal.SIGALRM)
    code, out, errors = started.ends()
    assert "   line failed: not done after 960 s\n" in out
    assert (code, errors) == (1, "error: not measured: line\n")
