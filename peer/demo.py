"""`swarm demo`: the main job from beginning to end, on this machine, in a few minutes.

A real swarm, three stages of two replicas, each a process with its own identity, trains the model
of `examples/demo.toml` on the Python library's own sources; then the model is exported as a Hugging
Face directory, loaded from there, and continues a line of Python.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import typer

from peer.claims import local_trainer, stamped
from peer.cli.command_line import command_line
from peer.commands import importing
from peer.export import export_checkpoint
from peer.local import LocalSwarm, num_cores
from peer.places import fresh_directory
from peer.show import follow
from swarm.config import parse_toml
from swarm.config_text import default_toml

REPLICAS = 2
PROMPT = "def "
SAMPLE_TOKENS = 300


def run_demo(directory: Path | None, *, plain: bool, minutes: float) -> None:
    """Train until about `minutes` after the start, export, and show what the model writes.

    Raises SwarmError; KeyboardInterrupt when the user has enough.
    """
    began = time.monotonic()
    config = parse_toml(default_toml(), "the demo's run.toml")
    trainer = local_trainer(config)
    peers = dict.fromkeys(range(config.model.stages), REPLICAS)
    with importing(config, max(1, num_cores() // sum(peers.values()))) as server:
        config = stamped(config, trainer.peer_id)
        run_dir = fresh_directory(config, directory)
        typer.echo(f"a swarm of {len(peers)} stages x {REPLICAS} replicas, in {run_dir}")
        final = follow(
            lambda say: LocalSwarm(
                config,
                run_dir,
                identity_path=trainer.path,
                claimed=True,
                peers=peers,
                report=run_dir / "report.jsonl",
                deadline_s=max(minutes * 60 - (time.monotonic() - began), 1.0),
                web=True,
                server=server,
                say=say,
            ),
            plain=plain,
        )
    model = run_dir / "model"
    export_checkpoint(run_dir, model, say=typer.echo)
    typer.echo(f"\ntrained {final['steps']} steps; the model is in {model}; it writes:\n")
    import torch

    from swarm.model.generate import generate

    torch.set_num_threads(1)  # so small a model only waits for a second one
    text = generate(model, PROMPT, max_new_tokens=SAMPLE_TOKENS, temperature=0.6, seed=1)
    typer.echo("".join(c if c.isprintable() or c == "\n" else " " for c in text))
    more = command_line(_program(), "generate", model, "import ")
    typer.echo(f"\nmore: {more}")


def _program() -> str:
    """How this program is called where it was called now."""
    return "swarm" if shutil.which("swarm") == sys.argv[0] else sys.argv[0]
