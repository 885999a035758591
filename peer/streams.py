"""What a process that trains says, on a disk that may be full or to a terminal that may have been
closed: the line is lost, not the process.

Only for what lives long. A command that answers once must fail where its answer does not fit.
"""

from __future__ import annotations

import errno
import io
import sys
from contextlib import suppress
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EIO,)  # a terminal, from which it was disowned; a pipe's end has another


class _Forgiving(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL + CLOSED:
                raise
            return memoryview(data).nbytes


def forgive_lost_lines() -> None:
    """From now on standard output and error lose what does not fit on their disk, or was for a
    terminal that is gone, line by line."""
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
