"""Who is there when: lives of peers, from a file or drawn from a distribution.

Every draw comes from the seed, so a trace is a function of (its parameters, seed, hours) and can be
handed on as numbers. `preemptible` models the cloud's spot machines: they are taken back singly at
any time and, now and then, many at once (a zone needs its machines), and while the cloud has none
to give (a *gap*) nobody replaces them. `diurnal` models home machines that are on in the evening.
"""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import ConfigError

DAY_S = 86_400.0
MAX_LIVES = 1_000_000


@dataclass(frozen=True, slots=True)
class Life:
    """One stay of a peer, in seconds from the start; at 0 it serves from the beginning.

    `notice_s`: how long before it leaves it says so. `speed` in cost units per second,
    `memory_bytes` of its device, `link_bytes_per_s` for downloads. `turns`: when its speed becomes
    another, in order: (seconds, speed) each.
    """

    peer: str
    joins_s: float
    leaves_s: float = math.inf
    notice_s: float = 0.0
    speed: float = 1.0
    memory_bytes: int | None = None
    link_bytes_per_s: float = math.inf
    turns: tuple[tuple[float, float], ...] = ()


Stay = tuple[float, float]  # from, until


def constant(count: int) -> list[Stay]:
    """All are there, from the beginning to the end."""
    return [(0.0, math.inf)] * count


def exponential(
    draw: random.Random, until_s: float, *, count: int, lifetime_s: float, away_s: float
) -> list[Stay]:
    """`count` machines, each there for an exponential time, then away for one, independently."""
    stays: list[Stay] = []
    for _ in range(count):
        at = 0.0
        if draw.random() > lifetime_s / (lifetime_s + away_s):
            at = draw.expovariate(1 / away_s)
        while at < until_s:
            end = at + draw.expovariate(1 / lifetime_s)
            stays.append((at, end))
            at = end + (draw.expovariate(1 / away_s) if away_s > 0 else 0.0)
    return stays


def preemptible(
    draw: random.Random,
    until_s: float,
    *,
    count: int,
    lifetime_s: float,
    burst_every_s: float,
    burst_share: float,
    open_s: float,
    gap_s: float,
    grants_per_s: float,
) -> list[Stay]:
    """A fleet that asks for `count` machines and gets what the cloud can spare.

    Each machine is taken back after an exponential time of mean `lifetime_s`; bursts come as a
    Poisson process, one in `burst_every_s` on average, and take each machine with a probability
    that is itself exponential with mean `burst_share` (at most 0.9). The cloud alternates between
    *open* (mean `open_s`, exponential), in which machines that are missing are granted as a Poisson
    process of `grants_per_s`, and *gaps* (mean `gap_s`), in which none is. Starts full and open.
    """
    stays: list[Stay] = []
    alive: dict[int, float] = dict.fromkeys(range(count), 0.0)
    ends: dict[int, float] = {each: draw.expovariate(1 / lifetime_s) for each in alive}
    number, now, is_open = count, 0.0, True
    burst_s = draw.expovariate(1 / burst_every_s)
    phase_s = draw.expovariate(1 / open_s)
    grant_s = math.inf
    while True:
        first = min(ends, key=ends.__getitem__, default=-1)
        end_s = ends.get(first, math.inf)
        now = min(end_s, burst_s, phase_s, grant_s)
        if now >= until_s:
            break
        if now == end_s:
            stays.append((alive.pop(first), now))
            del ends[first]
        elif now == burst_s:
            share = min(0.9, draw.expovariate(1 / burst_share))
            for each in [each for each in alive if draw.random() < share]:
                stays.append((alive.pop(each), now))
                del ends[each]
            burst_s = now + draw.expovariate(1 / burst_every_s)
        elif now == phase_s:
            is_open = not is_open
            phase_s = now + draw.expovariate(1 / (open_s if is_open else gap_s))
        else:
            alive[number], ends[number] = now, now + draw.expovariate(1 / lifetime_s)
            number += 1
        wanted = is_open and len(alive) < count
        if not wanted:
            grant_s = math.inf
        elif grant_s == math.inf or now == grant_s:
            grant_s = now + draw.expovariate(grants_per_s)
    return stays + [(since, math.inf) for since in alive.values()]


def diurnal(
    draw: random.Random,
    until_s: float,
    *,
    count: int,
    evening_h: float = 20.0,
    spread_h: float = 3.0,
    hours_on: float = 6.0,
) -> list[Stay]:
    """Home machines: each is switched on once a day, normally distributed around the middle of the
    evening less half its hours, for a gamma-distributed time of mean `hours_on`."""
    stays: list[Stay] = []
    for _ in range(count):
        middle_h = draw.gauss(evening_h, spread_h)
        free_s = 0.0
        for day in range(-1, math.ceil(until_s / DAY_S) + 1):
            on_s = draw.gammavariate(4.0, hours_on / 4.0) * 3600
            start = day * DAY_S + draw.gauss(middle_h, 1.0) * 3600 - on_s / 2
            start, end = max(start, free_s), start + on_s
            if end > max(start, 0.0) and start < until_s:
                stays.append((start, end))
                free_s = end + 1.0
    return stays


def read_trace(path: Path) -> list[Life]:
    """CSV with a header: peer, joins_s, leaves_s (empty: stays), and, if given, notice_s, speed,
    memory_gib, down_mbps. Raises ConfigError."""
    lives: list[Life] = []
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                lives.append(_life_of(row))
                if len(lives) > MAX_LIVES:
                    raise ValueError(f"more than {MAX_LIVES} lives")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"{path}, line {len(lives) + 2}: {error}", "docs/simulate.md shows the columns"
        ) from None
    if len({(life.peer, life.joins_s) for life in lives}) < len(lives):
        raise ConfigError(f"{path} has two lives of one peer that begin together")
    return lives


def _life_of(row: dict[str, str]) -> Life:
    def number(name: str, default: float) -> float:
        value = float(row.get(name) or default)
        if math.isnan(value) or value < 0:
            raise ValueError(f"{name} is {value}")
        return value

    joins_s, leaves_s = number("joins_s", 0.0), number("leaves_s", math.inf)
    if leaves_s <= joins_s:
        raise ValueError("leaves_s is not after joins_s")
    memory = number("memory_gib", math.inf)
    return Life(
        f"{row['peer']}@{joins_s:g}",
        joins_s,
        leaves_s,
        number("notice_s", 0.0),
        number("speed", 1.0),
        None if math.isinf(memory) else int(memory * 2**30),
        number("down_mbps", math.inf) * 125_000,
    )
