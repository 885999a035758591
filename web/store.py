"""What a dashboard remembers over restarts: series, events, contributors, activity. SQLite, WAL.

Bounded by construction: every series is kept at four resolutions, each for a fixed time, so the
file reaches a size and stays there; events and contributors have a most. A value is added to every
resolution at once (sum, count), so nothing has to be computed again when a day is shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from swarm.errors import StorageError

P = ParamSpec("P")
T = TypeVar("T")

METRICS = (
    "loss", "validation_loss", "tokens_per_s", "raw_bps", "wire_bps", "utilisation", "peers",
)  # fmt: skip
LEVELS = ((2, 2 * 3600), (15, 12 * 3600), (60, 3 * 86400), (900, 400 * 86400))  # (bucket, life) s
RANGES = {"1h": 3600.0, "6h": 6 * 3600.0, "1d": 86400.0}
MAX_POINTS = 1000
MAX_EVENTS = 20_000
MAX_CONTRIBUTORS = 10_000
ACTIVITY_BUCKET_S, ACTIVITY_LIFE_S, MAX_ACTIVITY_PEERS = 10, 3600, 64
LIFE_S = 7 * 86400.0  # of what is known of one life of a peer
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS series (level INTEGER, bucket INTEGER, metric INTEGER, count INTEGER,
  sum REAL, PRIMARY KEY (level, metric, bucket)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (n INTEGER PRIMARY KEY AUTOINCREMENT, t REAL, event TEXT,
  replica TEXT, data TEXT);
CREATE INDEX IF NOT EXISTS events_of ON events (replica, n);
CREATE TABLE IF NOT EXISTS lives (life TEXT, incarnation TEXT, counted INTEGER, t REAL,
  PRIMARY KEY (life, incarnation)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contributors (peer TEXT PRIMARY KEY, counted INTEGER, name TEXT,
  first REAL, last REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS activity (bucket INTEGER, peer TEXT, seconds TEXT,
  PRIMARY KEY (bucket, peer)) WITHOUT ROWID;
"""
COLUMNS = """SELECT t.name, c.name, c.pk FROM sqlite_master t, pragma_table_info(t.name) c
  WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'"""

_MOVE_AWAY = "move it away to begin a new one, or name another directory with --data-dir"


def _of_a_file(
    method: Callable[Concatenate[Store, P], T],
) -> Callable[Concatenate[Store, P], T]:
    """What the file refuses, or holds and nobody can have kept in it, is a StorageError."""

    @functools.wraps(method)
    def told(self: Store, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except (sqlite3.OperationalError, OSError) as error:  # locked, full, not ours
            what, remedy = str(error), "mend that, or name another directory with --data-dir"
        except sqlite3.Error as error:
            what, remedy = str(error), _MOVE_AWAY
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            what, remedy = "it is damaged", _MOVE_AWAY
        raise StorageError(f"cannot use {self.path} for the dashboard: {what}", remedy)

    return told


class Store:
    """One file, one writer. `path` may be `:memory:`. Everything but `close` and `forget` raises
    StorageError when the file cannot be used, or is damaged.

    Changes are kept with `commit`; what was not committed is lost with the process, as a whole.
    """

    @_of_a_file
    def __init__(self, path: str | Path) -> None:
        self.path = path
        with contextlib.ExitStack() as opened:
            if str(path) != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                opened.enter_context(_alone(path))
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level="DEFERRED")
            opened.callback(self._db.close)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA journal_size_limit=4194304")
            self._db.executescript(SCHEMA)
            self._check()
            self._opened = opened.pop_all()

    def _check(self) -> None:
        """Read everything once: a damaged file is told of now, and not by a page some day."""
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise ValueError(found)
        with contextlib.closing(sqlite3.connect(":memory:")) as new:
            new.executescript(SCHEMA)
            if set(self._db.execute(COLUMNS)) != set(new.execute(COLUMNS)):
                raise sqlite3.DatabaseError("its tables are not those of this version")
        for (value,) in self._db.execute("SELECT value FROM meta"):
            json.loads(value)
        for (seconds,) in self._db.execute("SELECT seconds FROM activity"):
            _seconds(seconds)
        self.events(limit=-1)
        self.contributors(limit=-1)
        self.series("all", 0.0)

    def close(self) -> None:
        self._opened.close()

    @_of_a_file
    def commit(self) -> None:
        """Keep what was added."""
        self._db.commit()

    def forget(self) -> None:
        """What was added since the last commit is not kept."""
        with contextlib.suppress(sqlite3.Error):
            self._db.rollback()

    # ---- small facts ----------------------------------------------------------------------------

    @_of_a_file
    def get(self, key: str, default: Any = None) -> Any:
        """What `put` kept under this key."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else json.loads(row[0])

    @_of_a_file
    def put(self, key: str, value: Any) -> None:
        """Keep a JSON value."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    # ---- series ---------------------------------------------------------------------------------

    @_of_a_file
    def add(self, t: float, values: Mapping[str, float | None]) -> None:
        """Add what was measured at `t`; None is nothing."""
        rows = [
            (level, int(t // bucket), METRICS.index(name), float(value))
            for level, (bucket, _) in enumerate(LEVELS)
            for name, value in values.items()
            if value is not None
        ]
        self._db.executemany(
            "INSERT INTO series VALUES (?1, ?2, ?3, 1, ?4) ON CONFLICT DO UPDATE SET "
            "count = count + 1, sum = sum + ?4",
            rows,
        )

    @_of_a_file
    def series(self, span: str, now: float) -> dict[str, list[float | None]]:
        """`{"t": […], metric: […], …}` of the last `1h`, `6h`, `1d`, or of all; ≤ 1000 points."""
        oldest = self._db.execute("SELECT min(bucket) FROM series WHERE level = 3").fetchone()[0]
        first = (oldest or 0) * LEVELS[3][0]
        since = now - RANGES[span] if span in RANGES else float(first)
        level = next(
            (
                number
                for number, (_, life) in enumerate(LEVELS)
                if now - since <= life and (span in RANGES or now - first <= life)
            ),
            len(LEVELS) - 1,
        )
        bucket = LEVELS[level][0]
        factor = max(1, -(-int((now - since) / bucket) // MAX_POINTS))
        found: dict[int, list[float | None]] = {}
        for at, metric, value in self._db.execute(
            "SELECT bucket / ?1, metric, sum(sum) / sum(count) FROM series "
            "WHERE level = ?2 AND bucket >= ?3 AND metric < ?4 "
            "GROUP BY 1, 2 ORDER BY 1 DESC LIMIT ?5",
            (factor, level, int(since // bucket), len(METRICS), MAX_POINTS * len(METRICS)),
        ):
            found.setdefault(at, [None] * len(METRICS))[metric] = value
        times = sorted(found)
        columns: dict[str, list[float | None]] = {
            "t": [(at + 0.5) * bucket * factor for at in times]
        }
        for number, name in enumerate(METRICS):
            columns[name] = [_short(found[at][number]) for at in times]
        return columns

    # ---- events ---------------------------------------------------------------------------------

    @_of_a_file
    def add_events(self, events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Keep events as `web.intake` gave them; returns them with their numbers, `n`."""
        kept = []
        for event in events:
            added = self._db.execute(
                "INSERT INTO events (t, event, replica, data) VALUES (?, ?, ?, ?)",
                (event["t"], event["event"], _peer(event.get("replica")), json.dumps(event)),
            )
            kept.append({"n": added.lastrowid, **event})
        return kept

    @_of_a_file
    def events(
        self, *, before: int | None = None, after: int = 0, peer: str | None = None, limit: int = 50
    ) -> list[dict[str, Any]]:
        """Events with their number `n`, newest first."""
        wheres, values = ["n > ?"], [after]
        if before is not None:
            wheres.append("n < ?")
            values.append(before)
        if peer is not None:
            wheres.append("replica = ?")
            values.append(peer)  # type: ignore[arg-type]
        rows = self._db.execute(
            f"SELECT n, data FROM events WHERE {' AND '.join(wheres)} ORDER BY n DESC LIMIT ?",
            (*values, limit),
        )
        return [_event(n, data) for n, data in rows]

    @_of_a_file
    def marks(self, kinds: Sequence[str], since: float, limit: int = 200) -> list[dict[str, Any]]:
        """The last events of these kinds, oldest first."""
        signs = ",".join("?" * len(kinds))
        rows = self._db.execute(
            f"SELECT n, data FROM events WHERE event IN ({signs}) AND t >= ? "
            "ORDER BY n DESC LIMIT ?",
            (*kinds, since, limit),
        ).fetchall()
        return [_event(n, data) for n, data in reversed(rows)]

    # ---- who has done how much ------------------------------------------------------------------

    @_of_a_file
    def count(self, life: str, incarnation: str, counted: int, now: float) -> int:
        """A leader of this life says how much a replica has done; returns what is new of it."""
        row = self._db.execute(
            "SELECT counted, t FROM lives WHERE life = ? AND incarnation = ?", (life, incarnation)
        ).fetchone()
        old, told_at = row or (None, now)
        # Who comes back under the same incarnation is counted from nothing.
        new = counted - old if old is not None and counted >= old else counted
        if counted != old or now - told_at > 86400.0:  # or it would be counted anew one day
            self._db.execute(
                "INSERT OR REPLACE INTO lives VALUES (?, ?, ?, ?)",
                (life, incarnation, counted, now),
            )
        if new:
            self._db.execute(
                "INSERT INTO contributors VALUES (?1, ?2, '', ?3, ?3) ON CONFLICT DO UPDATE SET "
                "counted = counted + ?2, last = ?3",
                (_peer(incarnation), new, now),
            )
        return new

    @_of_a_file
    def name(self, peer: str, name: str) -> None:
        """A contributor wants to be named so (or, with none, not at all)."""
        self._db.execute(
            "UPDATE contributors SET name = ?1 WHERE peer = ?2 AND name != ?1", (name, peer)
        )

    @_of_a_file
    def contributors(self, limit: int = 50, offset: int = 0) -> list[dict[str, Any]]:
        """Those who have done most, first."""
        rows = self._db.execute(
            "SELECT peer, counted, name, first, last FROM contributors "
            "ORDER BY counted DESC, peer LIMIT ? OFFSET ?",
            (limit, offset),
        )
        return [_contributor(*row) for row in rows]

    @_of_a_file
    def contributor(self, peer: str) -> dict[str, Any] | None:
        """One of them."""
        row = self._db.execute(
            "SELECT peer, counted, name, first, last FROM contributors WHERE peer = ?", (peer,)
        ).fetchone()
        return _contributor(*row) if row else None

    # ---- how time was spent ---------------------------------------------------------------------

    @_of_a_file
    def add_activity(self, t: float, peer: str, seconds: Sequence[float]) -> None:
        """`peer` has spent these seconds, by activity, up to `t`."""
        key = (int(t // ACTIVITY_BUCKET_S), peer)
        row = self._db.execute(
            "SELECT seconds FROM activity WHERE bucket = ? AND peer = ?", key
        ).fetchone()
        before = _seconds(row[0]) if row else [0.0] * len(seconds)
        total = [round(a + b, 2) for a, b in zip(before, seconds, strict=True)]
        self._db.execute(
            "INSERT OR REPLACE INTO activity VALUES (?, ?, ?)", (*key, json.dumps(total))
        )

    @_of_a_file
    def activity(self, now: float, span_s: float = 600.0) -> dict[str, Any]:
        """`{"t": […], "peers": {peer: [[seconds by activity] or None, …]}}`, oldest first."""
        last = int(now // ACTIVITY_BUCKET_S)
        first = last - int(min(span_s, ACTIVITY_LIFE_S) // ACTIVITY_BUCKET_S) + 1
        peers: dict[str, list[list[float] | None]] = {}
        for bucket, peer, seconds in self._db.execute(
            "SELECT bucket, peer, seconds FROM activity WHERE bucket BETWEEN ? AND ? "
            "ORDER BY peer, bucket",
            (first, last),
        ):
            if peer not in peers and len(peers) >= MAX_ACTIVITY_PEERS:
                continue
            row = peers.setdefault(peer, [None] * (last - first + 1))
            row[bucket - first] = _seconds(seconds)
        times = [bucket * ACTIVITY_BUCKET_S for bucket in range(first, last + 1)]
        return {"t": times, "peers": peers}

    # ---- retention ------------------------------------------------------------------------------

    @_of_a_file
    def prune(self, now: float) -> None:
        """Forget what is too old or too much. Cheap; call it every minute or so."""
        for level, (bucket, life) in enumerate(LEVELS):
            self._db.execute(
                "DELETE FROM series WHERE level = ? AND bucket < ?",
                (level, int((now - life) // bucket)),
            )
        self._db.execute(
            "DELETE FROM events WHERE n <= (SELECT max(n) FROM events) - ?", (MAX_EVENTS,)
        )
        self._db.execute("DELETE FROM lives WHERE t < ?", (now - LIFE_S,))
        oldest = int((now - ACTIVITY_LIFE_S) // ACTIVITY_BUCKET_S)
        self._db.execute("DELETE FROM activity WHERE bucket < ?", (oldest,))
        self._db.execute(
            "DELETE FROM contributors WHERE peer IN (SELECT peer FROM contributors "
            "ORDER BY counted DESC, peer LIMIT -1 OFFSET ?)",
            (MAX_CONTRIBUTORS,),
        )


@contextlib.contextmanager
def _alone(path: str | Path) -> Iterator[None]:
    """The one writer, or StorageError: two would count everything twice. The lock is of a file
    beside it, which stays; SQLite has locks of its own on the file itself."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"another dashboard of this run uses {path}",
                "stop it, or name another directory with --data-dir",
            ) from None
        yield
    finally:
        os.close(descriptor)


def _event(n: int, data: str) -> dict[str, Any]:
    event = json.loads(data)
    return {"n": n, **event, "t": float(event["t"]), "event": str(event["event"])}


def _contributor(peer: str, counted: int, name: str, first: float, last: float) -> dict[str, Any]:
    return {
        "peer": str(peer),
        "counted": int(counted),
        "name": str(name),
        "first": float(first),
        "last": float(last),
    }


def _seconds(data: str) -> list[float]:
    return [float(each) for each in json.loads(data)]


def _peer(incarnation: object) -> str | None:
    return incarnation.partition("#")[0] if isinstance(incarnation, str) else None


def _short(value: float | None) -> float | None:
    """Six digits: a chart shows fewer, and a reader pays for more."""
    return None if value is None else float(f"{value:.6g}")
