"""The hub of the lab: forwards the packets of all homes, each at its line's rate and delay.

A process of its own. It holds one TUN device per network namespace; what a host sends comes out
of its device as IP packets, waits here (`_profiles.Line`, `_profiles.Way`) and goes into the
receiver's. Not every kernel has netem, hence this.

Where nothing is lost on the way, devices hand over what TCP would send in one burst as one packet
with a header that says how it is to be cut (`IFF_VNET_HDR`, TSO): fewer packets, while the line is
charged for the headers of all that it would be cut into. Where packets are lost each travels alone.

    python _hub.py PROFILE SEED NAMESPACE=ADDRESS…      ends when its standard input closes
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import math
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

from _namespaces import DEVICE, entered
from _profiles import PROFILES, Home, Line, Profile, ways

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
VNET_HEADER_BYTES = 10
LARGEST_BYTES = VNET_HEADER_BYTES + 65535
GSO_NONE = 0
READS_IN_A_ROW = 16  # from one device before the others and the clock get their turn
AT_DOWNLINK, AT_HOST = 0, 1


def open_device(namespace: str, *, bursts: bool) -> int:
    """A TUN device in a namespace, as a file that does not block."""
    with entered(namespace):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TUN | IFF_NO_PI | (IFF_VNET_HDR if bursts else 0)
    with entered(namespace):
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    if bursts:
        fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def bytes_of_burst(packet: bytes) -> int:
    """What a device handed over with IFF_VNET_HDR, as IP packets on a cable."""
    size = len(packet) - VNET_HEADER_BYTES
    _, kind, _, segment = struct.unpack_from("=BBHH", packet)
    if kind == GSO_NONE:
        return size
    ip_headers = 4 * (packet[VNET_HEADER_BYTES] & 0x0F)
    tcp_headers = 4 * (packet[VNET_HEADER_BYTES + ip_headers + 12] >> 4)
    headers = ip_headers + tcp_headers
    return size + headers * (math.ceil((size - headers) / segment) - 1)


class Hub:
    def __init__(self, profile: Profile, seed: int, hosts: Sequence[tuple[str, str]]) -> None:
        homes: list[Home] = [home for n in range(len(hosts)) if (home := profile.of(n))]
        self.bursts = not profile.lossy
        self.skip = VNET_HEADER_BYTES if self.bursts else 0
        self.devices = [open_device(namespace, bursts=self.bursts) for namespace, _ in hosts]
        self.by_address = {socket.inet_aton(address): i for i, (_, address) in enumerate(hosts)}
        self.up = [Line(home.up_bps) for home in homes]
        self.down = [Line(home.down_bps) for home in homes]
        self.ways = list(ways(homes, seed))
        # When, in what order, where, to whom, what, and how many bytes of a line it takes.
        self.due: list[tuple[float, int, int, int, bytes, int]] = []
        self.order = itertools.count()
        self.late_s = 0.0
        self.packets = 0

    def run(self) -> None:
        numbers = {device: number for number, device in enumerate(self.devices)}
        stdin = sys.stdin.fileno()
        watched = [*self.devices, stdin]
        while True:
            wait_s = max(0.0, self.due[0][0] - time.monotonic()) if self.due else 1.0
            for ready in select.select(watched, [], [], wait_s)[0]:
                if ready == stdin:
                    return
                self._take(numbers[ready])
            self._pass_on()

    def _take(self, host: int) -> None:
        """Packets that a host has sent: onto its uplink, and on their way."""
        device, line, there = self.devices[host], self.up[host], self.ways[host]
        skip = self.skip
        for _ in range(READS_IN_A_ROW):
            try:
                packet = os.read(device, LARGEST_BYTES)
            except BlockingIOError:
                return
            to = self.by_address.get(packet[skip + 16 : skip + 20])
            if to is None:  # IPv6 neighbours, multicast
                continue
            self.packets += 1
            size = bytes_of_burst(packet) if self.bursts else len(packet)
            left = line.send(size, time.monotonic())
            arrives = None if left is None else there[to].travel(left)
            if arrives is not None:
                entry = (arrives, next(self.order), AT_DOWNLINK, to, packet, size)
                heapq.heappush(self.due, entry)

    def _pass_on(self) -> None:
        """What is due by now. Times are those planned: being woken late delays nothing after."""
        now = time.monotonic()
        due = self.due
        while due and due[0][0] <= now:
            at, _, place, to, packet, size = heapq.heappop(due)
            if place == AT_DOWNLINK:
                through = self.down[to].send(size, at)
                if through is not None:
                    entry = (through, next(self.order), AT_HOST, to, packet, size)
                    heapq.heappush(due, entry)
                continue
            self.late_s = max(self.late_s, now - at)
            try:
                os.write(self.devices[to], packet)
            except OSError:
                self.down[to].dropped += 1

    def summary(self) -> dict[str, float]:
        used = os.times()
        return {
            "packets": self.packets,
            "dropped": sum(line.dropped for line in (*self.up, *self.down)),
            "lost": sum(way.lost for there in self.ways for way in there),
            "latest_s": round(self.late_s, 4),
            "cpu_s": round(used.user + used.system, 2),
        }


def main() -> None:
    profile, seed, *hosts = sys.argv[1:]
    named = [(name, address) for name, _, address in (each.partition("=") for each in hosts)]
    hub = Hub(PROFILES[profile], int(seed), named)
    print(json.dumps({"ready": True}), flush=True)
    hub.run()
    print(json.dumps(hub.summary()), flush=True)


if __name__ == "__main__":
    main()
