"""The dashboard under load: many viewers, the first paint, its weight, and a thousand peers.

The server is a process of its own with a made-up run that changes every second; viewers are plain
sockets in this process, and a headless Chromium where there is one. An update's latency is from
the moment at which the picture was made to the last byte of it at a viewer.

    python benchmarks/dashboard.py [--viewers 200] [--seconds 20] [--peers 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from _helpers import Helper, print_results, result

ROOT = Path(__file__).resolve().parents[1]
SMALL_RUN = 12
START_LIMIT_S = 60.0


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


async def view(
    port: int, watching: asyncio.Semaphore, latencies: list[float], sizes: list[int]
) -> None:
    """One viewer, until it is cancelled. Released once when its first update has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
    first = True
    try:
        while line := await reader.readline():
            if line.startswith(b"data: ") and b'"at":' in line[:60]:
                at = float(line.split(b'"at":', 1)[1].split(b",", 1)[0].rstrip(b"}\n"))
                latencies.append(time.time() - at)
                sizes.append(len(line))
                if first:
                    first = False
                    watching.release()
    finally:
        writer.close()


async def load(helper: Helper, port: int, viewers: int, seconds: float) -> dict[str, float]:
    """Latency and the server's CPU with so many viewers, once all have connected."""
    latencies: list[float] = []
    sizes: list[int] = []
    watching = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(view(port, watching, latencies, sizes)) for _ in range(viewers)]
    async with asyncio.timeout(START_LIMIT_S):
        for _ in range(viewers):
            await watching.acquire()
    latencies.clear()
    helper.tell(do="cpu")
    before, began = helper.hear()["cpu_s"], time.monotonic()
    await asyncio.sleep(seconds)
    helper.tell(do="cpu")
    cpu = (helper.hear()["cpu_s"] - before) / (time.monotonic() - began)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    expected = viewers * seconds
    if len(latencies) < expected * 0.5:
        raise RuntimeError(f"only {len(latencies)} updates of about {expected:.0f} arrived")
    return {
        "p50_ms": 1e3 * quantile(latencies, 0.5),
        "p95_ms": 1e3 * quantile(latencies, 0.95),
        "cpu": cpu,
        "bytes": statistics.median(sizes),
    }


def weight_bytes() -> int:
    """The page without data, gzipped: what it loads, and itself for a run not heard of yet."""
    from web.app import STATIC, _versions
    from web.board import Board
    from web.render import page
    from web.store import METRICS, Store

    picture = Board(Store(":memory:"), "0" * 32).snapshot(0.0)
    empty: dict[str, list[float | None]] = {name: [] for name in ("t", *METRICS)}
    texts = [page(picture, empty, 1, 0.0, _versions()).encode()]
    texts += [path.read_bytes() for path in STATIC.rglob("*") if path.suffix in (".js", ".css")]
    return sum(len(gzip.compress(text)) for text in texts)


def first_bytes_ms(port: int) -> float:
    """The whole first page over HTTP, median of 20."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answered:
            answered.read()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def in_browser(port: int, updates: int) -> dict[str, float] | None:
    """First contentful paint, and script time per update, in a Chromium."""
    sys.path.insert(0, str(ROOT / "tests" / "browser"))
    from screenshots import chromium, find_chromium

    if find_chromium() is None:
        return None
    with chromium() as browser:
        paints = []
        for _ in range(5):
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{port}/")
            paints.append(
                page.evaluate(
                    "new Promise((done) => new PerformanceObserver((list) => "
                    "done(list.getEntries()[0].startTime))"
                    ".observe({type: 'paint', buffered: true}))"
                )
            )
            page.close()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        times: list[float] = page.evaluate(
            """(count) => new Promise((done) => {
              const times = [];
              Object.defineProperty(S, "lastUpdateMs", { set(value) {
                times.push(value);
                if (times.length === count) done(times);
              } });
            })""",
            updates,
        )
    return {
        "paint_ms": statistics.median(paints),
        "script_p50_ms": statistics.median(times),
        "script_p95_ms": quantile(times, 0.95),
    }


def served(num_peers: int) -> tuple[Helper, int]:
    helper = Helper("_synthetic_dashboard.py", str(num_peers))
    port: int = helper.hear()["port"]
    until = time.monotonic() + START_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5):
                return helper, port
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--updates", type=int, default=20)
    given = parser.parse_args()
    helper, port = served(SMALL_RUN)
    try:
        loaded = asyncio.run(load(helper, port, given.viewers, given.seconds))
        bytes_ms = first_bytes_ms(port)
        small = in_browser(port, 5)
    finally:
        helper.close()
    helper, port = served(given.peers)
    try:
        many_bytes_ms = first_bytes_ms(port)
        many = in_browser(port, given.updates)
    finally:
        helper.close()
    weight = weight_bytes()
    print(f"{given.viewers} viewers, {SMALL_RUN} peers: p50 {loaded['p50_ms']:.0f} ms,")
    print(f"  p95 {loaded['p95_ms']:.0f} ms, {100 * loaded['cpu']:.0f} % of a core,")
    print(f"  {loaded['bytes']:.0f} bytes an update")
    print(f"page without data: {weight / 1000:.1f} kB gzipped")
    print(f"first page over HTTP: {bytes_ms:.0f} ms")
    print(f"  with {given.peers} peers: {many_bytes_ms:.0f} ms")
    for count, seen in ((SMALL_RUN, small), (given.peers, many)):
        if seen is None:
            print("no Chromium on PATH: paint and script time were not measured")
            break
        print(f"{count} peers in Chromium: first paint {seen['paint_ms']:.0f} ms,")
        print(f"  script per update {seen['script_p50_ms']:.1f} ms,")
        print(f"  p95 {seen['script_p95_ms']:.1f} ms")
    entries: list[dict[str, Any]] = [
        result("update_p95", loaded["p95_ms"], "ms", 500, at_most=True),
        result("server_cpu", loaded["cpu"], "core", 0.25, at_most=True),
        result("page_gzipped", weight / 1000, "kB", 80, at_most=True),
        result("first_page", bytes_ms, "ms"),
    ]
    if small is not None and many is not None:
        entries += [
            result("first_paint", small["paint_ms"], "ms", 1000, at_most=True),
            result("first_paint_1000_peers", many["paint_ms"], "ms"),
            result("script_per_update_1000_peers", many["script_p50_ms"], "ms"),
            result("script_per_update_1000_peers_p95", many["script_p95_ms"], "ms"),
        ]
    print_results("dashboard", entries)


if __name__ == "__main__":
    main()
