"""What the lab of home connections (`benchmarks/wan`) does when a part of it fails; no root."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "wan"))  # scripts

import _lab
import _measured
import averaging
import line
import throughput
import wire_bytes
from _lab import Host, Lab
from _measured import Mark, Measured, Traffic
from _namespaces import LabError


class Here:
    """In place of a lab: its hosts are this machine."""

    hosts = (Host("lab-1", "127.0.0.1", None), Host("lab-2", "127.0.0.1", None))

    def __init__(self, code: str | None = None) -> None:
        self.code, self.started = code, list[subprocess.Popen[Any]]()

    def run(self, host: Host, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        if self.code is not None:
            command = [sys.executable, "-c", self.code]
        self.started.append(subprocess.Popen(command, **options))
        return self.started[-1]


def measured(lab: Here) -> Measured:
    return Measured(lab)  # type: ignore[arg-type]


def test_a_server_that_does_not_start_is_one_line_and_ended() -> None:
    lab = Here("raise OSError('no port left')")
    line = r"^`serve` failed in lab-1 \(OSError: no port left\): start the measurement again$"
    with pytest.raises(LabError, match=line):
        measured(lab)
    assert [each.returncode for each in lab.started] == [1]


class Counts:
    """In place of the counters of a device: a megabyte more whenever they are read."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, host: Host) -> Traffic:
        assert host is Here.hosts[0], "the server's, where all that is sent arrives"
        self.read += 1
        return Traffic(1_000_000 * self.read, 0)


def test_a_rate_is_what_came_while_the_window_was_open() -> None:
    assert _measured.mbps(Mark(10.0, 5_000_000), Mark(12.0, 7_500_000)) == pytest.approx(10.0)
    assert _measured.mbps(Mark(10.0, 5_000_000), Mark(12.0, 5_000_000)) == 0


def test_a_rate_is_that_of_the_servers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its programs read of a stream comes late, and then all at once."""
    lab, marks, mbps = Here(), list[Mark](), _measured.mbps

    def noted(opened: Mark, closed: Mark) -> float:
        marks.extend((opened, closed))
        return mbps(opened, closed)

    monkeypatch.setattr(_measured, "traffic_of", Counts())
    monkeypatch.setattr(_measured, "mbps", noted)
    with measured(lab) as server:
        begun, seconds = time.monotonic(), 0.5
        rate = server.up_mbps([lab.hosts[1]] * 2, seconds)
    opened, closed = marks
    assert rate == round(mbps(opened, closed), 2)
    assert (opened.bytes, closed.bytes) == (1_000_000, 2_000_000)
    begins = begun + _measured.START_S + 2 * _measured.START_EACH_S
    assert opened.at >= begins + _measured.WARM_UP_SHARE * seconds, "slow start is over"
    assert closed.at >= begins + seconds


def test_a_device_that_has_gone_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that dies takes its devices with it."""
    monkeypatch.setattr(_measured, "entered", lambda namespace: nullcontext())
    monkeypatch.setattr(_measured, "DEVICE", "no-such-device")
    with pytest.raises(LabError, match=r"^lab-1 has lost its device, so the hub has died: start"):
        _measured.traffic_of(Here.hosts[0])


def test_a_server_that_dies_while_it_is_sent_to_is_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Here()
    with measured(lab) as server:

        def die(host: Host) -> Traffic:
            server.server.kill()
            server.server.wait()
            return Traffic(0, 0)

        monkeypatch.setattr(_measured, "traffic_of", die)
        with pytest.raises(LabError, match=r"^`send` failed in lab-2 \(.*(gone|reset|pipe)"):
            server.up_mbps([lab.hosts[1]], 0.5)


def test_a_server_says_nothing_of_senders_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_measured, "traffic_of", Counts())
    lab = Here()
    with measured(lab) as server:
        server.up_mbps([lab.hosts[1]], 0.1)
        assert server.round_trip_ms(lab.hosts[1]) > 0
        server.server.kill()
        _, errors = server.server.communicate()
    assert not errors


def test_a_sender_that_begins_when_the_window_is_open_is_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_measured, "START_S", -1.0)
    monkeypatch.setattr(_measured, "traffic_of", Counts())
    lab = Here()
    with measured(lab) as server, pytest.raises(LabError, match=r"TimeoutError: a sender began"):
        server.up_mbps([lab.hosts[1]], 0.1)


def test_a_client_that_dies_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_measured, "traffic_of", Counts())
    lab = Here()
    with measured(lab) as server:
        client = lab.hosts[1]
        assert server.round_trip_ms(client) > 0
        assert server.up_mbps([client, client], 0.2) > 0
        server.server.kill()
        server.server.wait()
        with pytest.raises(LabError, match=r"^`ping` failed in lab-2 \(Connection.*\): start the"):
            server.round_trip_ms(client)
        with pytest.raises(LabError, match=r"^`send` failed in lab-2 \(Connection.*\): start the"):
            server.up_mbps([client], 0.2)
        lab.code = "import os; os.kill(os.getpid(), 9)"
        with pytest.raises(LabError, match=r"^`ping` failed in lab-2 \(it was killed\)"):
            server.round_trip_ms(client)
    assert all(each.returncode is not None for each in lab.started)


def test_an_interrupted_measurement_leaves_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose lab is gone then, so that it would wait for long."""

    def interrupted(process: subprocess.Popen[Any]) -> None:
        raise KeyboardInterrupt

    lab = Here()
    with measured(lab) as server:
        lab.code = "import time; time.sleep(60)"
        with monkeypatch.context() as patched:
            patched.setattr(subprocess.Popen, "communicate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                server.round_trip_ms(lab.hosts[1])
        with lab.started[-1] as client:
            assert client.wait() == -9


def test_members_that_do_not_meet_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it is interrupted meanwhile."""
    ended: list[bool] = []

    class Members:
        def __init__(self, *_: Any) -> None:
            pass

        def introduce(self, gloo: str) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            ended.append(True)

    monkeypatch.setattr(averaging, "Members", Members)
    lab: Any = Here()
    with pytest.raises(KeyboardInterrupt):
        averaging.start(lab, 1)
    assert ended == [True]


@pytest.mark.parametrize(
    ("ends", "code", "status"),
    [
        ({"packets": 3}, "import sys; sys.stdin.read(); print('{\"packets\": 3}')", 0),
        ({}, "import time; time.sleep(60)", -9),
    ],
)
def test_a_hub_that_does_not_end_is_killed(
    ends: dict[str, int], code: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lab, "HUB_END_S", 10.0 if ends else 0.2)
    lab = Lab("home", 2)  # never entered: it has no namespaces
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    hub = lab._hub = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    assert lab.close() == ends
    assert hub.returncode == status


@pytest.mark.parametrize(
    ("emulated", "hub", "broken"),
    [(True, {"lost": 0}, False), (True, {}, True), (False, {}, False)],
    ids=["ended", "died", "bridge"],
)
def test_a_lab_whose_hub_has_died_gives_no_figure(
    emulated: bool, hub: dict[str, Any], broken: bool
) -> None:
    lab: Any = SimpleNamespace(profile=SimpleNamespace(emulated=emulated), close=lambda: hub)
    with pytest.raises(LabError, match="hub has died") if broken else nullcontext():
        assert _measured.ended(lab) == hub


def test_a_lab_that_breaks_costs_one_measurement_once_more() -> None:
    for failures in (0, 1, 2):
        tries = [LabError("no"), RuntimeError("a rank ended")][:failures]

        def measure(tries: list[Exception] = tries) -> str:
            if tries:
                raise tries.pop(0)
            return "a figure"

        with pytest.raises(RuntimeError, match="a rank") if failures > 1 else nullcontext():
            assert _measured.measured_anew(measure) == "a figure"
        assert not tries


def test_ctrl_c_in_a_terminal_leaves_the_hub_to_the_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told too, and would end with a traceback before it is asked for its summary."""
    script = tmp_path / "hub.py"
    script.write_text(
        "import json, signal, sys\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
        "print(json.dumps({'ignored': signal.getsignal(signal.SIGINT) == signal.SIG_IGN}))\n"
    )
    monkeypatch.setattr(_lab, "HUB", script)
    monkeypatch.setattr(_lab.os, "nice", lambda by: 0)  # may need root
    lab = Lab("home", 2)
    lab._start_hub()
    assert lab.close() == {"ignored": True}


@pytest.mark.parametrize("script", [averaging, line, throughput, wire_bytes])
def test_who_is_not_root_is_told_before_anything_else(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setattr(script, "end_politely", lambda: None)
    monkeypatch.setattr("os.geteuid", lambda: 65534)
    with pytest.raises(LabError, match="needs root"):
        script.main()
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "arguments", "remedy"),
    [
        (averaging, "--mb nan", "nan is not a number above 0"),
        (averaging, "--mb inf", "inf is not a number above 0"),
        (averaging, "--mb 1e-9", "--mb is too little for one number"),
        (averaging, "--members 4 400", "--members is 2 to 254"),
        (averaging, "--congestion vegas", "choose from 'cubic', 'bbr'|choose from cubic, bbr"),
        (line, "--seconds 0", "0 is not a number above 0"),
        (line, "--kept /", "--kept: / is a directory, and should be a file"),
        (throughput, "--seconds nan", "nan is not a number above 0"),
        (throughput, "--limit -1", "-1 is not a number above 0"),
        (throughput, "--ahead 0.5", "--ahead is for --policy delayed"),
        (line, "--connections 1 0", "0 is not a whole number from 1 to 16"),
        (throughput, "--rounds 0", "0 is not a whole number above 0"),
        (line, "--show --kept /no/file", "nothing of this is in /no/file: measure it"),
        (throughput, "--show --kept /no/file", "nothing of this is in /no/file: measure it"),
        (throughput, "--show --kept /", "--kept: / is a directory, and should be a file"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(
    script: ModuleType,
    arguments: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments.split()])
    with pytest.raises(SystemExit) as exit_:
        script.main()
    assert exit_.value.code == 2
    assert re.search(remedy, capsys.readouterr().err.splitlines()[-1])
