"""The model of a run as a pipeline of stages: a Hugging Face decoder, or the user's own modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.model.custom import CustomPipeline
from swarm.model.definition import Pipeline, load_pipeline
from swarm.model.layout import ParameterLayout, fingerprint, model_sha256, sha256_of
from swarm.model.stage import ModelPipeline, Stage, backward, gradient_specs, needs_gradient

if TYPE_CHECKING:
    from swarm.config import RunConfig

__all__ = [
    "CustomPipeline",
    "ModelPipeline",
    "ParameterLayout",
    "Pipeline",
    "Stage",
    "backward",
    "build_pipeline",
    "fingerprint",
    "gradient_specs",
    "load_pipeline",
    "model_sha256",
    "needs_gradient",
    "sha256_of",
]


def build_pipeline(config: RunConfig) -> ModelPipeline:
    """The pipeline of a run config. Raises ConfigError (PipelineError where it cannot be cut)."""
    model = config.model
    if model.pipeline is not None:
        return CustomPipeline(
            load_pipeline(model.pipeline),
            seed=config.run.seed,
            num_stages=model.stages,
            microbatch_size=config.batch.microbatch_size,
            cut=model.cut,
            recompute=model.recompute,
            dtype=model.dtype,
        )
    from swarm.model.huggingface import HuggingFacePipeline  # transformers: 1.8 s and 110 MB

    return HuggingFacePipeline.from_config(config)
