"""Signals of a command: the first lets it leave, from its first instant on, and one that is ignored
changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from peer.interrupt import run_loop, until_interrupted


@pytest.fixture
def hangups(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGHUP as a terminal leaves it, or nohup; whoever runs the tests may have done either."""
    before = signal.signal(signal.SIGHUP, getattr(request, "param", signal.SIG_DFL))
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT as a terminal leaves it; a shell's background job begins without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def hang_up_itself() -> str:
    os.kill(os.getpid(), signal.SIGHUP)
    for _ in range(5):  # in which a handler, if there were one, would run
        await asyncio.sleep(0)
    return "finished"


async def hang_up_and_wait() -> str:
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.Event().wait()
    return "never"


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("run", [run_loop, until_interrupted])
def test_an_interrupt_while_the_loop_is_made_comes_after_that(
    run: Callable[[Coroutine[Any, Any, str]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that is half made complains when it is collected, in a traceback."""
    loops: list[asyncio.AbstractEventLoop] = []
    make = asyncio.new_event_loop

    def interrupted() -> asyncio.AbstractEventLoop:
        signal.raise_signal(signal.SIGINT)
        loops.append(make())
        return loops[-1]

    async def main() -> str:
        return "never"

    monkeypatch.setattr(asyncio, "new_event_loop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert [loop.is_closed() for loop in loops] == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("hangups")
def test_a_hangup_ends_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        until_interrupted(hang_up_and_wait())


@pytest.mark.parametrize("hangups", [signal.SIG_IGN], indirect=True, ids=["nohup"])
@pytest.mark.usefixtures("hangups")
def test_under_nohup_it_does_not() -> None:
    assert until_interrupted(hang_up_itself()) == "finished"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.usefixtures("hangups")
def test_afterwards_a_hangup_does_what_it_did_before() -> None:
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        until_interrupted(hang_up_and_wait())
    assert signal.getsignal(signal.SIGHUP) is signal.default_int_handler


# ---- while Python still imports -----------------------------------------------------------------

INTERRUPTED_BY_AN_IMPORT = """
import importlib.abc, os, signal, sys

program, module, *sys.argv[1:] = sys.argv[1:]

class CtrlC(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            print("interrupted", flush=True)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
import peer.cli
sys.exit(getattr(peer.cli, program)())
"""


def interrupted(
    program: str, module: str, *args: str, ignored: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program as its console script does, with a Ctrl-C as it comes to import `module`."""
    # Said either way: a shell that starts the tests in the background has SIGINT ignored in all.
    handler = "SIG_IGN" if ignored else "default_int_handler"
    before = f"import signal; signal.signal(signal.SIGINT, signal.{handler})"
    command = [sys.executable, "-c", before + INTERRUPTED_BY_AN_IMPORT, program, module, *args]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("program", "module", "args"),
    [
        ("main", "peer.places", ["status"]),
        ("main", "typer", ["status"]),
        ("main", "swarm.errors", ["--help"]),
        ("main", "pydantic", ["baseline", "nowhere.toml"]),  # the command has begun
        ("peer_main", "typer", []),
        ("peer_main", "swarm.net.identity", []),
    ],
)
def test_ctrl_c_while_it_imports_is_no_traceback(
    program: str, module: str, args: list[str]
) -> None:
    done = interrupted(program, module, *args)
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")


def test_where_interrupts_are_ignored_it_goes_on() -> None:
    done = interrupted("main", "typer", "--version", ignored=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("interrupted\nswarm-parallel ")


INTERRUPTED_IN_A_FINALIZER = """
import importlib.abc, os, signal, sys, time

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

class CtrlC(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "pydantic":
            Finalized()
            time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
import peer.cli
sys.argv[1:] = ["baseline", "nowhere.toml"]
sys.exit(peer.cli.main())
"""


def test_ctrl_c_in_what_cannot_raise_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IN_A_FINALIZER],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# ---- while a command writes ---------------------------------------------------------------------

STOPPED_AS_IT_EXPORTS = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace

import peer.cli, peer.export, swarm.model.export

number = int(sys.argv.pop())

def write(pipeline, state, directory, tokenizer):
    print(*(path.name[:18] for path in Path.cwd().iterdir()), flush=True)
    os.kill(os.getpid(), number)
    print("not stopped")

def export(directory, out, say):
    swarm.model.export.export_model(SimpleNamespace(key_order=()), {}, out)

swarm.model.export._write = write
peer.export.export_checkpoint = export
sys.argv[1:1] = ["export", "run", "out"]
# as a terminal leaves it, whatever runs the tests
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
peer.cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_stopped_leaves_nothing_half_written(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", STOPPED_AS_IT_EXPORTS, str(int(number))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, ".out.swarm-export-\n", "")
    assert list(tmp_path.iterdir()) == []
