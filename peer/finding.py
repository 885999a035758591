"""Finding the leader: all trainers are dialled, and the first that leads takes the replica.

Trainers say at once that they do not lead. So one round finds the leader, whoever it is, and a
replica that has lost it makes rounds at growing intervals until one of them leads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from swarm.errors import JoinError, RefusedError, SwarmError
from swarm.net.channel import CallFailedError, Channel
from swarm.net.links import Links, peer_of
from swarm.tasks import as_answered

RETRY_S = (0.2, 30.0)  # first and longest pause between attempts to find the leader
# A pause is at most this share of the time without a leader: whoever starts again within a quarter
# of a minute has its replicas back while it still waits for what they have counted (`ADOPT_S`).
RETRY_SHARE = 0.15
OTHERS_S = 1.0  # for other trainers to answer after one; a dial goes on, for the next attempt


class NotYetError(RefusedError):
    """The leader is there, and may take this peer another time."""


def pause_s(looking_s: float) -> float:
    """Between two attempts, when it has looked for a leader, or for a state, for so long."""
    return max(RETRY_S[0], min(RETRY_SHARE * looking_s, RETRY_S[1]))


async def join_leader(
    links: Links,
    candidates: Iterable[tuple[str, Sequence[str]]],
    trainers: Collection[str],
    join: Callable[[Channel], Awaitable[Mapping[str, Any]]],
) -> tuple[Channel, Mapping[str, Any]]:
    """`join` with the first trainer that leads; the others say that they do not.

    All are dialled at once: one that is frozen or cut off keeps nobody waiting. Returns the
    channel to the leader and what `join` did. Raises JoinError when no trainer will ever take this
    peer, NotYetError, RefusedError when none leads.
    """
    dials = [
        links.channel(name, addresses)
        for name, addresses in candidates
        if peer_of(name) in trainers
    ]
    failures: list[SwarmError] = []
    async with aclosing(as_answered(dials, OTHERS_S)) as answers:
        async for dial in answers:
            try:
                channel = dial.result()
            except SwarmError as error:  # even of one that serves another run: others may lead
                failures.append(error)
                continue
            try:
                return channel, await join(channel)
            except JoinError:
                raise
            except SwarmError as error:
                failures.append(error)
    if not_yet := [error for error in failures if isinstance(error, NotYetError)]:
        raise not_yet[0]
    hopeless = [error for error in failures if isinstance(error, JoinError)]
    if hopeless and len(hopeless) == len(dials):
        raise hopeless[0]
    raise RefusedError(f"no leader answers: {failures[-1] if failures else 'none is known'}")


async def apply(channel: Channel, application: dict[str, Any]) -> Mapping[str, Any]:
    """Ask a trainer to take a replica; its answer. Raises JoinError where it never will,
    NotYetError where it may, else what the call raises."""
    try:
        return (await channel.call("join", application)).body
    except CallFailedError as error:
        if error.detail.get("fatal") is True:
            raise JoinError(error.message, "this peer cannot serve this run as it is") from None
        if "fatal" in error.detail:
            raise NotYetError(error.message) from None
        raise
