"""What a dashboard keeps: over restarts, bounded, each committed microbatch once."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from pathlib import Path

import pytest

from swarm.errors import StorageError
from tests.unit.web_runs import NOW, answer, board, peer_ids, row, tell
from web.board import NUM_LIVES, Board
from web.broadcast import Broadcast
from web.intake import PeerReport
from web.serve import keep_publishing
from web.store import ACTIVITY_BUCKET_S, LEVELS, MAX_EVENTS, MAX_POINTS, METRICS, Store


def test_series_are_averaged_in_buckets() -> None:
    store = Store(":memory:")
    for second in range(600):
        store.add(NOW + second, {"loss": float(second), "peers": None})
    columns = store.series("1h", NOW + 600)
    assert columns["loss"][:2] == [1.5, 5.5]
    assert len(columns["t"]) == 150
    assert set(columns) == {"t", *METRICS}
    assert all(len(column) == len(columns["t"]) for column in columns.values())
    assert columns["peers"] == [None] * 150


@pytest.mark.parametrize("span", ["1h", "6h", "1d", "all"])
def test_every_span_is_short_enough_to_draw(span: str) -> None:
    store = Store(":memory:")
    end = NOW + 3 * 86400
    for minute in range(3 * 24 * 60):
        store.add(NOW + 60 * minute, {"loss": 1.0})
    columns = store.series(span, end)
    assert 10 < len(columns["t"]) <= MAX_POINTS + 1
    assert columns["t"] == sorted(columns["t"])
    assert columns["t"][-1] <= end


def test_the_file_stays_bounded(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.sqlite")
    for hour in range(24 * 90):
        now = NOW + 3600.0 * hour
        store.add(now, dict.fromkeys(METRICS, 1.0))
        store.add_events([{"t": now, "event": "left"}] * 10)
        store.add_activity(now, "peer", [1.0] * 5)
        if hour % 100 == 0:
            store.prune(now)
    store.prune(now)
    store.commit()
    count = store._db.execute("SELECT count(*) FROM series").fetchone()[0]
    assert count <= sum(life // bucket + 1 for bucket, life in LEVELS) * len(METRICS)
    assert store._db.execute("SELECT count(*) FROM events").fetchone()[0] <= MAX_EVENTS
    assert store._db.execute("SELECT count(*) FROM activity").fetchone()[0] < 10
    assert store.series("all", now)["loss"]
    store.close()


def test_contributors_are_counted_once_over_restarts(tmp_path: Path) -> None:
    peers = peer_ids(tmp_path, 2)
    path = tmp_path / "kept" / "x.sqlite"
    shown = board(Store(path))
    tell(shown, answer([row(peers[0], 0, counted=10), row(peers[1], 1, counted=4)]))
    tell(shown, answer([row(peers[0], 0, counted=15)]), NOW + 6)
    shown.store.close()
    shown = board(Store(path))
    tell(shown, answer([row(peers[0], 0, counted=15)]), NOW + 12)  # the dashboard was restarted
    assert _done(shown) == {peers[0]: 15, peers[1]: 4}
    again = row(peers[0], 0, counted=3)
    tell(shown, answer([again], life="cd34"), NOW + 18)  # the leader was
    tell(shown, answer([{**again, "replica": f"{peers[0]}#beef", "counted": 2}], life="cd34"))
    assert _done(shown) == {peers[0]: 20, peers[1]: 4}


def test_who_comes_back_in_the_same_life_is_counted_on(tmp_path: Path) -> None:
    (peer,) = peer_ids(tmp_path, 1)
    shown = board()
    for second, counted in enumerate([10, 3, 3, 7, 0, 2]):
        tell(shown, answer([row(peer, 0, counted=counted)]), NOW + second)
    assert _done(shown) == {peer: 10 + 7 + 2}


def test_a_name_that_comes_before_the_first_count_is_kept(tmp_path: Path) -> None:
    (peer,) = peer_ids(tmp_path, 1)
    shown = board()
    tell(shown, answer([row(peer, 0, counted=0)]))
    shown.announced(peer, "0.1.0", "Ada")
    tell(shown, answer([row(peer, 0, counted=4)]), NOW + 1)
    shown.announced(peer, "0.1.0", "Ada")
    tell(shown, answer([row(peer, 0, counted=4)]), NOW + 9)
    (kept,) = shown.snapshot(NOW + 9)["contributors"]
    assert (kept["label"], kept["counted"]) == ("Ada", 4)


def _done(shown: object) -> dict[str, int]:
    return {each["peer"]: each["counted"] for each in shown.store.contributors()}  # type: ignore[attr-defined]


def test_events_are_kept_once_and_the_cursor_with_them(tmp_path: Path) -> None:
    peers = peer_ids(tmp_path, 1)
    path = tmp_path / "x.sqlite"
    shown = board(Store(path))
    event = {"t": NOW, "event": "joined", "replica": f"{peers[0]}#1", "stage": 0}
    tell(shown, answer([row(peers[0], 0)], events=[event], after=41))
    assert shown.cursor == {"after": 41, "life": "ab12"}
    shown.store.close()
    shown = board(Store(path))
    assert shown.cursor == {"after": 41, "life": "ab12"}
    (line,) = shown.snapshot(NOW)["feed"]
    assert line["text"].endswith("joined stage 0")
    assert shown.marks(NOW - 1)[0]["kind"] == "joined"
    assert shown.store.events(peer=peers[0])[0]["event"] == "joined"


def test_a_trainer_that_leads_again_tells_nothing_twice(tmp_path: Path) -> None:
    """Nor after a restart of the dashboard; one that never led before tells all."""
    path = tmp_path / "x.sqlite"
    told: dict[str, list[dict[str, object]]] = {"aa": [], "bb": []}

    def hear(shown: Board, life: str, *new: float) -> None:
        """As `peer.observe` answers."""
        told[life] += [{"t": t, "event": "left"} for t in new]
        asked = shown.cursor
        after = asked["after"] if asked["life"] == life else 0
        body = answer([], life=life, events=told[life][after:], after=len(told[life]))
        assert tell(shown, body, NOW + 10)

    shown = board(Store(path))
    hear(shown, "aa", NOW + 1, NOW + 2)
    hear(shown, "bb", NOW + 3)
    hear(shown, "aa", NOW + 4)
    hear(shown, "aa")
    shown.store.close()
    shown = board(Store(path))
    hear(shown, "bb", NOW + 5)
    hear(shown, "bb", NOW + 6)
    assert [event["t"] - NOW for event in shown.store.events()] == [6, 5, 4, 3, 2, 1]
    shown.store.close()


def test_of_many_lives_the_last_are_remembered() -> None:
    shown = board()
    for number in range(3 * NUM_LIVES):
        tell(shown, answer([], life=f"{number:x}"))
    assert len(shown.store.get("cursors")) == NUM_LIVES
    assert shown.cursor == {"after": 3, "life": f"{3 * NUM_LIVES - 1:x}"}


def test_steps_become_series_at_their_own_times(tmp_path: Path) -> None:
    shown = board()
    steps = [
        {"t": NOW - 100 + 10 * n, "event": "step", "step": n, "loss": 5.0 - n, "tokens": 100,
         "wall_s": 2.0} for n in range(4)
    ]  # fmt: skip
    tell(shown, answer([], events=[*steps, {"t": NOW - 65, "event": "validation", "loss": 4.5}]))
    columns = shown.store.series("1h", NOW)
    losses = [value for value in columns["loss"] if value is not None]
    assert losses == [5.0, 4.0, 3.0, 2.0]
    assert 4.5 in columns["validation_loss"]
    assert 50.0 in columns["tokens_per_s"]
    assert shown.snapshot(NOW)["feed"] == []


def test_a_disk_that_refuses_costs_the_history_and_not_the_page(tmp_path: Path) -> None:
    peers = peer_ids(tmp_path, 1)
    shown = board(Store(tmp_path / "x.sqlite"))
    shown.store._db.execute("PRAGMA query_only = ON")
    assert tell(shown, answer([row(peers[0], 0)], after=9))
    assert shown.snapshot(NOW)["head"]["step"] == 8
    assert shown.notes.total == 0, "nobody has said what makes no sense"
    assert shown.cursor["after"] == 9
    shown.store._db.execute("PRAGMA query_only = OFF")
    assert tell(shown, answer([row(peers[0], 0)], after=9), NOW + 1)
    assert shown.cursor["after"] == 9
    assert _done(shown) == {peers[0]: 10}


def test_what_the_disk_refuses_is_shown_once_and_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peers = peer_ids(tmp_path, 1)
    shown = board(Store(tmp_path / "x.sqlite"))
    with contextlib.closing(sqlite3.connect(tmp_path / "x.sqlite", isolation_level=None)) as other:
        other.execute(
            "CREATE TRIGGER full BEFORE INSERT ON meta BEGIN SELECT RAISE(FAIL, 'no'); END"
        )
        events = [
            {"t": NOW, "event": "joined", "replica": f"{peers[0]}#00ff", "stage": 0},
            {"t": NOW, "event": "step", "step": 1, "loss": 3.0, "tokens": 10, "wall_s": 1.0},
        ]
        assert tell(shown, answer([row(peers[0], 0)], events=events, after=9), NOW)
        for second in range(1, 3):
            assert tell(shown, answer([row(peers[0], 0)], after=9), NOW + second)
        assert shown.cursor["after"] == 9
        assert [line["kind"] for line in shown.snapshot(NOW + 3)["feed"]] == ["joined"]
        assert not shown.store.events()
        assert [each.levelname for each in caplog.records] == ["ERROR"]
        other.execute("DROP TRIGGER full")
    left = [{"t": NOW + 3, "event": "left", "replica": f"{peers[0]}#00ff"}]
    tell(shown, answer([], events=left, after=10), NOW + 3)
    assert [line["n"] for line in shown.snapshot(NOW + 3)["feed"]] == [1, 2]
    assert len(shown.store.events()) == 1


def test_what_replicas_tell_while_the_leader_is_silent_is_kept_and_pruned(tmp_path: Path) -> None:
    (peer,) = peer_ids(tmp_path, 1)
    path, now = tmp_path / "x.sqlite", time.time()
    shown = board(Store(path))
    tell(shown, answer([row(peer, 0)]), now - 7200)
    for ago, seconds in ((7200, 1.0), (7190, 2.0), (0, 3.0)):
        report = PeerReport("", "", (seconds, 0.0, 0.0, 0.0, 0.0))
        shown.peer(f"{peer}#00ff", report, now - ago)

    async def main() -> None:
        publishing = asyncio.create_task(keep_publishing(shown, Broadcast()))
        await asyncio.sleep(0)
        publishing.cancel()

    asyncio.run(main())
    with contextlib.closing(sqlite3.connect(path)) as other:
        kept = other.execute("SELECT bucket FROM activity").fetchall()
    assert kept == [(int(now // ACTIVITY_BUCKET_S),)]


def test_a_tick_says_once_what_the_disk_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = board(Store(tmp_path / "x.sqlite"))
    shown.store._db.execute("PRAGMA query_only = ON")
    for minute in range(3):
        shown.tick(NOW + 61 * minute)
    assert [each.levelname for each in caplog.records] == ["ERROR"]


DAMAGE = {
    "a value": "UPDATE meta SET value = '{'",
    "an event": "UPDATE events SET data = '[1]'",
    "an event's time": 'UPDATE events SET data = \'{"t": "x", "event": "left"}\'',
    "a contributor": "UPDATE contributors SET first = 'x'",
    "activity": "UPDATE activity SET seconds = '{\"a\": 1}'",
    "another table": "DROP TABLE lives; CREATE TABLE lives (a, b)",
}


def kept(path: Path) -> None:
    """A history with something of everything."""
    (peer,) = peer_ids(path.parent, 1)
    store = Store(path)
    shown = board(store)
    events = [{"t": NOW, "event": "left", "replica": f"{peer}#1", "reason": "x" * 150}] * 200
    tell(shown, answer([row(peer, 0)], events=events))
    store.add_activity(NOW, peer, [1.0] * 5)
    store.commit()
    store.close()


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_said_in_a_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.sqlite"
    kept(path)
    Store(path).close()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.executescript(damage)
    with pytest.raises(StorageError, match=r"cannot use .*x\.sqlite.* move it away"):
        Store(path)


def test_so_are_pages_that_are_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    kept(path)
    whole = path.read_bytes()
    assert len(whole) > 10 * 4096
    path.write_bytes(whole[:8192] + b"\xa5" * (len(whole) - 8192))
    with pytest.raises(StorageError, match=r"cannot use .*x\.sqlite.*damaged.* move it away"):
        Store(path)


def test_another_version_may_have_kept_more_series() -> None:
    store = Store(":memory:")
    store.add(NOW, {"loss": 1.0})
    store._db.execute("INSERT INTO series VALUES (0, ?, ?, 1, 1.0)", (NOW // 2, len(METRICS)))
    assert store.series("1h", NOW)["loss"] == [1.0]


def test_a_second_dashboard_of_the_run_is_refused_while_the_first_lasts(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    first = Store(path)
    with pytest.raises(StorageError, match=r"another dashboard .*x\.sqlite.* --data-dir"):
        Store(path)
    first.put("life", "ab12")
    first.commit()
    first.close()
    second = Store(path)
    assert second.get("life") == "ab12"
    second.close()


def test_a_path_that_cannot_be_used_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot use"):
        Store(tmp_path / "file" / "x.sqlite")
    (tmp_path / "junk.sqlite").write_text("this is no database, but it is long enough " * 40)
    with pytest.raises(StorageError, match="cannot use"):
        Store(tmp_path / "junk.sqlite")
