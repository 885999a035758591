"""The page as the server renders it: complete and readable before, or without, any script.

Templates escape everything. What scripts add later (live numbers, charts) goes into the same
elements, so nothing jumps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from swarm.words import bytes_text, count_text, duration_text, service_text
from web.board import headline, summary
from web.intake import ACTIVITIES

WIDTH, HEIGHT = 600.0, 160.0
STATE_SIGNS = {
    "healthy": "●", "degraded": "▲", "stalled": "■", "silent": "○", "failed": "✕", "finished": "✓",
    "serving": "●", "ready": "◐", "joining": "○", "expelled": "✕",
}  # fmt: skip
MAX_TILES = 24
MAX_ROWS = 100


@cache
def environment() -> Environment:
    """The templates, with the words that numbers become."""
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        count=lambda value: "–" if value is None else count_text(value),
        rate=lambda value: "–" if value is None else f"{bytes_text(value)}/s",
        service=lambda value: "–" if value is None else service_text(value),
        duration=lambda value: "–" if value is None else duration_text(value),
        percent=lambda value: "–" if value is None else f"{100 * value:.0f} %",
        clock=lambda t: time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t)) + " UTC",
        iso=lambda t: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t)),
        sign=lambda state: STATE_SIGNS.get(state, "·"),
        json=script_json,
    )
    return found


def page(
    picture: Mapping[str, Any],
    series: Mapping[str, Sequence[float | None]],
    number: int,
    now: float,
    versions: Mapping[str, str],
    recording: Mapping[str, Any] | None = None,
    inline: Mapping[str, str] | None = None,
) -> str:
    """The one page. With `inline` (file -> text) it needs nothing else, as a report does."""
    return (
        environment()
        .get_template("page.html")
        .render(
            **_common(picture, now, versions),
            series=series,
            loss_points=polyline(series["t"], series["loss"]),
            loss_rows=_last_rows(series, 12),
            first={"n": number, "at": now, **picture},
            recording=recording,
            inline=inline
            and {name: Markup(text) for name, text in inline.items()},  # our own files
        )
    )


def peer_page(
    facts: Mapping[str, Any],
    picture: Mapping[str, Any],
    now: float,
    versions: Mapping[str, str],
) -> str:
    """One peer."""
    return (
        environment()
        .get_template("peer.html")
        .render(**_common(picture, now, versions), peer=facts, activities=ACTIVITIES)
    )


def _common(picture: Mapping[str, Any], now: float, versions: Mapping[str, str]) -> dict[str, Any]:
    rows = sorted(
        ({"key": key, **row} for key, row in picture["replicas"].items()),
        key=lambda row: (row["stage"], row["name"], row["key"]),
    )
    head = picture["head"]
    heard = head.get("heard_at")
    return {
        "p": picture,
        "head": head,
        "rows": rows,
        "tiles": {
            stage["stage"]: [row for row in rows if row["stage"] == stage["stage"]]
            for stage in picture["stages"]
        },
        "title": headline(picture),
        "summary": summary(picture),
        "heard_ago": None if not heard else max(now - heard, 0.0),
        "now": now,
        "v": versions,
        "max_tiles": MAX_TILES,
        "max_rows": MAX_ROWS,
    }


def polyline(times: Sequence[float | None], values: Sequence[float | None]) -> str:
    """A series as the points of an SVG polyline in a box of 600 by 160."""
    pairs = [
        (t, value)
        for t, value in zip(times, values, strict=True)
        if t is not None and value is not None and math.isfinite(value)
    ]
    if len(pairs) < 2:
        return ""
    low, high = min(v for _, v in pairs), max(v for _, v in pairs)
    first, last = pairs[0][0], pairs[-1][0]
    wide, tall = (last - first) or 1.0, (high - low) or 1.0
    return " ".join(
        f"{(t - first) / wide * WIDTH:.1f},{(high - v) / tall * (HEIGHT - 8) + 4:.1f}"
        for t, v in pairs
    )


def _last_rows(
    series: Mapping[str, Sequence[float | None]], limit: int
) -> Sequence[Sequence[float | None]]:
    rows = list(zip(series["t"], series["loss"], series["tokens_per_s"], strict=True))
    return [row for row in rows if row[1] is not None][-limit:][::-1]


def script_json(value: Any) -> Markup:
    """JSON that may stand inside a script element: nothing in it can end that element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
