"""What a process that trains says, on a disk that may be full: the line is lost, not the process.

Only for what lives long. A command that answers once must fail where its answer does not fit.
"""

from __future__ import annotations

import errno
import io
import sys
from contextlib import suppress
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Forgiving(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return memoryview(data).nbytes


def forgive_full_disk() -> None:
    """From now on standard output and error lose what does not fit on their disk, line by line."""
    for name in ("stdout", "stderr"):
        before = getattr(sys, name)
        try:
            raw = _Forgiving(before.fileno(), "w", closefd=False)
        except (AttributeError, OSError, ValueError):  # closed, or no file at all
            continue
        with suppress(OSError):  # what it still holds may be what the disk is full for
            before.flush()
        text = io.TextIOWrapper(
            io.BufferedWriter(raw), before.encoding, before.errors, line_buffering=True
        )
        setattr(sys, name, text)
