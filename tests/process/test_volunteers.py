"""The commands as people use them, each a process: volunteers join, leave, wait and come back."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

from peer.local_server import _children_of
from peer.places import tcp_ports
from peer.serve import LAST_SWARM
from swarm.errors import InUseError
from swarm.events import KINDS, tail_events
from swarm.net.identity import claim_identity_file
from tests.process.forks import Command, Forks, toml
from tests.process.small_disk import fill, make_room, small_disk

LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")
TO_END_S = 5.0  # for a process whose time is over, and its network daemon


def join(forks: Forks, link: str, *args: str) -> Command:
    return forks.peer("--join", link, *LOCAL, *args)


def stage_of(peer: Command) -> int:
    """Wait until it serves; the stage that it took."""
    peer.says("serving stage ")
    return int(peer.out.split("serving stage ")[1].split()[0])


def test_volunteers_outlive_the_leader(forks: Forks, tmp_path: Path) -> None:
    """A leader killed before and during training, a late joiner: the same bits as one process."""
    run = toml(tmp_path / "run.toml", steps=30)
    lead = ("train", run, *LOCAL)

    leader = forks.swarm(*lead)
    link = leader.link
    (status,) = tmp_path.glob("runs/*/status.json")
    assert json.loads(status.read_text())["run"]["link"] == link, "told before it was noted"
    leader.signal(signal.SIGKILL)
    assert leader.code() == -signal.SIGKILL

    early = join(forks, link)
    early.says("trying again")
    leader = forks.swarm(*lead)
    assert leader.link == link
    first = stage_of(early)
    second, last = (stage for stage in range(3) if stage != first)
    other = forks.peer(*LOCAL, "--stage", str(second), SWARM_JOIN=link)
    other.says(f"serving stage {second}")
    third = forks.peer(*LOCAL)  # joins the last swarm, where a peer is missing
    third.says(f"serving stage {last}")

    leader.says("step 2 ")
    leader.signal(signal.SIGKILL)
    early.says("lost the leader, looking for it")
    served = early.out.count("serving stage ")
    shown = forks.swarm("status")
    assert shown.code() == 0, shown
    leader = forks.swarm(*lead, "--report", "report.jsonl")
    leader.says("going on after ")
    early.says("serving stage ", served + 1)  # it may have been moved meanwhile

    late = join(forks, link, "--stage", str(last), "--memory", "1")
    late.says("downloading 100 %")
    late.says(f"serving stage {last}")
    of_link = forks.swarm("status", link, "--json")
    assert of_link.code() == 0, of_link
    assert json.loads(of_link.out)["num_stages"] == 3

    assert leader.code() == 0, leader
    for peer in (early, other, third, late):
        assert peer.code() == 0, peer
        assert peer.out.endswith("the run is finished\n")
        assert peer.err == ""
    final = json.loads((tmp_path / "report.jsonl").read_text().splitlines()[-1])
    baseline = forks.swarm("baseline", run)
    assert baseline.code() == 0, baseline
    assert f"30 steps, sha256 {final['sha256']}" in baseline.out

    (run_dir,) = (tmp_path / "runs").iterdir()
    for command in (
        ("export", run_dir, "model"),
        ("generate", "model", "the ", "--tokens", "5"),
        ("eval", "model", "--run", run, "--microbatches", "2"),
    ):
        done = forks.swarm(*command)
        assert done.code() == 0, done
        assert done.err == ""

    again = forks.swarm(*lead)
    assert again.code() == 0
    assert "30 of 30 steps are trained already" in again.out


def test_an_announced_address_stands_in_the_link(forks: Forks, tmp_path: Path) -> None:
    """It is where a router forwards from, and nothing that this machine could see by itself."""
    run = toml(tmp_path / "run.toml", steps=100_000, stages=2)
    leader = forks.swarm("train", run, *LOCAL, "--announce", "/ip4/192.0.2.7/tcp/4001")
    assert "/ip4/192.0.2.7/tcp/4001/p2p/" in leader.link
    leader.signal(signal.SIGINT)
    leader.code()


def bound(to: socket.socket, address: tuple[str, int]) -> bool:
    try:
        to.bind(address)
    except OSError:
        return False
    return True


def test_a_leader_that_comes_back_at_another_port_is_found(forks: Forks, tmp_path: Path) -> None:
    """Its replicas have its former address alone, and their directory; and so has a volunteer that
    starts again with the link it has saved. The leader begins without anybody's address but those
    that its run directory keeps."""
    run = toml(tmp_path / "run.toml", steps=100_000, stages=2)
    leader = forks.swarm("train", run, *LOCAL)
    first, last = (join(forks, leader.link, "--stage", str(stage)) for stage in (0, 1))
    again = ("--stage", "1", "--data-dir", str(tmp_path / "volunteer"))
    volunteer = join(forks, leader.link, *again)
    volunteer.says("serving stage 1")
    leader.says("step 2 ")
    saved = tmp_path / "volunteer" / LAST_SWARM
    forks.until(lambda: saved.read_text().count("/p2p/") >= 4, "a link that names the others")
    leader.signal(signal.SIGKILL)
    volunteer.signal(signal.SIGKILL)
    first.says("lost the leader, looking for it")
    former = leader.link
    with socket.socket() as taken:  # the port of before is not free now
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = ("127.0.0.1", tcp_ports(former)[0])
        forks.until(lambda: bound(taken, address), "the daemon of before has let it go")
        taken.listen()
        leader = forks.swarm("train", run, *LOCAL)
        assert leader.link != former
        volunteer = forks.peer(*LOCAL, *again)
        volunteer.says("serving stage 1")
    for peer in (first, last):
        peer.says("serving stage", 2)
        assert peer.err == ""
    leader.says("step ")
    leader.signal(signal.SIGINT)
    assert leader.code() == 130, leader
    assert leader.err == ""


def test_full_disks_lose_nothing(forks: Forks, tmp_path: Path) -> None:
    """A volunteer's is no reason to stop: it cannot even note where the swarm is now. A leader that
    cannot write its vote ends in one line, and with room again goes on from where it was."""
    run = toml(tmp_path / "run.toml", steps=25, stages=2)
    with (
        small_disk(tmp_path / "small", kib=64) as home,
        small_disk(tmp_path / "large", kib=16 << 10) as runs,
    ):
        lead = ("train", run, *LOCAL, "--dir", runs / "run")
        leader = forks.swarm(*lead)
        peers = [join(forks, leader.link, "--stage", "0", "--data-dir", str(home / "peer"))]
        peers[0].says("serving stage 0")
        fill(home)
        peers += [join(forks, leader.link, "--stage", "1")]
        leader.says("step 2 ")

        def full() -> bool:
            fill(runs)  # what was being written may give way to it
            return not leader.child.alive

        forks.until(full, "the end of the leader")
        assert leader.code() == 6, leader
        assert leader.err.startswith("error: cannot write "), leader
        assert "No space left on device - free some space" in leader.err
        assert leader.err.count("\n") == 1, leader
        make_room(runs)
        for peer in peers:
            peer.says("lost the leader, looking for it")
        leader = forks.swarm(*lead, "--report", "report.jsonl")
        leader.says("going on after ")
        for command in (leader, *peers):
            assert command.code() == 0, command
            assert command.err == "", command
    final = json.loads((tmp_path / "report.jsonl").read_text().splitlines()[-1])
    baseline = forks.swarm("baseline", run)
    assert baseline.code() == 0, baseline
    assert f"25 steps, sha256 {final['sha256']}" in baseline.out


def test_a_last_checkpoint_that_has_no_room_keeps_the_peers(forks: Forks, tmp_path: Path) -> None:
    """They alone have what was trained: the run is over once it is on disk, by a leader that has
    waited or one that was stopped meanwhile and started again."""
    forks.constants = {"peer.run_leader:SAVE_AGAIN_S": 0.2}
    run = toml(tmp_path / "run.toml", steps=5, stages=2)
    lead = ("train", run, *LOCAL, "--dir", "led", "--report", "report.jsonl")
    with small_disk(tmp_path / "full", kib=4 << 10) as disk:
        (tmp_path / "led").mkdir()
        (tmp_path / "led" / "checkpoints").symlink_to(disk)
        fill(disk)
        leader = forks.swarm(*lead)
        peers = [join(forks, leader.link, "--stage", stage) for stage in ("0", "1")]
        leader.says("no checkpoint (step 5): cannot write", 2)
        leader.says("free some space, or lower [checkpoint] keep in the next run")
        leader.says("waiting until the last checkpoint is written")
        leader.signal(signal.SIGINT)
        assert leader.code() == 130, leader
        assert "finished" not in leader.out
        leader = forks.swarm(*lead)
        leader.says("5 of 5 steps are trained, and only the peers hold that state")
        leader.says("no checkpoint (step 5): cannot write")
        make_room(disk)
        for command in (leader, *peers):
            assert command.code() == 0, command
            assert command.err == "", command
        baseline = forks.swarm("baseline", run)
        assert baseline.code() == 0, baseline
        assert baseline.out.splitlines()[-1] in leader.out
        exported = forks.swarm("export", "led", "model")
        assert exported.code() == 0, exported
        again = forks.swarm(*lead)
        assert again.code() == 0, again
        assert "nothing to do: 5 of 5 steps are trained already" in again.out
    (path,) = tmp_path.glob("led/events.jsonl")
    written = [each for each in tail_events(path) if each["event"] == "checkpoint"]
    assert [each.get("step") for each in written if "reason" not in each] == [5], "once"


def test_who_has_lost_its_network_daemon_says_so(forks: Forks, tmp_path: Path) -> None:
    """Nobody could reach it any more. A peer comes back by another; a leader, who would wait for
    peers for ever, ends."""
    run = toml(tmp_path / "run.toml", steps=100_000, stages=1)
    leader = forks.swarm("train", run, *LOCAL)
    peer = join(forks, leader.link)
    peer.says("serving stage 0")
    (daemon,) = _children_of(peer.child.pid)
    os.kill(daemon, signal.SIGKILL)
    peer.says("the network daemon has died; starting it again")
    peer.says("serving stage 0", 2)
    assert peer.err == "", peer
    (key,) = (tmp_path / "home").rglob("peer/identity.key")
    with pytest.raises(InUseError):
        claim_identity_file(key)
    (daemon,) = _children_of(leader.child.pid)
    os.kill(daemon, signal.SIGKILL)
    assert leader.code() == 1, leader
    assert leader.err.count("\n") == 1, leader
    assert "the network daemon has died - start again" in leader.err
    peer.says("lost the leader")


def test_who_nobody_replaces_leaves_when_its_time_is_over(forks: Forks, tmp_path: Path) -> None:
    """It is the only one of its stage, so it waits for another: as long as it was told."""
    run = toml(tmp_path / "run.toml", steps=100_000, stages=2)
    leader = forks.swarm("train", run, *LOCAL)
    patient = join(forks, leader.link, "--stage", "0", "--drain-s", "100000")
    hasty = join(forks, leader.link, "--stage", "1", "--drain-s", "2")
    leader.says("step 2 ")
    patient.signal(signal.SIGINT)
    asked = time.monotonic()
    hasty.signal(signal.SIGTERM)
    assert hasty.code() == 0, hasty
    assert 2.0 <= time.monotonic() - asked < 2.0 + TO_END_S
    assert hasty.out.endswith("left\n")
    assert hasty.err == "leaving (again: at once)\n"
    assert patient.child.alive
    leader.signal(signal.SIGINT)
    assert leader.code() == 130, leader


def test_the_only_one_of_its_stage_hands_over_to_who_comes(forks: Forks, tmp_path: Path) -> None:
    """Asked by SIGTERM, in the middle of a run: its state goes to another, and no microbatch is
    issued again for it. It is slow enough for the other to come in time, and that one is not."""
    forks.constants = {"swarm.events:KINDS": [*KINDS, "issue"]}
    run = toml(tmp_path / "run.toml", steps=20, stages=2)
    leader = forks.swarm("train", run, *LOCAL, "--report", "report.jsonl")
    join(forks, leader.link, "--stage", "0")
    sole = forks.peer("--join", leader.link, *LOCAL, "--stage", "1", "--drain-s", "60", pace_s=0.15)
    leader.says("step 1 ")
    sole.signal(signal.SIGTERM)
    sole.says("leaving stage 1; waiting for: another replica of stage 1")
    join(forks, leader.link, "--stage", "1")
    assert sole.code() == 0, sole
    assert sole.out.endswith("handed over\n")
    assert sole.err == "leaving (again: at once)\n"
    assert leader.code() == 0, leader

    (path,) = tmp_path.glob("runs/*/events.jsonl")
    events = tail_events(path)
    kinds = [event["event"] for event in events]
    handed = [kind for kind in kinds if kind in ("leaving", "admitted", "left")]
    assert handed[:5] == ["admitted", "admitted", "leaving", "admitted", "left"]
    assert "step" in kinds[kinds.index("left") :], "it went on without the one that left"
    assert not {"expelled", "failed", "round_failed"}.intersection(kinds)
    issued = Counter((each["step"], each["index"]) for each in events if each["event"] == "issue")
    assert issued == {(step, index): 1 for step in range(20) for index in range(6)}
    final = json.loads((tmp_path / "report.jsonl").read_text().splitlines()[-1])
    baseline = forks.swarm("baseline", run)
    assert baseline.code() == 0, baseline
    assert f"20 steps, sha256 {final['sha256']}" in baseline.out


def test_leaving_politely_and_at_once(forks: Forks, tmp_path: Path) -> None:
    run = toml(tmp_path / "run.toml", steps=100_000, stages=1)
    leader = forks.swarm("train", run, *LOCAL, "--dir", "led")
    first, second = join(forks, leader.link), join(forks, leader.link)
    for peer in (first, second):
        peer.says("serving stage 0")
    leader.says("serves its stage", 2)

    first.signal(signal.SIGINT)
    assert first.code() == 0, first
    assert first.out.endswith("handed over\n")
    assert first.err == "leaving (again: at once)\n"

    leader.signal(signal.SIGSTOP, daemons=True)  # nobody confirms the hand-over
    second.signal(signal.SIGINT)
    forks.until(lambda: "leaving" in second.err, "the first Ctrl-C")
    second.signal(signal.SIGINT)
    assert second.code() == 130, second
    leader.signal(signal.SIGCONT, daemons=True)

    leader.signal(signal.SIGINT)
    assert leader.code() == 130, leader
    again = f"swarm train {run} --dir led --listen {LOCAL[1]}"
    assert f"stopped; {again} goes on from here" in leader.out
    assert leader.err == ""
