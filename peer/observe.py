"""What a leader and a replica tell whoever looks on: a dashboard, or anybody else who asks.

One method, `observe`, that only reads. A stranger may call it, so it must cost the run nothing: the
leader answers with the status it has built anyway (`peer.publish`), with what is new in a bounded
ring of events, and with a few of the last microbatches; who asks too often is refused. So it is
with `status`, for who wants nothing else. A replica answers how its time was spent, which it
samples ten times a second; nothing is measured for it in the path of a microbatch.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from swarm.errors import RefusedError
from swarm.net.channel import Channel, Message

if TYPE_CHECKING:
    from peer.host import Host
    from peer.member import Member

MAX_EVENTS = 2048  # kept
EVENTS_PER_ANSWER = 256
MAX_ROWS = 1500  # replicas in an answer: a frame's header holds 65,536 values
MAX_LOSSES = 60
NUM_SAMPLES = 64
SAMPLE_EVERY_S = 0.1
MIN_INTERVAL_S = 0.4  # between two answers to one asker
ANSWERS_PER_S = 20.0  # to all askers together
MAX_ASKERS = 256
ACTIVITIES = ("compute", "average", "move", "transfer", "wait")


def version() -> str:
    """Of the program this process runs."""
    try:
        return importlib.metadata.version("swarm-parallel")
    except importlib.metadata.PackageNotFoundError:
        return ""


class Allowance:
    """Who may be answered now: bounded per asker and in all. Raises RefusedError otherwise."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._tokens, self._filled_at = ANSWERS_PER_S, clock()

    def take(self, asker: str) -> None:
        """Count one answer to `asker`."""
        now = self._clock()
        if now - self._last.get(asker, -MIN_INTERVAL_S) < MIN_INTERVAL_S:
            raise RefusedError("asked too often")
        earned = (now - self._filled_at) * ANSWERS_PER_S
        self._tokens, self._filled_at = min(self._tokens + earned, ANSWERS_PER_S), now
        if self._tokens < 1:
            raise RefusedError("asked by too many")
        self._tokens -= 1
        self._last.pop(asker, None)
        self._last[asker] = now
        while len(self._last) > MAX_ASKERS:
            del self._last[next(iter(self._last))]


class Observations:
    """What one life of a leader has to show. `status()` gives the status as last built.

    `life` tells its counts from those of an earlier one.
    """

    def __init__(
        self,
        life: str,
        status: Callable[[], Mapping[str, Any]],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.life = life
        self._status, self._clock = status, clock
        self._events: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._samples: deque[dict[str, Any]] = deque(maxlen=NUM_SAMPLES)
        self._issued: dict[tuple[int, int], float] = {}  # by step and index
        self._sampled_at = 0.0
        self._allowance, self._status_allowance = Allowance(), Allowance()

    def event(self, line: Mapping[str, Any]) -> None:
        """Something happened; `line` is as readers of `events.jsonl` see it."""
        self._num_events += 1
        self._events.append((self._num_events, line))

    def probe(self, point: str, facts: Mapping[str, Any]) -> None:
        """A point of `Leader(probe=…)`: some microbatches become samples."""
        if point == "issue":
            self._issued[facts["step"], facts["index"]] = self._clock()
        elif point == "record":
            self._issued = {k: t for k, t in self._issued.items() if k[0] > facts["step"]}
        elif point == "acknowledged":
            now = self._clock()
            began = self._issued.pop((facts["step"], facts["index"]), None)
            if began is not None and abs(now - self._sampled_at) >= SAMPLE_EVERY_S:
                self._sampled_at = now
                self._samples.append(
                    {
                        "t": round(began, 3),
                        "wall_s": round(now - began, 4),
                        "step": facts["step"],
                        "index": facts["index"],
                        "route": list(facts["route"]),
                    }
                )

    async def answer(self, channel: Channel, message: Message) -> Message:
        """`observe`: `life`, `status`, the `events` after `after` (of this life), `samples`."""
        self._allowance.take(channel.peer)
        return Message(self.body(message.body))

    async def answer_status(self, channel: Channel, message: Message) -> Message:
        """`status`: the whole of it."""
        self._status_allowance.take(channel.peer)
        return Message(dict(self._status()))

    def body(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a question, whatever that holds."""
        after = asked.get("after")
        if not isinstance(after, int) or asked.get("life") != self.life:
            after = 0
        status = dict(self._status())
        rows, losses = status.get("replicas", ()), status.get("losses", ())
        status["replicas"] = [dict(row) for row in islice(rows, MAX_ROWS)]
        status["losses"] = list(losses)[-MAX_LOSSES:]
        new = [(number, line) for number, line in self._events if number > after]
        new = new[:EVENTS_PER_ANSWER]
        return {
            "life": self.life,
            "version": version(),
            "status": status,
            "events": [dict(line) for _, line in new],
            "after": new[-1][0] if new else max(min(after, self._num_events), 0),
            "samples": list(self._samples),
        }


class Activity:
    """How a process spends its time, sampled, in seconds since it began."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)

    async def watch(self, host: Host) -> None:
        """Sample the replicas of this process until cancelled."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            now = loop.time()
            self.seconds[host.activity] += now - last
            last = now


class PeerObservations:
    """What a replica shows of itself."""

    def __init__(self, member: Member, activity: Activity, name: str) -> None:
        self._member, self._activity, self._name = member, activity, name
        self._allowance = Allowance()

    async def answer(self, channel: Channel, message: Message) -> Message:
        """`observe`: `stage`, `step`, `version`, `name`, `seconds` by activity."""
        self._allowance.take(channel.peer)
        server = self._member.server
        return Message(
            {
                "stage": server.stage if server else -1,
                "step": self._member.step,
                "version": version(),
                "name": self._name,
                "seconds": {key: round(each, 2) for key, each in self._activity.seconds.items()},
            }
        )


def activity_of(*, settled: bool, averaging: bool, computing: bool, sending: bool) -> str:
    """The one thing a replica is doing, of several the one that keeps others waiting most."""
    wants: Sequence[tuple[bool, str]] = (
        (not settled, "move"),
        (averaging, "average"),
        (computing, "compute"),
        (sending, "transfer"),
    )
    return next((name for is_so, name in wants if is_so), "wait")
