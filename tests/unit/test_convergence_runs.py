"""What `benchmarks/convergence.py` makes of its settings, options and kept results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.config import parse_config

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not a package

import convergence
from convergence import CODECS, DELAYED, SUBSPACES, TABLE, main, plot, replicas_of, sections

CODEC_NAMES = ("float32", "float32")


def described(setting: str) -> dict[str, Any]:
    return sections(setting, 128, 0, 1000, 1e-3, 4)


@pytest.mark.parametrize(
    ("setting", "subspace", "codecs", "rounding", "ahead"),
    [
        ("exact", None, CODEC_NAMES, "nearest", 0),
        ("subspace-8+int4+delayed-2", 8, ("int4", "int4"), "nearest", 2),
        ("int4+delayed-1", None, ("int4", "int4"), "nearest", 1),
        ("subspace-32+int8~", 32, ("int8", "int8"), "stochastic", 0),
        ("subspace-16+delayed", 16, CODEC_NAMES, "nearest", 4),
        ("subspace-8+int8+zstd/int4~+delayed-3", 8, ("int8+zstd", "int4"), "stochastic", 3),
    ],
)
def test_a_setting_is_made_of_parts(
    setting: str, subspace: int | None, codecs: tuple[str, str], rounding: str, ahead: int
) -> None:
    config = parse_config(described(setting), setting)
    wire = config.wire
    assert config.model.subspace == subspace
    assert (wire.forward or wire.activations, wire.backward or wire.activations) == codecs
    assert wire.rounding == rounding
    assert config.ahead.of(999) == ahead
    assert config.ahead.of(99) == 0


def test_two_replicas_average_where_the_setting_says_so() -> None:
    config = parse_config(described("subspace-8+int4+delayed-2+averaged-int8"), "averaged")
    assert (config.wire.gradients, config.wire.forward) == ("int8", "int4")
    assert config.ahead.of(999) == 2
    assert replicas_of("subspace-8+averaged-int8") == 2
    assert replicas_of("subspace-8") == 1


@pytest.mark.parametrize("setting", ["exact", TABLE, *CODECS, *SUBSPACES, *DELAYED])
def test_every_setting_of_all_is_one(setting: str) -> None:
    parse_config(described(setting), setting)


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("foo", "joined by + in this order"),
        ("", "joined by + in this order"),
        ("delayed-1+int4", "joined by + in this order"),
        ("averaged-int8+delayed-1", "joined by + in this order"),
        ("exact+delayed-1", "joined by + in this order"),
        ("subspace-8+", "joined by + in this order"),
        ("delayed-9", "in delayed-N use a number from 1 to 4"),
        ("int4+delayed-0", "in delayed-N use a number from 1 to 4"),
        ("subspace-x", "in subspace-K use a number from 1 to 127"),
        ("subspace-999+int4", "in subspace-K use a number from 1 to 127"),
    ],
)
def test_what_is_no_setting_is_one_line_before_anything_is_written(
    setting: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "runs"
    arguments = ["convergence.py", str(folder), "--settings", f"exact,{setting}", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: there is no setting {setting!r}: ")
    assert line.endswith(remedy)
    assert not folder.exists()


def shown(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["convergence.py", str(folder), "--show", *map(str, options)])
    main()


def test_nothing_to_draw_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^error: nothing to draw: .* leave out --show to train$"):
        shown(monkeypatch, tmp_path, "--plot", tmp_path / "none.png")


def kept(folder: Path, setting: str, ending: str, **fields: Any) -> dict[str, Any]:
    """A result as a run leaves it."""
    row = {
        "setting": setting,
        "hidden": 128,
        "seed": 0,
        "validation": 1.5,
        "tokens": 2048,
        "wire_bytes_per_token": {"forward": 4.0, "backward": 4.0},
        "losses": [2.0],
        **fields,
    }
    (folder / f"{setting}-h128-s0{ending}.json").write_text(json.dumps(row))
    return row


def test_results_of_other_validation_tokens_or_rates_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the default have the name that they always had."""
    kept(tmp_path, "exact", "-m4-lr0.001-t2000000", validation=1.0)
    kept(tmp_path, "exact", "-m4-lr0.001-t2000000-v512", validation=2.0)
    kept(tmp_path, "subspace-8+int4+delayed-2", "-m4-lr0.002-t2000000", validation=1.25)
    kept(tmp_path, "subspace-8+int4+delayed-2", "-m4-lr0.001-t2000000", validation=9.0)

    def values(*options: str) -> list[float]:
        shown(monkeypatch, tmp_path, *options)
        results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
        return [each["value"] for each in results]

    assert values() == [1.0, 1.25, 0.25]
    assert values("--validation-tokens", "512") == [2.0]
    assert values("--validation-tokens", "1024") == []


def test_the_curve_ends_where_its_last_whole_part_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """499 steps are 499 parts, 503 are 251 of two: the last step fills none."""
    figures = []

    class Kept(convergence.Figure):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            figures.append(self)

    monkeypatch.setattr(convergence, "Figure", Kept)
    for steps, whole in ((499, 499), (503, 502)):
        losses = convergence.thinned([2.0] * steps)
        run = kept(tmp_path, "exact", "", tokens=steps * 1024, losses=losses)
        plot([run], 1024, tmp_path / "curve.png")
        (curve,) = figures[-1].axes[0].lines
        assert curve.get_xdata()[-1] == pytest.approx(whole * 1024 / 1e6)
