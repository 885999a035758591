"""What a lab really gives: round trips, and the rates of TCP. No result of the lab means anything
without; so each comes with `given`, which takes some seconds of that very lab before it is used.

    python _measured.py serve | ping ADDRESS PORT | send ADDRESS PORT OPENS CLOSES     in a host
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from _lab import Host, Lab
from _namespaces import DEVICE, LabError, entered, ip

T = TypeVar("T")
BLOCK = 1 << 16
WARM_UP_SHARE = 0.4  # of the time of a measurement: slow start is not the line's rate
START_S, START_EACH_S = 0.5, 0.1  # until all clients that are started at once send
PINGS = 10
ETHERNET_BYTES = 14  # that a bridge's device counts around an IP packet
SECONDS = 1.5  # of a rate, where it only goes with another result


class Traffic(NamedTuple):
    """Bytes of IP packets."""

    received: int
    sent: int


def traffic_of(host: Host) -> Traffic:
    """What has passed the device of a host so far. Of a lab with bursts, each counts one header."""
    with entered(host.namespace), open("/proc/thread-self/net/dev") as table:
        counts = {name.strip(): each.split() for name, _, each in (x.partition(":") for x in table)}
    if DEVICE not in counts:
        raise LabError(f"{host.namespace} has lost its device, so the hub has died: start it again")
    received, received_packets, sent, sent_packets = (int(counts[DEVICE][n]) for n in (0, 1, 8, 9))
    around = 0 if host.home else ETHERNET_BYTES  # a TUN device has IP packets only
    return Traffic(received - around * received_packets, sent - around * sent_packets)


class Mark(NamedTuple):
    """Bytes that have come to a host by this time of the monotonic clock, which all hosts share."""

    at: float
    bytes: int


def mbps(opened: Mark, closed: Mark) -> float:
    """What the line carried in between, what was sent again too; with the headers of all packets
    where there are no bursts. By what a program reads of a stream it would be up to a half too
    much: what comes behind a lost packet reaches it in one piece, once that was sent again."""
    return 8e-6 * (closed.bytes - opened.bytes) / (closed.at - opened.at)


def serve() -> None:
    """The other end: echoes single bytes, swallows streams."""
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
        with contextlib.suppress(ConnectionResetError):  # as a sender ends what is under way
            while connection.recv(BLOCK):
                pass


def ping(address: str, port: int) -> None:
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"p")
        times = []
        for _ in range(PINGS):
            begun = time.perf_counter()
            connection.sendall(b"x")
            if not connection.recv(1):
                raise ConnectionError("the server has gone")
            times.append(time.perf_counter() - begun)
    print(json.dumps(statistics.median(times)), flush=True)


def send(address: str, port: int, opens: float, closes: float) -> None:
    with socket.create_connection((address, port)) as connection:
        if time.monotonic() > opens:
            raise TimeoutError("a sender began too late")
        connection.sendall(b"s")
        block = bytes(BLOCK)
        while (left := closes - time.monotonic()) > 0:
            readable, writable, _ = select.select([connection], [connection], [], left)
            if readable:  # it never says anything
                raise ConnectionError("the server has gone")
            if writable:
                connection.send(block, socket.MSG_DONTWAIT)
        # What is still to be sent is thrown away: the line is free for the next measurement.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Measured:
    """A lab with a server in its first host, for clients in the others. A context manager.

    LabError where the server does not start or a client fails: a broken lab has no figures."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.server = self._start(lab.hosts[0], "serve")
        assert self.server.stdout is not None
        try:
            port = self.server.stdout.readline()
        except BaseException:  # interrupted
            self.server.kill()
            raise
        if not port:
            _, errors = self.server.communicate()
            raise _failed("serve", lab.hosts[0], errors)
        self.port = int(port)

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.kill()
        self.server.communicate()

    def _start(self, host: Host, *arguments: str) -> subprocess.Popen[Any]:
        command = [sys.executable, __file__, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.lab.run(host, command, **pipes, text=True)

    def ask(
        self,
        hosts: Sequence[Host],
        *arguments: str,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Run a client in each of the hosts at once; what each prints."""
        server = (self.lab.hosts[0].address, str(self.port))
        clients: list[subprocess.Popen[Any]] = []
        try:
            clients.extend(
                self._start(host, arguments[0], *server, *arguments[1:]) for host in hosts
            )
            meanwhile()
            heard = [client.communicate() for client in clients]
        finally:  # also when interrupted: without a hub they would wait for a quarter of an hour
            for client in clients:
                client.kill()
        for host, client, (_, errors) in zip(hosts, clients, heard, strict=True):
            if client.returncode != 0:
                raise _failed(arguments[0], host, errors)
        return [found for found, _ in heard]

    def round_trip_ms(self, host: Host) -> float:
        return round(1e3 * float(self.ask([host], "ping")[0]), 2)

    def up_mbps(self, hosts: Sequence[Host], seconds: float) -> float:
        """Of all connections together, one from each of the hosts (which may be named twice), by
        the device of the server's host."""
        begins = time.monotonic() + START_S + START_EACH_S * len(hosts)
        times = (begins + WARM_UP_SHARE * seconds, begins + seconds)
        marks: list[Mark] = []

        def watch() -> None:
            for each in times:
                time.sleep(max(0.0, each - time.monotonic()))
                marks.append(Mark(time.monotonic(), traffic_of(self.lab.hosts[0]).received))

        self.ask(hosts, "send", *map(str, times), meanwhile=watch)
        return round(mbps(*marks), 2)


def _failed(what: str, host: Host, errors: str) -> LabError:
    why = errors.strip().rpartition("\n")[2] or "it was killed"
    return LabError(f"`{what}` failed in {host.namespace} ({why}): start the measurement again")


def kinds(lab: Lab) -> dict[str, Host]:
    """By the name of its line: the first host that has it, beside the very first."""
    found: dict[str, Host] = {}
    for host in lab.hosts[1:]:
        found.setdefault(host.home.name if host.home else lab.profile.name, host)
    return found


def given(lab: Lab, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """What this lab gives, by kind of line: `line`, `round_trip_ms` to the first host, `up_mbps` of
    one connection to it. Afterwards no host remembers what TCP has learnt of it."""
    with Measured(lab) as measured:
        found = [
            {
                "line": name,
                "round_trip_ms": measured.round_trip_ms(host),
                "up_mbps": measured.up_mbps([host], seconds),
            }
            for name, host in kinds(lab).items()
        ]
    for host in lab.hosts:
        ip("-n", host.namespace, "tcp_metrics", "flush")
    return found


def ended(lab: Lab) -> dict[str, Any]:
    """End a lab that has been measured; what its hub says of itself. LabError where that says
    nothing: it had died, or was in trouble, and nobody knows since when."""
    hub = lab.close()
    if lab.profile.emulated and not hub:
        raise LabError("the hub has died, or did not end: start the measurement again")
    return hub


def measured_anew(measure: Callable[[], T]) -> T:
    """What that measures in a lab of its own; in a second one where the first broke, for hours of
    other measurements would be lost with it."""
    try:
        return measure()
    except (LabError, RuntimeError) as error:
        print(f"   once more, for a lab broke: {error}", flush=True)
        return measure()


def said(lines: Iterable[Mapping[str, Any]]) -> str:
    """In one line: `home 60.8 ms, 19.6 Mbit/s up`."""
    return "; ".join(
        f"{each['line']} {each['round_trip_ms']:.4g} ms, {each['up_mbps']:.4g} Mbit/s up"
        for each in lines
    )


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "serve":
        serve()
    elif command == "ping":
        ping(rest[0], int(rest[1]))
    else:
        send(rest[0], int(rest[1]), float(rest[2]), float(rest[3]))
