"""`swarm demo` without a terminal: from nothing to a model that anybody can load, or to Ctrl-C."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.process.forks import Forks


def test_the_demo_leaves_a_model_and_nothing_else(forks: Forks, tmp_path: Path) -> None:
    demo = forks.swarm("demo", "--minutes", "0.05", "--plain")
    assert demo.code() == 0, demo
    assert demo.err == ""
    assert "serves its stage" in demo.out
    steps = [line for line in demo.out.splitlines() if line.startswith("step ")]
    assert steps
    assert all("tokens/s" in line for line in steps), "a step without its facts"
    assert [int(line.split()[1]) for line in steps] == list(range(len(steps)))
    assert " left:" not in demo.out  # of peers that were told to go
    (run_dir,) = (tmp_path / "runs").iterdir()
    said = f"trained {len(steps)} steps; the model is in {run_dir.relative_to(tmp_path)}/model"
    assert said in demo.out
    assert "it writes:\n\ndef " in demo.out

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    tokens = tokenizer("def swarm(", return_tensors="pt").input_ids
    assert tokens.shape == (1, 10)
    assert model(tokens).logits.shape == (1, 10, 256)


@pytest.mark.parametrize("said", ["a swarm of 3 stages", "step 1 "], ids=["starting", "training"])
def test_ctrl_c_of_the_demo_leaves_nothing(forks: Forks, said: str) -> None:
    demo = forks.swarm("demo", "--plain")
    demo.says(said)
    above = psutil.Process(forks.server.pid)  # what loses its parent becomes its child
    processes = above.children(recursive=True)
    if said == "step 1 ":  # the demo, its fork server, leader, six peers and dashboard; daemons
        names = [each.name() for each in processes]
        assert len(names) >= 10 + 7, names
        assert names.count("p2pd") >= 7, names
    began = time.monotonic()
    demo.signal(signal.SIGINT)
    assert demo.code() == 130, demo
    assert time.monotonic() - began < 5
    processes += above.children(recursive=True)
    _, left = psutil.wait_procs(processes, timeout=0.5)
    assert left == []
    assert list(Path(forks.environment["TMPDIR"]).iterdir()) == []
    assert demo.err == ""
    assert "it writes" not in demo.out
