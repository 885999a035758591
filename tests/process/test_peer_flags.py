"""What `swarm-peer` is told by flags that nothing else of a run shows: all of them, of one peer."""

from __future__ import annotations

from pathlib import Path

from tests.process.forks import Forks

LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")

# The user's own module, in the peer's process, can say what is so there.
PACKAGE = """
import gc
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from torch import nn

from peer.kept import KeptAnswers
from peer.member import Member
from swarm.model import Pipeline


class Line(nn.Linear):
    def forward(self, x):
        limits = {each.limit_bytes for each in gc.get_objects() if type(each) is KeptAnswers}
        if limits:
            memory = {each.memory_bytes for each in gc.get_objects() if type(each) is Member}
            daemons = [each.name() for each in psutil.Process().children()].count("p2pd")
            print(f"threads {torch.get_num_threads()}, limits {sorted(limits)},"
                  f" memory {sorted(memory)}, daemons {daemons}", flush=True)
        return super().forward(x)


fields = {"x": np.ones((8, 4), np.float32), "y": np.zeros((8, 1), np.float32)}
pipeline = Pipeline(
    layers={"line": lambda: Line(4, 1)},
    inputs=lambda batch: batch["x"],
    loss=lambda outputs, batch: ((outputs[0] - batch["y"]) ** 2).sum(),
    weight=lambda batch: len(batch["y"]),
    data=lambda: SimpleNamespace(train=fields, validation=fields),
)
"""
RUN = """
[run]
name = "flags"
[model]
stages = 1
pipeline = "telling_package:pipeline"
[data]
source = "pipeline"
[batch]
microbatches = 1
microbatch_size = 2
[schedule]
steps = 2
warmup_steps = 0
[validation]
every = 0
"""


def test_what_a_peer_is_told_is_what_it_does(forks: Forks, tmp_path: Path) -> None:
    """Its key is where it was told, it computes with as many threads and offers as much memory as
    its owner allows, keeps answers in a quarter of that, and has a daemon for each connection."""
    (tmp_path / "telling_package.py").write_text(PACKAGE)
    (tmp_path / "run.toml").write_text(RUN)
    here = {"PYTHONPATH": str(tmp_path)}
    leader = forks.swarm("train", "run.toml", "--dir", "led", *LOCAL, **here)
    peer = forks.peer(
        *("--join", leader.link, "--allow-pipeline", "telling_package:pipeline", *LOCAL),
        *("--threads", "3", "--memory", "8"),  # the run allows 512, and tests use one thread
        *("--identity", "keys/mine.key", "--connections", "3"),
        **here,
    )
    assert leader.code() == 0, leader
    assert peer.code() == 0, peer
    told = {line for line in peer.out.splitlines() if line.startswith("threads")}
    assert told == {f"threads 3, limits {[2 << 20]}, memory {[8 << 20]}, daemons 3"}
    key = tmp_path / "keys" / "mine.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert not list((tmp_path / "home").rglob("peer/*.key")), "another identity was made"
