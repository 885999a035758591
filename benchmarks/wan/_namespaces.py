"""Network namespaces: hosts of the lab. Everything here needs root, and says so."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

PREFIX = "swarm-lab-"  # then the pid of the lab that made it
DEVICE = "wan0"
CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class LabError(Exception):
    """The lab cannot be built here; the message says what to do."""


def require_root() -> None:
    if os.geteuid() != 0:
        raise LabError("the lab makes network namespaces, which needs root: run it with sudo")
    if not Path("/dev/net/tun").exists():
        raise LabError("there is no /dev/net/tun here: load the kernel's module `tun`")


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def enter(namespace: str) -> None:
    """This thread, its children and the sockets it makes from now on belong to the namespace."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        _set(file.fileno())


@contextlib.contextmanager
def entered(namespace: str) -> Iterator[None]:
    """`enter`, and back."""
    with open("/proc/thread-self/ns/net", "rb") as home:
        enter(namespace)
        try:
            yield
        finally:
            _set(home.fileno())


def _set(file: int) -> None:
    if _libc.setns(file, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise LabError(f"cannot enter a network namespace: {os.strerror(number)}")


def remove_left_behind() -> None:
    """Namespaces of labs whose process has gone."""
    for path in Path("/run/netns").glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            ip("netns", "del", path.name)
