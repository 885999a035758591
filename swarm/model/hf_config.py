"""From a run's `[model]` to a Hugging Face config, and from that to a tiny one of the same family.

Whether a family can be cut is not looked up in a list: a tiny model of the same config is cut and
compared with itself whole (`hf_check.py`). The tiny config keeps every switch (norms, rotary
scaling, soft-caps, layer types, experts) and shrinks only sizes.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError, PipelineError

# Keys that make transformers load code or weights in another format; peers never do.
REFUSED = ("auto_map", "trust_remote_code", "attn_implementation", "experts_implementation",
           "quantization_config", "torchscript")  # fmt: skip
LEGACY = ("rope_theta", "rope_scaling", "torch_dtype", "architectures")  # taken, not kept
TIED = ("tied embeddings would put one weight on two stages", "set tie_word_embeddings to false")
UNLIMITED = "time_step_limit"  # goes up to infinity by default
TINY_LAYERS = 4
TINY_SEQUENCE = 12

TINY_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "ffn_dim": 48, "ffn_hidden_size": 48, "n_inner": 48,
    "word_embed_proj_dim": 32, "embedding_size": 32, "vocab_size": 64,
    "vocab_size_per_layer_input": 64, "head_dim": 8, "rotary_dim": 4,
    "sliding_window": 5, "attention_chunk_size": 5,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "query_pre_attn_scalar": 8,
}  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and hints of transformers: what matters is raised, in one line."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _undeclared(family: type) -> set[str]:
    """Settings that a family's model looks for although its config class does not declare them, as
    glm4_moe's `head_dim`."""
    found = importlib.util.find_spec(family.__module__.replace(".configuration_", ".modeling_"))
    if found is None or found.origin is None:
        return set()
    code = Path(found.origin).read_text(encoding="utf-8")
    return set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', code))


def inline_config(values: dict[str, Any], vocab_size: int) -> Any:
    """A config from `[model.config]`; vocab_size defaults to the data's, tied weights to off."""
    from transformers import CONFIG_MAPPING

    values = copy.deepcopy(values)
    model_type = values.pop("model_type", None)
    for key in values:
        if key in REFUSED or key.startswith("_"):
            raise ConfigError(f"[model.config] {key} is refused", "leave it out")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"[model.config] model_type {model_type!r} is not known to this transformers",
            'use for example "llama", "gpt2", "qwen3"; or a newer transformers',
        )
    family = CONFIG_MAPPING[model_type]
    known = {*vars(family()), *family.attribute_map, *LEGACY, *_undeclared(family)}
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, [each for each in known if each[0] != "_"], 1)
            remedy = f"did you mean {close[0]}?" if close else "check its spelling"
            raise ConfigError(f"[model.config] {model_type} has no setting {key!r}", remedy)
    values.setdefault("tie_word_embeddings", False)
    values.setdefault("vocab_size", vocab_size)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values.setdefault(key, None)
    try:
        return family(**values)
    except Exception as error:  # each family checks in its own way
        reason = str(error).strip().rpartition("\n")[2].strip()  # before it: which of its checks
        raise ConfigError(
            f"[model.config] is no valid {model_type} config: {reason}", "change that setting"
        ) from error


def pretrained_config(directory: str | Path) -> Any:
    """The config of a local Hugging Face directory. Raises ConfigError."""
    from transformers import AutoConfig

    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(
            f"[model] pretrained: no config.json in {directory}",
            "give a directory written by save_pretrained; nothing is downloaded",
        )
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        values = config.to_dict()
    except Exception as error:
        raise ConfigError(
            f"[model] pretrained: cannot read {directory}: {error}", "save it with save_pretrained"
        ) from error
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{directory} holds quantized weights", "use unquantized ones")
    if (key := _not_finite(values)) is not None:
        raise ConfigError(
            f"{Path(directory) / 'config.json'}: {key} is nan or infinite", "give it a number"
        )
    return config


def _not_finite(values: Mapping[str, Any]) -> str | None:
    """The dotted path of a number in a config that is none, except for what its family may leave
    without a limit."""
    waiting: list[tuple[str, Any]] = list(values.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(f"{key}.{name}", each) for name, each in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(key, each) for each in value]
        elif isinstance(value, float) and not math.isfinite(value) and not key.endswith(UNLIMITED):
            return key
    return None


def is_tied(config: Any) -> bool:
    """Whether the output layer is the embedding's own weight."""
    return any(
        bool(getattr(each, "tie_word_embeddings", False))
        for each in (config, decoder_config(config))
    )


def untied(config: Any) -> Any:
    """A copy of the config whose output layer is a weight of its own."""
    config = copy.deepcopy(config)
    for each in (config, decoder_config(config)):
        each.tie_word_embeddings = False
    return config


def decoder_config(config: Any) -> Any:
    """The part of the config that describes the decoder (the whole one, for plain models)."""
    return config.get_text_config(decoder=True)


def check_config(config: Any, *, vocab_size: int, sequence: int) -> None:
    """Raises PipelineError or ConfigError for what no cut and no data can make right."""
    text = decoder_config(config)
    if getattr(config, "is_encoder_decoder", False):
        raise PipelineError(
            f"{config.model_type} is an encoder-decoder", "use a decoder-only model"
        )
    if is_tied(config):
        raise PipelineError(*TIED)
    if getattr(text, "num_kv_shared_layers", 0):
        raise PipelineError(
            f"layers of {config.model_type} share keys and values", "use another model"
        )
    if getattr(text, "output_router_logits", False):
        raise PipelineError(
            "the router's loss spans all stages", "set output_router_logits to false"
        )
    if _setting(text, "layerdrop"):
        raise PipelineError(
            "with layerdrop a model leaves layers out at random, each stage others",
            "set layerdrop to 0",
        )
    if text.vocab_size < vocab_size:
        raise ConfigError(
            f"the data has {vocab_size} tokens but the model only {text.vocab_size}",
            f"set vocab_size to {vocab_size}",
        )
    positions = max_positions(text)
    if positions is not None and positions < sequence:
        raise ConfigError(
            f"[data] sequence is {sequence} but the model has {positions} positions",
            "make the sequence shorter, or take a model of more positions",
        )


def max_positions(text: Any) -> int | None:
    """How many tokens a sequence may have, by a text config; None where it names no limit."""
    for key in ("max_position_embeddings", "max_seq_len"):  # MPT calls it so
        positions = getattr(text, key, None)
        if isinstance(positions, int) and positions > 0:
            return positions
    return None


def _setting(text: Any, key: str) -> Any:
    """None where there is none, or where the layers differ in it and the family refuses to say."""
    try:
        return getattr(text, key, None)
    except Exception:  # each family has its own
        return None


def tiny_config(config: Any) -> Any:
    """A config of the same family and switches with sizes that take milliseconds."""
    tiny = copy.deepcopy(config)
    text = decoder_config(tiny)
    layers = _setting(text, "num_hidden_layers")
    heads = _setting(text, "num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int):
        raise PipelineError(
            f"{config.model_type} is no attention decoder", "use a decoder-only language model"
        )
    if layers < 1:
        raise PipelineError(
            f"{config.model_type} has {layers} layers", "check num_hidden_layers in its config"
        )
    count = min(layers, TINY_LAYERS)
    types = getattr(text, "layer_types", None)
    if types:  # enough layers to meet every kind there is
        count = min(layers, max([count, *(list(types).index(kind) + 1 for kind in set(types))]))
    for key, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == layers and layers > 1:
            setattr(text, key, list(value[:count]))
        elif isinstance(value, list) and key.endswith("layers"):
            setattr(text, key, [i for i in value if not isinstance(i, int) or i < count])
    kv_heads = _setting(text, "num_key_value_heads")
    for key, size in TINY_SIZES.items():
        present = _setting(text, key)
        if isinstance(present, int) and not isinstance(present, bool) and present > size:
            setattr(text, key, size)
    text.hidden_size = TINY_SIZES["hidden_size"]
    text.num_attention_heads = 4
    if isinstance(kv_heads, int):
        text.num_key_value_heads = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    text.num_hidden_layers = count
    if hasattr(text, "qk_rope_head_dim") and _setting(text, "head_dim") is not None:
        text.head_dim = text.qk_rope_head_dim
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, key, None)
        setattr(tiny, key, None)
    return tiny
