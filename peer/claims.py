"""Whose a run is on this machine: the identity it is led with, and what its directory holds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peer.cli.command_line import command_line
from peer.places import config_in, data_home, is_free, run_directory, tcp_ports
from swarm.config import RunConfig, canonical_bytes, differences, with_trainers
from swarm.consensus import Vote
from swarm.errors import ConfigError, DataError, InUseError, StorageError
from swarm.local_path import expanded
from swarm.words import integer

if TYPE_CHECKING:
    from swarm.net.identity import Identity

NOT_CHOSEN = "unchosen"  # in place of the trainer, while it is not known which identity leads


def as_trainer(
    config: RunConfig, directory: Path | None, path: Path | None
) -> tuple[RunConfig, Identity]:
    """The config as this machine leads it, and the identity it does that with, claimed.

    That of `path`; else the one the run names, the one it was led with before, or any free one.
    Raises ConfigError when the run names others, StorageError when the identity is in use.
    """
    from swarm.net.identity import claim_identity, claim_identity_file, load_identity

    if named := config.run.trainers:
        one = _own(named) if path is None else load_identity(path)
        if one is None or one.peer_id not in named:
            raise _not_a_trainer(trainer_id() if one is None else one.peer_id)
        config = stamped(config, one.peer_id)
        return config, _claimed(one, run_directory(config, directory))
    config = stamped(config, NOT_CHOSEN)
    if directory is None or os.path.lexists(directory / "run.json"):  # else not led yet
        for each in _identities() if path is None else [load_identity(path)]:
            mine = with_trainers(config, [each.peer_id])
            run_dir = run_directory(mine, directory)
            if _holds(run_dir, mine):
                return mine, _claimed(each, run_dir)
    claimed = claim_identity_file(path) if path is not None else claim_identity(_trainer_home())
    return with_trainers(config, [claimed.peer_id]), claimed


def continued(config: RunConfig, source: Path) -> Path | None:
    """The run directory of `source`, itself or a checkpoint in it, if `config` is that run's.

    None: it is another run, which is said, and would begin with that state in a directory of its
    own. Raises ConfigError when there is no such directory.
    """
    from peer.launch import stamp
    from peer.run_dirs import run_dir_of

    run_dir = run_dir_of(source)
    if not (run_dir / "run.json").exists():
        return None
    theirs = config_in(run_dir)
    named = config.run.trainers or theirs.run.trainers
    mine = stamp(with_trainers(config, named), NOT_CHOSEN)
    return None if say_if_another(run_dir, mine, theirs) else run_dir


def refuse_elsewhere(run_dir: Path, directory: Path | None) -> None:
    """Raises ConfigError when the run that goes on in `run_dir` is to go on in another directory:
    what its trainer has promised is written there."""
    from peer.run_dirs import real

    if directory is not None and real(directory) != real(run_dir):
        raise ConfigError(f"the run goes on in its own directory, {run_dir}", "leave --dir out")


def say_what_differs(config: RunConfig, source: Path) -> None:
    """Say so if `source`, a run's directory or a checkpoint in it, is of another run."""
    from peer.run_dirs import run_dir_of

    run_dir = run_dir_of(source)
    with contextlib.suppress(StorageError):  # the checkpoint alone matters
        theirs = config_in(run_dir)
        say_if_another(run_dir, with_trainers(config, theirs.run.trainers), theirs)


def say_if_another(run_dir: Path, mine: RunConfig, theirs: RunConfig) -> bool:
    """Whether the run in `run_dir`, `theirs`, is another than `mine`; if so, in what is printed."""
    if canonical_bytes(mine) == canonical_bytes(theirs):
        return False
    print(f"{run_dir} is of another run ({differences(mine, theirs)})")
    return True


def trainer_id() -> str:
    """The peer id this machine leads with unless told otherwise; made when there is none."""
    from swarm.net.identity import load_identity

    return load_identity(_trainer_home() / "identity.key").peer_id


def _trainer_home() -> Path:
    return data_home() / "trainer"


def _identities() -> Iterator[Identity]:
    """All that this machine leads with, not claimed.

    A file that cannot be read raises its StorageError only after the last: it is no matter to a run
    that another of them leads, and may be what leads one that none of them does.
    """
    from swarm.net.identity import identity_files, load_identity

    damage: StorageError | None = None
    for path in identity_files(_trainer_home()):
        try:
            identity = load_identity(path)
        except StorageError as error:
            damage = damage or error
        else:
            yield identity
    if damage is not None:
        raise damage


def _own(named: Sequence[str]) -> Identity | None:
    """This machine's identity among those that a run names, not claimed. Raises StorageError."""
    return next((each for each in _identities() if each.peer_id in named), None)


def _holds(run_dir: Path, config: RunConfig) -> bool:
    try:
        return (run_dir / "run.json").read_bytes() == canonical_bytes(config)
    except OSError:
        return False


def led_alone(run_dir: Path, path: Path | None) -> bool:
    """Whether the identity of `path`, or one of this machine, is the only trainer of the run in
    `run_dir`, and so the one that led it there. Raises StorageError."""
    from swarm.net.identity import load_identity

    named = config_in(run_dir).run.trainers
    if len(named) > 1:
        return False
    return (_own(named) is not None) if path is None else load_identity(path).peer_id in named


def led_by(run_dir: Path) -> Identity:
    """The identity of this machine that led the run in `run_dir`, wholly on it, claimed.

    Raises ConfigError when it is not here (only a trainer that the run names can go on with it) or
    the run names several, StorageError when another process uses it.
    """
    named = config_in(run_dir).run.trainers
    begin = "begin a new run, with this machine's own alone in run.trainers (`swarm id` prints it)"
    _refuse_several(named, f"lead from each of their machines with `swarm train`, or {begin}")
    mine = _own(named)
    if mine is None:
        raise ConfigError(
            f"this machine has not the identity that led {run_dir}",
            f"resume where it was led, or {begin}",
        )
    return _claimed(mine, run_dir)


def _claimed(identity: Identity, run_dir: Path) -> Identity:
    """This identity, for the run in `run_dir`. Raises StorageError."""
    from peer.status import is_live
    from swarm.events import read_status
    from swarm.net.identity import claim_identity_file

    try:
        return claim_identity_file(identity.path)
    except InUseError:
        if not is_live(read_status(run_dir / "status.json") or {}):
            raise _in_use(identity, "stop it") from None
        watch = command_line("swarm", "status", run_dir)
        what = f"another process leads {run_dir} already, or another run with its identity"
        raise InUseError(what, f"see with {watch}, or stop it") from None


def local_trainer(config: RunConfig) -> Identity:
    """The identity that leads a swarm which is wholly on this machine, claimed.

    The one the run names; else one that nobody leads with, so a swarm started meanwhile takes
    another. Raises ConfigError when the run names others, InUseError when it is in use.
    """
    from swarm.net.identity import claim_identity, claim_identity_file

    named = config.run.trainers
    if not named:
        return claim_identity(_trainer_home())
    _refuse_several(
        named, "leave run.trainers out, or lead from each of their machines with `swarm train`"
    )
    mine = _own(named)
    if mine is None:
        raise _not_a_trainer(trainer_id())
    try:
        return claim_identity_file(mine.path)
    except InUseError:
        raise _in_use(mine, "stop it, or leave run.trainers out") from None


def _in_use(identity: Identity, remedy: str) -> InUseError:
    what = f"another process leads with this machine's identity {identity.peer_id}"
    return InUseError(what, remedy)


def _refuse_several(named: Sequence[str], remedy: str) -> None:
    """Of a swarm on one machine: it would wait for a majority of them."""
    if len(named) > 1:
        what = f"run.trainers lists {len(named)}, and a swarm on one machine has one trainer"
        raise ConfigError(what, remedy)


def _not_a_trainer(peer_id: str) -> ConfigError:
    return ConfigError(
        f"this machine ({peer_id}) is not one of the run's trainers",
        "lead from a machine whose identity run.trainers lists, or leave it out",
    )


def stamped(config: RunConfig, trainer: str) -> RunConfig:
    from peer.launch import stamp

    print("checking data and model", flush=True)  # the first time it reads and hashes all data
    config = stamp(config, trainer)
    if config.model.pretrained is not None:
        from swarm.model.hf_config import is_tied, pretrained_config

        if is_tied(pretrained_config(expanded(config.model.pretrained))):
            print("its output layer is tied to its embedding: they start equal, trained apart")
    return config


def last_vote(run_dir: Path) -> Vote:
    """What a trainer that led from this directory, or stood by, knew last.

    Raises StorageError when another process leads it now, or the directory cannot be read.
    """
    from peer.disk import FileDisk

    if not (run_dir / "trainer").is_dir():
        return Vote()
    disk = FileDisk(run_dir / "trainer")
    try:
        return disk.vote
    finally:
        disk.close()


def is_over(run_dir: Path, known: Vote) -> bool:
    """Whether the run has ended: the state that this trainer knew last is on disk here, or another
    trainer said so. Else the peers alone may have it, as when the disk was full."""
    from peer.checkpoints import load_manifest, manifest_sha256
    from swarm.events import read_status

    status = read_status(run_dir / "status.json") or {}
    if status.get("state") == "finished" and integer(status.get("step")) >= known.next_step:
        return True
    record = known.committed
    if record is None:
        return False
    path = run_dir / "checkpoints" / f"step-{known.next_step}"
    try:
        manifest, sha256 = load_manifest(path), manifest_sha256(path)
    except (DataError, OSError):
        return False
    if record.restores and sha256 == record.checkpoint:
        return True  # an epoch that has trained nothing yet is what it began with
    return bool(manifest.get("epoch", 0) == record.epoch)


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
