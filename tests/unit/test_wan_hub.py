"""The hub of the lab of home connections (`benchmarks/wan`): what a packet is charged on its way.

With sockets in place of its devices and a clock that stands still; no root.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "wan"))  # scripts

import _hub
from _hub import Hub, bytes_of_burst
from _profiles import Home, Profile

TCP4 = 1  # VIRTIO_NET_HDR_GSO_TCPV4
SEGMENT = 1448
# A byte a microsecond up, half of that down; 50 ms from the end of one line to the other.
HOME = Home("slow", up_bps=8e6, down_bps=4e6, round_trip_s=0.1)
LOST = Home("lost", up_bps=8e6, down_bps=4e6, round_trip_s=0.1, loss=1.0)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def packet(payload: int, *, to: int = 0, ip_words: int = 5, tcp_words: int = 8) -> bytes:
    """TCP over IPv4, of as many bytes beside its headers (of 32-bit words)."""
    size = 4 * (ip_words + tcp_words) + payload
    ip = struct.pack("!BBHHHBBH4s4s", 0x40 | ip_words, 0, size, 0, 0, 64, 6, 0,
                     socket.inet_aton("10.77.0.250"), socket.inet_aton(address(to)))  # fmt: skip
    tcp = struct.pack("!HHIIBBHHH", 1, 2, 3, 4, tcp_words << 4, 0x18, 5, 6, 0)
    return ip.ljust(4 * ip_words, b"\x01") + tcp.ljust(4 * tcp_words, b"\x01") + bytes(payload)


def burst(whole: bytes, segment: int = 0) -> bytes:
    """As a device hands it over: to be cut into segments of so many bytes; 0: as it is."""
    return struct.pack("=BBHHHH", 0, TCP4 if segment else 0, 0, segment, 0, 0) + whole


@pytest.mark.parametrize(
    ("payload", "segment", "ip_words", "tcp_words", "size"),
    [
        (1000, 0, 5, 8, 52 + 1000),
        (65_000, 0, 5, 8, 52 + 65_000),  # whatever it is: nobody cuts it
        (500, SEGMENT, 5, 8, 52 + 500),
        (SEGMENT, SEGMENT, 5, 8, 52 + SEGMENT),
        (SEGMENT + 1, SEGMENT, 5, 8, 2 * 52 + SEGMENT + 1),
        (3 * SEGMENT, SEGMENT, 5, 8, 3 * (52 + SEGMENT)),
        (3 * SEGMENT, SEGMENT, 5, 5, 3 * (40 + SEGMENT)),
        (3 * SEGMENT, SEGMENT, 7, 15, 3 * (88 + SEGMENT)),  # with options
    ],
)
def test_a_burst_takes_a_header_for_each_segment(
    payload: int, segment: int, ip_words: int, tcp_words: int, size: int
) -> None:
    whole = packet(payload, ip_words=ip_words, tcp_words=tcp_words)
    assert bytes_of_burst(burst(whole, segment)) == size


class Street:
    """A hub, and as `hosts` the ends of its devices that kernels would have."""

    now = 100.0

    def __init__(self, home: Home, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num)]
        self.devices = [ours for ours, _ in pairs]
        self.hosts = [theirs for _, theirs in pairs]
        self.bursts: list[bool] = []
        for end in (*self.devices, *self.hosts):
            end.setblocking(False)

        def open_device(namespace: str, *, bursts: bool) -> int:
            self.bursts.append(bursts)
            return self.devices[int(namespace)].fileno()

        monkeypatch.setattr(_hub, "open_device", open_device)
        monkeypatch.setattr(_hub, "time", self)
        named = [(str(host), address(host)) for host in range(num)]
        self.hub = Hub(Profile("a street", (home,)), 0, named)

    def monotonic(self) -> float:
        return self.now

    def send(self, host: int, *packets: bytes) -> None:
        for each in packets:
            self.hosts[host].send(each)
        self.hub._take(host)

    def heard(self, host: int, at: float) -> list[bytes]:
        """What has come to a host by then."""
        self.now = at
        self.hub._pass_on()
        found = []
        while True:
            try:
                found.append(self.hosts[host].recv(1 << 17))
            except BlockingIOError:
                return found


@pytest.fixture
def street(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Street]]:
    made: list[Street] = []

    def build(home: Home, num: int = 2) -> Street:
        made.append(Street(home, num, monkeypatch))
        return made[-1]

    yield build
    for each in made:
        for end in (*each.devices, *each.hosts):
            end.close()


def test_a_packet_waits_for_its_uplink_and_then_for_the_downlink(
    street: Callable[..., Street],
) -> None:
    """Both take the time of all the segments; it comes out as it went in."""
    lane = street(HOME)
    assert lane.bursts == [True, True]
    sent = burst(packet(3 * SEGMENT, to=1), SEGMENT)
    lane.send(0, sent)
    arrives_s = 0.0045 + 0.050  # 4,500 bytes of line
    assert lane.hub.due[0][0] == pytest.approx(100 + arrives_s)
    assert lane.heard(1, 100 + arrives_s - 1e-6) == []
    assert lane.heard(1, 100 + arrives_s + 0.0089) == []
    assert lane.heard(1, 100 + arrives_s + 0.0091) == [sent]
    assert lane.heard(0, 200) == []
    summary = lane.hub.summary()
    assert (summary["packets"], summary["dropped"], summary["lost"]) == (1, 0, 0)
    assert summary["latest_s"] == pytest.approx(0.0001)


def test_packets_wait_for_each_other_on_the_lines_that_they_share(
    street: Callable[..., Street],
) -> None:
    """On the uplink of one home, and on the downlink to which two others send at once."""
    lane = street(HOME, 4)
    one = burst(packet(948, to=3))  # of 1,000 bytes: 1 ms up, 2 ms down
    lane.send(0, one, one)
    ups = sorted(entry[0] for entry in lane.hub.due)
    assert ups == pytest.approx([100.051, 100.052])
    lane.send(1, one)
    for ms, num in ((52.9, 0), (53.1, 1), (54.9, 0), (55.1, 1), (56.9, 0), (57.1, 1), (999, 0)):
        assert len(lane.heard(3, 100 + ms / 1000)) == num, ms


def test_a_home_that_is_busy_sending_still_receives(street: Callable[..., Street]) -> None:
    lane = street(HOME)
    lane.send(0, *[burst(packet(9948, to=1))] * 5)  # 10 ms each
    lane.send(1, burst(packet(948, to=0)))
    assert len(lane.heard(0, 100.0531)) == 1


def test_a_packet_that_is_lost_has_taken_its_uplink_and_nothing_else(
    street: Callable[..., Street],
) -> None:
    lane = street(LOST)
    assert lane.bursts == [False, False], "one lost packet would be a whole burst"
    lane.send(0, packet(948, to=1))
    assert lane.hub.due == []
    assert lane.heard(1, 200) == []
    assert lane.hub.summary()["lost"] == 1
    assert lane.hub.up[0].send(1000, 100.0) == pytest.approx(100.002)
    assert lane.hub.down[1].send(1000, 100.0) == pytest.approx(100.002)


def test_what_a_full_uplink_drops_goes_nowhere(street: Callable[..., Street]) -> None:
    """Of three the last would wait for longer than the tenth of a second that is kept."""
    lane = street(HOME)
    for _ in range(3):
        lane.send(0, burst(packet(59_948, to=1)))
    assert len(lane.hub.due) == 2
    assert lane.hub.summary()["dropped"] == 1


def test_what_a_host_does_not_take_is_dropped(street: Callable[..., Street]) -> None:
    lane = street(HOME)
    lane.send(0, burst(packet(948, to=1)))
    lane.hosts[1].close()
    lane.now = 200.0
    lane.hub._pass_on()
    assert lane.hub.summary()["dropped"] == 1


def test_what_is_for_nobody_here_is_not_charged(street: Callable[..., Street]) -> None:
    """As what IPv6 says to its neighbours."""
    lane = street(HOME)
    lane.send(0, burst(packet(948, to=99)), burst(bytes([0x60] + 60 * [0])))
    assert lane.hub.due == []
    assert lane.hub.summary()["packets"] == 0
    assert lane.hub.up[0].send(1000, 100.0) == pytest.approx(100.001)
