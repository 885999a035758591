"""A model's Hugging Face config as it stands inline in run.toml: what can be told of it by itself.

Without transformers, so that a slip is said at once; that it can be cut is proven at run creation
(`swarm/model/`). Raises ValueError; messages name the keys in full.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import JsonValue


def check_model_config(
    config: dict[str, JsonValue], *, stages: int, cut: Sequence[int] | None
) -> None:
    """Whether it describes a model, one with layers enough for these stages."""
    if not isinstance(config.get("model_type"), str):
        raise ValueError('model.config needs model_type, as in model_type = "llama"')
    for key in ("auto_map", "trust_remote_code"):
        if key in config:
            raise ValueError(f"model.config.{key} is refused: peers run no code from elsewhere")
    try:
        json.dumps(config, allow_nan=False)
    except ValueError:
        raise ValueError("model.config has a number that is nan or infinite") from None
    layers = _named(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if layers is None:
        return
    if cut is not None and sum(cut) != layers:
        raise ValueError(f"model.cut adds up to {sum(cut)} layers but model.config has {layers}")
    if stages > layers:
        raise ValueError(f"model.stages is {stages} but model.config has {layers} layers")


def check_subspace_size(config: dict[str, JsonValue], subspace: int) -> None:
    """Whether it is smaller than the hidden size, where the config names that."""
    hidden = _named(config, "hidden_size", "n_embd", "d_model")
    if hidden is not None and subspace >= hidden:
        smaller = f"set model.subspace to a number from 1 to {hidden - 1}, or leave it out"
        raise ValueError(
            f"model.subspace is {subspace} but the model's hidden size is {hidden}",
            smaller if hidden > 1 else "leave model.subspace out",
        )


def complete_model_config(config: dict[str, JsonValue], *, vocab_size: int, sequence: int) -> None:
    """Write out what it leaves open, so that the canonical form says what is trained, and check it
    against the data. Changes `config`."""
    config.setdefault("tie_word_embeddings", False)
    if "text_config" not in config:
        config.setdefault("vocab_size", vocab_size)
    named = config.get("vocab_size")
    if isinstance(named, int) and named < vocab_size:
        raise ValueError(f"model.config.vocab_size is {named} but data.vocab_size is {vocab_size}")
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        positions = config.get(key)
        if isinstance(positions, int) and positions < sequence:
            raise ValueError(f"model.config.{key} is {positions} but data.sequence is {sequence}")


def _named(config: dict[str, JsonValue], *keys: str) -> int | None:
    """The number it gives under the first of these keys that it has, or None."""
    for key in keys:
        number = config.get(key)
        if isinstance(number, int) and not isinstance(number, bool):
            return number
    return None
