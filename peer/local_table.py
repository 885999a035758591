"""The table of a local swarm's processes: who there is, under which name, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.local_process import Child, ForkServer, ForkServerError
from swarm.errors import ConfigError, SwarmError

MAX_LOCAL_PEERS = 256
MAX_LOG_BYTES = 10 << 20
KEPT_LOG_BYTES = 1 << 20
_TICK_S = 2.0


def parse_peers(text: str) -> dict[int, int]:
    """`"0:2,1:2,2:2"` as {stage: replicas}. Raises ConfigError."""
    remedy = 'write stage:replicas pairs, as in --peers "0:2,1:2,2:2"'
    counts: dict[int, int] = {}
    for part in text.split(","):
        stage, colon, count = (each.strip() for each in part.partition(":"))
        if not colon or not all(
            each.isascii() and each.isdigit() and len(each) < 10 for each in (stage, count)
        ):
            raise ConfigError(f"--peers: {part.strip()[:40]!r} is not a stage and a number", remedy)
        if int(stage) in counts:
            raise ConfigError(f"--peers: stage {int(stage)} is named twice", remedy)
        if int(count) < 1:
            raise ConfigError(f"--peers: stage {int(stage)} needs at least one replica", remedy)
        counts[int(stage)] = int(count)
    if sum(counts.values()) > MAX_LOCAL_PEERS:
        raise ConfigError(f"--peers: more than {MAX_LOCAL_PEERS} peers on one machine", remedy)
    return counts


def num_cores() -> int:
    """CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(eq=False)
class LocalProcess:
    """A row of the table of processes. `said` is the last line it said about itself."""

    name: str
    stage: int | None
    threads: int
    data_dir: Path
    log: Path
    child: Child | None = None
    said: str = ""
    error: SwarmError | None = None
    expected_to_end: bool = False
    frozen: bool = False

    @property
    def pid(self) -> int:
        return self.child.pid if self.child else 0

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.alive

    @property
    def code(self) -> int | None:
        """Exit code, negative for the signal that killed it; None while it runs."""
        return self.child.code if self.child else None

    def how_it_ended(self) -> str:
        if self.error is not None:
            return str(self.error)
        code = self.code or 0
        how = f"exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"
        return f"{how} - see {self.log}"


class ProcessTable(ABC):
    """Processes by name, forked by one server: started, told to end, and none of them left behind.

    Subclasses say what they are, and hear what they tell (`_hear`). Their logs are bounded.
    """

    def __init__(self, run_dir: Path, server: ForkServer | None = None) -> None:
        self.run_dir = run_dir
        self.processes: dict[str, LocalProcess] = {}
        self.server_pid = 0
        self._server = server
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, begin: Callable[[], ForkServer]) -> None:
        """Talk to the server, one that `begin` gives where there is none yet."""
        if self._server is None:
            self._server = begin()
        self.server_pid = self._server.pid
        await self._server.connect()
        self._spawn_task(self._bound_logs())

    async def stop(self, grace_s: float = 3.0) -> None:
        """End everything: politely, then after `grace_s` by force. Nothing is left. Idempotent.

        Cancelled, it may leave processes; call it again.
        """
        self._stopping = True
        if self._server is not None:
            for process in self.processes.values():
                self._signal(process, signal.SIGCONT, daemons=True)
                self._signal(process, signal.SIGINT)
            ended = [
                asyncio.ensure_future(process.child.ended.wait())
                for process in self.processes.values()
                if process.child is not None
            ]
            if ended:
                await asyncio.wait(ended, timeout=grace_s)
            for future in ended:
                future.cancel()
            await self._server.aclose()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """End everything at once, without asking. Call `stop` afterwards to wait for it."""
        self._stopping = True
        if self._server is not None:
            self._server.kill()

    def kill_peer(self, name: str) -> None:
        """kill -9, as if its machine had failed."""
        self._expect_end(name)
        self._signal(self.processes[name], signal.SIGKILL)

    def stop_peer(self, name: str) -> None:
        """SIGTERM: it drains for `drain_s` at most, and leaves."""
        self._expect_end(name)
        self._signal(self.processes[name], signal.SIGTERM)

    def freeze(self, name: str) -> None:
        """Stop it and its network daemon: silent, but its connections stay open."""
        self.processes[name].frozen = True
        self._signal(self.processes[name], signal.SIGSTOP, daemons=True)

    def thaw(self, name: str) -> None:
        self.processes[name].frozen = False
        self._signal(self.processes[name], signal.SIGCONT, daemons=True)

    async def ended(self, name: str) -> int:
        """Wait until this process has ended: its exit code, negative for a signal."""
        child = self.processes[name].child
        assert child is not None
        await child.ended.wait()
        assert child.code is not None
        return child.code

    @abstractmethod
    def _hear(self, process: LocalProcess, message: Mapping[str, Any]) -> None:
        """What a process tells."""

    async def _spawn(
        self, process: LocalProcess, target: str, arguments: Mapping[str, Any]
    ) -> None:
        assert self._server is not None
        self.processes[process.name] = process
        try:
            process.child = await self._server.spawn(
                process.name,
                target,
                arguments,
                log=process.log,
                on_message=lambda message: self._hear(process, message),
            )
        except ForkServerError as error:
            path = self.run_dir / "peers" / "server.log"
            with contextlib.suppress(OSError):
                path.write_text(self._server.traceback or f"{error}\n")
            raise SwarmError(f"cannot start processes: {error}", f"see {path}") from None

    def _expect_end(self, name: str) -> None:
        self.processes[name].expected_to_end = True
        if self.processes[name].frozen:
            self.thaw(name)

    def _signal(self, process: LocalProcess, number: int, *, daemons: bool = False) -> None:
        if self._server is not None and process.child is not None:
            self._server.signal(process.child, number, daemons=daemons)

    def _spawn_task(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for process in self.processes.values():
                bound_log(process.log)


def bound_log(path: Path) -> None:
    """Empty a log that has grown too long, keeping its end as `log.1`.

    Its writer appends (O_APPEND), so it goes on at the new end; what it writes during the copy is
    lost.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= MAX_LOG_BYTES:
            return
        with path.open("rb+") as file:
            file.seek(-KEPT_LOG_BYTES, os.SEEK_END)
            path.with_name(f"{path.name}.1").write_bytes(file.read())
            file.truncate(0)


def check_stages(stages: Sequence[int | None], num_stages: int) -> None:
    if not stages:
        raise ConfigError("a swarm needs peers", "one per stage at least")
    for stage in stages:
        if stage is not None and not 0 <= stage < num_stages:
            raise ConfigError(
                f"--peers: there is no stage {stage}, the model has {num_stages}",
                f"stages are 0 to {num_stages - 1}",
            )
    missing = [str(stage) for stage in range(num_stages) if stage not in stages]
    if len(missing) > sum(stage is None for stage in stages):
        raise ConfigError(
            f"--peers: nobody serves stage {', '.join(missing)}", "give every stage a replica"
        )


def letters(number: int) -> str:
    """0, 1, ... as a, b, ..., z, aa, ab, ..."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("a") + digit) + text
    return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
