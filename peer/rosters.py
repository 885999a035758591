"""Who is in the run and where to dial them, told to all members.

A roster names everybody and goes to everybody, and it takes only a `join` to have a new one told,
so a run of the most members is told at most once a second, a smaller one sooner in proportion. Each
member is told in turn of all that has changed by then. To one that has not answered the last roster
no other is sent: it gets the newest afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from peer.members import MAX_MEMBERS, Member
from swarm.errors import SwarmError

if TYPE_CHECKING:
    from peer.leader import Leader

log = logging.getLogger(__name__)
ROUND_S = 1.0  # in which as many members are told as a run can have
AT_ONCE = 16  # members told before the leader does something else


class Rosters:
    """What a `Leader` tells its members of each other."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._newest = 0  # rosters so far, told or not
        self._begun = self._gone_out = 0  # of them: the last that a round began or ended with
        self._round: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()  # replaced at the end of every round
        self._telling: set[str] = set()  # by incarnation: who has not answered yet

    def add(self, member: Member) -> None:
        """A member has come; the answer to its `join` tells it of the others."""
        self._newest += 1
        member.listed = member.told = self._newest
        if self._round is None or self._round.done():
            self._round = self._leader.tasks.spawn(self._tell_all(), "rosters")

    async def wait_for(self, member: Member) -> None:
        """Until the others know how to dial it, those excepted that have answered no roster."""
        while self._gone_out < member.listed:
            await self._ended.wait()

    async def _tell_all(self) -> None:
        """Round by round, as long as there is something new."""
        while self._begun < self._newest:
            self._begun, members = self._newest, list(self._leader.members)
            for start in range(0, len(members) or 1, AT_ONCE):
                group = members[start : start + AT_ONCE]
                for member in group:
                    if member.told < self._begun and member.incarnation not in self._telling:
                        self._telling.add(member.incarnation)
                        self._leader.tasks.spawn(self._tell(member), "roster")
                if start + AT_ONCE >= len(members):
                    self._gone_out = self._begun
                    ended, self._ended = self._ended, asyncio.Event()
                    ended.set()
                await asyncio.sleep(ROUND_S * len(group) / MAX_MEMBERS)

    async def _tell(self, member: Member) -> None:
        """Until it has been told as much as others in the round under way."""
        links, tried = self._leader.links, None
        try:
            while member.told < self._begun:
                channel = links.open_channel(member.incarnation)
                if channel is None or channel is tried:
                    return
                newest = self._newest
                try:
                    await channel.call("roster", {"roster": self._leader.members.roster()})
                    member.told = newest
                except SwarmError as error:  # it may have come back over another channel by now
                    log.debug("roster to %s: %s", member.incarnation[-8:], error)
                    tried = channel
        finally:
            self._telling.discard(member.incarnation)
