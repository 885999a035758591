"""The terminal view: key facts are there, nothing is wider than the screen, no terminal needed."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from peer.show import Follower
from peer.training import StepResult
from peer.view import TerminalView, plain_line, print_status, render
from swarm.events import write_status
from swarm.names import friendly_name
from swarm.words import (
    bytes_text,
    count_text,
    duration_text,
    event_text,
    remaining_s,
    service_text,
    sparkline,
)


def a_replica(number: int, stage: int, standing: str = "serving", **more: Any) -> dict[str, Any]:
    return {
        "replica": f"12D3KooW{number}#0000", "stage": stage, "standing": standing, "step": 124,
        "device": "cpu", "counted": 1204, "reason": "", "service_s": 0.052, "outstanding": 2,
        "share": 0.48, **more,
    }  # fmt: skip


def a_status(num_stages: int = 3, each: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "run": {"id": "ab" * 16, "name": "demo", "link": "swarm://ab@/ip4/1.2.3.4/tcp/1"},
        "state": "training", "reason": "", "step": 124, "num_steps": 300, "loss": 2.1341,
        "validation_loss": 2.201, "losses": [[i, 2 + 3 * math.exp(-i / 30)] for i in range(124)],
        "tokens": 1_523_712, "tokens_per_s": 12391.0, "in_flight": 7,
        "microbatches": {"done": 5, "of": 8}, "num_stages": num_stages,
        "replicas": [a_replica(10 * s + r, s) for s in range(num_stages) for r in range(each)],
        "bytes": {
            "boundaries": [
                {"boundary": k, "raw_per_token": 1024.0, "wire_per_token": 512.0,
                 "back_raw_per_token": 1024.0, "back_wire_per_token": 132.0}
                for k in range(num_stages - 1)
            ],
            "leader_per_token": 4.13,
        },
        "started_at": 1_700_000_000.0, "updated_at": 1_700_000_102.0, "epoch": 0, "term": 1, **more,
    }  # fmt: skip


EVENTS = [
    {"t": 1_700_000_000, "event": "joined", "replica": "12D3KooW10#0000", "stage": 1},
    {"t": 1_700_000_001, "event": "step", "step": 3, "loss": 4.0},
    {"t": 1_700_000_002, "event": "expelled", "replica": "12D3KooW1#0000", "step": 123,
     "reason": "no heartbeat for 10 s"},
]  # fmt: skip


def text_of(status: dict[str, Any], width: int, events: Any = EVENTS, **more: Any) -> str:
    """What is printed, after checking that no line is too wide."""
    file = io.StringIO()
    console = Console(file=file, width=width + 20, highlight=False)
    console.print(render(status, events, width, **more))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert all(cell_len(line) <= width for line in lines), "\n".join(lines)
    return "\n".join(lines)


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_what_matters_is_there_at_any_width(width: int, ascii_only: bool) -> None:
    text = text_of(a_status(), width, ascii_only=ascii_only)
    for fact in (
        "demo", "training", "step 124 of 300", "41 %", "2.1341", "validation 2.2010",
        "1:42 elapsed", "2:55 left", "12.4k tokens/s", "7 in flight", "microbatch 5 of 8",
        "512 B, back 132 B", "stage 0", "stage 2", "52 ms", "48 %", "1.20k done", "2 in flight",
        friendly_name("12D3KooW21"), "joined stage 1", "expelled: no heartbeat for 10 s",
    ):  # fmt: skip
        assert fact in text, f"{fact!r} is not in\n{text}"
    assert ("0->1" if ascii_only else "0→1") in text
    assert text.isascii() == ascii_only


@pytest.mark.parametrize("width", [20, 30, 45])
def test_a_narrow_terminal_keeps_the_essence(width: int) -> None:
    text = text_of(a_status(), width)
    for fact in ("demo", "124", "2.1341", "tokens/s", "stage 2", friendly_name("12D3KooW21")[:8]):
        assert fact in text


def test_stages_stand_side_by_side_where_there_is_room() -> None:
    def row(width: int) -> str:
        return next(line for line in text_of(a_status(4), width).splitlines() if "stage 0" in line)

    assert "stage 3" in row(140)
    assert "stage 1" in row(80)
    assert "stage 2" not in row(80)
    assert "stage 1" not in row(45)


def test_a_state_needs_no_colour_to_be_seen() -> None:
    replicas = [
        a_replica(1, 0), a_replica(2, 0, "ready"), a_replica(3, 0, "joining"),
        a_replica(4, 0, "expelled", reason="its ledger differs"),
    ]  # fmt: skip
    reason = "stage 1 needs a peer"
    text = text_of(a_status(2, replicas=replicas, state="waiting", reason=reason), 80)
    for sign in "●◐○✗":
        assert sign in text
    for fact in ("waiting", reason, "needs a peer", "enters with the next step",
                 "fetching the state", "expelled", "its ledger differs"):  # fmt: skip
        assert fact in text
    assert "left" not in text


@pytest.mark.parametrize("height", [24, 30, 50])
@pytest.mark.parametrize(("num_stages", "each"), [(3, 1), (3, 2), (3, 9), (6, 40), (2, 0)])
def test_the_view_fits_the_height(num_stages: int, each: int, height: int) -> None:
    text = text_of(a_status(num_stages, each), 100, EVENTS * 10, height=height)
    lines = text.splitlines()
    assert len(lines) <= height
    assert "joined" in text
    for stage in range(num_stages):
        assert f"stage {stage}" in text
    if each == 40:
        assert "more" in text


def test_another_cut_is_named_where_it_would_gain() -> None:
    placement = {
        "stages": [4.0, 2.0], "best": 3.0, "plan": "", "moves": [],
        "recut": {"cut": [2, 4], "gain": 0.5, "reason": "cut [2, 4] would gain 50%"},
    }  # fmt: skip
    text = text_of(a_status(2, placement=placement), 140)
    assert "stage 1 is slowest: 2 microbatches/s" in text
    assert "at most 3 with these peers" in text
    assert "cut [2, 4] would gain 50%" in text
    placement["recut"] |= {"gain": 0.0, "reason": "none is better"}  # type: ignore[operator]
    assert "none is better" not in text_of(a_status(2, placement=placement), 140)


def test_a_loss_that_is_no_number_is_not_one_to_come() -> None:
    text = text_of(a_status(loss=None, losses=[[0, None], [1, None]]), 80, [])
    assert "not yet" not in text
    assert "no number" in text


def test_a_run_that_has_just_begun() -> None:
    status = a_status(
        state="waiting", loss=None, validation_loss=None, losses=[], tokens=0, tokens_per_s=0.0,
        step=0, replicas=[], bytes={"boundaries": [], "leader_per_token": 0.0},
    )  # fmt: skip
    text = text_of(status, 80, [])
    assert "not yet" in text
    assert text.count("needs a peer") == 3
    assert text_of({}, 80, []).startswith("run")


def test_what_peers_say_cannot_steer_the_terminal() -> None:
    bad = "\x1b[2J\x1b]0;owned\x07[red]\u202e" + "x" * 1000
    replicas = [a_replica(1, 0, "expelled", reason=bad, device=bad)]
    status = a_status(1, run={"name": bad}, reason=bad, replicas=replicas)
    text = text_of(status, 80, [{"t": 1, "event": "left", "replica": bad, "reason": bad}])
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "[red]" in text


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["stage", "t", "event", "replica", "boundary"]), inner)
    ),
    max_leaves=6,
)
KEYS = sorted(a_status())


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), junk), st.dictionaries(st.text(max_size=3), junk))
def test_a_status_from_elsewhere_may_hold_anything(changes: dict, event: dict) -> None:
    text_of({**a_status(), **changes}, 80, [{**event, "event": "left"}])


def test_plain_lines() -> None:
    result = StepResult(12, 2.5, 0.123456, 8192, 1.25, validation_loss=2.25)
    line = "step 12  loss 2.5000  norm 0.123  1.25 s  6.55k tokens/s  validation 2.2500"
    assert plain_line(result) == line
    assert plain_line({"step": 3, "loss": None}) == "step 3  loss nan"


def test_without_a_terminal_every_step_is_a_line() -> None:
    file = io.StringIO()
    console = Console(file=file, width=40)
    step = {"t": 1, "event": "step", "step": 0, "loss": 3.0, "tokens": 10, "wall_s": 1.0}
    with TerminalView(console=console) as view:
        view.note("join with: swarm-peer --join swarm://" + "a" * 100)
        status = a_status(state="waiting", reason="stage 1 needs a peer", losses=[])
        view.update(a_status(state="waiting", reason="waiting for peers", losses=[]))
        view.update(status)
        view.update(status, EVENTS[:1])
        view.update(a_status(losses=[[0, 3.0]]), [step])
        view.update(a_status(losses=[[0, 3.0], [1, 2.5]]))
        view.update(a_status(losses=[[0, 3.0], [1, 2.5]]), [{**step, "step": 1}])
        view.update(a_status(state="finished", losses=[]), [{**step, "step": 2}])
    lines = file.getvalue().splitlines()
    assert lines[0] == "join with: swarm-peer --join swarm://" + "a" * 100
    assert lines[1:3] == ["waiting for peers", "waiting: stage 1 needs a peer"]
    assert lines[3].endswith("joined stage 1")
    assert lines[4:] == [
        "training",
        "step 0  loss 3.0000  1.00 s  10 tokens/s",
        "step 1  loss 2.5000",
        "step 2  loss 3.0000  1.00 s  10 tokens/s",
        "finished",
    ]


def test_what_a_former_life_of_the_run_said_is_not_shown(tmp_path: Path) -> None:
    file = io.StringIO()
    write_status(tmp_path / "status.json", a_status(state="finished", losses=[]))
    with TerminalView(console=Console(file=file, width=40)) as view:
        follower = Follower(view, tmp_path)
        follower.refresh()
        assert file.getvalue() == ""
        write_status(tmp_path / "status.json", a_status(state="waiting", losses=[]))
        follower.refresh()
    assert file.getvalue().startswith("waiting")


def test_on_a_terminal_the_picture_is_drawn_and_stays() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, height=40, force_terminal=True, _environ={})
    with TerminalView(console=console) as view:
        view.update(a_status(step=5), EVENTS)
        view.update(a_status(step=6))
    written = file.getvalue()
    assert "step 5 of 300" in written
    assert "step 6 of 300" in written[written.index("step 5 of 300") :]
    assert written.rindex("joined stage 1") > written.index("step 6 of 300")  # it stays in view
    assert "\x1b[?25h" in written  # the cursor is back


def test_status_is_printed_once() -> None:
    file = io.StringIO()
    print_status(a_status(), console=Console(file=file, width=80))
    assert "step 124 of 300" in file.getvalue()


def test_an_ascii_terminal_gets_ascii() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(file=file, width=80, force_terminal=True, _environ={})
    status = a_status(reason="größer", run={"name": "münchen"})
    with TerminalView(console=console) as view:
        view.note("für alle")
        view.update(status, [{"t": 1, "event": "left", "replica": "a", "reason": "…"}])
    print_status(status, console=console)
    file.flush()
    assert b"m?nchen" in raw.getvalue()


def test_numbers_are_short() -> None:
    assert [count_text(n) for n in (0, 812, 999.7, 12_391, 1_523_712, 2.5e9)] == [
        "0", "812", "1.00k", "12.4k", "1.52M", "2.50G",
    ]  # fmt: skip
    assert [bytes_text(n) for n in (0, 4.13, 512, 1024, 3_500_000)] == [
        "0 B", "4.1 B", "512 B", "1.02 kB", "3.50 MB",
    ]  # fmt: skip
    assert [duration_text(s) for s in (0, 45, 145, 11_050, 200_000)] == [
        "0:00", "0:45", "2:25", "3:04:10", "2 d 7 h",
    ]  # fmt: skip
    assert [service_text(s) for s in (0.0084, 0.052, 1.25)] == ["8.4 ms", "52 ms", "1.25 s"]


def test_a_sparkline_shows_the_whole_course() -> None:
    assert sparkline([4, 3, 2, 1], 10) == "█▆▃▁"
    assert sparkline([5.0] * 3, 10) == "▁▁▁"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""
    line = sparkline([math.nan, *(1000.0 - i for i in range(1000))], 20)
    assert len(line) == 20
    assert (line[0], line[-1]) == ("█", "▁")


def test_remaining_time_needs_a_speed() -> None:
    status = a_status(step=10, num_steps=30, tokens=1000, tokens_per_s=50.0)
    status["losses"] = []
    assert remaining_s(status) == 40.0
    assert remaining_s({**status, "losses": [[8, 1.0], [9, 1.0]]}) == 200.0  # 500 tokens a step
    for change in ({"tokens_per_s": 0.0}, {"step": 0}, {"step": 30}, {"state": "finished"}):
        assert remaining_s({**status, **change}) is None


def test_every_kind_of_event_is_news_or_known_not_to_be() -> None:
    from swarm.events import KINDS

    silent = {kind for kind in KINDS if event_text({"event": kind}) is None}
    assert silent == {"run", "step", "failed"}


def test_a_validation_that_could_not_be_had_is_no_loss_of_zero() -> None:
    event = {"event": "validation", "step": 2}
    assert event_text({**event, "loss": 1.25}) == "validation loss 1.2500 (step 2)"
    assert event_text({**event, "loss": None}) == "validation loss nan (step 2)"  # so in JSON
    why = {"loss": None, "reason": "no route"}
    assert event_text({**event, **why}) == "no validation loss (step 2): no route"
