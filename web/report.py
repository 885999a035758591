"""`swarm report`: one HTML file of a run, with everything in it, that opens without a network."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from swarm.errors import DataError, StorageError
from swarm.events import read_status, tail_events
from web.render import page
from web.replay import record

BEGINS = b"<!doctype html>"
STATIC = Path(__file__).parent / "static"
FILES = (
    "vendor/uPlot.min.css", "style.css", "vendor/uPlot.iife.min.js", "format.js", "pipeline.js",
    "charts.js", "lists.js", "app.js",
)  # fmt: skip


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run; returns where it is (`RUN_DIR/report.html` unless chosen).

    Raises DataError when the directory holds no run, StorageError when it cannot be written.
    """
    lines = tail_events(run_dir / "events.jsonl")
    if not lines:
        raise DataError(f"{run_dir} holds no events of a run", "name a run's directory")
    now = time.time()
    recording = record(lines, read_status(run_dir / "status.json"), now)
    html = page(
        recording.last,
        recording.series,
        0,
        recording.frames[-1]["t"],
        {},
        {"frames": recording.frames, "feed": recording.feed, "series": recording.series},
        {name: (STATIC / name).read_text(encoding="utf-8") for name in FILES},
    )
    path = out or run_dir / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, html.encode())
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}", "free some space, or name another file"
        ) from None
    return path


def _write(path: Path, page: bytes) -> None:
    """Replace an earlier report as a whole, and no other file."""
    if os.path.lexists(path) and not path.is_file():  # a pipe, say
        path.write_bytes(page)
        return
    path = path.resolve()  # where a link leads is replaced, not the link
    if path.is_file():
        with path.open("rb") as before:
            if before.read(len(BEGINS)) not in (BEGINS, b""):
                raise StorageError(f"{path} is no report", "name another file, or remove it first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(page)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
