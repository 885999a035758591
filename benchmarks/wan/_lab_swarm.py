"""A local swarm of paced peers, each process in a host of the lab."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _lab import Lab
from _namespaces import enter
from _paced_swarm import COSTS, SECONDS, PacedSwarm
from _paced_swarm import peer as paced_peer

from peer import local_entry, witness
from peer.launch import stamp
from peer.local import LEADER
from peer.local_table import letters
from swarm.config import RunConfig
from swarm.net.identity import claim_identity_file

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
    hosts = {
        name: (host.namespace, host.address) for name, host in zip(names, lab.hosts, strict=True)
    }
    os.environ[HOSTS] = json.dumps(hosts)
    os.environ[SECONDS], os.environ[COSTS] = " ".join(map(str, pace or ())), ""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        folder = Path(name)
        identity = claim_identity_file(folder / "identity.key")
        config = stamp(config, identity.peer_id)
        identity.release()
        swarm = LabSwarm(
            config,
            folder / "run",
            peers=peers,
            identity_path=identity.path,
            threads=1,
            device="cpu",
            say=lambda line: None,
        )
        swarm.served_at = {}
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
