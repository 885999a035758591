"""Validation on one replica: the loss of a few microbatches at the state that a commit has left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from peer.calls import count, names
from peer.stage_server import StageServer
from swarm.compute import Kind
from swarm.errors import JoinError, TransportError
from swarm.net.channel import CallFailedError, Channel, Message, Method
from swarm.terms import Term
from swarm.wire.codecs import TensorMeta, WireTensor
from swarm.wire.frames import check_indices

# In progress from one peer, for each stage: a leader has two open, and tries each five times.
EVALUATIONS = 10
EVALUATED_AT_ONCE = 2  # one is copied to the device while another is computed


class Evaluations:
    """Those that other peers ask one `StageServer` for."""

    def __init__(self, server: StageServer) -> None:
        self.server = server
        self._in_progress: Counter[str] = Counter()  # by whom
        self._evaluating = asyncio.Semaphore(EVALUATED_AT_ONCE)

    def methods(self) -> dict[str, Method]:
        """What other peers may call here."""
        return {"evaluate": Method(self._evaluate, self._check)}

    def _check(self, body: Mapping[str, Any], metas: Sequence[TensorMeta]) -> None:
        Term.read(body.get("term"))
        count(body.get("step"))
        self.server.check_route(names(body.get("route")), count(body.get("hop")))
        self.server.check_inputs(metas)

    async def _evaluate(self, channel: Channel, message: Message) -> Message:
        """Forward only, at the state after `step` commits; the answer holds the loss sum."""
        body, hop = message.body, message.body["hop"]
        check_indices(message.tensors, self.server.field_specs)
        self.server.check_term(self.server.parts.oldest, Term.read(body["term"]))
        if self._in_progress[channel.peer] >= EVALUATIONS * self.server.pipeline.num_stages:
            raise CallFailedError("refused", "too many evaluations at once", hop=hop)
        self._in_progress[channel.peer] += 1
        try:
            return await self._evaluated(body, message.tensors)
        finally:
            self._in_progress[channel.peer] -= 1
            if not self._in_progress[channel.peer]:
                del self._in_progress[channel.peer]

    async def _evaluated(self, body: dict[str, Any], tensors: Sequence[WireTensor]) -> Message:
        server, step, hop, route = self.server, body["step"], body["hop"], body["route"]
        if server.parts.ledger.step < step <= server.parts.ledger.step + len(server.parts):
            await server.parts.commit_of(step - 1)
        is_last = hop == len(route) - 1
        async with self._evaluating:
            if server.parts.ledger.step != step:
                what = f"at step {server.parts.ledger.step}, not {step}"
                raise CallFailedError("refused", what, hop=hop)
            arrivals = server.uploader.begin(tensors)
            timed = await server.compute.run(
                Kind.FORWARD, lambda: server.stage_tasks.evaluation(arrivals, is_last=is_last), step
            )
        losses, y = timed.value
        if is_last:
            return Message({"loss": losses[0]})
        try:
            channel = await server.links.channel(route[hop + 1])
            fields = tensors[: len(server.fields)]
            return await channel.call("evaluate", {**body, "hop": hop + 1}, [*fields, *y])
        except (TransportError, JoinError) as error:
            raise CallFailedError("unreachable", str(error), hop=hop + 1) from None
