"""How a leader notices a replica that answers pings and does no work: its device hangs, or it lies.

A dead process is noticed by its channel. This looks at those who owe something: whoever has had
work for longer than its patience (`swarm.patience`) without anything coming back through it is
asked where it stands, which its event loop answers. A device that has finished nothing for that
long is hung, and its replica is left out of the step. Alone in its stage it is kept: nothing would
be won. A call that is overdue although no device is hung is taken from whoever holds it, with a
fence, so that nothing waits for ever for what was lost. In a run without trouble nobody is asked.

Between the first missed heartbeat and the end of a silent channel lies *suspicion*: a replica that
nothing comes from gets no new work while its stage has others, which costs nothing if it is well.
Once a step waits for suspects alone, waiting longer than it takes to compute their share again is
a loss, and they are left out of the step; they are taken back as soon as they answer, and waited
for twice as long the next time: else a step whose microbatches take longer might never end.

How often a replica was left out fades with the steps that it helps to make: in days anybody is now
and then.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm.errors import StreamClosedError, SwarmError
from swarm.net.channel import Channel
from swarm.patience import MAX_STRIKES, SUSPECT_S, patience_s, worth_waiting_s
from swarm.step import Issue, Step

if TYPE_CHECKING:
    from peer.leader import Leader

LOOK_S = 2.0
LISTEN_S = 0.25
CALM_STEPS = 20  # made without a verdict on it, for which one of a replica is forgotten
ANSWER_S = 30.0  # for what an event loop answers by itself, behind what is being sent


class Stand(NamedTuple):
    """What a replica answers about itself, and about one microbatch."""

    silent_s: float  # for which its device has finished nothing though it has work
    updating: bool
    sending: bool  # tensors wait for a line, or are on their way into one
    phase: str


class Watch:
    """Watches the replicas of a `Leader`'s step."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self._heard: dict[str, float] = {}  # when something last came of a replica that owes
        self._strikes: dict[str, int] = {}  # how often it was left out as hung
        self._alarms: dict[str, int] = {}  # how often as silent, of late
        self._alarmed: set[str] = set()  # since the last commit
        self._well: Counter[str] = Counter()  # commits it was in since the last verdict
        self.moved_at = 0.0  # when a microbatch was last issued or acknowledged
        self.suspects: set[str] = set()  # silent for longer than a heartbeat explains

    # ---- what is known --------------------------------------------------------------------------

    def gave_work(self, replica: str) -> None:
        """A call goes through it. What it owed before keeps its age."""
        self.moved_at = asyncio.get_running_loop().time()
        if self.leader.router.outstanding_of(replica) <= 1:
            self.heard(replica)

    def heard(self, replica: str) -> None:
        """Something came of it."""
        self._heard[replica] = self.moved_at = asyncio.get_running_loop().time()

    def forget(self, replica: str) -> None:
        self._heard.pop(replica, None)
        self._strikes.pop(replica, None)
        self._alarms.pop(replica, None)
        self._well.pop(replica, None)
        self.suspects.discard(replica)

    def judged(self, replica: str) -> None:
        """It is left out for a reason that counts against it for some time."""
        self._well.pop(replica, None)

    def calm(self, members: Iterable[str]) -> None:
        """A step was committed by these. Whoever was not left out in it has one alarm less, and of
        the verdicts on those that have had a part in many, one is forgotten."""
        for name in self._alarms.keys() - self._alarmed:
            self._alarms[name] -= 1
        self._alarms = {name: alarms for name, alarms in self._alarms.items() if alarms}
        self._alarmed.clear()
        for name in members:
            self._well[name] += 1
            if self._well[name] >= CALM_STEPS:
                self._well[name] = 0
                self._forgive(name)

    def _forgive(self, replica: str) -> None:
        member = self.leader.members.get(replica)
        if member is not None:
            member.hold_offs = max(0, member.hold_offs - 1)
        if self._strikes.get(replica, 0) > 1:
            self._strikes[replica] -= 1
        else:
            self._strikes.pop(replica, None)

    def patience_of(self, replica: str, *, updating: bool = False) -> float:
        rates = self.leader.router.measured()
        step = self.leader.step
        stage = step.active.get(replica) if step is not None else None
        twins = [s for name, (where, s) in rates.items() if where == stage and name != replica]
        others = [s for where, s in rates.values() if where != stage]
        own = rates[replica][1] if replica in rates else None
        strikes = self._strikes.get(replica, 0)
        return patience_s(own, twins, others, strikes=strikes, updating=updating)

    def overdue_s(self, route: Sequence[str]) -> float:
        """When a call along `route` is worth asking after, also if no device hangs."""
        router = self.leader.router
        queued = sum(
            (router.outstanding_of(name) + 1) * (router.measured_s(name) or 0.0) for name in route
        )
        return 2 * sum(self.patience_of(name) for name in route) + 10 * queued

    # ---- asking ---------------------------------------------------------------------------------

    async def ask(
        self, channel: Channel, method: str, body: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """A question whose answer needs no device. Raises SwarmError, also when none comes."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return (await channel.call(method, dict(body))).body
        except TimeoutError:
            raise StreamClosedError(f"no answer to {method} within {ANSWER_S:.0f} s") from None

    async def _stand(self, replica: str, step: Step | None, index: int = 0) -> Stand:
        """Where it stands, and with it the microbatch `index` of `step` (None: between steps)."""
        channel = self.leader.links.open_channel(replica)
        if channel is None:
            raise StreamClosedError("no connection to it")
        number = self.leader.next_step if step is None else step.number
        body = {"step": number, "index": index}
        answer = await self.ask(channel, "stand", body)
        silent_s = answer.get("silent_s")
        if not isinstance(silent_s, float) or not 0 <= silent_s < math.inf:
            raise StreamClosedError("does not say where it stands")
        return Stand(
            silent_s,
            answer.get("updating") is True,
            answer.get("sending") is True,
            str(answer.get("phase"))[:20],
        )

    async def run(self, step: Step, owing: Callable[[], Collection[str]]) -> None:
        """Look after those who owe something, until cancelled. `owing()` gives them."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            for replica in sorted(set(owing()) & step.active.keys()):
                since = self._heard.setdefault(replica, loop.time())
                if loop.time() - since > self.patience_of(replica):
                    await self._look_at(step, replica)

    async def _look_at(self, step: Step, replica: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            silent_s, updating, _, _ = await self._stand(replica, step)
        except SwarmError as error:
            self.leader.expel(step, replica, str(error))
            return
        limit_s = self.patience_of(replica, updating=updating)
        # Not hung, or not yet: it is asked again later.
        self._heard[replica] = loop.time() - limit_s / 2
        if silent_s <= limit_s or replica not in step.active:
            return
        reason = f"its device has finished nothing for {silent_s:.0f} s"
        if len(step.replicas(step.active[replica])) == 1:
            member = self.leader.members.get(replica)
            if member is not None:
                member.reason = reason
            return
        self._strikes[replica] = self._strikes.get(replica, 0) + 1
        self.judged(replica)
        self.leader.router.failed(replica, "timeout", loop.time())
        self.leader.expel(step, replica, reason)

    async def hangs(self, replica: str) -> bool:
        """Between steps, of one that has been asked something that needs its device."""
        try:
            stand = await self._stand(replica, None)
        except SwarmError:
            return False  # if its connection has ended, so has the question
        return stand.silent_s > self.patience_of(replica, updating=stand.updating)

    # ---- silence --------------------------------------------------------------------------------

    async def listen(self, step: Step) -> None:
        """Suspect those who are silent, and give them up when that is cheaper, until cancelled."""
        loop = asyncio.get_running_loop()
        looked_at = self.moved_at = loop.time()
        while True:
            await asyncio.sleep(LISTEN_S)
            now = loop.time()
            late_s, looked_at = now - looked_at - LISTEN_S, now
            if late_s > LISTEN_S:
                continue  # this process was stopped or is starved: it has not listened
            self._suspect(step)
            if not self._waits_for_suspects(step):
                continue
            for replica in sorted(self.suspects & step.active.keys()):
                twins = self._trusted_twins(step, replica)
                share = sum(replica in hops for hops in step.hops)
                rates = [self.leader.router.measured_s(twin) for twin in twins]
                limit_s = worth_waiting_s(share, [rate for rate in rates if rate is not None])
                alarms = self._alarms.get(replica, 0)
                if alarms:
                    limit_s = max(limit_s, LISTEN_S) * 2 ** min(alarms, MAX_STRIKES)
                if twins and now - self.moved_at >= limit_s:
                    self._alarms[replica] = alarms + 1
                    self._alarmed.add(replica)
                    self.leader.expel(step, replica, f"silent, and all wait for it ({share})")

    def _suspect(self, step: Step) -> None:
        leader = self.leader
        for replica in sorted(step.active):
            channel = leader.links.open_channel(replica)
            silent = channel is not None and channel.silent_s() > SUSPECT_S * channel.unevenness
            if silent and replica not in self.suspects:
                self.suspects.add(replica)
                leader.probe("suspected", step=step.number, replica=replica)
            elif not silent and replica in self.suspects:
                self.suspects.discard(replica)
                leader.wake.set()

    def _waits_for_suspects(self, step: Step) -> bool:
        """Whether the step's microbatches can only go on when a suspect answers or is left out."""
        if self.leader.is_averaged(step) or step.complete or not self.suspects:
            return False
        return not step.waiting() and all(
            self.suspects.intersection(filter(None, step.hops[index])) for index in step.open
        )

    def _trusted_twins(self, step: Step, replica: str) -> list[str]:
        there = step.replicas(step.active[replica])
        return [name for name in there if name not in self.suspects]

    async def holder(self, step: Step, issue: Issue) -> int | None:
        """Which hop an overdue call waits for: the last one that has it. None: ask again later.

        One that has counted it has answered, so the one before it is to blame. What a slow line
        still carries is not lost: if that line has died, its silence says so.
        """
        for hop in range(len(issue.route) - 1, -1, -1):
            try:
                stand = await self._stand(issue.route[hop], step, issue.index)
            except SwarmError:
                return hop
            if stand.phase == "absent":
                continue
            if stand.sending:
                return None
            if stand.phase == "counted":
                return max(hop - 1, 0)
            if stand.phase in ("forward", "backward") and stand.silent_s > 0:
                return None  # its device works at something: whether it hangs is asked elsewhere
            return hop
        return None if self.leader.links.sending else 0
