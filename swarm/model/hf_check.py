"""The proofs, at run creation, that a config runs and that it can be cut.

It runs: shapes alone go through the whole model, since sizes that do not fit each other are found
by some families only in their forward. It can be cut: a tiny model of it, cut after every layer,
must draw the same first weights and give the same logits, loss and gradients as whole, bit for
bit. Key/value sharing between layers, recurrent state carried past layers and the like fail here,
with the first thing that differed as the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarm.errors import PipelineError
from swarm.model.hf_carve import build_model, find_layers
from swarm.model.hf_config import TINY_SEQUENCE, decoder_config, tiny_config
from swarm.model.huggingface import HuggingFacePipeline, token_loss
from swarm.model.stage import Batch, backward

SEED = 1


def check_runs(config: Any, sequence: int) -> None:
    """Raises PipelineError with the reason if a forward of `sequence` tokens fails.

    On the meta device, so it costs neither memory nor time. A family whose tiny model does not run
    there (its operations depend on the data) is not checked, nor is a model that has layers of
    kinds that its tiny one lacks.
    """
    tiny = tiny_config(config)
    same_kinds = {*kinds_of_layers(config)} <= {*kinds_of_layers(tiny)}
    if same_kinds and not _failure(tiny, TINY_SEQUENCE):
        why = _failure(config, sequence)
        if why:
            raise PipelineError(
                f"a {config.model_type} of these sizes does not run: {why}", "check [model.config]"
            )


def kinds_of_layers(config: Any) -> list[frozenset[type]]:
    """What each layer of a model is made of, in their order."""
    model = build_model(config, empty=True)
    layers = model.get_submodule(find_layers(model, decoder_config(config).num_hidden_layers))
    return [frozenset(type(module) for module in layer.modules()) for layer in layers.children()]


def _failure(config: Any, sequence: int) -> str:
    """What a training forward on the meta device raises; empty if nothing."""
    model = build_model(config, empty=True).to("meta").train()
    tokens = torch.zeros(1, sequence, dtype=torch.long, device="meta")
    mask = torch.zeros(1, 1, sequence, sequence, device="meta")  # making one looks at its values
    try:
        with torch.no_grad():
            model(input_ids=tokens, attention_mask=mask, use_cache=False)
    except Exception as error:  # whatever a family's own code raises
        return f"{type(error).__name__}: {error}"
    return ""


def check_splittable(config: Any) -> None:
    """Raises PipelineError with the reason if cutting models of this config changes numbers."""
    tiny = tiny_config(config)
    why = _difference(tiny, decoder_config(tiny).num_hidden_layers)
    if why:
        raise PipelineError(
            f"{config.model_type} cannot be cut into stages: {why}",
            "use another model, or [model] stages = 1",
        )


def _difference(tiny: Any, num_stages: int) -> str:
    def cut_into(stages: int) -> HuggingFacePipeline:
        return HuggingFacePipeline(
            tiny, num_stages=stages, microbatch_size=2, sequence=TINY_SEQUENCE, seed=SEED
        )

    try:
        pipeline = cut_into(num_stages)
        stages = [pipeline.build_stage(k) for k in range(num_stages)]
        for stage in stages:
            stage.eval()
        whole = cut_into(1).build_stage(0)
        first = dict(whole.named_parameters())
        parts = {name: p for stage in stages for name, p in stage.named_parameters()}
        if list(first) != pipeline.key_order or set(parts) != set(first):
            return "its parameters do not divide among the stages"
        for name, parameter in parts.items():
            if not torch.equal(parameter, first[name]):
                return f"{name} is initialised differently"
        model = build_model(tiny, empty=False).eval()
        model.load_state_dict(first, strict=False)
        return _compare(model, stages)
    except PipelineError as error:
        return error.message
    except Exception as error:  # whatever a family's own code raises when it is cut
        return f"{type(error).__name__}: {error}"


def _compare(model: Any, stages: list[Any]) -> str:
    generator = torch.Generator().manual_seed(SEED)
    vocab = decoder_config(model.config).vocab_size
    ids = torch.randint(0, vocab, (2, TINY_SEQUENCE + 1), generator=generator)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    logits = model(input_ids=batch["tokens"], use_cache=False).logits
    return compare(logits, dict(model.named_parameters()), batch, stages)


def compare(
    logits: Tensor, parameters: Mapping[str, Tensor], batch: Batch, stages: Sequence[Any]
) -> str:
    """How the stages differ from what gave `logits` with `parameters`, to the bit; empty if not."""
    loss = token_loss(logits, batch)
    loss.backward()
    entered: list[tuple[Tensor, ...]] = []
    left: list[tuple[Tensor, ...]] = []
    between: tuple[Tensor, ...] = ()
    for stage in stages:
        between = tuple(t.detach().contiguous().clone().requires_grad_() for t in between)
        entered.append(between)
        if stage.last and not torch.equal(stage.logits(between, batch), logits):
            return "its logits differ"
        between = stage(between, batch)
        left.append(between)
    if not torch.equal(between[0], loss):
        return "its loss differs"
    gradients: tuple[Tensor, ...] | None = None
    for position in reversed(range(len(stages))):
        gradients = backward(entered[position], left[position], gradients)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            expected = parameters[name].grad
            if (expected is None) != (parameter.grad is None):
                return f"{name} has a gradient only when whole or only when cut"
            if expected is not None and not torch.equal(expected, parameter.grad):
                return f"the gradient of {name} differs"
    return ""
