"""Machines of their own, a real network or a real delay apart: what loopback cannot show.

Needs root for network namespaces (`benchmarks/wan`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.process.forks import Forks, toml
from tests.process.lab import Host, Lab, given
from tests.process.test_lan import needs_lan

DIALLER = str(Path(__file__).with_name("dialler.py"))
MEETINGS = 4  # with port reuse, about every other one failed


pytestmark = pytest.mark.usefixtures("needs_root")


def test_a_lab_of_homes_gives_what_their_profile_says() -> None:
    """20 Mbit/s up and 60 ms: what the lab's results rest on. For so long that a loss at the end of
    TCP's slow start does not show; what a busy machine adds to a round trip may."""
    with Lab("home", 2) as lab:
        (line,) = given(lab, 5.0)
        hub = lab.close()
    assert line["line"] == "home"
    assert line["up_mbps"] == pytest.approx(20.0, rel=0.1), hub
    assert 60.0 <= line["round_trip_ms"] < 72.0, hub


def test_two_that_dial_each_other_at_the_same_moment_both_arrive() -> None:
    with Lab("fibre", 2) as lab:
        for _ in range(MEETINGS):
            peers = [
                lab.run(
                    host,
                    [sys.executable, DIALLER, host.address],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for host in lab.hosts
            ]
            try:
                heard = []
                for peer in peers:
                    assert peer.stdout is not None
                    heard.append(json.loads(peer.stdout.readline()))
                at = time.time() + 0.3
                for peer, other in zip(peers, reversed(heard), strict=True):
                    assert peer.stdin is not None
                    peer.stdin.write(json.dumps([*other, at]) + "\n")
                    peer.stdin.flush()
                met = [peer.stdout.readline() for peer in peers if peer.stdout is not None]
                said = [peer.communicate("\n", timeout=30) for peer in peers]
                assert met == ["met\n", "met\n"], said
            finally:
                for peer in peers:
                    peer.kill()
                    peer.wait()


@needs_lan
def test_a_run_is_joined_by_who_finds_it_on_the_local_network(forks: Forks, tmp_path: Path) -> None:
    """Two machines, and no link told from one to the other."""
    run = toml(tmp_path / "run.toml", steps=3, stages=1)
    started: list[subprocess.Popen[bytes]] = []

    def start(host: Host, program: str, *options: str | Path) -> Path:
        """What it says goes to the file."""
        log = tmp_path / f"{program}.log"
        with log.open("wb") as output:
            process = lab.run(
                host,
                [str(Path(sys.executable).with_name(program)), *map(str, options)],
                cwd=tmp_path,
                env={**os.environ, **forks.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return log

    def ended() -> bool:
        return all(process.poll() is not None for process in started)

    with Lab("lan", 2) as lab:
        try:
            leader = start(lab.hosts[0], "swarm", "train", run, "--lan")
            forks.until(lambda: "--join swarm://" in leader.read_text() or ended(), "a run")
            peer = start(lab.hosts[1], "swarm-peer", "--lan")
            forks.until(ended, "the end of both")
        finally:
            for process in started:
                process.kill()
                process.wait()
    said = leader.read_text() + peer.read_text()
    assert [process.returncode for process in started] == [0, 0], said
    assert "finished: 3 steps" in said
    assert "serving stage 0" in said
