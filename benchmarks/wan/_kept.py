"""Measurements, kept from run to run as lines of JSON, and what they say together. Pure but for the
file: a table or a picture of what has been measured needs no second run.

A figure that was measured again is that of the newest run; the rounds of one run count as their
median. What a setting keeps of its speed is its rate over the best one on `lan` of what is `ALIKE`
of the same run, with which it took turns.

A row whose `steps` are 0 is a bound: not one step had ended at the limit, so its rate is at most
that. It stands for what was measured only where nothing else does, and never for a best.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]  # `run`: when its run began, as sorts; the rest is the benchmark's
GOALS = {"home": 0.90, "poor": 0.80}  # of lan, averaging included
TORCH = "torch 1F1B + DDP"
STEP = 16  # microbatches of 4,096 tokens, unless said otherwise
# Rates of throughput are compared where these are equal; all of `MEASURED` tells them apart.
ALIKE = ("policy", "ahead", "microbatches", "model")
MEASURED = (
    "profile", "congestion", "connections", "setting", "keep_window", *ALIKE, "parameters",
    "microbatch_size",
)  # fmt: skip


def stamp() -> str:
    """What a run that begins now is called."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def keep(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def kept(path: Path, fields: Iterable[str] = ()) -> list[Row]:
    """All rows; none where there is no file. ValueError names a line that is no object of JSON, or
    lacks one of `fields`."""
    rows: list[Row] = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            row: Row = {"connections": 1, **json.loads(line)}  # older rows do not say
        except (ValueError, TypeError):
            raise ValueError(f"line {number} of {path} is no object of JSON; delete it") from None
        for name in fields:
            if name not in row:
                what = f"line {number} of {path} has no {name}, so it is of something else"
                raise ValueError(f"{what}; name another file with --kept, or delete it")
        rows.append(row)
    return rows


def medians(rows: Iterable[Row], fields: Sequence[str], value: str) -> list[Row]:
    """One row of each run for what is equal in `fields`: one next to the median of `value`, with
    that median and as `least` what the slowest round had, or a round that stalled would not show;
    of those measured, or of bounds where there are no others."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["run"], *(row[name] for name in fields)), []).append(row)
    found: list[Row] = []
    for group in groups.values():
        counted = [row for row in group if row["steps"]] or group
        values = [float(row[value]) for row in counted]
        median = statistics.median(values)
        typical = min(reversed(counted), key=lambda row: abs(row[value] - median))
        found.append({**typical, value: median, "least": min(values)})
    return found


def newest(rows: Iterable[Row], fields: Sequence[str]) -> list[Row]:
    """Of rows that are equal in `fields`, that of the newest run."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in fields)
        if key not in found or row["run"] >= found[key]["run"]:
            found[key] = row
    return list(found.values())


def throughput(rows: Iterable[Row]) -> list[Row]:
    """One row of each thing measured, with its `share` of lan; None where there is no `lan`."""
    each_run = medians(rows, MEASURED, "tokens_per_s")
    shared: list[Row] = []
    for row in newest(each_run, MEASURED):
        lan = _best_on_lan((each for each in each_run if each["run"] == row["run"]), row)
        shared.append({**row, "share": row["tokens_per_s"] / lan if lan else None})
    return shared


def _best_on_lan(rows: Iterable[Row], like: Row) -> float | None:
    alike = [
        float(row["tokens_per_s"])
        for row in rows
        if row["profile"] == "lan"
        and row["steps"]
        and row["setting"] != TORCH
        and all(row[name] == like[name] for name in ALIKE)
    ]
    return max(alike, default=None)


def best(rows: Iterable[Row], *fields: str) -> list[Row]:
    """Of rows that are equal in `fields`, the fastest measured; else the highest bound."""

    def rank(row: Row) -> tuple[bool, float]:
        return row["steps"] > 0, row["tokens_per_s"]

    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in fields)
        if key not in found or rank(row) > rank(found[key]):
            found[key] = row
    return list(found.values())


def over_torch(rows: Sequence[Row], torch: Row) -> float | None:
    """How many times faster than this row of torch the swarm is, at its best over equal lines."""
    fields = ("profile", "congestion", "keep_window", *ALIKE, "parameters", "microbatch_size")
    alike = [
        row["tokens_per_s"]
        for row in rows
        if row["setting"] != TORCH
        and row["steps"]
        and all(row[name] == torch[name] for name in fields)
    ]
    return max(alike) / torch["tokens_per_s"] if alike else None


def policy_of(row: Row) -> str:
    """With the share of a step's microbatches that *delayed* computes ahead: `delayed 0.25`."""
    return f"delayed {row['ahead']:g}" if row["policy"] == "delayed" else str(row["policy"])
