"""Going back to a checkpoint: when a leader must, and how replicas get the state.

A stage whose newest state nobody holds cannot go on (DESIGN, "One step"). The leader waits for a
peer in that stage, and for holders that may only have lost their connection; when none of them
comes it gives its term up with `GoBack`, and its trainer opens a new epoch with the newest
checkpoint. The record that opens it names the fingerprint of every stage's state.

From that record on until the next one the leader is a donor: it hands out the checkpoint's states,
cut as this run is cut, by the same messages as a replica does. First weights need no donor: every
replica makes them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from peer import snapshots
from peer.calls import count
from peer.members import Member, Standing
from peer.snapshots import Description, Snapshot, chunks, digest
from swarm.errors import DataError, RefusedError, SwarmError
from swarm.net.channel import CallFailedError, Channel, Message, Method
from swarm.terms import Record
from swarm.wire.codecs import encode
from swarm.wire.frames import no_tensors

if TYPE_CHECKING:
    from peer.leader import Leader

log = logging.getLogger(__name__)
LOOK_S = 1.0
HOLDERS = (Standing.SERVING, Standing.READY, Standing.EXPELLED)
GRACE_S = 15.0  # for a holder that has only lost its connection
START_GRACE_S = 45.0  # after a leader's start: replicas look for it at growing intervals


@dataclass(frozen=True, slots=True)
class Origin:
    """A state that an epoch may begin with: `step` is the next one to train.

    `checkpoint` is the sha256 of its manifest, empty for the first weights. `fingerprints` are per
    stage of this run. `notes` are lines for people: what newer ones were passed over, and why.
    """

    step: int
    checkpoint: str = ""
    fingerprints: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


Order = Callable[[Record | None], Awaitable[Origin]]
"""To go back: says to what, once the run's newest record is known. Raises DataError."""


class AwayError(DataError):
    """The newest checkpoint is not here, and an older one would be no remedy."""


class Saved(Protocol):
    """The checkpoints a trainer has at hand."""

    async def newest(self, record: Record | None) -> Origin:
        """The newest state that a run whose newest record is `record` can go back to, checked.

        Raises AwayError when another trainer has a newer one, DataError when none can be read.
        """

    async def highest_epoch(self) -> int:
        """Of the checkpoints there, be they on the way or not: what is trained from now on has to
        come after them. Raises DataError when there is no looking."""

    async def state(self, record: Record, stage: int) -> Snapshot:
        """A stage's state at the checkpoint that `record` opened its epoch with.

        Raises DataError when it is not here, or not what it was.
        """


class GoBack(SwarmError):
    """The newest state of a stage is lost: this term ends, the next begins with `origin`."""

    def __init__(self, stage: int, origin: Origin) -> None:
        super().__init__(f"nobody holds the state of stage {stage}")
        self.stage, self.origin = stage, origin


class StandAside(SwarmError):
    """This term ends, since another trainer has the checkpoint that the run has to go back to."""


class Restoring:
    """The restoring half of a `Leader`. Without `saved` it waits for holders for ever."""

    def __init__(self, leader: Leader, saved: Saved | None) -> None:
        self.leader, self.saved = leader, saved
        self.waiting_for: int | None = None  # the stage whose state nobody holds
        self.trouble = ""  # why there is no going back, for people
        self._lost_since: dict[int, float] = {}
        self._empty_since: dict[int, float] = {}
        self._states: dict[int, asyncio.Task[tuple[Snapshot, bytes]]] = {}
        self._logged: dict[str, str] = {}  # what failed last, by what it was
        self._failed: set[int] = set()  # stages whose state is not here after all

    def methods(self) -> dict[str, Method]:
        """What joiners may call at a leader, as at any donor."""
        return {
            "snapshot": Method(self._snapshot, no_tensors),
            "chunk": Method(self._chunk, no_tensors),
            "gradient": Method(self._gradient, no_tensors),
        }

    # ---- when to go back ------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look, until the run is over, whether some stage's state is lost. A look that fails is
        followed by another: nobody else would go back."""
        leader, loop = self.leader, asyncio.get_running_loop()
        patient_until = loop.time() + START_GRACE_S
        while self.saved is not None:
            await asyncio.sleep(LOOK_S)
            if leader.admission.finished:
                return  # replicas go one after the other, and nobody has to come for them
            if not self._restored():
                self._forget()
            early = loop.time() < patient_until and not leader.has_committed
            stage = self._look(loop.time(), early=early)
            if self._needs_a_peer(loop.time()) and not early:
                self._fill()
            if stage is None or early:
                continue
            try:
                origin = await self.saved.newest(leader.record)
            except AwayError as error:
                self.trouble = str(error)
                if leader.quorum.alone:
                    continue
                leader.fail(StandAside(f"stage {stage} has lost its state, and {error}"))
                return
            except SwarmError as error:
                self.trouble = str(error)
                continue
            except Exception as error:  # no memory, or no disk: another look may do
                self._log_once("a look at lost stages failed", error)
                self.trouble = repr(error)
                continue
            leader.fail(GoBack(stage, origin))
            return

    def _fill(self) -> None:
        """Order somebody to an empty stage: no commit comes before. That this fails is no reason
        not to look for a checkpoint."""
        try:
            self.leader.rebalancing.consider()
        except Exception as error:
            self._log_once("no move to an empty stage", error)

    def _log_once(self, what: str, error: Exception) -> None:
        if self._logged.get(what) != repr(error):
            log.error("%s: %r", what, error)
        self._logged[what] = repr(error)

    def _needs_a_peer(self, now: float) -> bool:
        """Whether a stage has had nobody for a while: not even who could be given its state, unless
        it has had nothing of it for longer than a joiner counts."""
        stages = range(self.leader.pipeline.num_stages)
        until = self.leader.rebalancing.counts_until
        there = {
            member.stage
            for member in self.leader.members
            if member.standing is not Standing.JOINING or now < until(member)
        }
        empty = [stage for stage in stages if stage not in there]
        self._empty_since = {stage: self._empty_since.get(stage, now) for stage in empty}
        return any(now - since >= GRACE_S for since in self._empty_since.values())

    async def until_held(self) -> None:
        """Until somebody of every stage has said that it holds the newest state: before the end of
        the run, where no step would wait for it. Raises what ends the term, such as `GoBack`."""
        leader = self.leader
        while not self.all_held:
            if leader.fatal is not None:
                raise leader.fatal
            leader.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await leader.wake.wait()

    @property
    def all_held(self) -> bool:
        """Whether somebody of every stage holds the newest state."""
        return not self.not_held

    @property
    def not_held(self) -> list[int]:
        """The stages of which nobody holds the newest state, or has not said so yet."""
        stages = range(self.leader.pipeline.num_stages)
        return [stage for stage in stages if not self._is_held(stage)]

    def _is_held(self, stage: int) -> bool:
        leader = self.leader
        there = leader.members.of_stage(stage, *HOLDERS)
        held = any(member.confirmed >= leader.next_step for member in there)
        return held or self.serves(stage)

    def _look(self, now: float, *, early: bool) -> int | None:
        """The first stage that has lacked its state for long and has a peer to give it to. While
        it is `early`, who holds it may just not have found the leader: nobody is told of a loss."""
        leader = self.leader
        lost = [k for k in range(leader.pipeline.num_stages) if self._is_lost(k)]
        self._lost_since = {stage: self._lost_since.get(stage, now) for stage in lost}
        first = lost[0] if lost and not early else None
        if first is not None and first != self.waiting_for:
            leader.probe("paused", stage=first, step=leader.next_step)
        if first is None:
            self.trouble = ""
        self.waiting_for = first
        for stage, since in self._lost_since.items():
            if now - since >= GRACE_S and leader.members.of_stage(stage):
                return stage
        return None

    def _is_lost(self, stage: int) -> bool:
        leader = self.leader
        if leader.next_step == 0 or leader.members.of_stage(stage, *HOLDERS):
            return False
        return not self.serves(stage)

    # ---- handing it out -------------------------------------------------------------------------

    def _restored(self) -> bool:
        record = self.leader.record
        return record is not None and record.restores and record.step >= 0

    def serves(self, stage: int) -> bool:
        """Whether joiners of `stage` may fetch the run's state here."""
        return self.saved is not None and self._restored() and stage not in self._failed

    def _forget(self) -> None:
        for task in self._states.values():
            task.cancel()
        self._states.clear()

    def _joiner(self, channel: Channel) -> tuple[Member, Record]:
        member, record = self.leader.members.get(channel.incarnation), self.leader.record
        if member is None:
            raise RefusedError("join first")
        if record is None or not self.serves(member.stage):
            raise RefusedError("the run has gone on, its replicas have the state")
        return member, record

    async def _state(self, stage: int, record: Record) -> tuple[Snapshot, bytes]:
        if stage not in self._states:
            self._states[stage] = self.leader.tasks.spawn(self._read(stage, record), "restore")
        try:
            return await asyncio.shield(self._states[stage])
        except DataError as error:
            self._failed.add(stage)
            self._states.pop(stage, None)
            self.leader.probe("damaged", reason=error.message)
            raise RefusedError("the state is not here after all") from None
        except Exception:  # no memory, or no disk: who asks again has it read again
            self._states.pop(stage, None)
            raise

    async def _read(self, stage: int, record: Record) -> tuple[Snapshot, bytes]:
        assert self.saved is not None
        snapshot = await self.saved.state(record, stage)
        if snapshot.fingerprint != record.fingerprints.get(stage):
            raise DataError(f"the checkpoint's state of stage {stage} is not what it was")
        sizes = {name: tensor.numel() for name, tensor in snapshot.tensors.items()}
        digests = []
        for name, start, length in chunks(sizes, snapshots.CHUNK):
            digests.append(digest(snapshot.tensors[name][start : start + length]))
            await asyncio.sleep(0)
        return snapshot, b"".join(digests)

    async def _snapshot(self, channel: Channel, message: Message) -> Message:
        if message.body.get("release") is True:
            return Message({})
        member, record = self._joiner(channel)
        step = record.step + 1
        if message.body.get("offer") is True:
            return Message({"step": step, "copies": [step]})
        if message.body.get("step") not in (None, step):
            raise RefusedError(f"only the state of step {step} is here")
        snapshot, digests = await self._state(member.stage, record)
        described = Description(
            step,
            snapshot.updates,
            snapshot.fingerprint,
            record.pack(),
            tuple((name, tensor.numel()) for name, tensor in snapshot.tensors.items()),
            snapshots.CHUNK,
            digests,
        )
        return Message(described.body())

    async def _chunk(self, channel: Channel, message: Message) -> Message:
        member, record = self._joiner(channel)
        snapshot, _ = await self._state(member.stage, record)
        tensor = snapshot.tensors.get(str(message.body.get("name")))
        if tensor is None or count(message.body.get("step")) != record.step + 1:
            raise RefusedError("no such tensor")
        start = count(message.body.get("start"))
        chunk = tensor[start : start + snapshots.CHUNK]
        member.fetched += chunk.numel()
        if member.fetched <= sum(each.numel() for each in snapshot.tensors.values()):
            member.fetched_at = asyncio.get_running_loop().time()  # no longer what it has had once
        return Message({}, [encode(chunk, "raw")])

    async def _gradient(self, channel: Channel, message: Message) -> Message:
        """None of those are here; whoever follows learns how far the run is."""
        at = self.leader.next_step
        raise CallFailedError("refused", "a leader keeps no gradients", at=at)
