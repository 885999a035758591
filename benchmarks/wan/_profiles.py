"""Kinds of connections between homes, and what decides when a packet arrives. Pure: time is told.

A home has an uplink and a downlink, each with a rate and a first-in-first-out buffer that drops
what does not fit. A packet waits for its turn on the sender's uplink, travels half a round trip,
and waits for its turn on the receiver's downlink. Loss strikes on the way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

BUFFER_S = 0.1  # what a home router buffers, in time at the rate of its line
SMALLEST_BUFFER_BYTES = 64_000


@dataclass(frozen=True, slots=True)
class Profile:
    """The line of every host. Rates in bits per second, of IP packets; `None`: a bridge, no hub."""

    name: str
    up_bps: float | None = None
    down_bps: float | None = None
    round_trip_s: float = 0.0
    jitter_s: float = 0.0  # more delay, drawn evenly per packet; packets of a host stay in order
    loss: float = 0.0  # of packets, drawn one by one

    @property
    def emulated(self) -> bool:
        return self.up_bps is not None


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("lan"),
        Profile("fibre", 100e6, 100e6, 0.030),
        Profile("home", 20e6, 100e6, 0.060),
        Profile("poor", 5e6, 20e6, 0.150, loss=0.005),
    )
}


class Line:
    """One direction of a home's connection: a rate, a buffer."""

    __slots__ = ("_buffer_s", "_free_at", "_seconds_per_byte", "dropped", "passed_bytes")

    def __init__(self, rate_bps: float) -> None:
        self._seconds_per_byte = 8.0 / rate_bps
        self._buffer_s = max(BUFFER_S, SMALLEST_BUFFER_BYTES * self._seconds_per_byte)
        self._free_at = 0.0
        self.dropped = 0
        self.passed_bytes = 0

    def send(self, size: int, now: float) -> float | None:
        """When the last bit of a packet of `size` bytes that came at `now` is through; or None."""
        start = self._free_at if self._free_at > now else now
        if start - now > self._buffer_s:
            self.dropped += 1
            return None
        self._free_at = start + size * self._seconds_per_byte
        self.passed_bytes += size
        return self._free_at


class Way:
    """From the end of a home's uplink to the receiver's downlink: delay, jitter, loss."""

    __slots__ = ("_delay_s", "_draw", "_jitter_s", "_last", "_loss", "lost")

    def __init__(self, profile: Profile, seed: int) -> None:
        self._delay_s, self._jitter_s = profile.round_trip_s / 2, profile.jitter_s
        self._loss = profile.loss
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
