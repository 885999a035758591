"""A browser, or one line that says why there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.screenshots import chromium, find_chromium

REASON = "no Chromium on PATH: the tests of the dashboard in a browser were skipped"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if any(REASON in str(each.longrepr) for each in skipped):
        terminalreporter.write_line(REASON)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless; a missing one fails where `SWARM_BROWSER_REQUIRED` is set, as in `.ci/run`."""
    if find_chromium() is None:
        assert not os.environ.get("SWARM_BROWSER_REQUIRED"), REASON
        pytest.skip(REASON)
    with chromium() as started:
        yield started
