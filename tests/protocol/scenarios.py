"""Random scenarios by the thousand: sharded, resumable, and shrunk when they fail.

    python -m tests.protocol.scenarios 7                          one seed, and what happened in it
    python -m tests.protocol.scenarios --replay 'SCENARIO'        the same for a scenario as printed
    python -m tests.protocol.scenarios --seeds 0-19999 --shard 1/2 --state FILE

The last one goes on where FILE says it was; Ctrl-C stops it after the seed under way. Its last
line is one JSON object: seeds done, faults that struck by kind, what they did, failures, and the
median of seconds a seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.protocol.scenario import Scenario, draw, faults_by_kind, run_seed
from tests.protocol.shrink import failure_of, shrink
from tests.protocol.simulated import Swarm

SAVE_EVERY_S = 10.0
HANG_S = 120.0  # of processor time for one seed


class HangError(Exception):
    """A seed does not come to an end: time does not move, and nothing raises."""


@dataclass
class Progress:
    """What a shard has done. Seeds are taken in their order, so one number says how far it is."""

    seeds: str
    shard: str
    next_seed: int
    done: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    trainers: Counter[str] = field(default_factory=Counter)
    milliseconds: Counter[str] = field(default_factory=Counter)  # how many seeds took so long
    commits: Counter[str] = field(default_factory=Counter)  # how many seeds ran on which
    failures: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path | None, seeds: str, shard: str) -> Progress:
        """Raises ValueError when the file is of other seeds."""
        number, _ = shard_of(shard)
        first, _ = range_of(seeds)
        if path is None or not path.exists():
            return cls(seeds, shard, first + number - 1)
        values = json.loads(path.read_text())
        if (values["seeds"], values["shard"]) != (seeds, shard):
            raise ValueError(f"{path} is of seeds {values['seeds']}, shard {values['shard']}")
        counters = {k: Counter(v) for k, v in values.items() if isinstance(v, dict)}
        return cls(**{**values, **counters})

    def save(self, path: Path | None) -> None:
        if path is not None:
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(vars(self), indent=1))
            temporary.replace(path)

    def note(self, scenario: Scenario, swarm: Swarm, seconds: float) -> None:
        self.faults.update(faults_by_kind(swarm))
        self.effects.update(swarm.effects)
        self.trainers[str(scenario.trainers)] += 1
        self.milliseconds[str(round(seconds * 1000))] += 1

    def summary(self) -> dict[str, Any]:
        total, below, median = self.milliseconds.total(), 0, None
        for milliseconds, count in sorted(self.milliseconds.items(), key=lambda each: int(each[0])):
            below += count
            if 2 * below >= total:
                median = int(milliseconds) / 1000
                break
        return {
            "seeds": self.done,
            "of": self.seeds,
            "shard": self.shard,
            "commits": dict(self.commits),
            "with_trainers": dict(self.trainers),
            "faults": dict(sorted(self.faults.items())),
            "num_faults": self.faults.total(),
            "effects": dict(sorted(self.effects.items())),
            "failures": len(self.failures),
            "failed_seeds": [each["seed"] for each in self.failures][:20],
            "median_cpu_s": median,
        }


def range_of(text: str) -> tuple[int, int]:
    """First and last seed of `FIRST-LAST`."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def shard_of(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not 1 <= int(number) <= int(count or 0):
        raise ValueError(f"{text} is no shard: write 1/2 for the first of two")
    return int(number), int(count)


def commit() -> str:
    """Of the code that runs; with `+` when something of it is not committed."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def run_many(seeds: str, shard: str, state: Path | None, shrink_s: float) -> int:
    """Every seed of a shard, from where it was left. The exit status: whether any has failed."""
    progress = Progress.load(state, seeds, shard)
    (_, last), (_, step) = range_of(seeds), shard_of(shard)
    code, saved = commit(), time.monotonic()
    stopping = threading.Event()

    def stop(number: int, _: object) -> None:
        """After the seed under way: raised inside of it, it could be taken for its failure."""
        stopping.set()
        signal.signal(number, signal.default_int_handler)

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGVTALRM: _hang}
    # Set whatever they are: a shell's background job ignores SIGINT.
    before = {number: signal.signal(number, each) for number, each in handlers.items()}
    try:
        while (seed := progress.next_seed) <= last and not stopping.is_set():
            signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
            began = time.process_time()
            try:
                scenario, swarm = run_seed(seed)
            except Exception as error:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                progress.failures.append(_failure(seed, error, shrink_s))
                progress.save(state)
            else:
                progress.note(scenario, swarm, time.process_time() - began)
            progress.done += 1
            progress.commits[code] += 1
            progress.next_seed = seed + step
            if time.monotonic() - saved > SAVE_EVERY_S:
                progress.save(state)
                saved = time.monotonic()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        progress.save(state)
    if stopping.is_set():
        print(f"stopped before seed {progress.next_seed}", file=sys.stderr)
    print(json.dumps(progress.summary()))
    return min(len(progress.failures), 1)


def _hang(*_: object) -> None:
    raise HangError(f"no end after {HANG_S:.0f} s of processor time")


def _failure(seed: int, error: Exception, shrink_s: float) -> dict[str, Any]:
    """Shrinks, prints and returns a failure."""
    scenario, failure = _scenario_of(error) or draw(seed), failure_of(error)
    print(f"seed {seed} failed: {failure}\n  {str(error)[:300]}", flush=True)
    small = smallest(seed, error, shrink_s)
    print(f"  python -m tests.protocol.scenarios --replay '{small}'", flush=True)
    return {"seed": seed, "failure": failure, "scenario": str(small), "drawn": str(scenario)}


def smallest(seed: int, error: Exception, limit_s: float) -> Scenario:
    """That fails like this one, as far as `limit_s` seconds suffice."""
    scenario = _scenario_of(error) or draw(seed)
    return shrink(scenario, failure_of(error), limit_s=limit_s) if limit_s else scenario


def run_or_shrink(seed: int, shrink_s: float = 60.0) -> Swarm:
    """Of a failure, the smallest scenario that fails in the same way is noted, too."""
    try:
        return run_seed(seed)[1]
    except Exception as error:
        small = smallest(seed, error, shrink_s)
        error.add_note(f"python -m tests.protocol.scenarios --replay '{small}'")
        raise


def _scenario_of(error: BaseException) -> Scenario | None:
    """What `run_seed` noted."""
    for note in getattr(error, "__notes__", []):
        _, _, text = note.partition(": ")
        if note.startswith("seed "):
            return Scenario.parse(text)
    return None


def replay(scenario: Scenario) -> int:
    """Run one, and print what happened."""
    logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s")
    print(scenario)
    swarm = scenario.swarm()
    try:
        scenario.run(swarm)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        for now, who, point, facts in swarm.events:
            print(f"{now:9.3f} {who:8} {point} {facts}")
        print(dict(faults_by_kind(swarm)), dict(swarm.effects), dict(swarm.chronicle.terms))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol.scenarios")
    parser.add_argument("seed", nargs="?", type=int, help="one seed to replay")
    parser.add_argument("--replay", metavar="SCENARIO", help="a scenario as it was printed")
    parser.add_argument("--seeds", metavar="FIRST-LAST", help="run many")
    parser.add_argument("--shard", default="1/1", help="which part of the seeds, as 1/2")
    parser.add_argument("--state", type=Path, help="the file that says how far it is")
    parser.add_argument("--shrink-s", type=float, default=120.0, help="seconds a failure may cost")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.seeds:
        logging.getLogger().addHandler(logging.NullHandler())
        return run_many(options.seeds, options.shard, options.state, options.shrink_s)
    if options.replay:
        return replay(Scenario.parse(options.replay))
    if options.seed is None:
        parser.error("which seed? or --seeds, or --replay")
    return replay(run_seed_or_draw(options.seed))


def run_seed_or_draw(seed: int) -> Scenario:
    """The scenario that `run_seed` comes to."""
    try:
        return run_seed(seed)[0]
    except Exception as error:
        return _scenario_of(error) or draw(seed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
