"""The group all-reduce over libp2p, beside bare streams, hivemind's averager and gloo.

Members are processes on this machine, each with its own p2pd. Sides take turns within one run, so a
busy machine hits all of them; a round's time is that of its slowest member; medians.

- `bare`: the same bytes, streams and chunks, but nothing is summed and nothing waits for a sum.
- `hivemind`: DecentralizedAverager, from the moment its group has been found. It only has float32.
  Where it finds none, its members are begun again; then it is left out, and the others go on.
- `gloo`: torch.distributed.all_reduce, plain TCP without encryption, for orientation.

    python benchmarks/all_reduce.py [--members 2 4] [--mb 16 100] [--rounds 5] [--no-hivemind]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMBER = Path(__file__).with_name("_all_reduce_member.py")
BARE_GOAL = 1.3
END_S = 10.0  # for members whose input has closed
HIVEMIND_STARTS = 3


class MemberEndedError(SystemExit):
    """Ends the program with what the member said, where nobody catches it."""


def _as_it_is(rank: int, command: list[str]) -> list[str]:
    return command


class Members:
    """Processes that are told and asked by lines of JSON. Their noise goes to a file.

    `wrap(rank, command)` may start one elsewhere, as in a host of the lab (`benchmarks/wan`).
    """

    def __init__(
        self, kind: str, num: int, wrap: Callable[[int, list[str]], list[str]] = _as_it_is
    ) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the processes)
        self.came: list[list[float]] = []  # at each, of each: bytes per second in our last round
        self.processes = [
            subprocess.Popen(
                wrap(rank, [sys.executable, str(MEMBER), kind]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "ERROR"},
                start_new_session=True,
            )
            for rank in range(num)
        ]

    def tell(self, **fields: Any) -> None:
        for rank in range(len(self.processes)):
            self.tell_one(rank, **fields)

    def tell_one(self, rank: int, **fields: Any) -> None:
        pipe = self.processes[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps({"rank": rank, **fields}) + "\n")
        pipe.flush()

    def hear(self) -> list[dict[str, Any]]:
        return [self.hear_one(rank) for rank in range(len(self.processes))]

    def hear_one(self, rank: int) -> dict[str, Any]:
        pipe = self.processes[rank].stdout
        assert pipe is not None
        for line in pipe:
            if line.startswith("{"):
                heard: dict[str, Any] = json.loads(line)
                return heard
        self.log.seek(0)
        raise MemberEndedError(f"member {rank} ended:\n{self.log.read()[-2000:]}")

    def round(self, **fields: Any) -> float:
        self.tell(**fields)
        self.hear()
        self.tell(go=True)
        heard = self.hear()
        if fields["side"] in ("ours", "gloo") and len({h["sha256"] for h in heard}) != 1:
            raise SystemExit(f"members of {fields} hold different bytes")
        if fields["side"] == "ours":
            self.came = [h["came"] for h in sorted(heard, key=lambda h: h["index"])]
        return max(h["seconds"] for h in heard)

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, before it read its last line
                process.stdin.close()
        give_up = time.monotonic() + END_S
        for process in self.processes:
            try:
                process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
        self.log.close()

    def introduce(self, gloo: str) -> None:
        """Tell those of kind `streams` where the others are."""
        ends = [heard["end"] for heard in self.hear()]
        self.tell(addresses=dict(ends), gloo=gloo)
        self.hear()


def start_streams(num: int) -> Members:
    members = Members("streams", num, lambda _, command: [*command, "127.0.0.1", "1"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    members.introduce(f"tcp://127.0.0.1:{port}")
    return members


class Hivemind:
    """Its averagers, which now and then find no group in any time, in all members alike."""

    def __init__(self, num: int, sizes: list[int]) -> None:
        self.num, self.sizes = num, sizes
        self.starts_left = HIVEMIND_STARTS
        self.members: Members | None = None

    def _start(self) -> Members:
        members = self.members = Members("hivemind", self.num)
        members.tell_one(0, peers=[])
        peers = members.hear_one(0)["addresses"]
        for rank in range(1, self.num):
            members.tell_one(rank, peers=peers)
            members.hear_one(rank)
        members.tell(sizes=self.sizes, members=self.num)
        members.hear()
        return members

    def round(self, elements: int) -> float | None:
        """Seconds; None once it has been begun so often that it is left out."""
        while self.starts_left:
            try:
                members = self.members or self._start()
                return members.round(side="hivemind", num_elements=elements)
            except (MemberEndedError, BrokenPipeError) as error:
                self.close()
                self.starts_left -= 1
                print(f"hivemind, {self.num} members: {error}".rstrip(), file=sys.stderr)
        return None

    def close(self) -> None:
        if self.members is not None:
            self.members.close()
            self.members = None


def measure(num: int, options: argparse.Namespace) -> dict[tuple[str, str, int], list[float]]:
    """Seconds of every round but the first by (side, dtype, MB); hivemind's may be fewer."""
    sizes = {mb: mb * 1_000_000 // 4 for mb in options.mb}
    sides = [("ours", "float64"), ("bare", "float64"), ("ours", "float32"), ("bare", "float32")]
    sides.append(("gloo", "float32"))
    taken: dict[tuple[str, str, int], list[float]] = {}
    streams = start_streams(num)
    hivemind = Hivemind(num, list(sizes.values()))
    try:
        for mb, elements in sizes.items():
            for trial in range(options.rounds + 1):
                for side, dtype in sides:
                    seconds = streams.round(
                        side=side, num_elements=elements, accumulate=dtype, connections=1
                    )
                    if trial:
                        taken.setdefault((side, dtype, mb), []).append(seconds)
                averaged = hivemind.round(elements) if options.hivemind else None
                if trial and averaged is not None:
                    taken.setdefault(("hivemind", "float32", mb), []).append(averaged)
    finally:
        streams.close()
        hivemind.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=int, nargs="+", default=[16, 100], help="of float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-hivemind", dest="hivemind", action="store_false")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []

    def add(metric: str, value: float, unit: str, goal: str | None, met: bool | None) -> None:
        results.append(
            {"metric": metric, "value": round(value, 4), "unit": unit, "goal": goal, "met": met}
        )

    print(
        "members  MB   accumulate   ours s   bare s   ours/bare  hivemind s (rounds)"
        "  hivemind/ours  gloo s"
    )
    for num in options.members:
        taken = measure(num, options)
        medians = {key: statistics.median(seconds) for key, seconds in taken.items()}
        for mb in options.mb:
            gloo = medians["gloo", "float32", mb]
            hivemind = medians.get(("hivemind", "float32", mb), float("nan"))
            rounds = len(taken.get(("hivemind", "float32", mb), []))
            for dtype in ("float64", "float32"):
                ours, bare = medians["ours", dtype, mb], medians["bare", dtype, mb]
                print(
                    f"{num:7} {mb:4}   {dtype:10} {ours:8.3f} {bare:8.3f} {ours / bare:10.2f}x"
                    f" {hivemind:11.3f} ({rounds:6}) {hivemind / ours:13.2f}x {gloo:7.3f}",
                    flush=True,
                )
                name = f"{num} members, {mb} MB, accumulate {dtype}"
                ratio = ours / bare
                add(f"all-reduce / bare streams, {name}", ratio, "x", "<= 1.3", ratio <= BARE_GOAL)
                if rounds:
                    faster = hivemind > ours
                    add(f"hivemind / all-reduce, {name}", hivemind / ours, "x", "> 1", faster)
                add(f"all-reduce, {name}", ours, "s", None, None)
                add(f"all-reduce / gloo, {name}", ours / gloo, "x", None, None)
    print(json.dumps({"bench": "all_reduce", "results": results}))


if __name__ == "__main__":
    main()
