"""Peers that write down every kernel they run and every microbatch they count.

While `HOLD` lies beside their file, the last stage (a replica alone) counts no more than `HELD`
microbatches of a step: that is its middle, for as long as a test needs it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from peer.witness import Witness, lines_of
from tests.process import stoppable
from tests.process.stoppable import Stoppable

FILE = "kernels.jsonl"
HOLD = "hold"
HELD = 3

Work = tuple[int, int, int]  # step, stage, index


class Kernels:
    """What all peers of a run have written into one directory."""

    def __init__(self, where: Path) -> None:
        self.file, self._hold = where / FILE, where / HOLD

    def hold(self) -> None:
        self._hold.touch()

    def go_on(self) -> None:
        self._hold.unlink()

    def held(self, num_stages: int) -> list[Work]:
        """What is counted of the step that is held, once every stage has counted `HELD` of it."""
        step = max((step for step, _, _ in self._told("held")), default=-1)
        works = [work for work in self._told("counted") if work[0] == step]
        stages = Counter(stage for _, stage, _ in works)
        return works if all(stages[stage] == HELD for stage in range(num_stages)) else []

    def assert_once(self, works: Iterable[Work]) -> None:
        """Each of these has gone forward and back just once."""
        for kind in ("forward", "backward"):
            times = Counter(self._told(kind))
            again = {work: times[work] for work in works if times[work] != 1}
            assert not again, f"{kind} kernels by (step, stage, index): {again}"

    def _told(self, point: str) -> list[Work]:
        return [
            (line["step"], line["stage"], line["index"])
            for line in lines_of(self.file)
            if line["point"] == point
        ]


class Counted(Stoppable):
    peer_target = "tests.process.counted:peer"

    @property
    def kernels(self) -> Kernels:
        return Kernels(self.run_dir / "peers")


def peer(arguments: Mapping[str, Any], tell: Any) -> int:
    write_kernels(Path(arguments["data_dir"]).parent)
    return stoppable.peer(arguments, tell)


def write_kernels(where: Path) -> None:
    """From now on this process does, into the file in this directory."""
    from peer.stage_server import StageServer
    from peer.stage_tasks import StageTasks

    books, hold, backwards = Witness(where / FILE), where / HOLD, Counter[int]()
    run_forward: Callable[..., Any] = StageTasks.forward
    run_backward: Callable[..., Any] = StageTasks.backward
    backward: Callable[..., Any] = StageServer._backward

    def write(self: StageServer | StageTasks, point: str, call: Any) -> None:
        books.write(point, step=call.step, stage=self.stage, index=call.index)

    def forward_kernel(self: StageTasks, part: Any, work: Any, call: Any, *args: Any) -> Any:
        write(self, "forward", call)
        return run_forward(self, part, work, call, *args)

    def backward_kernel(
        self: StageTasks, part: Any, work: Any, call: Any, *args: Any, count_it: bool
    ) -> Any:
        if call.is_last and hold.exists() and backwards[call.step] == HELD:
            write(self, "held", call)
            while hold.exists():
                time.sleep(0.01)
        backwards[call.step] += 1
        write(self, "backward", call)
        return run_backward(self, part, work, call, *args, count_it=count_it)

    async def counting(self: StageServer, part: Any, work: Any, call: Any, *args: Any) -> Any:
        answers = await backward(self, part, work, call, *args)
        write(self, "counted", call)
        return answers

    StageTasks.forward = forward_kernel  # type: ignore[method-assign]
    StageTasks.backward = backward_kernel  # type: ignore[method-assign]
    StageServer._backward = counting  # type: ignore[method-assign]
