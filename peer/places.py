"""Where things of this machine are: directories of identities and runs, and free ports."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import JoinError, StorageError

if TYPE_CHECKING:
    from swarm.config import RunConfig

_TCP_PORT = re.compile(r"/tcp/([0-9]+)(?=/|$)")


def data_home() -> Path:
    """Where identities live unless a flag says otherwise (XDG base directories).

    Raises StorageError for a user without a home, as `cache_home` does.
    """
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else _home() / ".local" / "share") / "swarm-parallel"


def cache_home() -> Path:
    """Where what can be made again is kept (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else _home() / ".cache") / "swarm-parallel"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without an entry in passwd, as in containers
        raise StorageError(
            "this user has no home directory", "set HOME, or XDG_DATA_HOME and XDG_CACHE_HOME"
        ) from None


def run_directory(config: RunConfig, chosen: Path | None) -> Path:
    """`runs/NAME-ID` here, unless chosen otherwise."""
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in config.run.name)
    return chosen or Path("runs") / f"{safe}-{config.run_id[:8]}"


def fresh_directory(config: RunConfig, chosen: Path | None) -> Path:
    """Like `run_directory`, but one in which nothing has been trained yet.

    Raises StorageError when a chosen one holds a run.
    """
    first = run_directory(config, chosen)
    if chosen is not None and (chosen / "run.json").exists():
        raise StorageError(f"{chosen} holds a run already", "choose another directory with --dir")
    path, number = first, 1
    while (path / "run.json").exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def config_in(run_dir: Path) -> RunConfig:
    """What the run in this directory was started with. Raises StorageError."""
    from swarm.config import from_canonical, run_id_of

    try:
        data = (run_dir / "run.json").read_bytes()
    except OSError as error:
        raise StorageError(
            f"cannot read {run_dir}: {error.strerror}", "give a run directory that you may read"
        ) from None
    try:
        return from_canonical(data, run_id_of(data))
    except JoinError as error:
        why = error.message.removeprefix("the run config received: ")
        raise StorageError(
            f"{run_dir / 'run.json'} cannot be read: {why}",
            "it is damaged, or of another version of swarm-parallel",
        ) from None


def refuse_another_run(run_dir: Path, config: RunConfig) -> None:
    """Raises StorageError when the directory holds another run than this one."""
    from swarm.config import canonical_bytes, differences

    try:
        if (run_dir / "run.json").read_bytes() == canonical_bytes(config):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        what = f"cannot use {run_dir}: {error.strerror}"
        raise StorageError(what, "choose another directory with --dir") from None
    try:
        unlike = f" ({differences(config, config_in(run_dir))})"
    except StorageError:  # of another version of this program, say
        unlike = ""
    what = f"{run_dir} holds another run{unlike}"
    raise StorageError(what, "choose another directory with --dir")


def tcp_ports(addresses: str) -> list[int]:
    """The TCP ports that a multiaddress, or a link of several, names."""
    return [int(port) for port in _TCP_PORT.findall(addresses)]


def is_free(port: int) -> bool:
    """Whether this TCP port can be listened on now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True
