"""The lab of `benchmarks/wan`: machines of their own on this one. Needs root."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "wan"))  # scripts, not a package

from _lab import Host, Lab
from _measured import given
from _namespaces import LabError, enter, require_root

__all__ = ["Host", "Lab", "LabError", "enter", "given", "listen_in", "require_root"]


def listen_in(host: Host | None) -> tuple[str, str]:
    """The option of a command that runs there; None is this machine."""
    return "--listen", f"/ip4/{host.address if host else '127.0.0.1'}/tcp/0"
