"""Bare streams between two processes on loopback: throughput, round trip, time to open.

Beside our streams run hivemind's own (asyncio StreamReader/StreamWriter on the same two daemons),
sides alternating in one run, medians of the repetitions.
Usage: python benchmarks/transport.py [--repeat 5] [--mib 128]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from swarm.net.libp2p import Libp2pTransport
from swarm.net.transport import Stream

MIB = 1 << 20


async def hivemind_of(transport: Libp2pTransport) -> Any:
    from hivemind.p2p import P2P
    from hivemind.utils.multiaddr import Multiaddr

    return await P2P.replicate(Multiaddr(f"/unix{transport.daemon.control_path}"))


async def serve() -> None:
    transport = await Libp2pTransport.create()
    buffer = memoryview(bytearray(MIB))

    async def sink(stream: Stream) -> None:
        while True:
            for _ in range(int.from_bytes(await stream.receive_exactly(4), "big")):
                await stream.receive_into(buffer)
            await stream.send([b"!"])

    async def echo(stream: Stream) -> None:
        while True:
            await stream.send([await stream.receive_exactly(64)])

    async def hivemind_sink(info: Any, reader: Any, writer: Any) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                for _ in range(int.from_bytes(await reader.readexactly(4), "big")):
                    await reader.readexactly(MIB)
                writer.write(b"!")
                await writer.drain()

    transport.serve("/sink/1", sink)
    transport.serve("/echo/1", echo)
    p2p = await hivemind_of(transport)
    await p2p.add_binary_stream_handler("/hivemind-sink/1", hivemind_sink)
    print(transport.addresses[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await p2p.shutdown()
    await transport.close()


async def measure(address: str, repeat: int, mib: int) -> dict[str, list[float]]:
    transport = await Libp2pTransport.create()
    peer = address.rpartition("/p2p/")[2]
    block = bytes(MIB)
    times: dict[str, list[float]] = {}

    async def ours(stream: Stream, count: int) -> None:
        await stream.send([count.to_bytes(4, "big")])
        for _ in range(count):
            await stream.send([block])
        await stream.receive_exactly(1)

    async def theirs(reader: Any, writer: Any, count: int) -> None:
        writer.write(count.to_bytes(4, "big"))
        for _ in range(count):
            writer.write(block)
            await writer.drain()
        await reader.readexactly(1)

    async def timed(name: str, *work: Any) -> None:
        begun = time.perf_counter()
        await asyncio.gather(*work)
        times.setdefault(name, []).append(mib * MIB / 1e6 / (time.perf_counter() - begun))

    streams = [await transport.dial(peer, "/sink/1", [address]) for _ in range(4)]
    p2p = await hivemind_of(transport)
    from hivemind.p2p import PeerID

    remote = PeerID.from_base58(peer)
    pipes = []
    for _ in range(4):
        _, reader, writer = await p2p.call_binary_stream_handler(remote, "/hivemind-sink/1")
        pipes.append((reader, writer))
    await asyncio.gather(*(ours(stream, 8) for stream in streams))
    await asyncio.gather(*(theirs(*pipe, 8) for pipe in pipes))
    for _ in range(repeat):
        await timed("one stream", ours(streams[0], mib))
        await timed("hivemind, one stream", theirs(*pipes[0], mib))
        await timed("four streams", *(ours(stream, mib // 4) for stream in streams))
        await timed("hivemind, four streams", *(theirs(*pipe, mib // 4) for pipe in pipes))
    echo = await transport.dial(peer, "/echo/1", [address])
    for _ in range(300):
        begun = time.perf_counter()
        await echo.send([bytes(64)])
        await echo.receive_exactly(64)
        times.setdefault("round trip", []).append((time.perf_counter() - begun) * 1e6)
    for _ in range(50):
        begun = time.perf_counter()
        stream = await transport.dial(peer, "/echo/1", [address])
        await stream.send([bytes(64)])
        await stream.receive_exactly(64)
        times.setdefault("open and round trip", []).append((time.perf_counter() - begun) * 1e6)
        await stream.close()
    for _, writer in pipes:
        writer.close()
    await p2p.shutdown()
    await transport.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin
        assert child.stdout
        try:
            address = child.stdout.readline().strip()
            times = asyncio.run(measure(address, options.repeat, options.mib))
        finally:
            child.stdin.close()
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, value in median.items():
        unit = "us" if "trip" in name else "MB/s"
        print(f"{name:24} {value:8.0f} {unit}")
    results: list[dict[str, Any]] = []
    for name in ("one stream", "four streams"):
        ratio = statistics.median(
            a / b for a, b in zip(times[name], times[f"hivemind, {name}"], strict=True)
        )
        print(f"{name + ' / hivemind':24} {ratio:8.2f}")
        results.append(
            {
                "metric": name,
                "value": round(median[name]),
                "unit": "MB/s",
                "goal": None,
                "met": None,
            }
        )
        results.append(
            {
                "metric": f"{name} over hivemind's",
                "value": round(ratio, 3),
                "unit": "ratio",
                "goal": ">= 1.0",
                "met": ratio >= 1.0,
            }
        )
    results += [
        {"metric": name, "value": round(median[name]), "unit": "us", "goal": None, "met": None}
        for name in ("round trip", "open and round trip")
    ]
    print(json.dumps({"bench": "transport", "results": results}))


if __name__ == "__main__":
    main()
