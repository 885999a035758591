"""The subspace model: cuts change no bit, `r` alone loses nothing, export gives a plain model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from peer.baseline import Baseline
from swarm.data.tokenizer import byte_tokenizer
from swarm.errors import PipelineError
from swarm.model.export import export_model
from swarm.model.hf_config import inline_config
from swarm.model.huggingface import HuggingFacePipeline, HuggingFaceStage, token_loss
from swarm.model.subspace import WRITERS, Basis, SubspaceLinear, orthonormal
from swarm.wire.boundaries import BoundaryCodecs
from tests.protocol.simulated import OPTIMIZER, Fault, Swarm, plan

torch.set_num_threads(1)  # as in tests/protocol: threads that share busy cores wait for each other

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4, "max_position_embeddings": 32}  # fmt: skip
EXPERTS = {"num_hidden_layers": 5, "num_key_value_heads": 4, "moe_intermediate_size": 32}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "qwen3": {**SIZES, "num_key_value_heads": 4, "head_dim": 16},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 32, **NO_DROPOUT},
}
# Whose writers have yet other names.
OTHER_NAMES: dict[str, dict[str, Any]] = {
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 32, "rotary_dim": 8,
             **NO_DROPOUT},
    "gpt_neox": SIZES,
    "phi": {**SIZES, "num_key_value_heads": 4},
    "lfm2": {**SIZES, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"] * 2},
}  # fmt: skip


def a_pipeline(family: str = "llama", stages: int = 1, k: int = 16, **more: Any) -> Any:
    sizes = (FAMILIES | OTHER_NAMES).get(family, SIZES)
    values = {"model_type": family, **sizes, **more.pop("config", {})}
    return HuggingFacePipeline(
        inline_config(values, 256), seed=3, num_stages=stages, microbatch_size=2, sequence=16,
        subspace=k, **more,
    )  # fmt: skip


def a_batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    ids = ids.to(torch.uint8)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def trained(pipeline: HuggingFacePipeline) -> HuggingFaceStage:
    """The whole model with parameters as if trained: none is at its first value."""
    whole = pipeline.build_stage(0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in whole.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    return whole


@pytest.mark.parametrize("layers", [None, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_proves_cuts_containment_and_folding(family: str, layers: int | None) -> None:
    pipeline = a_pipeline(family, 2, cut=(2, 2), subspace_layers=layers)
    pipeline.check()
    (spec,) = pipeline.boundary(0)
    assert (spec.shape, spec.dtype) == ((2, 16, 16), "float32")


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_the_check_proves_writers_of_other_names(family: str) -> None:
    a_pipeline(family, 2, cut=(2, 2)).check()


def test_every_name_of_a_writer_is_in_a_family_that_the_check_accepts() -> None:
    found = {
        name.rpartition(".")[2]
        for family in (*FAMILIES, *OTHER_NAMES)
        for name, module in a_pipeline(family).build_stage(0, "meta").inner.named_modules()
        if isinstance(module, SubspaceLinear)
    }
    assert found == {*WRITERS}


@pytest.mark.parametrize(("given", "narrow"), [(None, 3), (2, 2), (4, 4)])
def test_the_last_layers_are_those_of_a_plain_model(given: int | None, narrow: int) -> None:
    """Nothing they write crosses a boundary; the output is read from all of hidden."""
    whole = a_pipeline(subspace_layers=given).build_stage(0, "meta")
    shapes = {name: tuple(each.shape) for name, each in whole.named_parameters()}
    for name, inputs in (("mlp.down_proj", 96), ("self_attn.o_proj", 64)):
        writers = [shapes[f"model.layers.{index}.{name}.weight"] for index in range(4)]
        assert writers == [(16, inputs)] * narrow + [(64, inputs)] * (4 - narrow)


def test_all_that_sends_writes_into_the_subspace() -> None:
    a_pipeline(stages=3, cut=(1, 1, 2), subspace_layers=2)
    with pytest.raises(PipelineError, match=r"with \[1, 2, 1\] layers a stage 3 come before") as no:
        a_pipeline(stages=3, cut=(1, 2, 1), subspace_layers=2)
    assert no.value.remedy.endswith("let the last stage begin after at most 2 layers")
    with pytest.raises(PipelineError, match="2 come before") as no:
        a_pipeline(stages=3, subspace_layers=1)
    assert no.value.remedy == "set it to 2 in a new run", "no cut leaves less"
    with pytest.raises(PipelineError, match="subspace_layers is 5 but the model has 4 layers"):
        a_pipeline(subspace_layers=5)


def test_the_balanced_cut_is_one_that_the_subspace_allows() -> None:
    """Layers that write to all of the stream are dearer, and the head is: without a bound the last
    stage would have one of them."""
    assert a_pipeline(stages=2, k=1).cut == (3, 1)
    assert a_pipeline(stages=2, k=1, subspace_layers=2).cut == (2, 2)


def test_parameters_mean_something_in_their_own_subspace_alone() -> None:
    """Names and shapes would fit."""
    values = {"model_type": "llama", **FAMILIES["llama"]}
    config = {"run": {"seed": 3}, "model": {"config": values}, "data": {"vocab_size": 256}}
    pipeline = a_pipeline()
    assert not pipeline.differs_from(config)
    assert "run.seed" in pipeline.differs_from({**config, "run": {"seed": 4}})
    wider = {"config": {**values, "initializer_range": 0.03}}
    assert "initializer_range" in pipeline.differs_from({**config, "model": wider})


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("gpt2", {"resid_pdrop": 0.1}, "layer 0 adds"),
        ("gpt2", {"embd_pdrop": 0.1}, "what enters layer 0"),
        ("gemma2", {"head_dim": 16}, "no plain embedding"),
        ("olmo2", {}, "layer 0 adds"),
        ("mixtral", {"num_local_experts": 4}, "layer 0 of MixtralForCausalLM 1 of what writes"),
        ("bloom", {}, "LayerNorm"),
        # experts in a layer of a tiny model that must not have them, in its last layer alone, which
        # may but stands for one that must not, and in none of its layers
        ("deepseek_v3", {**EXPERTS, "first_k_dense_replace": 2}, "layer 2 adds"),
        ("deepseek_v3", {**EXPERTS, "first_k_dense_replace": 3}, "layers of a kind"),
        ("deepseek_v3", {**EXPERTS, "first_k_dense_replace": 4}, "layers of a kind"),
    ],
)
def test_others_are_refused_with_the_reason(family: str, config: dict, said: str) -> None:
    sizes = {"hidden_size": 64, "n_layer": 4, "n_head": 4} if family == "bloom" else {}
    sizes = sizes or FAMILIES.get(family, SIZES)
    values = {"model_type": family, **sizes, **config}
    with pytest.raises(PipelineError, match=said):
        HuggingFacePipeline(
            inline_config(values, 256), seed=3, num_stages=1, microbatch_size=2, sequence=16,
            subspace=16,
        ).check()  # fmt: skip


def test_k_must_be_below_hidden() -> None:
    with pytest.raises(PipelineError, match="subspace is 64 but"):
        a_pipeline(k=64)


def test_the_frozen_table_is_made_where_a_stage_is_and_counted() -> None:
    pipeline = a_pipeline(stages=2)
    pipeline.build_stage(1, "meta")  # whoever only counts parameters
    assert "table" not in vars(pipeline.basis)
    assert pipeline.build_stage(1).basis.table is pipeline.basis.table
    assert pipeline.shared_bytes == 4 * pipeline.basis.table.numel() == 4 * 256 * 64


def test_a_frozen_table_that_fits_nowhere() -> None:
    basis = Basis(64, 8, vocab_size=1 << 50, std=1.0, seed=1, layers=2)
    with pytest.raises(PipelineError, match="no memory for the frozen table"):
        basis.to("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_sending_only_r_does_not_change_the_loss(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same model whose residual stream flows on whole."""
    whole, batch = trained(a_pipeline(family)), a_batch()
    whole.eval()
    with torch.no_grad():
        through = whole.logits((), batch)
        monkeypatch.setattr(Basis, "project", lambda self, hidden, frozen: hidden)
        monkeypatch.setattr(Basis, "rebuild", lambda self, r, frozen: r)
        straight = whole.logits((), batch)
    assert not torch.equal(through, straight)
    losses = [token_loss(logits.double(), batch) / 32 for logits in (through, straight)]
    assert abs(float(losses[0] - losses[1])) <= 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_sending_only_r_does_not_change_the_gradients(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way back: what is lost between two layers lies outside the subspace, where no parameter
    before them can move the stream. Within 1e-6 of the gradient of the whole stream, and each
    parameter's own within 3e-6: what float32 rounds off the smallest."""
    whole, batch = trained(a_pipeline(family)), a_batch()
    whole.eval()

    def gradients() -> dict[str, Tensor]:
        whole.zero_grad()
        whole((), batch)[0].backward()
        return {name: parameter.grad.double() for name, parameter in whole.named_parameters()}

    through = gradients()
    monkeypatch.setattr(Basis, "project", lambda self, hidden, frozen: hidden)
    monkeypatch.setattr(Basis, "rebuild", lambda self, r, frozen: r)
    straight = gradients()
    apart = {name: float((through[name] - each).norm()) for name, each in straight.items()}
    norms = {name: float(each.norm()) for name, each in straight.items()}
    assert 0.0 < math.hypot(*apart.values()) <= 1e-6 * math.hypot(*norms.values())
    for name, norm in norms.items():
        assert norm > 0.0, name
        assert apart[name] <= 3e-6 * norm, (name, apart[name] / norm)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_sending_only_r_loses_less_than_bfloat16_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of logits and gradients, against the same model whose stream flows on whole."""
    batch = a_batch()

    def computed(dtype: str) -> tuple[Tensor, Tensor]:
        whole = trained(a_pipeline(family, dtype=dtype))
        whole.eval()
        whole((), batch)[0].backward()
        gradients = [parameter.grad.flatten() for _, parameter in whole.named_parameters()]
        return whole.logits((), batch).detach().double(), torch.cat(gradients).double()

    through = computed("bfloat16")
    monkeypatch.setattr(Basis, "project", lambda self, hidden, frozen: hidden)
    monkeypatch.setattr(Basis, "rebuild", lambda self, r, frozen: r)
    straight, exact = computed("bfloat16"), computed("float32")
    assert not torch.equal(through[1], straight[1])
    for sent, flowed, unrounded in zip(through, straight, exact, strict=True):
        rounding = float((flowed - unrounded).norm())
        assert 0.0 < rounding <= 0.01 * float(unrounded.norm())
        assert float((sent - flowed).norm()) <= 0.7 * rounding


def test_the_basis_is_orthonormal_and_has_the_same_bits_everywhere() -> None:
    for rows, columns in ((7, 3), (128, 32), (384, 64)):
        u = orthonormal(rows, columns, 5).double()
        assert float((u.T @ u - torch.eye(columns)).abs().max()) < 1e-7
        assert not torch.equal(u, orthonormal(rows, columns, 6).double())
    assert bytes(orthonormal(4, 2, 5).numpy()).hex() == (
        "70bd33beef50fc3c37a07b3f315c19bdaf91843b6339333f7964623d0260363f"
    )


@pytest.mark.parametrize("layers", [None, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_is_a_plain_model_with_the_same_logits(
    family: str, layers: int | None, tmp_path: Path
) -> None:
    pipeline, batch = a_pipeline(family, subspace_layers=layers), a_batch()
    whole = trained(pipeline)
    whole.eval()
    export_model(pipeline, dict(whole.named_parameters()), tmp_path / "out", byte_tokenizer())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = plain(input_ids=batch["tokens"].long(), use_cache=False).logits
        torch.testing.assert_close(logits, whole.logits((), batch), rtol=1e-4, atol=1e-5)
        assert float(token_loss(logits, batch)) == pytest.approx(float(whole((), batch)[0]), 1e-6)


class Batches:
    """Token batches by (step, index)."""

    def batch(self, step: int, index: int) -> Mapping[str, np.ndarray]:
        ids = np.random.default_rng((step, index)).integers(0, 256, (2, 17), dtype=np.uint8)
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    def validation_batch(self, index: int) -> Mapping[str, np.ndarray]:
        return self.batch(999, index)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_swarm_that_loses_a_replica_ends_as_one_process(dtype: str) -> None:
    """I6, with only `r` on the wire and activations recomputed in the backward."""
    options: Any = {"subspace_layers": 2, "dtype": dtype}
    whole = Baseline(plan(), a_pipeline(**options), Batches(), OPTIMIZER)
    list(whole.steps(3))
    fault = Fault("counted", "kill", replica="r1.1", step=1)
    swarm = Swarm(batches=Batches(), faults=[fault])
    swarm.pipeline = a_pipeline(stages=3, cut=(1, 1, 2), recompute=True, **options)
    assert swarm.pipeline.boundary(0)[0].dtype == "float32", "r is not rounded to send it"
    assert swarm.run()["sha256"] == whole.report()["sha256"]
    assert swarm.fired


def recommended(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Swarm:
    """What docs/results.md recommends for homes, rounded stochastically."""
    nesterov = SimpleNamespace(**{**vars(OPTIMIZER), "nesterov": True})
    monkeypatch.setattr("tests.protocol.simulated.OPTIMIZER", nesterov)
    codecs = BoundaryCodecs("int4", "int4", seed=5)
    swarm = Swarm(batches=Batches(), policy="delayed", ahead=1, codecs=codecs, **more)
    swarm.pipeline = a_pipeline(stages=3, recompute=True)
    swarm.thin_between_twins(5e6)  # so that the next step begins before the commit
    return swarm


def a_death() -> Fault:
    """Of whom the first microbatch of a step is lost: it was computed before a commit that is
    there when it is computed again."""
    return Fault("counted", "kill", replica="r1.0", step=1, count=2)


def test_the_recommended_setting_ends_as_without_replicas_and_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it together: `r` alone in int4, one step stale, answers evicted, a replica lost."""
    alone = recommended(monkeypatch, replicas=(1, 1, 1)).run()["sha256"]
    swarm = recommended(monkeypatch, kept_bytes=1, faults=[a_death()])
    assert swarm.run()["sha256"] == alone
    assert swarm.fired
    assert swarm.evictions()
    counted = [
        (told["step"], told["index"])
        for _, who, point, told in swarm.events
        if (who, point) == ("r1.0", "counted")
    ]
    assert (1, 0) in counted, "another death than is meant"


def test_the_recommended_setting_with_rounded_gradients_keeps_replicas_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is rounded in the all-reduce depends on who counted what, so the end is another one; but
    twins end alike (`Swarm.hashes`), without ever having been told to become so."""
    swarm = recommended(monkeypatch, kept_bytes=1, gradients="int8", faults=[a_death()])
    swarm.run()
    assert swarm.fired
    assert swarm.evictions()
    assert not {point for _, _, point, _ in swarm.events} & {"round_failed", "diverged", "failed"}
    expelled = {told["replica"] for _, _, point, told in swarm.events if point == "expelled"}
    assert expelled == {"r1.0#1"}
    losses = [result.loss for result in swarm.results]
    assert losses == pytest.approx([math.log(256)] * 3, rel=1e-2), "random bytes teach nothing"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_stages_of_one_device_share_a_frozen_table(device: str) -> None:
    """It may be a gigabyte, and the delayed policy builds a stage three times."""
    pipeline = a_pipeline()
    assert pipeline.basis is not None
    one, other = (pipeline.build_stage(0, device).basis for _ in range(2))
    assert one is not None
    assert one is other
    assert one.table.device.type == device
    assert pipeline.basis.to("cpu").table is pipeline.basis.table
