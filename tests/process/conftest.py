"""Fixtures of the process tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.forks import Forks
from tests.process.lab import LabError, require_root
from tests.process.required import skip_without_root


@pytest.fixture(scope="session")
def _forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def forks(_forks: Forks, tmp_path: Path) -> Iterator[Forks]:
    """Starts commands in `tmp_path`, with homes of their own; nothing of them is left after."""
    with tempfile.TemporaryDirectory(prefix="sl-", dir="/tmp") as short:
        _forks.cwd = tmp_path
        _forks.constants = {}
        _forks.environment = {
            "XDG_DATA_HOME": str(tmp_path / "home"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "XDG_RUNTIME_DIR": short,
            "TMPDIR": short,
            "COLUMNS": "200",
        }
        try:
            yield _forks
        finally:
            _forks.end_all()
        assert list(Path(short).iterdir()) == []


@pytest.fixture
def needs_root() -> None:
    try:
        require_root()
    except LabError as error:
        skip_without_root(str(error))
