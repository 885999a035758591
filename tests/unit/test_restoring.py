"""When a stage counts as empty: who fetches its state from the leader is there while it comes."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer import snapshots
from peer.members import Member, Members, Standing
from peer.rebalancing import RESERVED_S, Rebalancing
from peer.restoring import GRACE_S, Restoring
from peer.snapshots import Snapshot
from swarm.net.channel import Message
from swarm.sim.virtual_time import run
from swarm.terms import Ballot, Record, Term

RESTORED = Record(
    Ballot(Term(1, 2, "t0#1"), 3, 1), "", {}, {}, 0.0, 1.0, 0.0, "restored", 0.0, 0, base=4
)
LASTS_S, EVERY_S = 2.5 * RESERVED_S, 60.0
SIZE = 1000


class Donor(Restoring):
    async def _state(self, stage: int, record: Record) -> tuple[Snapshot, bytes]:
        return Snapshot(4, 1, "", record, {"parameters": torch.zeros(SIZE)}), b""


def leader_with(joiner: Member) -> Any:
    """Of a run of one stage, taken back to a checkpoint, which that joiner is to serve."""
    leader = SimpleNamespace(
        members=Members(1, {joiner.incarnation: joiner}),
        pipeline=SimpleNamespace(num_stages=1),
        record=RESTORED,
    )
    leader.rebalancing = Rebalancing(leader)  # type: ignore[arg-type]
    return leader


@pytest.mark.parametrize(
    ("stops_s", "share", "misses"),
    [(math.inf, 1, False), (EVERY_S, 1, True), (math.inf, 50, True)],
    ids=["goes-on", "stops", "begins-again"],
)
def test_a_download_from_the_leader_keeps_others_from_its_stage_while_it_goes_on(
    stops_s: float, share: int, misses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than a joiner counts that gets nowhere. All of it once is all."""
    monkeypatch.setattr(snapshots, "CHUNK", share)

    async def missed() -> bool:
        loop = asyncio.get_running_loop()
        joiner = Member("a#1", 0, (), Standing.JOINING, joined_at=loop.time())
        restoring = Donor(leader_with(joiner), SimpleNamespace())  # type: ignore[arg-type]
        channel: Any = SimpleNamespace(incarnation="a#1")
        body = {"name": "parameters", "step": 4, "start": 0}
        began = loop.time()
        found = False
        while loop.time() < began + LASTS_S:
            if loop.time() <= began + stops_s:
                await restoring._chunk(channel, Message(body))
            found = restoring._needs_a_peer(loop.time()) or found
            await asyncio.sleep(min(EVERY_S, GRACE_S))
        return found

    assert run(missed(), limit_s=2 * LASTS_S) is misses
