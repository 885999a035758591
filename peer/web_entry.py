"""Where commands meet the dashboard: the only place in `peer` that imports `web`, when asked to.

`web` is one more onlooker of the swarm and knows nothing of these processes (docs/architecture.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import JoinError


def run_dashboard(
    join: str | None, *, host: str, port: int | None, data_dir: Path | None, hide_join: bool
) -> None:
    """`swarm dashboard`: serve a page about a swarm until interrupted."""
    from peer.interrupt import until_interrupted
    from peer.places import data_home
    from peer.serve import JOIN_VARIABLE, last_swarm, read_link, refuse_empty_link
    from peer.streams import forgive_lost_lines
    from web.serve import Dashboard

    refuse_empty_link(join)
    join = join or os.environ.get(JOIN_VARIABLE) or last_swarm()
    if not join:
        raise JoinError("no swarm is named and none was joined before", "pass its --join LINK")
    dashboard = Dashboard(
        read_link(join),
        data_dir or data_home() / "dashboard",
        host=host,
        port=port,
        show_join=not hide_join,
    )
    forgive_lost_lines()
    until_interrupted(
        dashboard.run(
            lambda url: print(f"dashboard: {url}", flush=True),
            lambda line: print(line, flush=True),
        )
    )


def write_run_report(run_dir: Path, out: Path | None) -> Path:
    """`swarm report`: one HTML file about a recorded run."""
    from web.report import write_report

    return write_report(run_dir, out)


def local_dashboard(arguments: Mapping[str, Any], tell: Any) -> int:
    """The dashboard of a local swarm, as one of its processes; tells its `url`."""
    from peer.local_entry import run

    async def main() -> None:
        from swarm.net.link import parse_link
        from web.serve import Dashboard

        dashboard = Dashboard(
            parse_link(arguments["join"]), Path(arguments["data_dir"]), port=arguments["port"]
        )
        await dashboard.run(lambda url: tell({"url": url}))

    return run(main, tell, threads=1)
