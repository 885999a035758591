"""A whole swarm of real processes on this machine: it trains exactly, and nothing outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from peer.baseline import Baseline
from peer.launch import plan_of, stamp, whole_model
from peer.local import LEADER, LocalSwarm, warm_up
from peer.local_process import ForkServer, ForkServerError
from swarm.config import RunConfig, canonical_bytes, load_config
from swarm.data import build_dataset
from swarm.errors import DeviceError, ListenError, SwarmError
from swarm.net.identity import load_identity
from tests.process import local_stand_ins
from tests.process.forks import LIMIT_S
from tests.process.forks import toml as small_toml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets and temporary files go; a short path of its own, empty in the end."""
    with tempfile.TemporaryDirectory(prefix="sl-", dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.fixture
def toml(tmp_path: Path, sockets: Path) -> Callable[[int], Path]:
    def write(steps: int) -> Path:
        return small_toml(
            tmp_path / "run.toml", steps=steps, stages=2, extra="[checkpoint]\nevery = 0\n"
        )

    return write


@pytest.fixture
def config(tmp_path: Path, toml: Callable[[int], Path]) -> Callable[[int], RunConfig]:
    identity = load_identity(tmp_path / "run" / "trainer" / "identity.key")
    return lambda steps: stamp(load_config(toml(steps)), identity.peer_id, tmp_path / "cache")


@pytest.fixture
def stand_ins(
    tmp_path: Path, config: Callable[[int], RunConfig]
) -> Callable[..., local_stand_ins.StandIns]:
    """Builds a swarm of stand-ins; keywords name other targets."""

    def build(
        peers: dict[int, int] | None = None, lines: list[str] | None = None, **targets: str
    ) -> local_stand_ins.StandIns:
        say = (lines if lines is not None else []).append
        swarm = local_stand_ins.StandIns(config(3), tmp_path / "run", peers=peers, say=say)
        for name, target in targets.items():
            setattr(swarm, f"{name}_target", f"tests.process.local_stand_ins:{target}")
        return swarm

    return build


def baseline_sha256(config: RunConfig, cache_dir: Path) -> str:
    """Computed with as many threads as the peers have: another number rounds differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dataset = build_dataset(config, cache_dir)
    baseline = Baseline(plan_of(config), whole_model(config), dataset, config.optimizer)
    for _ in baseline.steps(config.schedule.steps):
        pass
    dataset.close()
    torch.set_num_threads(threads)
    sha256: str = baseline.report()["sha256"]
    return sha256


def family(pid: int) -> list[psutil.Process]:
    """A process and all it has started, whatever their sessions."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def threads_of(pid: int) -> list[str]:
    """Their names, as the kernel lists them."""
    return [each.read_text().strip() for each in Path(f"/proc/{pid}/task").glob("*/comm")]


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    alive = [each for each in alive if each.is_running() and each.status() != "zombie"]
    assert alive == [], f"still there after {seconds} s"


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.01)


# ---- a real swarm -------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (6, 2), (8, 2)])
def test_the_peers_of_a_machine_share_its_cores(
    config: Callable[[int], RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    threads: int,
) -> None:
    monkeypatch.setattr("peer.local.num_cores", lambda: cores)
    swarm = local_stand_ins.StandIns(config(3), tmp_path / "run", peers={0: 2, 1: 1})
    assert swarm.threads == threads


def test_two_stages_train_exactly_and_leave_nothing(
    tmp_path: Path, config: Callable[[int], RunConfig], sockets: Path
) -> None:
    """And a disk that has no room for what a peer says is no reason for it to end."""
    started: list[psutil.Process] = []
    steps: list[dict[str, Any]] = []
    run = config(3)
    full_log = tmp_path / "run" / "peers" / "0a" / "log"
    full_log.parent.mkdir(parents=True)
    full_log.symlink_to("/dev/full")
    before = len(os.listdir("/proc/self/fd"))

    async def main() -> dict[str, Any] | None:
        swarm = LocalSwarm(
            run,
            tmp_path / "run",
            threads=1,
            device="cpu",
            report=tmp_path / "report.jsonl",
            cache_dir=tmp_path / "cache",
            on_step=steps.append,
        )
        async with asyncio.timeout(LIMIT_S):
            report = await swarm.run(lambda: started.extend(family(swarm.server_pid)))
        assert swarm.link.startswith(f"swarm://{run.run_id}@/ip4/127.0.0.1/tcp/")
        assert swarm.status()["state"] == "finished"
        assert {name: each.code for name, each in swarm.processes.items()} == {
            LEADER: 0, "0a": 0, "1a": 0,
        }  # fmt: skip
        return report

    report = asyncio.run(main())
    assert report is not None
    assert report["sha256"] == baseline_sha256(run, tmp_path / "cache")
    assert len({report["sha256"], *report["stages"]}) == 3
    assert report["tokens_per_s"] == report["tokens"] / report["wall_s"] > 0
    (boundary,) = report["bytes"]["boundaries"]
    assert boundary["raw_per_token"] == boundary["back_raw_per_token"] == 4 * 32  # n_embd
    assert boundary["raw_bytes"] == boundary["raw_per_token"] * report["tokens"]
    assert report["bytes"]["leader_per_token"] > 0
    assert [step["step"] for step in steps] == [0, 1, 2]
    lines = (tmp_path / "report.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert json.loads(lines[-1]) == report
    assert len(started) >= 4
    wait_until_gone(started, 0.5)
    assert list(sockets.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before
    assert "serving stage 1" in (tmp_path / "run" / "peers" / "1a" / "log").read_text()


def test_a_killed_peer_changes_nothing(
    tmp_path: Path, config: Callable[[int], RunConfig], sockets: Path
) -> None:
    run = config(20)
    killed: list[int] = []

    async def main() -> dict[str, Any] | None:
        def on_step(step: dict[str, Any]) -> None:
            if step["step"] == 5:
                swarm.kill_peer("0b")
                killed.append(swarm.processes["0b"].pid)

        swarm = LocalSwarm(
            run,
            tmp_path / "run",
            peers={0: 2, 1: 2},
            threads=1,
            device="cpu",
            cache_dir=tmp_path / "cache",
            on_step=on_step,
        )
        report = await swarm.run()
        assert swarm.processes["0b"].code == -signal.SIGKILL
        return report

    report = asyncio.run(main())
    assert killed
    assert report is not None
    assert report["steps"] == 20
    assert report["sha256"] == baseline_sha256(run, tmp_path / "cache")
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["event"] for line in events]
    assert {"expelled", "left"} & set(kinds), kinds
    assert list(sockets.iterdir()) == []


# ---- a supervisor that is interrupted or killed -------------------------------------------------


@pytest.fixture
def supervise(
    tmp_path: Path, config: Callable[[int], RunConfig]
) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], list[psutil.Process]]]]:
    """Starts a supervisor of its own; returns it, and all of its family once it has started."""
    running: list[subprocess.Popen[str]] = []

    def start(kind: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        stamped = tmp_path / "stamped.json"
        stamped.write_bytes(canonical_bytes(config(100_000)))
        command = [sys.executable, "-W", "error", "-m", "tests.process.local_stand_ins", kind]
        process = subprocess.Popen(
            [*command, str(stamped), str(tmp_path / "run")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("supervisor")
        assert process.stdout.readline().startswith("started")
        return process, family(process.pid)

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


Supervise = Callable[[str], tuple[subprocess.Popen[str], list[psutil.Process]]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything(
    supervise: Supervise, sockets: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process, processes = supervise("LocalSwarm")
    wait_for_a_step(process, tmp_path / "run")
    processes = sorted({*processes, *family(process.pid)}, key=lambda each: each.pid)
    assert sum(each.name() == "p2pd" for each in processes) == 3
    began = time.monotonic()
    os.killpg(process.pid, number)  # as a terminal does
    assert process.wait(5) == 130
    wait_until_gone(processes, 0.5)
    assert time.monotonic() - began < 5
    assert list(sockets.iterdir()) == []


def test_kill_of_the_supervisor_leaves_nothing(
    supervise: Supervise, sockets: Path, tmp_path: Path
) -> None:
    process, _ = supervise("LocalSwarm")
    wait_for_a_step(process, tmp_path / "run")
    processes = family(process.pid)
    assert sum(each.name() == "p2pd" for each in processes) == 3
    process.kill()
    process.wait()
    wait_until_gone(processes, 5)
    assert list(sockets.iterdir()) == []


def test_the_second_ctrl_c_kills(supervise: Supervise) -> None:
    process, processes = supervise("Stubborn")
    [leader] = [each for each in processes if each.name() == "swarm leader"]
    process.send_signal(signal.SIGINT)
    wait_until_gone([leader], 5)  # the first was heard, and waits a minute for the others
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    wait_until_gone(processes, 0.5)


def test_kill_of_the_fork_server_is_one_error(supervise: Supervise) -> None:
    process, _ = supervise("StandIns")
    [server] = psutil.Process(process.pid).children()
    children = server.children()
    daemons = [each for child in children for each in child.children()]
    server.kill()
    assert process.wait(5) == 1
    wait_until_gone([server, *children], 0.5)
    with contextlib.suppress(psutil.NoSuchProcess):  # unlike p2pd, they do not notice
        for daemon in daemons:
            daemon.kill()


def wait_for_a_step(process: subprocess.Popen[str], run_dir: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if json.loads((run_dir / "status.json").read_text())["step"] > 0:
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.02)
    raise AssertionError("no step within 30 s, or the supervisor ended")


# ---- the supervisor alone -----------------------------------------------------------------------


def test_orphaned_and_frozen_daemons_are_ended_too(
    stand_ins: Callable[..., local_stand_ins.StandIns],
) -> None:
    async def main() -> list[psutil.Process]:
        swarm = stand_ins({0: 2, 1: 1})
        await swarm.start()
        server = psutil.Process(swarm.server_pid)
        await until(lambda: len(server.children(recursive=True)) == 7)
        processes = server.children(recursive=True)
        swarm.kill_peer("0a")
        assert await swarm.ended("0a") == -signal.SIGKILL
        swarm.freeze("0b")
        frozen = family(swarm.processes["0b"].pid)
        await until(lambda: all(each.status() == "stopped" for each in frozen))
        swarm.thaw("0b")
        await until(lambda: all(each.status() != "stopped" for each in frozen))
        swarm.freeze("0b")
        await swarm.stop()
        return processes

    wait_until_gone(asyncio.run(main()), 0.1)


def test_a_death_is_a_line_and_the_others_go_on(
    stand_ins: Callable[..., local_stand_ins.StandIns],
) -> None:
    lines: list[str] = []

    async def main() -> None:
        swarm = stand_ins({0: 2, 1: 1}, lines)
        await swarm.start()
        await until(lambda: swarm.processes["0a"].said == "serving")
        swarm.stop_peer("0a")
        assert await swarm.ended("0a") == 0
        added = await swarm.add_peer(0)
        assert added.name == "0c"
        await until(lambda: added.said == "serving")
        os.kill(swarm.processes["1a"].pid, signal.SIGSEGV)
        await until(lambda: len(lines) == 2)
        assert swarm.processes["0b"].alive
        await swarm.stop()

    asyncio.run(main())
    assert lines[0].startswith("peer 1a has ended: killed by SIGSEGV - see ")
    assert lines[1].startswith("stage 1 has no peer left, the run waits for one: swarm-peer ")


@pytest.mark.parametrize(
    ("targets", "kind", "what"),
    [
        ({"leader": "failing_leader"}, ListenError, "cannot listen on 127.0.0.1:1"),
        ({"peer": "failing_peer"}, DeviceError, "there is no cuda:3 here"),
        ({"preload": "broken"}, SwarmError, "cannot start processes: ImportError: no module"),
        (
            {"preload": "with_a_thread"},
            SwarmError,
            "started threads .* would lose: 'worker' - inst",
        ),
        (
            {"preload": "with_native_threads"},
            SwarmError,
            r"lose: 'pool\\x1b\[1m' \(3\), 'a', 'b', 'c' and 2 more - install swarm-parallel in",
        ),
    ],
)
def test_what_a_person_must_mend_is_the_swarms_error(
    stand_ins: Callable[..., local_stand_ins.StandIns],
    targets: dict[str, str],
    kind: type[SwarmError],
    what: str,
) -> None:
    lines: list[str] = []

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await stand_ins(None, lines, **targets).run()

    with pytest.raises(kind, match=what) as caught:
        asyncio.run(main())
    assert caught.value.exit_code == kind.exit_code
    assert not [line for line in lines if what in line], "the reason is said twice"


def test_a_thread_that_a_fork_may_lose_is_no_reason_to_refuse(
    stand_ins: Callable[..., local_stand_ins.StandIns],
) -> None:
    async def main() -> None:
        swarm = stand_ins(preload="with_jemalloc")
        await swarm.start()
        await until(lambda: all(swarm.processes[name].said == "serving" for name in ("0a", "1a")))
        assert "jemalloc_bg_thd" in threads_of(swarm.server_pid)
        await swarm.stop()

    asyncio.run(main())


def test_a_request_to_a_server_that_has_failed_does_not_cost_its_reason(tmp_path: Path) -> None:
    async def main() -> None:
        preload = "tests.process.local_stand_ins:broken"
        server = ForkServer(preload, {"model_type": None}, environment={})
        await server.connect()
        # Until it says no more or has closed: this loop stands still, and reads nothing of it yet.
        said_all = select.poll()
        said_all.register(server._socket, select.POLLRDHUP)
        assert said_all.poll(LIMIT_S * 1e3)
        try:
            await server.spawn("0a", "nothing:to_run", {}, log=tmp_path / "log")
        finally:
            await server.aclose()

    with pytest.raises(ForkServerError, match="ImportError: no module named libswarm"):
        asyncio.run(main())


def test_a_killed_leader_is_an_error(stand_ins: Callable[..., local_stand_ins.StandIns]) -> None:
    async def main() -> None:
        swarm = stand_ins()
        await swarm.run(lambda: os.kill(swarm.processes[LEADER].pid, signal.SIGKILL))

    with pytest.raises(SwarmError, match="the leader has ended: killed by SIGKILL"):
        asyncio.run(main())


def test_a_server_that_began_early_is_used_or_closed(
    tmp_path: Path, config: Callable[[int], RunConfig]
) -> None:
    target = local_stand_ins.StandIns.preload_target
    early = warm_up(config(3), preload=target)

    async def main() -> int:
        swarm = local_stand_ins.StandIns(config(3), tmp_path / "run", server=early)
        await swarm.start()
        await swarm.stop()
        return swarm.server_pid

    assert asyncio.run(main()) == early.pid
    unused = warm_up(config(3), preload=target)
    unused.close()
    assert not psutil.pid_exists(early.pid)
    assert not psutil.pid_exists(unused.pid)


def test_cancelled_while_it_imports(stand_ins: Callable[..., local_stand_ins.StandIns]) -> None:
    async def main() -> float:
        swarm = stand_ins(preload="slow")
        running = asyncio.create_task(swarm.run())
        await until(lambda: swarm.server_pid)
        running.cancel()
        began = time.monotonic()
        await asyncio.wait([running])
        assert running.cancelled()
        assert not psutil.pid_exists(swarm.server_pid)
        return time.monotonic() - began

    assert asyncio.run(main()) < 2
