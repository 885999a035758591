"""`swarm chaos` itself: real processes under a short schedule, and the verdict on them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from tests.process.forks import Forks, toml


def test_nothing_is_lost_under_faults(forks: Forks, tmp_path: Path) -> None:
    """By the schedule of this seed a peer is killed first, then the leader, then a peer leaves."""
    run = toml(tmp_path / "run.toml", steps=100_000, stages=2, extra="[checkpoint]\nevery = 0\n")
    options = ("--minutes", "0.6", "--every", "1", "--seed", "3922", "--dir", tmp_path / "run")
    chaos = forks.swarm("chaos", run, *options)
    chaos.says("now the baseline of ")
    assert chaos.code() == 0, chaos
    assert chaos.err == ""
    *lines, last = chaos.out.splitlines()
    facts = json.loads(last)
    assert (facts["lost"], facts["duplicated"], facts["unwitnessed"]) == (0, 0, 0), chaos
    assert facts["equal"] is True
    assert facts["sha256"] == facts["baseline_sha256"]
    assert facts["steps"] > 0
    assert facts["microbatches"] == facts["steps"] * 2 * 6
    struck = [line.split()[2] for line in lines if re.match(r" *[0-9.]+ s  [a-z_]+ ", line)]
    assert struck[:3] == ["kill", "leader_kill", "leave"], chaos
    assert facts["faults"] == Counter(struck), chaos
    assert facts["num_faults"] == len(struck), chaos
    assert facts["unclean_leaves"] == facts["unexpected_ends"] == [], chaos
    assert facts["joins"] > 0, chaos
    assert any(line.startswith("baseline ") and line.endswith(" equal") for line in lines)
