"""The words, numbers and small pictures in which people are told of a run, on any screen. Pure.

A status may come from another machine: whatever has not the expected type counts as missing, and
text loses what could steer a terminal (control and direction characters) and its tail.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from swarm.names import friendly_name


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What is drawn with. Every state has a sign of its own, so nothing rests on colour."""

    bars: str = "▁▂▃▄▅▆▇█"
    full: str = "━"
    head: str = "╸"
    rest: str = "─"
    cell: str = "▰"
    no_cell: str = "▱"
    arrow: str = "→"
    dot: str = "·"
    rule: str = "┈"
    ellipsis: str = "…"
    serving: str = "●"
    ready: str = "◐"
    joining: str = "○"
    expelled: str = "✗"


UNICODE = Glyphs()
ASCII = Glyphs(
    "_.,-=+*#", "#", "#", "-", "#", "-", "->", "|", "-", "...", serving="*", ready="+",
    joining="o", expelled="x",
)  # fmt: skip


def number(value: Any, default: float = 0.0) -> float:
    """A finite number, or the default."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer beyond all floats
            if math.isfinite(value):
                return float(value)
    return default


def integer(value: Any, default: int = 0) -> int:
    return int(number(value, default))


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def rows(value: Any, limit: int = 4096) -> list[Mapping[str, Any]]:
    """The mappings of a list."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [each for each in value[:limit] if isinstance(each, Mapping)]


def clean(value: Any, limit: int = 200) -> str:
    """One line of printable text."""
    if not isinstance(value, str):
        return ""
    text = "".join(c if c.isprintable() else " " for c in value[: 2 * limit])
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def count_text(value: float) -> str:
    """`812`, `12.4k`, `1.53M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{_three(value / size)}{unit}"
    return f"{value:.0f}"


def bytes_text(value: float) -> str:
    """`4.1 B`, `512 B`, `1.02 kB`."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size * 0.9995:
            return f"{_three(value / size)} {unit}"
    return f"{value:.0f} B" if value >= 99.95 or value == int(value) else f"{value:.1f} B"


def _three(value: float) -> str:
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}"


def ascii_text(text: str) -> str:
    """As long as the text, with a question mark for each character that is not ASCII."""
    return text.encode("ascii", "replace").decode()


def duration_text(seconds: float) -> str:
    """`0:45`, `2:25`, `3:04:10`, `2 d 3 h`."""
    whole = int(seconds + 0.5)
    if whole >= 2 * 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def service_text(seconds: float) -> str:
    """`8.4 ms`, `52 ms`, `1.25 s`."""
    if seconds >= 0.9995:
        return f"{_three(seconds)} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.00995 else f"{seconds * 1e3:.1f} ms"


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs = UNICODE) -> str:
    """The course of some values in at most `width` characters, lowest to highest."""
    values = [value for value in values if math.isfinite(value)]
    if not values or width < 1:
        return ""
    if len(values) > width:
        edges = [index * len(values) // width for index in range(width + 1)]
        values = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    top = len(glyphs.bars) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(glyphs.bars[round((value - low) * scale)] for value in values)


def progress_bar(share: float, width: int, glyphs: Glyphs = UNICODE) -> tuple[str, str]:
    """The full and the empty part of a bar, `width` characters together."""
    share = min(max(share, 0.0), 1.0)
    full = int(share * width)
    half = glyphs.head if 0 < share < 1 and full < width else ""
    return glyphs.full * full + half, glyphs.rest * (width - full - len(half))


def cells(share: float, width: int, glyphs: Glyphs = UNICODE) -> str:
    full = min(max(round(share * width), 0), width)
    return glyphs.cell * full + glyphs.no_cell * (width - full)


def losses_of(status: Mapping[str, Any]) -> list[tuple[int, float]]:
    """`[(step, loss), …]` of a status; losses that were no numbers are left out."""
    pairs = status.get("losses")
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        return []
    found = []
    for pair in pairs[-1000:]:
        if isinstance(pair, Sequence) and len(pair) == 2:
            loss = number(pair[1], math.nan)
            if not math.isnan(loss):
                found.append((integer(pair[0]), loss))
    return found


def remaining_s(status: Mapping[str, Any]) -> float | None:
    """Seconds to the last step at the present speed; None when there is no telling.

    `tokens` counts from when this leader began, which on a continued run is not step 0.
    """
    step, rate = integer(status.get("step")), number(status.get("tokens_per_s"))
    tokens, left = number(status.get("tokens")), integer(status.get("num_steps")) - step
    losses = losses_of(status)
    trained = step - losses[0][0] if 0 < len(losses) < 200 else step
    if trained <= 0 or left <= 0 or rate <= 0 or tokens <= 0 or status.get("state") != "training":
        return None
    return left * tokens / trained / rate


def event_text(event: Mapping[str, Any]) -> str | None:
    """What people want to know of an event; None for events that are no news."""
    who = friendly_name(str(event["replica"])) if event.get("replica") else "a replica"
    stage, step = event.get("stage"), event.get("step")
    of = f" stage {integer(stage)}" if stage is not None else ""
    at = f" (step {integer(step)})" if step is not None else ""
    why = f": {reason}" if (reason := clean(event.get("reason"))) else ""
    source, target = integer(event.get("source")), integer(event.get("target"))
    match event.get("event"):
        case "joined":
            return f"{who} joined{of}"
        case "admitted":
            return f"{who} serves{of or ' its stage'}{at}"
        case "leaving":
            return f"{who} is leaving{of}{why}"
        case "left":
            return f"{who} left{of}{why}"
        case "expelled":
            return f"{who} expelled{why}{at}"
        case "diverged":
            return f"{who} has another state and fetches the right one{at}"
        case "suspected":
            return f"nothing comes from {who}: new work goes to others{at}"
        case "bad_chunk":
            return f"{who} gave wrong bytes to a joiner, which fetched them elsewhere"
        case "paused":
            return f"paused: nobody has the state of{of} any more, it needs a peer{at}"
        case "epoch":
            return f"epoch {integer(event.get('epoch'))}: the run went back{at}"
        case "damaged":
            return f"a checkpoint cannot be restored{why}"
        case "hold":
            return f"waiting a moment for a joiner{at}"
        case "move":
            return f"{who} is to move from stage {source} to stage {target}{why}"
        case "moved":
            return f"{who} serves stage {target} now, and leaves stage {source}"
        case "second":
            return f"{who} is to hold stage {target} besides stage {source}{why}"
        case "move_refused":
            return f"{who} does not move to stage {target}{why}"
        case "round_failed":
            return f"averaging repeated{why}{at}"
        case "validation":
            if why:
                return f"no validation loss{at}{why}"
            return f"validation loss {number(event.get('loss'), math.nan):.4f}{at}"
        case "checkpoint":
            reason = clean(event.get("reason"), 400)
            return f"no checkpoint{at}: {reason}" if reason else f"checkpoint{at}"
        case "finished":
            steps, sha256 = event.get("steps"), clean(event.get("sha256"), 64)
            after = f" after {integer(steps)} steps" if steps is not None else ""
            return f"finished{after}{f', sha256 {sha256[:16]}' if sha256 else ''}{why}"
        case "dropped":
            return f"{integer(event.get('count'))} events were lost: the disk was full"
    return None


def clock_text(event: Mapping[str, Any]) -> str:
    """The local time of an event, `12:31:04`."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(number(event.get("t"))))
    except (OverflowError, OSError, ValueError):
        return "--:--:--"


def plain_line(result: Any) -> str:
    """A committed step (a StepResult, or a line of a report) as one line of a log."""
    get = result.get if isinstance(result, Mapping) else lambda key: getattr(result, key, None)
    parts = [f"step {integer(get('step'))}", f"loss {number(get('loss'), math.nan):.4f}"]
    if get("grad_norm") is not None:
        parts.append(f"norm {number(get('grad_norm'), math.nan):.3g}")
    tokens, wall_s = number(get("tokens")), number(get("wall_s"))
    if wall_s > 0:
        parts += [wall_text(wall_s), f"{count_text(tokens / wall_s)} tokens/s"]
    if get("validation_loss") is not None:
        parts.append(f"validation {number(get('validation_loss'), math.nan):.4f}")
    return "  ".join(parts)


def wall_text(seconds: float) -> str:
    return service_text(seconds) if seconds < 100 else duration_text(seconds)
