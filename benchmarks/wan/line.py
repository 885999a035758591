"""What the lab really gives, per profile: the round trip, and TCP throughput up and together.

A user-space hub has limits of its own, so no figure of the lab means anything without these. Cubic
and BBR; several connections show what one alone does not reach.

    python benchmarks/wan/line.py [--profiles lan fibre home poor] [--seconds 5] [--connections 1 4]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from _helpers import print_results, result
from _lab import Host, Lab
from _namespaces import LabError
from _profiles import PROFILES

BLOCK = 1 << 16
WARM_UP_SHARE = 0.4  # of the time of a measurement: slow start is not the line's rate
PINGS = 10


def serve() -> None:
    """The other end: echoes single bytes, swallows streams and says at what rate they came."""
    with socket.create_server(("0.0.0.0", 0), backlog=64) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        kind = connection.recv(1)
        if kind == b"p":
            while data := connection.recv(1):
                connection.sendall(data)
            return
        seconds = float(connection.recv(16).strip())
        begun, counted, since = time.monotonic(), 0, 0.0
        while data := connection.recv(BLOCK):
            now = time.monotonic()
            if now - begun > seconds * WARM_UP_SHARE:
                since = since or now
                counted += len(data)
            if now - begun > seconds:
                break
        rate = 8 * counted / (time.monotonic() - since) if since else 0.0
        connection.sendall(json.dumps(rate).encode())


def ping(address: str, port: int) -> None:
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"p")
        times = []
        for _ in range(PINGS):
            begun = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - begun)
    print(json.dumps(statistics.median(times)), flush=True)


def send(address: str, port: int, seconds: float) -> None:
    with socket.create_connection((address, port)) as connection:
        connection.sendall(b"s" + f"{seconds:<16}".encode())
        block = bytes(BLOCK)
        ends = time.monotonic() + seconds + 0.5
        while time.monotonic() < ends:
            try:
                connection.sendall(block)
            except OSError:
                break
        print(connection.recv(64).decode() or "0", flush=True)


class Measured:
    """A lab, a server in its first host, and clients in the others."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.server = self._start(lab.hosts[0], "serve", stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        self.port = int(self.server.stdout.readline())

    def _start(self, host: Host, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        return self.lab.run(host, [sys.executable, __file__, *arguments], **options)

    def ask(self, hosts: list[Host], *arguments: str) -> list[float]:
        """Run a client in each of the hosts at once; what each found."""
        clients = [
            self._start(
                host, arguments[0], self.lab.hosts[0].address, str(self.port), *arguments[1:],
                stdout=subprocess.PIPE, text=True,
            )
            for host in hosts
        ]  # fmt: skip
        return [float(client.communicate()[0] or 0.0) for client in clients]

    def close(self) -> None:
        self.server.kill()
        self.server.wait()


def measure(
    profile: str, congestion: str, seconds: float, connections: list[int]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures of one profile: seconds, and bits per second; and what the hub says of itself."""
    lab = Lab(profile, 7, congestion=congestion)
    with lab:
        measured = Measured(lab)
        try:
            other = lab.hosts[1]
            found = {"round trip": measured.ask([other], "ping")[0]}
            for count in connections:
                rates = measured.ask([other] * count, "send", str(seconds))
                found[f"up, {count} connection{'s' * (count > 1)}"] = sum(rates)
            found["six senders to one host"] = sum(
                measured.ask(lab.hosts[1:], "send", str(seconds))
            )
        finally:
            measured.close()
        return found, lab.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=list(PROFILES))
    parser.add_argument("--congestion", nargs="+", default=["cubic", "bbr"])
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    results = []
    print(f"{'profile':8} {'TCP':6} {'':24} {'measured':>12}   {'configured'}")
    for profile in options.profiles:
        for congestion in options.congestion:
            found, hub = measure(profile, congestion, options.seconds, options.connections)
            for what, value in found.items():
                metric = f"{profile}, {congestion}, {what}"
                if what == "round trip":
                    shown, unit, value = f"{1e3 * value:9.1f} ms", "ms", 1e3 * value
                    meant = f"{1e3 * PROFILES[profile].round_trip_s:.0f} ms"
                else:
                    shown, unit, value = f"{value / 1e6:7.1f} Mb/s", "Mbit/s", value / 1e6
                    line = PROFILES[profile]
                    most = line.down_bps if what.startswith("six") else line.up_bps
                    meant = f"{most / 1e6:.0f} Mbit/s" if most else "no limit"
                print(f"{profile:8} {congestion:6} {what:24} {shown:>12}   {meant}")
                results.append(result(metric, value, unit))
            if hub:
                print(f"{profile:8} {congestion:6} the hub: {hub}")
    print_results("wan_line", results)


if __name__ == "__main__":
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        if command == "serve":
            serve()
        elif command == "ping":
            ping(sys.argv[2], int(sys.argv[3]))
        elif command == "send":
            send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
        else:
            main()
    except LabError as error:
        raise SystemExit(f"error: {error}") from None
