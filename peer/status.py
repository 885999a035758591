"""`swarm status`: how a swarm is doing, asked of its leader or read from a run directory."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.interrupt import until_interrupted
from swarm.errors import JoinError, SwarmError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from swarm.net.link import JoinLink
    from swarm.net.links import Links

ENDED = ("finished", "failed")
STALE_S = 10.0
ANSWER_S = 15.0  # for each peer of a link to be reached and to answer


def show_status(where: str | None, *, as_json: bool) -> None:
    """`swarm status`: of a run directory on this machine, or of a swarm by its link.

    With neither: of $SWARM_JOIN, of the newest run in `runs/` here, or of the last swarm joined.
    Whatever the leader or the file says, this prints text that harms no terminal, or valid JSON.
    """
    from peer.serve import JOIN_VARIABLE, last_swarm, read_link, refuse_empty_link
    from peer.view import print_status
    from swarm.events import plain_json, read_status
    from swarm.words import number

    refuse_empty_link(where, "the run to show")
    where = where or os.environ.get(JOIN_VARIABLE) or _newest_run() or last_swarm()
    if where is None:
        raise JoinError(
            "no swarm is named and none was joined before", "swarm status LINK, or a run directory"
        )
    if where.startswith("swarm://"):
        status = until_interrupted(_ask_status(read_link(where)))
    else:
        found = read_status(Path(where) / "status.json")
        if found is None:
            raise JoinError(f"{where} is no run directory with a status", "give a link or RUN_DIR")
        status = found
    if as_json:
        print(json.dumps(plain_json(status, limit=None), allow_nan=False))
        return
    print_status(status)
    updated_at = number(status.get("updated_at"))
    age_s = time.time() - updated_at
    if status.get("state") not in ENDED and age_s > STALE_S:
        when = f"{_ago(age_s)} ago" if updated_at > 0 else "an unknown time"
        print(f"as of {when}: its leader does not run now")


def is_live(status: Mapping[str, Any]) -> bool:
    """Whether its leader runs, as far as it says: not ended, and written within STALE_S."""
    from swarm.words import number

    age_s = time.time() - number(status.get("updated_at"))
    return status.get("state") not in ENDED and age_s <= STALE_S


def _newest_run() -> str | None:
    found = sorted(Path("runs").glob("*/status.json"), key=lambda path: path.stat().st_mtime)
    return str(found[-1].parent) if found else None


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


async def _ask_status(link: JoinLink) -> dict[str, Any]:
    import tempfile

    from swarm.net.identity import load_identity
    from swarm.net.libp2p import Libp2pTransport
    from swarm.net.links import Links
    from swarm.terms import new_incarnation

    with tempfile.TemporaryDirectory() as scratch:
        identity = load_identity(Path(scratch) / "identity.key")
        transport = await Libp2pTransport.create(identity_path=identity.path, listen=())
        links = Links(transport, link.run_id, new_incarnation(identity.peer_id), {})
        try:
            return await first_status(links, link.by_peer)
        finally:
            await links.aclose()
            await transport.close()


async def first_status(links: Links, by_peer: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What the first of these peers (addresses by peer id) says that leads the run.

    Raises JoinError if none does: a refusal, if one of them refused, says most.
    """
    refusal: JoinError | None = None
    failure = ""
    for peer, addresses in by_peer.items():
        try:
            async with asyncio.timeout(ANSWER_S):
                channel = await links.channel(peer, addresses)
                return (await channel.call("status", {})).body
        except JoinError as error:
            refusal = refusal or error
        except SwarmError as error:
            failure = str(error)
        except TimeoutError:
            failure = f"no answer within {ANSWER_S:.0f} s"
    raise refusal or JoinError(f"nobody answers at that link ({failure})", "is the leader running?")
