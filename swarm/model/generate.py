"""Using an exported directory: text from it, and its loss on batches of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarm.errors import ConfigError
from swarm.model.hf_config import max_positions, quiet
from swarm.model.huggingface import token_loss

MAX_SEED = 2**63  # torch takes no larger one
MIN_TEMPERATURE = 1e-3  # logits divided by much less overflow
EXPORTED = "give a directory written by `swarm export` of a Hugging Face run"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss per token in nats, over how many tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def load_exported(directory: str | Path, device: str = "cpu") -> Any:
    """The model of an exported (or any local Hugging Face) directory. Raises ConfigError."""
    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(f"{directory} holds no Hugging Face model", EXPORTED)
    from transformers import AutoModelForCausalLM

    model: Any
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # every family and file format fails in its own way
        why = str(error)
        if "ignore_mismatched_sizes" in why:  # it refers to a report that nobody is shown
            why = "its weights have other sizes than its config.json says"
        raise ConfigError(f"cannot load the model in {directory}: {why}", EXPORTED) from error
    return model.to(device).eval()


def load_tokenizer(directory: str | Path) -> Any:
    """The tokenizer of a local Hugging Face directory. Raises ConfigError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        what = f"cannot load the tokenizer in {directory}: {error}"
        raise ConfigError(what, EXPORTED) from error


@torch.inference_mode()
def generate(
    directory: str | Path,
    text: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    seed: int = 0,
    device: str = "cpu",
) -> str:
    """`text` and what the model writes after it; temperature 0 takes the likeliest token.

    The same seed gives the same text on the same machine. Where the model's positions are full, it
    goes on from the newer half of the text. Raises ConfigError.
    """
    is_temperature = temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf
    if max_new_tokens < 1 or not is_temperature or not 0 <= seed < MAX_SEED:
        raise ConfigError(
            f"tokens must be at least 1, temperature 0 or from {MIN_TEMPERATURE} up and finite, "
            "seed 0 to 2^63 - 1"
        )
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes of a shell
    model, tokenizer = load_exported(directory, device), load_tokenizer(directory)
    if not all(torch.isfinite(each).all() for each in model.parameters()):
        raise ConfigError(
            f"the model in {directory} has weights that are no numbers: its training diverged",
            "export an earlier checkpoint, or train anew with a lower lr",
        )
    end = model.generation_config.eos_token_id
    ends = [each for each in (end if isinstance(end, list) else [end]) if each is not None]
    first = ends[0] if ends else 0
    ids = tokenizer(text, return_tensors="pt").input_ids if text else None
    if ids is None or not ids.numel():
        ids = torch.tensor([[first]])
    limit = max_positions(model.config.get_text_config(decoder=True))
    positions = ids.shape[1] + max_new_tokens if limit is None else limit
    ids = ids.to(device)
    written: list[int] = []
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature}
    devices = [device] if device.startswith("cuda") else []
    with quiet(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        while len(written) < max_new_tokens:
            if ids.shape[1] > positions:
                ids = ids[:, -max(1, positions // 2) :]
            # The last token that is written takes no position: it is not read.
            room = min(max_new_tokens - len(written), positions + 1 - ids.shape[1])
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=room,
                pad_token_id=first,
                **options,
            )
            new = output[0, ids.shape[1] :].tolist()
            written += new
            if len(new) < room or (new and new[-1] in ends):
                break  # the model has ended its text
            ids = output
    if written and written[-1] in ends:
        written.pop()  # no text: of bytes it would be a NUL
    return text + str(tokenizer.decode(written, skip_special_tokens=True))


@torch.inference_mode()
def evaluate(model: Any, batches: Iterable[Mapping[str, Any]], device: str = "cpu") -> Evaluation:
    """The mean token loss of a loaded model over batches with `tokens` and `targets`."""
    losses: list[float] = []
    tokens = 0
    for batch in batches:
        fields = {name: torch.as_tensor(value).to(device) for name, value in batch.items()}
        logits = model(input_ids=fields["tokens"].long(), use_cache=False).logits
        losses.append(token_loss(logits, fields).item())
        counted = fields.get("mask")
        tokens += fields["targets"].numel() if counted is None else int((counted != 0).sum())
    if not tokens:
        raise ConfigError("there is nothing to evaluate on", "give more text")
    return Evaluation(math.fsum(losses) / tokens, tokens)
