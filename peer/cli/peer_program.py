"""`swarm-peer`: serves stages of a swarm; built as `peer.cli.swarm_program` is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peer.cli.errors import fail_in_one_line
from peer.cli.options import CONTEXT, LISTEN, Announce, Debug, Device, Listen, Threads, Version
from swarm.net.transport import MAX_CONNECTIONS

peer_app = typer.Typer(
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings=CONTEXT,
)


@peer_app.command()
def serve(
    join: Annotated[
        str | None,
        typer.Option(help="Join link [default: $SWARM_JOIN, else the last swarm joined]."),
    ] = None,
    stage: Annotated[
        str,
        typer.Option(help="Stages to stay in, as 1 or 0,2; auto: where a replica is missed most."),
    ] = "auto",
    device: Device = "auto",
    threads: Threads = None,
    memory: Annotated[
        int | None,
        typer.Option(help="Most MiB of memory to serve with [default: what is free].", min=1),
    ] = None,
    listen: Listen = None,
    announce: Announce = None,
    connections: Annotated[
        int,
        typer.Option(
            help="TCP connections to each peer that averages, of a daemon each: for a line that "
            "loses packets, without BBR.",
            min=1,
            max=MAX_CONNECTIONS,
        ),
    ] = 1,
    identity: Annotated[
        Path | None, typer.Option(help="Identity key file [default: one of this machine's].")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the identity lives [default: XDG data home].")
    ] = None,
    drain_s: Annotated[
        float, typer.Option(help="After Ctrl-C, finish and hand over for this long at most.", min=0)
    ] = 30.0,
    lan: Annotated[bool, typer.Option("--lan", help="Find a run on the local network.")] = False,
    allow_pipeline: Annotated[
        str | None,
        typer.Option(help="Serve a run of this installed package.module:object, which you trust."),
    ] = None,
    pretrained: Annotated[
        Path | None, typer.Option(help="Your copy of the model that the run starts from.")
    ] = None,
    name: Annotated[
        str, typer.Option(help="Name yourself in public as a contributor [default: unnamed].")
    ] = "",
    version: Version = False,
    debug: Debug = False,
) -> None:
    """Serve a stage of a swarm with this machine.

    Trains until the run is finished; Ctrl-C leaves politely, a second one at once.
    """
    with fail_in_one_line(debug):
        from peer.serve import serve_stage

        serve_stage(
            join,
            stage=stage,
            device=device,
            threads=threads,
            memory_mib=memory,
            listen=listen or LISTEN,
            announce=announce or [],
            connections=connections,
            identity=identity,
            data_dir=data_dir,
            drain_s=drain_s,
            lan=lan,
            allow_pipeline=allow_pipeline,
            pretrained=pretrained,
            name=name,
        )
