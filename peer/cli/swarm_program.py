"""`swarm`: leads, inspects and exports runs.

Commands only parse, call and print; the work is elsewhere and imported when needed, so `--help`
answers at once. Every expected failure is one line that says what to do (`peer.cli.errors`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from peer.cli.errors import fail_in_one_line
from peer.cli.options import (
    CONTEXT,
    LISTEN,
    MAX_THREADS,
    Announce,
    Debug,
    Device,
    Listen,
    Plain,
    Report,
    Resume,
    RunDir,
    RunFile,
    SecondStages,
    Steps,
    Threads,
    Version,
)
from swarm.errors import StorageError

app = typer.Typer(
    name="swarm",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings=CONTEXT,
)


@app.callback()
def of_all_commands(version: Version = False) -> None:
    """Train one large model together: lead, watch and export runs."""


@app.command()
def init(
    path: Annotated[
        Path, typer.Argument(help="File to write; missing directories are made.")
    ] = Path("run.toml"),
    debug: Debug = False,
) -> None:
    """Write a commented run.toml to start from."""
    with fail_in_one_line(debug):
        from peer.cli.command_line import command_line
        from peer.disk import write_durably
        from swarm.config_text import default_toml

        if path.is_dir():
            raise StorageError(f"{path} is a directory", "name a file in it")
        if path.exists():
            raise StorageError(f"{path} exists already", "name another file, or remove it first")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot write {path}: {(error.strerror or str(error)).lower()}",
                "name a file in a directory that you may write to",
            ) from None
        write_durably(path, default_toml().encode())
        typer.echo(f"wrote {path}; now: {command_line('swarm', 'up', path)}")


@app.command()
def train(
    run: RunFile,
    steps: Steps = None,
    report: Report = None,
    directory: RunDir = None,
    listen: Listen = None,
    announce: Announce = None,
    identity: Annotated[
        Path | None, typer.Option(help="Identity key file [default: one of this machine's].")
    ] = None,
    join: Annotated[
        str | None, typer.Option(help="The run's join link, for a trainer that stands by.")
    ] = None,
    lan: Annotated[bool, typer.Option("--lan", help="Be found by swarm-peer --lan.")] = False,
    resume: Resume = None,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Resume without the trainers that are gone: forks if they live."
        ),
    ] = False,
    second_stages: SecondStages = 0.0,
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Lead a run with whoever joins by its link.

    Started again in the same place it goes on where it was stopped. Where run.trainers lists
    several machines, all but one stand by, and one of them goes on when the leader is gone.
    --resume takes the run back to its newest checkpoint; with a changed file it begins a new run.
    """
    with fail_in_one_line(debug):
        from peer.commands import lead

        lead(
            run,
            steps=steps,
            report=report,
            directory=directory,
            listen=listen or LISTEN,
            announce=announce or [],
            identity=identity,
            join=join,
            lan=lan,
            resume=resume,
            accept_loss=accept_loss,
            second_stages=second_stages,
            plain=plain,
        )


@app.command("id")
def show_id(debug: Debug = False) -> None:
    """Print this machine's trainer id, for run.trainers."""
    with fail_in_one_line(debug):
        from peer.claims import trainer_id

        typer.echo(trainer_id())


@app.command()
def up(
    run: RunFile,
    peers: Annotated[
        str | None, typer.Option(help='Replicas per stage, as in "0:2,1:2,2:2"; default 1 each.')
    ] = None,
    steps: Steps = None,
    report: Report = None,
    directory: RunDir = None,
    threads: Threads = None,
    device: Device = "auto",
    web: Annotated[bool, typer.Option("--web", help="Serve a page about it meanwhile.")] = False,
    resume: Resume = None,
    second_stages: SecondStages = 0.0,
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Run a whole swarm on this machine.

    The leader and each peer are processes of their own, with their own identities.
    With --second-stages the leader may also move them.
    """
    with fail_in_one_line(debug):
        from peer.commands import run_locally

        run_locally(
            run,
            peers=peers,
            steps=steps,
            report=report,
            directory=directory,
            threads=threads,
            device=device,
            web=web,
            resume=resume,
            second_stages=second_stages,
            plain=plain,
        )


@app.command()
def demo(
    directory: RunDir = None,
    plain: Plain = False,
    minutes: Annotated[
        float, typer.Option(help="Stop training about this long after the start.", min=0.0, max=1e5)
    ] = 2.5,
    debug: Debug = False,
) -> None:
    """Train a small language model here and let it write.

    A real swarm of three stages of two replicas, on this Python's own library sources.
    """
    with fail_in_one_line(debug):
        from peer.demo import run_demo

        run_demo(directory, plain=plain, minutes=minutes)


@app.command()
def baseline(
    run: RunFile,
    steps: Steps = None,
    report: Report = None,
    threads: Annotated[
        int, typer.Option(help="CPU threads; 1 as local peers have.", min=1, max=MAX_THREADS)
    ] = 1,
    device: Device = "auto",
    resume: Resume = None,
    debug: Debug = False,
) -> None:
    """Train the same run in one process, to compare.

    With lossless codecs and float64 accumulation a swarm ends with the same sha256.
    """
    with fail_in_one_line(debug):
        from peer.commands import run_baseline

        run_baseline(run, steps=steps, report=report, threads=threads, device=device, resume=resume)


@app.command()
def chaos(
    run: RunFile,
    minutes: Annotated[
        float, typer.Option(help="Train under faults for this long.", min=0.0, max=1e5)
    ] = 5.0,
    seed: Annotated[int, typer.Option(help="Which schedule of faults.")] = 0,
    peers: Annotated[
        str | None, typer.Option(help='Replicas per stage, as in "0:2,1:3"; default 2 each.')
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between faults, about.", min=0.5)] = 5.0,
    directory: RunDir = None,
    debug: Debug = False,
) -> None:
    """Kill, freeze and replace processes of a local swarm, and compare.

    Fails unless the parameters are those of the baseline, bit for bit.
    """
    with fail_in_one_line(debug):
        from peer.chaos import check_result, run_chaos

        check_result(
            run_chaos(
                run, minutes=minutes, seed=seed, peers=peers, every_s=every, directory=directory
            )
        )


@app.command()
def status(
    where: Annotated[
        str | None,
        typer.Argument(
            help="Join link or run directory "
            "[default: $SWARM_JOIN, else the newest run here, else the last joined]."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole status as JSON.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show how a swarm is doing."""
    with fail_in_one_line(debug):
        from peer.status import show_status

        show_status(where, as_json=as_json)


@app.command()
def dashboard(
    join: Annotated[
        str | None,
        typer.Option(help="Join link [default: $SWARM_JOIN, else the last swarm joined]."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the page [default: 8765, or any free one].", min=0, max=65535),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to serve on; 0.0.0.0 for everybody.")
    ] = "127.0.0.1",
    data_dir: Annotated[
        Path | None, typer.Option(help="Where its history is kept [default: XDG data home].")
    ] = None,
    hide_join: Annotated[
        bool, typer.Option("--hide-join", help="Do not show the join command on the page.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Serve a web page about a swarm.

    It joins as an onlooker: it reads, and can change nothing.
    """
    with fail_in_one_line(debug):
        from peer.web_entry import run_dashboard

        run_dashboard(join, host=host, port=port, data_dir=data_dir, hide_join=hide_join)


@app.command("report")
def write_report(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write; missing directories are made [default: RUN_DIR/report.html]."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write one HTML file about a recorded run.

    It needs no network, and plays the run again.
    """
    with fail_in_one_line(debug):
        from peer.web_entry import write_run_report

        typer.echo(f"wrote {write_run_report(directory, out)}")


@app.command()
def checkpoint(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Of a leader that trains on this machine.")
    ],
    debug: Debug = False,
) -> None:
    """Have the leader save the run now, after the step it is in."""
    with fail_in_one_line(debug):
        from peer.on_demand import save_now

        typer.echo(f"wrote {save_now(directory, typer.echo)}")


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run or checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Hugging Face directory to write.")],
    debug: Debug = False,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face directory."""
    with fail_in_one_line(debug):
        from peer.export import export_checkpoint

        manifest = export_checkpoint(directory, out, say=typer.echo)
        typer.echo(f"wrote {out}, of step {manifest['step']}")


@app.command()
def generate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An exported model.")],
    text: Annotated[str, typer.Argument(help="What to continue.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to add.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    debug: Debug = False,
) -> None:
    """Let an exported model continue a text."""
    with fail_in_one_line(debug):
        from swarm.model.generate import generate as generate_text

        typer.echo(
            generate_text(
                directory, text, max_new_tokens=tokens, temperature=temperature, seed=seed
            )
        )


@app.command("eval")
def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An exported model.")],
    run: Annotated[Path, typer.Option("--run", help="run.toml whose validation data to use.")],
    microbatches: Annotated[int, typer.Option(help="Validation microbatches to use.", min=1)] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Measure an exported model's loss on a run's validation data."""
    with fail_in_one_line(debug):
        from peer.commands import evaluate_export
        from swarm.events import plain_json

        result = evaluate_export(directory, run, microbatches)
        as_text = _evaluation_line(result)
        typer.echo(json.dumps(plain_json(result), allow_nan=False) if as_json else as_text)


def _evaluation_line(result: dict[str, Any]) -> str:
    return f"loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}"


@app.command()
def simulate(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO.toml", help="Stages, peers, churn, policies.")
    ],
    out: Annotated[Path, typer.Option(help="Directory for the results.")] = Path("simulation"),
    seeds: Annotated[
        int | None, typer.Option(help="Seeds to run [default: the scenario's].", min=1)
    ] = None,
    debug: Debug = False,
) -> None:
    """Simulate a swarm under churn, with the routing and the planner of a real one."""
    with fail_in_one_line(debug):
        from peer.simulate import simulate as run_simulation

        run_simulation(scenario, out, seeds=seeds, say=typer.echo)


@app.command("plan")
def plan_layout(
    run: RunFile,
    machines: Annotated[
        Path, typer.Option(help="TOML file of [[machines]]: name, tflops, memory_gib, up_mbps.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Propose cut, replicas and codec of a run for given machines and links."""
    with fail_in_one_line(debug):
        from peer.plan import plan, text_of

        found = plan(run, machines)
        typer.echo(json.dumps(found) if as_json else text_of(found))
