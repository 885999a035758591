"""A recorded run, played again: pictures from `events.jsonl`, and one file with all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import DataError, StorageError
from tests.unit.web_runs import NOW, peer_ids
from web.replay import MAX_FRAMES, MIN_FRAMES, record
from web.report import write_report

SCRIPT = "</script><script>alert(1)</script>"


def lines(peers: list[str]) -> list[dict[str, Any]]:
    """Two stages, thirty steps, one death."""
    a, b, c = (f"{peer}#1" for peer in peers)
    made: list[dict[str, Any]] = [
        {"t": NOW, "event": "run", "id": "ab", "name": SCRIPT, "link": "swarm://secret"},
        {"t": NOW + 1, "event": "joined", "replica": a, "stage": 0},
        {"t": NOW + 1, "event": "joined", "replica": b, "stage": 1},
        {"t": NOW + 1, "event": "joined", "replica": c, "stage": 1},
    ]
    made += [{"t": NOW + 2, "event": "admitted", "replica": who, "step": 0} for who in (a, b, c)]
    made += [
        {"t": NOW + 3 + step, "event": "step", "step": step, "loss": 5.0 - step / 10,
         "tokens": 100, "wall_s": 1.0} for step in range(30)
    ]  # fmt: skip
    made.insert(20, {"t": NOW + 15.5, "event": "left", "replica": c, "reason": SCRIPT})
    made.append({"t": NOW + 34, "event": "finished", "steps": 30, "sha256": "0" * 64})
    return made


@pytest.fixture
def peers(tmp_path: Path) -> list[str]:
    return peer_ids(tmp_path / "keys", 3)


def test_the_pictures_follow_the_run(peers: list[str]) -> None:
    told = record(lines(peers), {"num_steps": 40}, NOW + 100)
    assert MIN_FRAMES <= len(told.frames) <= MAX_FRAMES
    steps = [frame["picture"]["head"]["step"] for frame in told.frames]
    assert steps == sorted(steps)
    assert steps[-1] == 30
    assert told.frames[-1]["picture"]["head"]["state"] == "finished"
    serving = [frame["picture"]["head"]["serving"] for frame in told.frames]
    assert max(serving) == 3
    assert serving[-1] == 2
    early = next(frame for frame in told.frames if frame["t"] > NOW + 10)["picture"]
    assert early["head"]["num_steps"] == 40
    assert early["head"]["reason"] == "stage 0 has a single replica"
    late = next(frame for frame in told.frames if frame["t"] > NOW + 17)["picture"]
    assert late["head"]["reason"].startswith("stage 1 has lost a replica")
    assert [line["kind"] for line in told.feed][-2:] == ["left", "finished"]
    assert early["upto"] < late["upto"] <= told.feed[-1]["n"]
    assert {mark["kind"] for mark in told.series["marks"]} == {"joined", "left"}
    assert len(told.series["loss"]) >= 10


def test_a_long_run_has_no_more_pictures(peers: list[str]) -> None:
    long = lines(peers)[:7] + [
        {"t": NOW + 3 + 600 * step, "event": "step", "step": step, "loss": 1.0, "tokens": 1,
         "wall_s": 600.0} for step in range(2000)
    ]  # fmt: skip
    told = record(long, None, NOW + 2e6)
    assert len(told.frames) <= MAX_FRAMES + 1
    assert len(told.series["t"]) <= 1001


HALF = [
    {"t": NOW, "event": "joined", "stage": 0},
    {"t": NOW, "event": "joined", "stage": 0, "replica": "nobody"},
    {"t": NOW, "event": "step", "loss": 1.0},
    {"t": NOW, "event": "step", "step": "x"},
    {"t": NOW, "event": "admitted"},
    {"t": NOW, "event": "left", "stage": -1},
]


def test_lines_that_lack_what_matters_are_left_out(peers: list[str]) -> None:
    half = [*HALF, {"t": NOW, "event": "joined", "replica": f"{peers[0]}#2"}]
    told, as_ever = (record(each, None, NOW + 100) for each in (half + lines(peers), lines(peers)))
    assert told.frames[-1]["picture"]["head"] == as_ever.frames[-1]["picture"]["head"]
    assert [line["kind"] for line in told.feed].count("joined") == 3


@pytest.mark.parametrize(
    "junk",
    [
        [],
        [{"t": NOW, "event": "run"}],
        [{"t": "x"}, {}],
        HALF,
        [{"t": NOW, "event": "step", "step": 1, "stage": 300}],
    ],
    ids=["nothing", "no start", "no events", "half lines", "a stage that cannot be"],
)
def test_no_run_is_said(junk: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match="tell of no run"):
        record(junk, None, NOW)


def test_one_file_with_nothing_from_elsewhere(tmp_path: Path, peers: list[str]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines(peers))
    (tmp_path / "events.jsonl").write_text(text + '{"torn')
    path = write_report(tmp_path)
    html = path.read_text()
    assert path == tmp_path / "report.html"
    assert len(html) < 1_500_000
    assert not re.findall(r'(?:src|href)="(?!#)', html)
    assert SCRIPT not in html
    assert "swarm://secret" not in html
    assert "default-src 'none'" in html
    data = html.partition('id="recording">')[2].partition("</script>")[0]
    assert len(json.loads(data)["frames"]) >= MIN_FRAMES
    with pytest.raises(StorageError, match="cannot write"):
        write_report(tmp_path, path / "report.html")  # a file is in the way
    with pytest.raises(StorageError, match="cannot write"):
        write_report(tmp_path, Path("/dev/full"))
    assert Path("/dev/full").exists()
    assert write_report(tmp_path, tmp_path / "new" / "report.html").is_file()
    assert write_report(tmp_path) == path, "an earlier report is replaced"
    with pytest.raises(StorageError, match=r"events\.jsonl is no report - name another file"):
        write_report(tmp_path, tmp_path / "events.jsonl")
    assert (tmp_path / "events.jsonl").read_text() == text + '{"torn'
    assert not list(tmp_path.glob(".*")), "nothing half written is left"
    link = tmp_path / "link.html"
    link.symlink_to(path)
    path.write_text("")
    write_report(tmp_path, link)
    assert link.is_symlink()
    assert path.read_text().startswith("<!doctype html>")
    with pytest.raises(DataError, match="holds no events"):
        write_report(tmp_path / "keys")
