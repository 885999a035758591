"""The group all-reduce over libp2p, beside bare streams, hivemind's averager and gloo.

Members are processes on this machine, each with its own p2pd. Sides take turns within one run, so a
busy machine hits all of them; a round's time is that of its slowest member; medians.

- `bare`: the same bytes, streams and chunks, but nothing is summed and nothing waits for a sum.
- `hivemind`: DecentralizedAverager, from the moment its group has been found. It only has float32.
- `gloo`: torch.distributed.all_reduce, plain TCP without encryption, for orientation.

    python benchmarks/all_reduce.py [--members 2 4] [--mb 16 100] [--rounds 5] [--no-hivemind]
"""

from __future__ import annotations

import argparse
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
        raise SystemExit(f"member {rank} ended:\n{self.log.read()[-2000:]}")

    def round(self, **fields: Any) -> float:
        self.tell(**fields)
        self.hear()
        self.tell(go=True)
        heard = self.hear()
        if fields["side"] in ("ours", "gloo") and len({h["sha256"] for h in heard}) != 1:
            raise SystemExit(f"members of {fields} hold different bytes")
        return max(h["seconds"] for h in heard)

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
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


def start_hivemind(num: int, sizes: list[int]) -> Members:
    members = Members("hivemind", num)
    members.tell_one(0, peers=[])
    peers = members.hear_one(0)["addresses"]
    for rank in range(1, num):
        members.tell_one(rank, peers=peers)
        members.hear_one(rank)
    members.tell(sizes=sizes, members=num)
    members.hear()
    return members


def measure(num: int, options: argparse.Namespace) -> dict[tuple[str, str, int], float]:
    """Median seconds by (side, dtype, MB)."""
    sizes = {mb: mb * 1_000_000 // 4 for mb in options.mb}
    sides = [("ours", "float64"), ("bare", "float64"), ("ours", "float32"), ("bare", "float32")]
    sides.append(("gloo", "float32"))
    taken: dict[tuple[str, str, int], list[float]] = {}
    streams = start_streams(num)
    hivemind = start_hivemind(num, list(sizes.values())) if options.hivemind else None
    try:
        for mb, elements in sizes.items():
            for trial in range(options.rounds + 1):
                for side, dtype in sides:
                    seconds = streams.round(
                        side=side, num_elements=elements, accumulate=dtype, connections=1
                    )
                    if trial:
                        taken.setdefault((side, dtype, mb), []).append(seconds)
                if hivemind is not None:
                    seconds = hivemind.round(side="hivemind", num_elements=elements)
                    if trial:
                        taken.setdefault(("hivemind", "float32", mb), []).append(seconds)
    finally:
        streams.close()
        if hivemind is not None:
            hivemind.close()
    return {key: statistics.median(values) for key, values in taken.items()}


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
        "members  MB   accumulate   ours s   bare s   ours/bare  hivemind s  hivemind/ours  gloo s"
    )
    for num in options.members:
        medians = measure(num, options)
        for mb in options.mb:
            gloo = medians["gloo", "float32", mb]
            hivemind = medians.get(("hivemind", "float32", mb))
            for dtype in ("float64", "float32"):
                ours, bare = medians["ours", dtype, mb], medians["bare", dtype, mb]
                speedup = hivemind / ours if hivemind else float("nan")
                print(
                    f"{num:7} {mb:4}   {dtype:10} {ours:8.3f} {bare:8.3f} {ours / bare:10.2f}x"
                    f" {hivemind or float('nan'):11.3f} {speedup:13.2f}x {gloo:7.3f}",
                    flush=True,
                )
                name = f"{num} members, {mb} MB, accumulate {dtype}"
                ratio = ours / bare
                add(f"all-reduce / bare streams, {name}", ratio, "x", "<= 1.3", ratio <= BARE_GOAL)
                if hivemind:
                    add(f"hivemind / all-reduce, {name}", speedup, "x", "> 1", speedup > 1)
                add(f"all-reduce, {name}", ours, "s", None, None)
                add(f"all-reduce / gloo, {name}", ours / gloo, "x", None, None)
    print(json.dumps({"bench": "all_reduce", "results": results}))


if __name__ == "__main__":
    main()
