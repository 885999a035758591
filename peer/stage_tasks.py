"""What a replica has its device do for a stage: forward, backward, evaluation.

Each is a task of `swarm.compute`: it takes what has arrived, starts the copies from the device, and
gives what is to be done once the device is through. What a forward or a backward gives is checked
before it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from peer.calls import MicrobatchCall
from peer.kept import Work
from peer.parts import Part, Parts
from swarm.compute import Result
from swarm.device import Arrivals, Departures, Downloader
from swarm.finite import NotFiniteError, finite, proven, totals
from swarm.stage_state import Graph
from swarm.wire.boundaries import BACKWARD, FORWARD, BoundaryCodecs
from swarm.wire.codecs import WireTensor


class StageTasks:
    """Those of one stage, with the versions of its state that `parts` keep."""

    def __init__(
        self, stage: int, parts: Parts, fields: Sequence[str], codecs: BoundaryCodecs
    ) -> None:
        self.stage, self.parts, self.fields, self.codecs = stage, parts, fields, codecs
        self.downloader = Downloader(parts.state.device)

    def forward(
        self, part: Part, work: Work, call: MicrobatchCall, arrivals: Arrivals
    ) -> Result[tuple[Graph, list[WireTensor]]]:
        """What its backward needs, and what goes downstream.

        Raises NotFiniteError for what is no number, unless that came in.
        """
        arrived = arrivals.tensors()
        batch, inputs = self._named(arrived)
        divisor = call.divisor if call.is_last else None
        graph = self.parts.version(part, call.index).forward(
            call.step, call.index, inputs, batch, divisor
        )
        outputs, place = graph.outputs, (call.step, call.index)
        sent = () if call.is_last else self.codecs.pack(outputs, self.stage, FORWARD, place)
        departures = self.downloader.begin(sent, totals(outputs))

        def finish() -> tuple[Graph, list[WireTensor]]:
            sums = departures.numbers()
            if not work.nonfinite and not proven(sums, outputs):
                if not call.nonfinite and finite(arrived):
                    raise NotFiniteError("its forward gives what is no number")
                work.nonfinite = True
            if call.is_last:
                work.loss = sums[0]
            return graph, departures.wires()

        return departures.then(finish)

    def backward(
        self,
        part: Part,
        work: Work,
        call: MicrobatchCall,
        graph: Graph,
        arrivals: Arrivals,
        *,
        count_it: bool,
    ) -> Result[tuple[list[WireTensor], bool]]:
        """What goes upstream, and whether something that is no number was let through.

        Raises NotFiniteError as `forward` does; where the device is not waited for, what was added
        up by then is marked `spoiled`.
        """
        gradients = arrivals.tensors()
        came = totals(gradients)
        departures: Departures | None = None
        checked: list[tuple[list[WireTensor], bool]] = []

        def send(answers: tuple[Tensor, ...]) -> None:
            nonlocal departures
            sent = self.codecs.pack(answers, self.stage - 1, BACKWARD, (call.step, call.index))
            departures = self.downloader.begin(sent, [*came, *totals(answers)])
            if departures.ready is None:
                check(departures, answers)

        def check(departures: Departures, answers: tuple[Tensor, ...]) -> None:
            """May fail. On a CPU nothing is in the accumulator by then; a GPU is not waited for, so
            there it spoils what its replica has counted of the step: nonsense is rare."""
            sums = departures.numbers()
            came_finite = not work.nonfinite and proven(sums[: len(came)], gradients)
            nonfinite = count_it and not (came_finite and proven(sums[len(came) :], answers))
            if nonfinite and came_finite and not call.nonfinite:
                raise NotFiniteError("its backward gives what is no number")
            checked.append((departures.wires(), nonfinite))

        # Not the version that is the newest by now: a commit may have come since the forward.
        into = part.state if count_it else None
        answers = graph.state.backward(graph, gradients or None, into=into, before=send)
        assert departures is not None

        def finish() -> tuple[list[WireTensor], bool]:
            if departures.ready is not None:
                try:
                    check(departures, answers)
                except Exception:
                    if into is not None:
                        into.spoiled = True
                    raise
            return checked[0]

        return departures.then(finish)

    def evaluation(
        self, arrivals: Arrivals, *, is_last: bool
    ) -> Result[tuple[list[float], list[WireTensor]]]:
        """Forward only, at the newest state: the sum of the losses of the last stage, and what goes
        downstream of the others."""
        batch, inputs = self._named(arrivals.tensors())
        outputs = self.parts.state.evaluate(inputs, batch)
        sent = () if is_last else self.codecs.pack(outputs, self.stage, FORWARD, None)
        departures = self.downloader.begin(sent, outputs[:1] if is_last else ())
        return departures.then(lambda: (departures.numbers(), departures.wires()))

    def _named(self, tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], Sequence[Tensor]]:
        """The microbatch's fields by name, and the stage's inputs."""
        batch = dict(zip(self.fields, tensors[: len(self.fields)], strict=True))
        return batch, tensors[len(self.fields) :]
