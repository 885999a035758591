"""File systems small enough to be filled by a test."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.process.required import skip_without_root

BALLAST = "ballast"


@contextlib.contextmanager
def small_disk(path: Path, kib: int) -> Iterator[Path]:
    """A file system of so many KiB, at `path`."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        skip_without_root("a full disk needs a mount, and a mount needs root: run it with sudo")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> None:
    """Leave no room at all; again where some has become free."""
    with contextlib.suppress(OSError), (disk / BALLAST).open("ab", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))


def make_room(disk: Path) -> None:
    (disk / BALLAST).unlink()
