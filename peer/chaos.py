"""`swarm chaos`: a swarm of real processes under faults, held against the same run in one process.

The schedule is `peer.chaos_plan`'s; this starts the swarm, strikes, replaces what has ended, lets
the run stop at a step boundary when its time is over, and then answers three questions: did every
committed step count every microbatch exactly once (`peer.witness`), do the parameters have the
sha256 of the baseline, and what did the faults cost. Speed without faults is that of the same
swarm before the first fault and after the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peer.chaos_plan import (
    ENDS_LEADER,
    ENDS_PEER,
    OF_LEADER,
    Candidate,
    Fault,
    Kind,
    calm,
    schedule,
    victim,
)
from peer.chaos_report import Chaos, Struck, summary, table
from peer.local import LEADER, LocalSwarm
from peer.streams import forgive_lost_lines
from peer.witness import (
    WITNESSED_LEADER,
    WITNESSED_PEER,
    audit,
    longest_stall,
    records_on_disk,
)
from swarm.config import RunConfig
from swarm.errors import ConfigError, StageFailedError, SwarmError
from swarm.net.identity import load_identity
from swarm.tasks import TaskSet

SAMPLE_S = 2.0
FRESH_S = 1.5
POLL_S = 0.1
DRAIN_S = 10.0
OVERTIME_S = 180.0  # for the last step, the final hashes, and whoever comes back


class WitnessedSwarm(LocalSwarm):
    """A local swarm whose processes keep books."""

    leader_target = WITNESSED_LEADER
    peer_target = WITNESSED_PEER


class ChaosRun:
    """One swarm under one schedule. Use `await run()` once."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        peers: Mapping[int, int],
        seconds: float,
        faults: Sequence[Fault],
        say: Callable[[str], None] = print,
        **options: Any,
    ) -> None:
        self.run_dir, self.seconds, self.faults, self._say = run_dir, seconds, faults, say
        calm_s = calm(seconds)
        self.result = Chaos(calm_until_s=calm_s, calm_from_s=seconds - calm_s)
        self.swarm = WitnessedSwarm(
            config,
            run_dir,
            peers=peers,
            deadline_s=seconds,
            drain_s=DRAIN_S,
            threads=1,
            device="cpu",
            say=say,
            on_step=self._on_step,
            **options,
        )
        self.extra_records: list[dict[str, Any]] = []
        self._protected = "0a"
        self._peer_ids: dict[str, str] = {}
        self._tasks = TaskSet()
        self._leader_up = asyncio.Event()
        self._leader_up.set()
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> Chaos:
        """Train under faults until the time is over. Raises SwarmError when the run failed, and
        StageFailedError when it came to no end."""
        swarm, result = self.swarm, self.result
        try:
            await swarm.start()
            await self._training()
            result.began_at = time.time()
            self._spawn(self._strike_all(), "faults")
            sampling = self._spawn(self._sample(), "memory")
            try:
                async with asyncio.timeout(self.seconds + OVERTIME_S):
                    result.report = await self._until_over()
            except TimeoutError:
                status = swarm.status()
                raise StageFailedError(
                    f"the run did not end: step {status.get('step')}, {status.get('reason')}",
                    f"see {self.run_dir}",
                ) from None
            result.ended_at = time.time()
            sampling.cancel()
            return result
        finally:
            await self._tasks.aclose()
            result.unexpected_ends += [
                f"{process.name}: {process.how_it_ended()}"
                for process in swarm.processes.values()
                if process.code and not process.expected_to_end
            ]
            await swarm.stop()

    async def _until_over(self) -> dict[str, Any]:
        """The leader's report; raises what a task of ours failed with."""
        over = asyncio.ensure_future(self.swarm.wait())
        failed = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait((over, failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            return await over
        finally:
            over.cancel()
            failed.cancel()

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._tasks.spawn(coroutine, name)

        def ended(done: asyncio.Task[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self._failure = self._failure or error
                self._failed.set()

        task.add_done_callback(ended)
        return task

    async def _training(self) -> None:
        """Until it trains, or has: a few short steps may be over between two looks."""
        while self.swarm.status().get("state") not in ("training", "finished"):
            self.swarm.raise_if_failed()
            await asyncio.sleep(POLL_S)

    @property
    def _now_s(self) -> float:
        return time.time() - self.result.began_at

    # ---- faults ---------------------------------------------------------------------------------

    async def _strike_all(self) -> None:
        for fault in self.faults:
            await asyncio.sleep(max(0.0, fault.at_s - self._now_s))
            await self._strike(fault)

    async def _strike(self, fault: Fault) -> None:
        """Wait until it may strike, strike, and leave what follows to a task."""
        waited = False
        while self._now_s < self.result.calm_from_s:
            name, why = None, ""
            if self._is_fresh():
                name, why = victim(fault, self._candidates())
                if name is not None or fault.kind in OF_LEADER:
                    break
            waited = True
            await asyncio.sleep(POLL_S)
        else:
            return  # its time is over
        self.result.postponed += waited
        self.result.faults[fault.kind.value] += 1
        of_leader = _strikes_leader(fault.kind)
        who = " and ".join(each for each in (LEADER if of_leader else "", name or "") if each)
        self._say(f"{self._now_s:7.1f} s  {fault.kind.value:20} {who}  ({why})")
        swarm = self.swarm
        struck = Struck(fault.kind.value, who, self._now_s, of_leader=of_leader)
        self.result.struck.append(struck)
        if fault.kind in ENDS_LEADER:
            self._leader_up.clear()
            (swarm.stop_leader if fault.kind is Kind.LEADER_LEAVE else swarm.kill_leader)()
            self._spawn(self._restart_leader(fault, struck), "restart of the leader")
        if name is not None and fault.kind in ENDS_PEER:
            (swarm.stop_peer if fault.kind is Kind.LEAVE else swarm.kill_peer)(name)
            self._spawn(self._replace(name, fault, struck), f"replacement of {name}")
        elif fault.kind not in ENDS_LEADER:
            swarm.freeze(name or LEADER)
            self._spawn(self._thaw(name or LEADER, fault.hold_s, struck), f"thaw of {who}")

    async def _thaw(self, name: str, hold_s: float, struck: Struck) -> None:
        await asyncio.sleep(hold_s)
        self.swarm.thaw(name)
        struck.until_s = self._now_s

    async def _restart_leader(self, fault: Fault, struck: Struck) -> None:
        await asyncio.sleep(fault.hold_s)
        self._note_leave(LEADER, fault, await self.swarm.ended(LEADER))
        self.extra_records += records_on_disk(self.run_dir)
        await self.swarm.restart_leader(deadline_s=max(1.0, self.seconds - self._now_s))
        self._leader_up.set()
        struck.until_s = self._now_s

    async def _replace(self, name: str, fault: Fault, struck: Struck) -> None:
        self._note_leave(name, fault, await self.swarm.ended(name))
        await asyncio.sleep(fault.hold_s)
        await self._leader_up.wait()
        self.result.joins += 1
        await self.swarm.add_peer(self.swarm.processes[name].stage)
        if not struck.of_leader:
            struck.until_s = self._now_s

    def _note_leave(self, name: str, fault: Fault, code: int) -> None:
        if fault.kind in (Kind.LEAVE, Kind.LEADER_LEAVE) and code != 0:
            self.result.unclean_leaves.append(f"{name}: exit code {code}")

    # ---- who is there ---------------------------------------------------------------------------

    def _is_fresh(self) -> bool:
        """Whether the leader lives, is not frozen and tells of this moment."""
        status = self.swarm.status()
        return (
            self._leader_up.is_set()
            and not self.swarm.processes[LEADER].frozen
            and status.get("state") == "training"
            and time.time() - float(status.get("updated_at") or 0.0) < FRESH_S
        )

    def _candidates(self) -> Iterator[Candidate]:
        status = self.swarm.status()
        serving = {
            str(row["replica"]).partition("#")[0]
            for row in status.get("replicas", [])
            if row["standing"] == "serving" and row["step"] == status["step"]
        }
        for name, process in self.swarm.processes.items():
            if name == LEADER or process.stage is None or process.expected_to_end:
                continue
            takes_part = process.alive and not process.frozen and self._peer_id(name) in serving
            yield Candidate(name, process.stage, takes_part, name == self._protected)

    def _peer_id(self, name: str) -> str:
        if name not in self._peer_ids:
            path = self.swarm.processes[name].data_dir / "identity.key"
            if not path.exists():
                return ""
            self._peer_ids[name] = load_identity(path).peer_id
        return self._peer_ids[name]

    # ---- what is seen ---------------------------------------------------------------------------

    def _on_step(self, step: Mapping[str, Any]) -> None:
        self.result.steps.append((time.time() - self.result.began_at, int(step["tokens"])))

    async def _sample(self) -> None:
        while True:
            for name in (LEADER, self._protected):
                process = self.swarm.processes.get(name)
                if process is not None and process.alive:
                    mib = _resident_mib(process.pid)
                    self.result.memory.setdefault(name, []).append((self._now_s, mib))
            await asyncio.sleep(SAMPLE_S)


def _strikes_leader(kind: Kind) -> bool:
    return kind in OF_LEADER or kind in ENDS_LEADER


def _resident_mib(pid: int) -> float:
    """Memory of a process without its daemon; 0 when it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def run_chaos(
    path: Path,
    *,
    minutes: float,
    seed: int,
    peers: str | None,
    every_s: float,
    directory: Path | None,
) -> bool:
    """`swarm chaos`. Whether nothing was lost, nothing counted twice, the bits are equal, who was
    asked to leave did so in order, and nobody else ended."""
    from peer.claims import local_trainer, stamped
    from peer.commands import importing
    from peer.interrupt import run_loop
    from peer.local import parse_peers
    from peer.places import fresh_directory
    from swarm.config import load_config

    forgive_lost_lines()
    config = load_config(path)
    refuse_what_rounds(config)
    default = dict.fromkeys(range(config.model.stages), 2)
    counts = default if peers is None else parse_peers(peers)
    seconds = 60 * minutes
    faults, calm_s = schedule(seed, seconds, every_s), calm(seconds)
    if not faults:
        raise ConfigError(
            f"{minutes:g} minutes have no room for a fault",
            f"give it more --minutes (the first and last {calm_s:g} s have none), or a smaller "
            "--every",
        )
    trainer = local_trainer(config)
    with importing(config, 1) as server:
        config = stamped(config, trainer.peer_id)
        run_dir = fresh_directory(config, directory)
        run = ChaosRun(
            config,
            run_dir,
            peers=counts,
            seconds=seconds,
            faults=faults,
            identity_path=trainer.path,
            claimed=True,
            server=server,
        )
        print(f"{len(faults)} faults in {minutes:g} minutes, seed {seed}; files in {run_dir}")
        run_loop(run.run())
    books = audit(
        run_dir,
        num_steps=int(run.result.report["steps"]),
        num_stages=config.model.stages,
        num_microbatches=config.batch.microbatches,
        extra_records=run.extra_records,
    )
    print(f"now the baseline of {books.steps} steps", flush=True)
    facts = summary(
        run.result,
        books,
        baseline_sha256(config, books.steps),
        seed=seed,
        stall=longest_stall(run_dir, run.result.began_at, run.result.ended_at),
    )
    print(table(facts))
    print(json.dumps(facts), flush=True)
    ends = run.result.unclean_leaves + run.result.unexpected_ends
    passed = bool(facts["equal"]) and books.clean and not ends
    if passed and not run.result.struck:
        raise SwarmError(
            f"nothing was struck, so nothing is shown (steps: {books.steps})",
            "give every stage a second replica, and the run [schedule] steps beyond its first "
            f"{calm_s:g} s, which have no faults",
        )
    return passed


def refuse_what_rounds(config: RunConfig) -> None:
    """Raises ConfigError for settings with which no swarm has the bits of one process (I6)."""
    from peer.launch import what_rounds

    if rounded := what_rounds(config):
        raise ConfigError(
            f"chaos compares all bits with one process, and this run rounds: {', '.join(rounded)}",
            'set the codecs in [wire] to "float32" and update.accumulate to "float64"',
        )


def baseline_sha256(config: RunConfig, num_steps: int, cache_dir: Path | None = None) -> str:
    """The sha256 that one process ends with, with one thread, as the peers have."""
    from peer.baseline import Baseline
    from peer.launch import be_exact, plan_of, whole_model
    from swarm.data import build_dataset

    be_exact("cpu", 1)
    with contextlib.closing(build_dataset(config, cache_dir)) as dataset:
        oracle = Baseline(
            plan_of(config),
            whole_model(config),
            dataset,
            config.optimizer,
            accumulate=config.update.accumulate,
        )
        for _ in oracle.steps(num_steps):
            pass
    return str(oracle.report()["sha256"])


def check_result(passed: bool) -> None:
    """Raises SwarmError, and with it an exit code, when the run was not as it must be."""
    if not passed:
        raise SwarmError(
            "the run under faults was not exact, or not all ended as they should",
            "the lines above say how",
        )
