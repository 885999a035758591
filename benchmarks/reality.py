"""The simulator against reality: one scenario with real processes and per microbatch in simulation.

Real: six paced peers (`_paced_swarm`: each stands for a machine of its own; processes, streams,
moves and bytes are real), all `--stage auto`, stages that cost 1, 2 and 3. Once they have settled
one of the dearest stage becomes three times slower, recovers, one of the second stage is killed,
and another one joins. Simulated (`swarm.sim.microbatches`): the same speeds and costs, the same
events at the moments they happened, the planner with the same policy once a step. What a download
and an averaging take is measured in the real run; a hop takes nothing. Who moves, to whom work
goes and what is computed again is each side's own doing. A microbatch counts when it is first
acknowledged.

    python benchmarks/reality.py [--microbatches 48]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from _helpers import end_politely, print_results, result
from _paced_swarm import SPEED, PacedSwarm, now
from live import COSTS, SETTLE_S, best, names_in, placed, swarm_of

from swarm.events import tail_events
from swarm.net.identity import load_identity
from swarm.placement import Move, PeerLoad, StageNeed
from swarm.sim import microbatches
from swarm.sim.churn import Life
from swarm.sim.fluid import Step
from swarm.sim.outcome import Outcome
from swarm.sim.policies import Planner
from swarm.sim.roster import Roster

SLOWER = 3.0
CALM_STEPS = 3  # before the clock starts: what averaging and a step take
PHASES = {"as settled": 15.0, "one 3x slower": 20.0, "recovered": 10.0, "one killed": 15.0,
          "another joined": 25.0}  # fmt: skip
DOWNLOAD_BYTES = 1_000_000  # in simulation; the links are such that it takes as long as it did


@dataclass
class Seen:
    """What happened; times are those of the books."""

    began: float = 0.0
    stages: dict[str, int] = field(default_factory=dict)  # by peer id, when the clock started
    slowed: str = ""
    killed: str = ""
    joined: str = ""
    at: dict[str, float] = field(default_factory=dict)  # slower, recovered, killed
    book: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


async def happen(options: argparse.Namespace) -> Seen:
    """The real run."""
    seen = Seen()
    spans = list(PHASES.values())
    with swarm_of(options, [(None, None)] * 6) as swarm:
        try:
            await swarm.start()
            await swarm.until(lambda: placed(swarm) == best(6), "the best assignment", SETTLE_S)
            goal = swarm.step + CALM_STEPS + 2
            await swarm.until(lambda: swarm.step >= goal, "some steps", SETTLE_S)
            seen.began = [line["t"] for line in swarm.book() if line["point"] == "record"][-1]
            rows = swarm.status()["replicas"]
            seen.stages = {peer_of(row["replica"]): row["stage"] for row in rows}

            slow, doomed = names_in(swarm, 2)[0], names_in(swarm, 1)[0]
            seen.slowed, seen.killed = peer_id(swarm, slow), peer_id(swarm, doomed)
            pace = swarm.processes[slow].data_dir / SPEED
            await until(seen.began + spans[0])
            pace.write_text(str(SLOWER))
            seen.at["slower"] = now()
            await until(seen.began + sum(spans[:2]))
            pace.unlink()
            seen.at["recovered"] = now()
            await until(seen.began + sum(spans[:3]))
            swarm.kill_peer(doomed)
            seen.at["killed"] = now()
            await until(seen.began + sum(spans[:4]))
            joiner = await swarm.add_peer()
            await until(seen.began + sum(spans))
            seen.joined = peer_id(swarm, joiner.name)
        finally:
            await swarm.stop()
        seen.book = swarm.book()
        seen.events = list(tail_events(swarm.run_dir / "events.jsonl"))
    return seen


async def until(time_s: float) -> None:
    await asyncio.sleep(max(0.0, time_s - now()))


def peer_of(incarnation: str) -> str:
    return incarnation.partition("#")[0]


def peer_id(swarm: PacedSwarm, name: str) -> str:
    return load_identity(swarm.processes[name].data_dir / "identity.key").peer_id


def steps_of(seen: Seen) -> tuple[float, float]:
    """Seconds of a calm step, and of the part of it in which nothing is issued or answered."""
    commits = [line["t"] for line in seen.book if line["point"] == "record"]
    calm = [at for at in commits if at <= seen.began][-CALM_STEPS - 1 :]
    acknowledged = [line["t"] for line in seen.book if line["point"] == "acknowledged"]
    issued = [line["t"] for line in seen.book if line["point"] == "issue"]
    pauses = [
        min(t for t in issued if t > at) - max(t for t in acknowledged if t < at) for at in calm
    ]
    steps = [later - sooner for sooner, later in pairwise(calm)]
    return statistics.median(steps), statistics.median(pauses)


def first_of(events: Sequence[Mapping[str, Any]], kind: str, replica: str, since: float) -> float:
    """When an event first told of a peer."""
    return min(
        (
            float(each["t"])
            for each in events
            if each["event"] == kind and each["t"] >= since and peer_of(each["replica"]) == replica
        ),
        default=float("nan"),
    )


def moves_of(seen: Seen, since: float, until: float) -> list[tuple[str, float, int, float]]:
    """Peer, when it was told to move, from which stage, and how long that took."""
    found = []
    for each in seen.events:
        if each["event"] == "moved" and since <= each["t"] < until:
            peer = peer_of(each["replica"])
            told = [
                float(e["t"])
                for e in seen.events
                if e["event"] == "move" and e["t"] <= each["t"] and peer_of(e["replica"]) == peer
            ]
            found.append((peer, told[-1], int(each["source"]), each["t"] - told[-1]))
    return found


class Settled(Planner):
    """The planner, from where the real peers stood: who had moved before still rests."""

    def __init__(self, every_s: float, seen: Seen) -> None:
        super().__init__(every_s)
        self.seen = seen

    def stage_of(self, roster: Roster, joiner: PeerLoad) -> int | None:
        stage = self.seen.stages.get(joiner.peer)
        return super().stage_of(roster, joiner) if stage is None else stage

    def moves(self, roster: Roster, now_s: float) -> Sequence[Move]:
        for name, told_s, source, _ in moves_of(self.seen, 0.0, self.seen.began):
            peer = roster.peers.get(name)
            if peer is not None and peer.left_stage is None:
                roster.peers[name] = replace(
                    peer, moved_s=told_s - self.seen.began, left_stage=source
                )
        return super().moves(roster, now_s)


def simulated(seen: Seen, options: argparse.Namespace) -> Outcome:
    """The same, in simulation."""
    seconds = sum(PHASES.values())
    step_s, averaging_s = steps_of(seen)
    moved = [span for _, _, _, span in moves_of(seen, seen.began, seen.began + seconds)]
    asked = first_of(seen.events, "joined", seen.joined, seen.began)
    taken = first_of(seen.events, "admitted", seen.joined, asked)
    joined_in = taken - asked
    usual = statistics.fmean(moved) if moved else joined_in
    lives = []
    for name in seen.stages:
        turns = (
            (seen.at["slower"] - seen.began, 1 / SLOWER),
            (seen.at["recovered"] - seen.began, 1.0),
        )
        lives.append(
            Life(
                name,
                0.0,
                seen.at["killed"] - seen.began if name == seen.killed else float("inf"),
                link_bytes_per_s=DOWNLOAD_BYTES / usual,
                turns=turns if name == seen.slowed else (),
            )
        )
    lives.append(Life(seen.joined, asked - seen.began, link_bytes_per_s=DOWNLOAD_BYTES / joined_in))
    needs = tuple(
        StageNeed(3 * options.forward_s * cost, download_bytes=DOWNLOAD_BYTES) for cost in COSTS
    )
    print(
        f"measured: a step {step_s:.2f} s, of it averaging {averaging_s:.3f} s; "
        f"a move {usual:.2f} s, a join {joined_in:.2f} s",
        flush=True,
    )
    return microbatches.simulate(
        needs,
        lives,
        Settled(step_s, seen),
        seconds=seconds,
        step=Step(options.microbatches, averaging_s),
    )


def done_of(seen: Seen) -> list[float]:
    """When each microbatch was first acknowledged, from the start of the clock."""
    first: dict[tuple[int, int], float] = {}
    for line in seen.book:
        if line["point"] == "acknowledged":
            first.setdefault((line["step"], line["index"]), line["t"] - seen.began)
    return sorted(first.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=48, help="per step")
    parser.add_argument("--forward-s", type=float, default=0.02)
    options = parser.parse_args()
    end_politely()
    seen = asyncio.run(happen(options))
    outcome = simulated(seen, options)
    real, width = done_of(seen), outcome.seconds / len(outcome.done)
    print(f"{'phase':16}{'real':>8}{'simulated':>11}{'ratio':>8}   microbatches/s")
    results, start = [], 0.0
    for phase, span in {**PHASES, "whole": outcome.seconds}.items():
        start = 0.0 if phase == "whole" else start
        end = start + span
        was = sum(start <= at < end for at in real) / span
        bins = outcome.done[round(start / width) : round(end / width)]
        would = sum(bins) * width / span
        print(f"{phase:16}{was:8.2f}{would:11.2f}{was / would:8.3f}")
        if phase == "whole":
            off = abs(was / would - 1)
            results.append(result("real / simulated throughput", was / would, ""))
            results.append(result("the two apart", off, "of the simulated", 0.1, at_most=True))
        else:
            results.append(result(f"real / simulated, {phase}", was / would, ""))
        start = end
    moved = len(moves_of(seen, seen.began, seen.began + outcome.seconds))
    print(f"moves: {moved} real, {outcome.moves} simulated")
    print_results("reality", results)


if __name__ == "__main__":
    main()
