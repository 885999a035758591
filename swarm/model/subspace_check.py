"""The proof, at run creation, that a config's residual stream can live in a subspace.

A tiny model of the config is built with the constraint. Three things must hold: cut after every
layer it equals itself whole, to the bit; whatever its parameters, nothing but `frozen(tokens)` lies
outside the subspace before any layer (a norm or a dropout behind a projection would put it there, a
scaled embedding scales the frozen part); and folded into plain parameters it gives the logits of
the library's own model. And the tiny model must have every kind of layer that the config has, and
among its first, which are constrained, every kind that the config has there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swarm.errors import PipelineError
from swarm.model.hf_carve import build_model
from swarm.model.hf_check import SEED, compare, kinds_of_layers
from swarm.model.hf_config import TINY_SEQUENCE, decoder_config, tiny_config
from swarm.model.huggingface import HuggingFacePipeline, HuggingFaceStage
from swarm.model.stage import Batch
from swarm.model.subspace import NOT_WRITERS, Basis

TINY_SUBSPACE = 8
OUTSIDE = 1e-5  # of the norm: rounding leaves 1e-7
LOGITS = 1e-4


def check_subspace(config: Any, basis: Basis) -> None:
    """Raises PipelineError with the reason if models of this config leave the subspace."""
    tiny = tiny_config(config)
    try:
        why = _difference(config, tiny, basis)
    except PipelineError:
        raise
    except Exception as error:  # whatever a family's own code raises
        why = f"{type(error).__name__}: {error}"
    if why:
        raise PipelineError(f"subspace: {config.model_type} cannot have one: {why}", NOT_WRITERS)


def _difference(config: Any, tiny: Any, basis: Basis) -> str:
    layers = decoder_config(tiny).num_hidden_layers
    narrow = min(basis.layers, max(layers - 1, 1))

    def cut_into(cut: Sequence[int]) -> HuggingFacePipeline:
        return HuggingFacePipeline(
            tiny,
            num_stages=len(cut),
            cut=cut,
            microbatch_size=2,
            sequence=TINY_SEQUENCE,
            seed=SEED,
            subspace=min(basis.k, TINY_SUBSPACE),
            subspace_layers=narrow,
        )

    apart = [1] * narrow + [layers - narrow] * (narrow < layers)
    pipeline, one = cut_into(apart), cut_into([layers])
    real, few = kinds_of_layers(config), kinds_of_layers(tiny)
    if not ({*real} <= {*few} and {*real[: basis.layers]} <= {*few[:narrow]}):
        return "it has layers of a kind that a model of its first few lacks"
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(
        0, decoder_config(tiny).vocab_size, (2, TINY_SEQUENCE + 1), generator=generator
    )
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    whole = one.build_stage(0)
    _disturb(whole, generator)
    if why := _outside(whole, one.anatomy.layers, batch):
        return why
    stages = [pipeline.build_stage(stage) for stage in range(len(apart))]
    values = dict(whole.named_parameters())
    for stage in stages:
        stage.eval()
        with torch.no_grad():
            for name, parameter in stage.named_parameters():
                parameter.copy_(values[name])
    whole.eval()
    logits = whole.logits((), batch)
    plain = build_model(tiny, empty=False).eval()
    plain.load_state_dict(one.plain({n: p.detach() for n, p in values.items()}), strict=False)
    with torch.no_grad():
        error = plain(input_ids=batch["tokens"], use_cache=False).logits - logits
        close = float(error.abs().max()) <= LOGITS * float(logits.abs().max())
    if not close:
        return "its logits differ when folded into a plain model"
    return compare(logits, values, batch, stages)


@torch.no_grad()
def _disturb(stage: HuggingFaceStage, generator: torch.Generator) -> None:
    """Away from first values, among which norms are 1 and biases 0 and hide what they would do."""
    for _, parameter in stage.named_parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@torch.no_grad()
def _outside(whole: HuggingFaceStage, layers: str, batch: Batch) -> str:
    """Where the stream of a training forward leaves the subspace; empty if nowhere."""
    basis, found = whole.basis, []
    assert basis is not None
    frozen = basis.frozen(batch["tokens"])

    def seen(place: str, hidden: Tensor) -> None:
        rest = hidden.double() - frozen.double()
        u = basis.u.double()
        rest = rest - (rest @ u) @ u.T
        if not float(rest.norm()) <= OUTSIDE * float(hidden.norm()):
            found.append(place)

    def hook(place: str) -> Any:
        return lambda module, args: seen(place, args[0])

    modules = list(whole.inner.get_submodule(layers).children())[: basis.layers + 1]
    handles = [
        module.register_forward_pre_hook(
            hook(f"layer {index - 1} adds" if index else "what enters layer 0 has")
        )
        for index, module in enumerate(modules)
    ]
    whole.train()
    whole.logits((), batch)
    for handle in handles:
        handle.remove()
    if not found:
        return ""
    return (
        f"{found[0]} something outside of it (a norm, a scale or dropout behind a projection; "
        "dropout on the residual stream must be 0)"
    )
