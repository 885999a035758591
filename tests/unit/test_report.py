"""Reports: line per step, hashes at the end, and one line when the disk is full."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from peer.report import ReportWriter, final_report
from swarm.errors import StorageError
from swarm.model.layout import ParameterLayout, model_sha256


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
    with ReportWriter(path) as writer:
        writer.step(Result())
        writer.step(Result(1, grad_norm=float("nan"), validation_loss=2.25))
        assert len(path.read_text().splitlines()) == 2  # it can be followed
        writer.finish(a_final())
    *steps, final = (json.loads(line) for line in path.read_text().splitlines())
    assert steps == [
        {"step": 0, "loss": 2.5, "grad_norm": 0.5, "tokens": 64, "wall_s": 0.25},
        {"step": 1, "loss": 2.5, "grad_norm": None, "tokens": 64, "wall_s": 0.25,
         "validation_loss": 2.25},
    ]  # fmt: skip
    assert final == a_final()
    assert final["tokens_per_s"] == 256.0


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


def test_without_a_path_nothing_is_written() -> None:
    with ReportWriter(None) as writer:
        writer.step({"step": 0, "loss": 1.0})
        writer.finish({"sha256": ""})


def test_a_refusing_disk_is_one_line(tmp_path: Path) -> None:
    writer = ReportWriter("/dev/full")
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
        ReportWriter(tmp_path / "file" / "report.jsonl")
