"""The web API against its own OpenAPI document: never a 5xx, and every answer as it is described.

Schemathesis draws the questions, those that fit the document and those that do not, always the same
ones. Its pytest plugin is off (pyproject.toml): nothing else needs it, and it costs every start.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.unit.web_runs import NOW, answer, board, peer_ids, row, tell
from web.app import create_app
from web.broadcast import Broadcast
from web.limits import Limits

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
bounded = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return peer_ids(tmp_path_factory.mktemp("keys"), 2)


@pytest.fixture(scope="module")
def schema(peers: list[str]) -> Any:
    made = board()
    events = [{"t": NOW - 9, "event": "joined", "replica": f"{peers[0]}#00ff", "stage": 0}]
    tell(made, answer([row(peers[0], 0), row(peers[1], 1)], events=events))
    app = create_app(made, Broadcast(), limits=Limits(rate=1e9, burst=1e9), clock=lambda: NOW)
    found = schemathesis.openapi.from_asgi("/api/v1/openapi.json", app)
    return found.exclude(path="/api/v1/stream")  # it does not end


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_whatever_is_asked_is_answered_as_described(schema: Any, mode: str) -> None:
    asked: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    for each in schema.get_all_operations():
        operation = each.ok()
        if mode == "negative" and not list(operation.iter_parameters()):
            continue  # nothing about it can be wrong

        @bounded
        @given(operation.as_strategy(generation_mode=GenerationMode(mode)))
        def ask(case: Any) -> None:
            statuses[case.call_and_validate(checks=CHECKS).status_code] += 1
            asked[case.operation.label] += 1

        ask()
    assert len(asked) == (9 if mode == "positive" else 6), asked
    assert statuses[200]
    assert statuses[404 if mode == "positive" else 422]


def test_a_peer_that_is_known(schema: Any, peers: list[str]) -> None:
    case = schema["/api/v1/peers/{peer}"]["GET"].Case(path_parameters={"peer": peers[0]})
    answered = case.call_and_validate(checks=CHECKS)
    assert answered.json()["events"]
