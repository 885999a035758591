"""Pictures of what has been kept (`_kept.py`): PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _kept import ALIKE, GOALS, Row, best, policy_of
from _profiles import PROFILES
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch

DPI = 110
PANEL = (*ALIKE, "parameters")
BOUND: dict[str, Any] = {"facecolor": "none", "hatch": "///"}
COLUMNS = 3
GROUP = 0.84  # of the room of a profile, which its bars share


def shares(rows: Sequence[Row], path: Path) -> None:
    """What each setting keeps of its speed on `lan`: a panel per `PANEL`, a group of bars per
    profile, each the best over TCP's settings and sizes of microbatches; hatched where it is only a
    bound. ValueError: nothing to draw."""
    rows = [row for row in rows if row["share"] is not None]
    if not rows:
        raise ValueError("nothing to draw: shares are of `lan`, which has not been measured")
    panels = sorted({tuple(row[name] for name in PANEL) for row in rows}, key=_reading_order)
    profiles = [name for name in PROFILES if any(row["profile"] == name for row in rows)]
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    columns = min(COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(2 + 4.8 * columns, 0.5 + 2.7 * lines), layout="constrained")
    palette = colormaps["tab10" if len(settings) <= 10 else "tab20"]
    colours = {name: palette(number % palette.N) for number, name in enumerate(settings)}
    width = GROUP / len(settings)
    places = figure.subplots(lines, columns, squeeze=False).flat
    for axes in places[len(panels) :]:
        axes.remove()
    for panel, axes in zip(panels, places, strict=False):
        here = [row for row in rows if tuple(row[name] for name in PANEL) == panel]
        shown = best(here, "profile", "setting")
        for name in settings:
            left = (settings.index(name) + 0.5) * width - GROUP / 2
            for row in shown:
                if row["setting"] == name:
                    at = profiles.index(row["profile"]) + left
                    look = {"facecolor": colours[name]} if row["steps"] else BOUND
                    axes.bar(at, row["share"], width, edgecolor=colours[name], **look)
        for profile, goal in GOALS.items():
            if profile in profiles:
                at = profiles.index(profile)
                axes.hlines(goal, at - 0.5, at + 0.5, color="black", linestyle="--", linewidth=1)
                axes.text(at + 0.49, goal, f"goal {goal:.2f}", ha="right", va="bottom", size=8)
        model, parameters = here[0]["model"], here[0]["parameters"]
        step = f"{here[0]['microbatches']} × 4,096 tokens a step"
        averaged = f", {parameters:,} parameters averaged" if parameters else ""
        axes.set(
            ylabel="tokens/s, share of lan",
            xlim=(-0.5, len(profiles) - 0.5),
            ylim=(0, max(1.1, *(1.05 * row["share"] for row in shown))),
        )
        axes.set_title(f"{policy_of(here[0])}, {model} model\n{step}{averaged}", fontsize="medium")
        axes.set_xticks(range(len(profiles)), profiles)
    known = [Patch(color=colours[name], label=name) for name in settings]
    if not all(row["steps"] for row in best(rows, *PANEL, "profile", "setting")):
        known.append(Patch(edgecolor="0.5", label="at most: no step in time", **BOUND))
    figure.legend(handles=known, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=DPI)


def all_reduce(curve: Sequence[tuple[str, str, int, float]], goal: float, path: Path) -> None:
    """Time over gloo's by the number of connections of each member: a panel per group, a curve per
    way to control congestion. `curve` is of (group, congestion, connections, ratio)."""
    groups = list(dict.fromkeys(group for group, *_ in curve))
    figure = Figure(figsize=(1 + 3.2 * len(groups), 3.6), layout="constrained")
    for group, axes in zip(groups, figure.subplots(1, len(groups), squeeze=False)[0], strict=True):
        here = [(name, number, ratio) for of, name, number, ratio in curve if of == group]
        for congestion in dict.fromkeys(name for name, *_ in here):
            points = sorted((number, ratio) for name, number, ratio in here if name == congestion)
            axes.plot(*zip(*points, strict=True), marker="o", label=congestion)
        axes.axhline(goal, color="0.5", linestyle=":", label=f"goal {goal:.2f}")
        numbers = sorted({number for _, number, _ in here})
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set(title=group, xlabel="connections of each member", ylabel="time, of gloo's")
        axes.set_ylim(0, 1.15 * max(goal, *(ratio for _, _, ratio in here)))
        axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=DPI)


def _reading_order(panel: tuple[Any, ...]) -> tuple[Any, ...]:
    policy, ahead, microbatches, model, parameters = panel
    return policy != "exact", model, microbatches, ahead, parameters


def connections(rows: Sequence[Row], path: Path) -> None:
    """What several connections from one home carry together: a panel per line, a curve per way to
    control congestion, the configured rate. Nothing of a bridge, which has none. ValueError:
    nothing to draw."""
    rows = [row for row in rows if row["what"] == "up" and row["configured"]]
    if not rows:
        raise ValueError("nothing to draw: no emulated line has been measured")
    lines = list(dict.fromkeys((row["profile"], row["line"]) for row in rows))
    figure = Figure(figsize=(1 + 3.2 * len(lines), 3.6), layout="constrained")
    for line, axes in zip(lines, figure.subplots(1, len(lines), squeeze=False)[0], strict=True):
        here = [row for row in rows if (row["profile"], row["line"]) == line]
        for congestion in dict.fromkeys(row["congestion"] for row in here):
            curve = sorted(
                (row["connections"], row["value"])
                for row in here
                if row["congestion"] == congestion
            )
            axes.plot(*zip(*curve, strict=True), marker="o", label=congestion)
        axes.axhline(here[0]["configured"], color="0.5", linestyle=":", label="configured")
        axes.set(
            title=line[0] if line[0] == line[1] else f"{line[1]} in {line[0]}",
            xlabel="TCP connections",
            ylabel="Mbit/s up, all together",
            xlim=(0, None),
            ylim=(0, 1.15 * max(here[0]["configured"], *(row["value"] for row in here))),
        )
        axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=DPI)
