"""A local swarm of paced peers, each process in a host of the lab."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _lab import Lab
from _namespaces import enter
from _paced_swarm import COSTS, SECONDS, PacedSwarm, swarm_of
from _paced_swarm import peer as paced_peer

from peer import local_entry, witness
from peer.local import LEADER
from peer.local_table import letters
from swarm.config import RunConfig

HOSTS = "SWARM_BENCH_HOSTS"  # environment: JSON, by the name of the process: namespace, address


class LabSwarm(PacedSwarm):
    leader_target = "_lab_swarm:leader"
    peer_target = "_lab_swarm:peer"


@contextmanager
def lab_swarm(
    lab: Lab, config: RunConfig, peers: Mapping[int, int], pace: tuple[float, float] | None
) -> Iterator[LabSwarm]:
    """A swarm to be started, with a host for the leader and one for each peer. `pace`: seconds of
    a forward and a backward; None: they really compute, and share this machine's cores."""
    names = [LEADER]
    names += [f"{stage}{letters(n)}" for stage, count in peers.items() for n in range(count)]
    places = [(host.namespace, host.address) for host in lab.hosts]
    os.environ[HOSTS] = json.dumps(dict(zip(names, places, strict=True)))
    os.environ[COSTS] = ""
    with swarm_of(LabSwarm, config, peers, pace or ()) as swarm:
        yield swarm


def leader(arguments: Mapping[str, Any], tell: local_entry.Tell) -> int:
    return witness.leader(_moved(arguments, LEADER), tell)


def peer(arguments: Mapping[str, Any], tell: local_entry.Tell) -> int:
    serve = paced_peer if os.environ[SECONDS] else witness.peer
    return serve(_moved(arguments, Path(arguments["data_dir"]).name), tell)


def _moved(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Into the host of this process; what it listens at there."""
    namespace, address = json.loads(os.environ[HOSTS])[name]
    enter(namespace)
    return {**arguments, "listen": [f"/ip4/{address}/tcp/0"]}
