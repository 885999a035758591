"""The commands of the README, run as they stand there, in its order, in one place.

Only what would take long or needs another machine is changed: `--steps` stops early, addresses are
this machine's, and `runs/NAME-ID` and the link are those that were printed.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from peer.cli import INTERRUPTED
from swarm.config import load_config
from tests.process.forks import LIMIT_S, Command, Forks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
STEPS = 2
SHORT = ("--steps", str(STEPS))
LEARNING = 8  # steps in which the model of `swarm init` learns


def blocks_with(text: str) -> list[str]:
    """The console blocks that hold this text."""
    return [block for block in re.findall(r"```console\n(.*?)```", README, re.S) if text in block]


def commands(block: str) -> list[list[str]]:
    lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line, comments=True) for line in lines]


def report(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    *steps, final = [json.loads(line) for line in path.read_text().splitlines()]
    return steps, final


@pytest.fixture
def run(forks: Forks) -> Callable[..., Command]:
    """Runs a command of ours to its good end."""

    def run(words: list[str], *more: str) -> Command:
        assert words[0] == "swarm"
        command = forks.swarm(*words[1:], *more)
        assert command.code() == 0, command
        assert command.err == ""
        return command

    return run


def test_your_own_run(run: Callable[..., Command], tmp_path: Path) -> None:
    (first,), (second,) = blocks_with("swarm init"), blocks_with("swarm export")
    said: dict[str, Command] = {}
    for words in [*commands(first), *commands(second)]:
        name = words[1]
        words = [word.replace("runs/NAME-ID", run_dir(said)) for word in words]
        if name in ("up", "baseline"):
            steps = ("--steps", str(LEARNING))
            said[name] = run(words, *steps, "--report", f"{name}.jsonl")
        elif name == "eval":
            said[name] = run(words, "--microbatches", "2")
        else:
            said[name] = run(words)
    assert list(said) == ["init", "up", "status", "baseline", "export", "generate", "eval"]

    config = load_config(tmp_path / "run.toml")
    assert config.model.stages == 3
    (up, final), (baseline, same) = (report(tmp_path / f"{n}.jsonl") for n in ("up", "baseline"))
    assert [step["step"] for step in up] == list(range(LEARNING))
    assert up[0]["loss"] == pytest.approx(math.log(256), abs=0.3)  # bytes, nothing learned yet
    assert up[-1]["loss"] < up[0]["loss"] - 0.8, "it does not learn"
    assert [each["loss"] for each in up] == [each["loss"] for each in baseline]
    assert final["sha256"] == same["sha256"]
    assert final["stages"] == same["stages"]
    assert f"finished: {LEARNING} steps, sha256 {final['sha256']}" in said["up"].out
    assert f"finished: {LEARNING} steps, sha256 {final['sha256']}" in said["baseline"].out
    assert "finished" in said["status"].out
    assert f"step {LEARNING} of {LEARNING}" in said["status"].out
    assert all(f"stage {stage}" in said["status"].out for stage in range(3))
    placement = json.loads((tmp_path / run_dir(said) / "status.json").read_text())["placement"]
    assert min(placement["stages"]) > 0, "what they reached stays when they have left"
    assert (tmp_path / "model" / "config.json").is_file()
    assert said["generate"].out.startswith("def ")
    assert len(said["generate"].out) > 50
    loss = float(re.match(r"loss (\S+), perplexity", said["eval"].out)[1])  # type: ignore[index]
    assert loss == pytest.approx(up[-1]["loss"], abs=0.5)


def run_dir(said: dict[str, Command]) -> str:
    """The run directory that `swarm up` named."""
    if "up" not in said:
        return "runs/NAME-ID"
    return re.search(r"swarm export (\S+) OUT", said["up"].out)[1]  # type: ignore[index]


def test_see_it(forks: Forks, run: Callable[..., Command], tmp_path: Path) -> None:
    """The page of who leads a run, an onlooker's, and the file of what was recorded."""
    run(["swarm", "init", "run.toml"])
    (block,) = blocks_with("swarm dashboard")
    (_, *up), (_, *look_on), recorded = commands(block)
    leader = forks.swarm(*up)
    look_on = [leader.link if word == "LINK" else word for word in look_on]
    name = load_config(tmp_path / "run.toml").run.name
    for command in (forks.swarm(*look_on, "--port", "0"), leader):
        command.says("dashboard: http://")
        url = address(command)
        forks.until(lambda url=url: name in page(url), f"{name!r} on {command}")
        command.signal(signal.SIGINT)
        assert command.code() == INTERRUPTED, command
    (run_dir,) = (tmp_path / "runs").iterdir()
    said = run([word.replace("runs/NAME-ID", str(run_dir)) for word in recorded])
    assert said.out == f"wrote {run_dir / 'report.html'}\n"
    assert (run_dir / "report.html").is_file()


def address(command: Command) -> str:
    (url,) = re.findall(r"^dashboard: (http://\S+)", command.out, re.M)
    return str(url)


def page(url: str) -> str:
    with urlopen(url, timeout=LIMIT_S) as answer:
        text: str = answer.read().decode()
        return text


def test_from_several_machines(forks: Forks, run: Callable[..., Command], tmp_path: Path) -> None:
    """A leader, and three peers that are given the very line it prints."""
    run(["swarm", "init", "run.toml"])
    (leads,), (joins,) = blocks_with("swarm train"), blocks_with("pip install -c")
    ((_, *train),) = commands(leads)
    assert train[:2] == ["train", "run.toml"]
    (listen,) = [word for word in train if word.startswith("/ip4/")]
    here = re.sub(r"0\.0\.0\.0/tcp/\d+", "127.0.0.1/tcp/0", listen)
    leader = forks.swarm(*[here if word == listen else word for word in train], *SHORT)
    printed = re.search(r"^join with: (swarm-peer --join \S+)$", f"{leader.link and leader.out}",
                        re.M)  # fmt: skip
    assert printed is not None
    shown = re.search(r"^join with: (swarm-peer --join) swarm://\S+$", leads, re.M)
    assert shown is not None
    assert printed[1].startswith(shown[1])
    _, *join = shlex.split(printed[1])
    peers = [forks.peer(*join, "--listen", here) for _ in range(3)]
    assert leader.code() == 0, leader
    assert f"finished: {STEPS} steps" in leader.out
    for peer in peers:
        assert peer.code() == 0, peer
    expected = [line for line in joins.splitlines() if line and not line.startswith("$ ")]
    said = [list(phases(peer.out)) for peer in peers]
    for line in phases("\n".join(expected)):
        if not line.startswith("downloading"):  # nothing is trained yet, so nothing to fetch
            assert all(line in each for each in said), (line, said)
    assert {n for peer in peers for n in re.findall(r"^serving stage (\d)$", peer.out, re.M)} == {
        "0", "1", "2"
    }  # fmt: skip


def phases(text: str) -> Iterator[str]:
    """Lines without their numbers, and without reasons."""
    return (re.sub(r"\d+", "N", line).partition(": ")[0] for line in text.splitlines())


def test_what_is_proven_at_first(run: Callable[..., Command], tmp_path: Path) -> None:
    """The table's first two rows: the swarm's sha256 is the baseline's."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    rows = [line for line in README.splitlines() if line.startswith("| ") and "`swarm up" in line]
    assert len(rows) == 1
    up, baseline = (shlex.split(each) for each in re.findall(r"`(swarm [^`]*)`", rows[0]))
    (also,) = re.findall(r"the same with `(\S+\.toml)`", README)
    for path in ("examples/exact.toml", also):
        for name, words in (("up", up), ("baseline", baseline)):
            words = [path if word == "examples/exact.toml" else word for word in words]
            run(words, *SHORT, "--report", f"{name}-of-{Path(path).parent.name}.jsonl")
        (steps, final), (others, same) = (
            report(tmp_path / f"{name}-of-{Path(path).parent.name}.jsonl")
            for name in ("up", "baseline")
        )
        assert [each["loss"] for each in steps] == [each["loss"] for each in others]
        assert final["sha256"] == same["sha256"], path
        assert final["stages"] == same["stages"], path
