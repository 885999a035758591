"""What the lab keeps of its measurements, and what it makes of them (`benchmarks/wan`)."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

WAN = Path(__file__).parents[2] / "benchmarks" / "wan"
sys.path.insert(0, str(WAN))  # its files are scripts, and import each other as such

import _plots  # noqa: E402
import everything  # noqa: E402
import throughput as lab_throughput  # noqa: E402
import wire_bytes  # noqa: E402
from _kept import TORCH, best, keep, kept, medians, newest, over_torch, throughput  # noqa: E402
from _namespaces import LabError  # noqa: E402
from _wide import SIZES  # noqa: E402
from throughput import SETTINGS, config_of, entries, line_of  # noqa: E402

PNG = b"\x89PNG"


def row(profile: str, rate: float, **fields: Any) -> dict[str, Any]:
    return {
        "run": "2026-01-01",
        "profile": profile,
        "congestion": "cubic",
        "connections": 1,
        "setting": "int4",
        "policy": "exact",
        "ahead": 0.0,
        "microbatches": 16,
        "keep_window": False,
        "model": "paced",
        "parameters": 0,
        "microbatch_size": 4,
        "tokens_per_s": rate,
        "steps": 5,
        **fields,
    }


def shares(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    return {each["profile"]: each["share"] for each in throughput(rows)}


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    assert kept(path) == []
    rows = [row("lan", 10.0), row("home", 9.0)]
    for each in rows:
        keep(path, each)
    assert kept(path) == rows
    with path.open("a") as file:
        file.write('{"run": "20')
    with pytest.raises(ValueError, match=r"line 3 of .*rows\.jsonl is no object of JSON; delete"):
        kept(path)


@pytest.mark.parametrize("line", [b"3", b"\xff", b"[]", b"null"])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"run": "2026"}\n' + line)
    with pytest.raises(ValueError, match=r"line 2 of .* is no object of JSON; delete it"):
        kept(path)


def test_rows_of_another_measurement_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "line.jsonl"
    keep(path, {"run": "2026", "profile": "lan"})
    assert kept(path, ["run", "profile", "connections"])
    with pytest.raises(ValueError, match=r"line 1 of .* has no setting, so it is of something"):
        kept(path, ["run", "setting"])


def test_rounds_count_as_their_median_and_the_newest_run_counts() -> None:
    rows = [row("home", rate) for rate in (5.0, 9.0, 6.0)]
    rows += [row("home", rate, run="2026-01-02") for rate in (7.0, 8.0)]
    found = newest(medians(rows, ["profile"], "tokens_per_s"), ["profile"])
    assert [(each["run"], each["tokens_per_s"]) for each in found] == [("2026-01-02", 7.5)]
    older = newest(medians(rows[:3], ["profile"], "tokens_per_s"), ["profile"])
    assert [each["tokens_per_s"] for each in older] == [6.0]


def test_a_round_that_stalled_shows() -> None:
    lab = {"lines": [], "hub": {}}
    rows = [row("lan", rate, lab=lab) for rate in (70.0, 80.0)]
    rows.append(row("lan", 2.0, steps=1, lab=lab))
    (found,) = throughput(rows)
    assert (found["tokens_per_s"], found["steps"], found["least"]) == (70.0, 5, 2.0)
    assert "slowest round 2" in line_of(found)
    (slowest,) = [each for each in entries([found]) if "slowest" in each["metric"]]
    assert slowest["value"] == 2.0


def test_a_share_is_of_the_best_on_lan_under_the_same_policy_step_and_model() -> None:
    rows = [
        row("lan", 8.0, setting="int8"),
        row("lan", 10.0),
        row("lan", 90.0, policy="delayed", ahead=1.0),
        row("lan", 85.0, policy="delayed", ahead=0.25),
        row("lan", 60.0, microbatches=64),
        row("lan", 80.0, model="real"),
        row("lan", 70.0, setting=TORCH),
        row("home", 9.0, congestion="bbr", parameters=5),
    ]
    assert shares(rows)["home"] == pytest.approx(0.9)
    delayed = row("home", 68.0, policy="delayed", ahead=0.25)
    assert shares([*rows, delayed])["home"] == pytest.approx(0.8)
    assert shares([*rows, {**delayed, "microbatches": 64}])["home"] is None
    assert shares([row("home", 9.0), row("lan", 80.0, model="real")])["home"] is None


def test_a_share_is_of_its_own_run() -> None:
    rows = [
        row("lan", 10.0),
        row("home", 8.0),
        row("lan", 16.0, run="2026-01-02"),
        row("lan", 12.0, run="2026-01-03", setting="wide"),
        row("mixed", 6.0, run="2026-01-03"),
        row("poor", 4.0, run="2026-01-04"),
    ]
    assert shares(rows) == {"lan": 1.0, "home": 0.8, "mixed": 0.5, "poor": None}


def test_the_best_is_the_fastest_and_torch_is_beside_equal_lines() -> None:
    torch = row("home", 2.0, setting=TORCH)
    rows = [
        torch,
        row("home", 8.0),
        row("home", 9.0, setting="int8"),
        row("home", 40.0, congestion="bbr"),
        row("fibre", 50.0),
    ]
    assert over_torch(rows, torch) == 4.5
    assert over_torch([torch], torch) is None
    ours = [each for each in rows if each is not torch]
    assert [each["tokens_per_s"] for each in best(ours, "profile")] == [40.0, 50.0]


def test_a_bound_stands_for_what_was_measured_only_where_nothing_was() -> None:
    bound = {"steps": 0}
    rows = [
        row("lan", 10.0),
        row("lan", 90.0, setting="int8", **bound),
        row("home", 8.0, steps=2),
        row("home", 4.0, steps=3),
        row("home", 1.0, **bound),
        row("poor", 2.0, **bound),
        row("poor", 3.0, congestion="bbr", **bound),
    ]
    found = {(each["profile"], each["congestion"]): each for each in throughput(rows)[2:]}
    home, poor = found["home", "cubic"], found["poor", "bbr"]
    assert (home["tokens_per_s"], home["steps"], home["share"]) == (6.0, 3, 0.6)
    assert (poor["tokens_per_s"], poor["steps"], poor["share"]) == (3.0, 0, 0.3)
    ours = list(found.values())
    above = {**home, "tokens_per_s": 30.0, **bound}
    assert best([above, *ours, above], "profile") == [home, poor]
    assert over_torch([above, home], row("home", 2.0, setting=TORCH)) == 3.0
    assert over_torch([home, poor], row("poor", 1.0, congestion="bbr", setting=TORCH)) is None
    lab = {"lab": {"lines": [], "hub": {}}}
    assert "<3" in line_of({**poor, **lab})
    assert "<" not in line_of({**home, **lab})
    said = [
        (each["metric"].endswith("at most"), each["goal"]) for each in entries([{**poor, **lab}])
    ]
    assert said == [(True, None), (False, None)]
    goals = [each["goal"] for each in entries([{**home, **lab}])]
    assert goals == [None, None, ">= 0.9"]  # the median, the slowest round, the share


def test_goals_are_of_the_best_on_a_profile_and_of_torch_at_home() -> None:
    lab = {"lab": {"lines": [], "hub": {}}}
    rows = [
        row(profile, rate, setting=setting, **lab, **more)
        for profile, rate, setting, more in (
            ("lan", 10.0, "int4", {}),
            ("home", 9.0, "int4", {}),
            ("home", 8.0, "int8", {}),
            ("home", 2.0, TORCH, {}),
            ("lan", 5.0, TORCH, {}),
            ("lan", 30.0, "int4", {"model": "real"}),
            ("home", 29.0, "int4", {"model": "real"}),
        )
    ]
    found = entries(throughput(rows))
    assert {(each["metric"], each["goal"]) for each in found if each["goal"]} == {
        ("home, cubic, int4, exact, paced model, 0 parameters, 16 x 4096 tokens a step, "
         "4 a microbatch: share", ">= 0.9"),
        ("home, cubic: best / torch", ">= 5.0"),
    }  # fmt: skip


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are drawn."""
    figures: list[Any] = []

    class Kept(_plots.Figure):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            figures.append(self)

    monkeypatch.setattr(_plots, "Figure", Kept)
    return figures


def test_a_bound_is_drawn_as_one(tmp_path: Path, figures: list[Any]) -> None:
    rows = [row("poor", 2.0, steps=0), row("lan", 10.0), row("home", 9.0)]
    _plots.shares(throughput(rows), tmp_path / "shares.png")
    (figure,) = figures
    profiles = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert profiles == ["lan", "home", "poor"]  # whatever was measured first
    bars = {bar.get_height(): bar.get_hatch() for bar in figure.axes[0].patches}
    assert bars == {1.0: None, 0.9: None, 0.2: _plots.BOUND["hatch"]}
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["int4", "at most: no step in time"]


def test_shares_are_drawn(tmp_path: Path) -> None:
    rows = [
        row(profile, rate, setting=setting, **policy)
        for profile, rate in (("lan", 10.0), ("home", 9.5), ("poor", 6.0), ("mixed", 7.0))
        for setting in ("int4", "subspace-8 int4")
        for policy in ({}, {"policy": "delayed", "ahead": 0.25, "microbatches": 64})
    ]
    rows.append(row("home", 0.1, setting=TORCH))
    _plots.shares(throughput(rows), tmp_path / "shares.png")
    assert (tmp_path / "shares.png").read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="nothing to draw: shares are of `lan`"):
        _plots.shares(throughput([row("home", 9.5)]), tmp_path / "none.png")


def test_a_run_has_the_step_and_the_share_ahead_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SIZES, "")  # which it exports
    options = argparse.Namespace(
        real=False, microbatches=64, microbatch_size=2, policy="delayed", ahead=0.25, parameters=0
    )
    config = config_of(SETTINGS["subspace-8 int4"], options)
    assert (config.batch.microbatches, config.ahead.of(0)) == (128, 32)
    options.real = True
    config = config_of(SETTINGS["subspace-8 int4"], options)
    sequence = config.data.sequence
    assert config.batch.microbatches * config.batch.microbatch_size * sequence == 64 * 4096
    assert config.update.ahead == 0.25


def test_the_curve_over_connections_is_drawn(tmp_path: Path) -> None:
    rows = [
        {
            "profile": "home",
            "line": "home",
            "congestion": congestion,
            "what": "up",
            "connections": count,
            "value": 19.0,
            "configured": 20.0,
        }
        for congestion in ("cubic", "bbr")
        for count in (16, 1, 4)
    ]
    _plots.connections(rows, tmp_path / "line.png")
    assert (tmp_path / "line.png").read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="nothing to draw: no emulated line"):
        _plots.connections([{**rows[0], "configured": None}], tmp_path / "none.png")


def test_everything_names_files_that_are_there_and_runs_each_of_them() -> None:
    files = {shlex.split(each.command)[0] for each in everything.COMMANDS.values()}
    there = {path.name for path in WAN.glob("[!_]*.py")}
    assert files == there - {"everything.py"}


def test_everything_takes_as_long_as_it_says() -> None:
    """Four hours and a quarter, in its docstring and the Makefile."""
    assert sum(each.minutes for each in everything.COMMANDS.values()) == pytest.approx(255, abs=10)


def test_every_command_of_throughput_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --show each is read to its end, and then there is nothing to show."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab_throughput, "end_politely", lambda: None)
    for each in everything.COMMANDS.values():
        file, *arguments = shlex.split(each.command)
        if file == "throughput.py" and "--plot" not in arguments:
            monkeypatch.setattr(sys, "argv", [file, *arguments, "--show"])
            with pytest.raises(SystemExit):
                lab_throughput.main()
            assert "error: nothing of this is in runs/wan/" in capsys.readouterr().err


def test_what_the_bridge_gives_is_measured_once_whatever_lines_are() -> None:
    options = argparse.Namespace(congestion=["bbr", "cubic"])
    assert list(lab_throughput.congestions("lan", options)) == ["cubic"]
    assert list(lab_throughput.congestions("poor", options)) == ["bbr", "cubic"]


def test_bytes_are_counted_of_codecs_that_a_run_may_name() -> None:
    for codec in (*wire_bytes.CODECS, *wire_bytes.THIN):
        wire = {"activations": codec}
        assert wire_bytes.config_of(wire, 2).wire.activations == codec


def test_a_command_that_fails_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(everything, "OUT", tmp_path)
    monkeypatch.setattr(everything, "HERE", tmp_path)
    (tmp_path / "good.py").write_text("""print('a table')\nprint('{"bench": "x"}')\n""")
    (tmp_path / "bad.py").write_text("raise SystemExit('error: no such line')\n")
    assert everything.run("good", everything.Command(1, "good.py"))
    assert not everything.run("bad", everything.Command(1, "bad.py"))
    assert (tmp_path / "wan_good.json").read_text() == '{"bench": "x"}\n'
    assert not (tmp_path / "wan_bad.json").exists()
    shown = capsys.readouterr().out
    assert "a table\n" in shown
    assert "bench" not in shown
    assert "   bad failed: error: no such line\n" in shown


def test_everything_says_that_it_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["everything.py"])
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root: run it with sudo"):
        everything.main()


def test_documents_name_parts_that_there_are() -> None:
    root = WAN.parents[1]
    for path in (root / "README.md", *root.glob("docs/**/*.md")):
        for names in re.findall(r"everything\.py((?:\s+[a-z][a-z0-9_]*)+)`", path.read_text()):
            assert set(names.split()) <= set(everything.COMMANDS), (path.name, names)


def test_the_curve_of_the_all_reduce_has_a_panel_per_group(
    tmp_path: Path, figures: list[Any]
) -> None:
    curve = [
        (f"{profile}, 4 members", congestion, number, 1.2)
        for profile in ("fibre", "home")
        for congestion in ("cubic", "bbr")
        for number in (1, 16)
    ]
    _plots.all_reduce(curve, 0.9, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes] == ["fibre, 4 members", "home, 4 members"]
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == ["cubic", "bbr", "goal 0.90"]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "16"]
