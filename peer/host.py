"""The replicas of one process: one per stage that it serves, all on one device.

Each is a `Member` with an incarnation, a ledger and channels of its own: to everybody else two
replicas that happen to share a peer id, so nothing in the step protocol knows of this. Transport,
device queue and memory are shared; a microbatch may pass through both.

So a move to another stage is a join and a polite leave. The new replica fetches its state while
the old one goes on serving, is taken in like any joiner, and once a commit names it the old one
asks to go: nothing is replayed, and whatever happens half way leaves a swarm in which some replicas
have joined or left. Where memory does not hold both, the old one goes first. Whose move gets no
further for too long gives it up and stays what it was; how long it takes in all does not matter.

A leader may have a peer hold a second stage (`swarm.placement.chain`): one more replica, which the
peer gives up before it moves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from peer.member import Member
from peer.observe import ACTIVITIES
from peer.orders import MoveOrder
from swarm.errors import JoinError
from swarm.net.links import Links
from swarm.tasks import TaskSet

log = logging.getLogger(__name__)
MOVE_S = 900.0  # for more of a download, or for commits that name the new replica
HAND_OVER_S = 60.0  # one attempt at leaving; repeated, for what it waits for may take long
RETRY_S = 1.0


class Host:
    """The members of one process.

    `make(links, stage)` builds one (None: the leader chooses the stage), `links` are those of the
    process, `lives` is told the incarnations that live here, `name_life()` names the next one.
    """

    def __init__(
        self,
        make: Callable[[Links, int | None], Member],
        links: Links,
        lives: set[str],
        name_life: Callable[[], str],
        *,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._make, self._links, self._lives, self._name_life = make, links, lives, name_life
        self._say = say
        self._serving: dict[Member, asyncio.Task[None]] = {}
        self._ending: dict[Member, asyncio.Task[None]] = {}  # serve no more, and are not closed yet
        self._moving: asyncio.Task[None] | None = None
        self._tasks = TaskSet()
        self._changed = asyncio.Event()

    @property
    def members(self) -> list[Member]:
        """Those that serve or fetch a state, in order of arrival."""
        return list(self._serving)

    @property
    def stages(self) -> list[int]:
        return [each.server.stage for each in self._serving if each.server is not None]

    @property
    def activity(self) -> str:
        """What this process does at this moment, for those who look on."""
        doing = {each.activity for each in self._serving}
        return next((name for name in ACTIVITIES if name in doing), ACTIVITIES[-1])

    def begin(self, stages: Iterable[int | None]) -> None:
        """Serve these stages; None is one that the leader chooses."""
        for stage in stages:
            self._begin(stage)

    async def run(self) -> None:
        """Until no replica is left here: the run is over, or all have left.

        Raises JoinError for what time cannot mend.
        """
        while self._serving or self._moving is not None:
            self._changed.clear()
            for member, task in list(self._serving.items()):
                if task.done():
                    await self._end(member)
                    self._raise_if_it_must(member, task)
            if self._serving or self._moving is not None:
                await self._changed.wait()

    def _raise_if_it_must(self, member: Member, task: asyncio.Task[None]) -> None:
        """What ends one replica ends the process, unless it was to help or replace another."""
        try:
            task.result()
        except JoinError as error:
            if not ((member.replaces or member.second) and self._serving):
                raise
            log.info("cannot serve another stage: %s", error)
        except Exception as error:  # a defect, or no memory: those that serve go on
            if not ((member.replaces or member.second) and self._serving):
                raise
            log.error("serving another stage ended: %s: %s", type(error).__name__, error)

    def _begin(self, stage: int | None, replaces: str = "") -> Member:
        incarnation = self._name_life()
        member = self._make(self._links.another_life(incarnation, {}), stage)
        member.replaces, member.on_move = replaces, self._on_move
        self._lives.add(incarnation)
        task = self._tasks.spawn(member.run(), f"serve {stage}")
        task.add_done_callback(lambda _: self._changed.set())
        self._serving[member] = task
        self._changed.set()
        return member

    async def _end(self, member: Member) -> None:
        """It has left, or gives up. Idempotent; if this is cancelled, `aclose` does the rest."""
        task = self._serving.pop(member, None)
        if task is None:
            return
        self._ending[member] = task
        await self._close(member, task)

    async def _close(self, member: Member, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._lives.discard(member.links.incarnation)
        await member.links.aclose()
        await member.aclose()
        self._ending.pop(member, None)
        self._changed.set()

    # ---- moving ---------------------------------------------------------------------------------

    def _on_move(self, member: Member, order: MoveOrder) -> str:
        """The leader wants `member` to serve another stage. Returns why not, or an empty text."""
        if member.pinned:
            return "this peer was started for its stage"
        if self._moving is not None:
            return "this peer moves already"
        if order.stage in self.stages or order.stage >= member.pipeline.num_stages:
            return f"there is nothing to move to in stage {order.stage}"
        if member.memory_bytes is not None and order.memory_bytes > member.memory_bytes:
            return f"not enough memory for stage {order.stage}"
        if order.also:
            self._say(f"holding stage {order.stage} as well: {order.reason}")
            self._begin(order.stage).second = True
            return ""
        self._say(f"moving to stage {order.stage}: {order.reason}")
        self._moving = self._tasks.spawn(self._move(member, order), f"move to {order.stage}")
        self._moving.add_done_callback(self._moved)
        return ""

    def _moved(self, _: asyncio.Task[None]) -> None:
        self._moving = None
        self._changed.set()

    async def _move(self, old: Member, order: MoveOrder) -> None:
        assert old.serves is not None
        moved = old.serves, asyncio.get_running_loop().time()
        for each in self.members:
            if each.second:
                await self._leave(each)
        if not order.beside:
            await self._leave(old)
            self._begin(order.stage).left = moved
            return
        new = self._begin(order.stage, old.links.incarnation)
        new.left = moved
        await self._arrival(new)
        if new.took_part.is_set():
            await self._leave(old)
            self._say(f"serving stage {order.stage}")  # the last thing said was of the other one
        elif old in self._serving and not old.finished.is_set():
            log.info("gave up moving to stage %d", order.stage)
            await self._end(new)

    async def _arrival(self, new: Member) -> None:
        """Until a commit names it, it has ended, or it got no further within `MOVE_S`. The step
        that may be its first takes as long as it takes."""
        arrives = self._tasks.spawn(new.took_part.wait(), "arrives")
        ends = (arrives, self._serving[new])
        try:
            while True:
                before = new.reached
                await asyncio.wait(ends, timeout=MOVE_S, return_when=asyncio.FIRST_COMPLETED)
                halts = new.reached == before and not new.awaits_commit
                if any(each.done() for each in ends) or halts:
                    return
        finally:
            arrives.cancel()

    async def _leave(self, member: Member) -> None:
        """Until the leader lets it go, or it is gone otherwise."""
        while member in self._serving and not member.finished.is_set():
            if await member.drain(HAND_OVER_S):
                break
            await asyncio.sleep(RETRY_S)
        await self._end(member)

    # ---- the end --------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> bool:
        """All leave politely; see `Member.drain`. Whether the leader has let all of them go."""
        if self._moving is not None:
            self._moving.cancel()
        gone = await asyncio.gather(*(each.drain(seconds) for each in self.members))
        return bool(gone) and all(gone)

    async def aclose(self) -> None:
        """End every replica here at once. The device is its owner's to close."""
        await self._tasks.aclose()
        for member in self.members:
            await self._end(member)
        for member, task in list(self._ending.items()):
            await self._close(member, task)

    def abort(self) -> None:
        """As the end of the process would."""
        self._tasks.abort()
        for member in (*self.members, *self._ending):
            member.abort()
            member.links.abort()
