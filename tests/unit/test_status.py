"""`swarm status` of a leader, or a file, that says anything: a picture or valid JSON, no more."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import peer.status
from peer.cli.swarm_program import app
from peer.members import Traffic
from peer.publish import Status
from peer.training import StepResult
from swarm.errors import JoinError, UnreachableError
from swarm.net.link import format_link

LINK = format_link(
    "1" * 32, ["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWG7BgmA4F1dgZzHfCDAramYf1PjfKyJwGTBUeDmrMy4hL"]
)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["run", "state", "reason", "step", "num_steps", "loss", "losses", "validation_loss", "tokens",
     "tokens_per_s", "in_flight", "microbatches", "num_stages", "replicas", "bytes", "started_at",
     "updated_at", "epoch", "term"]
)  # fmt: skip


def shown(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], *flags: str) -> str:
    async def ask(link: str) -> dict[str, Any]:
        return status

    monkeypatch.setattr(peer.status, "_ask_status", ask)
    result = CliRunner().invoke(app, ["status", LINK, *flags])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(status=st.dictionaries(KEYS, ANYTHING, max_size=8))
def test_whatever_a_leader_says(status: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        printed = shown(monkeypatch, status, "--json")
        assert isinstance(json.loads(printed, parse_constant=refuse), dict)
        shown(monkeypatch, status)


@pytest.mark.parametrize(
    "updated_at", [math.nan, math.inf, -math.inf, 10**400, -1, "now", [1], {"a": 1}, None, b"x"],
    ids=repr,
)  # fmt: skip
def test_a_time_that_is_none(monkeypatch: pytest.MonkeyPatch, updated_at: Any) -> None:
    status = {"state": "training", "updated_at": updated_at}
    assert "as of an unknown time: its leader does not run" in shown(monkeypatch, status)
    json.loads(shown(monkeypatch, status, "--json"), parse_constant=refuse)


def test_how_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"state": "training", "updated_at": time.time() - 7300}
    assert "as of 2 hours ago: its leader does not run now" in shown(monkeypatch, status)
    assert "as of" not in shown(monkeypatch, {**status, "updated_at": time.time() + 60})
    assert "as of" not in shown(monkeypatch, {**status, "state": "finished"})


def test_deep_and_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep: Any = "bottom"
    for _ in range(200):
        deep = [deep]
    printed = json.loads(shown(monkeypatch, {"run": deep, "reason": "x" * 10**6}, "--json"))
    assert len(json.dumps(printed["run"])) < 1000
    assert printed["reason"] == "x" * 10**6
    status = tmp_path / "status.json"
    for text in ("[" * 10**5, "{}]", '"finished"', '{"step": ' + "9" * 5000 + "}", "\x00"):
        status.write_text(text)
        result = CliRunner().invoke(app, ["status", str(tmp_path)])
        assert result.exit_code == 4, result.output
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


class Peers:
    """Links to peers that answer, refuse, are not there, or never say anything."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    async def channel(self, peer: str, addresses: Any) -> Any:
        answer = self.answers[peer]
        if isinstance(answer, Exception):
            raise answer

        async def call(method: str, body: Any) -> Any:
            if answer is None:
                await asyncio.Event().wait()
            return SimpleNamespace(body=answer)

        return SimpleNamespace(call=call)


def first_of(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> dict[str, Any]:
    monkeypatch.setattr(peer.status, "ANSWER_S", 0.01)
    links: Any = Peers({str(at): answer for at, answer in enumerate(answers)})
    return asyncio.run(peer.status.first_status(links, dict.fromkeys(links.answers, ())))


def test_the_first_peer_of_a_link_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent, absent and refusing ones are passed over; a refusal is told if nobody answers."""
    gone, refused = UnreachableError("connection refused"), JoinError("another run", "check it")
    found = first_of(monkeypatch, None, gone, refused, {"step": 3}, {"step": 4})
    assert found == {"step": 3}
    with pytest.raises(JoinError, match="another run"):
        first_of(monkeypatch, refused, gone, None)
    with pytest.raises(JoinError, match=r"no answer within .* leader running"):
        first_of(monkeypatch, gone, None)


def test_bytes_per_token_are_of_the_term_that_leads() -> None:
    """Replicas begin to count when a term does; a trainer that leads again has seen more tokens."""
    traffic = Traffic(1000, 1000, 1000, 1000)
    status = Status("id", "name", 10, SimpleNamespace(num_stages=2))  # type: ignore[arg-type]
    for step in range(3):
        leader = SimpleNamespace(traffic=lambda _: traffic, sent_bytes=100)
        status.lead(leader)  # type: ignore[arg-type]
        status.note_step(StepResult(step, 1.0, 1.0, tokens=100, wall_s=1.0))
        (row,) = status.boundaries()
        assert (row["wire_per_token"], row["back_wire_per_token"]) == (10.0, 10.0)
        assert status.leader_per_token == 1.0
    assert status.tokens == 300
