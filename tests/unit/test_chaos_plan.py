"""The schedule of faults and the choice of victims, and what a chaos run is judged by."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peer import chaos, claims, commands
from peer.chaos_plan import (
    ENDS_LEADER,
    ENDS_PEER,
    OF_LEADER,
    SILENCE_S,
    Candidate,
    Fault,
    Kind,
    schedule,
    victim,
)
from peer.chaos_report import Chaos, Struck, growth, made_of, rate, summary, table
from peer.cli.swarm_program import app
from peer.witness import FILE, Audit, Stall, audit, longest_stall
from swarm.config import load_config
from swarm.errors import ConfigError
from swarm.net import channel
from swarm.net.identity import load_identity
from tests.process.forks import toml


def test_one_seed_is_one_attack() -> None:
    def draw(seed: int) -> list[Fault]:
        return schedule(seed, 600.0, 5.0)

    assert draw(1) == draw(1) != draw(2)
    faults = draw(1)
    assert 106 <= len(faults) <= 108
    assert all(30.0 <= fault.at_s < 570.0 for fault in faults), "5 % at each end are calm"
    assert {fault.kind for fault in faults} == set(Kind)
    late = {fault.kind for fault in faults if fault.at_s >= 300.0}
    assert not late & ENDS_LEADER


def test_freezes_are_clearly_on_one_side_of_the_limit() -> None:
    assert SILENCE_S == channel.SILENCE_S
    for fault in schedule(3, 3000.0, 5.0):
        if fault.kind in (Kind.FREEZE, Kind.LEADER_FREEZE):
            assert fault.hold_s < SILENCE_S - 1
        elif fault.kind in (Kind.FREEZE_LONG, Kind.LEADER_FREEZE_LONG):
            assert fault.hold_s > SILENCE_S


@pytest.mark.parametrize("kind", sorted(set(Kind) - OF_LEADER))
def test_a_stage_keeps_whoever_alone_has_its_state(kind: Kind) -> None:
    alone = [Candidate("0a", 0, True), Candidate("0b", 0, False), Candidate("1a", 1, True)]
    two = [*alone, Candidate("1b", 1, True, protected=True)]
    for tenth in range(10):
        fault = Fault(0.0, kind, tenth / 10, 1.0)
        assert victim(fault, alone)[0] is None
        struck = victim(fault, two)[0]
        assert struck == "1a" if kind in ENDS_PEER else struck in ("1a", "1b")


def books(run_dir: Path, first: list[int], second: list[int]) -> Path:
    def write(name: str, *lines: dict) -> None:
        path = run_dir / "peers" / name / FILE
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"point": "prep')

    ballot = [[0, 1, "t#1"], 0, 1]
    aborted = [[0, 1, "t#1"], 0, 0]
    for name, counted in (("0a", first), ("0b", second)):
        own = {"point": "prepare", "replica": name, "stage": 0, "counted": counted}
        write(name, {**own, "ballot": aborted, "counted": [0, 1, 2]}, {**own, "ballot": ballot})
    record = {"point": "record", "ballot": ballot, "members": {"0": ["0a", "0b"]}}
    write("leader", *({"t": t, "point": "acknowledged"} for t in (1.0, 2.0, 6.0)), record)
    return run_dir


@pytest.mark.parametrize(
    ("first", "second", "lost", "duplicated"),
    [([0, 2], [1], 0, 0), ([0], [1], 1, 0), ([0, 1, 2], [1], 0, 1), ([], [], 3, 0)],
)
def test_the_books_show_what_is_wrong(
    tmp_path: Path, first: list[int], second: list[int], lost: int, duplicated: int
) -> None:
    run_dir = books(tmp_path, first, second)
    found = audit(run_dir, num_steps=1, num_stages=1, num_microbatches=3)
    assert (found.lost, found.duplicated, found.unwitnessed) == (lost, duplicated, [])
    assert found.clean == (lost == duplicated == 0)


def test_silence_is_not_innocence(tmp_path: Path) -> None:
    run_dir = books(tmp_path, [0, 2], [1])
    (run_dir / "peers" / "0b" / FILE).unlink()
    assert audit(run_dir, num_steps=1, num_stages=1, num_microbatches=3).unwitnessed == [
        (0, 0, "0b")
    ]
    assert not audit(run_dir, num_steps=2, num_stages=1, num_microbatches=3).clean
    assert longest_stall(run_dir, 0.5, 7.0).seconds == 4.0


def test_of_a_run_that_went_back_the_newest_epoch_counts(tmp_path: Path) -> None:
    """Step 0 was committed twice; only what became of it must be right. The record that opens the
    epoch has no members, and comes from the trainer's disk if the leader was killed then."""
    run_dir = books(tmp_path, [0], [1])  # microbatch 2 is missing in epoch 0
    ballot = [[1, 2, "t#2"], 0, 1]
    with (run_dir / "peers" / "0a" / FILE).open("a") as file:
        line = {"point": "prepare", "replica": "0c", "ballot": ballot, "counted": [0, 1, 2]}
        file.write("\n" + json.dumps(line) + "\n")
    with (run_dir / "peers" / "leader" / FILE).open("a") as file:
        opened = {"point": "epoch", "epoch": 1, "step": 0}
        again = {"point": "record", "ballot": ballot, "members": {"0": ["0c"]}}
        file.write("\n" + json.dumps(opened) + "\n" + json.dumps(again) + "\n")
    opening = {"ballot": [[1, 2, "t#2"], -1, 1], "members": {}, "tokens": 0}
    old = {"ballot": [[0, 1, "t#1"], 0, 1], "members": {"0": ["0a", "0b"]}, "tokens": 0}
    for extra in ([], [opening], [opening, old]):
        found = audit(run_dir, num_steps=1, num_stages=1, num_microbatches=3, extra_records=extra)
        assert found.clean, found
        assert (found.epochs, found.again) == (1, 1)


def test_a_stall_is_taken_apart(tmp_path: Path) -> None:
    """20 s: averaged for 2 s, then 7 s without a leader (two faults, which overlap), committed 3 s
    after it is back, 5 s until it is gone again for 2 s, and 1 s more."""
    told = [
        (100.0, "acknowledged"),
        (102.0, "round_failed"),
        (112.0, "record"),
        (113.0, "admitted"),
        (113.5, "admitted"),
        (120.0, "acknowledged"),
        (121.0, "acknowledged"),
    ]
    path = tmp_path / "peers" / "leader" / FILE
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps({"t": t, "point": what}) + "\n" for t, what in told))
    result = Chaos(began_at=90.0)
    result.struck = [
        Struck("leader_freeze", "leader", 12.0, 15.0, of_leader=True),
        Struck("leader_kill", "leader", 14.0, 19.0, of_leader=True),
        Struck("leader_kill", "leader", 27.0, 29.0, of_leader=True),
        Struck("kill", "0a", 8.0, 11.0),
        Struck("freeze", "1a", 1.0, 5.0),
        Struck("leave", "0b", 31.0),
    ]
    stall = longest_stall(tmp_path, 91.0, 121.0)
    assert (stall.seconds, stall.committed) == (20.0, 112.0)
    assert made_of(stall, result) == {
        "from_s": 10.0,
        "without_leader_s": 9.0,
        "averaging_s": 5.0,
        "otherwise_s": 6.0,
        "faults": [
            "leader_freeze of leader",
            "leader_kill of leader",
            "leader_kill of leader",
            "kill of 0a",
        ],
        "noted": {"admitted": 2, "record": 1, "round_failed": 1},
    }


def test_growth_and_rates() -> None:
    steady = [(float(at), 100.0) for at in range(100)]
    growing = [(float(at), 100.0 + at) for at in range(100)]
    assert growth(steady, 50.0) == 0.0
    assert growth(growing, 50.0) == pytest.approx(40 / 154.5, rel=0.05)
    assert growth(steady[:3], 0.0) is None
    assert rate([(1.0, 10), (2.0, 10), (4.0, 10)], 0.0, 5.0) == (20.0, 3.0)


def a_result(sha256: str = "ab" * 32) -> Chaos:
    """60 s: 20 tokens/s in the calm of the first and the last 10 s, 10 tokens/s between."""
    return Chaos(
        faults=Counter(leader_kill=1, kill=2),
        struck=[Struck("leader_kill", "leader", 31.0, 33.0, of_leader=True)],
        joins=3,
        steps=[(2.0, 40), (4.0, 40), (20.0, 40), (24.0, 40), (52.0, 40), (54.0, 40)],
        memory={"leader": [(float(at), 100.0) for at in range(60)]},
        began_at=1000.0,
        ended_at=1060.0,
        calm_until_s=10.0,
        calm_from_s=50.0,
        report={"sha256": sha256, "steps": 6},
    )


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "differs"])
def test_the_last_line_and_the_table_say_what_the_run_came_to(equal: bool) -> None:
    books = Audit(steps=6, microbatches=18, lost=4, duplicated=5, unwitnessed=[(0, 0, "0b")])
    baseline = ("ab" if equal else "cd") * 32
    facts = summary(a_result(), books, baseline, seed=7, stall=Stall(1030.0, 1035.5, 1034.0))
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    expected = {
        "seed": 7,
        "seconds": 60.0,
        "faults": {"kill": 2, "leader_kill": 1},
        "num_faults": 3,
        "joins": 3,
        "steps": 6,
        "microbatches": 18,
        "lost": 4,
        "duplicated": 5,
        "unwitnessed": 1,
        "sha256": "ab" * 32,
        "baseline_sha256": baseline,
        "equal": equal,
        "longest_stall_s": 5.5,
        "tokens_per_s": {"with_faults": 10.0, "without": 20.0},
        "goodput": 0.5,
        "memory_growth_second_half": {"leader": 0.0},
    }
    assert {name: facts[name] for name in expected} == expected
    assert facts["longest_stall"]["faults"] == ["leader_kill of leader"]
    rows = [" ".join(line.split()) for line in table(facts).splitlines()]
    for row in (
        "faults 3 (2 kill, 1 leader_kill)",
        "steps 6",
        "lost 4",
        "duplicated 5",
        "sha256 abababababababab…",
        "baseline abababababababab… equal" if equal else "baseline cdcdcdcdcdcdcdcd… DIFFERS",
        "longest stall 5.5 s without an acknowledged microbatch",
        "tokens/s 10.0 with faults, 20.0 without",
        "goodput 0.5",
    ):
        assert row in rows


def test_without_calm_steps_there_is_no_goodput() -> None:
    """Of a run too short for two steps without faults; the line still is one of JSON."""
    result = a_result()
    result.steps = result.steps[2:4]
    facts = summary(result, Audit(steps=2), "", seed=7, stall=Stall(1000.0, 1060.0))
    assert facts["goodput"] is None
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert "goodput" in table(facts)


@pytest.mark.parametrize(
    ("sha256", "second", "unclean", "code"),
    [
        ("ab" * 32, [1], [], 0),
        ("cd" * 32, [1], [], 1),
        ("ab" * 32, [], [], 1),
        ("ab" * 32, [1, 2], [], 1),
        ("ab" * 32, [1], ["0b: exit code 1"], 1),
    ],
    ids=["exact", "another sha256", "lost", "duplicated", "an unclean leave"],
)
def test_the_command_fails_unless_the_run_was_as_it_must_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sha256: str,
    second: list[int],
    unclean: list[str],
    code: int,
) -> None:
    """All but the swarm and the baseline is the command's own."""

    class Ran(chaos.ChaosRun):
        def __init__(self, config: Any, run_dir: Path, **options: Any) -> None:
            assert (options["seconds"], options["faults"]) == (30.0, schedule(9, 30.0, 2.0))
            self.run_dir, self.extra_records = run_dir, []

        async def run(self) -> Chaos:
            books(self.run_dir, [0, 2], second)
            self.result = a_result(sha256)
            self.result.report["steps"] = 1
            self.result.unclean_leaves += unclean
            return self.result

    identity = load_identity(tmp_path / "identity.key")
    monkeypatch.setattr(chaos, "ChaosRun", Ran)
    monkeypatch.setattr(chaos, "baseline_sha256", lambda config, num_steps: "ab" * 32)
    monkeypatch.setattr(commands, "importing", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(claims, "local_trainer", lambda config: identity)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = toml(tmp_path / "run.toml", steps=1, stages=1)
    run.write_text(run.read_text().replace("microbatches = 6", "microbatches = 3"))
    options = ("--minutes", "0.5", "--every", "2", "--seed", "9", "--dir", str(tmp_path / "run"))
    done = CliRunner().invoke(app, ["chaos", str(run), *options])
    assert done.exit_code == code, (done.stdout, done.stderr)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["seed"] == 9
    assert facts["equal"] == (sha256 == "ab" * 32)
    assert (facts["lost"], facts["duplicated"]) == (int(second == []), int(second == [1, 2]))
    error = (
        "error: the run under faults was not exact, or not all ended as they should - "
        "the lines above say how\n"
    )
    assert done.stderr == (error if code else "")


@pytest.mark.parametrize(
    ("minutes", "what"),
    [
        ("0.1", r"0\.1 minutes have no room for a fault - give it more --minutes"),
        ("0.5", r"nothing was struck, .* \(steps: 1\) - .* steps beyond its first 10 s"),
    ],
)
def test_a_run_that_nothing_struck_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: str, what: str
) -> None:
    async def unharmed(self: chaos.ChaosRun) -> Chaos:
        books(self.run_dir, [0, 2], [1])
        self.result.report = {"sha256": "ab" * 32, "steps": 1}
        return self.result

    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setattr(chaos.ChaosRun, "run", unharmed)
    monkeypatch.setattr(chaos, "baseline_sha256", lambda config, num_steps: "ab" * 32)
    monkeypatch.setattr(commands, "importing", lambda *args: contextlib.nullcontext())
    run = toml(tmp_path / "run.toml", steps=1, stages=1)
    run.write_text(run.read_text().replace("microbatches = 6", "microbatches = 3"))
    options = ("--minutes", minutes, "--dir", str(tmp_path / "run"))
    done = CliRunner().invoke(app, ["chaos", str(run), *options])
    assert done.exit_code != 0
    assert re.search(what, done.stderr), (done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("exact", "rounding", "what"),
    [
        ("activations =", 'backward = "int8"\nactivations =', "int8"),
        ("activations =", 'boundaries = [{boundary = 0, forward = "int4"}]\nactivations =', "int4"),
        ('gradients = "float32"', 'gradients = "float16"', "float16"),
        ('"float64"', '"float32"', r'update\.accumulate = "float32"'),
    ],
)
def test_a_run_that_rounds_has_no_bits_to_compare(
    tmp_path: Path, exact: str, rounding: str, what: str
) -> None:
    run = toml(tmp_path / "run.toml", steps=1, stages=2)
    text = run.read_text().replace('activations = "float32"', 'activations = "float32+zstd"')
    run.write_text(text)
    chaos.refuse_what_rounds(load_config(run))
    assert text.count(exact) == 1
    run.write_text(text.replace(exact, rounding))
    with pytest.raises(ConfigError, match=rf"this run rounds: {what} - set the codecs in \[wire\]"):
        chaos.refuse_what_rounds(load_config(run))
