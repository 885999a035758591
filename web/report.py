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
    is_new = not os.path.lexists(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        if is_new:
            with contextlib.suppress(OSError):
                path.unlink()
        raise StorageError(
            f"cannot write {path}: {error.strerror}", "free some space, or name another file"
        ) from None
    return path
