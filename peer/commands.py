"""What the commands do, once their flags are parsed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.cli.checks import check_addresses, check_device_name
from peer.cli.command_line import command_line
from peer.cli.options import LISTEN
from peer.interrupt import until_interrupted
from peer.places import data_home, fresh_directory, is_free, run_directory, tcp_ports
from peer.streams import forgive_full_disk
from swarm.config import RunConfig, canonical_bytes, load_config, with_trainers
from swarm.errors import ConfigError, JoinError, StorageError
from swarm.local_path import expanded

if TYPE_CHECKING:
    from peer.local_process import ForkServer
    from swarm.net.identity import Identity


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
    from peer.show import Follower
    from peer.view import TerminalView
    from swarm.net.link import parse_link
    from swarm.placement import MovePolicy

    forgive_full_disk()
    check_addresses(listen, announce)
    config = load_config(run)
    if accept_loss and resume is None:
        raise ConfigError("--accept-loss alone does nothing", "add --resume DIR")
    link = parse_link(join) if join else None
    if lan:
        require_lan()
    if resume is not None and (same := continued(config, resume)) is not None:
        directory = directory or same
    config, mine = as_trainer(config, directory, identity)
    if link is not None and link.run_id != config.run_id:
        raise JoinError(
            f"the link is of run {link.run_id}, this file and data make run {config.run_id}",
            "use the same run.toml and data as the other trainers",
        )
    run_dir = run_directory(config, directory)
    num_steps = steps_to_train(config, steps)
    committed = committed_steps(run_dir)
    if committed >= num_steps and resume is None and is_over(run_dir, committed):
        print(f"nothing to do: {committed} of {num_steps} steps are trained already")
        print(how_to_export(run_dir))
        return
    if committed and resume is None:
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
            again = command_line(
                *("swarm", "train", run),
                steps=steps,
                report=report,
                dir=directory,
                listen=[each for each in listen if each not in LISTEN],
                announce=announce,
                identity=identity,
                join=join,
                lan=lan,
                second_stages=second_stages or None,
                plain=plain,
            )
            view.note(f"stopped; {again} goes on from here if the peers stay")
            raise
        finally:
            follower.refresh()
    if final is None:
        print("finished: another trainer led the run to its end")
        return
    print(f"finished: {final['steps']} steps, sha256 {final['sha256']}")
    print(how_to_export(run_dir))


def how_to_export(run_dir: Path) -> str:
    return f"export with: {command_line('swarm', 'export', run_dir, 'OUT')}"


def as_trainer(
    config: RunConfig, directory: Path | None, path: Path | None
) -> tuple[RunConfig, Identity]:
    """The config as this machine leads it, and the identity it does that with, claimed.

    That of `path`; else the one the run names, the one it was led with before, or any free one.
    Raises ConfigError when the run names others, StorageError when the identity is in use.
    """
    from swarm.net.identity import claim_identity, claim_identity_file, load_identity

    home = data_home() / "trainer"
    if path is not None:
        known = [load_identity(path)]
    else:
        load_identity(home / "identity.key")
        known = [load_identity(each) for each in sorted(home.glob("identity*.key"))]
    named = config.run.trainers
    config = stamped(config, known[0].peer_id)
    for each in known:
        mine = config if named else with_trainers(config, [each.peer_id])
        run_dir = run_directory(mine, directory)
        if each.peer_id in named or (not named and _holds(run_dir, mine)):
            try:
                return mine, claim_identity_file(each.path)
            except StorageError:
                watch = command_line("swarm", "status", run_dir)
                remedy = f"watch it with {watch}, or stop it"
                raise StorageError("another process leads this run already", remedy) from None
    if named:
        raise ConfigError(
            f"this machine ({known[0].peer_id}) is not one of the run's trainers",
            "lead from a machine whose identity run.trainers lists, or leave it out",
        )
    claimed = claim_identity_file(path) if path is not None else claim_identity(home)
    return with_trainers(config, [claimed.peer_id]), claimed


def continued(config: RunConfig, source: Path) -> Path | None:
    """The run directory of `source`, itself or a checkpoint in it, if `config` is that run's.

    None: it is another run, and would begin with that state in a directory of its own. Raises
    ConfigError when there is no such directory.
    """
    from peer.checkpoints import run_dir_of
    from peer.launch import stamp

    run_dir = run_dir_of(source)
    if not (run_dir / "run.json").exists():
        return None
    theirs = config_in(run_dir)
    named = config.run.trainers or theirs.run.trainers
    mine = stamp(with_trainers(config, named), "")
    return run_dir if canonical_bytes(mine) == canonical_bytes(theirs) else None


def config_in(run_dir: Path) -> RunConfig:
    """What the run in this directory was started with. Raises StorageError, JoinError."""
    from swarm.config import from_canonical, run_id_of

    try:
        data = (run_dir / "run.json").read_bytes()
    except OSError as error:
        raise StorageError(
            f"cannot read {run_dir}: {error.strerror}", "give a run directory that you may read"
        ) from None
    return from_canonical(data, run_id_of(data))


def trainer_id() -> str:
    """The peer id this machine leads with unless told otherwise; made when there is none."""
    from swarm.net.identity import load_identity

    return load_identity(data_home() / "trainer" / "identity.key").peer_id


def _holds(run_dir: Path, config: RunConfig) -> bool:
    try:
        return (run_dir / "run.json").read_bytes() == canonical_bytes(config)
    except OSError:
        return False


def led_by(run_dir: Path) -> Identity:
    """The identity of this machine that led the run in `run_dir`, claimed.

    Raises ConfigError when it is not here (only a trainer that the run names can go on with it),
    StorageError when another process uses it.
    """
    from swarm.net.identity import claim_identity_file, load_identity

    named = config_in(run_dir).run.trainers
    for path in sorted((data_home() / "trainer").glob("identity*.key")):
        if load_identity(path).peer_id in named:
            return claim_identity_file(path)
    raise ConfigError(
        f"this machine has not the identity that led {run_dir}",
        "resume where it was led, or list another trainer in run.trainers to begin a new run",
    )


def spare_identity() -> Identity:
    """An identity that nobody leads with, claimed: a swarm started meanwhile takes another."""
    from swarm.net.identity import claim_identity

    return claim_identity(data_home() / "trainer")


def stamped(config: RunConfig, trainer: str) -> RunConfig:
    from peer.launch import stamp

    print("checking data and model", flush=True)  # the first time it reads and hashes all data
    config = stamp(config, trainer)
    if config.model.pretrained is not None:
        from swarm.model.hf_config import is_tied, pretrained_config

        if is_tied(pretrained_config(expanded(config.model.pretrained))):
            print("its output layer is tied to its embedding: they start equal, trained apart")
    return config


def committed_steps(run_dir: Path) -> int:
    """How many steps a run that was led from this directory has committed.

    Raises StorageError when another process leads it now, or the directory cannot be read.
    """
    from peer.disk import FileDisk

    if not (run_dir / "trainer").is_dir():
        return 0
    disk = FileDisk(run_dir / "trainer")
    try:
        return disk.vote.next_step
    finally:
        disk.close()


def is_over(run_dir: Path, steps: int) -> bool:
    """Whether the state after the last of these steps is on disk, here or where another trainer
    led. Else the peers alone have it, as when the disk was full."""
    from peer.checkpoints import is_complete
    from swarm.events import read_status

    state = (read_status(run_dir / "status.json") or {}).get("state")
    return state in ("finished", "standing by") or is_complete(
        run_dir / "checkpoints" / f"step-{steps}"
    )


def ports_as_before(run_dir: Path, listen: Sequence[str]) -> list[str]:
    """These addresses with the port of the run's last link where they leave it to the system.

    Peers look for a leader that is gone where it was. A port that is taken now is not asked for.
    """
    from swarm.events import read_status

    link = str(((read_status(run_dir / "status.json") or {}).get("run") or {}).get("link", ""))
    ports = set(tcp_ports(link))
    if len(ports) != 1 or not is_free(port := next(iter(ports))):
        return list(listen)
    return [f"{each[:-1]}{port}" if each.endswith("/tcp/0") else each for each in listen]


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

    forgive_full_disk()
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
    trainer = spare_identity() if same is None else led_by(same)
    with importing(config, threads or max(1, num_cores() // sum(counts.values()))) as server:
        config = stamped(config, trainer.peer_id)
        run_dir = same or fresh_directory(config, directory)
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
    print(f"finished: {final['steps']} steps, sha256 {final['sha256']}")
    print(how_to_export(run_dir))


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
    from peer.launch import be_exact, choose_device, plan_of, steps_to_train, whole_model
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
            whole, _ = read_newest(resume, config, oracle.pipeline, print)
            oracle.resume(whole.snapshot(0))
            print(f"resuming from step {whole.step}")
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
    text = model.config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None) or config.data.sequence
    for what, has, wanted in (
        ("tokens", text.vocab_size, config.data.vocab_size),
        ("positions", positions, config.data.sequence),
    ):
        if has < wanted:
            raise ConfigError(
                f"the run's data needs {wanted} {what}, the model has {has}",
                "name the run.toml that it was trained with",
            )
