"""What benchmarks share: helper processes told and asked by lines, and the form of results.

A helper reads one JSON object per line from stdin and answers each with one line. Between two lines
it sleeps, so that sides can take turns on one machine without paying their start each time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Helper:
    """One helper process: `tell` an object, `hear` its answer. Its stderr is shown if it dies."""

    def __init__(self, script: str, *arguments: str, threads: int = 1) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        count = str(threads)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count},
            start_new_session=True,  # as the swarm's: Linux shares a busy machine by session
        )

    def tell(self, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self.log.seek(0)
        raise RuntimeError(f"{self.process.args!r} ended: {self.log.read()[-2000:]}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def end_politely() -> None:
    """SIGTERM ends this process as Ctrl-C does (which is off in a shell's background jobs): helpers
    are killed, swarms are stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def serve_lines(answer: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> None:
    """A helper's life: answer every line of stdin until it closes."""
    for line in sys.stdin:
        reply = answer(json.loads(line))
        if reply is not None:
            print(json.dumps(reply), flush=True)


def positive(text: str) -> float:
    """For `argparse`: a number above 0 that is finite."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def whole_number(text: str, most: int | None = None) -> int:
    """For `argparse`: a whole number from 1 to `most`."""
    value = int(text) if text.strip().isdecimal() else 0
    if value < 1 or (most is not None and value > most):
        wanted = "above 0" if most is None else f"from 1 to {most}"
        raise argparse.ArgumentTypeError(f"{text} is not a whole number {wanted}")
    return value


def file_path(text: str) -> Path:
    """For `argparse`: a file, which need not exist yet."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory, and should be a file")
    return path


def commit() -> str | None:
    """What this program is of, if git knows. Asked before a run: it takes longer than an edit."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return told.stdout.strip() or None


def result(
    metric: str, value: float, unit: str, goal: float | None = None, *, at_most: bool = False
) -> dict[str, Any]:
    """One entry of the results line; `goal` and `met` are None where there is no goal."""
    entry: dict[str, Any] = {"metric": metric, "value": round(value, 4), "unit": unit}
    if goal is None:
        return {**entry, "goal": None, "met": None}
    met = value <= goal if at_most else value >= goal
    return {**entry, "goal": f"{'<=' if at_most else '>='} {goal}", "met": met}


def print_results(bench: str, results: Sequence[Mapping[str, Any]]) -> None:
    """The last line of every benchmark."""
    print(json.dumps({"bench": bench, "results": list(results)}), flush=True)


def cpu_seconds(pid: int) -> float:
    """User and system time a process (all of its threads) has used; 0 once it has gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def children_of(pid: int) -> list[int]:
    """Direct children, such as a peer's p2pd."""
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def memory_mib(pid: int) -> dict[str, float]:
    """`{"rss", "pss"}` in MiB. PSS divides pages that are shared among those who share them."""
    found = {"rss": 0.0, "pss": 0.0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.lower() in found:
            found[name.lower()] = int(rest.split()[0]) / 1024
    return found
