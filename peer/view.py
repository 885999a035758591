"""The live terminal view of a run, and what takes its place where there is no terminal.

`render` is a pure function from a status, some events and a size to something rich can print, so
that tests need no terminal and `swarm status` shows the same picture once. `TerminalView` draws it
in place, or writes a line per step and event (`--plain`, a pipe, a log file). Nothing rests on
colour alone, and everything fits the width it is given; with little height, tiles shrink to a line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from swarm.names import friendly_name
from swarm.words import (
    ASCII,
    UNICODE,
    Glyphs,
    ascii_text,
    bytes_text,
    cells,
    clean,
    clock_text,
    count_text,
    duration_text,
    event_text,
    integer,
    losses_of,
    mapping,
    number,
    plain_line,
    progress_bar,
    remaining_s,
    rows,
    service_text,
    sparkline,
)

__all__ = ["TerminalView", "plain_line", "print_status", "render"]

_STATE_STYLE = {
    "waiting": "yellow", "training": "green", "validating": "cyan",
    "saving": "cyan", "finished": "bold green",
    "failed": "bold red",
}  # fmt: skip
_STANDING_STYLE = {"serving": "green", "ready": "cyan", "joining": "yellow", "expelled": "red"}
_EVENT_STYLE = {"expelled": "red", "diverged": "red", "left": "yellow", "round_failed": "yellow"}
_MIN_STAGE = 26  # columns of a stage
_MAX_TILES = 6  # of a stage that are drawn as tiles when the height is not known
_TILE = 3  # lines
_BALANCED = 0.05  # less than this share is not worth a word


def render(
    status: Mapping[str, Any],
    events: Iterable[Mapping[str, Any]] = (),
    width: int = 80,
    *,
    height: int | None = None,
    ascii_only: bool = False,
) -> RenderableType:
    """The view, `width` columns wide and, where the swarm allows it, within `height` lines."""
    width = max(width, 20)
    glyphs = ASCII if ascii_only else UNICODE
    news = [event for event in events if event_text(event) is not None]
    head = [
        *_header(status, width, glyphs),
        _progress(status, width, glyphs),
        Text(),
        *_metrics(status, width, glyphs),
        Text(),
    ]
    room = None if height is None else height - len(head) - min(len(news), 3) - bool(news)
    stages, num_lines = _stages(status, width, room, glyphs)
    shown = 5 if height is None else min(max(height - len(head) - num_lines - 1, 0), 8)
    tail = [_event(event, width, glyphs) for event in news[max(len(news) - shown, 0) :]]
    return Group(*head, stages, *([Text(), *tail] if tail else []))


def _line(text: Text, glyphs: Glyphs, width: int) -> Text:
    """The text on one line: what does not fit gives way to an ellipsis."""
    text.no_wrap, text.overflow = True, "crop"
    if glyphs is ASCII:
        text.plain = ascii_text(text.plain)
    if text.cell_len > width:
        text.truncate(max(width - len(glyphs.ellipsis), 0))
        text.append(glyphs.ellipsis)
    return text


def _spread(left: Text, right: Text, width: int, glyphs: Glyphs) -> Text:
    """Both on one line, at its two ends; the right one goes first when there is no room."""
    gap = width - left.cell_len - right.cell_len
    if gap < 1:
        return _line(left, glyphs, width)
    return _line(Text.assemble(left, " " * gap, right), glyphs, width)


def _header(status: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[Text]:
    run = mapping(status.get("run"))
    state = clean(status.get("state"), 20) or "unknown"
    name = clean(run.get("name"), 40) or clean(run.get("id"), 8) or "run"
    style = _STATE_STYLE.get(state, "")
    left = Text.assemble((name, "bold"), "  ", (f"{glyphs.serving} {state}", style))
    times = []
    started, updated = number(status.get("started_at")), number(status.get("updated_at"))
    if 0 < started <= updated:
        times.append(f"{duration_text(updated - started)} elapsed")
    if (left_s := remaining_s(status)) is not None:
        times.append(f"{duration_text(left_s)} left")
    right = Text(f" {glyphs.dot} ".join(times), style="dim")
    lines = [_spread(left, right, width, glyphs)]
    if reason := clean(status.get("reason"), 300):
        lines.append(_line(Text(reason, style=style), glyphs, width))
    return lines


def _progress(status: Mapping[str, Any], width: int, glyphs: Glyphs) -> Text:
    step, steps = integer(status.get("step")), integer(status.get("num_steps"))
    share = min(max(step / steps, 0.0), 1.0) if steps > 0 else 0.0
    label, percent = f"step {step} of {steps} ", f" {int(share * 100)} %"
    full, rest = progress_bar(share, max(width - len(label) - len(percent), 4), glyphs)
    text = Text.assemble(label, (full, "green"), (rest, "dim"), percent)
    return _line(text, glyphs, width)


def _metrics(status: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[Text]:
    dot = f" {glyphs.dot} "
    indent = 11 if width >= 40 else 0
    room = width - indent
    lines: list[Text] = []

    def add(label: str, parts: Sequence[Text]) -> None:
        """Parts side by side, on a further line where they do not fit."""
        line, used = Text.assemble((f"{label:<{indent}}" if indent else "", "dim")), 0
        for part in parts:
            if used and used + len(dot) + part.cell_len > room:
                lines.append(_line(line, glyphs, width))
                line, used = Text(" " * indent), 0
            if used:
                line.append(dot, style="dim")
                used += len(dot)
            line.append_text(part)
            used += part.cell_len
        lines.append(_line(line, glyphs, width))

    loss, losses = status.get("loss"), [loss for _, loss in losses_of(status)]
    missing = "no number" if status.get("losses") else "not yet"
    now = Text(f"{number(loss):.4f}" if loss is not None else missing, style="bold")
    now = now if indent else Text.assemble("loss ", now)
    validation = status.get("validation_loss")
    after = "" if validation is None else f"{dot}validation {number(validation):.4f}"
    spark = sparkline(losses, min(room - now.cell_len - len(after) - 1, 60), glyphs)
    if spark:
        now.append(f" {spark}", style="not bold green")
    add("loss", [now, *([Text(after[len(dot) :])] if after else [])])
    microbatches = mapping(status.get("microbatches"))
    done, of = integer(microbatches.get("done")), integer(microbatches.get("of"))
    speed = [
        Text(f"{count_text(number(status.get('tokens_per_s')))} tokens/s", style="bold"),
        Text(f"{count_text(number(status.get('tokens')))} tokens"),
        Text(f"microbatch {done} of {of}"),
        Text(f"{integer(status.get('in_flight'))} in flight"),
    ]
    add("speed", speed)
    add("per token", _bytes(mapping(status.get("bytes")), glyphs))
    if placed := _placement(mapping(status.get("placement"))):
        add("placement", placed)
    return lines


def _placement(placement: Mapping[str, Any]) -> list[Text]:
    """What the slowest stage does, what the best assignment could, and whether a cut would help."""
    stages = placement.get("stages")
    rates = [number(rate) for rate in stages] if isinstance(stages, list) else []
    if not rates or min(rates) <= 0:
        return []
    slowest, best = min(rates), number(placement.get("best"))
    parts = [Text(f"stage {rates.index(slowest)} is slowest: {slowest:.3g} microbatches/s")]
    if best > slowest * (1 + _BALANCED):
        parts.append(Text(f"at most {best:.3g} with these peers"))
    recut = mapping(placement.get("recut"))
    if number(recut.get("gain")) > _BALANCED:
        parts.append(Text(clean(recut.get("reason"), 120), style="yellow"))
    return parts


def _bytes(figures: Mapping[str, Any], glyphs: Glyphs) -> list[Text]:
    parts = []
    for row in rows(figures.get("boundaries")):
        k = integer(row.get("boundary"))
        raw, wire = number(row.get("raw_per_token")), number(row.get("wire_per_token"))
        back = number(row.get("back_wire_per_token"))
        parts.append(
            Text.assemble(
                (f"{k}{glyphs.arrow}{k + 1} ", "dim"),
                f"{bytes_text(raw)} {glyphs.arrow} {bytes_text(wire)}",
                f", back {bytes_text(back)}" if back else "",
            )
        )
    if "leader_per_token" in figures:
        leader = bytes_text(number(figures.get("leader_per_token")))
        parts.append(Text.assemble(("leader ", "dim"), leader))
    return parts or [Text("not yet", style="dim")]


# ---- stages and their replicas ------------------------------------------------------------------


def _stages(
    status: Mapping[str, Any], width: int, room: int | None, glyphs: Glyphs
) -> tuple[RenderableType, int]:
    """The stages in `room` lines if they can be; with how many lines they take."""
    replicas = rows(status.get("replicas"))
    known = max((integer(row.get("stage")) + 1 for row in replicas), default=1)
    num_stages = min(max(integer(status.get("num_stages"), known), 1), 256)
    by_stage: list[list[Mapping[str, Any]]] = [[] for _ in range(num_stages)]
    for row in replicas:
        if 0 <= (stage := integer(row.get("stage"))) < num_stages:
            by_stage[stage].append(row)
    for column in by_stage:
        column.sort(key=lambda row: row.get("standing") == "expelled")  # stable: arrival otherwise
    per_row = max(min(num_stages, width // _MIN_STAGE), 1)
    num_rows = -(-num_stages // per_row)
    per_row = -(-num_stages // num_rows)
    compact, limit = _tiling(by_stage, per_row, room)
    bands: list[RenderableType] = []
    num_lines = 0
    for first in range(0, num_stages, per_row):
        band = range(first, min(first + per_row, num_stages))
        table = Table.grid(padding=0)
        panels = []
        inner_height = max(_num_lines(len(by_stage[k]), compact, limit) for k in band)
        num_lines += inner_height + 2
        for position, k in enumerate(band):
            share = width * (position + 1) // per_row - width * position // per_row
            table.add_column(width=share)
            lines = _column(by_stage[k], share - 4, compact, limit, glyphs)
            panels.append(
                Panel(
                    Group(*lines),
                    title=f"stage {k}",
                    title_align="left",
                    box=box.ASCII if glyphs is ASCII else box.ROUNDED,
                    border_style="dim" if by_stage[k] else "yellow",
                    width=share,
                    height=inner_height + 2,
                )
            )
        table.add_row(*panels)
        bands.append(table)
    return Group(*bands), num_lines


def _num_lines(num_replicas: int, compact: bool, limit: int) -> int:
    shown = min(num_replicas, limit)
    lines = shown if compact else shown * (_TILE + 1) - 1
    return max(lines + (num_replicas > limit), 1)


def _tiling(by_stage: Sequence[Sequence[Any]], per_row: int, room: int | None) -> tuple[bool, int]:
    """Whether replicas are drawn on one line each, and how many of a stage are drawn."""
    counts = [len(column) for column in by_stage]
    most = max(counts)
    if room is None:
        return most > _MAX_TILES, 16

    def fits(compact: bool, limit: int) -> bool:
        lines = [_num_lines(count, compact, limit) + 2 for count in counts]
        return sum(max(lines[k : k + per_row]) for k in range(0, len(lines), per_row)) <= room

    if fits(False, most):
        return False, most
    return True, next((limit for limit in range(most, 1, -1) if fits(True, limit)), 1)


def _column(
    replicas: Sequence[Mapping[str, Any]], width: int, compact: bool, limit: int, glyphs: Glyphs
) -> list[Text]:
    if not replicas:
        return [_line(Text("needs a peer", style="yellow"), glyphs, width)]
    lines: list[Text] = []
    for row in replicas[:limit]:
        if lines and not compact:
            lines.append(Text(glyphs.rule * width, style="dim"))
        lines += _row(row, width, glyphs) if compact else _tile(row, width, glyphs)
    if len(replicas) > limit:
        lines.append(_line(Text(f"and {len(replicas) - limit} more", style="dim"), glyphs, width))
    return lines


def _name(row: Mapping[str, Any], glyphs: Glyphs) -> Text:
    standing = clean(row.get("standing"), 20)
    sign = getattr(glyphs, standing) if standing in _STANDING_STYLE else "?"
    name = friendly_name(clean(row.get("replica")) or "?")
    return Text.assemble((f"{sign} ", _STANDING_STYLE.get(standing, "")), (name, "bold"))


def _service(row: Mapping[str, Any]) -> str:
    service_s = row.get("service_s")
    return service_text(number(service_s)) if service_s is not None else ""


def _row(row: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[Text]:
    """A replica on one line."""
    if row.get("standing") == "serving":
        right = Text(f"{number(row.get('share')) * 100:.0f} %")
        if width >= 30:
            right = Text(f"{_service(row)} {right.plain}")
    else:
        right = Text(clean(row.get("standing"), 12), style="dim")
    return [_spread(_name(row, glyphs), right, width, glyphs)]


def _tile(row: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[Text]:
    """A replica on three lines."""
    first = _spread(_name(row, glyphs), Text(clean(row.get("device"), 12), "dim"), width, glyphs)
    standing = row.get("standing")
    counted = Text(f"{count_text(number(row.get('counted')))} done")
    if standing == "serving":
        share = min(max(number(row.get("share")), 0.0), 1.0)
        bar = Text.assemble((cells(share, 6, glyphs), "green"), f" {share * 100:.0f} %")
        flight = Text(f"{integer(row.get('outstanding'))} in flight")
        second = _spread(bar, Text(_service(row)), width, glyphs)
        third = _spread(flight, counted, width, glyphs)
    else:
        reason = clean(row.get("reason"))
        if not reason and standing == "ready":
            reason = "enters with the next step"
        elif not reason and standing == "joining":
            reason = "fetching the state"
        style = _STANDING_STYLE.get(str(standing), "")
        second = _spread(Text(clean(standing, 20), style=style), counted, width, glyphs)
        third = _line(Text(reason, style="dim"), glyphs, width)
    return [first, second, third]


def _event(event: Mapping[str, Any], width: int, glyphs: Glyphs) -> Text:
    style = _EVENT_STYLE.get(str(event.get("event")), "")
    said = (event_text(event) or "", style)
    return _line(Text.assemble((clock_text(event), "dim"), "  ", said), glyphs, width)


# ---- on a terminal, or as lines -----------------------------------------------------------------


class _OnceConsole(Console):
    """A reader that is gone is told as with any other output (`peer.cli.errors`); of rich itself it
    is a silent exit code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_status(
    status: Mapping[str, Any],
    events: Iterable[Mapping[str, Any]] = (),
    console: Console | None = None,
) -> None:
    """The view once, as `swarm status` prints it."""
    console = console or _OnceConsole(highlight=False)
    ascii_only = console.options.ascii_only
    console.print(render(status, events, console.width, ascii_only=ascii_only))


class TerminalView:
    """Shows a run while it goes on: `with TerminalView() as view: view.update(status, events)`.

    `plain`, or an output that is no terminal: a line per step and event instead. The last picture
    stays on the screen when the view is left. Nothing runs between updates, so there is nothing to
    stop when the process is told to end.
    """

    def __init__(self, *, plain: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.plain = plain or not self.console.is_terminal or self.console.is_dumb_terminal
        self._events: deque[Mapping[str, Any]] = deque(maxlen=20)
        self._live: Live | None = None
        self._state = ("", "")
        self._last_step: int | None = None

    def __enter__(self) -> TerminalView:
        if not self.plain:
            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def update(self, status: Mapping[str, Any], events: Iterable[Mapping[str, Any]] = ()) -> None:
        """Show this status; `events` are those since the last update, oldest first."""
        if self.plain:
            return self._lines(status, events)
        self._events += [event for event in events if event_text(event) is not None]
        if self._live is not None:
            width, height = self.console.size
            ascii_only = self.console.options.ascii_only
            view = render(status, self._events, width, height=height - 1, ascii_only=ascii_only)
            self._live.update(view, refresh=True)
        return None

    def note(self, text: str) -> None:
        """A line that stays, above the view; it is never cut, so that a link can be copied."""
        self._print(clean(text, 4000))

    def _lines(self, status: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> None:
        over = status.get("state") == "finished"
        if not over:
            self._state_line(status)
        losses = losses_of(status)
        if self._last_step is None:  # of a run that has long been going on, only what is new
            self._last_step = losses[-1][0] - 1 if losses else -1
        for event in events:
            if event.get("event") == "step":
                step = integer(event.get("step"))
                if step > self._last_step:
                    self._last_step = step
                    self._print(plain_line(event))
            elif (text := event_text(event)) is not None:
                self._print(f"{clock_text(event)}  {text}")
        for step, loss in losses:
            if step > self._last_step:  # a step whose event did not reach us
                self._last_step = step
                self._print(plain_line({"step": step, "loss": loss}))
        if over:  # after the last steps
            self._state_line(status)

    def _state_line(self, status: Mapping[str, Any]) -> None:
        state = (clean(status.get("state"), 20), clean(status.get("reason"), 300))
        if state != self._state:
            self._state = state
            name, reason = state
            parts = [reason] if reason.startswith(name) else [name, reason]
            self._print(": ".join(part for part in parts if part))

    def _print(self, text: str) -> None:
        if self.console.options.ascii_only:
            text = ascii_text(text)
        self.console.print(Text(text), soft_wrap=True)
