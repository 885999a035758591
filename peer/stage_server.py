"""A replica: serves one stage's forward and backward, exactly once per microbatch.

Decisions are `swarm.ledger`'s; this carries them out. A call runs (or joins, or repeats) the
forward, goes on to the next hop of its route, waits on the same call for the gradient of what it
sent, runs the backward, counts, and answers. Forward and backward are tasks of the replica and not
of the call, so a call whose upstream dies loses nothing. What they compute is in
`peer.stage_tasks`; orders of the leader are in `peer.orders`.

A step under way is a `Part` (`peer.parts`); they share device, slots and connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from peer.calls import FIELDS_CODEC, MicrobatchCall
from peer.crowds import Crowds
from peer.kept import Work
from peer.parts import Part, Parts
from peer.slots import Slots
from peer.stage_tasks import StageTasks
from swarm.ahead import NONE, Ahead
from swarm.compute import Compute, Kind, Timed, WatchedCompute
from swarm.delayed_state import State
from swarm.device import Uploader
from swarm.errors import JoinError, RefusedError, StageFailedError, TransportError, WireError
from swarm.finite import NotFiniteError
from swarm.ledger import Decision, Do
from swarm.model.stage import gradient_specs
from swarm.net.channel import CallFailedError, Channel, Message, Method
from swarm.net.links import Links
from swarm.spec import TensorSpec
from swarm.tasks import TaskSet
from swarm.terms import Term
from swarm.wire.boundaries import BACKWARD, FORWARD, LOSSLESS, BoundaryCodecs
from swarm.wire.codecs import TensorMeta, WireTensor
from swarm.wire.frames import check_indices, check_tensors

log = logging.getLogger(__name__)
# From one peer: a leader has one open; those that it gave up may not know it yet.
CALLS_OF_A_MICROBATCH = 4


class PipelineShape(Protocol):
    """What a replica needs to know of the whole pipeline."""

    num_stages: int
    batch_spec: dict[str, TensorSpec]

    def boundary(self, stage: int) -> tuple[TensorSpec, ...]: ...


Probe = Callable[..., None]


def no_probe(point: str, **facts: Any) -> None:
    """The default probe: nobody watches."""


def _is_timing(value: object) -> bool:
    return isinstance(value, list) and list(map(type, value)) == [float] * 3


class StageServer:
    """Serves one stage with `state` on `compute`.

    `links` must be set before the first call. `num_microbatches` are those of a step, `codecs`
    those of all boundaries. `slots` bounds microbatches between forward and backward; None is AFAB.
    `probe(point, **facts)` is told where each microbatch and step is: tests inject faults there,
    the event log listens.
    """

    links: Links

    def __init__(
        self,
        stage: int,
        state: State,
        pipeline: PipelineShape,
        compute: Compute,
        *,
        num_microbatches: int,
        codecs: BoundaryCodecs = LOSSLESS,
        ahead: Ahead = NONE,
        slots: int | None = 4,
        kept_bytes: int = 1 << 30,
        probe: Probe = no_probe,
    ) -> None:
        self.stage, self.state, self.pipeline = stage, state, pipeline
        # Stages of one process share their device, and its watch.
        self.compute = compute if isinstance(compute, WatchedCompute) else WatchedCompute(compute)
        self.num_microbatches, self.codecs, self.probe = num_microbatches, codecs, probe
        self.slots = Slots(slots)
        self.parts = Parts(state, kept_bytes, ahead, release=self._release)
        self.uploader = Uploader(state.device)
        self.tasks = TaskSet()
        # By step and index: those that wait for a commit.
        self._awaiting: Crowds[tuple[int, int]] = Crowds(1, self.tasks)
        # By whom, step and index: nobody's calls make another's give way.
        self._serving: Crowds[tuple[str, int, int]] = Crowds(CALLS_OF_A_MICROBATCH, TaskSet())
        self.sent_bytes = 0  # activations to the next stage, on the wire
        self.raw_bytes = 0  # the same before the codec
        self.returned_bytes = 0  # gradients to the previous stage, on the wire
        self.returned_raw_bytes = 0  # the same before the codec
        self.fields = sorted(pipeline.batch_spec)
        self.field_specs = [pipeline.batch_spec[name] for name in self.fields]
        self.stage_tasks = StageTasks(stage, self.parts, self.fields, codecs)
        last = stage == pipeline.num_stages - 1
        self._inputs = pipeline.boundary(stage - 1) if stage > 0 else ()
        self._outputs = () if last else pipeline.boundary(stage)

    def methods(self) -> dict[str, Method]:
        """What other peers may call here."""
        return {"microbatch": Method(self._microbatch, self._check_microbatch)}

    # ---- checks, before anything is allocated ---------------------------------------------------

    def _check_microbatch(self, body: Mapping[str, Any], metas: Sequence[TensorMeta]) -> None:
        call = MicrobatchCall.read(body)
        if call.index >= self.num_microbatches:
            raise WireError(f"microbatch {call.index} of {self.num_microbatches}")
        self.check_route(call.route, call.hop)
        self.check_inputs(metas)

    def check_route(self, route: tuple[str, ...], hop: int) -> None:
        """Raises WireError unless it leads here."""
        if len(route) != self.pipeline.num_stages or hop != self.stage:
            raise WireError(f"hop {hop} of {len(route)} is not stage {self.stage}")
        if route[hop] != self.links.incarnation:
            raise WireError("the route names another replica here")

    def check_inputs(self, metas: Sequence[TensorMeta]) -> None:
        """Raises WireError unless they are a microbatch's fields and what this stage takes."""
        check_tensors(metas[: len(self.fields)], self.field_specs, FIELDS_CODEC)
        codec = self.codecs.name(self.stage - 1, FORWARD)
        check_tensors(metas[len(self.fields) :], self._inputs, codec)

    # ---- a microbatch ---------------------------------------------------------------------------

    async def _microbatch(self, channel: Channel, message: Message) -> Message:
        call = MicrobatchCall.read(message.body)
        try:
            check_indices(message.tensors, self.field_specs)
            return await self._serve(channel.peer, call, message.tensors)
        except CallFailedError:
            raise
        except (RefusedError, WireError) as error:
            raise CallFailedError("refused", error.message, hop=call.hop) from None
        except StageFailedError as error:
            raise self._failure(error, call) from error
        except Exception as error:
            log.error("microbatch %d of step %d: %r", call.index, call.step, error)
            log.debug("traceback", exc_info=True)
            what = f"{type(error).__name__}: {error}"
            raise CallFailedError("failed", what, hop=call.hop) from error

    async def _serve(
        self, peer: str, call: MicrobatchCall, tensors: Sequence[WireTensor]
    ) -> Message:
        """Every failure names this hop, or the leader would suspect the first of the route."""
        part = self.parts.of(call.step)
        self.check_term(part, call.term)
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        decision = await self._decide(part, call)
        if decision.do is Do.REFUSE:
            raise CallFailedError("refused", decision.reason, hop=call.hop)
        if decision.do is Do.RUN:
            self.parts.drop(part, call.index)
            begun = part.kept.works[call.index] = Work(call.index)
            begun.waited_s = loop.time() - arrived
            begun.forward = self.tasks.spawn(self._forward(part, begun, call, tensors))
        work = part.kept.works.get(call.index)
        if work is None:  # counted, and its step is being committed
            raise CallFailedError("refused", f"step {call.step} is being committed", hop=call.hop)
        return await self._serving.run(
            (peer, call.step, call.index),
            (call.term, call.try_),
            lambda: self._carry_out(part, work, call, tensors),
        )

    async def _carry_out(
        self, part: Part, work: Work, call: MicrobatchCall, tensors: Sequence[WireTensor]
    ) -> Message:
        """From its forward, which has begun, to its answer."""
        if work.evicted:
            return await self._recompute(part, work, call, tensors)
        assert work.forward is not None
        try:
            y = await asyncio.shield(work.forward)
        except asyncio.CancelledError:
            if work.forward.cancelled():  # fenced or reset meanwhile, the call itself lives
                raise CallFailedError("refused", "given up here", hop=call.hop) from None
            raise
        below, gradients = await self._go_on(call, tensors, y)
        if work.backward is None:
            accepted = part.ledger.on_gradient(call.term, call.step, call.index, call.try_)
            if accepted.do is Do.REFUSE or part.kept.works.get(call.index) is not work:
                raise CallFailedError("refused", accepted.reason, hop=call.hop)
            if accepted.do is Do.REPEAT:  # evicted while the rest of the route answered
                return await self._recompute(part, work, call, tensors)
            work.backward = self.tasks.spawn(self._backward(part, work, call, gradients))
        try:
            dx = await asyncio.shield(work.backward)
        except asyncio.CancelledError:
            if work.backward is None or work.backward.cancelled():
                raise CallFailedError("refused", "given up here", hop=call.hop) from None
            raise
        return self._answer(work, below, dx)

    @staticmethod
    def check_term(part: Part, term: Term) -> None:
        """Raises RefusedError, before a call may wait for anything. It comes from any peer: only an
        order of the trainer itself raises the term."""
        if term > part.ledger.term:
            raise RefusedError("no order of that term has come here")
        if not part.ledger.see(term):
            raise RefusedError(f"term {term.counter} has been succeeded")

    async def _decide(self, part: Part, call: MicrobatchCall) -> Decision:
        """What the ledger says, once what the microbatch is computed with is there."""
        while True:
            if call.index >= self.parts.ahead.of(call.step) and part.ledger.step == call.step:
                await self._await_commit(call, call.step - 1)
            decision = part.ledger.on_call(
                call.term, call.step, call.index, call.try_, call.attempt
            )
            if decision.do is not Do.AWAIT_COMMIT:
                return decision
            await self._await_commit(call, call.step - len(self.parts))

    async def _await_commit(self, call: MicrobatchCall, step: int) -> None:
        """Wait until `step` is committed here, as the newest try of its microbatch: an older one,
        of which its leader may not want to know any more, gives way, so that no more calls wait
        with their tensors than there are microbatches of the steps that may.

        Raises RefusedError: it took too long, or a newer try is here.
        """
        if self.parts.ledger.step > step:
            return
        place, try_ = (call.step, call.index), (call.term, call.try_)
        await self._awaiting.run(place, try_, lambda: self.parts.commit_of(step))

    async def _forward(
        self, part: Part, work: Work, call: MicrobatchCall, tensors: Sequence[WireTensor]
    ) -> Sequence[WireTensor]:
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        try:
            arrivals = self.uploader.begin(tensors)
            await self.slots.acquire(replay=call.replay)
            work.holds_slot = True
            if part.kept.works.get(call.index) is not work:
                raise asyncio.CancelledError
            self.probe("forward", step=call.step, index=call.index)
            timed = await self.compute.run(
                Kind.FORWARD,
                lambda: self.stage_tasks.forward(part, work, call, arrivals),
                call.step,
            )
        except BaseException as error:
            self._release(work)
            if part.kept.works.get(call.index) is work:
                part.ledger.on_forward_failed(call.index)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise self._failure(error, call) from error
        work.graph, y = timed.value
        work.forward_s = timed.seconds
        work.waited_s += max(0.0, loop.time() - arrived - timed.seconds)
        part.kept.keep(work, y)
        part.ledger.on_forward_done(call.index)
        return y

    @staticmethod
    def _failure(error: BaseException, call: MicrobatchCall) -> CallFailedError:
        kind = "nonfinite" if isinstance(error, NotFiniteError) else "failed"
        return CallFailedError(kind, str(error), hop=call.hop)

    async def _go_on(
        self, call: MicrobatchCall, tensors: Sequence[WireTensor], y: Sequence[WireTensor]
    ) -> tuple[Message | None, Sequence[WireTensor]]:
        """Send `y` to the next hop and wait for the gradient of it. The last hop has neither."""
        if call.is_last:
            return None, ()
        onward = call.next_hop()
        specs, codec = gradient_specs(self._outputs), self.codecs.name(self.stage, BACKWARD)
        fields = list(tensors[: len(self.fields)])
        try:
            channel = await self.links.channel(call.route[onward.hop])
            self.probe("sent", step=call.step, index=call.index)
            self.sent_bytes += sum(each.wire_bytes for each in y)
            self.raw_bytes += sum(each.raw_bytes for each in y)
            answer = await channel.call(
                "microbatch",
                onward.body(),
                [*fields, *y],
                check_reply=lambda _, metas: check_tensors(metas, specs, codec),
            )
        except (TransportError, WireError, JoinError) as error:  # or it greets as of another run
            raise CallFailedError("unreachable", str(error), hop=onward.hop) from None
        except CallFailedError as error:  # nothing goes on but what the leader reads
            hop = error.detail.get("hop")
            if type(hop) is not int or not onward.hop <= hop < len(onward.route):
                hop = onward.hop  # none may accuse those before it
            raise CallFailedError(error.kind, error.message, hop=hop) from None
        self._check_answer(answer.body, onward)
        return answer, answer.tensors

    @staticmethod
    def _check_answer(body: Mapping[str, Any], onward: MicrobatchCall) -> None:
        """Every hop vouches for what it passes on, so that nonsense is blamed on its author."""
        timings = body.get("timings")
        if (
            not isinstance(body.get("loss"), float)
            or not isinstance(timings, list)
            or len(timings) != len(onward.route) - onward.hop
            or not all(map(_is_timing, timings))
        ):
            what = "an answer that makes no sense"
            raise CallFailedError("failed", what, hop=onward.hop)

    async def _backward(
        self, part: Part, work: Work, call: MicrobatchCall, gradients: Sequence[WireTensor]
    ) -> Sequence[WireTensor]:
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        self.probe("backward", step=call.step, index=call.index)
        graph = work.graph
        assert graph is not None
        try:
            arrivals = self.uploader.begin(gradients)
            timed = await self.compute.run(
                Kind.BACKWARD,
                lambda: self.stage_tasks.backward(part, work, call, graph, arrivals, count_it=True),
                call.step,
            )
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise
            if part.kept.works.get(call.index) is work:
                part.ledger.on_backward_failed(call.index)
                part.kept.give_up(work)
            if part.state.spoiled:
                part.ledger.spoil()
            raise self._failure(error, call) from error
        finally:
            work.graph = None
            self._release(work)
        dx, nonfinite = timed.value
        work.backward_s = timed.seconds
        work.waited_s += max(0.0, loop.time() - arrived - timed.seconds)
        if part.ledger.on_counted(call.step, call.index):
            part.nonfinite = part.nonfinite or nonfinite
            part.kept.keep(work, dx)
            part.kept.counted(work)
            part.tell_changed()
        self.probe("counted", step=call.step, index=call.index)
        return dx

    async def _recompute(
        self, part: Part, work: Work, call: MicrobatchCall, tensors: Sequence[WireTensor]
    ) -> Message:
        """A counted microbatch whose answers were evicted: the same again, adding nothing."""
        arrivals = self.uploader.begin(tensors)
        forward = await self.compute.run(
            Kind.FORWARD, lambda: self.stage_tasks.forward(part, work, call, arrivals), call.step
        )
        graph, y = forward.value
        below, gradients = await self._go_on(call, tensors, y)
        returned = self.uploader.begin(gradients)
        backward: Timed[tuple[list[WireTensor], bool]] = await self.compute.run(
            Kind.BACKWARD,
            lambda: self.stage_tasks.backward(part, work, call, graph, returned, count_it=False),
            call.step,
        )
        return self._answer(work, below, backward.value[0])

    def _answer(self, work: Work, below: Message | None, dx: Sequence[WireTensor]) -> Message:
        self.returned_bytes += sum(each.wire_bytes for each in dx)
        self.returned_raw_bytes += sum(each.raw_bytes for each in dx)
        return Message(self._reply(work, below), dx)

    def count_anew(self) -> None:
        """Bytes, from a term's begin on: whoever leads knows no tokens of the terms before."""
        self.sent_bytes = self.raw_bytes = self.returned_bytes = self.returned_raw_bytes = 0

    def counted_bytes(self) -> dict[str, int]:
        """What it has sent over its boundaries in this term, as answers to the leader state it."""
        return {
            "sent_bytes": self.sent_bytes,
            "raw_bytes": self.raw_bytes,
            "returned_bytes": self.returned_bytes,
            "returned_raw_bytes": self.returned_raw_bytes,
        }

    def _reply(self, work: Work, below: Message | None) -> dict[str, Any]:
        mine = [work.forward_s, work.backward_s, work.waited_s]
        if below is None:
            return {"loss": work.loss, "timings": [mine]}
        return {"loss": below.body["loss"], "timings": [mine, *below.body["timings"]]}

    def _release(self, work: Work) -> None:
        if work.holds_slot:
            work.holds_slot = False
            self.slots.release()

    async def aclose(self) -> None:
        """End what runs here. The device is its owner's to close."""
        self.abort()
        await self.tasks.aclose()
        await self._serving.tasks.aclose()

    def abort(self) -> None:
        self.tasks.abort()
        self._serving.tasks.abort()
