"""Runs as a dashboard hears of them, made up: for the tests of `web`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarm.net.identity import load_identity
from web.board import Board
from web.intake import Notes, read_observation
from web.store import Store

NOW = 1_700_000_000.0
RUN_ID = "0123456789abcdef" * 2


def peer_ids(folder: Path, count: int) -> list[str]:
    """Real peer ids."""
    return [load_identity(folder / f"{number}.key").peer_id for number in range(count)]


def row(peer: str, stage: int, **facts: Any) -> dict[str, Any]:
    """A replica as a leader's status has it."""
    return {
        "replica": f"{peer}#00ff",
        "stage": stage,
        "standing": "serving",
        "step": 7,
        "device": "cpu",
        "counted": 10,
        "reason": "",
        "service_s": 0.05,
        "outstanding": 1,
        "share": 1.0,
        **facts,
    }


def answer(rows: list[dict[str, Any]], stages: int = 2, **facts: Any) -> dict[str, Any]:
    """A leader's answer to `observe`; `facts` are of the status, or `events`, `samples`, `life`."""
    outer = {key: facts.pop(key) for key in ("events", "samples", "life", "after") if key in facts}
    status = {
        "run": {"id": RUN_ID, "name": "a run", "link": "swarm://secret"},
        "state": "training",
        "reason": "",
        "step": 8,
        "num_steps": 100,
        "loss": 3.5,
        "validation_loss": None,
        "tokens": 4096,
        "tokens_per_s": 1000.0,
        "in_flight": 2,
        "microbatches": {"done": 1, "of": 4},
        "num_stages": stages,
        "replicas": rows,
        "bytes": {"boundaries": [{"boundary": 0, "raw_bytes": 2000, "wire_bytes": 1000}]},
        "started_at": NOW - 60,
        "updated_at": NOW,
        "epoch": 0,
        "term": 1,
        **facts,
    }
    return {"life": "ab12", "after": 3, "version": "0.1.0", "status": status, "events": [],
            "samples": [], **outer}  # fmt: skip


def board(store: Store | None = None) -> Board:
    return Board(store or Store(":memory:"), RUN_ID, join_line="swarm-peer --join swarm://x")


def tell(to: Board, body: Any, now: float = NOW) -> bool:
    """What a collector does with an answer; whether it was believed."""
    seen = read_observation(body, now, to.notes)
    if seen is None:
        return False
    to.leader(seen, now)
    return True


__all__ = ["NOW", "RUN_ID", "Notes", "answer", "board", "peer_ids", "row", "tell"]
