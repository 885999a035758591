"""Simulated chaos: whatever happens to a swarm, the bits of one process (DESIGN, I6).

More seeds than fit here: `python -m tests.protocol.scenarios --seeds 0-19999 --state FILE`.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from peer import snapshots
from tests.protocol import scenarios
from tests.protocol.faults import ACTIONS, LEADER, MOVER, Fault
from tests.protocol.scenario import (
    DELAYED_FROM,
    MOVING_FROM,
    MOVING_POINTS,
    NothingHappenedError,
    Scenario,
    draw,
    run_seed,
)
from tests.protocol.scenarios import run_or_shrink
from tests.protocol.shrink import MADE_PLAIN, candidates, fails, shrink

SEEDS, MOVING, CHUNK = 520, 80, 20
RICH = (85, 483, 504, 196, 99, 450, 495, 21, 344, 389)  # once enough to see everything


# What faults do, beside what every chunk of seeds has to show.
EFFECTS = {
    *("lost", "late", "reordered", "corrupted", "stale", "early takeover", "answer evicted"),
    *("admitted after a crash", "admitted after a freeze", "went on after a freeze"),
    *("frozen leader refused", "leaders apart"),
}


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_faults_leave_the_parameters_of_the_baseline(first: int) -> None:
    """A failure's notes are its scenario, and the smallest that fails like it."""
    fired: Counter[str] = Counter()
    effects: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        swarm = run_or_shrink(seed)
        assert swarm.fired
        fired.update(fault.action for fault in swarm.fired)
        effects.update(swarm.effects)
    assert len(fired) >= 8, fired
    assert fired["kill"] >= 3, fired
    assert effects["repeated"], effects
    assert effects["takeover"], effects


@pytest.mark.parametrize("first", range(0, MOVING, CHUNK))
def test_random_faults_while_peers_move_do_too(first: int) -> None:
    """They go where they are needed at commits, and some serve several stages."""
    effects: Counter[str] = Counter()
    for seed in range(MOVING_FROM + first, MOVING_FROM + first + CHUNK):
        swarm = run_or_shrink(seed)
        assert swarm.fired
        effects.update(swarm.effects)
    assert effects["moved"] >= CHUNK / 2, effects
    assert effects["second stage"] >= 3, effects
    assert effects["takeover"], effects


def test_faults_of_every_kind_strike_and_do_what_they_are_for() -> None:
    """A fault that never strikes, or does nothing, would let every seed pass."""
    fired: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for seed in (*RICH, *range(SEEDS)):
        swarm = run_seed(seed)[1]
        fired.update(fault.action for fault in swarm.fired)
        seen.update(swarm.effects)
        if fired.keys() >= ACTIONS.keys() and seen.keys() >= EFFECTS:
            return
    pytest.fail(f"never fired: {ACTIONS.keys() - fired.keys()}, seen: {EFFECTS - seen.keys()}")


ONCE_FAILED = (Path(__file__).parent / "once_failed.txt").read_text().splitlines()
TEXTS = [line for line in ONCE_FAILED if line.startswith("{")]


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_what_once_failed(number: int) -> None:
    Scenario.parse(TEXTS[number]).run()


def test_every_kind_of_fault_is_drawn_everywhere() -> None:
    """Of every size of swarm, with one trainer and with three."""
    drawn = [draw(seed) for seed in range(SEEDS)]
    for trainers in (1, 3):
        there = [scenario for scenario in drawn if scenario.trainers == trainers]
        assert {len(scenario.replicas) for scenario in there} == {1, 2, 3, 4, 5}
        assert {count for scenario in there for count in scenario.replicas} == {1, 2, 3, 4}
        actions = {fault.action for scenario in there for fault in scenario.faults}
        assert actions == {*ACTIONS} - ({"partition"} if trainers == 1 else set())
        assert any(scenario.poisoned for scenario in there)
        assert {scenario.chunk for scenario in there} == {8, 32, snapshots.CHUNK}


def test_movers_are_struck_in_every_way() -> None:
    drawn = [draw(seed) for seed in range(MOVING_FROM, MOVING_FROM + 10 * MOVING)]
    struck = {fault.action for each in drawn for fault in each.faults if fault.victim == MOVER}
    assert struck == {*ACTIONS} - {"start", "disk_full"}
    assert {fault.point for each in drawn for fault in each.faults} >= {*MOVING_POINTS}
    for field in ("pinned", "both", "second_share", "checkpoints"):
        assert {bool(getattr(each, field)) for each in drawn} == {False, True}
    assert {each.policy for each in drawn} == {"exact", "delayed"}
    assert {each.since for each in drawn} == {0, 1, 2}
    assert {each.trainers for each in drawn} == {1, 3}


def test_a_seed_replays_and_so_does_what_is_printed() -> None:
    def events(scenario: Scenario) -> str:
        return hashlib.sha256(repr(scenario.run().events).encode()).hexdigest()

    for seed in (11, 12, MOVING_FROM, MOVING_FROM + 1):
        scenario, swarm = run_seed(seed)
        again = Scenario.parse(str(scenario))
        assert again == scenario
        assert events(again) == hashlib.sha256(repr(swarm.events).encode()).hexdigest()


def test_every_scenario_is_read_as_it_was_printed() -> None:
    for seed in (*range(300), *range(MOVING_FROM, MOVING_FROM + 100)):
        assert Scenario.parse(str(draw(seed))) == draw(seed)
    for text in ("", "[]", "{", '{"seeds": 1}', '{"faults": [{"point": "x", "action": "y"}]}'):
        with pytest.raises(ValueError, match="no "):
            Scenario.parse(text)


def test_a_scenario_that_injects_nothing_fails() -> None:
    with pytest.raises(NothingHappenedError):
        Scenario().run()
    never = Fault("forward", "kill", replica="r0.1", step=99)
    with pytest.raises(NothingHappenedError):
        Scenario(faults=(never,)).run()


# ---- shrinking -----------------------------------------------------------------------------------


def size(scenario: Scenario) -> int:
    """Grows with everything that a reader has to keep in mind."""
    odd = [getattr(scenario, each) != getattr(Scenario(), each) for each in MADE_PLAIN]
    of_swarm = sum(scenario.replicas) + scenario.trainers + scenario.microbatches
    of_swarm += scenario.steps + len(scenario.slow)
    of_faults = sum(
        100 + fault.count + len(fault.side) + sum(each is not None for each in vars(fault).values())
        for fault in scenario.faults
    )
    return of_swarm + of_faults + sum(odd)


def test_what_is_shrunk_is_smaller_and_can_be_run() -> None:
    for seed in (
        *range(40),
        *range(DELAYED_FROM, DELAYED_FROM + 5),
        *range(MOVING_FROM, MOVING_FROM + 40),
    ):
        for candidate in candidates(draw(seed)):
            assert size(candidate) < size(draw(seed))
            assert Scenario.parse(str(candidate)) == candidate
            names = {*candidate.names, *candidate.trainer_ids, LEADER, MOVER, None}
            assert {*candidate.pinned, *candidate.both} <= names
            assert len(candidate.costs) in (0, len(candidate.replicas))
            for fault in candidate.faults:
                new = {each.victim for each in candidate.faults if each.action == "start"}
                assert {fault.replica, fault.victim, fault.other, *fault.side} <= names | new
                assert fault.stage is None or fault.stage < len(candidate.replicas)


def test_a_failure_is_shrunk_to_what_it_needs() -> None:
    """Made up: it fails when a replica of the last stage is killed, with three microbatches."""

    def run(scenario: Scenario) -> str | None:
        last = len(scenario.replicas) - 1
        kills = [f for f in scenario.faults if f.action == "kill"]
        struck = any((f.victim or "").startswith(f"r{last}.") for f in kills)
        return "as planned" if struck and scenario.microbatches > 2 else None

    shrunk = 0
    for seed in range(400):
        scenario = draw(seed)
        if run(scenario) is not None:
            smallest = shrink(scenario, "as planned", run=run)
            assert run(smallest) == "as planned"
            assert len(smallest.faults) == 1
            assert (len(smallest.replicas), smallest.trainers) == (1, 1)
            assert (smallest.microbatches, smallest.steps) == (3, 1)
            shrunk += 1
    assert shrunk > 10


def test_a_real_failure_is_found_shrunk_and_replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fence that lies about what was counted trains twice: found, shrunk, printed, replayed; and
    a run that is stopped goes on where it was."""
    from swarm.ledger import Ledger, Phase

    honest = Ledger.on_call

    def forgets(self: Ledger, *call: int) -> object:
        entry = self.entries.get(call[2])
        if entry is not None and entry.phase is Phase.COUNTED:
            del self.entries[call[2]]  # so that it is counted again
        return honest(self, *call)  # type: ignore[arg-type]

    state = tmp_path / "state.json"
    with monkeypatch.context() as broken:
        broken.setattr(Ledger, "on_call", forgets)
        arguments = ["--seeds", "8-13", "--shard", "2/2", "--state", str(state), "--shrink-s", "4"]
        assert scenarios.main(arguments) == 1
        printed = capsys.readouterr().out
        summary = json.loads(printed.splitlines()[-1])
        assert summary["seeds"] == 3
        assert summary["failures"] == len(summary["failed_seeds"]) > 0
        text = printed.split("--replay '")[1].split("'")[0]
        smallest = Scenario.parse(text)
        failed = json.loads(state.read_text())["failures"][0]
        assert failed["scenario"] == text
        assert len(text) < len(failed["drawn"])
        assert fails(smallest) == failed["failure"]
        with pytest.raises(AssertionError) as caught:
            run_or_shrink(failed["seed"], shrink_s=2.0)
        assert "--replay '{" in caught.value.__notes__[-1]
    assert fails(smallest) is None  # the same, with the defect mended
    assert scenarios.main(arguments) == 1  # nothing is left to do, and what failed is remembered
    assert json.loads(capsys.readouterr().out)["seeds"] == 3


def test_stopped_it_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.json"
    ran: list[int] = []

    def run_one(seed: int) -> object:
        if len(ran) == 2:
            signal.raise_signal(signal.SIGINT)
        ran.append(seed)
        return run_seed(11)

    monkeypatch.setattr(scenarios, "run_seed", run_one)
    arguments = ["--seeds", "20-25", "--state", str(state)]
    assert scenarios.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["seeds"] == 3
    assert scenarios.main(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert ran == [*range(20, 26)]
    assert (summary["seeds"], summary["failures"]) == (6, 0)
    assert summary["median_cpu_s"] > 0
    with pytest.raises(ValueError, match="20-25"):
        scenarios.main(["--seeds", "20-30", "--state", str(state)])
