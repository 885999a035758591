"""Kinds of connections between homes, and what decides when a packet arrives. Pure: time is told.

A home has an uplink and a downlink, each with a rate and a first-in-first-out buffer that drops
what does not fit. A packet waits for its turn on the sender's uplink, travels half a round trip,
and waits for its turn on the receiver's downlink. Loss strikes on the way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

CONGESTION = ("cubic", "bbr")  # control of TCP; the first is Linux's own
BUFFER_S = 0.1  # what a home router buffers, in time at the rate of its line
SMALLEST_BUFFER_BYTES = 64_000


@dataclass(frozen=True, slots=True)
class Home:
    """The connection of a host. Rates in bits per second, of IP packets; the round trip is that
    between two homes of the kind."""

    name: str
    up_bps: float
    down_bps: float
    round_trip_s: float
    jitter_s: float = 0.0  # more delay, drawn evenly per packet; packets stay in order
    loss: float = 0.0  # of packets, drawn one by one


@dataclass(frozen=True, slots=True)
class Profile:
    """The homes of a lab, given to its hosts in turn; none: hosts on a bridge, no hub."""

    name: str
    homes: tuple[Home, ...] = ()

    @property
    def emulated(self) -> bool:
        return bool(self.homes)

    @property
    def lossy(self) -> bool:
        return any(home.loss for home in self.homes)

    def of(self, number: int) -> Home | None:
        """The home of a host; None on a bridge."""
        return self.homes[number % len(self.homes)] if self.homes else None


FIBRE = Home("fibre", 100e6, 100e6, 0.030)
HOME = Home("home", 20e6, 100e6, 0.060)
POOR = Home("poor", 5e6, 20e6, 0.150, loss=0.005)
# Neighbours of one swarm are not alike. The first host is the leader's, the third one of two
# replicas of the first stage: an exact average waits for it, microbatches need not.
UNLIKE = (
    replace(HOME, jitter_s=0.004),
    replace(FIBRE, jitter_s=0.001),
    replace(POOR, jitter_s=0.015),
    replace(HOME, jitter_s=0.004),
    replace(FIBRE, jitter_s=0.001),
    replace(HOME, jitter_s=0.004),
    replace(FIBRE, jitter_s=0.001),
)

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("lan"),
        Profile("fibre", (FIBRE,)),
        Profile("home", (HOME,)),
        Profile("poor", (POOR,)),
        Profile("mixed", UNLIKE),
    )
}


class Line:
    """One direction of a home's connection: a rate, a buffer."""

    __slots__ = ("_buffer_s", "_free_at", "_seconds_per_byte", "dropped")

    def __init__(self, rate_bps: float) -> None:
        self._seconds_per_byte = 8.0 / rate_bps
        self._buffer_s = max(BUFFER_S, SMALLEST_BUFFER_BYTES * self._seconds_per_byte)
        self._free_at = 0.0
        self.dropped = 0

    def send(self, size: int, now: float) -> float | None:
        """When the last bit of a packet of `size` bytes that came at `now` is through; or None."""
        start = self._free_at if self._free_at > now else now
        if start - now > self._buffer_s:
            self.dropped += 1
            return None
        self._free_at = start + size * self._seconds_per_byte
        return self._free_at


class Way:
    """From the end of a home's uplink to the receiver's downlink: delay, jitter, loss. Between
    unlike homes each is the mean of theirs.

    Jitter keeps the order of packets, since a home's line does (netem's does not, which TCP takes
    for loss): one that is late holds up those behind it. So a busy way is late by nearly the whole
    jitter, and only a way with pauses wavers.
    """

    __slots__ = ("_delay_s", "_draw", "_jitter_s", "_last", "_loss", "lost")

    def __init__(self, sender: Home, receiver: Home, seed: int) -> None:
        self._delay_s = (sender.round_trip_s + receiver.round_trip_s) / 4
        self._jitter_s = (sender.jitter_s + receiver.jitter_s) / 2
        self._loss = (sender.loss + receiver.loss) / 2
        self._draw = random.Random(seed)
        self._last = 0.0
        self.lost = 0

    def travel(self, left_at: float) -> float | None:
        """When a packet that left the uplink at `left_at` reaches the downlink; or lost."""
        if self._loss and self._draw.random() < self._loss:
            self.lost += 1
            return None
        arrives = left_at + self._delay_s
        if self._jitter_s:
            arrives = max(self._last, arrives + self._draw.random() * self._jitter_s)
        self._last = arrives
        return arrives


def ways(homes: Sequence[Home], seed: int) -> Iterator[list[Way]]:
    """By sender, then receiver: a way from each home to each, which draws for itself."""
    count = len(homes)
    for n, sender in enumerate(homes):
        yield [
            Way(sender, receiver, (seed * count + n) * count + m)
            for m, receiver in enumerate(homes)
        ]
