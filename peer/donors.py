"""Whom a joiner asks for its stage's state: who can be reached, is trusted, agrees with the rest.

Any of them may lie, hang or have no copy to give. Nobody is waited for long while another's answer
would do, and fewer than half of them cannot say where the run is.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from peer.calls import count
from peer.snapshots import Description
from peer.stage_server import StageServer
from swarm.errors import RefusedError, SwarmError, WireError
from swarm.net.channel import Channel
from swarm.net.links import Links, peer_of
from swarm.tasks import TaskSet

log = logging.getLogger(__name__)
REUSE_STEPS = 3  # a copy so old is as good as a new one: its gradients weigh no more than itself
NOTED_S = 600.0  # a donor that gave wrong bytes is left alone for so long
ANSWER_S = 600.0  # for a donor to copy and hash its state
OTHERS_S = 60.0  # for the other donors, once one has, or has said no


class Donors:
    """Those of one `StageServer`'s stage, as they have behaved.

    `begun()` is the step of the copy of which some is here already, `asking(channels, step)` is
    told before they are asked to describe their state at a step.
    """

    def __init__(
        self,
        server: StageServer,
        links: Links,
        rng: random.Random,
        tasks: TaskSet,
        *,
        begun: Callable[[], int | None],
        asking: Callable[[Mapping[str, Channel], int], None],
    ) -> None:
        self.server, self.links, self.random, self._tasks = server, links, rng, tasks
        self._begun, self._asking = begun, asking
        self.to_tell: list[str] = []  # those noted since the leader was told
        self.late: set[str] = set()  # those that kept this join waiting: asked after the others
        self._noted: dict[str, float] = {}  # peer id -> until when it is left alone
        self._readings: dict[str, None] = {}  # incarnations that keep something for us

    async def channels(self, donors: Sequence[str]) -> dict[str, Channel]:
        """Open channels to those that can be reached, in random order. Noted donors come into
        question only when there are no others."""
        trusted = [name for name in donors if self.trusts(name)]
        names = self.random.sample(trusted or list(donors), len(trusted or donors))
        opened, _ = await _gather({name: self.links.channel(name) for name in names})
        return {name: channel for name, channel in opened.items() if channel.ended is None}

    def trusts(self, donor: str) -> bool:
        now = asyncio.get_running_loop().time()
        return self._noted.get(peer_of(donor), 0.0) <= now

    def blame(self, donor: str, what: str) -> None:
        """Wrong bytes from a donor: noted, told, and not asked again for a while."""
        now = asyncio.get_running_loop().time()
        self._noted[peer_of(donor)] = now + NOTED_S
        self.to_tell.append(donor)
        self.server.probe("bad_chunk", donor=donor, what=what)
        log.warning("a wrong %s from %s", what, donor[-8:])

    async def describe(self, channels: Mapping[str, Channel]) -> tuple[Description, list[str]]:
        """One step, and the donors that describe its state with the same digests.

        Who keeps the others waiting is put aside, and asked again, with patience, only when they
        have no copy to give: an honest donor may need minutes for a big state.

        Raises RefusedError when none gives one.
        """
        aside = {name: c for name, c in channels.items() if name in self.late}
        prompt = {name: c for name, c in channels.items() if name not in aside}
        for donors, patient in ((prompt, False), (aside, True)):
            while donors:
                described, owing = await self._described_by(donors, patient=patient)
                self.late |= owing
                if not patient and owing != set(donors):  # nobody hurries who is alone
                    aside.update({name: donors[name] for name in owing})
                if described is not None:
                    self.late -= set(described[1])
                    return described
                if not owing:
                    break
                # The steps have gone on while they were waited for: look around anew.
                donors = {name: c for name, c in donors.items() if name not in owing}
        raise RefusedError("no donor gives a copy of its state")

    async def _described_by(
        self, channels: Mapping[str, Channel], *, patient: bool
    ) -> tuple[tuple[Description, list[str]] | None, set[str]]:
        """As `describe`, or None; and who gave no answer, or not what it had offered."""
        # Who is asked again may have a copy by now, made for the question that it did not answer.
        ask = {"offer": True, "anew": self._begun() is None and not patient}
        answers, owing = await _gather(
            {n: c.call("snapshot", ask) for n, c in channels.items()}, patient=patient
        )
        offers, held = dict[str, int](), dict[str, set[int]]()
        for name, answer in answers.items():
            copies = answer.body.get("copies")
            try:
                step = count(answer.body.get("step"))
                copied = [count(each) for each in (copies if isinstance(copies, list) else [])[:64]]
            except WireError:
                self.blame(name, "offer")
                owing.add(name)
                continue
            offers[name] = step
            held[name] = {each for each in copied if each <= step}  # none has one of what is ahead
        if not offers:
            return None, owing
        expected = {name: each.numel() for name, each in self.server.state.tensors().items()}
        for step in steps_to_ask(list(offers.values()), held.values(), self._begun()):
            self._asking(channels, step)
            answers, silent = await _gather(
                {name: channels[name].call("snapshot", {"step": step}) for name in offers},
                patient=patient,
            )
            groups: dict[Description, list[str]] = {}
            for name, answer in answers.items():
                self._readings[name] = None
                try:
                    described = Description.read(answer.body, expected)
                except WireError as error:
                    log.debug("no description from %s: %s", name[-8:], error)
                    continue
                if described.step == step:
                    groups.setdefault(described, []).append(name)
            owing |= silent
            if groups:
                return max(groups.items(), key=lambda each: len(each[1])), owing
            broken = {name for name in offers if step in held[name]}
            if silent or (broken and broken != set(offers)):  # a copy of all may be gone by now
                owing |= broken
                break
        return None, owing

    def release(self) -> None:
        """Nothing that they keep for us is needed any more."""
        readings, self._readings = self._readings, {}
        for name in readings:
            channel = self.links.open_channel(name)
            if channel is not None:
                self._tasks.spawn(_release(channel), "release")


def steps_to_ask(
    at: Sequence[int], held: Collection[Collection[int]], begun: int | None
) -> list[int]:
    """Which steps to ask for, the best first: donors are `at` these, hold these copies, and some of
    the copy of step `begun` is here."""
    # What the leader said may be hours old by now. Half of the donors are here or beyond, so
    # that fewer liars cannot say where the run is; what is beyond comes last.
    now, wanted = statistics.median_low(at), []
    counted = Counter(each for copies in held for each in copies)
    most = sorted(counted, key=lambda each: (-counted[each], -each))
    if begun is not None and counted[begun]:
        wanted.append(begun)
    wanted += [each for each in most if 0 <= now - each <= REUSE_STEPS]
    usual = Counter(each for each in at if each <= now).most_common(1)[0][0]
    wanted += [usual, now + 1]  # now; or, if that is over, soon
    wanted += [each for each in most if now - each > REUSE_STEPS]  # no room for another copy
    wanted += [each for each in most if each > now]
    return list(dict.fromkeys([*wanted, max(at) + 1]))


async def _gather(
    calls: Mapping[str, Coroutine[Any, Any, Any]], *, patient: bool = False
) -> tuple[dict[str, Any], set[str]]:
    """What those answered that did, in the order of `calls`, and who did not answer at all.

    Once one has, or refuses (who is `patient` lets refusals hurry nobody), the others have a
    while; and nobody is waited for for ever: the device of one may hang while its process answers
    pings.
    """
    asked = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    pending, wait_s = set(asked.values()), ANSWER_S
    try:
        while pending:
            ended, pending = await asyncio.wait(
                pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended:
                break
            if not patient or any(not t.cancelled() and t.exception() is None for t in ended):
                wait_s = OTHERS_S
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    found, silent = {}, set[str]()
    for name, task in asked.items():
        if task.cancelled():
            log.debug("%s: no answer", name[-8:])
            silent.add(name)
        elif (error := task.exception()) is None:
            found[name] = task.result()
        elif isinstance(error, SwarmError):
            log.debug("%s: %s", name[-8:], error)
        else:
            raise error
    return found, silent


async def _release(channel: Channel) -> None:
    try:
        await channel.call("snapshot", {"release": True})
    except SwarmError as error:
        log.debug("release: %s", error)
