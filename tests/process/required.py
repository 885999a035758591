"""Tests that not every machine can run: they are skipped, but where they must run that fails."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

ROOT = "SWARM_ROOT_REQUIRED"  # environment: set where the tests must run that need root
LAN = "SWARM_LAN_REQUIRED"  # those that need the extra `lan`; `.ci/run` sets it, and as root both


def skip_without_root(reason: str) -> NoReturn:
    assert not os.environ.get(ROOT), f"{reason} (or unset {ROOT})"
    pytest.skip(reason)
