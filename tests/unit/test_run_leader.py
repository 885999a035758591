"""What a leader's process does before it leads and after."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from peer import run_leader
from peer.claims import as_trainer
from peer.run_leader import LeaderProcess
from swarm.config import load_config
from swarm.errors import SwarmError
from tests.process.forks import toml


def test_stages_are_laid_out_in_a_thread_before_anybody_is_led(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    config, identity = as_trainer(load_config(toml(tmp_path / "a.toml", steps=2)), None, None)
    process = LeaderProcess(config, tmp_path / "run", identity)
    stages, build = list[int](), process.pipeline.build_stage

    def build_stage(stage: int, device: str = "cpu") -> Any:
        assert threading.current_thread() is not threading.main_thread()
        stages.append(stage)
        return build(stage, device)

    async def no_node(*args: Any, **options: Any) -> None:
        raise SwarmError("that far")

    monkeypatch.setattr(process.pipeline, "build_stage", build_stage)
    monkeypatch.setattr(run_leader.Node, "open", no_node)
    with pytest.raises(SwarmError, match="that far"):
        asyncio.run(process.run(listen=[]))
    identity.release()
    assert stages == list(range(process.pipeline.num_stages))
