"""The oracle: the same run in one process, without a network, a leader or replicas.

It shares with the swarm what computes numbers (`StageState` or `DelayedState`, the optimizer, the
schedule, the data) and nothing else. With lossless codecs and `accumulate = "float64"` a swarm
under any failures ends with the sha256 this ends with, on the same kind of device (DESIGN, I6). The
whole model is one stage here, so equality also shows that the cut changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peer.snapshots import Snapshot
from peer.training import Batches, Plan, StepResult, divisor_of
from swarm.delayed_state import new_state
from swarm.errors import StageFailedError, SwarmError
from swarm.model.layout import model_sha256
from swarm.model.stage import ModelPipeline
from swarm.optim import OptimizerSettings, clip_scale
from swarm.stage_state import rounded, total


class Baseline:
    """One process that trains what a swarm would. `pipeline` must have one stage."""

    def __init__(
        self,
        plan: Plan,
        pipeline: ModelPipeline,
        batches: Batches,
        optimizer: OptimizerSettings,
        *,
        accumulate: str = "float64",
        device: str = "cpu",
    ) -> None:
        if pipeline.num_stages != 1:
            raise ValueError("the baseline runs the whole model as one stage")
        self.plan, self.pipeline, self.batches = plan, pipeline, batches
        self.state = new_state(
            lambda: pipeline.build_stage(0, device),
            optimizer,
            ahead=plan.ahead,
            accumulate=accumulate,
            device=device,
        )
        self.first_step = 0

    def resume(self, snapshot: Snapshot) -> None:
        """Begin with a checkpoint's state. Raises WireError when it is not of this model."""
        self.state.load(snapshot.tensors, snapshot.updates)
        self.first_step = snapshot.step

    def steps(self, num_steps: int) -> Iterator[StepResult]:
        """Train, yielding each step's result; `wall_s` is real time.

        Raises StageFailedError with what the model raised, as a swarm does.
        """
        for step in range(self.first_step, num_steps):
            try:
                result = self._step(step)
            except SwarmError:
                raise
            except Exception as error:  # whatever a user's own modules raise
                what = f"the model failed in step {step}: {type(error).__name__}: {error}"
                raise StageFailedError(what, "--debug shows where") from error
            yield result

    def _step(self, step: int) -> StepResult:
        began = time.perf_counter()
        state, plan = self.state, self.plan
        batches = [self.batches.batch(step, index) for index in range(plan.num_microbatches)]
        weights = [self.pipeline.weight(batch) for batch in batches]
        losses, oldest, ahead = [], state.live[0], plan.ahead.of(step)
        for index, batch in enumerate(batches):
            version = oldest if index < ahead else state.waiting(ahead)
            graph = version.forward(step, index, (), self._tensors(batch), divisor_of(weights))
            losses.append(float(graph.outputs[0].detach()))
            version.backward(graph, None, into=oldest)
        gradient = rounded(state.accumulator)
        squared_norms = state.layout.squared_norms(gradient)
        finite = all(map(math.isfinite, squared_norms))
        norm = math.sqrt(math.fsum(squared_norms)) if finite else math.nan
        if finite:
            state.apply(gradient, lr=plan.lr(step), scale=clip_scale(norm, plan.clip_norm))
        else:
            state.skip()
        wall_s = time.perf_counter() - began
        result = StepResult(step, total(losses), norm, sum(weights), wall_s)
        if plan.validation_every and (step + 1) % plan.validation_every == 0:
            result.validation_loss = self.validate()
        return result

    def validate(self) -> float:
        """Mean loss over the fixed validation microbatches."""
        losses, items = [], 0
        for index in range(self.plan.validation_microbatches):
            batch = self.batches.validation_batch(index)
            losses.append(float(self.state.evaluate((), self._tensors(batch))[0]))
            items += self.pipeline.weight(batch)
        return math.fsum(losses) / max(items, 1)

    def _tensors(self, batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        device = self.state.device
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
            for name, array in batch.items()
        }

    def report(self) -> dict[str, Any]:
        """The final hashes, as a swarm reports them."""
        hashes = self.state.tensor_hashes()
        return {"sha256": model_sha256(hashes, self.pipeline.key_order)}

    def stage_hashes(self, cut: ModelPipeline) -> list[dict[str, str]]:
        """sha256 of each parameter, by name, for each stage of `cut`: the same model as the swarm
        has it."""
        hashes = self.state.tensor_hashes()
        return [
            {name: hashes[name] for name in cut.layout(stage).names}
            for stage in range(cut.num_stages)
        ]
