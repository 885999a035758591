"""What the commands do, once their flags are parsed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.claims import (
    as_trainer,
    continued,
    is_over,
    last_vote,
    led_alone,
    led_by,
    local_trainer,
    ports_as_before,
    refuse_elsewhere,
    say_if_another,
    say_what_differs,
    stamped,
)
from peer.cli.checks import check_addresses, check_device_name
from peer.cli.command_line import command_line
from peer.cli.options import LISTEN
from peer.interrupt import until_interrupted
from peer.places import config_in, fresh_directory, refuse_another_run, run_directory
from peer.streams import forgive_lost_lines
from swarm.config import RunConfig, load_config
from swarm.errors import ConfigError, DataError, JoinError, StorageError

if TYPE_CHECKING:
    from peer.local_process import ForkServer
    from swarm.data import Dataset
    from swarm.terms import Record


# ---- swarm train --------------------------------------------------------------------------------


def lead(
    run: Path,
    *,
    steps: int | None,
    report: Path | None,
    directory: Path | None,
    listen: Sequence[str],
    announce: Sequence[str],
    identity: Path | None,
    join: str | None,
    lan: bool,
    resume: Path | None,
    accept_loss: bool,
    second_stages: float,
    plain: bool,
) -> None:
    """`swarm train`: lead the run of a file with whoever joins; goes on where it stopped."""
    from peer.lan import require_lan
    from peer.launch import steps_to_train
    from peer.run_leader import LeaderProcess
    from peer.serve import read_link, refuse_empty_link
    from peer.show import Follower
    from peer.view import TerminalView
    from swarm.placement import MovePolicy

    forgive_lost_lines()
    check_addresses(listen, announce)
    config = load_config(run)
    if accept_loss and resume is None:
        raise ConfigError("--accept-loss alone does nothing", "add --resume DIR")
    refuse_empty_link(join)
    link = read_link(join) if join is not None else None
    if lan:
        require_lan()
    same = None if resume is None else continued(config, resume)
    if same is not None:
        if led_alone(same, identity):
            refuse_elsewhere(same, directory)
        directory = directory or same
    named = config.run.trainers
    config, mine = as_trainer(config, directory, identity)
    if link is not None and link.run_id != config.run_id:
        raise JoinError(
            f"the link is of run {link.run_id}, this file and data make run {config.run_id}",
            "use the same run.toml and data as the other trainers"
            if named
            else "a run.toml that names no trainers is led by whoever starts it: list the "
            "`swarm id` of all in run.trainers, or help with swarm-peer --join LINK",
        )
    run_dir = run_directory(config, directory)
    refuse_another_run(run_dir, config)
    if same is not None:  # led with another identity; a refusal has said so already
        say_if_another(same, config, config_in(same))
    num_steps = steps_to_train(config, steps)
    known = last_vote(run_dir)
    committed = known.next_step
    if committed >= num_steps and resume is None:
        if is_over(run_dir, known):
            print(f"nothing to do: {committed} of {num_steps} steps are trained already")
            print(how_to_export(run_dir))
            return
        print(f"{committed} of {num_steps} steps are trained, and only the peers hold that state:")
        print("it is saved when they are here; if they are gone, go back with --resume")
    elif committed and resume is None:
        print(f"going on after {committed} steps, with the peers that hold them")
    with TerminalView(plain=plain) as view:
        if accept_loss and len(config.run.trainers) > 1:
            view.note("trainers that do not answer lose their vote: if they live, the run forks")
        process = LeaderProcess(
            config,
            run_dir,
            mine,
            steps=steps,
            report=report,
            on_link=lambda link: view.note(f"join with: swarm-peer --join {link}"),
            show=(follower := Follower(view, run_dir)).show,
            lan=lan,
            bootstrap=link.addresses if link else (),
            resume=resume,
            accept_loss=accept_loss,
            moves=MovePolicy(second_share=second_stages),
            say=view.note,
        )
        try:
            where = ports_as_before(run_dir, listen)
            final = until_interrupted(process.run(listen=where, announce=announce))
        except KeyboardInterrupt:
            pending = process.goes_back and not _has_gone_back(run_dir, known.committed)
            again = command_line(
                *("swarm", "train", run),
                steps=steps,
                report=report,
                dir=directory,
                listen=[] if list(listen) == LISTEN else listen,
                announce=announce,
                identity=identity,
                join=join,
                lan=lan,
                resume=resume if pending else None,
                accept_loss=pending and accept_loss,
                second_stages=second_stages or None,
                plain=plain,
            )
            if pending:  # without --resume it would go on from what is to be left
                view.note(f"stopped before anything came of --resume; {again} tries again")
            else:
                view.note(f"stopped; {again} goes on from here if the peers stay")
            raise
        finally:
            follower.refresh()
    if final is None:
        print("finished: another trainer led the run to its end")
        return
    print(f"finished: {final['steps']} steps, sha256 {final['sha256']}")
    print(how_to_export(run_dir))


def _has_gone_back(run_dir: Path, before: Record | None) -> bool:
    """Whether a trainer knows of a later epoch by now than of its newest record `before`."""
    with contextlib.suppress(StorageError):
        record = last_vote(run_dir).committed
        return record is not None and (before is None or record.epoch > before.epoch)
    return False


def how_to_export(run_dir: Path) -> str:
    return f"export with: {command_line('swarm', 'export', run_dir, 'OUT')}"


# ---- swarm up -----------------------------------------------------------------------------------


def run_locally(
    run: Path,
    *,
    peers: str | None,
    steps: int | None,
    report: Path | None,
    directory: Path | None,
    threads: int | None,
    device: str,
    web: bool,
    resume: Path | None,
    second_stages: float,
    plain: bool,
) -> None:
    """`swarm up`: a whole swarm on this machine."""
    from peer.local import LocalSwarm, num_cores, parse_peers
    from peer.show import follow

    forgive_lost_lines()
    check_device_name(device)
    config = load_config(run)
    default = dict.fromkeys(range(config.model.stages), 1)
    counts = default if peers is None else parse_peers(peers)
    if sorted(counts) != list(range(config.model.stages)):
        raise ConfigError(
            f"--peers names stages {sorted(counts)}, the run has 0 to {config.model.stages - 1}",
            "give every stage at least one replica",
        )
    same = None if resume is None else continued(config, resume)
    if same is not None:
        refuse_elsewhere(same, directory)
    trainer = local_trainer(config) if same is None else led_by(same)
    with importing(config, threads or max(1, num_cores() // sum(counts.values()))) as server:
        config = stamped(config, trainer.peer_id)
        run_dir = same or fresh_directory(config, directory)
        before = last_vote(run_dir).committed
        try:
            final = follow(
                lambda say: LocalSwarm(
                    config,
                    run_dir,
                    identity_path=trainer.path,
                    claimed=True,
                    peers=counts,
                    steps=steps,
                    report=report,
                    threads=threads,
                    device=device,
                    web=web,
                    resume=resume,
                    second_stages=second_stages,
                    server=server,
                    say=say,
                ),
                plain=plain,
            )
        except KeyboardInterrupt:
            again = command_line(
                *("swarm", "up", run),
                peers=peers,
                steps=steps,
                report=report,
                threads=threads,
                device=None if device == "auto" else device,
                web=web,
                resume=run_dir,
                second_stages=second_stages or None,
                plain=plain,
            )
            print(_where_it_stopped(run_dir, config, before, again))
            raise
    print(f"finished: {final['steps']} steps, sha256 {final['sha256']}")
    print(how_to_export(run_dir))


def _where_it_stopped(run_dir: Path, config: RunConfig, before: Record | None, again: str) -> str:
    """What is said of a stopped swarm whose newest record was `before` when it began."""
    from peer.run_dirs import passed_through

    if not run_dir.exists():
        return "stopped before it began"
    files = f"files are in {run_dir}"
    try:
        record = last_vote(run_dir).committed
        found = passed_through(run_dir, config.run_id, record)
    except (DataError, StorageError):
        return f"stopped; {files}"
    if record == before:  # it may have been on its way back to another checkpoint
        return f"stopped before its first step was complete; {files}"
    if not found:
        return f"stopped before its first checkpoint ([checkpoint] every); {files}"
    return f"stopped; {again} goes on from {found[0].name}"


@contextlib.contextmanager
def importing(config: RunConfig, threads: int) -> Iterator[ForkServer]:
    """For a `LocalSwarm`: its processes' imports go on meanwhile, in another process."""
    from peer.local import warm_up

    server = warm_up(config, threads)
    try:
        yield server
    finally:
        server.close()  # the swarm has ended it, unless it came to none


# ---- swarm baseline -----------------------------------------------------------------------------


def run_baseline(
    run: Path,
    *,
    steps: int | None,
    report: Path | None,
    threads: int,
    device: str,
    resume: Path | None,
) -> None:
    """`swarm baseline`: the oracle."""
    from peer.baseline import Baseline
    from peer.launch import (
        be_exact,
        choose_device,
        plan_of,
        steps_to_train,
        what_rounds,
        whole_model,
    )
    from peer.report import ReportWriter, final_report
    from peer.take_over import read_newest
    from peer.view import plain_line
    from swarm.data import build_dataset
    from swarm.model import build_pipeline

    config = load_config(run)
    where = choose_device(device)
    config = stamped(config, "baseline")
    be_exact(where, threads)
    num_steps = steps_to_train(config, steps)
    with (
        ReportWriter(report, config.run_id) as writer,
        contextlib.closing(build_dataset(config)) as dataset,
    ):
        oracle = Baseline(
            plan_of(config),
            whole_model(config),
            dataset,
            config.optimizer,
            accumulate=config.update.accumulate,
            device=where,
        )
        cut = build_pipeline(config)  # as the swarm has it
        if resume is not None:
            say_what_differs(config, resume)
            whole, _ = read_newest(resume, config, oracle.pipeline, dataset.tokenizer, print)
            oracle.resume(whole.snapshot(0))
            print(f"resuming from step {whole.step}")
        if rounded := what_rounds(config):
            print(f"a swarm of this run rounds ({', '.join(rounded)}), and may end with other bits")
        began, tokens = time.monotonic(), 0
        for result in oracle.steps(num_steps):
            tokens += result.tokens
            writer.step(result)
            print(plain_line(result), flush=True)
        final = final_report(
            oracle.pipeline.key_order,
            oracle.stage_hashes(cut),
            steps=max(num_steps, oracle.first_step),
            tokens=tokens,
            wall_s=time.monotonic() - began,
        )
        writer.finish(final)
    print(f"finished: {final['steps']} steps, sha256 {final['sha256']}")


# ---- swarm eval ---------------------------------------------------------------------------------


def evaluate_export(directory: Path, run: Path, microbatches: int) -> dict[str, Any]:
    """`swarm eval`: loss of an exported model on a run's validation data.

    How far it is goes to stderr where that is a terminal; stdout holds the result alone.
    """
    import torch
    from rich.console import Console
    from rich.progress import track

    from peer.launch import stamp
    from swarm.data import build_dataset
    from swarm.model.generate import evaluate, load_exported

    config = load_config(run)
    if config.model.pipeline is not None:
        raise ConfigError(
            f"{run} trains {config.model.pipeline}, which is no language model",
            "name the run.toml of a Hugging Face run",
        )
    progress = Console(stderr=True, highlight=False, quiet=not sys.stderr.isatty())
    progress.print("loading the model")
    model = load_exported(directory)
    _check_fits(model, config)
    progress.print("checking data and model")
    config = stamp(config, "eval")
    with contextlib.closing(build_dataset(config)) as dataset:
        _check_reads_alike(directory, dataset)
        batches = (
            {name: torch.from_numpy(array) for name, array in dataset.validation_batch(i).items()}
            for i in track(range(microbatches), "evaluating", console=progress, transient=True)
        )
        result = evaluate(model, batches)
    return {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}


def _check_fits(model: Any, config: RunConfig) -> None:
    """Raises ConfigError where the run's data has tokens or sequences that the model cannot take.

    Torch would say "index out of range".
    """
    from swarm.model.hf_config import max_positions

    text = model.config.get_text_config(decoder=True)
    positions = max_positions(text) or config.data.sequence
    for what, has, wanted in (
        ("tokens", text.vocab_size, config.data.vocab_size),
        ("positions", positions, config.data.sequence),
    ):
        if has < wanted:
            raise ConfigError(
                f"the run's data needs {wanted} {what}, the model has {has}",
                "name the run.toml that it was trained with",
            )


def _check_reads_alike(directory: Path, dataset: Dataset) -> None:
    """Raises ConfigError where the model's own tokenizer makes other tokens of the run's text: its
    loss on the run's tokens would mean nothing. A directory need not have one."""
    from swarm.data.tokenizer import TOKENIZER_FILE, load_tokenizer_file
    from swarm.model.generate import EXPORTED

    ours, path = dataset.tokenizer, directory / TOKENIZER_FILE
    if ours is None or not path.is_file():
        return
    try:
        # As the run reads its own, not as transformers does.
        theirs = load_tokenizer_file(path, ours.vocab_size)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the tokenizer: {error}", EXPORTED) from None
    text = ours.decode(dataset.validation_batch(0)["tokens"][0].tolist())
    if theirs.encode(text) != ours.encode(text):
        raise ConfigError(
            f"the tokenizer in {directory} is not the run's",
            "name the run.toml that the model was trained with",
        )
