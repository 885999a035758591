"""A trainer as a process: opens the network, leads or stands by, and writes what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer import run_dirs
from peer.checkpointing import Checkpointer
from peer.disk import FileDisk, write_durably
from peer.inquiries import held_hashes, validate
from peer.known_peers import KnownPeers
from peer.lan import announce_on_lan
from peer.launch import (
    ANNOUNCE_S,
    Node,
    best_first,
    has_portable_optimizer,
    plan_of,
    steps_to_train,
)
from peer.leader import Leader
from peer.members import Standing
from peer.observe import Observations
from peer.on_demand import take_wish
from peer.places import refuse_another_run
from peer.publish import Status
from peer.quorum import Quorum
from peer.report import ReportWriter, final_report, step_line
from peer.restoring import Order
from peer.resume import SavedStates
from peer.take_over import parent_of, source_of, take_over
from peer.trainer import Trainer
from peer.training import StepResult
from swarm.config import RunConfig, canonical_bytes
from swarm.data import build_dataset
from swarm.data.dataset import Dataset
from swarm.data.tokenizer import Tokenizer
from swarm.errors import StorageError, SwarmError, TransportError
from swarm.events import EventLog, read_status, write_status
from swarm.model import build_pipeline
from swarm.net.channel import Channel, Message, Method
from swarm.net.identity import Identity
from swarm.net.link import (
    MAX_ADDRESSES,
    MAX_LINK_CHARS,
    farthest_first,
    format_link,
    group_by_peer,
)
from swarm.net.links import Links
from swarm.net.records import leader_key
from swarm.placement import MovePolicy
from swarm.tasks import TaskSet, unless
from swarm.terms import Record, new_incarnation
from swarm.wire.frames import no_tensors
from swarm.words import clean, mapping

log = logging.getLogger(__name__)
COME_S = 1.0  # in which peers come back by themselves
LOOK_S = 10.0  # between two looks for those that have not
STATUS_S = 0.5
SAVE_AGAIN_S = 30.0  # until the last checkpoint could be written
FAREWELL_S = 3.0


class LeaderProcess:
    """One trainer that leads a run. `config` must be stamped (see `peer.launch.stamp`).

    `start_with` is how many replicas each stage waits for before the first step (one, if left
    out). With `resume`, a run directory or a checkpoint, the run goes back to that state or, if it
    is of another run, begins with it; with `accept_loss` also without a majority of trainers.
    `moves` says when peers move (`Leader`). `say` gets lines for people. `on_link`, `on_step` and
    `show` (the status, twice a second) are for whoever watches.
    """

    leader_type = Leader  # what leads a term; one that keeps books may take its place

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        identity: Identity,
        *,
        steps: int | None = None,
        report: Path | None = None,
        start_with: Mapping[int, int] | None = None,
        deadline_s: float | None = None,
        on_link: Callable[[str], None] = lambda link: None,
        on_step: Callable[[StepResult], None] = lambda result: None,
        show: Callable[[Mapping[str, Any]], None] = lambda status: None,
        cache_dir: Path | None = None,
        lan: bool = False,
        bootstrap: Sequence[str] = (),
        resume: Path | None = None,
        accept_loss: bool = False,
        moves: MovePolicy | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self.config, self.run_dir, self.identity = config, run_dir, identity
        self.num_steps = steps_to_train(config, steps)
        self.start_with = dict(start_with or {})
        self.deadline_s = deadline_s
        self.pipeline = build_pipeline(config)
        self.observations = Observations(uuid.uuid4().hex, lambda: self._shown)
        self.events = EventLog(run_dir / "events.jsonl", listen=self.observations.event)
        self.report = ReportWriter(report, config.run_id)
        self.status = Status(config.run_id, config.run.name, self.num_steps, self.pipeline)
        self._on_link, self._on_step, self._show = on_link, on_step, show
        self._cache_dir, self._lan = cache_dir, lan
        self._bootstrap, self._resume, self._say = tuple(bootstrap), resume, say
        self._trainer: Trainer[dict[str, Any]] | None = None
        self._accept_loss, self._moves = accept_loss, moves
        self._addresses: dict[str, tuple[str, ...]] = group_by_trainer(bootstrap)
        self._shown: Mapping[str, Any] = self.status.as_dict()  # the status as last built
        self._gathered = False  # all that `start_with` asks for have been there

    @property
    def goes_back(self) -> bool:
        """Whether `resume` is still to be carried out."""
        asked = self._resume is not None
        return asked and (self._trainer is None or self._trainer.goes_back)

    async def run(
        self, *, listen: Sequence[str], announce: Sequence[str] = ()
    ) -> dict[str, Any] | None:
        """Lead, or stand by, until the last step is committed; returns the final report, or None
        when another trainer led to the end.

        Raises SwarmError for what a person must mend. Cancellation stops at once; what is
        committed stays on disk.
        """
        self._prepare_directory()
        async with contextlib.AsyncExitStack() as stack:
            dataset = await asyncio.to_thread(build_dataset, self.config, self._cache_dir)
            stack.callback(dataset.close)
            disk = FileDisk(self.run_dir / "trainer")
            stack.callback(disk.close)
            stack.callback(self.report.close)
            stack.callback(self.events.close)
            self._begin_status()
            stack.callback(self._write_status)
            stack.push(self._note_failure)
            await asyncio.to_thread(self._lay_out)
            saved = SavedStates(self.run_dir, self.config, self.pipeline, say=self._say)
            order = await self._go_back(disk.vote.committed, saved, dataset.tokenizer)
            stack.callback(self.identity.release)
            node = await Node.open(
                self.identity, listen=listen, announce=announce, bootstrap=self._bootstrap
            )
            stack.push_async_callback(node.close)
            node.directory.prefer(self.config.run_id, self.config.run.trainers)
            self._trainer = trainer = self._make_trainer(node, disk, dataset, saved, order)
            stack.push_async_callback(trainer.links.aclose)
            stack.push_async_callback(trainer.aclose)
            tasks = TaskSet()
            stack.push_async_callback(tasks.aclose)
            known = KnownPeers(self.run_dir)
            tasks.spawn(self._announce(node), "announce")
            tasks.spawn(self._keep_status(trainer, known), "status")
            tasks.spawn(self._look_for_peers(node, trainer, known), "look for peers")
            trainer.links.serve()
            await stack.enter_async_context(self._on_lan(node))
            self._write_status()  # so that whoever starts it again finds the port that is told now
            self._on_link(self.status.link)
            led = await unless(node.transport.lost, trainer.run())
            if led is None:  # nobody could reach this process again
                remedy = "start again: the run goes on from here"
                raise TransportError("the network daemon has died", remedy)
            final = led.result()
            if final is None:
                self.status.finish_elsewhere(trainer.steps_elsewhere)
                self.events.emit("finished", steps=trainer.steps_elsewhere)
            return final

    def _lay_out(self) -> None:
        """Once, before anybody is led: checkpoints and moves ask where replicas wait meanwhile."""
        for stage in range(self.pipeline.num_stages):
            self.pipeline.layout(stage)

    def _begin_status(self) -> None:
        """From now on the status is that of this life; until it has a link, the former's stands
        in it, for it says at which port peers look for us."""
        former = read_status(self.run_dir / "status.json") or {}
        self.status.link = clean(mapping(former.get("run")).get("link"), MAX_LINK_CHARS)
        self._write_status()

    def _note_failure(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, SwarmError):
            self.status.state, self.status.reason = "failed", str(error)

    def _make_trainer(
        self,
        node: Node,
        disk: FileDisk,
        dataset: Dataset,
        saved: SavedStates,
        order: Order | None,
    ) -> Trainer[dict[str, Any]]:
        run_id, me = self.config.run_id, self.identity.peer_id
        links = Links(
            node.transport,
            run_id,
            new_incarnation(me),
            {
                "config": Method(self._give_config, no_tensors),
                "status": Method(self.observations.answer_status, no_tensors),
                "observe": Method(self.observations.answer, no_tensors),
            },
            on_close=lambda channel: trainer.on_channel_closed(channel),
        )
        self.status.link = format_link(run_id, farthest_first(best_first(node.transport.addresses)))
        self.events.emit("run", id=run_id, name=self.config.run.name, link=self.status.link)
        checkpointer = Checkpointer(
            self.config,
            self.pipeline,
            self.run_dir,
            tokenizer=dataset.tokenizer,
            parent=self.status.parent,
            note=lambda **facts: self.events.emit("checkpoint", **facts),
        )

        def make_leader() -> Leader:
            leader = self.leader_type(
                replace(plan_of(self.config), num_steps=self.num_steps),
                self.pipeline,
                dataset,
                quorum,
                seed=self.config.run.seed,
                same_numerics=not has_portable_optimizer(self.config),
                moves=self._moves,
                probe=self._note,
                saved=saved,
            )
            leader.links = links
            return leader

        async def lead(leader: Leader) -> dict[str, Any]:
            self.status.lead(leader)
            return await self._lead(trainer, leader, checkpointer)

        quorum = Quorum(
            self.config.run.trainers,
            me,
            disk,
            addresses=lambda peer: self._addresses.get(peer, ()),
            say=self._say,
        )
        trainer = Trainer(
            links,
            quorum,
            make_leader,
            lead,
            on_role=self._on_role,
            order=order,
            accept_loss=self._accept_loss,
        )
        return trainer

    async def _go_back(
        self, record: Record | None, saved: SavedStates, tokenizer: Tokenizer | None
    ) -> Order | None:
        """What `--resume` means, or is to be gone on from without the trainer's disk knowing of it.
        `record`: the newest that it knows."""
        order, alone = None, len(self.config.run.trainers) <= 1 or self._accept_loss
        resume = source_of(self._resume, record, self.run_dir, alone=alone)
        if resume is not None:
            order = await asyncio.to_thread(
                take_over,
                resume,
                self.run_dir,
                self.config,
                self.pipeline,
                saved,
                self._say,
                record,
                alone=alone,
                tokenizer=tokenizer,
            )
            origin = await order(record)  # to refuse before anybody is asked for a term
            write_durably(self.run_dir / "run.json", canonical_bytes(self.config))
            self._say(f"resuming from step {origin.step}")
        self.status.parent = parent_of(self.run_dir)
        return order

    def _on_role(self, text: str) -> None:
        if not text.startswith("leading"):
            self.status.stand_by(text)
        if text.startswith(("going back", "giving")):
            self._say(text)
        log.info("%s", text)

    def _prepare_directory(self) -> None:
        """Make the run's directory; refuse one that holds another run. Where it is to go back, it
        is this run's only from then on: a refusal leaves none behind."""
        path = self.run_dir / "run.json"
        data = canonical_bytes(self.config)
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot use {self.run_dir}: {error.strerror}",
                "choose another directory with --dir",
            ) from None
        refuse_another_run(self.run_dir, self.config)
        if self._resume is None:
            run_dirs.has_any(self.run_dir)  # they can be looked for, should a stage be lost
            write_durably(path, data)

    # ---- leading --------------------------------------------------------------------------------

    async def _await_peers(self, leader: Leader) -> None:
        """Until every stage has as many replicas as asked for."""
        wanted = {k: self.start_with.get(k, 1) for k in range(leader.pipeline.num_stages)}
        while True:
            leader.wake.clear()
            present = Counter(
                member.stage
                for member in leader.members
                if member.standing in (Standing.READY, Standing.SERVING)
            )
            if all(present[stage] >= count for stage, count in wanted.items()):
                return
            if leader.fatal is not None:
                raise leader.fatal
            await leader.wake.wait()

    async def _lead(
        self, trainer: Trainer[dict[str, Any]], leader: Leader, checkpointer: Checkpointer
    ) -> dict[str, Any]:
        status = self.status
        # Not when the run goes back because a stage was lost: there may be fewer than at first.
        if not self._gathered and (leader.record is None or leader.record.restores):
            await self._await_peers(leader)
        self._gathered = True
        status.state, status.reason = "training", ""
        began = time.monotonic()
        while leader.next_step < self.num_steps and not self._out_of_time(began):
            result = await leader.train_step()
            await self._between_steps(leader, checkpointer, result)
            status.note_step(result)
            self.report.step(result)
            self._on_step(result)
            self.events.emit("step", **step_line(result))
        wall_s = time.monotonic() - began
        hashes = await self._save_last(leader, checkpointer)
        final = {
            "run_id": self.config.run_id,
            **final_report(
                self.pipeline.key_order,
                hashes,
                steps=leader.next_step,
                tokens=status.tokens,
                wall_s=wall_s,
                boundaries=status.boundaries(),
                leader_per_token=status.leader_per_token,
            ),
        }
        status.finish()
        self.report.finish(final)
        self.events.emit("finished", sha256=final["sha256"], steps=final["steps"])
        await self._farewell(trainer, leader)
        return final

    async def _save_last(self, leader: Leader, checkpointer: Checkpointer) -> list[dict[str, str]]:
        """Write the state that the run ends with; its hashes. The replicas alone have it until
        then, so they are kept as long as it cannot be had or written; if there is a deadline, the
        first try is the last."""
        hashes, status = await held_hashes(leader), self.status
        while True:
            wished = take_wish(self.run_dir)  # who asked waits for one that comes after that
            if (checkpointer.has(leader) and not wished) or await checkpointer.take(leader):
                return hashes
            if self.deadline_s is not None:
                return hashes
            status.state, status.reason = "saving", "waiting until the last checkpoint is written"
            await asyncio.sleep(SAVE_AGAIN_S)
            status.state, status.reason = "training", ""
            await leader.restoring.until_held()

    def _out_of_time(self, began: float) -> bool:
        return self.deadline_s is not None and time.monotonic() - began > self.deadline_s

    async def _between_steps(
        self, leader: Leader, checkpointer: Checkpointer, result: StepResult
    ) -> None:
        """Validation and checkpoints, at the state after a commit."""
        done, config = result.step + 1, self.config
        every = config.validation.every
        if every and done % every == 0:
            self.status.state, why = "validating", {}
            try:
                result.validation_loss = await validate(leader)
            except SwarmError as error:
                why = {"reason": str(error)}
            self.status.state = "training"
            self.events.emit("validation", step=result.step, loss=result.validation_loss, **why)
        every = config.checkpoint.every
        due = every > 0 and done % every == 0
        if take_wish(self.run_dir) or due:
            await checkpointer.take(leader)

    async def _farewell(self, trainer: Trainer[dict[str, Any]], leader: Leader) -> None:
        """Tell replicas and other trainers that the run is over; wait a little for them to go."""
        leader.admission.finished = True
        for member in leader.members:
            leader.tell(member.incarnation, "finish", {})
        others = [each for each in self.config.run.trainers if each != self.identity.peer_id]
        term, steps = leader.term, leader.next_step
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(
                    *(trainer.say_finished(other, term, steps) for other in others)
                )
                while leader.members.by_name:
                    leader.wake.clear()
                    await leader.wake.wait()

    # ---- what others see ------------------------------------------------------------------------

    def _note(self, point: str, **facts: Any) -> None:
        self.events.probe(point, **facts)
        self.observations.probe(point, facts)

    @contextlib.asynccontextmanager
    async def _on_lan(self, node: Node) -> AsyncIterator[None]:
        """Found by `swarm-peer --lan` meanwhile, if asked for."""
        if not self._lan:
            yield
            return
        announcement = await announce_on_lan(self.config.run_id, node.transport.addresses)
        try:
            yield
        finally:
            await announcement.close()

    async def _announce(self, node: Node) -> None:
        """Keep our address in the directory, and learn those of the other trainers."""
        key = leader_key(self.config.run_id)
        while True:
            await node.announce(key)
            for signer, record in (await node.directory.lookup(key)).items():
                addresses = record.get("addresses")
                if signer in self.config.run.trainers and isinstance(addresses, list):
                    self._addresses[signer] = tuple(str(each) for each in addresses[:MAX_ADDRESSES])
            await asyncio.sleep(ANNOUNCE_S)

    async def _look_for_peers(
        self, node: Node, trainer: Trainer[dict[str, Any]], known: KnownPeers
    ) -> None:
        """As long as nobody has come: enter the directory of those who were here last."""
        while known.addresses:
            await asyncio.sleep(COME_S)
            if trainer.leader is not None and not trainer.leader.members.by_name:
                with contextlib.suppress(SwarmError):
                    await node.directory.add_peers(known.addresses)
                    await node.announce(leader_key(self.config.run_id))
                await asyncio.sleep(LOOK_S)

    async def _keep_status(self, trainer: Trainer[dict[str, Any]], known: KnownPeers) -> None:
        while True:
            if trainer.leader is not None:
                known.note({each.incarnation: each.addresses for each in trainer.leader.members})
            self._write_status()
            self._show(self._shown)
            await asyncio.sleep(STATUS_S)

    def _write_status(self) -> None:
        self.events.flush()
        self._shown = self.status.as_dict()
        write_status(self.run_dir / "status.json", self._shown)

    async def _give_config(self, channel: Channel, message: Message) -> Message:
        return Message({"config": canonical_bytes(self.config)})


def group_by_trainer(addresses: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Addresses by the peer id they end in."""
    return {peer: tuple(where) for peer, where in group_by_peer(addresses).items()}
