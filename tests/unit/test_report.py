"""Reports: line per step, hashes at the end, and one line when the disk is full."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from peer.commands import run_baseline
from peer.report import ReportWriter, final_report
from swarm.errors import StorageError
from swarm.model.layout import ParameterLayout, model_sha256

RUN = "0123456789abcdef0123456789abcdef"
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "run.toml"


@dataclass
class Result:
    step: int = 0
    loss: float = 2.5
    grad_norm: float = 0.5
    tokens: int = 64
    wall_s: float = 0.25
    validation_loss: float | None = None
    record: object = None


def a_final() -> dict:
    return final_report(["w"], [{"w": "2:ab"}], steps=2, tokens=128, wall_s=0.5)


def test_a_report_is_a_line_a_step_and_a_last_one(tmp_path: Path) -> None:
    path = tmp_path / "out" / "report.jsonl"
    with ReportWriter(path, RUN) as writer:
        writer.step(Result())
        writer.step(Result(1, grad_norm=float("nan"), validation_loss=2.25))
        assert len(path.read_text().splitlines()) == 2  # it can be followed
        writer.finish(a_final())
    *steps, final = (json.loads(line) for line in path.read_text().splitlines())
    assert steps == [
        {"run_id": RUN, "step": 0, "loss": 2.5, "grad_norm": 0.5, "tokens": 64, "wall_s": 0.25},
        {"run_id": RUN, "step": 1, "loss": 2.5, "grad_norm": None, "tokens": 64, "wall_s": 0.25,
         "validation_loss": 2.25},
    ]  # fmt: skip
    assert final == {"run_id": RUN, **a_final()}
    assert final["tokens_per_s"] == 256.0


def lines_of(path: Path) -> list[tuple[str, object]]:
    """The steps with their losses, and the number of steps of a last line."""
    lines = map(json.loads, path.read_text().splitlines())
    return [(x["step"], x["loss"]) if "step" in x else ("end", x["steps"]) for x in lines]


def write(path: Path, *steps: Result, end: bool = False) -> None:
    with ReportWriter(path, RUN) as writer:
        for each in steps:
            writer.step(each)
        if end:
            writer.finish(a_final())


def test_a_run_that_is_gone_on_with_goes_on_with_its_report(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    write(path, *map(Result, range(4)))
    write(path)  # as a trainer that only stands by
    assert lines_of(path) == [(step, 2.5) for step in range(4)]
    write(path, Result(2, 1.0), Result(3, 1.0))  # resumed from a checkpoint of step 2
    assert lines_of(path) == [(0, 2.5), (1, 2.5), (2, 1.0), (3, 1.0)]
    write(path, Result(5, 0.5))  # its leader died between a commit and its line
    assert lines_of(path) == [(0, 2.5), (1, 2.5), (2, 1.0), (3, 1.0), (5, 0.5)]
    write(path, Result(0, 3.0), Result(1, 3.0), end=True)  # from the beginning
    assert lines_of(path) == [(0, 3.0), (1, 3.0), ("end", 2)]
    write(path, end=True)  # it had nothing left to train
    assert lines_of(path) == [(0, 3.0), (1, 3.0), ("end", 2)]
    write(path, Result(2), Result(3))  # and then more steps were asked for
    assert lines_of(path) == [(0, 3.0), (1, 3.0), (2, 2.5), (3, 2.5)]


def test_a_run_that_goes_back_says_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    write(path, *map(Result, range(4)), Result(2, 1.0), Result(3, 1.0))
    assert lines_of(path) == [(0, 2.5), (1, 2.5), (2, 1.0), (3, 1.0)]


@pytest.mark.parametrize("torn", ["{", '{"run_id": "' + RUN, '{"run_id": "' + RUN + '", "st'])
def test_a_line_that_a_killed_writer_left_torn_goes(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "report.jsonl"
    for before in ([], [Result(0)]):
        path.write_text("")
        write(path, *before)
        with path.open("a") as file:
            file.write(torn)
        write(path, Result(1))
        assert lines_of(path) == [*((each.step, 2.5) for each in before), (1, 2.5)]


@pytest.mark.parametrize(
    "content",
    ['{"run_id": "another"}\n', '{"step": 0}\n', "[run]\n", "\n", RUN],
    ids=["another run", "an older version", "a run.toml", "an empty line", "no line"],
)
def test_a_file_that_is_not_this_runs_report_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "report.jsonl"
    path.write_text(content)
    with pytest.raises(StorageError) as caught:
        ReportWriter(path, RUN)
    assert str(caught.value) == (
        f"{path} holds something else than a report of this run (01234567)"
        " - name another file with --report, or remove it"
    )
    assert path.read_text() == content


def test_the_models_hash_is_the_same_whatever_the_cut() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 3) for name in "abc"})
    order = [name for name, _ in model.named_parameters()]
    stages = []
    for names in (["a"], ["b", "c"]):
        part = nn.ModuleDict({name: model[name] for name in names})
        layout = ParameterLayout.of(part)
        stages.append(layout.tensor_sha256(layout.flatten(part)))
    facts = {"steps": 1, "tokens": 1, "wall_s": 1.0}
    cut = final_report(order, stages, **facts)
    whole = final_report(order, [{**stages[0], **stages[1]}], **facts)
    assert cut["sha256"] == whole["sha256"] == whole["stages"][0]
    assert cut["stages"] == [model_sha256(stage, order) for stage in stages]
    with torch.no_grad():
        model["a"].bias += 1
    with pytest.raises(ValueError, match=r"c\.weight"):
        final_report(order, [stages[0], {"b.weight": "", "b.bias": ""}], **facts)


def test_a_baselines_last_line_has_a_hash_of_each_stage(tmp_path: Path) -> None:
    """Of the run's stages, as a swarm's has; tests/process shows that they are the same."""
    run_baseline(
        DIGITS,
        steps=1,
        report=tmp_path / "report",
        threads=torch.get_num_threads(),
        device="cpu",
        resume=None,
    )
    final = json.loads((tmp_path / "report").read_text().splitlines()[-1])
    assert len(final["stages"]) == 3
    assert len({final["sha256"], *final["stages"]}) == 4


def test_a_baseline_of_a_run_that_rounds_says_that_a_swarm_may_end_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(DIGITS.read_text() + '\n[wire]\nforward = "int8"\n')
    for each, said in (
        (run, ["a swarm of this run rounds (int8), and may end with other bits"]),
        (DIGITS, []),
    ):
        run_baseline(
            each,
            steps=1,
            report=None,
            threads=torch.get_num_threads(),
            device="cpu",
            resume=None,
        )
        out = capsys.readouterr().out.splitlines()
        assert [line for line in out if "rounds" in line] == said


def test_without_a_path_nothing_is_written() -> None:
    with ReportWriter(None, RUN) as writer:
        writer.step({"step": 0, "loss": 1.0})
        writer.finish(a_final())


def test_a_refusing_disk_is_one_line(tmp_path: Path) -> None:
    writer = ReportWriter("/dev/full", RUN)
    with pytest.raises(StorageError) as caught:
        writer.step(Result())
    assert str(caught.value) == (
        "cannot write the report /dev/full: No space left on device"
        " - free some space or name another file with --report"
    )
    with pytest.raises(StorageError):
        writer.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write the report"):
        ReportWriter(tmp_path / "file" / "report.jsonl", RUN)
