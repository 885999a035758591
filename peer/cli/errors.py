"""How a command fails: one line that says what and what to do, an exit code, no traceback."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from peer.cli import INTERRUPTED, raise_interrupts
from peer.streams import FULL
from swarm.errors import StorageError, SwarmError

READER_GONE = 141  # as a shell says of what SIGPIPE has ended: the work may not be done


def run_program(app: Callable[[], object]) -> None:
    """Run a whole program: what fails before any command begins, as `--help` on a full disk, is one
    line too."""
    try:
        with _in_one_line("--debug" in sys.argv):
            app()
    finally:
        gc.freeze()  # or the interpreter spends a second on what torch leaves, after Ctrl-C too


@contextmanager
def fail_in_one_line(debug: bool) -> Iterator[None]:
    """Turn exceptions into one line on stderr and an exit code; `--debug` shows the traceback."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.ERROR,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    with _in_one_line(debug):
        raise_interrupts()
        _print_any_name()
        _check_directory()
        try:
            yield
        except (OSError, ExceptionGroup) as caught:
            error = _first(caught)
            # What it says last, to a terminal that was closed or a `tee` that had the same Ctrl-C.
            interrupted = isinstance(error.__context__, KeyboardInterrupt)
            gone = isinstance(error, BrokenPipeError)  # `swarm status | head`
            if not (gone or (interrupted and isinstance(error, OSError))):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(INTERRUPTED if interrupted else READER_GONE)


def _print_any_name() -> None:
    """A path may have bytes that are no text; what was done must not end with an error over that.
    Where names pass as the bytes that they are, as in the C locale, they still do."""
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and stdout.errors == "strict":
        stdout.reconfigure(errors="backslashreplace")  # as stderr has it


def _check_directory() -> None:
    """Nothing can be done in a directory that is gone: torch, for one, ends the process there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise StorageError("the current directory is gone", "cd to another one") from None


@contextmanager
def _in_one_line(debug: bool) -> Iterator[None]:
    try:
        yield
    except (SwarmError, ExceptionGroup) as caught:
        if debug:
            raise
        _fail(_first(caught))
    except KeyboardInterrupt:
        if debug:
            raise
        sys.exit(INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        _fail(error)


def _fail(error: BaseException) -> NoReturn:
    if isinstance(error, OSError) and error.filename is not None:  # no permission, no such name
        error = StorageError(
            f"cannot use {error.filename}: {error.strerror}",
            "name another one, or make it readable and writable",
        )
    elif isinstance(error, OSError) and error.errno in FULL:
        error = StorageError(f"cannot write the output: {error.strerror}", "free some space")
    if isinstance(error, SwarmError):
        _say(f"error: {one_line(str(error))}")
        sys.exit(error.exit_code)
    what = one_line(f"{type(error).__name__}: {error}")
    _say(f"error: unexpected {what} - please report it; --debug shows more")
    sys.exit(1)


def _say(line: str) -> None:
    with suppress(OSError):  # nobody reads it; the exit code tells as much
        print(line, file=sys.stderr)


def _first(error: BaseException) -> BaseException:
    """The first of a group of errors (a task group raises them so), our own before others."""
    while isinstance(error, BaseExceptionGroup):
        ours = error.subgroup(SwarmError)
        error = (ours or error).exceptions[0]
    return error


def one_line(text: str) -> str:
    """Line breaks and control characters have no place in a line; bytes that are no text show as
    such."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:1000]
