"""Pretrained directories that are damaged, not whole, or not of the model that config.json tells
of: each is refused in one line that names the file, before a run begins where headers tell it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm.errors import ConfigError, PipelineError
from swarm.model.hf_carve import build_model
from swarm.model.hf_config import inline_config, pretrained_config
from swarm.model.huggingface import HuggingFacePipeline

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4,
              "intermediate_size": 24, "max_position_embeddings": 32},
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 4, "n_positions": 32},
    "deepseek_v3": {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4,
                    "intermediate_size": 24, "moe_intermediate_size": 8, "n_routed_experts": 4,
                    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 4,
                    "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
                    "v_head_dim": 8, "first_k_dense_replace": 4, "max_position_embeddings": 32},
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def saved(directory: Path, family: str = "llama", **sizes: Any) -> Path:
    config = inline_config({"model_type": family, **SIZES[family], **sizes}, 64)
    build_model(config, empty=False).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = saved(tmp_path_factory.mktemp("parted") / "model")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: SHARDS[place % 2] for place, name in enumerate(tensors)}
    for shard in SHARDS:
        save_file({n: tensors[n] for n, file in weight_map.items() if file == shard},
                  directory / shard, {"format": "pt"})  # fmt: skip
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def pipeline_of(directory: Path, **more: Any) -> HuggingFacePipeline:
    return HuggingFacePipeline(
        pretrained_config(directory), seed=1, num_stages=2, microbatch_size=1, sequence=8,
        pretrained=directory, **more,
    )  # fmt: skip


def reconfigure(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Other tensors in the one file."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def bare(tensors: dict[str, Tensor]) -> None:
    """Names as a GPT-2 saves them that has no head."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage",
    [cut_short, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"junk" * 50)],
    ids=["cut short", "empty", "junk"],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_damaged_file_is_named(
    damage: Callable[[Path], object], shards: int, whole: Path, parted: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(whole if shards == 1 else parted, tmp_path / "model"))
    file = "model.safetensors" if shards == 1 else SHARDS[1]
    damage(directory / file)
    pipeline = pipeline_of(directory)
    for refuses in (pipeline.check, lambda: pipeline.build_stage(0)):
        with pytest.raises(ConfigError, match=rf"cannot read .*{file}: .* - copy the directory"):
            refuses()


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (
            "gone.safetensors",
            r"cannot read .*gone\.safetensors: it is not there - copy the directory",
        ),
        ("\0.safetensors", "it is not there - copy"),
        ("\ud800.safetensors", "cannot read .* - copy"),
        ("folder.safetensors", r"cannot read .*folder\.safetensors: .* - copy"),
        ("empty.safetensors", f"says that {NORM} is in empty.safetensors, where it is not - copy"),
        ("", r"index\.json names '', no safetensors file beside it - save it with"),
        (".", r"index\.json names '\.', no safetensors file"),
        ("../x.safetensors", r"index\.json names '\.\./x\.safetensors', no safetensors file"),
        ("/x.safetensors", "no safetensors file beside it"),
        (5, r"index\.json does not say which file holds what - save"),
    ],
)
def test_an_index_that_names_a_shard_that_does_not_hold_it(
    shard: Any, said: str, parted: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(parted, tmp_path / "model"))
    save_file({}, directory / "empty.safetensors")
    (directory / "folder.safetensors").mkdir()
    index = json.loads((directory / INDEX).read_text())
    pipeline_of(directory).check()
    index["weight_map"][NORM] = shard
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=said):
        pipeline_of(directory).check()


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"[]", b'{"weight_map": []}', b"\x80"], ids=range(4)
)
def test_an_index_that_is_none(data: bytes, parted: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(parted, tmp_path / "model"))
    (directory / INDEX).write_bytes(data)
    with pytest.raises(ConfigError, match=r"index\.json does not say which file holds what - save"):
        pipeline_of(directory).check()


def test_one_file_counts_before_an_index_as_it_does_for_transformers(
    parted: Path, tmp_path: Path
) -> None:
    """A small model that was saved over a large one has the other's index beside it."""
    directory = saved(tmp_path / "model")
    (directory / INDEX).write_bytes((parted / INDEX).read_bytes())
    pipeline = pipeline_of(directory)
    pipeline.check()
    pipeline.build_stage(0)


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_without_layers(layers: int, whole: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(whole, tmp_path / "model"))
    reconfigure(directory, num_hidden_layers=layers)
    with pytest.raises(PipelineError, match=f"llama has {layers} layers - check num_hidden_layers"):
        pipeline_of(directory)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ({"rms_norm_eps": {"__float__": "NaN"}}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.nan}}, "factor"),
    ],
)
def test_a_config_json_with_a_number_that_is_none(
    values: dict[str, Any], key: str, whole: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(whole, tmp_path / "model"))
    reconfigure(directory, **values)
    with pytest.raises(ConfigError, match=rf"config\.json: [\w.]*{key} is nan or infinite - give"):
        pipeline_of(directory)


def test_a_limit_that_is_infinite_by_default_is_none(tmp_path: Path) -> None:
    from transformers import BambaConfig

    config = BambaConfig(num_hidden_layers=1)
    assert math.inf in config.time_step_limit
    config.save_pretrained(tmp_path)
    pretrained_config(tmp_path)


@pytest.mark.parametrize(("family", "layer"), [("llama", "model.layers.3"), ("gpt2", "h.3")])
def test_weights_of_more_layers_than_config_json_tells_of(
    family: str, layer: str, tmp_path: Path
) -> None:
    directory = saved(tmp_path / "model", family)
    pipeline_of(directory).check()
    reconfigure(directory, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 3})
    with pytest.raises(
        ConfigError, match=rf"weights for \S*{layer}\.\S+ but its config\.json only 3 "
    ):
        pipeline_of(directory).check()


def test_layers_under_the_names_of_a_model_without_a_head_are_counted(tmp_path: Path) -> None:
    """As those of GPT-2 itself are."""
    directory = saved(tmp_path / "model", "gpt2", tie_word_embeddings=True)
    change(directory, bare)
    pipeline_of(directory).check()
    pipeline_of(directory).build_stage(1)
    reconfigure(directory, n_layer=3)
    with pytest.raises(
        ConfigError, match=r"weights for h\.3\.\S+ but its config\.json only 3 layers"
    ):
        pipeline_of(directory).check()


@pytest.mark.parametrize("known", ["nextn", "pattern"])
def test_layers_that_predict_further_tokens_are_no_layers_too_many(
    known: str, tmp_path: Path
) -> None:
    """Whole DeepSeeks have one of number 61, which their family leaves alone."""
    directory = saved(tmp_path / "model", "deepseek_v3")
    number = 4 if known == "nextn" else 61
    further = {f"model.layers.{number}.eh_proj.weight": torch.zeros(16, 32)}
    change(directory, lambda tensors: tensors.update(further))
    reconfigure(directory, num_nextn_predict_layers=1 if known == "nextn" else 0)
    pipeline_of(directory).check()


def test_what_a_directory_has_besides_its_weights_does_no_harm(whole: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(whole, tmp_path / "model"))
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((4,), math.nan),
        "model.layers.0.self_attn.mask": torch.zeros(2, 2, dtype=torch.bool),
        "score.weight": torch.zeros(2, 16, dtype=torch.int8),
    }
    change(directory, lambda tensors: tensors.update(more))
    pipeline = pipeline_of(directory)
    pipeline.check()
    for stage in range(2):
        pipeline.build_stage(stage)


@pytest.mark.parametrize(
    ("dtype", "called"),
    [
        (torch.int8, "I8"),
        (torch.bool, "BOOL"),
        (torch.complex64, "C64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_weights_that_are_no_plain_floats(
    dtype: torch.dtype, called: str, whole: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(whole, tmp_path / "model"))
    change(directory, lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    pipeline = pipeline_of(directory)
    for refuses in (pipeline.check, lambda: pipeline.build_stage(0)):
        with pytest.raises(ConfigError, match=f"{UP} is stored as {called} - use weights in float"):
            refuses()


def test_weights_that_have_to_be_converted_must_be_floats_too(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", "gpt2", tie_word_embeddings=True)
    mask = torch.ones(1, 1, 32, 32, dtype=torch.uint8)  # of old
    change(directory, bare)
    change(directory, lambda tensors: tensors.update({"h.0.attn.bias": mask}))
    pipeline_of(directory).check()
    pipeline_of(directory).build_stage(0)
    name = "h.1.mlp.c_fc.weight"
    change(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ConfigError, match=f"{name} is stored as I8"):
        pipeline_of(directory).check()


@pytest.mark.parametrize(
    ("number", "stored", "dtype", "said"),
    [
        (math.nan, torch.float32, "float32", "has NaN or infinity"),
        (-math.inf, torch.bfloat16, "float32", "has NaN or infinity"),
        (1e300, torch.float64, "float32", "has NaN or infinity"),
        (-3.4e38, torch.float32, "bfloat16", "has numbers too large for bfloat16 - set model"),
        (3.4e38, torch.float32, "float32", ""),
        (3.3e38, torch.float32, "bfloat16", ""),
    ],
)
def test_numbers_that_are_none(
    number: float, stored: torch.dtype, dtype: str, said: str, whole: Path, tmp_path: Path
) -> None:
    """Told where the tensor is filled; other stages begin."""
    directory = Path(shutil.copytree(whole, tmp_path / "model"))

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[UP] = tensors[UP].to(stored)
        tensors[UP][3, 2] = number

    change(directory, spoil)
    pipeline = pipeline_of(directory, dtype=dtype)
    pipeline.check()
    pipeline.build_stage(1)
    if said:
        with pytest.raises(ConfigError, match=f"{UP} {said}"):
            pipeline.build_stage(0)
    else:
        pipeline.build_stage(0)


def test_a_number_that_is_none_in_a_buffer_that_was_learned(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", "deepseek_v3", first_k_dense_replace=0)
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    change(directory, lambda tensors: tensors[bias].fill_(math.nan))
    with pytest.raises(ConfigError, match=f"{bias} has NaN or infinity"):
        pipeline_of(directory).build_stage(0)


@pytest.mark.parametrize("kept", [lambda name: name != NORM, lambda name: False])
def test_weights_that_lack_a_tensor(
    kept: Callable[[str], bool], whole: Path, tmp_path: Path
) -> None:
    """Told from the headers: nothing else there could be converted into it."""
    directory = Path(shutil.copytree(whole, tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    left = {name: each for name, each in tensors.items() if kept(name)}
    save_file(left, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no weights for \S+ of shape .* - check that its"):
        pipeline_of(directory).check()
