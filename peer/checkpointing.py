"""Checkpoints of a running swarm: every stage's state at one commit, fetched and written whole."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from peer import checkpoints, run_dirs
from peer.inquiries import fetch_states
from peer.leader import Leader
from peer.snapshots import Snapshot
from swarm.config import RunConfig, canonical_bytes
from swarm.errors import SwarmError
from swarm.model import ModelPipeline, ParameterLayout
from swarm.terms import Record, Term


class Checkpointer:
    """Writes checkpoints of a run into its directory.

    `note(step=, path=)` is told of each that is complete, `note(step=, reason=)` of each that could
    not be had. `tokenizer` is kept beside the weights, so that an export needs no data. `parent` is
    what the manifest says of the run that this one goes on from.
    """

    def __init__(
        self,
        config: RunConfig,
        pipeline: ModelPipeline,
        run_dir: Path,
        *,
        tokenizer: Any = None,
        parent: Mapping[str, Any] | None = None,
        note: Callable[..., object] = lambda **facts: None,
    ) -> None:
        self.config, self.pipeline, self.run_dir = config, pipeline, run_dir
        self._tokenizer, self.parent, self._note = tokenizer, parent, note
        self._newest: tuple[Term, int] | None = None

    async def take(self, leader: Leader) -> Path | None:
        """A checkpoint of the newest commit. None, and training may go on, when it cannot be had.

        The replicas copy their states at once; fetching and writing happen beside training only if
        the caller does not wait.
        """
        step, record = leader.next_step, leader.record
        try:
            states = await fetch_states(leader)
            path = await asyncio.to_thread(self._write, step, record, states)
        except (SwarmError, MemoryError, RuntimeError) as error:  # torch's want of memory is one
            self._note(step=step, reason=str(error) or type(error).__name__)
            return None
        leader.saved_step, self._newest = step, (leader.term, step)
        self._note(step=step, path=str(path))
        return path

    def has(self, leader: Leader) -> bool:
        """Whether the newest commit has been written here, by this leader."""
        return self._newest == (leader.term, leader.next_step)

    def _write(self, step: int, record: Record | None, states: Sequence[Snapshot]) -> Path:
        staging = checkpoints.begin(self.run_dir, step)
        try:
            stages = [
                write_state(staging, self.pipeline, k, state) for k, state in enumerate(states)
            ]
            manifest: dict[str, Any] = {
                "step": step,
                "epoch": record.epoch if record else 0,
                "run_id": self.config.run_id,
                "config": json.loads(canonical_bytes(self.config)),
                "stages": stages,
            }
            if self.parent is not None:
                manifest["parent"] = dict(self.parent)
            path = checkpoints.complete(staging, manifest, self._tokenizer)
        except BaseException:
            checkpoints.abandon(staging)
            raise
        keep = self.config.checkpoint.keep
        run_dirs.prune(self.run_dir, keep, self.config.run_id, record)
        return path


def write_state(
    staging: Path, pipeline: ModelPipeline, stage: int, state: Snapshot
) -> dict[str, Any]:
    """Write one stage of a checkpoint; returns its entry for the manifest. Blocking.

    Raises StorageError.
    """
    layout = pipeline.layout(stage)
    optimizer: dict[str, Tensor] = {}  # and the version before the newest, if the state has one
    for name, tensor in state.tensors.items():
        if name != "parameters":
            optimizer |= split_state(layout, name.removeprefix("optimizer."), tensor)
    meta = {"updates": state.updates, "fingerprint": state.fingerprint}
    parameters = layout.slices(state.tensors["parameters"])
    return checkpoints.write_stage(staging, stage, parameters, optimizer, meta)


SEPARATOR = "|"  # between an optimizer state's name and a parameter's; in neither


def split_state(layout: ParameterLayout, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """An optimizer tensor by parameter, so that another cut can be made of it: laid out as they
    are, packed without gaps, or of one number for each. As it is, if it is neither."""
    sizes = [math.prod(shape) for shape in layout.shapes]
    slices: Mapping[str, Tensor]
    if tensor.numel() == layout.total:
        slices = layout.slices(tensor)
    elif tensor.numel() == sum(sizes):
        parts = zip(tensor.split(sizes), layout.shapes, strict=True)
        slices = dict(zip(layout.names, (each.view(shape) for each, shape in parts), strict=True))
    elif tensor.numel() == len(sizes):
        slices = dict(zip(layout.names, tensor.split(1), strict=True))
    else:
        return {name: tensor}
    return {f"{name}{SEPARATOR}{parameter}": each for parameter, each in slices.items()}
