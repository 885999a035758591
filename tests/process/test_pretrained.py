"""A run that starts from a local Hugging Face directory: its weights and its tokenizer."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.commands import evaluate_export
from peer.launch import stamp
from swarm.config import load_config
from swarm.data import build_dataset
from swarm.data.tokenizer import train_bpe
from swarm.model.huggingface import token_loss
from tests.process.forks import Forks

LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")
TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on\n" * 600
TOML = """
[run]
name = "tuned"
[model]
pretrained = "~/pretrained"
stages = 2
[data]
source = "text"
path = "~/corpus.txt"
tokenizer = "pretrained"
vocab_size = 300
sequence = 16
[batch]
microbatches = 4
microbatch_size = 2
[schedule]
steps = 3
[optimizer]
lr = 0.01
[validation]
every = 0
"""


@pytest.fixture
def directory(forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a user downloads: a GPT-2, so its output is tied to its embedding, and its BPE."""
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # of the ~ in run.toml
    forks.environment["HOME"] = str(tmp_path)
    (tmp_path / "corpus.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(TOML)
    path = tmp_path / "pretrained"
    tokenizer = train_bpe(iter([TEXT.encode()]), 300)
    torch.manual_seed(5)
    config = GPT2Config(
        n_embd=32, n_layer=3, n_head=2, n_positions=32, vocab_size=300, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    assert config.tie_word_embeddings
    GPT2LMHeadModel(config).save_pretrained(path)
    tokenizer.save_tokenizer(path)
    return path


def own_loss(directory: Path, batches: list[dict[str, np.ndarray]]) -> float:
    """The directory's own loss, as Hugging Face loads it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    losses, tokens = [], 0
    with torch.no_grad():
        for batch in batches:
            fields: dict[str, Tensor] = {k: torch.from_numpy(v) for k, v in batch.items()}
            logits = model(input_ids=fields["tokens"].long()).logits
            losses.append(token_loss(logits, fields).item())
            tokens += fields["targets"].numel()
    return math.fsum(losses) / tokens


def test_a_swarm_goes_on_from_pretrained_weights(
    forks: Forks, directory: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    swarm = forks.swarm(
        "up", "run.toml", "--threads", "1", "--plain", "--report", "report", "--dir", "run"
    )
    assert swarm.code() == 0, swarm
    assert "its output layer is tied to its embedding: they start equal, trained apart" in swarm.out
    *steps, final = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]

    config = stamp(load_config("run.toml"), "test", tmp_path / "cache" / "swarm-parallel")
    dataset = build_dataset(config, tmp_path / "cache" / "swarm-parallel")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    seen = dataset.batch(0, 0)["tokens"][0]
    assert seen.max() > 255  # tokens of its BPE
    assert tokenizer.decode(seen).strip() in TEXT
    batches = [dataset.batch(0, index) for index in range(4)]
    assert steps[0]["loss"] == pytest.approx(own_loss(directory, batches), rel=1e-6)
    assert steps[-1]["loss"] < steps[0]["loss"]
    dataset.close()

    oracle = forks.swarm("baseline", "run.toml", "--report", "baseline")
    assert oracle.code() == 0, oracle
    last = json.loads((tmp_path / "baseline").read_text().splitlines()[-1])
    assert last["sha256"] == final["sha256"]

    assert forks.swarm("export", "run", "model").code() == 0
    model = AutoModelForCausalLM.from_pretrained("model")
    assert not model.config.tie_word_embeddings
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.shape == embedding.shape
    assert not torch.equal(head, embedding)  # they were trained apart
    exported = AutoTokenizer.from_pretrained("model")
    assert exported("the lazy fox").input_ids == tokenizer("the lazy fox").input_ids
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (
        directory / "tokenizer.json"
    ).read_bytes()
    evaluated = evaluate_export(tmp_path / "model", tmp_path / "run.toml", 2)
    assert evaluated["loss"] < steps[0]["loss"]


def test_a_peer_brings_its_own_copy(forks: Forks, directory: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    leader = forks.swarm("train", "run.toml", *LOCAL, "--plain")
    join = ("--join", leader.link, *LOCAL)
    shutil.copytree(directory, tmp_path / "copy")
    shutil.copytree(directory, tmp_path / "other")
    GPT2LMHeadModel(GPT2Config.from_pretrained(directory)).save_pretrained(tmp_path / "other")
    other = forks.peer(*join, "--pretrained", "other")
    nothing = forks.peer(*join)
    assert (other.code(), nothing.code()) == (3, 2)
    assert "the bytes hash to" in other.err
    assert "start with --pretrained DIR" in nothing.err
    peers = [forks.peer(*join, "--pretrained", "copy", "--stage", str(k)) for k in range(2)]
    assert leader.code() == 0, leader
    assert "finished: 3 steps" in leader.out
    assert [peer.code() for peer in peers] == [0, 0]
