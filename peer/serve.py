"""`swarm-peer`, once its flags are parsed: which swarm, which identity, and how it is left."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peer.cli.checks import (
    check_addresses,
    check_device_name,
    check_pipeline_name,
    check_pretrained_directory,
    stage_numbers,
)
from peer.interrupt import until_interrupted
from peer.places import data_home
from peer.streams import forgive_lost_lines
from swarm.errors import ConfigError, JoinError, StorageError
from swarm.words import clean

if TYPE_CHECKING:
    from swarm.net.link import JoinLink

LAST_SWARM = "last-swarm"
JOIN_VARIABLE = "SWARM_JOIN"
LAN_TIMEOUT_S = 10.0
MAX_NAME_CHARS = 40


def serve_stage(
    join: str | None,
    *,
    stage: str,
    device: str,
    threads: int | None,
    memory_mib: int | None,
    listen: Sequence[str],
    announce: Sequence[str],
    connections: int,
    identity: Path | None,
    data_dir: Path | None,
    drain_s: float,
    lan: bool,
    allow_pipeline: str | None,
    pretrained: Path | None,
    name: str,
) -> None:
    """`swarm-peer`: serve stages until the run is finished or the user has enough.

    What the user typed is checked first, then a line is said, and only then come the imports that
    take seconds.
    """
    from swarm.net.identity import claim_identity, claim_identity_file
    from swarm.net.link import format_link

    stages = stage_numbers(stage)
    check_device_name(device)
    check_addresses(listen, announce)
    check_pipeline_name(allow_pipeline)
    check_pretrained_directory(pretrained)
    home = data_dir or data_home() / "peer"
    if lan and join is not None:
        raise ConfigError("--lan finds a run, --join names one", "give one of them")
    refuse_empty_link(join)
    if lan:
        join = _find_on_lan()
    join = join or os.environ.get(JOIN_VARIABLE) or last_swarm(home)
    if not join:
        raise JoinError(
            "no swarm to join",
            "ask whoever leads a run for its link (swarm train prints it) and pass --join LINK",
        )
    link = read_link(join)
    was_there = (last_swarm(home) or "").startswith(format_link(link.run_id, ()))
    mine = claim_identity_file(identity) if identity else claim_identity(home)
    forgive_lost_lines()
    print("starting", flush=True)
    from peer.run_peer import NEW_LINK_S, PeerOptions, PeerProcess

    options = PeerOptions(
        stages=stages,
        device=device,
        threads=threads,
        memory_mib=memory_mib,
        listen=tuple(listen),
        announce=tuple(announce),
        connections=connections,
        allow_pipeline=allow_pipeline,
        pretrained=pretrained,
        name=clean(name, MAX_NAME_CHARS),
        give_up_s=math.inf if was_there else NEW_LINK_S,
    )

    def remember(worked: str) -> None:
        from peer.disk import write_durably

        with contextlib.suppress(OSError, StorageError):  # a convenience, not worth a failure
            home.mkdir(parents=True, exist_ok=True, mode=0o700)  # where the key is elsewhere
            write_durably(home / LAST_SWARM, worked.encode())

    process = PeerProcess(
        link, mine, options, say=lambda line: print(line, flush=True), remember=remember
    )

    async def leave() -> bool:
        print("leaving (again: at once)", file=sys.stderr, flush=True)
        return await process.drain(drain_s)

    try:
        until_interrupted(process.run(), leave)
    except KeyboardInterrupt:
        print("left", flush=True)


def refuse_empty_link(join: str | None, name: str = "--join") -> None:
    """As of a variable that is not set: it must not mean another swarm, or none."""
    if join is not None and not join.strip():
        raise JoinError(f"{name} is empty", "pass the link that `swarm train` printed")


def read_link(join: str) -> JoinLink:
    """Of a user or of $SWARM_JOIN, which is named if it is wrong. Raises JoinError."""
    from swarm.net.link import parse_link

    try:
        return parse_link(join)
    except JoinError as error:
        if join == os.environ.get(JOIN_VARIABLE):
            raise JoinError(f"${JOIN_VARIABLE}: {error.message}", error.remedy) from None
        raise


def last_swarm(home: Path | None = None) -> str | None:
    """The link of the swarm that was joined last; None where there is none that could be used."""
    from swarm.net.link import parse_link

    path = (home or data_home() / "peer") / LAST_SWARM
    try:
        return str(parse_link(path.read_text()))
    except (OSError, UnicodeDecodeError, JoinError):
        return None


def _find_on_lan() -> str:
    from peer.interrupt import run_loop
    from peer.lan import find_on_lan
    from swarm.net.link import format_link

    links = run_loop(find_on_lan(None, LAN_TIMEOUT_S))
    if not links:
        raise JoinError("no swarm was found on the local network", "pass its link with --join")
    if len(links) > 1:
        some = [format_link(link.run_id, link.addresses[:1]) for link in map(read_link, links[:3])]
        raise JoinError(
            f"{len(links)} swarms are on the local network, as {' and '.join(some)}",
            "pass one's link with --join",
        )
    return links[0]
