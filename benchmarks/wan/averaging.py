"""The group all-reduce over home connections, beside gloo over the same ones.

Members live in hosts of the lab, each with the line of the profile (`_profiles.py`); both sides
send float32 as it is, so both move the same bytes, and take turns within one run. A round's time is
that of its slowest member; medians. PCCL reports 0.86 to 0.96 of gloo's time between sites. With
each result stands what its lab gave just before (`_measured.py`); what several connections give is
in `line.py`.

    python benchmarks/wan/averaging.py [--profiles fibre home] [--members 4 8] [--mb 16]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from _helpers import print_results, result
from _lab import FORKED, Lab
from _measured import given, said, traffic_of
from _namespaces import DEVICE, LabError
from _profiles import PROFILES, Profile
from all_reduce import Members

GOAL = 0.9
GLOO_PORT = 29_400  # every host of the lab has its ports to itself


def start(lab: Lab) -> Members:
    def wrap(rank: int, command: list[str]) -> list[str]:
        host = lab.hosts[rank]
        return [
            sys.executable, str(FORKED), host.namespace,
            "env", f"GLOO_SOCKET_IFNAME={DEVICE}", *command, host.address,
        ]  # fmt: skip

    members = Members("streams", len(lab.hosts), wrap)
    heard = members.hear()
    addresses = {each["peer"]: each["addresses"] for each in heard}
    members.tell(addresses=addresses, gloo=f"tcp://{lab.hosts[0].address}:{GLOO_PORT}")
    members.hear()
    return members


def measure(
    profile: str, num: int, congestion: str, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds by side, and of its uplink busy as `SIDE busy`; what the lab gave, and what
    the hub says of itself."""
    taken: dict[str, list[float]] = {"ours": [], "gloo": []}
    busy: dict[str, list[float]] = {f"{side} busy": [] for side in taken}
    lab = Lab(profile, num, congestion=congestion)
    with lab:
        lines = given(lab)
        members = start(lab)
        try:
            for trial in range(options.rounds + 1):  # the first opens connections
                for side, seconds in taken.items():
                    elements = int(options.mb * 1_000_000) // 4
                    before = [traffic_of(host).sent for host in lab.hosts]
                    took = members.round(side=side, num_elements=elements, accumulate="float32")
                    if trial:
                        seconds.append(took)
                        busy[f"{side} busy"].append(busiest_s(lab, before))
        finally:
            members.close()
        found = {**taken, **busy}
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        return medians, {"lines": lines, "hub": lab.close()}


def busiest_s(lab: Lab, before: list[int]) -> float:
    """Seconds of the uplink's rate that the busiest host has sent since; 0 on a bridge. Up to 3.6 %
    more are headers within bursts (`traffic_of`)."""
    sent = zip(lab.hosts, before, strict=True)
    return max(
        8 * (traffic_of(host).sent - bytes_before) / host.home.up_bps if host.home else 0.0
        for host, bytes_before in sent
    )


def least_s(lab: Profile, num: int, mb: float) -> float:
    """Seconds that the payload needs on the uplinks, however the work is split: each member sends
    all it has once, and all together send it `2 * (num - 1)` times."""
    up = [home.up_bps for n in range(num) if (home := lab.of(n))]
    return 8e6 * mb * max(1 / min(up), 2 * (num - 1) / sum(up)) if up else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profiles", nargs="+", default=["fibre", "home"], choices=list(PROFILES))
    parser.add_argument("--members", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--congestion", nargs="+", default=["cubic", "bbr"])
    parser.add_argument("--mb", type=float, default=16, help="of float32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results = []
    print("profile   TCP    members   ours s (busy)   gloo s (busy)   ours/gloo   payload alone s")
    for profile in options.profiles:
        for num in options.members:
            for congestion in options.congestion:
                medians, lab = measure(profile, num, congestion, options)
                ours, gloo = medians["ours"], medians["gloo"]
                least = least_s(PROFILES[profile], num, options.mb)
                print(
                    f"{profile:9} {congestion:6} {num:7}"
                    f" {ours:8.3f} ({medians['ours busy']:.2f}) {gloo:8.3f}"
                    f" ({medians['gloo busy']:.2f}) {ours / gloo:10.2f}x {least:12.2f}  "
                    f" {said(lab['lines'])}; hub {lab['hub']}",
                    flush=True,
                )
                name = f"{profile}, {num} members, {options.mb:g} MB, {congestion}"
                found = [
                    result(f"all-reduce / gloo, {name}", ours / gloo, "x", GOAL, at_most=True),
                    result(f"all-reduce, {name}", ours, "s"),
                    result(f"gloo, {name}", gloo, "s"),
                    result(f"uplink busy, all-reduce, {name}", medians["ours busy"], "s"),
                    result(f"uplink busy, gloo, {name}", medians["gloo busy"], "s"),
                    result(f"least possible, {name}", least, "s"),
                ]
                results += [{**each, "lab": lab} for each in found]
    print_results("wan_all_reduce", results)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        raise SystemExit(f"error: {error}") from None
