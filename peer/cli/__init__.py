"""The programs `swarm` and `swarm-peer`: how they begin, and where the rest of them is.

- `swarm_program`, `peer_program`  the commands and their flags
- `options`, `checks`              flags that several of them have; what can be wrong with a flag
- `errors`                         how a command fails, and a program ends
- `command_line`                   commands as they are told to people

What the programs need takes some tenths of a second to import, in which an interrupt would end in a
traceback out of the middle of some module. So nothing is imported here before the signal is taken:
until a command begins (`errors.fail_in_one_line`) Ctrl-C ends the process on the spot, because
there is nothing yet to be tidied up. From then on SIGTERM and SIGHUP are Ctrl-C by other means, or
a command would leave behind what it was writing.
"""

import os
import signal
import sys

INTERRUPTED = 130
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.01
_begun = False


def main() -> None:
    """The `swarm` program."""
    _begin()
    from peer.cli.errors import run_program
    from peer.cli.swarm_program import app

    run_program(app)


def peer_main() -> None:
    """The `swarm-peer` program."""
    _begin()
    from peer.cli.errors import run_program
    from peer.cli.peer_program import peer_app

    run_program(peer_app)


def raise_interrupts() -> None:
    """From now on what asks the program to stop is a KeyboardInterrupt, but for signals that are
    ignored. Nothing where no program has begun."""
    if _begun:
        for number in STOP:
            if signal.getsignal(number) in (_end, signal.SIG_DFL):
                signal.signal(number, signal.default_int_handler)
        sys.unraisablehook = _again_if_interrupted
        sys.meta_path.insert(0, _NumpyFirst())


def _begin() -> None:
    global _begun
    _begun = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored
        signal.signal(signal.SIGINT, _end)
    from contextlib import suppress

    from peer.places import cache_home
    from swarm.errors import StorageError

    # Importing torch makes a directory in /tmp, and leaves it there, unless told of another.
    with suppress(StorageError):  # a command that needs a home says so
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "torch"))


class _NumpyFirst:
    """Imports numpy where torch is looked for. Torch does it from C, which loses an interrupt and
    leaves numpy half imported: the command would go on, and fail for want of it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            sys.meta_path.remove(self)
            import numpy  # noqa: F401


def _again_if_interrupted(lost: "sys.UnraisableHookArgs") -> None:
    """An interrupt is lost in what cannot raise, as a finalizer. It comes again once that is over,
    from a thread: here it would be lost again."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    import threading  # not before the signal is taken

    main = threading.main_thread().ident
    number = next((n for n in STOP if signal.getsignal(n) is not signal.SIG_IGN), None)
    if main is not None and number is not None:
        threading.Timer(AGAIN_S, signal.pthread_kill, (main, number)).start()


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
