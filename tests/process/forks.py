"""Commands and swarms for process tests, all forked from one server that has imported everything.

`Forks` lives for the whole session, in an event loop of its own; a test makes it turn with `run`,
or by waiting for something. What a test started is killed when it ends (`end_all`).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from peer import local_process
from peer.local_process import Child, ForkServer
from peer.local_server import _serve
from peer.local_warm_up import server_environment
from tests.process.counted import write_kernels
from tests.process.paced import pace

if TYPE_CHECKING:
    from tests.process.lab import Host

T = TypeVar("T")
LIMIT_S = 90.0  # of anything a test waits for; reached only by a defect


class _Server(ForkServer):
    """Outlives the swarms that are given it."""

    async def connect(self) -> None:
        if self._writer is None:
            await super().connect()

    async def aclose(self) -> None:
        self.kill()
        for child in self.children:
            await child.ended.wait()

    def kill(self) -> None:
        for child in self.children:
            self.signal(child, signal.SIGKILL, daemons=True)

    async def end(self) -> None:
        super().kill()
        await super().aclose()


@dataclass(eq=False)
class Command:
    """A running `swarm` or `swarm-peer`; what it has said so far."""

    forks: Forks
    args: tuple[str, ...]
    child: Child
    error_file: Path

    @property
    def out(self) -> str:
        return self.child.log.read_text() if self.child.log.exists() else ""

    @property
    def err(self) -> str:
        return self.error_file.read_text() if self.error_file.exists() else ""

    @property
    def link(self) -> str:
        """The join link a leader prints."""
        self.says("--join swarm://")
        return next(word for word in self.out.split() if word.startswith("swarm://"))

    def says(self, text: str, times: int = 1) -> None:
        """Wait until it has said that."""
        self.forks.until(
            lambda: self.out.count(text) >= times or not self.child.alive, f"{text!r} of {self}"
        )
        assert self.out.count(text) >= times, f"{self} ended ({self.child.code}) without {text!r}"

    def signal(self, number: int, *, daemons: bool = False) -> None:
        self.forks.server.signal(self.child, number, daemons=daemons)

    def code(self) -> int:
        """Wait for its end."""
        self.forks.until(lambda: not self.child.alive, f"the end of {self}")
        assert self.child.code is not None
        return self.child.code

    def __str__(self) -> str:
        return f"{' '.join(self.args)}\n{self.out}\n{self.err}"


class Forks:
    """`environment` and `cwd` are those of commands; see the fixture `forks`.

    `constants` are values of "package.module:NAME" in them: waits that are long for a test.
    """

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.server = _Server("tests.process.forks:preload", {}, environment=server_environment(1))
        self.environment: dict[str, str] = {}
        self.cwd = Path()
        self.constants: dict[str, float | list[str]] = {}
        self._count = 0

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(2 * LIMIT_S):
                return await main

        return self.runner.run(limited())

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Let time pass until the condition holds."""

        async def wait() -> None:
            try:
                async with asyncio.timeout(LIMIT_S):
                    while not condition():  # noqa: ASYNC110 - other processes set no event
                        await asyncio.sleep(0.02)
            except TimeoutError:
                raise AssertionError(f"waited for {what}") from None

        self.runner.run(wait())

    def swarm(
        self, *args: str | Path, host: Host | None = None, terminal: str = "", **environment: str
    ) -> Command:
        """Of a lab's `host`; without one, of this machine. What it says goes to `terminal`, the
        name of one, if there is one."""
        return self._start(("swarm", *map(str, args)), host, environment, terminal=terminal)

    def peer(
        self,
        *args: str | Path,
        host: Host | None = None,
        pace_s: float = 0.0,
        kernels: Path | None = None,
        **environment: str,
    ) -> Command:
        """`pace_s`: see `paced`. `kernels`: the directory for what it computes, see `counted`."""
        return self._start(("swarm-peer", *map(str, args)), host, environment, pace_s, kernels)

    def _start(
        self,
        args: tuple[str, ...],
        host: Host | None,
        environment: dict[str, str],
        pace_s: float = 0.0,
        kernels: Path | None = None,
        terminal: str = "",
    ) -> Command:
        self._count += 1
        logs = self.cwd / ".logs"
        error_file = logs / f"{self._count}.err"

        async def start() -> Child:
            await self.server.connect()
            return await self.server.spawn(
                args[0],
                "tests.process.forks:command",
                {
                    "args": args,
                    "cwd": str(self.cwd),
                    "stderr": str(error_file),
                    "namespace": host.namespace if host else "",
                    "constants": self.constants,
                    "pace_s": pace_s,
                    "kernels": str(kernels or ""),
                    "terminal": terminal,
                },
                log=logs / f"{self._count}.out",
                environment={**self.environment, **environment},
            )

        return Command(self, args, self.run(start()), error_file)

    def end_all(self) -> None:
        """Kill what still runs."""
        if self.server.children:
            self.run(self.server.aclose())

    def close(self) -> None:
        self.runner.run(self.server.connect())
        self.runner.run(self.server.end())
        self.runner.close()


def preload() -> None:
    """All that any test's processes import."""
    from peer.local_entry import preload as preload_swarm

    preload_swarm("gpt2")
    import peer.cli.peer_program
    import peer.cli.swarm_program
    import peer.commands
    import peer.demo
    import peer.serve  # noqa: F401


def command(arguments: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> int:
    """In a forked process: be `swarm` or `swarm-peer`."""
    import torch

    from peer.cli.peer_program import peer_app
    from peer.cli.swarm_program import app as swarm_app

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    os.chdir(arguments["cwd"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if arguments["terminal"]:  # it leads a session without one: this becomes its own
        terminal = os.open(arguments["terminal"], os.O_RDWR)
        for standard in range(3):
            os.dup2(terminal, standard)
        os.close(terminal)
    else:
        stderr = os.open(arguments["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(stderr, 2)
        os.close(stderr)
    if arguments["namespace"]:  # while there is no other thread
        from tests.process.lab import enter

        enter(arguments["namespace"])
    torch.set_num_threads(1)
    for place, value in arguments["constants"].items():
        module, _, name = place.partition(":")
        constants = importlib.import_module(module)
        assert hasattr(constants, name), place
        setattr(constants, name, value)
    if arguments["pace_s"]:
        pace(arguments["pace_s"])
    if arguments["kernels"]:
        write_kernels(Path(arguments["kernels"]))
    program, *args = arguments["args"]
    if args[:1] == ["up"]:
        # All that it uses of a module that others share: hivemind starts its daemon with it.
        local_process.subprocess = SimpleNamespace(  # type: ignore[assignment]
            Popen=_ForkedServer().start,
            DEVNULL=subprocess.DEVNULL,
            TimeoutExpired=subprocess.TimeoutExpired,
        )
    sys.argv = [program, *args]
    app = swarm_app if program == "swarm" else peer_app
    app(list(args), prog_name=program)
    return 0


class _ForkedServer:
    """In place of the interpreter that `swarm up` starts for a fork server: a fork of this one,
    which has imported everything already. Made while there is no other thread, and waits.

    `swarm demo` and `Forks` itself start theirs as users do.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._reaped = False
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become_server(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def _become_server(self, theirs: socket.socket) -> None:
        self._ours.close()
        environment, (descriptor,), _, _ = socket.recv_fds(theirs, 1 << 16, 1)
        theirs.close()
        os.setsid()
        os.environ.update(json.loads(environment))
        with open(os.devnull, "r+b") as null:
            for standard in range(3):
                os.dup2(null.fileno(), standard)
        _serve(descriptor)

    def start(
        self, args: Sequence[str], *, env: dict[str, str], pass_fds: list[int], **_: Any
    ) -> _ForkedServer:
        socket.send_fds(self._ours, [json.dumps(env).encode()], pass_fds)
        return self

    def kill(self) -> None:
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = LIMIT_S) -> None:
        if self._reaped:
            return
        process = os.pidfd_open(self.pid)
        try:
            if not select.select([process], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the fork server", timeout)
        finally:
            os.close(process)
        os.waitpid(self.pid, 0)
        self._reaped = True


def toml(
    path: Path,
    *,
    steps: int,
    stages: int = 3,
    layers: int = 3,
    extra: str = "",
    text: Sequence[str] = (),
    wire: str = 'activations = "float32"',
    gradients: str = "float32",
    subspace: int | None = None,
) -> Path:
    """Write a run.toml of a small GPT-2 with dropout, exact, and its text; returns its path.

    `wire` are the other lines of [wire]. Dropout would leave a `subspace`: there is none there.
    """
    source = path.parent / "corpus.txt"
    source.write_text("\n".join(text) or "the quick brown fox jumps over the lazy dog\n" * 3000)
    narrow, dropout = (f"subspace = {subspace}", 0.0) if subspace else ("", 0.1)
    values = {"steps": steps, "stages": stages, "layers": layers}
    values |= {"subspace": narrow, "dropout": dropout}
    path.write_text(TOML.format(source=source, wire=wire, gradients=gradients, **values) + extra)
    return path


TOML = """
[run]
name = "small"
seed = 3
[model]
stages = {stages}
{subspace}
[model.config]
model_type = "gpt2"
n_embd = 32
n_layer = {layers}
n_head = 2
n_positions = 32
vocab_size = 256
resid_pdrop = {dropout}
embd_pdrop = {dropout}
attn_pdrop = {dropout}
tie_word_embeddings = false
[data]
source = "text"
path = "{source}"
sequence = 32
[batch]
microbatches = 6
microbatch_size = 2
[schedule]
steps = {steps}
warmup_steps = 1
[wire]
{wire}
gradients = "{gradients}"
[update]
accumulate = "float64"
[validation]
every = 0
"""
