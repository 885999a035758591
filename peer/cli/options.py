"""Flags that several commands have, and how every command is set up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MAX_THREADS = 1024  # torch hangs, or takes all memory, with many more than there are cores
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's definition.")]
Steps = Annotated[
    int | None, typer.Option(help="Stop after this many steps (same schedule).", min=1)
]
Report = Annotated[
    Path | None,
    typer.Option(help="Write a report, JSON lines, to this file, or go on with this run's."),
]
RunDir = Annotated[
    Path | None, typer.Option("--dir", help="Where the run's files go [default: runs/NAME-ID].")
]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Go on from this run's or checkpoint's saved state."),
]
SecondStages = Annotated[
    float,
    typer.Option(
        help="Share of each stage's peers to hold the next one too: helps when peers die, "
        "costs memory and averaging.",
        min=0.0,
        max=1.0,
    ),
]
Plain = Annotated[bool, typer.Option("--plain", help="One line a step instead of the live view.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads per process [default: all cores, shared by local peers].",
        min=1,
        max=MAX_THREADS,
    ),
]
Listen = Annotated[
    list[str] | None, typer.Option(help="Multiaddr to listen on; repeatable [default: any port].")
]
Announce = Annotated[
    list[str] | None,
    typer.Option(help="Multiaddr at which others reach this peer, if it is another; repeatable."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:i.")]
LISTEN = ["/ip4/0.0.0.0/tcp/0"]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"swarm-parallel {version('swarm-parallel')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
]
