"""Hugging Face models cut in stages compute the bits of the whole model."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.config_model import complete_model_config
from swarm.errors import ConfigError, PipelineError
from swarm.model import ParameterLayout, backward, model_sha256
from swarm.model.export import export_model
from swarm.model.hf_carve import Anatomy, build_model, trace
from swarm.model.hf_check import check_splittable
from swarm.model.hf_config import inline_config, max_positions, pretrained_config
from swarm.model.huggingface import HuggingFacePipeline, token_loss

SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 5, "intermediate_size": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 5, "n_positions": 64},
    "qwen3": {**SMALL, "head_dim": 8},
    "mistral": {**SMALL, "sliding_window": 6},
    "gemma": {**SMALL, "head_dim": 8},
    "gemma2": {**SMALL, "head_dim": 8, "sliding_window": 6},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def pipeline_of(family: str, cut: list[int], **more: Any) -> HuggingFacePipeline:
    values = {"model_type": family, **FAMILIES[family], **more.pop("config", {})}
    return HuggingFacePipeline(
        inline_config(values, 64), seed=3, num_stages=len(cut), cut=cut, microbatch_size=2,
        sequence=16, **more,
    )  # fmt: skip


def a_batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))
    ids = ids.to(torch.uint8)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def run(pipeline: HuggingFacePipeline, train: bool = False) -> tuple[str, dict[str, Tensor]]:
    """Hash of the first weights, and the loss, logits (if not training) and gradients."""
    hashes: dict[str, str] = {}
    stages = [pipeline.build_stage(k) for k in range(pipeline.num_stages)]
    batch, inputs, outputs = a_batch(), [], []
    between: tuple[Tensor, ...] = ()
    found: dict[str, Tensor] = {}
    for k, stage in enumerate(stages):
        layout = ParameterLayout.of(stage)
        hashes |= layout.tensor_sha256(layout.flatten(stage))
        stage.train(train)
        stage.set_microbatch(5, 7)
        between = tuple(t.detach().contiguous().clone().requires_grad_() for t in between)
        inputs.append(between)
        if stage.last and not train:
            found["logits"] = stage.logits(between, batch).detach()
        between = stage(between, batch)
        outputs.append(between)
        if k < len(stages) - 1:
            (spec,) = pipeline.boundary(k)
            assert between[0].shape == spec.shape
            assert str(between[0].dtype) == f"torch.{spec.dtype}"
    found["loss"] = between[0].detach()
    for stage in stages:
        stage.set_microbatch(0, 0)  # what a recomputation must not look at
    gradients: tuple[Tensor, ...] | None = None
    for k in reversed(range(len(stages))):
        gradients = backward(inputs[k], outputs[k], gradients)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:  # an expert that no token chose has none
                found[name] = parameter.grad
            assert parameter.data_ptr() % 64 == 0
    return model_sha256(hashes, pipeline.key_order), found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_three_stages_equal_the_library_s_whole_model(family: str) -> None:
    pipeline = pipeline_of(family, [2, 2, 1])
    _, split = run(pipeline)
    model = build_model(pipeline.config, empty=False).eval()
    parts = [pipeline.build_stage(k) for k in range(3)]
    weights = {name: p for part in parts for name, p in part.named_parameters()}
    assert set(weights) == set(pipeline.key_order)
    assert pipeline.key_order == [name for name, _ in model.named_parameters()]
    model.load_state_dict(weights, strict=False)
    batch = a_batch()
    logits = model(input_ids=batch["tokens"].long(), use_cache=False).logits
    loss = token_loss(logits, batch)
    loss.backward()
    whole = {"logits": logits.detach(), "loss": loss.detach()}
    whole |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_same(whole, split)
    assert len(whole) == len(weights) + 2
    assert loss > 0


@pytest.mark.parametrize("more", [{}, {"recompute": True}, {"dtype": "bfloat16"}], ids=str)
def test_dropout_and_weights_are_the_same_whatever_the_cut(more: dict[str, Any]) -> None:
    whole_hash, whole = run(pipeline_of("gpt2", [5]), train=True)
    if "dtype" in more:
        whole_hash, whole = run(pipeline_of("gpt2", [5], **more), train=True)
    for cut in ([1, 3, 1], [4, 1]):
        split_hash, split = run(pipeline_of("gpt2", cut, **more), train=True)
        assert split_hash == whole_hash
        assert_same(whole, split)


def test_bfloat16_computes_so_over_float32_weights() -> None:
    _, exact = run(pipeline_of("gpt2", [2, 3]))
    _, rounded = run(pipeline_of("gpt2", [2, 3], dtype="bfloat16"))
    assert not torch.equal(exact["logits"], rounded["logits"])
    assert torch.allclose(exact["logits"], rounded["logits"].float(), atol=0.05)
    assert {
        p.dtype for p in pipeline_of("gpt2", [5], dtype="bfloat16").build_stage(0).parameters()
    } == {torch.float32}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_device_whose_autocast_leaves_more_in_float32_sends_what_is_expected(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is asked what crosses a boundary is a CPU. Here all leave the stream in float32, and
    bfloat16 is expected: that is what crosses (`run` looks), and the cut changes no bit."""

    def narrower(*args: Any) -> Anatomy:
        return replace(trace(*args), hidden_dtype=torch.bfloat16)

    _, wider = run(pipeline_of(family, [5], dtype="bfloat16"))
    monkeypatch.setattr("swarm.model.huggingface.trace", narrower)
    _, whole = run(pipeline_of(family, [5], dtype="bfloat16"))
    for cut in ([2, 2, 1], [1, 3, 1]):
        pipeline = pipeline_of(family, cut, dtype="bfloat16")
        assert pipeline.boundary(0)[0].dtype == "bfloat16"
        assert_same(run(pipeline)[1], whole)
    assert not torch.equal(whole["logits"], wider["logits"])


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_runs_each_layer_twice(recompute: bool) -> None:
    stage, calls = pipeline_of("gpt2", [5], recompute=recompute).build_stage(0), Counter[str]()
    for name, module in stage.named_modules():
        if name.endswith(".mlp"):  # before: a recomputation stops where it has what it needs
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    stage.set_microbatch(5, 7)
    stage((), a_batch())[0].backward()
    assert len(calls) == 5
    assert set(calls.values()) == {2 if recompute else 1}


def test_dropout_depends_on_the_microbatch() -> None:
    stage = pipeline_of("gpt2", [5]).build_stage(0)
    losses = []
    for step, index in [(1, 1), (1, 2), (2, 1), (1, 1)]:
        stage.set_microbatch(step, index)
        losses.append(stage((), a_batch())[0].item())
    assert losses[0] == losses[3]
    assert len(set(losses)) == 3


def test_building_a_stage_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    pipeline_of("llama", [3, 2]).build_stage(1)
    assert torch.equal(torch.rand(3), expected)


def test_masked_targets_have_no_loss_and_no_weight() -> None:
    pipeline = pipeline_of("llama", [5])
    stage, batch = pipeline.build_stage(0), a_batch()
    batch["mask"] = torch.zeros(2, 16, dtype=torch.uint8)
    assert stage((), batch)[0].item() == 0
    assert pipeline.weight(batch) == 0
    batch["mask"][0, 3] = 1
    assert stage((), batch)[0].item() > 0
    assert pipeline.weight(batch) == 1
    assert pipeline.weight(a_batch()) == 32


def test_the_balanced_cut_gives_the_stage_with_the_head_fewer_layers() -> None:
    values = {"model_type": "llama", **SMALL, "num_hidden_layers": 9, "vocab_size": 4096}
    pipeline = HuggingFacePipeline(
        inline_config(values, 64), seed=0, num_stages=3, microbatch_size=1, sequence=8
    )
    assert sum(pipeline.cut) == 9
    assert pipeline.cut[2] == min(pipeline.cut) < 3


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_the_check_accepts_what_can_be_cut(family: str) -> None:
    check_splittable(inline_config({"model_type": family}, 256))


@pytest.mark.parametrize("stages", [1, 3])
def test_layers_that_share_keys_are_refused(stages: int) -> None:
    config = inline_config({"model_type": "gemma3n_text", "tie_word_embeddings": False}, 256)
    with pytest.raises(PipelineError, match="layers of gemma3n_text share keys and values"):
        HuggingFacePipeline(config, num_stages=stages, microbatch_size=2, sequence=8, seed=0)


def test_layers_that_are_left_out_at_random_are_refused() -> None:
    """It is off in the check, which compares without dropout."""
    values = {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 3, "ffn_dim": 64,
              "num_attention_heads": 4, "word_embed_proj_dim": 32}  # fmt: skip
    for layerdrop, refusal in ((0.1, pytest.raises(PipelineError, match="layerdrop")), (0.0, None)):
        config = inline_config({**values, "layerdrop": layerdrop}, 256)
        with refusal or contextlib.nullcontext():
            HuggingFacePipeline(config, num_stages=3, microbatch_size=2, sequence=8, seed=0)


@pytest.mark.parametrize("stages", [1, 3])
def test_sizes_that_do_not_fit_each_other_are_refused(stages: int) -> None:
    # The family's own checks let it pass, and a tiny model of it has other sizes.
    values = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 3}  # fmt: skip
    pipeline = HuggingFacePipeline(
        inline_config(values, 64), num_stages=stages, microbatch_size=2, sequence=8, seed=0
    )
    with pytest.raises(PipelineError, match=r"llama of these sizes does not run: RuntimeError"):
        pipeline.check()


def test_the_check_notices_a_wrong_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from swarm.model import hf_carve

    def ignore_source(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.role == "sink":
            raise hf_carve.Reached(hidden_states)
        return hidden_states

    monkeypatch.setattr(hf_carve.ForeignLayer, "forward", ignore_source)
    with pytest.raises(PipelineError, match="gpt2 cannot be cut into stages"):
        check_splittable(inline_config({"model_type": "gpt2"}, 256))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings to false"),
        ({"num_hidden_layer": 3}, "did you mean num_hidden_layers"),
        ({"model_type": "no_such"}, "not known"),
        ({"vocab_size": 16}, "set vocab_size to 64"),
        ({"max_position_embeddings": 8}, "has 8 positions"),
        ({"attn_implementation": "hub/kernel"}, "is refused"),
        ({"_attn_implementation": "hub/kernel"}, "is refused"),
        ({"hidden_size": 33}, "heads"),
    ],
)
def test_what_is_refused_says_what_to_do(values: dict[str, Any], message: str) -> None:
    config = {"model_type": "llama", **SMALL, **values}
    with pytest.raises(ConfigError, match=message):
        HuggingFacePipeline(
            inline_config(config, 64), seed=0, num_stages=2, microbatch_size=1, sequence=16,
            vocab_size=64,
        )  # fmt: skip


def test_the_limit_of_a_sequence_by_whatever_name() -> None:
    named = {"gpt2": "n_positions", "llama": "max_position_embeddings", "mpt": "max_seq_len"}
    for family, key in named.items():
        assert max_positions(inline_config({"model_type": family, key: 24}, 64)) == 24
    assert max_positions(inline_config({"model_type": "bloom"}, 64)) is None
    for key in ("n_positions", "max_position_embeddings", "max_seq_len"):
        with pytest.raises(ValueError, match=rf"{key} is 24 but data\.sequence is 32"):
            complete_model_config({key: 24}, vocab_size=64, sequence=32)


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_a_tied_pretrained_directory_starts_with_a_copy(family: str, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    source = pipeline_of(family, [5]).config
    source.tie_word_embeddings = True
    build_model(source, empty=False).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    config = pretrained_config(tmp_path)
    pipeline = HuggingFacePipeline(
        config, seed=1, num_stages=2, microbatch_size=2, sequence=16, pretrained=tmp_path
    )
    pipeline.check()
    assert config.tie_word_embeddings  # the caller's own is as it was
    assert pipeline.key_order[-1] == "lm_head.weight"
    first, last = (pipeline.build_stage(k) for k in range(2))
    weights = dict(last.named_parameters())
    embedding = dict(first.named_parameters()).keys() - weights.keys()
    assert torch.equal(weights["lm_head.weight"], whole.get_input_embeddings().weight)
    assert any("wte" in name or "embed_tokens" in name for name in embedding)
    _, split = run(pipeline)
    logits = whole.eval()(input_ids=a_batch()["tokens"].long(), use_cache=False).logits
    assert torch.equal(split["logits"], logits)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_pretrained_directory_gives_each_stage_its_tensors(family: str, tmp_path: Any) -> None:
    source = pipeline_of(family, [5])
    model = build_model(source.config, empty=False)
    model.save_pretrained(tmp_path)
    pipeline = HuggingFacePipeline(
        pretrained_config(tmp_path), seed=1, num_stages=2, microbatch_size=1, sequence=8,
        pretrained=tmp_path,
    )  # fmt: skip
    weights = dict(model.named_parameters())
    for k in range(2):
        for name, parameter in pipeline.build_stage(k).named_parameters():
            assert torch.equal(parameter, weights.pop(name)), name
    assert not weights


def test_what_a_pretrained_model_has_learned_and_keeps_in_buffers(tmp_path: Any) -> None:
    """The bias by which its router balances: training leaves it alone, and export keeps it."""
    from transformers import AutoModelForCausalLM

    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes["head_dim"] = 8  # which its config class does not declare
    config = inline_config({"model_type": "glm4_moe", **SMALL, **sizes}, 64)
    model = build_model(config, empty=False)
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    assert len(biases) == 4
    for number, bias in enumerate(biases.values()):
        bias.copy_(torch.arange(4.0) * (number + 1))
    model.save_pretrained(tmp_path / "in")
    pipeline = HuggingFacePipeline(
        pretrained_config(tmp_path / "in"), seed=1, num_stages=2, microbatch_size=2, sequence=16,
        pretrained=tmp_path / "in",
    )  # fmt: skip
    _, split = run(pipeline)
    expected = model.eval()(input_ids=a_batch()["tokens"].long(), use_cache=False).logits
    assert torch.equal(split["logits"], expected)
    weights = dict(model.named_parameters())
    exported = AutoModelForCausalLM.from_pretrained(
        export_model(pipeline, weights, tmp_path / "out")
    )
    found = dict(exported.named_buffers())
    assert all(torch.equal(found[name], bias) for name, bias in biases.items())
    (tmp_path / "in" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors in .* - save it with save_pretr"):
        export_model(pipeline, weights, tmp_path / "out")
    (tmp_path / "in" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json does not say which file holds what - save"):
        export_model(pipeline, weights, tmp_path / "out")


def test_a_family_whose_layers_differ_in_a_size_is_cut() -> None:
    """It refuses to give that size for all of them."""
    sizes = {"head_dim": 8, "num_kv_shared_layers": 0, "sliding_window": 16,
             "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64}  # fmt: skip
    config = inline_config({"model_type": "gemma4_text", **SMALL, **sizes}, 64)
    HuggingFacePipeline(config, seed=1, num_stages=2, microbatch_size=2, sequence=16).check()


@pytest.mark.parametrize(
    ("family", "subspace"), [*((family, None) for family in FAMILIES), ("llama", 8)]
)
def test_a_stage_on_the_meta_device_takes_neither_memory_nor_time(
    family: str, subspace: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader asks for one to know a stage's parameters, and must not stand still for it."""
    pipeline = pipeline_of(family, [2, 3], subspace=subspace)
    real = [ParameterLayout.of(pipeline.build_stage(stage)) for stage in range(2)]

    def forbidden(*_: object) -> None:
        raise AssertionError("memory or numbers for a stage on the meta device")

    for name in ("allocate", "draw", "load"):
        monkeypatch.setattr(f"swarm.model.huggingface.{name}", forbidden)
    built = [pipeline.build_stage(stage, "meta") for stage in range(2)]
    assert [ParameterLayout.of(each) for each in built] == real
    assert all(p.device.type == "meta" for each in built for p in each.parameters())
