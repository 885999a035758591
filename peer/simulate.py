"""`swarm simulate`: a scenario under each of its policies, seed by seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from swarm.errors import ConfigError, StorageError
from swarm.sim import report
from swarm.sim.outcome import Outcome
from swarm.sim.scenario import Scenario, read_scenario


def simulate(
    path: Path, out: Path, *, seeds: int | None = None, say: Callable[[str], None]
) -> None:
    """Writes summary.json, throughput.csv and throughput.png into `out`. Raises SwarmError."""
    scenario = read_scenario(path)
    outcomes = run(scenario, path.parent, seeds or scenario.seeds)
    try:
        out.mkdir(parents=True, exist_ok=True)
        report.write(out, scenario.model_dump(mode="json"), outcomes)
        say(report.table(outcomes))
        report.plot(out / "throughput.png", scenario.name, outcomes)
    except OSError as error:
        what = f"cannot write to {out}: {(error.strerror or str(error)).lower()}"
        raise StorageError(what, "name another directory with --out") from None
    say(f"wrote {out}/summary.json, throughput.csv, throughput.png")


def run(scenario: Scenario, folder: Path, seeds: int) -> dict[str, list[Outcome]]:
    """Every policy on the same lives, for seeds 0, 1, …"""
    engine = _engine(scenario.resolution)
    lifetime_s = scenario.lifetime_h * 3600 if scenario.lifetime_h else float("inf")
    outcomes: dict[str, list[Outcome]] = {}
    overlap: dict[str, Any] = {}
    if scenario.divisible:
        overlap = {"second_cost": scenario.stages.second_cost, "divisible": True}
    for seed in range(seeds):
        lives = scenario.lives(seed, folder)
        for section in scenario.policies:
            outcome = engine.simulate(
                scenario.stages.needs,
                lives,
                section.build(seed),
                seconds=scenario.seconds,
                seed=seed,
                step=scenario.step_of,
                lifetime_s=lifetime_s,
                **overlap,
            )
            outcomes.setdefault(outcome.policy, []).append(outcome)
    return outcomes


def _engine(resolution: str) -> ModuleType:
    if resolution == "fluid":
        from swarm.sim import fluid

        return fluid
    try:
        from swarm.sim import microbatches
    except ImportError:
        raise ConfigError(
            "simulating microbatches needs simpy",
            "install the extra `sim`, as by pip install '.[sim]'",
        ) from None
    return microbatches
