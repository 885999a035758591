"""What a chaos run is judged by: pure functions from what was seen to a table and a JSON object."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peer.witness import Audit, Stall

Samples = list[tuple[float, float]]


@dataclass(slots=True)
class Struck:
    """A fault, from the strike until its victim runs again, or another in its place is started."""

    kind: str
    who: str
    at_s: float
    until_s: float = math.inf
    of_leader: bool = False


@dataclass(slots=True)
class Chaos:
    """What happened. Times are seconds since training began."""

    faults: Counter[str] = field(default_factory=Counter)
    struck: list[Struck] = field(default_factory=list)
    joins: int = 0
    postponed: int = 0
    unclean_leaves: list[str] = field(default_factory=list)
    unexpected_ends: list[str] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)  # when, tokens
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # MiB
    began_at: float = 0.0
    ended_at: float = 0.0
    calm_until_s: float = 0.0
    calm_from_s: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)


def growth(samples: Samples, from_s: float) -> float | None:
    """By which share memory grew after `from_s`: medians of the last and the first fifth."""
    half = [mib for at, mib in samples if at >= from_s and mib > 0]
    fifth = len(half) // 5
    if fifth == 0:
        return None
    first = statistics.median(half[:fifth])
    return statistics.median(half[-fifth:]) / first - 1.0


def rate(steps: list[tuple[float, int]], from_s: float, until_s: float) -> tuple[float, float]:
    """Tokens and seconds between the first and the last commit within a window."""
    inside = [(at, tokens) for at, tokens in steps if from_s <= at <= until_s]
    if len(inside) < 2:
        return 0.0, 0.0
    return float(sum(tokens for _, tokens in inside[1:])), inside[-1][0] - inside[0][0]


def made_of(stall: Stall, result: Chaos) -> dict[str, Any]:
    """What a stall consisted of: seconds without a leader that runs; of the others those up to the
    commit in it (averaging: all microbatches were done), and the rest (waiting for work)."""
    began_s, ended_s = stall.began - result.began_at, stall.ended - result.began_at
    committed_s = began_s if stall.committed is None else stall.committed - result.began_at
    there = [each for each in result.struck if each.at_s < ended_s and each.until_s > began_s]
    away = [(each.at_s, each.until_s) for each in there if each.of_leader]
    without = _covered(away, began_s, ended_s)
    averaging = committed_s - began_s - _covered(away, began_s, committed_s)
    return {
        "from_s": round(began_s, 1),
        "without_leader_s": round(without, 2),
        "averaging_s": round(averaging, 2),
        "otherwise_s": round(ended_s - began_s - without - averaging, 2),
        "faults": [f"{each.kind} of {each.who}" for each in there],
        "noted": dict(stall.noted),
    }


def _covered(spans: list[tuple[float, float]], since: float, until: float) -> float:
    """How much of the time between two moments lies in one of the spans at least."""
    total, reached = 0.0, since
    for begins, ends in sorted(spans):
        begins, ends = max(begins, reached), min(ends, until)
        total += max(0.0, ends - begins)
        reached = max(reached, ends)
    return total


def summary(
    result: Chaos, books: Audit, baseline_sha256: str, *, seed: int, stall: Stall
) -> dict[str, Any]:
    """The last line of `swarm chaos`."""
    wall_s = result.ended_at - result.began_at
    before = rate(result.steps, 0.0, result.calm_until_s)
    after = rate(result.steps, result.calm_from_s, wall_s)
    under = rate(result.steps, result.calm_until_s, result.calm_from_s)
    calm_s = before[1] + after[1]
    calm = (before[0] + after[0]) / calm_s if calm_s else 0.0
    faulty = under[0] / under[1] if under[1] else 0.0
    half_s = wall_s / 2
    return {
        "seed": seed,
        "seconds": round(wall_s, 1),
        "faults": dict(sorted(result.faults.items())),
        "num_faults": sum(result.faults.values()),
        "joins": result.joins,
        "postponed": result.postponed,
        "steps": books.steps,
        "microbatches": books.microbatches,
        "lost": books.lost,
        "duplicated": books.duplicated,
        "unwitnessed": len(books.unwitnessed),
        "epochs": books.epochs,
        "steps_again": books.again,
        "sha256": result.report.get("sha256"),
        "baseline_sha256": baseline_sha256,
        "equal": result.report.get("sha256") == baseline_sha256,
        "longest_stall_s": round(stall.seconds, 2),
        "longest_stall": made_of(stall, result),
        "tokens_per_s": {"with_faults": round(faulty, 1), "without": round(calm, 1)},
        "goodput": round(faulty / calm, 3) if calm else None,
        "memory_mib": {
            who: [round(mib, 1) for _, mib in _thinned(samples)]
            for who, samples in result.memory.items()
        },
        "memory_growth_second_half": {
            who: None if (grown := growth(samples, half_s)) is None else round(grown, 4)
            for who, samples in result.memory.items()
        },
        "unclean_leaves": result.unclean_leaves,
        "unexpected_ends": result.unexpected_ends,
    }


def _thinned(samples: Samples) -> Samples:
    return samples[:: max(1, len(samples) // 12)]


def table(facts: Mapping[str, Any]) -> str:
    """For people."""
    stall = facts["longest_stall"]
    rows = [
        (
            "faults",
            f"{facts['num_faults']} ({', '.join(f'{n} {k}' for k, n in facts['faults'].items())})",
        ),
        ("peers that joined", facts["joins"]),
        ("steps", facts["steps"]),
        ("microbatches", f"{facts['microbatches']} counted by members of committed attempts"),
        ("  lost", facts["lost"]),
        ("  duplicated", facts["duplicated"]),
        ("  without a witness", facts["unwitnessed"]),
        (
            "back to a checkpoint",
            f"{facts['epochs']} times, {facts['steps_again']} steps trained again",
        ),
        ("leaves not in order", ", ".join(facts["unclean_leaves"]) or "none"),
        ("ended by themselves", ", ".join(facts["unexpected_ends"]) or "nobody"),
        ("sha256", f"{str(facts['sha256'])[:16]}…"),
        (
            "baseline",
            f"{facts['baseline_sha256'][:16]}… {'equal' if facts['equal'] else 'DIFFERS'}",
        ),
        ("longest stall", f"{facts['longest_stall_s']} s without an acknowledged microbatch"),
        (
            "  made of",
            f"{stall['without_leader_s']} s without a leader, {stall['averaging_s']} s of "
            f"averaging, {stall['otherwise_s']} s of waiting for work; from {stall['from_s']} s on",
        ),
        ("  faults in it", ", ".join(stall["faults"]) or "none"),
        ("  what happened", ", ".join(f"{n} {what}" for what, n in stall["noted"].items()) or "-"),
        (
            "tokens/s",
            "{with_faults} with faults, {without} without".format(**facts["tokens_per_s"]),
        ),
        ("goodput", facts["goodput"]),
        *(
            (f"memory of {who}", f"{values[0]} to {values[-1]} MiB, second half {_percent(grown)}")
            for (who, values), grown in zip(
                facts["memory_mib"].items(),
                facts["memory_growth_second_half"].values(),
                strict=True,
            )
        ),
    ]
    return "\n".join(f"{name:20} {value}" for name, value in rows)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:+.1f} %"
