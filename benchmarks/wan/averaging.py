"""The group all-reduce over home connections, beside gloo over the same ones.

Members live in hosts of the lab, each with the line of the profile (`_profiles.py`); both sides
send float32 as it is, so both move the same bytes, and take turns within one run. A round's time is
that of its slowest member; medians. PCCL reports 0.86 to 0.96 of gloo's time between sites. With
each result stands what its lab gave just before (`_measured.py`). Several connections are those of
`swarm-peer --connections`; bare TCP's are in `line.py`. Where lines are unlike, a swarm gives its
members unlike parts to sum (`--split`, over one connection); all else here has even ones.

    python benchmarks/wan/averaging.py [--profiles fibre home] [--members 4 8] [--connections 1 4]
    python benchmarks/wan/averaging.py --profiles mixed --members 4 --split
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from _helpers import end_politely, positive, print_results, result, whole_number
from _lab import FORKED, MAX_HOSTS, Lab
from _measured import ended, given, measured_anew, said, traffic_of
from _namespaces import DEVICE, LabError, require_root
from _plots import all_reduce as plot
from _profiles import CONGESTION, PROFILES
from all_reduce import Members

from swarm.averaging.plan import balanced_shares, learned_rates
from swarm.net.transport import MAX_CONNECTIONS

GOAL, OF_PROFILES, OF_MEMBERS = 0.9, ("fibre", "home"), (4, 8)
SPLIT = "split"
FLOAT32_BYTES = 4
GLOO_PORT = 29_400  # every host of the lab has its ports to itself


def start(lab: Lab, connections: int) -> Members:
    def wrap(rank: int, command: list[str]) -> list[str]:
        host = lab.hosts[rank]
        return [
            sys.executable, str(FORKED), host.namespace,
            "env", f"GLOO_SOCKET_IFNAME={DEVICE}", *command, host.address, str(connections),
        ]  # fmt: skip

    members = Members("streams", len(lab.hosts), wrap)
    try:
        members.introduce(f"tcp://{lab.hosts[0].address}:{GLOO_PORT}")
    except BaseException:
        members.close()
        raise
    return members


def measure(
    profile: str, num: int, congestion: str, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds by side, and of its uplink busy as `SIDE busy`; what the lab gave, and what
    the hub says of itself. Sides: `gloo`, ours by the number of connections, and `split`."""
    sides = {**{str(each): each for each in options.connections}, "gloo": 0}
    if options.split:
        sides[SPLIT] = 1
    rates, shares = [(0.0, 0.0)] * num, None  # of each line, as a leader learns them
    taken: dict[str, list[float]] = {side: [] for side in sides}
    busy: dict[str, list[float]] = {f"{side} busy": [] for side in sides}
    lab = Lab(profile, num, congestion=congestion, keep_window=options.keep_window)
    with lab:
        lines = given(lab)
        members = start(lab, max(options.connections))
        try:
            for trial in range(options.rounds + 1):  # the first opens connections
                # Whoever follows a side that used the same connections finds TCP awake.
                first = trial % len(sides)
                for side, connections in [*sides.items()][first:] + [*sides.items()][:first]:
                    elements = int(options.mb * 1_000_000) // FLOAT32_BYTES
                    before = [traffic_of(host).sent for host in lab.hosts]
                    took = members.round(
                        side="ours" if connections else side,
                        connections=connections,
                        num_elements=elements,
                        accumulate="float32",
                        shares=shares if side == SPLIT else None,
                    )
                    if side == SPLIT:
                        rates = learned_rates(rates, members.came)
                        shares = balanced_shares(rates, FLOAT32_BYTES, FLOAT32_BYTES)
                    if trial:
                        taken[side].append(took)
                        busy[f"{side} busy"].append(busiest_s(lab, before))
        finally:
            members.close()
        found = {**taken, **busy}
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        return medians, {"lines": lines, "hub": ended(lab)}


def busiest_s(lab: Lab, before: list[int]) -> float:
    """Seconds of the uplink's rate that the busiest host has sent since; 0 on a bridge. Up to 3.6 %
    more are headers within bursts (`traffic_of`)."""
    sent = zip(lab.hosts, before, strict=True)
    return max(
        8 * (traffic_of(host).sent - bytes_before) / host.home.up_bps if host.home else 0.0
        for host, bytes_before in sent
    )


def least_s(profile: str, num: int, mb: float) -> float:
    """Seconds that the payload needs on the uplinks, however the work is split: each member sends
    all it has once, and all together send it `2 * (num - 1)` times."""
    up = [home.up_bps for n in range(num) if (home := PROFILES[profile].of(n))]
    return 8e6 * mb * max(1 / min(up), 2 * (num - 1) / sum(up)) if up else 0.0


def compared(
    profile: str, num: int, congestion: str, connections: int, medians: dict[str, float], mb: float
) -> list[dict[str, Any]]:
    """A line of the table, printed, and its results. `congestion` is a column of it."""
    ours, gloo, least = medians[str(connections)], medians["gloo"], least_s(profile, num, mb)
    busy, gloo_busy = medians[f"{connections} busy"], medians["gloo busy"]
    print(
        f"{profile:9} {congestion:10} {num:7} {connections:11} {ours:8.3f} ({busy:.2f})"
        f" {gloo:8.3f} ({gloo_busy:.2f}) {ours / gloo:10.2f}x {least:12.2f}"
    )
    name = f"{profile}, {num} members, {mb:g} MB, {congestion}"
    if connections > 1:
        name += f", {connections} connections"
    goal = GOAL if profile in OF_PROFILES and num in OF_MEMBERS else None
    return [
        result(f"all-reduce / gloo, {name}", ours / gloo, "x", goal, at_most=True),
        result(f"all-reduce, {name}", ours, "s"),
        result(f"gloo, {name}", gloo, "s"),
        result(f"uplink busy, all-reduce, {name}", busy, "s"),
        result(f"uplink busy, gloo, {name}", gloo_busy, "s"),
        result(f"least possible, {name}", least, "s"),
    ]


def split_compared(
    profile: str, num: int, congestion: str, medians: dict[str, float], mb: float
) -> list[dict[str, Any]]:
    """The same of parts by what the lines were seen to do, beside even ones."""
    even, split, gloo = medians["1"], medians[SPLIT], medians["gloo"]
    print(
        f"{profile:9} {congestion:10} {num:7} {SPLIT:>11} {split:8.3f}"
        f" ({medians[f'{SPLIT} busy']:.2f})   {split / even:.2f}x even parts' {even:.3f},"
        f" {split / gloo:.2f}x gloo's"
    )
    name = f"{profile}, {num} members, {mb:g} MB, {congestion}"
    return [
        result(f"all-reduce in unlike parts / in even ones, {name}", split / even, "x"),
        result(f"all-reduce in unlike parts / gloo, {name}", split / gloo, "x"),
        result(f"all-reduce in unlike parts, {name}", split, "s"),
        result(f"uplink busy, all-reduce in unlike parts, {name}", medians[f"{SPLIT} busy"], "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profiles", nargs="+", default=["fibre", "home"], choices=list(PROFILES))
    parser.add_argument("--members", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--congestion", nargs="+", default=CONGESTION, choices=CONGESTION)
    parser.add_argument("--mb", type=positive, default=16, help="of float32")
    parser.add_argument(
        "--connections",
        type=partial(whole_number, most=MAX_CONNECTIONS),
        nargs="+",
        default=[1],
        help="in turn",
    )
    parser.add_argument(
        "--split", action="store_true", help="also in parts by what each line was seen to do"
    )
    # Of an even number each of two sides begins, and finds TCP asleep, as often as the other.
    parser.add_argument("--rounds", type=whole_number, default=6)
    parser.add_argument("--keep-window", action="store_true", help="no slow start after a pause")
    parser.add_argument("--plot", type=Path, help="also draw the curve over connections, as PNG")
    options = parser.parse_args()
    if not set(options.members) <= set(range(2, MAX_HOSTS + 1)):
        parser.error(f"--members is 2 to {MAX_HOSTS}")
    if options.mb * 1_000_000 < FLOAT32_BYTES:
        parser.error("--mb is too little for one number")
    if options.split and 1 not in options.connections:
        parser.error("--split is compared with one connection: leave --connections out")
    require_root()
    end_politely()
    results, curve = [], []
    print(
        "profile   TCP        members connections   ours s (busy)   gloo s (busy)   ours/gloo"
        "   payload alone s"
    )
    for profile in options.profiles:
        for num in options.members:
            for congestion in options.congestion:
                medians, lab = measured_anew(partial(measure, profile, num, congestion, options))
                tcp = congestion + ("+keep" if options.keep_window else "")
                for connections in options.connections:
                    found = compared(profile, num, tcp, connections, medians, options.mb)
                    results += [{**each, "lab": lab} for each in found]
                    curve.append((f"{profile}, {num} members", tcp, connections, found[0]["value"]))
                if options.split:
                    found = split_compared(profile, num, tcp, medians, options.mb)
                    results += [{**each, "lab": lab} for each in found]
                print(f"   {said(lab['lines'])}; hub {lab['hub']}", flush=True)
    if options.plot:
        plot(curve, GOAL, options.plot)
    print_results("wan_all_reduce", results)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
