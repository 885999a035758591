"""Swarms with three trainers under virtual time: leaders die, freeze, wake up, and are cut off.

python -m tests.protocol.trainers SEED           replay one seed and print what happened
python -m tests.protocol.trainers FIRST-LAST     run many, print those that fail
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import sys
import time
from typing import Any

import torch

from peer.disk import MemoryDisk
from peer.leader import Leader
from peer.quorum import Quorum
from peer.restoring import Saved
from peer.trainer import Trainer
from swarm.net.links import Links
from tests.protocol.simulated import RUN_ID, Swarm, TinyBatches, baseline, plan

TRAINERS = ("t0", "t1", "t2")
LIMIT_S = 1500.0  # of virtual time
HEAL_S = 40.0  # after this, nothing is broken any more


class TrainerSwarm(Swarm):
    """A `Swarm` whose leader is whichever of three trainers wins a term.

    `timeline` holds (seconds, action, who, more) to do regardless of where the swarm is.
    """

    def prepare(self, num_steps: int, leases: dict[str, float], timeline: list[tuple]) -> None:
        self.num_steps, self.leases, self.timeline = num_steps, leases, timeline
        self.trainer_names = list(self.trainer_ids)
        self.disks = {name: MemoryDisk() for name in self.trainer_ids}
        self.trainers: dict[str, Trainer[None]] = {}
        self.trainer_tasks: dict[str, asyncio.Task[None]] = {}
        self.records: dict[tuple[int, int], str] = {}
        self.terms: set[int] = set()
        self.done = asyncio.Event()
        self.struck: list[str] = []

    def start_trainer(self, name: str) -> None:
        self.lives[name] += 1
        transport = self.network.transport(name)
        links = Links(
            transport,
            RUN_ID,
            f"{name}#{self.lives[name]}",
            {},
            on_close=lambda channel: trainer.on_channel_closed(channel),
            silence_s=self.silence_s,
        )
        quorum = Quorum(self.trainer_ids, name, self.disks[name])
        quorum.random.seed(f"{self.seed}/{name}/{self.lives[name]}")

        def make_leader() -> Leader:
            leader = Leader(
                self.plan,
                self.pipeline,
                TinyBatches(),
                quorum,
                seed=self.seed,
                slots=self.slots,
                probe=lambda point, **facts: self.on_probe(name, point, facts),
                saved=self.saved_of(name),
            )
            leader.links = links
            return leader

        trainer: Trainer[None] = Trainer(
            links,
            quorum,
            make_leader,
            self.lead,
            lease_s=self.leases[name],
            seed=f"{self.seed}/{name}/{self.lives[name]}",
        )
        links.serve()
        self.trainers[name] = trainer
        self.trainer_tasks[name] = asyncio.get_running_loop().create_task(trainer.run(), name=name)

    def saved_of(self, name: str) -> Saved | None:
        """The checkpoints a trainer has: none here, so nobody goes back."""
        return None

    async def lead(self, leader: Leader) -> None:
        self.leader = leader
        self.terms.add(leader.term.counter)
        self.note_record(leader)
        while leader.next_step < self.num_steps:
            self.results.append(await leader.train_step())
            self.note_record(leader)
        self.leader = leader  # another that was beaten may have come between
        await self.settle()
        self.done.set()
        await asyncio.Event().wait()  # go on leading until the test ends

    def note_record(self, leader: Leader) -> None:
        record = leader.record
        if record is not None:
            known = self.records.setdefault(record.position, record.hash)
            assert known == record.hash, f"two records of step {record.step}"

    def kill_trainer(self, name: str) -> None:
        trainer = self.trainers.pop(name)
        self.trainer_tasks.pop(name).cancel()
        trainer.abort()
        trainer.links.abort()
        self.network.kill(name)

    async def disturb(self) -> None:
        """The timeline, then everything is healed and every trainer lives."""
        loop = asyncio.get_running_loop()
        for when, action, who, more in self.timeline:
            await asyncio.sleep(max(0.0, when - loop.time()))
            if self.done.is_set():
                return
            self.struck.append(action)
            if action == "kill" and who in self.trainers:
                self.kill_trainer(who)
                loop.call_later(more, self.revive, who)
            elif action == "kill_leader" and self.leader is not None:
                name = self.leader.links.incarnation.split("#")[0]
                if name in self.trainers:
                    self.kill_trainer(name)
                    loop.call_later(more, self.revive, name)
            elif action == "kill_replica" and who in self.members and self.can_lose(who):
                self.kill(who)
                loop.call_later(more, self.restart, who, int(who[1 : who.index(".")]))
            elif action == "freeze":
                self.network.freeze(who)
                loop.call_later(more, self.network.thaw, who)
            elif action == "cut":
                everybody = [*self.trainer_ids, *self.members]
                for left in who:
                    for right in everybody:
                        if right not in who:
                            self.network.cut(left, right)
                            loop.call_later(more, self.network.heal, left, right)
        await asyncio.sleep(max(0.0, HEAL_S - loop.time()))
        self.network.heal()
        for name in [*self.trainer_ids, *self.members]:
            self.network.thaw(name)
        for name in self.trainer_ids:
            self.revive(name)

    def revive(self, name: str) -> None:
        if not self.over and name not in self.trainers:
            self.start_trainer(name)

    async def main(self, num_steps: int) -> dict[str, str]:
        for name in self.trainer_ids:
            self.start_trainer(name)
        for stage, count in enumerate(self.replicas):
            for number in range(count):
                self.start_replica(f"r{stage}.{number}", stage)
        disturbing = asyncio.get_running_loop().create_task(self.disturb())
        try:
            waiting = asyncio.get_running_loop().create_task(self.done.wait())
            await asyncio.wait((waiting, *self.failing()), return_when=asyncio.FIRST_COMPLETED)
            for task in list(self.trainer_tasks.values()):
                if task.done() and not task.cancelled():
                    task.result()
            await waiting
            self.check()
            return self.hashes()
        finally:
            self.over = True
            disturbing.cancel()
            for name in list(self.members):
                await self.stop(name)
            for name, trainer in list(self.trainers.items()):
                self.trainer_tasks[name].cancel()
                await asyncio.gather(self.trainer_tasks[name], return_exceptions=True)
                await trainer.aclose()
                await trainer.links.aclose()
                await self.network.transports[name].close()

    def failing(self) -> list[asyncio.Task[None]]:
        return []

    def check_record(self, step: int) -> None:
        pass


def scenario(seed: int) -> TrainerSwarm:
    """The swarm of a seed, with its timeline."""
    r = random.Random(f"trainers/{seed}")
    replicas = [r.choice((1, 2, 2)) for _ in range(r.choice((1, 2, 3)))]
    names = [f"r{stage}.{number}" for stage, n in enumerate(replicas) for number in range(n)]
    swarm = TrainerSwarm(
        num_stages=len(replicas),
        replicas=replicas,
        seed=seed,
        plan=plan(r.choice((2, 4, 6)), 3),
        slots=r.choice((None, 1, 2)),
        latency_s=r.choice((0.0005, 0.002, 0.02)),
        seconds=r.choice(((0.05, 0.1), (0.2, 0.4))),
        trainer_ids=TRAINERS,
    )
    leases = {name: r.choice((0.5, 1.0, 5.0)) for name in TRAINERS}
    timeline: list[tuple[float, str, Any, float]] = []
    for _ in range(r.randint(1, 5)):
        action = r.choice(("kill", "kill_leader", "kill_leader", "freeze", "cut", "kill_replica"))
        who: Any = r.choice(TRAINERS if r.random() < 0.6 else names)
        if action == "kill":
            who = r.choice(TRAINERS)
        elif action == "kill_replica":
            who = r.choice(names)
        elif action == "cut":
            who = r.sample([*TRAINERS, *names], r.randint(1, len(names) + 1))
        when = r.choice((r.uniform(0.2, 2.5), r.uniform(0.2, 12.0)))
        timeline.append((when, action, who, r.choice((0.5, 3.0, 8.0, 20.0))))
    swarm.prepare(3, leases, sorted(timeline, key=lambda each: each[0]))
    return swarm


def run_seed(seed: int, swarm: TrainerSwarm | None = None) -> TrainerSwarm:
    """Run a seed to the end. AssertionError, TimeoutError or DeadlockError if it fails."""
    swarm = swarm or scenario(seed)
    expected, _ = baseline(3, swarm.plan.num_microbatches)
    try:
        result = swarm.run(3, limit_s=LIMIT_S)
        assert result["sha256"] == expected, "other parameters than the baseline"
    except BaseException as error:
        error.add_note(f"seed {seed}: replicas {swarm.replicas}, {swarm.timeline}")
        error.add_note(f"replay it: python -m tests.protocol.trainers {seed}")
        raise
    return swarm


def main(argument: str) -> None:
    torch.set_num_threads(1)
    first, _, last = argument.partition("-")
    if not last:
        logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s")
        swarm = scenario(int(first))
        try:
            print(run_seed(int(first), swarm).terms)
        finally:
            for when, who, point, facts in swarm.events:
                print(f"{when:9.3f} {who:8} {point} {facts}")
        return
    times, failed, terms = [], [], []
    for seed in range(int(first), int(last)):
        began = time.perf_counter()
        try:
            swarm = run_seed(seed)
            terms.append(len(swarm.terms))
        except BaseException as error:
            failed.append(seed)
            print(seed, type(error).__name__, str(error)[:200], getattr(error, "__notes__", []))
            if isinstance(error, KeyboardInterrupt):
                raise
        times.append(time.perf_counter() - began)
    print(
        f"{len(times)} seeds, {len(failed)} failed, median {statistics.median(times):.3f} s, "
        f"terms a seed {sum(terms) / max(len(terms), 1):.1f}, failed: {failed[:20]}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
