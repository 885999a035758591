"""What comes out of a simulation: `summary.json`, `throughput.csv`, and a plot."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError
from swarm.sim.outcome import BINS, Outcome

Outcomes = Mapping[str, Sequence[Outcome]]  # by policy, one per seed


def summary(outcomes: Outcomes) -> dict[str, Any]:
    """Per policy: throughput relative to the optimum, moves, stalled time, time to recover.

    `relative`: microbatches done / those of the optimum for the peers alive, over the whole run;
    mean, standard deviation over seeds, and each seed's. `bound`: the same for whoever knew the
    future. `second_stages`: how many were fetched. `recovery_s`: of the times below 95 % of the
    optimum, the mean and the longest.
    """
    return {name: _summary_of(runs) for name, runs in outcomes.items()}


def _summary_of(runs: Sequence[Outcome]) -> dict[str, Any]:
    relative = [run.relative for run in runs]
    spells = [spell for run in runs for spell in run.spells_s]

    def mean(values: Sequence[float]) -> float:
        return round(statistics.fmean(values), 4) if values else 0.0

    return {
        "relative": {
            "mean": round(statistics.fmean(relative), 6),
            "spread": round(statistics.stdev(relative), 6) if len(relative) > 1 else 0.0,
            "seeds": [round(each, 6) for each in relative],
        },
        "bound": round(statistics.fmean([run.bound for run in runs]), 6),
        "throughput": mean([run.work / run.seconds for run in runs]),
        "moves": mean([run.moves for run in runs]),
        "second_stages": mean([run.seconds_fetched for run in runs]),
        "stalled_s": mean([run.stalled_s for run in runs]),
        "recovery_s": {"mean": mean(spells), "longest": round(max(spells, default=0.0), 4)},
        "redone": mean([run.redone for run in runs]),
        "peers": mean([run.peer_seconds / run.seconds for run in runs]),
        "joins": mean([run.joins for run in runs]),
        "leaves": mean([run.leaves for run in runs]),
    }


def table(outcomes: Outcomes) -> str:
    """For a terminal."""
    names = ("of optimum", "spread", "moves", "stalled", "back in")
    lines = ["{:<24} {:>10} {:>7} {:>8} {:>9} {:>9}".format("policy", *names)]
    for name, row in summary(outcomes).items():
        lines.append(
            f"{name:<24} {row['relative']['mean']:>10.2%} {row['relative']['spread']:>7.2%} "
            f"{row['moves']:>8.1f} {row['stalled_s']:>7.0f} s {row['recovery_s']['mean']:>7.0f} s"
        )
    bound = statistics.fmean([run.bound for runs in outcomes.values() for run in runs])
    lines.append(f"{'(clairvoyant)':<24} {bound:>9.2%} at most")
    return "\n".join(lines)


def write(folder: Path, scenario: Mapping[str, Any], outcomes: Outcomes) -> None:
    """`summary.json` with the scenario in it, and `throughput.csv` of the first seed: in each of
    600 equal parts of the time, microbatches/s per policy, and of the optimum."""
    (folder / "summary.json").write_text(
        json.dumps({"scenario": scenario, "policies": summary(outcomes)}, indent=1) + "\n"
    )
    firsts = [runs[0] for runs in outcomes.values()]
    with (folder / "throughput.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["until_s", "optimum", *outcomes])
        for at in range(BINS):
            until_s = (at + 1) * firsts[0].seconds / BINS
            rates = [firsts[0].possible[at], *(run.done[at] for run in firsts)]
            rows.writerow([f"{until_s:g}", *(f"{rate:.6g}" for rate in rates)])


def plot(path: Path, title: str, outcomes: Outcomes) -> None:
    """Throughput of the first seed over time against the optimum, as PNG. Raises ConfigError
    without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "the plot needs matplotlib", "install the extra `sim`, as by pip install '.[sim]'"
        ) from None
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    firsts = [runs[0] for runs in outcomes.values()]
    hours = [(at + 0.5) * firsts[0].seconds / BINS / 3600 for at in range(BINS)]
    axes.step(hours, firsts[0].possible, where="mid", color="0.6", label="optimum for those alive")
    for run in firsts:
        label = f"{run.policy}: {run.relative:.1%}"
        axes.step(hours, run.done, where="mid", linewidth=1, label=label)
    axes.set(xlabel="hours", ylabel="microbatches/s", title=title, xlim=(0, hours[-1]))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=110)
