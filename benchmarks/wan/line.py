"""What the lab really gives, per profile: the round trip, and what TCP fills of the lines, up and
together.

A user-space hub has limits of its own, so no figure of the lab means anything without these. Cubic
and BBR; a curve over connections shows what one alone does not reach. Figures are kept in FILE, and
shown or drawn again without a run.

    python benchmarks/wan/line.py [--profiles lan fibre home …] [--seconds 4] [--connections 1 2 4]
    python benchmarks/wan/line.py --show --plot PNG
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import _plots
from _helpers import end_politely, file_path, positive, print_results, result, whole_number
from _kept import Row, keep, kept, newest, stamp
from _lab import Host, Lab
from _measured import Measured, kinds
from _namespaces import LabError, require_root
from _profiles import CONGESTION, PROFILES

from swarm.net.transport import MAX_CONNECTIONS

KEPT = Path("runs/wan/line.jsonl")
FIELDS = ("profile", "congestion", "line", "what", "connections")
ROUND_TRIP, UP, TOGETHER = "round trip", "up", "six senders to one host"


def measure(
    profile: str, congestion: str, seconds: float, connections: Sequence[int]
) -> Iterator[Row]:
    """Figures of one profile, and at last, as `hub`, what the hub says of itself."""
    with Lab(profile, 7, congestion=congestion) as lab:
        server, *others = lab.hosts
        with Measured(lab) as measured:
            for name, host in kinds(lab).items():
                where: dict[str, Any] = {"line": name, "seconds": seconds}
                yield {**where, **_round_trip(server, host), "value": measured.round_trip_ms(host)}
                for count in connections:
                    value = measured.up_mbps([host] * count, seconds)
                    yield {**where, **_rate(server, [host], UP, count), "value": value}
            value = measured.up_mbps(others, seconds)
            where = {"line": profile, "seconds": seconds}
            yield {**where, **_rate(server, others, TOGETHER, len(others)), "value": value}
        if lab.profile.emulated:
            yield {"hub": lab.close()}


def _round_trip(server: Host, host: Host) -> Row:
    """Between them, as configured: with half the jitter, each way, since pings come with pauses."""
    configured = None
    if server.home and host.home:
        homes = (server.home, host.home)
        configured = 1e3 * sum(home.round_trip_s + home.jitter_s for home in homes) / 2
    return {"what": ROUND_TRIP, "connections": 1, "unit": "ms", "configured": configured}


def _rate(server: Host, senders: Sequence[Host], what: str, connections: int) -> Row:
    """Of all senders to the server, as configured."""
    up = sum(host.home.up_bps for host in senders if host.home)
    configured = min(up, server.home.down_bps) / 1e6 if server.home else None
    unit = "Mbit/s"
    return {"what": what, "connections": connections, "unit": unit, "configured": configured}


def line_of(row: Row) -> str:
    what = row["what"]
    if what == UP:
        what = f"up, {row['connections']} connection{'s' * (row['connections'] > 1)}"
    if row["line"] != row["profile"]:
        what = f"{row['line']}: {what}"
    meant = f"{row['configured']:.0f} {row['unit']}" if row["configured"] else "no limit"
    return (
        f"{row['profile']:8} {row['congestion']:6} {what:28}"
        f"{row['value']:10.1f} {row['unit']:6}   {meant}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=list(PROFILES))
    parser.add_argument("--congestion", nargs="+", default=CONGESTION, choices=CONGESTION)
    parser.add_argument(
        "--connections",
        nargs="+",
        type=partial(whole_number, most=MAX_CONNECTIONS),
        default=[1, 2, 4, 8, 16],
    )
    parser.add_argument("--seconds", type=positive, default=4.0, help="of each")
    parser.add_argument("--kept", type=file_path, default=KEPT, metavar="FILE")
    parser.add_argument("--show", action="store_true", help="only what is in FILE; run nothing")
    parser.add_argument("--plot", type=Path, help="also draw the curve over connections, as PNG")
    options = parser.parse_args()
    if not options.show:
        require_root()
    end_politely()
    run = stamp()
    print(f"{'profile':8} {'TCP':6} {'':28}{'measured':>17}   configured")
    for profile in () if options.show else options.profiles:
        for congestion in options.congestion:
            for row in measure(profile, congestion, options.seconds, options.connections):
                if "hub" in row:
                    print(f"{profile:8} {congestion:6} the hub: {row['hub']}", flush=True)
                    continue
                whole = {"run": run, "profile": profile, "congestion": congestion, **row}
                keep(options.kept, whole)
                print(line_of(whole), flush=True)
    rows = newest(kept(options.kept, (*FIELDS, "run", "value", "unit", "configured")), FIELDS)
    if options.show:
        rows = [row for row in rows if row["profile"] in options.profiles]
        if not rows:
            parser.error(
                f"nothing of this is in {options.kept}: measure it, or name another --kept"
            )
        print("\n".join(map(line_of, rows)))
    if options.plot:
        _plots.connections(rows, options.plot)
    shown = rows if options.show else [row for row in rows if row["run"] == run]
    print_results("wan_line", [_entry(row) for row in shown])


def _entry(row: Row) -> dict[str, Any]:
    names = [row["profile"], row["congestion"], row["line"], row["what"], str(row["connections"])]
    return {**result(", ".join(names), row["value"], row["unit"]), "configured": row["configured"]}


if __name__ == "__main__":
    try:
        main()
    except (LabError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
