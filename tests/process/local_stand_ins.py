"""Stand-ins for a leader and peers, run by the fork server in tests of the supervisor alone.

They import little, so a whole stand-in swarm starts within a second. `python -m
tests.process.local_stand_ins CLASS CONFIG RUN_DIR` is a supervisor to be interrupted and killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from peer.local import LocalSwarm
from peer.local_entry import run

JEMALLOC = b"jemalloc_bg_thd"


class StandIns(LocalSwarm):
    preload_target = "tests.process.local_stand_ins:nothing"
    leader_target = "tests.process.local_stand_ins:leader"
    peer_target = "tests.process.local_stand_ins:peer"


class Stubborn(StandIns):
    peer_target = "tests.process.local_stand_ins:stubborn"


def nothing(model_type):
    import torch  # noqa: F401 - what `run` imports, once instead of in every process


def slow(model_type):
    time.sleep(60)


def with_a_thread(model_type):
    """One of Python's, under a name that would do no harm as that of a native one."""
    thread = threading.Thread(target=time.sleep, args=(60,), name="worker", daemon=True)
    thread.start()
    Path(f"/proc/self/task/{thread.native_id}/comm").write_bytes(JEMALLOC)


def with_jemalloc(model_type):
    native_thread(JEMALLOC)
    nothing(model_type)


def with_native_threads(model_type):
    for name in (JEMALLOC, *[b"pool\x1b[1m"] * 3, b"a", b"b", b"c", b"d", b"e"):
        native_thread(name)


def native_thread(name):
    """One that Python knows nothing of. It takes no signal, as jemalloc's own does not."""
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    assert libc.pthread_create(ctypes.byref(thread), None, libc.pause, None) == 0
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert libc.pthread_setname_np(thread, name) == 0


def broken(model_type):
    raise ImportError("no module named libswarm")


def leader(arguments, tell):
    async def main():
        tell({"link": "swarm://nowhere"})
        await asyncio.sleep(600)

    return run(main, tell, threads=1)


def failing_leader(arguments, tell):
    async def main():
        from swarm.errors import ListenError

        raise ListenError("cannot listen on 127.0.0.1:1", "choose another port")

    return run(main, tell, threads=1)


def peer(arguments, tell):
    """With a daemon, as a real one has, which does not end by itself."""
    subprocess.Popen(["sleep", "30"], start_new_session=True)

    async def main():
        tell({"say": "serving"})
        await asyncio.sleep(600)

    return run(main, tell, threads=1)


def failing_peer(arguments, tell):
    async def main():
        from swarm.errors import DeviceError

        raise DeviceError("there is no cuda:3 here", "use --device cpu")

    return run(main, tell, threads=1)


def stubborn(arguments, tell):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell({"say": "serving"})
    while True:
        time.sleep(600)


def main(kind: str, stamped: str, run_dir: str) -> int:
    """Run a swarm of this class; prints the pids once it has started."""
    from swarm.config import parse_config

    config = parse_config(json.loads(Path(stamped).read_bytes()))
    swarm_class = {"LocalSwarm": LocalSwarm, "StandIns": StandIns, "Stubborn": Stubborn}[kind]

    async def supervise() -> int:
        swarm = swarm_class(config, Path(run_dir), cache_dir=Path(run_dir).parent / "cache")

        def started() -> None:
            print("started", *(each.pid for each in swarm.processes.values()), flush=True)

        grace_s = 60.0 if kind == "Stubborn" else 3.0
        report = await swarm.run(started, grace_s=grace_s)
        return 130 if report is None else 0

    return asyncio.run(supervise())


if __name__ == "__main__":
    print("supervisor", os.getpid(), flush=True)
    sys.exit(main(*sys.argv[1:]))
