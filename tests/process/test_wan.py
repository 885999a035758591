"""libp2p between homes that are a real delay apart: what loopback cannot show.

Needs root for network namespaces (`benchmarks/wan`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAB = Path(__file__).parents[2] / "benchmarks" / "wan"
sys.path.insert(0, str(LAB))  # its files are scripts, and import each other as such

from _lab import Lab  # noqa: E402
from _namespaces import LabError, require_root  # noqa: E402

DIALLER = str(Path(__file__).with_name("dialler.py"))
MEETINGS = 4  # with port reuse, about every other one failed


@pytest.fixture(scope="module", autouse=True)
def _root() -> None:
    try:
        require_root()
    except LabError as error:
        pytest.skip(str(error))


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
