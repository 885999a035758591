"""Every field of run.toml, its type, default, limits and meaning.

A field's description is its documentation: docs/run.md and the file that `swarm init` writes are
generated from these (`swarm.config_text`). Checks of one field stand beside it, checks across
fields in the section that sees them all; their messages name the keys in full. A ValueError's
second argument, if it has one, is the remedy.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    StringConstraints,
    field_validator,
    model_validator,
)

from swarm.ahead import NONE, Ahead
from swarm.config_model import check_model_config, check_subspace_size, complete_model_config
from swarm.config_types import (
    Codec,
    Count,
    CountOrZero,
    LocalPath,
    ObjectName,
    PeerId,
    Section,
    Sha256,
    like,
    list_to_tuple,
)
from swarm.run_id import canonical_bytes, run_id_of


class RunSection(Section):
    """What the run is called, its seed, and who may lead it."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)] = Field(
        default="run", description="A name for people; shown in the terminal and on the dashboard."
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2**63 - 1,
        description="Decides initial weights, data order and dropout, whatever the cut.",
    )
    trainers: Annotated[tuple[PeerId, ...], BeforeValidator(list_to_tuple)] = Field(
        default=(),
        max_length=5,
        description="Peer ids that may lead; orders from any other are refused. "
        "Left out: whoever starts the run.",
    )

    @field_validator("name")
    @classmethod
    def _printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("has characters that cannot be printed")
        return name

    @field_validator("trainers")
    @classmethod
    def _distinct(cls, trainers: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(trainers)) != len(trainers):
            raise ValueError("names a peer twice")
        return trainers


class ModelSection(Section):
    """The model and how it is cut. Exactly one of config, pretrained and pipeline."""

    config: dict[str, JsonValue] | None = Field(
        default=None,
        description="A Hugging Face config (decoder-only) with its model_type: fresh weights from "
        "the seed. vocab_size left out is data.vocab_size; tie_word_embeddings left out is false.",
    )
    pretrained: LocalPath | None = Field(
        default=None,
        description="A local Hugging Face directory to start from; ~ is your home. Where its "
        "output layer is tied to its embedding, the two start equal and are trained apart.",
    )
    pretrained_sha256: Sha256 | None = Field(
        default=None,
        description="Hash of that directory's config and weights, and of its tokenizer where "
        'data.tokenizer is "pretrained". Left out: taken where the run is started.',
    )
    pipeline: ObjectName | None = Field(
        default=None,
        description="Your own stages: an installed `package.module:object`. Never sent over the "
        "network.",
    )
    stages: int = Field(
        ge=1, le=1024, description="Number of stages. With cut it may be left out: cut says it too."
    )
    cut: Annotated[tuple[Count, ...], BeforeValidator(list_to_tuple)] | None = Field(
        default=None,
        description="Layers per stage, as in [2, 2, 2]. Left out: balanced by cost.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="bfloat16 computes under autocast over float32 master weights.",
    )
    subspace: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Numbers per token that cross a boundary: the residual stream is kept in a "
        "subspace of that many dimensions (Protocol Models), without loss; fewer than hidden_size. "
        "Left out: there is none, and hidden_size cross.",
    )
    subspace_layers: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Layers, from the first on, that write into it. Those of the last stage need "
        "not, and the model learns more where they do not. Left out: all but the last.",
    )
    recompute: bool = Field(
        default=False,
        description="Recompute activations in the backward pass: less memory, more time.",
    )

    @model_validator(mode="before")
    @classmethod
    def _stages_from_cut(cls, data: Any) -> Any:
        if isinstance(data, dict) and "stages" not in data:
            cut = data.get("cut")
            if isinstance(cut, list | tuple) and cut:
                return {**data, "stages": len(cut)}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("config", "pretrained", "pipeline") if getattr(self, name)]
        if len(given) != 1:
            what = " and ".join(f"model.{name}" for name in given) or "none"
            raise ValueError(
                f"needs exactly one of model.config, model.pretrained, model.pipeline; has {what}"
            )
        if self.subspace is not None and self.config is None:
            raise ValueError("model.subspace needs model.config: it trains from fresh weights")
        if self.subspace_layers is not None and self.subspace is None:
            raise ValueError(
                "model.subspace_layers needs model.subspace", "set it, or leave subspace_layers out"
            )
        if self.pretrained_sha256 is not None and self.pretrained is None:
            raise ValueError("model.pretrained_sha256 has no meaning without model.pretrained")
        if self.cut is not None and len(self.cut) != self.stages:
            raise ValueError(
                f"model.cut lists {len(self.cut)} stages but model.stages is {self.stages}"
            )
        if self.config is not None:
            check_model_config(self.config, stages=self.stages, cut=self.cut)
            if self.subspace is not None:
                check_subspace_size(self.config, self.subspace)
        return self


class DataSection(Section):
    """What the model is trained on. Tokens are cut from the data by (seed, step, index)."""

    source: Literal["stdlib", "text", "jsonl", "pipeline"] = Field(
        default="stdlib",
        description="stdlib is this Python's own library sources; text and jsonl are local files; "
        "pipeline takes the data of model.pipeline.",
    )
    path: LocalPath | None = Field(
        default=None,
        description="File or directory for text and jsonl, relative to where the command runs; ~ "
        "is your home.",
    )
    tokenizer: Literal["bytes", "bpe", "pretrained"] = Field(
        default="bytes",
        description="Bytes as they are, a BPE trained once on the data, or the tokenizer.json in "
        "model.pretrained.",
    )
    vocab_size: int = Field(
        default=256,
        ge=2,
        le=2**24,
        description="Number of tokens; 256 for bytes, all of the tokenizer's for pretrained.",
    )
    sequence: int = Field(default=128, ge=1, le=2**24, description="Tokens per sequence.")
    train_sha256: Sha256 | None = Field(
        default=None,
        description="Hash of the training tokens. Left out: taken where the run is started.",
    )
    validation_sha256: Sha256 | None = Field(
        default=None,
        description="Hash of the validation tokens. Left out: taken where the run is started.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        needs_path = self.source in ("text", "jsonl")
        if needs_path and self.path is None:
            raise ValueError(f'data.source = "{self.source}" needs data.path')
        if not needs_path and self.path is not None:
            raise ValueError(f'data.path has no meaning with data.source = "{self.source}"')
        if self.source != "pipeline" and self.tokenizer == "bytes" and self.vocab_size != 256:
            raise ValueError(
                f'data.vocab_size is {self.vocab_size} but data.tokenizer = "bytes" has 256 tokens'
            )
        if self.source != "pipeline" and self.tokenizer == "bpe" and self.vocab_size <= 256:
            raise ValueError('data.vocab_size must be above 256 with data.tokenizer = "bpe"')
        return self


class BatchSection(Section):
    """How much one step sees: microbatches times microbatch_size sequences."""

    microbatches: Count = Field(
        default=16, description="Microbatches per step, spread over replicas."
    )
    microbatch_size: Count = Field(default=8, description="Sequences in one microbatch.")


class OptimizerSection(Section):
    """One optimizer step per commit, equal on every replica of a stage."""

    name: Annotated[
        str,
        StringConstraints(max_length=64),
        like("[A-Za-z][A-Za-z0-9]*", "the name of a class", 'write for example name = "adamw"'),
    ] = Field(
        default="adamw",
        description="adamw and sgd are built in and give the same bits on every machine; any "
        "other class of torch.optim runs only among machines that round alike.",
    )
    lr: float = Field(default=1e-3, gt=0, description="Peak learning rate.")
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        BeforeValidator(list_to_tuple),
    ] = Field(default=(0.9, 0.95), description="Decay of Adam's two averages.")
    eps: float = Field(
        default=1e-8,
        ge=1e-37,  # near float32's least: what is 0 there makes NaN of no gradient
        description="Adam's term against division by zero.",
    )
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="Weight decay, never of what has one dimension, of norms (LayerNorm, RMSNorm, "
        "classes called ...Norm) and of biases (bias, bias_..., ..._bias): decoupled with adamw, "
        "added to the gradient (L2) with sgd, any other as torch has it.",
    )
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum of sgd.")
    nesterov: bool = Field(
        default=False, description="Nesterov momentum, of sgd and of adamw (NAdam)."
    )
    clip_norm: float = Field(
        default=1.0, ge=0, description="Largest gradient norm over all stages; 0 never clips."
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name.lower() in ("adamw", "sgd"):
            return name.lower()
        import torch  # only here: a plain run reads its config without it

        optimizer = getattr(torch.optim, name, None)
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            raise ValueError(f'is "{name}", which is neither adamw, sgd nor a class of torch.optim')
        if optimizer is torch.optim.Optimizer or name in ("LBFGS", "SparseAdam"):
            raise ValueError(f'is "{name}", which cannot run from dense gradients alone')
        if name == "Muon":
            raise ValueError('is "Muon", which takes matrices only, no bias and no norm')
        return name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        taken = self._taken()
        for key, wanted in (("nesterov", self.nesterov), ("momentum", self.momentum > 0)):
            if wanted and key not in taken:
                raise ValueError(
                    f'optimizer.{key} has no meaning with optimizer.name = "{self.name}"',
                    f"leave it out, or choose {'sgd' if key == 'momentum' else 'adamw or sgd'}",
                )
        if self.nesterov and self.name != "adamw" and self.momentum == 0:
            raise ValueError("optimizer.nesterov needs optimizer.momentum above 0")
        return self

    def _taken(self) -> Collection[str]:
        """Of momentum and nesterov, what this optimizer has."""
        if self.name == "adamw":
            return ("nesterov",)
        if self.name == "sgd":
            return ("momentum", "nesterov")
        import torch

        return inspect.signature(getattr(torch.optim, self.name)).parameters


class ScheduleSection(Section):
    """The learning rate over the run. `--steps` stops earlier and never changes it."""

    kind: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="Shape after the warm-up."
    )
    warmup_steps: CountOrZero = Field(default=0, description="Steps of linear rise to lr.")
    steps: Count = Field(description="Length of the run in steps.")
    final_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Last learning rate as a share of lr."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup_steps is {self.warmup_steps}, above schedule.steps {self.steps}"
            )
        return self


class BoundarySection(Section):
    """Codecs of one boundary between two stages."""

    boundary: int = Field(ge=0, le=1022)
    forward: Codec | None = None
    backward: Codec | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.forward is None and self.backward is None:
            raise ValueError("names no codec", "give it forward, backward or both")
        return self


class WireSection(Section):
    """How tensors travel. Only float32, with or without +zstd, loses no bit."""

    activations: Codec = Field(
        default="float32",
        description="Codec between stages, in both directions unless the next keys say otherwise. "
        "int8 has a scale per 64 values, int4 for at most 8 of a token: 8.25 and 5 bits a value.",
    )
    forward: Codec | None = Field(
        default=None, description="Codec of activations. Left out: activations."
    )
    backward: Codec | None = Field(
        default=None, description="Codec of the gradients of activations. Left out: activations."
    )
    boundaries: Annotated[tuple[BoundarySection, ...], BeforeValidator(list_to_tuple)] = Field(
        default=(),
        max_length=1023,
        description="Other codecs for single boundaries, each a table of boundary, forward and "
        "backward, the last two as above; boundary 0 lies between stages 0 and 1.",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest",
        description="How int8 and int4 round between stages; stochastic draws are the same "
        "whenever a microbatch is repeated.",
    )
    gradients: Literal["float32", "float16", "bfloat16", "int8"] = Field(
        default="float32",
        description="Codec of parameter gradients when replicas are averaged. float32 loses "
        "nothing: sums are sent as float32, what is added up as update.accumulate.",
    )


class UpdateSection(Section):
    """What one commit is."""

    policy: Literal["exact", "delayed"] = Field(
        default="exact",
        description="exact: each step counts each microbatch once. delayed: as exact, but "
        "averaging overlaps with the next step, whose first gradients are one step stale; for slow "
        "uplinks.",
    )
    ahead: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="delayed: share of a step's microbatches that are computed before the commit "
        "of the step before, one step stale: at least one, and all only with 1. Averaging is "
        "hidden behind them, and each costs loss.",
    )
    ahead_since: int = Field(
        default=200,
        ge=0,
        description="delayed: the step from which on microbatches are computed ahead. Stale "
        "gradients cost most while the loss still falls fast. A run of fewer steps is exact.",
    )
    accumulate: Literal["float64", "float32"] = Field(
        default="float64",
        description="float64: the same bits as one process, whatever fails. float32: half the "
        "memory, two thirds of the bytes, equal to about 1e-5 over 20 steps.",
    )


class ValidationSection(Section):
    """Loss on data that is not trained on, forward only, through the swarm."""

    every: CountOrZero = Field(default=0, description="Steps between validations; 0 never.")
    microbatches: Count = Field(default=4, description="Validation microbatches each time.")


class CheckpointSection(Section):
    """Checkpoints of the whole run."""

    every: CountOrZero = Field(default=0, description="Steps between checkpoints; 0 never.")
    keep: Count = Field(default=2, description="Complete checkpoints kept; older ones are deleted.")


class MemorySection(Section):
    """What a replica may hold."""

    kept_mib: Count = Field(
        default=512,
        description="Limit in MiB of answers a replica keeps until commit; what is evicted is "
        "recomputed when asked for again.",
    )


class RunConfig(Section):
    """A whole run.toml."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection
    data: DataSection = Field(default_factory=DataSection)
    batch: BatchSection = Field(default_factory=BatchSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    schedule: ScheduleSection
    wire: WireSection = Field(default_factory=WireSection)
    update: UpdateSection = Field(default_factory=UpdateSection)
    validation: ValidationSection = Field(default_factory=ValidationSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    memory: MemorySection = Field(default_factory=MemorySection)

    @property
    def run_id(self) -> str:
        """The first 32 hex digits of the sha256 of the canonical bytes."""
        return run_id_of(canonical_bytes(self))

    @property
    def ahead(self) -> Ahead:
        """Which of a step's microbatches may be computed before the commit of the one before."""
        if self.update.policy == "exact":
            return NONE
        first = all_of_them = self.batch.microbatches
        if self.update.ahead < 1:  # then not all by rounding either: that costs much loss
            first = min(max(1, round(self.update.ahead * all_of_them)), all_of_them - 1)
        return Ahead(first, all_of_them, self.update.ahead_since)

    @model_validator(mode="after")
    def _some_wait(self) -> Self:
        delayed = self.update.policy == "delayed"
        if delayed and self.update.ahead < 1 and self.batch.microbatches == 1:
            raise ValueError(
                f"update.ahead is {self.update.ahead:g}, but with batch.microbatches = 1 either "
                "all of a step is ahead or nothing",
                'set batch.microbatches to 2 or more, update.policy to "exact", or update.ahead '
                "to 1, which costs much loss",
            )
        return self

    @model_validator(mode="after")
    def _boundaries(self) -> Self:
        seen: set[int] = set()
        last = self.model.stages - 2
        for each in self.wire.boundaries:
            if each.boundary > last:
                raise ValueError(
                    f"wire.boundaries names boundary {each.boundary}, but {self.model.stages} "
                    f"stages have {last + 1}, counted from 0",
                    f"name one from 0 to {last}" if last >= 0 else "leave wire.boundaries out",
                )
            if each.boundary in seen:
                raise ValueError(
                    f"wire.boundaries names boundary {each.boundary} twice",
                    "give it one entry, with forward and backward",
                )
            seen.add(each.boundary)
        return self

    @model_validator(mode="after")
    def _something_is_rounded(self) -> Self:
        wire = self.wire
        forward, backward = wire.forward or wire.activations, wire.backward or wire.activations
        used = {each.forward or forward for each in wire.boundaries}
        used |= {each.backward or backward for each in wire.boundaries}
        if len(wire.boundaries) < self.model.stages - 1:
            used |= {forward, backward}
        if wire.rounding == "stochastic" and not any(each.startswith("int") for each in used):
            raise ValueError(
                'wire.rounding = "stochastic" has no meaning where no boundary has int8 or int4',
                "let a boundary have one of them, or leave wire.rounding out",
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        custom = self.model.pipeline is not None
        if custom != (self.data.source == "pipeline"):
            raise ValueError(
                'model.pipeline needs data.source = "pipeline"'
                if custom
                else 'data.source = "pipeline" needs model.pipeline'
            )
        if self.data.tokenizer == "pretrained" and self.model.pretrained is None:
            raise ValueError('data.tokenizer = "pretrained" needs model.pretrained')
        config = self.model.config
        if config is not None:
            complete_model_config(  # the dict is ours: validation made it
                config, vocab_size=self.data.vocab_size, sequence=self.data.sequence
            )
        return self
