"""Any Hugging Face decoder-only model as a pipeline of stages.

Boundaries carry one tensor, the hidden states (microbatch, sequence, hidden), or with
`[model] subspace` their k coordinates in the subspace (`swarm.model.subspace`). With
`dtype = "bfloat16"` the model runs under autocast over float32 parameters; the hidden states have
the dtype the model gives them there, float32 for nearly all families since the residual stream is
kept in float32, so the cut changes no number. (`[wire] activations` chooses what the wire carries.)
The loss is the sum of the token losses, in float32. Auxiliary router losses are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.local_path import expanded
from swarm.model.cut import choose_cut, stage_range
from swarm.model.hf_carve import Anatomy, Reached, build_model, carve, trace
from swarm.model.hf_config import (
    check_config,
    decoder_config,
    inline_config,
    is_tied,
    pretrained_config,
    untied,
)
from swarm.model.hf_weights import allocate, check_weights, draw, load
from swarm.model.stage import Batch, ModelPipeline, Stage, torch_dtype
from swarm.model.subspace import FROZEN_SCALE, Basis, constrain, fold
from swarm.spec import TensorSpec, token_dtype

if TYPE_CHECKING:
    from swarm.config import RunConfig

IGNORED = -100  # torch's own mark for a target without a loss


def token_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Sum of the cross entropies of `targets`, in float32; where `mask` is 0 there is no loss."""
    targets = batch["targets"].long()
    if "mask" in batch:
        targets = targets.masked_fill(batch["mask"] == 0, IGNORED)
    return F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


class HuggingFaceStage(Stage):
    """A carved model. `logits` is the last stage's forward without the loss."""

    def __init__(
        self,
        model: Any,
        anatomy: Anatomy,
        span: tuple[int, int],
        *,
        seed: int,
        recompute: bool,
        autocast: torch.dtype | None,
        basis: Basis | None = None,
    ) -> None:
        start, end = span
        layers = model.get_submodule(anatomy.layers)
        inbox = carve(model, anatomy, start, end)
        super().__init__(model, seed)
        self.first, self.last = start == 0, end == len(layers)
        self.autocast, self.inbox, self.basis = autocast, inbox, basis
        self.hidden_dtype = anatomy.hidden_dtype
        self._frozen: Tensor | None = None  # of the microbatch whose forward is running
        for index in range(start, end):
            unit = f"{anatomy.layers}.{index}"
            run = self.unit_runner(unit, layers[index].forward, recompute)
            if basis is not None and start < index <= basis.layers:
                run = self._through(basis, run)
            elif autocast is not None and start < index:
                run = self._cast(run)
            layers[index].forward = run
        if self.last:
            layers[end - 1].register_forward_hook(lambda *_: self.reseed("(head)"))

    def forward(self, inputs: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, ...]:
        if self.last:
            return (token_loss(self.logits(inputs, batch), batch),)
        return (self._run(inputs, batch),)

    def logits(self, inputs: tuple[Tensor, ...], batch: Batch) -> Tensor:
        return self._run(inputs, batch)

    def _through(self, basis: Basis, run: Callable[..., Any]) -> Callable[..., Any]:
        """A layer that gets its input as a cut before it would deliver it, rounding included."""

        def narrowed(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self._frozen is not None
            r = basis.project(hidden, self._frozen)
            return run(basis.rebuild(r, self._frozen), *args, **kwargs)

        return narrowed

    def _cast(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A layer that gets its input in the dtype that crosses a boundary before it, on a GPU too,
        whose autocast leaves more in float32 than the CPU's, which was asked."""

        def cast(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return run(hidden_states.to(self.hidden_dtype), *args, **kwargs)

        return cast

    def _run(self, inputs: tuple[Tensor, ...], batch: Batch) -> Tensor:
        given: dict[str, Any] = {
            name: batch[name].long() for name in ("position_ids", "attention_mask") if name in batch
        }
        if self.basis is not None:
            self._frozen = self.basis.frozen(batch["tokens"])
        if self.first:
            given["input_ids"] = batch["tokens"].long()
        else:
            hidden = inputs[0]
            if self.basis is not None:
                assert self._frozen is not None
                hidden = self.basis.rebuild(hidden, self._frozen)
            self.inbox.hidden = hidden
            given["inputs_embeds"] = hidden.detach().float()  # as embeddings are, before any layer
        device = batch["tokens"].device.type
        self.reseed("(embedding)")
        try:
            with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
                output: Tensor = self.inner(**given, use_cache=False).logits
                return output
        except Reached as reached:
            if self.basis is not None:
                assert self._frozen is not None
                return self.basis.project(reached.hidden, self._frozen)
            return reached.hidden.to(self.hidden_dtype)
        finally:
            self.inbox.hidden = self._frozen = None


class HuggingFacePipeline(ModelPipeline):
    """A Hugging Face config cut into stages. Raises PipelineError for what cannot be cut.

    With `pretrained`, a local directory, stages start from its weights; a model whose output layer
    is tied to its embedding is untied, the output starting as a copy.

    `check()` proves on a tiny model of the config that the cut changes no bit; it is for the one
    who starts a run, peers need not repeat it.
    """

    def __init__(
        self,
        config: Any,
        *,
        seed: int,
        num_stages: int,
        microbatch_size: int,
        sequence: int,
        vocab_size: int | None = None,
        cut: Sequence[int] | None = None,
        recompute: bool = False,
        dtype: str = "float32",
        pretrained: Path | None = None,
        subspace: int | None = None,
        subspace_layers: int | None = None,
    ) -> None:
        tied = pretrained is not None and is_tied(config)
        if tied:  # one weight cannot be on two stages: the output starts as a copy
            config = untied(config)
        text = decoder_config(config)
        vocab_size = text.vocab_size if vocab_size is None else vocab_size
        check_config(config, vocab_size=vocab_size, sequence=sequence)
        self.config, self._text, self.seed, self.recompute = config, text, seed, recompute
        self.pretrained = pretrained
        self.num_stages = num_stages
        self.autocast = None if dtype == "float32" else torch_dtype(dtype)
        self.anatomy = trace(config, self.autocast)
        tokens = TensorSpec((microbatch_size, sequence), token_dtype(vocab_size), vocab_size)
        self.batch_spec = {"tokens": tokens, "targets": tokens}
        self.basis = None
        if subspace is not None:
            layers = text.num_hidden_layers - 1 if subspace_layers is None else subspace_layers
            std = _frozen_std(text)
            self.basis = Basis(text.hidden_size, subspace, text.vocab_size, std, seed, layers)
        skeleton = self._skeleton(self.basis)
        # Of the untied: which parameter takes whose weight in the directory.
        self.copied = _output_from_input(skeleton) if tied else {}
        names = {name for name, _ in skeleton.named_parameters()}
        self.key_order = [key for key in skeleton.state_dict() if key in names]
        self.layer_costs = _costs(skeleton, text, self.anatomy, sequence)
        self.cut = choose_cut(self.layer_costs, num_stages, cut, self.latest_boundary)
        if self.basis is not None:
            self.basis.check_layers(self.cut)
        hidden_dtype = str(self.anatomy.hidden_dtype).removeprefix("torch.")
        self._hidden = TensorSpec((microbatch_size, sequence, text.hidden_size), hidden_dtype)
        if subspace is not None:
            self._hidden = TensorSpec((microbatch_size, sequence, subspace), "float32")

    @classmethod
    def from_config(cls, config: RunConfig) -> HuggingFacePipeline:
        model = config.model
        directory = expanded(model.pretrained) if model.pretrained else None
        if directory is not None:
            hf_config = pretrained_config(directory)
        else:
            assert model.config is not None
            hf_config = inline_config(dict(model.config), config.data.vocab_size)
        return cls(
            hf_config,
            seed=config.run.seed,
            num_stages=model.stages,
            microbatch_size=config.batch.microbatch_size,
            sequence=config.data.sequence,
            vocab_size=config.data.vocab_size,
            cut=model.cut,
            recompute=model.recompute,
            dtype=model.dtype,
            pretrained=directory,
            subspace=model.subspace,
            subspace_layers=model.subspace_layers,
        )

    def _skeleton(self, basis: Basis | None) -> Any:
        model = build_model(self.config, empty=True)
        if basis is not None:
            constrain(model, self.anatomy, basis)
        return model

    @property
    def latest_boundary(self) -> int:
        last = super().latest_boundary
        return last if self.basis is None else min(self.basis.layers, last)

    @property
    def shared_bytes(self) -> int:
        return 0 if self.basis is None else self.basis.table_bytes

    def differs_from(self, config: Mapping[str, Any]) -> str:
        if self.basis is None:
            return ""
        text = decoder_config(
            inline_config(dict(config["model"]["config"]), config["data"]["vocab_size"])
        )
        same = (config["run"]["seed"], _frozen_std(text)) == (self.seed, _frozen_std(self._text))
        return "" if same else "its subspace is that of another run.seed or initializer_range"

    def plain(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of the run as those of a model that any program loads."""
        if self.basis is None:
            return tensors
        return fold(self._skeleton(self.basis), tensors, self.basis)

    def boundary(self, stage: int) -> tuple[TensorSpec, ...]:
        return (self._hidden,)

    def build_stage(self, stage: int, device: str | torch.device = "cpu") -> HuggingFaceStage:
        basis = None if self.basis is None else self.basis.to(device)
        model = self._skeleton(basis)
        built = HuggingFaceStage(
            model,
            self.anatomy,
            stage_range(self.cut, stage),
            seed=self.seed,
            recompute=self.recompute,
            autocast=self.autocast,
            basis=basis,
        )
        if torch.device(device).type != "meta":  # of which only names and shapes are wanted
            allocate(model)
            if self.pretrained is None:
                draw(model, self.seed)
            else:
                load(model, self.pretrained, self.copied, self.autocast or torch.float32)
        model.to(device)
        built.refresh_names()
        return built

    def weight(self, batch: Mapping[str, Any]) -> int:
        if "mask" in batch:
            return int((batch["mask"] != 0).sum())
        return math.prod(batch["targets"].shape)

    def check(self) -> None:
        """Raises PipelineError unless the sizes fit each other, a tiny model, cut after every
        layer, equals itself whole, and its residual stream stays in the subspace, if it has one;
        ConfigError where the pretrained weights are not the model's."""
        from swarm.model.hf_check import check_runs, check_splittable

        if self.pretrained is not None:
            whole = self._skeleton(self.basis)
            check_weights(whole, self.pretrained, self.anatomy.layers, self.copied)
        check_runs(self.config, self.batch_spec["tokens"].shape[1])
        if self.num_stages > 1:
            check_splittable(self.config)
        if self.basis is not None:
            from swarm.model.subspace_check import check_subspace

            check_subspace(self.config, self.basis)


def _frozen_std(text: Any) -> float:
    """Of the token table that a subspace has beside it."""
    return FROZEN_SCALE * float(getattr(text, "initializer_range", 0.02))


def _output_from_input(model: Any) -> dict[str, str]:
    """The name of the output layer's weight, and whose copy it is where both are tied."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    output, source = model.get_output_embeddings(), model.get_input_embeddings()
    return {names[id(output.weight)]: names[id(source.weight)]}


def _costs(skeleton: Any, text: Any, anatomy: Anatomy, sequence: int) -> list[int]:
    """Multiplications per token: matrices (of the experts that are active), attention, the head."""
    active = getattr(text, "num_experts_per_tok", None)

    def matrices(module: Any) -> int:
        total = 0
        for parameter in module.parameters():
            size = parameter.numel()
            if parameter.ndim == 3 and isinstance(active, int):
                size = size * active // parameter.shape[0]
            total += size if parameter.ndim >= 2 else 0
        return total

    layers = skeleton.get_submodule(anatomy.layers)
    costs = [1 + matrices(layer) + sequence * text.hidden_size for layer in layers]
    costs[-1] += sum(matrices(skeleton.get_submodule(name)) for name in anatomy.after)
    return costs
