"""Run a program in a host of the lab: `python _in_host.py NAMESPACE PROGRAM …`."""

from __future__ import annotations

import os
import sys

from _namespaces import enter

if __name__ == "__main__":
    enter(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
