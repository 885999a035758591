"""What a leader's process does before it leads and after."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer import run_leader
from peer.claims import as_trainer
from peer.run_leader import LeaderProcess
from swarm.config import load_config
from swarm.errors import SwarmError
from tests.process.forks import toml


@pytest.mark.parametrize("asked", [True, False], ids=["by-a-person", "by-what-is-there"])
def test_a_leader_goes_back_as_it_was_told_until_its_trainer_has(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "DATA"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "CACHE"))
    config, identity = as_trainer(load_config(toml(tmp_path / "a.toml", steps=2)), None, None)
    resume = tmp_path / "step-1" if asked else None
    process = LeaderProcess(config, tmp_path / "run", identity, resume=resume)
    identity.release()
    assert process.goes_back is asked
    trainer: Any = SimpleNamespace(goes_back=True)
    process._trainer = trainer
    assert process.goes_back is asked
    trainer.goes_back = False
    assert not process.goes_back


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
