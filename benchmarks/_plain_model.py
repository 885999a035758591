"""What the speed comparisons train: a byte-level Llama, 14.4 M parameters, on Python's own sources.

Plain torch and transformers, nothing of this project, so that the programs it is compared with
(`_one_process`, `_torch_pipelining`) stand on their own. All they take from it is
`keep_freed_memory`: a setting of the C library, worth some percent, that no side should have alone.
The swarm side builds the same config from `LLAMA`. A model is cut in two by calling `Half` with the
layers of each side.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "use_cache": False,
}


def add_options(parser: argparse.ArgumentParser, microbatches: int) -> None:
    """The flags that both programs share."""
    parser.add_argument("--microbatches", type=int, default=microbatches, help="per step")
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=LLAMA["hidden_size"])
    parser.add_argument("--layers", type=int, default=LLAMA["num_hidden_layers"])
    parser.add_argument("--warmup", type=int, default=2, help="microbatches before the first line")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)


def build(options: argparse.Namespace) -> nn.Module:
    """LlamaForCausalLM with seeded weights; the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.seed)
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": LLAMA["intermediate_size"] * options.hidden // LLAMA["hidden_size"],
        "num_hidden_layers": options.layers,
        "max_position_embeddings": options.sequence,
    }
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"} | sizes
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**fields))
    return model.train()


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Half(nn.Module):
    """Layers `[start, stop)` of a LlamaForCausalLM: token ids or hidden states (batch, seq, …) in,
    hidden states or logits out."""

    def __init__(self, model: Any, start: int, stop: int) -> None:
        super().__init__()
        body = model.model
        self.embed = body.embed_tokens if start == 0 else None
        self.rotary = body.rotary_emb
        self.layers = nn.ModuleList(body.layers[start:stop])
        last = stop == len(body.layers)
        self.norm = body.norm if last else None
        self.head = model.lm_head if last else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs) if self.embed is not None else inputs
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the token losses: logits (batch, seq, vocab), targets (batch, seq)."""
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
    )


class Batches:
    """Seeded windows of real text as (inputs, targets), each (rows, seq) int64."""

    def __init__(self, options: argparse.Namespace) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py"))[:40])
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.sequence = options.sequence
        self.generator = torch.Generator().manual_seed(options.seed)

    def draw(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        last = len(self.text) - self.sequence - 1
        starts = torch.randint(last, (rows, 1), generator=self.generator)
        windows = self.text[starts + torch.arange(self.sequence + 1)].long()
        return windows[:, :-1], windows[:, 1:]
