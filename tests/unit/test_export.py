"""Exported directories load in the libraries users have, with the weights that were trained."""

from __future__ import annotations

import fcntl
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.data.tokenizer import EOS_ID, Tokenizer, byte_tokenizer
from swarm.errors import ConfigError, DataError, StorageError, SwarmError
from swarm.model import CustomPipeline, Pipeline
from swarm.model.export import export_model
from swarm.model.generate import evaluate, generate, load_exported
from swarm.model.hf_carve import build_model
from swarm.model.hf_config import inline_config, pretrained_config
from swarm.model.huggingface import HuggingFacePipeline

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
              "intermediate_size": 48, "max_position_embeddings": 32},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32},
    "mixtral": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
                "num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 4},
}  # fmt: skip


def a_pipeline(family: str = "llama", **more: Any) -> HuggingFacePipeline:
    config = inline_config({"model_type": family, **SIZES[family]}, 256)
    return HuggingFacePipeline(config, seed=1, num_stages=2, microbatch_size=1, sequence=16, **more)


def weights(pipeline: HuggingFacePipeline) -> dict[str, torch.Tensor]:
    stages = [pipeline.build_stage(k) for k in range(pipeline.num_stages)]
    return {name: p for stage in stages for name, p in stage.named_parameters()}


@pytest.mark.parametrize("family", SIZES)
def test_hugging_face_loads_the_trained_weights(family: str, tmp_path: Path) -> None:
    pipeline = a_pipeline(family)
    state = weights(pipeline)
    directory = export_model(pipeline, state, tmp_path / "out", byte_tokenizer())
    model = AutoModelForCausalLM.from_pretrained(directory)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state.pop(name)), name
    assert not state
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("Grüße\n").input_ids
    assert ids == list("Grüße\n".encode())
    assert tokenizer.decode(ids) == "Grüße\n"
    again = HuggingFacePipeline(
        pretrained_config(directory), seed=9, num_stages=2, microbatch_size=1, sequence=16,
        pretrained=directory,
    )  # fmt: skip
    first = weights(again)
    assert all(torch.equal(first[n], p) for n, p in model.named_parameters())


def test_how_text_is_made_is_kept_of_a_model_that_is_trained_on(tmp_path: Path) -> None:
    """If its tokens mean what they did; the end of a text is always there."""
    first, own = tmp_path / "first", Tokenizer("pretrained", 256, None, eos_id=7)
    pipeline = a_pipeline()
    export_model(pipeline, weights(pipeline), first, byte_tokenizer())
    again = HuggingFacePipeline(
        pretrained_config(first), seed=9, num_stages=2, microbatch_size=1, sequence=16,
        pretrained=first,
    )  # fmt: skip
    state = weights(again)
    (first / "model.safetensors").unlink()  # not needed any more, having no buffers

    def exported(tokenizer: Tokenizer) -> Any:
        path = export_model(again, state, tmp_path / "out", tokenizer)
        return AutoModelForCausalLM.from_pretrained(path).generation_config

    settings = first / "generation_config.json"
    settings.write_text('{"do_sample": true, "top_k": 20, "eos_token_id": [2, 3]}')
    found = exported(own)
    assert (found.do_sample, found.top_k, found.eos_token_id) == (True, 20, [2, 3])
    assert exported(byte_tokenizer()).top_k != 20
    settings.write_text('{"top_k": 20}')
    found = exported(own)
    assert (found.top_k, found.eos_token_id, found.pad_token_id) == (20, 7, 7)
    settings.write_text("[")
    with pytest.raises(DataError, match=r"cannot read .*generation_config\.json: .* - restore it"):
        exported(own)


def test_a_text_ends_as_the_runs_own_tokenizer_has_it(tmp_path: Path) -> None:
    """Not as that of the model the run began with, whose tokens are others."""
    first, pipeline = tmp_path / "first", a_pipeline()
    config = pipeline.config
    config.eos_token_id, config.bos_token_id = [34, 7], 5
    export_model(pipeline, weights(pipeline), first)
    again = HuggingFacePipeline(
        pretrained_config(first), seed=9, num_stages=2, microbatch_size=1, sequence=16,
        pretrained=first,
    )  # fmt: skip
    assert again.config.eos_token_id == [34, 7]
    path = export_model(again, weights(again), tmp_path / "out", byte_tokenizer())
    model = AutoModelForCausalLM.from_pretrained(path)
    for found in (model.config, model.generation_config):
        assert (found.eos_token_id, found.bos_token_id) == (EOS_ID, None)
    assert again.config.eos_token_id == [34, 7]


def test_a_tied_model_keeps_its_buffers(tmp_path: Path) -> None:
    """Its directory has no weights for the output layer, which was copied from the embedding."""
    sizes = {"head_dim": 8, "num_kv_shared_layers": 0, "sliding_window": 16,
             "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64,
             "tie_word_embeddings": True}  # fmt: skip
    config = inline_config({"model_type": "gemma4_text", **SIZES["llama"], **sizes}, 64)
    model = build_model(config, empty=False)
    scales = {n: b for n, b in model.named_buffers() if n.endswith("layer_scalar")}
    assert len(scales) == 2
    for number, scale in enumerate(scales.values()):
        scale.fill_(0.5 + number)
    model.save_pretrained(tmp_path / "in")
    assert "lm_head.weight" not in load_file(tmp_path / "in" / "model.safetensors")
    pipeline = HuggingFacePipeline(
        pretrained_config(tmp_path / "in"), seed=1, num_stages=2, microbatch_size=1, sequence=16,
        pretrained=tmp_path / "in",
    )  # fmt: skip
    directory = export_model(pipeline, weights(pipeline), tmp_path / "out")
    found = dict(AutoModelForCausalLM.from_pretrained(directory).named_buffers())
    assert all(torch.equal(found[name], scale) for name, scale in scales.items())


def test_weights_of_other_sizes_are_refused_without_a_report_that_is_not_shown(
    tmp_path: Path,
) -> None:
    pipeline = a_pipeline()
    export_model(pipeline, weights(pipeline), tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 256', '"vocab_size": 100'))
    with pytest.raises(
        ConfigError, match=r"out: its weights have other sizes than its config\.json"
    ):
        load_exported(tmp_path / "out")


def test_generated_text_depends_on_the_seed_alone(tmp_path: Path) -> None:
    pipeline = a_pipeline()
    export_model(pipeline, weights(pipeline), tmp_path / "out", byte_tokenizer())
    torch.manual_seed(5)
    texts = [
        generate(tmp_path / "out", "def f(", max_new_tokens=12, seed=seed) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("def f(")
    greedy = {generate(tmp_path / "out", "a" * 99, max_new_tokens=8, temperature=0, seed=seed)
              for seed in (1, 2)}  # fmt: skip
    assert len(greedy) == 1
    assert generate(tmp_path / "out", "", max_new_tokens=3) != ""
    no_text = b"\xff".decode(errors="surrogateescape")  # as an argument of a program
    assert generate(tmp_path / "out", no_text, max_new_tokens=3).startswith("\ufffd")
    temperatures = [{"temperature": wrong} for wrong in (math.nan, math.inf, -1.0, 1e-40)]
    for wrong in (*temperatures, {"seed": -1}, {"seed": 2**63}):
        with pytest.raises(ConfigError, match=r"temperature 0 or from 0\.001 up and finite"):
            generate(tmp_path / "out", "def f(", **wrong)


def test_a_text_longer_than_the_models_positions_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a prompt that fits is read, and all tokens asked for are written."""
    pipeline = a_pipeline()
    export_model(pipeline, weights(pipeline), tmp_path / "out", byte_tokenizer())
    model = load_exported(tmp_path / "out")
    assert (positions := model.config.max_position_embeddings) == 32
    read: list[Any] = []

    def generate_some(ids: Any, *, max_new_tokens: int, **options: Any) -> Any:
        read.append(ids[0].tolist())
        assert len(read[-1]) + max_new_tokens <= positions + 1, "the last is not read"
        return torch.cat([ids, torch.full((1, max_new_tokens), ord("z"))], dim=1)

    model.generate = generate_some
    monkeypatch.setattr("swarm.model.generate.load_exported", lambda *_: model)
    prompt = "0123456789" * 3
    assert generate(tmp_path / "out", prompt, max_new_tokens=50) == prompt + "z" * 50
    assert bytes(read[0]).decode() == prompt
    assert bytes(read[1]).decode() == prompt[-13:] + "zzz"
    assert [len(ids) for ids in read] == [30, 16, 16, 16]
    read.clear()
    for prompts in ("a" * 16 + "b" * 16, "a" * 17 + "b" * 16):
        generate(tmp_path / "out", prompts, max_new_tokens=1)
    assert [bytes(ids).decode() for ids in read] == ["a" * 16 + "b" * 16, "b" * 16]
    model.generation_config.eos_token_id = [ord("z"), 7]
    assert generate(tmp_path / "out", prompt, max_new_tokens=50) == prompt + "zz"  # not the end
    read.clear()
    generate(tmp_path / "out", "", max_new_tokens=5)
    assert read == [[ord("z")]]  # after the end of another text


def test_a_model_that_has_diverged_writes_nothing(tmp_path: Path) -> None:
    pipeline = a_pipeline()
    state = weights(pipeline)
    next(iter(state.values())).detach().fill_(math.nan)
    export_model(pipeline, state, tmp_path / "out", byte_tokenizer())
    with pytest.raises(ConfigError, match="its training diverged - export an earlier checkpoint"):
        generate(tmp_path / "out", "def f(")


def test_the_loss_of_an_export_is_that_of_the_stages(tmp_path: Path) -> None:
    pipeline = a_pipeline()
    export_model(pipeline, weights(pipeline), tmp_path / "out", byte_tokenizer())
    ids = np.arange(17, dtype="uint8")[None]
    batch = {"tokens": ids[:, :-1].copy(), "targets": ids[:, 1:].copy()}
    found = evaluate(load_exported(tmp_path / "out"), [batch, batch])
    first, last = pipeline.build_stage(0).eval(), pipeline.build_stage(1).eval()
    tensors = {name: torch.from_numpy(value) for name, value in batch.items()}
    (loss,) = last(first((), tensors), tensors)
    assert found.tokens == 32
    assert found.loss == pytest.approx(loss.item() / 16)
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        evaluate(load_exported(tmp_path / "out"), [])


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    pipeline = a_pipeline()
    state = weights(pipeline)
    export_model(pipeline, state, tmp_path / "out")
    export_model(pipeline, {n: p + 1 for n, p in state.items()}, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = "lm_head.weight"
    assert torch.equal(stored[name], state[name] + 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(StorageError, match="not empty"):
        export_model(pipeline, state, tmp_path / "mine")
    (tmp_path / "file").write_text("keep")
    with pytest.raises(StorageError, match=r"file: Not a directory - choose another directory"):
        export_model(pipeline, state, tmp_path / "file")
    with pytest.raises(SwarmError, match="1 parameters are missing"):
        export_model(pipeline, {n: p for n, p in state.items() if n != name}, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "mine", "out"]


def test_an_export_goes_where_a_link_leads(tmp_path: Path) -> None:
    """As to a larger disk: the link stays, and what is half written lies beside its end."""
    pipeline = a_pipeline()
    state = weights(pipeline)
    link, end = tmp_path / "out", tmp_path / "disk" / "model"
    end.parent.mkdir()
    link.symlink_to("disk/model")
    for _ in range(2):  # the second replaces the first
        assert export_model(pipeline, state, link) == end
        assert link.is_symlink()
        assert (end / "model.safetensors").is_file()
        assert [path.name for path in end.parent.iterdir()] == ["model"]
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "out"}


@pytest.mark.parametrize("out", [".", "link", ".."])
def test_the_current_directory_is_not_replaced(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = a_pipeline()
    state = weights(pipeline)
    if out == "..":
        export_model(pipeline, state, tmp_path / "here")
    here = tmp_path / "here" / "deeper" if out == ".." else tmp_path / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    (tmp_path / "link").symlink_to(here)
    place = tmp_path / out if out == "link" else Path(out)
    with pytest.raises(StorageError, match=r"the current directory is in \S+/here - choose"):
        export_model(pipeline, state, place)
    assert Path.cwd() == here


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
    ids=["tokenizer", "weights"],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr("swarm.model.export._write", full)
    pipeline = a_pipeline()
    with pytest.raises(StorageError, match="No space left on device"):
        export_model(pipeline, weights(pipeline), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_has_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    pipeline = a_pipeline()
    state = weights(pipeline)
    left_over, living, other = (
        tmp_path / name for name in (".out.swarm-export-1", ".out.swarm-export-2", ".out-mine")
    )
    for directory in (left_over, living, other):
        (directory / "new").mkdir(parents=True)
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    export_model(pipeline, state, tmp_path / "out")
    os.close(held)
    assert {p.name for p in tmp_path.iterdir()} == {living.name, other.name, "out"}
    export_model(pipeline, state, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {other.name, "out"}


def test_an_export_that_fails_at_the_last_moment_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = a_pipeline()
    state = weights(pipeline)
    export_model(pipeline, state, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    monkeypatch.setattr("swarm.model.export._write", lambda *facts: facts[2].rmdir())
    with pytest.raises(StorageError, match="cannot write"):
        export_model(pipeline, state, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_is_no_export_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no Hugging Face model"):
        generate(tmp_path, "x")


def test_a_custom_pipeline_becomes_its_named_tensors(tmp_path: Path) -> None:
    fields = {"x": np.zeros((4, 2), "float32")}
    definition = Pipeline(
        layers={"a": lambda: nn.Linear(2, 3), "b": lambda: nn.Linear(3, 1)},
        inputs=lambda batch: batch["x"],
        loss=lambda outputs, batch: outputs[0].sum(),
        weight=lambda batch: len(batch["x"]),
        data=lambda: SimpleNamespace(train=fields, validation=fields),
    )
    pipeline = CustomPipeline(definition, seed=1, num_stages=2, microbatch_size=2)
    stages = [pipeline.build_stage(k) for k in range(2)]
    state = {name: p for stage in stages for name, p in stage.named_parameters()}
    stored = load_file(export_model(pipeline, state, tmp_path / "out") / "model.safetensors")
    assert list(stored) == sorted(pipeline.key_order)
    assert all(torch.equal(stored[name], p) for name, p in state.items())
