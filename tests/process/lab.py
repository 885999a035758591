"""The lab of `benchmarks/wan`: machines of their own on this one. Needs root."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "wan"))  # scripts, not a package

from _lab import Host, Lab
from _namespaces import LabError, enter, require_root

__all__ = ["Host", "Lab", "enter", "listen_in", "needs_root"]


@pytest.fixture
def needs_root() -> None:
    try:
        require_root()
    except LabError as error:
        pytest.skip(str(error))


def listen_in(host: Host | None) -> tuple[str, str]:
    """The option of a command that runs there; None is this machine."""
    return "--listen", f"/ip4/{host.address if host else '127.0.0.1'}/tcp/0"
