"""A whole swarm on this machine: one leader and some peers, each a real process.

What `swarm up`, `swarm demo`, the benchmarks and the process tests run. Every process has its own
libp2p identity, port (chosen by the system, on loopback) and directory under `RUN_DIR/peers/`, and
they talk only over the network: nothing but starting, stopping and looking at them is done here.
`peer.local_process` says how they are started and why nothing of them can be left behind.

Dying peers are the swarm's business, so the supervisor says so in a line and goes on; it does not
start them again. It ends with the leader, or when a peer's own mistake (no such device, no such
package) leaves a stage with nobody who could serve it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import swarm.errors
from peer.interrupt import stop_signals
from peer.local_process import ForkServer
from peer.local_table import (
    LocalProcess,
    ProcessTable,
    check_stages,
    letters,
    num_cores,
    parse_peers,
)
from peer.local_warm_up import PRELOAD, warm_up
from peer.places import is_free, tcp_ports
from swarm.config import RunConfig
from swarm.errors import ConfigError, SwarmError
from swarm.net.link import parse_link

__all__ = ["LEADER", "LOOPBACK", "WEB", "LocalProcess", "LocalSwarm", "parse_peers", "warm_up"]

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
LEADER, WEB = "leader", "web"
NO_STAGE = -1
_PORT_POLL_S = 0.05
_PORT_LIMIT_S = 15.0


class LocalSwarm(ProcessTable):
    """One leader and its peers. Use `await swarm.run()`, or start, wait and stop by hand.

    `config` is stamped (`peer.launch.stamp`) with the identity in `identity_path`. The leader
    claims it, unless this process has `claimed` it for as long as the swarm lives. `peers` is
    {stage: replicas} or a sequence of (stage, threads or None); a stage of None is `auto`.
    `resume` is a run directory or checkpoint to go on from. `second_stages`: so large a share of
    every stage's peers is to hold the next one too; all peers are the leader's to arrange then.
    `server` is one that `warm_up` began.
    `say` gets a line when a process dies, `on_step` each step's line of the report.
    """

    preload_target = PRELOAD
    leader_target = "peer.local_entry:leader"
    peer_target = "peer.local_entry:peer"
    web_target = "peer.web_entry:local_dashboard"

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        peers: Mapping[int, int] | Sequence[tuple[int | None, int | None]] | None = None,
        identity_path: Path | None = None,
        claimed: bool = False,
        steps: int | None = None,
        report: Path | None = None,
        threads: int | None = None,
        device: str = "auto",
        deadline_s: float | None = None,
        listen: Sequence[str] = LOOPBACK,
        drain_s: float = 10.0,
        cache_dir: Path | None = None,
        web: bool = False,
        resume: Path | None = None,
        second_stages: float = 0.0,
        server: ForkServer | None = None,
        say: Callable[[str], None] = print,
        on_step: Callable[[dict[str, Any]], None] = lambda step: None,
    ) -> None:
        num_stages = config.model.stages
        if peers is None:
            peers = dict.fromkeys(range(num_stages), 1)
        if isinstance(peers, Mapping):
            peers = [(stage, None) for stage in sorted(peers) for _ in range(peers[stage])]
        check_stages([stage for stage, _ in peers], num_stages)
        super().__init__(Path(run_dir), server)
        self.config = config
        self.identity_path = identity_path or self.run_dir / "trainer" / "identity.key"
        self._claimed = claimed
        self.threads = threads or max(1, num_cores() // len(peers))
        self.link = ""
        self.report: dict[str, Any] | None = None
        self._wanted = list(peers)
        self._steps, self._report_path, self._device = steps, report, device
        self._listen, self._drain_s = list(listen), drain_s
        self._deadline_s, self._cache_dir, self._web = deadline_s, cache_dir, web
        self.url = ""  # of the dashboard
        self._resume = resume  # by the leader's first life only
        self._second_stages = second_stages
        self._say, self._on_step = say, on_step
        self._linked = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._fatal: SwarmError | None = None
        self._over = asyncio.Event()

    async def run(
        self, on_start: Callable[[], None] = lambda: None, *, grace_s: float = 3.0
    ) -> dict[str, Any] | None:
        """The whole life, with this process's signals: the final report, or None if interrupted.

        The first Ctrl-C (SIGTERM, SIGHUP) stops all in order, the second kills. `on_start` is
        called once all are started. Raises what `start` and `wait` raise; nothing is left then.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        numbers: list[int] = []

        def interrupt(number: int) -> None:
            numbers.append(number)
            if len(numbers) > 1:
                self.kill()
            elif not self._stopping:
                task.cancel()

        caught = stop_signals()
        for number in caught:
            loop.add_signal_handler(number, interrupt, number)
        try:
            await self.start()
            on_start()
            return await self.wait()
        except asyncio.CancelledError:
            if not numbers:
                raise
            task.uncancel()
            return None
        finally:
            try:
                await self.stop(grace_s)
            finally:
                for number in caught:
                    loop.remove_signal_handler(number)

    async def start(self) -> None:
        """Start all; returns when every process runs (they may still be joining).

        Raises the leader's SwarmError if it fails before it has a link. Call `stop` afterwards,
        whether this succeeded, raised or was cancelled.
        """
        await self.open(self._warm_up)
        await self._start_leader(self._listen)
        await self._until_linked()
        async with asyncio.TaskGroup() as group:
            for stage, threads in self._wanted:
                group.create_task(self._start_peer(self._new_peer(stage, threads)))
        if self._web:
            await self._start_web()

    async def wait(self) -> dict[str, Any]:
        """Until the leader has finished: its report. Raises SwarmError if the run failed."""
        await self._over.wait()
        self.raise_if_failed()
        return self.report or {}

    def kill_leader(self) -> None:
        """kill -9 of the leader: the run stands still until `restart_leader`."""
        self._end_leader(self.kill_peer)

    def stop_leader(self) -> None:
        """SIGTERM of the leader: it ends in order, and the run stands still as after a kill."""
        self._end_leader(self.stop_peer)

    def _end_leader(self, end: Callable[[str], None]) -> None:
        if self.report is not None or self._over.is_set():
            return  # it has done its work
        if self._watching is not None:
            self._watching.cancel()
        end(LEADER)

    async def restart_leader(self, *, deadline_s: float | None = None) -> None:
        """Start the leader again after `kill_leader` or `stop_leader`, on its disk and at its
        address, where the peers look for it. Returns when it has a link (they may still be
        looking).

        `deadline_s` replaces the one of the former life. Raises as `start` does.
        """
        await self.ended(LEADER)
        listen = [each.partition("/p2p/")[0] for each in parse_link(self.link).addresses]
        async with asyncio.timeout(_PORT_LIMIT_S):
            # Its daemon outlives it by 1 to 3 s; nothing tells when the port is free.
            while not all(is_free(port) for each in listen for port in tcp_ports(each)):  # noqa: ASYNC110
                await asyncio.sleep(_PORT_POLL_S)
        self._linked.clear()
        self._deadline_s = deadline_s
        await self._start_leader(listen)
        await self._until_linked()

    async def add_peer(self, stage: int | None = None, threads: int | None = None) -> LocalProcess:
        """One more peer, of this stage or of one it chooses."""
        if stage is not None and not 0 <= stage < self.config.model.stages:
            raise ConfigError(f"there is no stage {stage} in this run")
        process = self._new_peer(stage, threads)
        await self._start_peer(process)
        return process

    def status(self) -> dict[str, Any]:
        """What the leader last wrote about the run (docs/operations.md); empty before that."""
        try:
            status: dict[str, Any] = json.loads((self.run_dir / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return status

    def _warm_up(self) -> ForkServer:
        return warm_up(self.config, self.threads, self.preload_target)

    async def _until_linked(self) -> None:
        linked = asyncio.ensure_future(self._linked.wait())
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((linked, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            linked.cancel()
            over.cancel()
        if not self._linked.is_set():
            self.raise_if_failed()

    async def _start_leader(self, listen: Sequence[str]) -> None:
        log = self.run_dir / "peers" / LEADER / "log"
        process = LocalProcess(LEADER, None, 1, self.run_dir / "trainer", log)
        arguments = {
            "config": self.config.model_dump(mode="json"),
            "run_dir": str(self.run_dir),
            "identity_path": str(self.identity_path),
            "claimed": self._claimed,
            "steps": self._steps,
            "report": None if self._report_path is None else str(self._report_path),
            "start_with": self._start_with(),
            "deadline_s": self._deadline_s,
            "listen": list(listen),
            "cache_dir": None if self._cache_dir is None else str(self._cache_dir),
            "second_stages": self._second_stages,
            "resume": None if self._resume is None else str(self._resume),
            "threads": 1,
        }
        self._resume = None
        await self._spawn(process, self.leader_target, arguments)
        self._watching = self._spawn_task(self._watch_leader())

    def _start_with(self) -> dict[int, int]:
        counts = dict.fromkeys(range(self.config.model.stages), 0)
        for stage, _ in self._wanted:
            if stage is not None:
                counts[stage] += 1
        return {stage: max(count, 1) for stage, count in counts.items()}

    def _new_peer(self, stage: int | None, threads: int | None) -> LocalProcess:
        """Put a peer into the table, under a name of its own."""
        number = sum(1 for each in self.processes.values() if each.stage == stage) - (stage is None)
        name = f"{'auto' if stage is None else stage}{letters(number)}"
        data_dir = self.run_dir / "peers" / name
        process = LocalProcess(name, stage, threads or self.threads, data_dir, log=data_dir / "log")
        self.processes[name] = process
        return process

    async def _start_peer(self, process: LocalProcess) -> None:
        arguments = {
            "join": self.link,
            "data_dir": str(process.data_dir),
            "stage": process.stage,
            "may_move": self._second_stages > 0,
            "device": self._device,
            "threads": process.threads,
            "listen": self._listen,
            "drain_s": self._drain_s,
            "allow_pipeline": self.config.model.pipeline,
            "pretrained": self.config.model.pretrained,
        }
        await self._spawn(process, self.peer_target, arguments)
        self._spawn_task(self._watch_peer(process))

    async def _start_web(self) -> None:
        """The dashboard: one more process, which the run does not need."""
        data_dir = self.run_dir / "web"
        process = LocalProcess(WEB, NO_STAGE, 1, data_dir, log=self.run_dir / "peers" / WEB / "log")
        arguments = {"join": self.link, "data_dir": str(data_dir), "port": None}
        await self._spawn(process, self.web_target, arguments)
        self._spawn_task(self._watch_web(process))

    async def _watch_web(self, process: LocalProcess) -> None:
        code = await self.ended(WEB)
        if not (self._stopping or self._over.is_set() or code == 0):
            self._say(f"the dashboard has ended: {process.how_it_ended()}")

    def _hear(self, process: LocalProcess, message: Mapping[str, Any]) -> None:
        if "link" in message:
            self.link = message["link"]
            self._linked.set()
        elif "url" in message:
            self.url = message["url"]
            self._say(f"dashboard: {self.url}")
        elif "say" in message:
            process.said = message["say"]
            if process.name == LEADER:
                self._say(process.said)
        elif "step" in message:
            self._on_step(message["step"])
        elif "report" in message:
            self.report = message["report"]
        elif "error" in message:
            process.error = _error_from(message["error"])

    async def _watch_leader(self) -> None:
        process = self.processes[LEADER]
        await self.ended(LEADER)
        if self.report is None and self._fatal is None:
            how = process.how_it_ended()
            self._fatal = process.error or SwarmError(f"the leader has ended: {how}")
        self._over.set()

    async def _watch_peer(self, process: LocalProcess) -> None:
        code = await self.ended(process.name)
        if self._stopping or self._over.is_set() or code == 0 or process.expected_to_end:
            return
        peers = [each for name, each in self.processes.items() if name not in (LEADER, WEB)]
        fixed = process.stage is not None and not self._second_stages
        alive = [each for each in peers if each.alive]
        left = [each for each in alive if not fixed or each.stage in (process.stage, None)]
        if not left and (process.error is not None or not alive):
            self._fatal = process.error or SwarmError(
                f"no peer is left; the last, {process.name}, ended: {process.how_it_ended()}"
            )
            self._over.set()
            return
        self._say(f"peer {process.name} has ended: {process.how_it_ended()}")
        if not left:
            self._say(
                f"stage {process.stage} has no peer left, the run waits for one: "
                f"swarm-peer --stage {process.stage} --join {self.link}"
            )

    def raise_if_failed(self) -> None:
        """Raises the SwarmError that the swarm cannot go on from, if there is one."""
        if self._fatal is not None:
            raise self._fatal


def _error_from(message: Mapping[str, Any]) -> SwarmError:
    """The child's error as one of ours, so that its exit code becomes the supervisor's."""
    kind = getattr(swarm.errors, str(message.get("type")), SwarmError)
    if not (isinstance(kind, type) and issubclass(kind, SwarmError)):
        kind = SwarmError
    return kind(str(message.get("message")), str(message.get("remedy", "")))
