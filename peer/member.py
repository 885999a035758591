"""A volunteer's peer in a run: join a leader, take a stage, fetch its state, serve, come back.

Losing the leader is no reason to exit: the state stays, and the member joins again with it when
`peer.finding` has found one. Each phase is told to `say`, one line for people.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from peer.calls import count, names
from peer.commits import Commits, Prepared
from peer.evaluations import Evaluations
from peer.finding import RETRY_S, NotYetError, apply, join_leader, pause_s
from peer.joining import CatchUp
from peer.measure import StageFacts, stage_facts
from peer.observe import activity_of
from peer.orders import MoveOrder, Orders
from peer.slots import MAX_SLOTS
from peer.snapshots import Donor
from peer.stage_server import Probe, StageServer, no_probe
from swarm.averaging.policy import UpdatePolicy
from swarm.compute import Compute, Kind, Timed
from swarm.delayed_state import State, new_state
from swarm.errors import JoinError, RefusedError, StageFailedError, SwarmError, WireError
from swarm.model.stage import ModelPipeline
from swarm.net.channel import Channel, Message, Method
from swarm.net.link import MAX_ADDRESSES, farthest_first
from swarm.net.links import Links, peer_of
from swarm.optim import OptimizerSettings
from swarm.placement import estimate_memory, least_slots, slots_that_fit
from swarm.terms import Record
from swarm.wire.boundaries import LOSSLESS, BoundaryCodecs
from swarm.wire.frames import no_tensors

log = logging.getLogger(__name__)


class Member:
    """One replica's life in one run.

    `find_leader()` gives candidates (incarnation or peer id, addresses) to dial, best first.
    `stage` None means that the leader chooses. `benchmark_s` bounds the first estimate of the
    stage's time here (0: none is made). `speed` and `memory_bytes` are the device's
    (`peer.measure`), which `sharers` replicas may come to share; who is `pinned` has its stage from
    a person. `slots` None: as many as fit once the stage is known (`swarm.placement.memory`), with
    `afab` no limit. The device is its owner's to close.
    """

    orders_type = (
        Orders  # what carries out a leader's orders; one that keeps books may take its place
    )

    def __init__(
        self,
        links: Links,
        pipeline: ModelPipeline,
        compute: Compute,
        policy: UpdatePolicy,
        optimizer: OptimizerSettings,
        trainers: Sequence[str],
        find_leader: Callable[[], Awaitable[Sequence[tuple[str, Sequence[str]]]]],
        *,
        num_microbatches: int,
        stage: int | None = None,
        accumulate: str = "float64",
        codecs: BoundaryCodecs = LOSSLESS,
        slots: int | None = None,
        afab: bool = False,
        kept_bytes: int = 1 << 30,
        device: str = "cpu",
        numerics: str = "",
        benchmark_s: float = 0.0,
        speed: float | None = None,
        memory_bytes: int | None = None,
        sharers: int = 1,
        pinned: bool = False,
        probe: Probe = no_probe,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.links, self.pipeline, self.compute, self.policy = links, pipeline, compute, policy
        self.optimizer, self.trainers, self._find_leader = optimizer, trainers, find_leader
        self.num_microbatches, self.stage, self.accumulate = num_microbatches, stage, accumulate
        self.codecs = codecs
        self.slots = None if afab else slots or least_slots(pipeline.num_stages)
        self.sharers, self._counts_slots = sharers, slots is None
        self.kept_bytes, self.device, self.probe, self.say = kept_bytes, device, probe, say
        self.numerics, self.benchmark_s = numerics, benchmark_s
        self.speed, self.memory_bytes, self.pinned = speed, memory_bytes, pinned
        self.replaces = ""  # the incarnation in this process that leaves once this one serves
        self.second = False  # beside another in this process
        self.left: tuple[int, float] | None = None  # the stage it moved from, and when
        self.on_move: Callable[[Member, MoveOrder], str] = lambda *_: "this peer does not move"
        self.serves: int | None = None  # the stage it was given
        self.facts: StageFacts | None = None
        self.took_part = asyncio.Event()  # a commit has named it
        self._passed_over = 0  # commits that did not, though it served
        self.server: StageServer | None = None
        self.commits: Commits | None = None
        self.orders: Orders | None = None
        self.donor: Donor | None = None
        self.catching_up: CatchUp | None = None
        self.leader: Channel | None = None
        self.finished = asyncio.Event()
        self.settled = False  # it serves, and fetches no state
        self.has_served = False  # it has been settled before
        self.random = random.Random()  # spreads retries and donors; tests seed it
        links.methods.update(
            {
                "roster": Method(self._roster, no_tensors),
                "finish": Method(self._finish, no_tensors),
                "refetch": Method(self._refetch, no_tensors),
            }
        )

    async def run(self) -> None:
        """Serve until the leader says the run is finished (or until cancelled).

        Raises JoinError only for what time cannot mend: another run, another version, a stage
        that does not exist or cannot be built here.
        """
        loop = asyncio.get_running_loop()
        since = loop.time()  # it looks for the leader, or for a state
        while not self.finished.is_set():
            trouble = ""
            try:
                candidates = await self._find_leader()
                channel, position = await join_leader(
                    self.links, candidates, self.trainers, self._join
                )
                try:
                    await self._catch_up(channel, position)
                    try:
                        await self._stay(channel)
                    finally:
                        since = loop.time()
                except RefusedError as error:  # the leader is there, the state is not
                    trouble = f"cannot serve yet: {error.message}"
                    raise
                finally:
                    if channel.ended is not None:  # however long it has fetched a state by now
                        since = loop.time()
            except JoinError:
                raise
            except NotYetError as error:
                trouble = f"cannot serve yet: {error.message}"
            except SwarmError as error:
                log.debug("not in the swarm: %s", error)
            if self.finished.is_set():
                return
            lost = "lost the leader, looking for it" if self.server else "looking for the leader"
            self.say(trouble or lost)
            pause = pause_s(loop.time() - since)
            await self._finished_within(pause * self.random.uniform(0.8, 1.2))

    async def _join(self, channel: Channel) -> Mapping[str, Any]:
        wanted = self.server.stage if self.server else self.stage
        application = {
            "stage": wanted,
            "addresses": farthest_first(self.links.transport.addresses),
            "slots": self._told_slots,
            "device": self.device,
            "numerics": self.numerics,
            "pinned": self.pinned,
            "replaces": self.replaces,
            "second": self.second,
            **self._moved(),
            "speed": self.speed,
            "memory_bytes": self.memory_bytes,
        }
        body = await apply(channel, application)
        self._note_roster(body.get("roster"))
        if self.server is None:
            why = str(body.get("why", ""))[:200]
            if why:
                self.say(f"taking stage {count(body.get('stage'))}: {why}")
            await self._build(count(body.get("stage")))
        self.leader, self.settled = channel, False
        return body

    def _moved(self) -> dict[str, Any]:
        """For a leader that did not see it."""
        if self.left is None:
            return {}
        stage, at = self.left
        return {"left": stage, "left_ago_s": asyncio.get_running_loop().time() - at}

    async def _build(self, stage: int) -> None:
        if stage >= self.pipeline.num_stages:
            raise WireError("a stage that does not exist")
        self.serves = stage
        self.say(f"building stage {stage}")

        def build(device: str) -> State:
            return new_state(
                lambda: self.pipeline.build_stage(stage, device),
                self.optimizer,
                ahead=self.policy.ahead,
                accumulate=self.accumulate,
                device=device,
            )

        try:
            made: Timed[State] = await self.compute.run(Kind.BACKGROUND, lambda: build(self.device))
            state = made.value
        except StageFailedError as error:
            raise _cannot_build(stage, error) from error
        if self.benchmark_s > 0:
            self.facts = await stage_facts(
                self.compute, state.live[-1], self.pipeline, stage, self.benchmark_s
            )
            if self._counts_slots:
                self.slots = self._fitting_slots(self.facts, state.live[-1].layout.total)
        self.server = StageServer(
            stage,
            state,
            self.pipeline,
            self.compute,
            num_microbatches=self.num_microbatches,
            codecs=self.codecs,
            ahead=self.policy.ahead,
            slots=self.slots,
            kept_bytes=self.kept_bytes,
            probe=self.probe,
        )
        self.server.links = self.links
        self.commits = Commits(self.server, self.policy)
        self.orders = self.orders_type(self.commits, self.trainers)
        self.donor = Donor(self.server, self.commits)
        self.catching_up = CatchUp(
            self.server,
            self.commits,
            self.links,
            self.random,
            say=self.say,
            first_weights=lambda: build("cpu").tensors(),  # a device may not hold two of it
        )
        self.commits.on_commit = self._committed
        self.commits.on_invalid = self.donor.forget
        self.orders.on_move = lambda order: self.on_move(self, order)
        self.links.methods.update(
            {
                **self.server.methods(),
                **Evaluations(self.server).methods(),
                **self.orders.methods(),
                **self.donor.methods(),
            }
        )

    def _fitting_slots(self, facts: StageFacts, parameters: int) -> int | None:
        """As many as this replica's part of the device's memory has room for."""
        state = estimate_memory(
            parameters,
            optimizer=self.optimizer.name,
            accumulate=self.accumulate,
            steps_in_flight=self.policy.ahead.steps_in_flight,
            shared_bytes=self.pipeline.shared_bytes,
        )
        part = None if self.memory_bytes is None else self.memory_bytes // self.sharers
        # Kept answers lie in the host's memory, which other devices do not compute in.
        kept = 0 if self.device.startswith("cuda") else self.kept_bytes
        return slots_that_fit(self.slots, part, state.total + kept, facts.activation_bytes)

    @property
    def _told_slots(self) -> int:
        return MAX_SLOTS if self.slots is None else min(self.slots, MAX_SLOTS)

    def _committed(self, record: Record, prepared: Prepared) -> None:
        assert self.donor is not None
        assert self.server is not None
        assert self.catching_up is not None
        self.donor.keep_gradient(record, prepared)
        self.catching_up.committed(record)
        if self.links.incarnation in record.members.get(self.server.stage, ()):
            self.took_part.set()
        elif self.settled:
            self._passed_over += 1

    # ---- the state ------------------------------------------------------------------------------

    async def _catch_up(self, channel: Channel, position: Mapping[str, Any]) -> None:
        """Reach the current step's state, then say so, until the leader agrees."""
        assert self.server is not None
        assert self.commits is not None
        assert self.catching_up is not None
        self.settled = False
        while not self.finished.is_set():
            if position.get("finished") is True:
                self.finished.set()
                return
            self.commits.fell_behind.clear()
            record, step = _record(position), count(position.get("step"))
            donors = names(position.get("donors"))
            await self._unless_finished(self.catching_up.reach(step, record, donors))
            if await self._ready(channel, position := {}):
                self.settled = self.has_served = True
                self.say(f"serving stage {self.server.stage}")
                return
            await asyncio.sleep(0.01)

    async def _ready(self, channel: Channel, position: dict[str, Any]) -> bool:
        """Tell the leader where this state stands; `position` is filled with where the run does."""
        assert self.catching_up is not None
        donors = self.catching_up.donors
        noted, donors.to_tell = donors.to_tell, []
        body: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "following": self.catching_up.following,
            "slots": self._told_slots,
            "noted": noted[:8],
        }
        if self.facts is not None:
            body["facts"] = self.facts.body()
        position.update((await channel.call("ready", body)).body)
        if position.get("ready") is not True:
            return False
        self.catching_up.check(_record(position))
        self.catching_up.arrived(count(position.get("step")))
        return True

    async def _unless_finished(self, work: Coroutine[Any, Any, object]) -> None:
        """Do `work`, but not beyond the end of the run."""
        task, over = (asyncio.ensure_future(each) for each in (work, self.finished.wait()))
        try:
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
        finally:
            for each in (task, over):
                each.cancel()
            await asyncio.gather(task, over, return_exceptions=True)

    async def _stay(self, channel: Channel) -> None:
        """Serve while the leader is there; fetch the state again when a commit was missed."""
        assert self.commits is not None
        while not self.finished.is_set() and channel.ended is None:
            waits = [
                asyncio.ensure_future(each.wait())
                for each in (channel.closed, self.finished, self.commits.fell_behind)
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
            if self.commits.fell_behind.is_set() and channel.ended is None:
                self.say("catching up")
                position: dict[str, Any] = {}
                if not self.commits.valid:  # at step 0 the leader could not tell by the step
                    await self._catch_up(channel, await self._join(channel))
                elif await self._ready(channel, position):
                    self.commits.fell_behind.clear()
                else:
                    await self._catch_up(channel, position)

    @property
    def step(self) -> int:
        return self.server.parts.ledger.step if self.server else 0

    @property
    def reached(self) -> tuple[float, bool]:
        """How far it has ever come: the share of a state that was here, and whether it served."""
        share = self.catching_up.most_share if self.catching_up is not None else 0.0
        return share, self.has_served

    @property
    def awaits_commit(self) -> bool:
        """Whether it serves a leader, and the step under way may be the first that it is part of:
        for the one before that it may have come too late."""
        there = self.leader is not None and self.leader.ended is None
        return self.settled and there and self._passed_over < 2

    @property
    def activity(self) -> str:
        """What it does at this moment, for those who look on."""
        server, orders = self.server, self.orders
        averaging = orders is not None and orders.averaging
        computing = server is not None and server.compute.working
        return activity_of(
            settled=self.settled,
            # Beside the next step's work it keeps nobody waiting.
            averaging=averaging and not (computing and self.policy.ahead.steps_in_flight > 1),
            computing=computing,
            sending=self.links.sending,
        )

    @property
    def epoch(self) -> int:
        """Of the record that led to this state."""
        record = self.commits.record if self.commits else None
        return record.epoch if record else 0

    # ---- what the leader tells ------------------------------------------------------------------

    def _from_trainer(self, channel: Channel) -> None:
        if channel.peer not in self.trainers:
            raise RefusedError("only the run's trainers give orders")

    async def _roster(self, channel: Channel, message: Message) -> None:
        self._from_trainer(channel)
        self._note_roster(message.body.get("roster"))

    def _note_roster(self, roster: object) -> None:
        if not isinstance(roster, dict) or len(roster) > 100_000:
            raise WireError("a roster that makes no sense")
        self.links.addresses = {
            peer_of(name): tuple(str(address)[:200] for address in addresses[:MAX_ADDRESSES])
            for name, addresses in roster.items()
            if isinstance(addresses, list)
        }

    async def _finish(self, channel: Channel, message: Message) -> None:
        self._from_trainer(channel)
        self.finished.set()

    async def _refetch(self, channel: Channel, message: Message) -> None:
        """The leader found this state to differ from its twins'."""
        self._from_trainer(channel)
        if self.commits is not None:
            self.commits.start_anew()
            if self.catching_up is not None:
                self.catching_up.distrust_first_weights()

    async def drain(self, seconds: float) -> bool:
        """Leave politely: no part in the next step, and go once this one is committed.

        Returns after `seconds` in any case; what is then uncommitted is replayed by others. True:
        it may go, and `run` ends. While the leader is away, the next one is waited for and asked,
        by whoever has served: others have nothing to hand over.
        """
        ends_at = asyncio.get_running_loop().time() + seconds
        asked: Channel | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                while not self.finished.is_set():
                    leader = self.leader
                    there = leader if leader is not None and leader.ended is None else None
                    # Before it is settled, a leader does not know what it holds.
                    knows = self.settled or not self.has_served
                    if there is not None and there is not asked and knows:
                        asked = there
                        with suppress(SwarmError):  # it is lost, or ends as it is asked
                            await self._hand_over(there, ends_at)
                        continue
                    if there is None and not self.has_served:
                        break
                    await self._finished_within(RETRY_S[0])
        return self.finished.is_set()

    async def _hand_over(self, leader: Channel, ends_at: float) -> None:
        """Until this leader lets us go, or is lost. Raises SwarmError if it does not answer."""
        within_s = ends_at - asyncio.get_running_loop().time()
        answer = await leader.call("leave", {"within_s": within_s})
        if answer.body.get("now") is True:
            self.finished.set()
            return
        where = f"leaving stage {self.serves}" if self.serves is not None else "leaving"
        self.say(f"{where}; waiting for: {str(answer.body.get('reason', ''))[:100]}")
        await self._unless_finished(leader.closed.wait())

    async def _finished_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.finished.wait()
        except TimeoutError:
            return

    async def aclose(self) -> None:
        if self.donor is not None:
            self.donor.close()
        if self.catching_up is not None:
            await self.catching_up.tasks.aclose()
        if self.server is not None:
            await self.server.aclose()

    def abort(self) -> None:
        if self.donor is not None:
            self.donor.close()
        if self.catching_up is not None:
            self.catching_up.tasks.abort()
        if self.server is not None:
            self.server.abort()


def _cannot_build(stage: int, error: StageFailedError) -> JoinError:
    """Too little memory, another version of a package, an optimizer that does not suit the model:
    what a person must see instead of a peer that tries for ever."""
    why, remedy = error.message, "free memory, or try another --stage or --device"
    if isinstance(error.__cause__, SwarmError):
        why, remedy = error.__cause__.message, error.__cause__.remedy
    return JoinError(f"stage {stage} cannot be built here: {why}", remedy)


def _record(position: Mapping[str, Any]) -> Record | None:
    """The newest commit, of a position as the leader tells it."""
    return Record.unpack(position["record"]) if position.get("record") else None
