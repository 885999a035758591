"""Volunteers see no traceback: it is logged for `--debug` alone."""

from __future__ import annotations

import ast
import asyncio
from typing import Any

import pytest

from peer.gradients import fetch_gradient
from swarm.errors import DeviceError
from tests.unit.test_no_code_from_peers import MODULES, ROOT


def loud(tree: ast.AST) -> list[str]:
    """Calls that log a traceback where others than `--debug` see it."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if ast.unparse(call.func) in ("log.exception", "logging.exception")
        or (
            any(keyword.arg == "exc_info" for keyword in call.keywords)
            and ast.unparse(call.func) != "log.debug"
        )
    ]


def test_tracebacks_are_logged_for_debugging_only() -> None:
    found = {path: loud(ast.parse(path.read_text())) for path in MODULES}
    assert not {str(path.relative_to(ROOT)): calls for path, calls in found.items() if calls}
    assert len(loud(ast.parse("log.exception(x)\nlog.error(x, exc_info=True)\nlog.error(x)"))) == 2


def test_a_gradient_that_there_is_no_memory_for_is_an_error_of_ours() -> None:
    channel: Any = None  # not asked
    with pytest.raises(DeviceError, match=r"no memory for a gradient of \d+ bytes"):
        asyncio.run(fetch_gradient(channel, 1 << 60, {}))
