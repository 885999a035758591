"""A token id or label that the model lacks is refused where it arrives: no device sees it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer.calls import MicrobatchCall
from peer.evaluations import Evaluations
from peer.stage_server import StageServer
from swarm.compute import InlineCompute
from swarm.errors import RefusedError, SwarmError
from swarm.model.hf_config import inline_config
from swarm.model.huggingface import HuggingFacePipeline
from swarm.net.channel import CallFailedError, Message
from swarm.stage_state import StageState
from swarm.terms import Term
from swarm.wire.codecs import encode
from tests.protocol.tiny import OPTIMIZER, pipeline

CALL = MicrobatchCall(Term(0, 1, "t#1"), 0, 0, 1, 0, ("a#1", "b#1"), 0, 4.0, False)


@pytest.mark.parametrize("method", ["microbatch", "evaluate"])
def test_a_replica_refuses_it(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, went_on = pipeline(2), []
    shape.batch_spec["y"] = replace(shape.batch_spec["y"], below=2)
    x = torch.zeros(shape.batch_spec["x"].shape)

    def message(y: list[int]) -> Message:
        return Message(CALL.body(), [encode(each, "raw") for each in (x, torch.tensor(y))])

    async def serve(*_: Any) -> Message:
        went_on.append("microbatch")
        return Message({})

    def begin(*_: Any) -> None:
        went_on.append("evaluate")
        raise RefusedError("far enough")

    async def main() -> None:
        state = StageState(shape.build_stage(0), OPTIMIZER)
        server = StageServer(0, state, shape, InlineCompute(), num_microbatches=1)
        monkeypatch.setattr(server, "_serve", serve)
        monkeypatch.setattr(server.uploader, "begin", begin)
        server.parts.see(CALL.term)
        methods = {**server.methods(), **Evaluations(server).methods()}
        handle: Any = methods[method].handle
        channel = SimpleNamespace(peer="b")
        for wrong in (2, -1, 2**40):
            with pytest.raises(SwarmError, match=f"tensor 1 holds {wrong}, 0 to 1 exp") as refused:
                await handle(channel, message([0, 1, wrong, 0]))
            error = refused.value
            if method == "microbatch":  # at this hop, so that nobody else is suspected
                assert isinstance(error, CallFailedError)
                assert (error.kind, error.detail) == ("refused", {"hop": 0})
        assert went_on == []
        with contextlib.suppress(RefusedError):
            await handle(channel, message([0, 1, 1, 0]))
        assert went_on == [method]

    asyncio.run(main())


def test_a_language_models_fields_name_their_vocabulary() -> None:
    values = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = inline_config(values, 300)
    cut = HuggingFacePipeline(config, seed=1, num_stages=2, microbatch_size=1, sequence=4)
    assert {spec.below for spec in cut.batch_spec.values()} == {300}
