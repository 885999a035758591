"""Clipping and uneven weights, against plain torch: one batch a step, and its mean over all items.

The baseline and a swarm share the functions that weigh and clip, so that they agree shows little of
those. Here the oracle shares nothing with either. SGD, because AdamW hardly minds a factor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from peer.baseline import Baseline
from peer.training import Plan, StepResult
from swarm.model.custom import CustomPipeline
from swarm.model.definition import Pipeline
from swarm.schedule import Schedule
from tests.protocol.simulated import Fault, Swarm
from tests.protocol.tiny import TinyBatches, tiny_data

MASKED = -1
STEPS, MICROBATCHES, SIZE = 4, 6, 4
CLIPS, NEVER = 0.02, 100.0
SCHEDULE = Schedule(kind="cosine", peak=0.5, warmup_steps=2, steps=50, final_ratio=0.1)
SETTINGS: Any = SimpleNamespace(
    name="sgd", lr=0.5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, momentum=0.9, nesterov=False
)
UNEVEN = Pipeline(  # without dropout, whose draws are of a microbatch and not of a batch
    layers={
        "enter": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh()),
        "middle": lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
        "leave": lambda: nn.Linear(16, 2),
    },
    inputs=lambda batch: (batch["x"],),
    loss=lambda outputs, batch: nn.functional.cross_entropy(
        outputs[0], batch["y"].long(), ignore_index=MASKED, reduction="sum"
    ),
    weight=lambda batch: int((batch["y"] != MASKED).sum()),
    data=tiny_data,
)


class Masked(TinyBatches):
    """From no item of a microbatch to all of them count."""

    def batch(self, step: int, index: int) -> Mapping[str, np.ndarray]:
        batch = dict(super().batch(step, index))
        batch["y"] = batch["y"].copy()
        batch["y"][(step + index) % (SIZE + 1) :] = MASKED
        return batch


def pipeline(num_stages: int) -> CustomPipeline:
    return CustomPipeline(UNEVEN, seed=3, num_stages=num_stages, microbatch_size=SIZE)


def plan(clip_norm: float) -> Plan:
    return Plan(MICROBATCHES, STEPS, SCHEDULE.lr, clip_norm=clip_norm)


def baseline(clip_norm: float) -> tuple[Baseline, list[StepResult]]:
    oracle = Baseline(plan(clip_norm), pipeline(1), Masked(), SETTINGS)
    return oracle, list(oracle.steps(STEPS))


def plain_torch(clip_norm: float) -> tuple[dict[str, torch.Tensor], list[StepResult]]:
    """The parameters after all steps, and what each step showed."""
    model = nn.Sequential(OrderedDict((name, make()) for name, make in UNEVEN.layers.items()))
    model.load_state_dict(dict(pipeline(1).build_stage(0).named_parameters()))
    optimizer = torch.optim.SGD(model.parameters(), momentum=SETTINGS.momentum)
    shown = []
    for step in range(STEPS):
        batches = [Masked().batch(step, index) for index in range(MICROBATCHES)]
        x, y = (torch.from_numpy(np.concatenate([b[name] for b in batches])) for name in ("x", "y"))
        loss = nn.functional.cross_entropy(model(x), y, ignore_index=MASKED)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.param_groups[0]["lr"] = SCHEDULE.lr(step)
        optimizer.step()
        items = int((y != MASKED).sum())
        shown.append(StepResult(step, loss.item(), norm.item(), items, wall_s=0.0))
    return dict(model.named_parameters()), shown


@pytest.mark.parametrize("clip_norm", [CLIPS, NEVER], ids=["clips", "never clips"])
def test_the_baseline_is_what_plain_torch_trains(clip_norm: float) -> None:
    oracle, results = baseline(clip_norm)
    expected, shown = plain_torch(clip_norm)
    for mine, theirs in zip(results, shown, strict=True):
        assert (mine.grad_norm > clip_norm) == (clip_norm == CLIPS), "a step shows nothing"
        assert mine.tokens == theirs.tokens
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    assert len({result.tokens for result in results}) > 1, "the steps weigh alike"
    for name, parameter in oracle.state.stage.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), expected[name].detach(), rtol=1e-5, atol=1e-6
        )


def test_a_swarm_that_clips_is_the_baseline_bit_for_bit() -> None:
    """With replicas killed where the step's weights and norm are told and put to use."""
    oracle, results = baseline(CLIPS)
    for point in ("counted", "average", "commit"):
        fault = Fault(point, "kill", replica="r1.1", step=1, duration_s=2.0)
        swarm = Swarm(plan=plan(CLIPS), faults=[fault], batches=Masked(), optimizer=SETTINGS)
        swarm.pipeline = pipeline(3)
        assert swarm.run(STEPS) == oracle.report()
        assert swarm.fired == [fault], "nothing was injected"
        for mine, theirs in zip(swarm.results, results, strict=True):
            assert theirs.grad_norm > CLIPS
            assert (mine.loss, mine.grad_norm, mine.tokens) == (
                theirs.loss, theirs.grad_norm, theirs.tokens
            )  # fmt: skip
