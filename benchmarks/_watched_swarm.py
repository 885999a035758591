"""A local swarm that trains a step only when told to, and whose processes say where time goes.

The processes are those of `peer.local`, with two additions made in the process after its start: the
leader waits before each step for a line on a unix socket, and answers with the step's times once
every replica has applied it; a peer notes when its compute thread was busy and with what, and
answers on a socket of its own. A swarm that waits costs no more than its heartbeats.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peer import local_entry
from peer.local import LocalSwarm

SOCKETS = "SWARM_BENCH_SOCKETS"  # environment: the directory of the sockets
FREE_STEPS = "SWARM_BENCH_FREE_STEPS"  # environment: how many steps begin without an order
Answer = Callable[[dict[str, Any]], Any]


class WatchedSwarm(LocalSwarm):
    """`await step()` trains one step; `await timeline(stage)` says how it went there."""

    leader_target = "_watched_swarm:leader"
    peer_target = "_watched_swarm:peer"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sockets = Path(os.environ[SOCKETS])

    async def step(self) -> dict[str, Any]:
        """`{start, end, seconds, loss, tokens}`, times of `time.perf_counter` of this machine."""
        return await self._ask("leader", {})

    async def replicas(self) -> dict[int, dict[str, Any]]:
        """By stage: `{standing, first_issue}`, as the leader sees them (one replica per stage)."""
        return {int(stage): facts for stage, facts in (await self._ask("replicas", {})).items()}

    async def timeline(self, stage: int, start: float, end: float) -> dict[str, Any]:
        return await self._ask(f"stage{stage}", {"start": start, "end": end})

    async def _ask(self, name: str, question: Mapping[str, Any]) -> dict[str, Any]:
        path = self._sockets / name
        self._raise_if_ended()
        while not path.exists():
            self._raise_if_ended()
            await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_unix_connection(str(path), limit=1 << 24)
        writer.write(json.dumps(dict(question)).encode() + b"\n")
        line = await reader.readline()
        writer.close()
        if not line:
            raise RuntimeError(f"{name} has ended; see {self.run_dir}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _raise_if_ended(self) -> None:
        """A swarm that has lost somebody would be waited for in vain."""
        if self._fatal is not None:
            raise self._fatal
        for process in self.processes.values():
            if process.child is not None and not process.alive:
                raise RuntimeError(f"{process.name} has ended: {process.log.read_text()[-2000:]}")


async def _serve(name: str, answer: Answer) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = answer(json.loads(await reader.readline()))
        if asyncio.iscoroutine(reply):
            reply = await reply
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()
        writer.close()

    path = Path(os.environ[SOCKETS]) / name
    await asyncio.start_unix_server(talk, str(path.with_suffix(".new")))
    path.with_suffix(".new").rename(path)


def leader(arguments: Mapping[str, Any], tell: local_entry.Tell) -> int:
    """As `local_entry.leader`, one step per order, after `FREE_STEPS` that wait for none."""
    import swarm.net.channel as channel
    from peer.leader import Leader
    from peer.run_leader import LeaderProcess
    from peer.training import StepResult

    free_steps = int(os.environ.get(FREE_STEPS, "0"))
    sent_bytes = 0
    encode_frame = channel.encode_frame

    def count_bytes(*arguments: Any, **options: Any) -> Any:
        nonlocal sent_bytes
        parts = encode_frame(*arguments, **options)
        sent_bytes += sum(len(part) for part in parts)
        return parts

    channel.encode_frame = count_bytes

    class OrderedLeader(Leader):
        """Trains when told, and notes when each replica was first given a microbatch."""

        async def begin(self, *args: Any, **options: Any) -> None:
            self.orders: asyncio.Queue[asyncio.Future[dict[str, Any]]] = asyncio.Queue()
            self.first_issue: dict[str, float] = {}

            async def give(_: Mapping[str, Any]) -> dict[str, Any]:
                done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
                self.orders.put_nowait(done)
                return await done

            def replicas(_: Mapping[str, Any]) -> dict[str, Any]:
                return {
                    str(member.stage): {
                        "standing": member.standing.value,
                        "first_issue": self.first_issue.get(member.incarnation),
                    }
                    for member in self.members
                }

            await _serve("leader", give)
            await _serve("replicas", replicas)
            self.said, self.probe = self.probe, self._note
            await super().begin(*args, **options)

        def _note(self, point: str, **facts: Any) -> None:
            if point == "issue":
                for replica in facts["route"]:
                    self.first_issue.setdefault(replica, time.perf_counter())
            self.said(point, **facts)

        def _bytes(self) -> int:
            opened = [self.links.open_channel(member.incarnation) for member in self.members]
            received = sum(each._stream.received_bytes for each in opened if each is not None)
            return sent_bytes + received

        async def train_step(self) -> StepResult:
            if self.next_step < free_steps:
                return await super().train_step()
            done = await self.orders.get()
            start, cpu, num_bytes = time.perf_counter(), time.process_time(), self._bytes()
            result = await super().train_step()
            committed = time.perf_counter()
            assert result.record is not None
            for member in self.members:  # a second commit is answered once the first is applied
                await self.admission.send_commit(member, result.record)
            end = time.perf_counter()
            done.set_result(
                {
                    "start": start,
                    "committed": committed,
                    "end": end,
                    "seconds": end - start,
                    "loss": result.loss,
                    "tokens": result.tokens,
                    "cpu_s": time.process_time() - cpu,
                    "bytes": self._bytes() - num_bytes,
                }
            )
            return result

    class OrderedProcess(LeaderProcess):
        leader_type = OrderedLeader

    return local_entry.leader(arguments, tell, OrderedProcess)


def peer(arguments: Mapping[str, Any], tell: local_entry.Tell) -> int:
    """As `local_entry.peer`, with a timeline of its compute thread."""
    from peer.run_peer import PeerProcess
    from swarm.compute import Compute, ThreadCompute
    from swarm.device import Arrivals, Departures
    from swarm.model.layout import ParameterLayout
    from swarm.wire.boundaries import BoundaryCodecs

    spans: list[tuple[str, float, float, float]] = []  # kind, start, end, thread's CPU time
    parts: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                parts[name].append((start, time.perf_counter() - start))

        return run

    BoundaryCodecs.pack = timed("encode", BoundaryCodecs.pack)  # type: ignore[method-assign]
    Departures.wires = timed("encode", Departures.wires)  # type: ignore[method-assign]
    Arrivals.tensors = timed("decode", Arrivals.tensors)  # type: ignore[method-assign]
    ParameterLayout.grad_into = timed(  # type: ignore[method-assign]
        "accumulate", ParameterLayout.grad_into
    )

    class TimedCompute(ThreadCompute):
        async def run(self, kind: Any, task: Callable[[], Any], step: int = 0) -> Any:
            def note() -> Any:
                start, cpu = time.perf_counter(), time.thread_time()
                try:
                    return task()
                finally:
                    spent = time.thread_time() - cpu
                    spans.append((kind.name, start, time.perf_counter(), spent))

            return await super().run(kind, note, step)

    class WatchedPeer(PeerProcess):
        def open_device(self) -> Compute:
            return TimedCompute()

        async def run(self) -> None:
            await _serve(f"stage{self.options.stages[0]}", answer)
            await super().run()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        start, end = question["start"], question["end"]
        chosen = [each for each in list(spans) if start <= each[1] < end]  # in time order
        inner = {
            name: sum(seconds for at, seconds in list(each) if start <= at < end)
            for name, each in parts.items()
        }
        spans.clear()
        parts.clear()
        return {"spans": chosen, "parts": inner, "pid": os.getpid()}

    return local_entry.peer(arguments, tell, WatchedPeer)
