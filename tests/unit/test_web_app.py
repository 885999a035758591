"""The web application without a network: pages, REST, events, metrics, limits."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.unit.web_runs import NOW, answer, board, peer_ids, row, tell
from web.app import create_app
from web.board import Board
from web.broadcast import QUEUE, Broadcast, difference
from web.intake import read_peer
from web.limits import Limits

SCRIPT = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'
SECONDS = dict.fromkeys(("compute", "average", "move", "transfer", "wait"), 1.0)


@pytest.fixture
def peers(tmp_path: Path) -> list[str]:
    return peer_ids(tmp_path, 3)


@pytest.fixture
def shown(peers: list[str]) -> Board:
    """A run with a replica whose every text is hostile."""
    made = board()
    events = [
        {"t": NOW - 9, "event": "joined", "replica": f"{peers[0]}#00ff", "stage": 0},
        {"t": NOW - 8, "event": "expelled", "replica": f"{peers[1]}#00ff", "reason": SCRIPT},
        {"t": NOW - 7, "event": "step", "step": 1, "loss": 3.0, "tokens": 10, "wall_s": 1.0},
        {"t": NOW - 4, "event": "step", "step": 2, "loss": 2.0, "tokens": 10, "wall_s": 1.0},
    ]
    rows = [row(peers[0], 0, device=SCRIPT, reason=SCRIPT), row(peers[1], 1)]
    body = answer(rows, events=events, reason=SCRIPT)
    body["status"]["run"]["name"] = SCRIPT
    body["version"] = SCRIPT
    assert tell(made, body)
    for name, seconds in ((SCRIPT, SECONDS), (SCRIPT, {**SECONDS, "wait": 9.0})):
        report = read_peer({"seconds": seconds, "name": name}, made.notes, "x")
        assert report is not None
        made.peer(f"{peers[0]}#00ff", report, NOW)
    tell(made, answer(rows, reason=SCRIPT, state="waiting"), NOW + 6)
    return made


Client = Callable[..., TestClient]


@pytest.fixture
def client(shown: Board) -> Iterator[Client]:
    made: list[TestClient] = []

    def make(limits: Limits | None = None, publish: bool = True) -> TestClient:
        broadcast = Broadcast()
        if publish:
            broadcast.publish(shown.snapshot(NOW + 7), NOW + 7)
        app = create_app(
            shown, broadcast, limits=limits or Limits(rate=1e9, burst=1e9), clock=lambda: NOW + 8
        )
        made.append(TestClient(app, raise_server_exceptions=False))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Elements(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("path", ["/", "/peer/{}"])
def test_pages_are_readable_without_scripts_and_hold_none_of_others(
    client: Client, peers: list[str], path: str
) -> None:
    answered = client().get(path.format(peers[0]))
    assert answered.status_code == 200
    page = Elements(answered.text)
    scripts = [each for tag, each in page.found if tag == "script"]
    assert all(each.get("src", "").startswith("static/") or each.get("type") == "application/json"
               for each in scripts)  # fmt: skip
    for tag, attributes in page.found:
        assert tag != "img"
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        for name in ("src", "href"):
            target = attributes.get(name) or ""
            assert not re.match(r"\w+:|//|/", target), f"{target} is not relative"
    words = " ".join(" ".join(page.words).split())
    assert 'alert("x")' in words, "the hostile name is shown, as text"
    if path == "/":
        for expected in ("Stalled", "8 of 100", "Stage 0", "Stage 1", "joined stage 0", "2.0000"):
            assert expected in words
        data = next(text for text in page.words if text.startswith('{"n"'))
        assert json.loads(data)["head"]["step"] == 8
        assert "swarm-peer --join" in words
    else:
        assert "committed microbatches" in words


def test_the_first_word_is_waited_for() -> None:
    app = create_app(board(), Broadcast(), clock=lambda: NOW)
    with TestClient(app) as client:
        page = client.get("/").text
        assert "waiting for the leader" in page
        assert client.get("/healthz").json() == {"status": "stale", "heard_s": None, "viewers": 0}
        assert client.get("/api/v1/status").json()["stages"] == []


def test_rest(client: Client, peers: list[str]) -> None:
    get = client().get
    status = get("/api/v1/status").json()
    assert status["head"]["state"] == "stalled"
    assert [each["stage"] for each in status["stages"]] == [0, 1]
    series = get("/api/v1/series", params={"span": "6h"}).json()
    assert [value for value in series["loss"] if value] == [2.5]
    assert {mark["kind"] for mark in series["marks"]} == {"joined", "expelled"}
    events = get("/api/v1/events").json()
    assert [each["kind"] for each in events] == ["expelled", "joined"]
    older = get("/api/v1/events", params={"before": events[0]["n"]}).json()
    assert older == events[1:]
    rows = get("/api/v1/peers").json()
    assert [each["peer"] for each in rows] == peers[:2]
    assert [each["stage"] for each in get("/api/v1/peers", params={"stage": 1}).json()] == [1]
    facts = get(f"/api/v1/peers/{peers[0]}").json()
    assert facts["contributor"]["counted"] == 10
    assert facts["replicas"][0]["stage"] == 0
    assert get("/api/v1/contributors").json()[0]["counted"] == 10
    timeline = get("/api/v1/timeline").json()
    assert timeline["peers"][0]["seconds"][-1] == [0.0, 0.0, 0.0, 0.0, 8.0]
    assert get("/healthz").json()["status"] == "ok"
    text = get("/metrics").text
    assert "swarm_step 8\n" in text
    assert 'swarm_health{state="stalled"} 1' in text
    assert 'swarm_stage_replicas_serving{stage="1"} 1' in text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/peer/nobody", 404),
        ("/api/v1/peers/../../etc/passwd", 404),
        ("/static/../app.py", 404),
        ("/static/%2e%2e/app.py", 404),
        ("/docs", 404),
        ("/redoc", 404),
        ("/healthz/", 404),
        ("/api/v1/stream/", 404),
        ("/static", 404),
        ("/api/v1/series?span=2y", 422),
        ("/api/v1/events?limit=100000", 422),
        ("/api/v1/contributors?offset=-1", 422),
        (f"/{'x' * 600}", 414),
        (f"/?{'x' * 2000}", 414),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_there_is_not(client: Client, path: str, status: int) -> None:
    assert client().get(path, follow_redirects=False).status_code == status


def test_a_known_id_of_nobody_is_404(client: Client, peers: list[str]) -> None:
    assert client().get(f"/peer/{peers[2]}").status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(client: Client, method: str) -> None:
    for path in ("/", "/api/v1/status", "/static/app.js", "/api/v1/stream"):
        assert client().request(method, path).status_code == 405


@pytest.mark.parametrize(
    "path", ["/", "/healthz", "/api/v1/status", "/static/app.js", "/metrics", "/nothing", "/peer/x"]
)
def test_a_head_is_a_get_without_its_body(client: Client, path: str) -> None:
    whole, head = client().get(path), client().head(path)
    assert whole.content
    assert not head.content
    assert head.status_code == whole.status_code
    assert head.headers == whole.headers


@pytest.mark.parametrize(
    ("address", "other", "same"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("testclient", "another", False),
    ],
)
def test_who_has_many_addresses_counts_as_one(
    client: Client, address: str, other: str, same: bool
) -> None:
    app = client(Limits(rate=0.001, burst=1)).app
    first, second = (TestClient(app, client=(each, 1)) for each in (address, other))
    assert first.get("/healthz").status_code == 200
    assert second.get("/healthz").status_code == (429 if same else 200)


def test_a_head_counts_as_a_request(client: Client) -> None:
    limited = client(Limits(rate=0.001, burst=2))
    assert [limited.head("/healthz").status_code for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize("damage", ["DROP TABLE {}", "UPDATE {} SET {} = '{{'"])
def test_a_history_that_is_damaged_meanwhile_costs_the_past_only(
    shown: Board, client: Client, peers: list[str], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    get = client().get
    broken = {"series": "sum", "events": "data", "contributors": "first", "activity": "seconds"}
    for table, column in broken.items():
        shown.store._db.execute(damage.format(table, column))
    for path in ("events", "contributors", f"peers/{peers[0]}", "timeline"):
        answered = get(f"/api/v1/{path}")
        assert (answered.status_code, answered.text) == (503, "the history cannot be read\n"), path
    for path in ("/", "/api/v1/status", "/api/v1/peers", "/metrics", "/healthz"):
        assert get(path).status_code == 200, path
    assert tell(shown, answer([row(peers[0], 0)], step=9), NOW + 20)
    assert shown.snapshot(NOW + 20)["head"]["step"] == 9
    assert shown.cursor
    told = [record.getMessage() for record in caplog.records if record.name != "httpx"]
    assert [line.split(":")[0] for line in told] == ["the history has a gap from now on"]


def test_every_answer_has_the_headers(client: Client) -> None:
    for path in ("/", "/api/v1/status", "/static/app.js", "/nothing", "/api/v1/series?span=x"):
        headers = client().get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';"), path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_rates_are_limited_by_address(client: Client) -> None:
    limited = client(Limits(rate=0.001, burst=5))
    answers = [limited.get("/healthz").status_code for _ in range(10)]
    assert answers == [200] * 5 + [429] * 5
    assert limited.get("/").headers["retry-after"]


def test_static_files_are_kept_by_digest(client: Client) -> None:
    page = client().get("/").text
    (path,) = re.findall(r'src="(static/app\.js\?v=\w+)"', page)
    assert "immutable" in client().get(f"/{path}").headers["cache-control"]
    assert "immutable" not in client().get("/static/app.js").headers.get("cache-control", "")


def test_no_static_file_asks_for_anything_elsewhere() -> None:
    allowed = {"http://www.w3.org/2000/svg"}  # a name, not an address
    for path in (Path(__file__).parents[2] / "web").rglob("*"):
        if path.suffix in (".js", ".css", ".html", ".svg"):
            found = set(re.findall(r"https?://[\w./-]+", path.read_text()))
            comment = {"https://github.com/leeoniya/uPlot"} if "uPlot" in path.name else set()
            assert found <= allowed | comment, path


def test_the_page_is_small(client: Client) -> None:
    import gzip

    static = Path(__file__).parents[2] / "web" / "static"
    empty = TestClient(create_app(board(), Broadcast(), clock=lambda: NOW)).get("/").content
    files = [path.read_bytes() for path in static.rglob("*") if path.suffix in (".js", ".css")]
    assert sum(len(gzip.compress(each)) for each in [empty, *files]) <= 80_000
    sent = client().get("/static/app.js", headers={"Accept-Encoding": "gzip"})
    assert sent.headers["content-encoding"] == "gzip"


def test_traffic_is_a_rate_of_one_life_of_the_leader() -> None:
    made = board()

    def total(sent: int, now: float, **facts: Any) -> list[dict[str, Any]]:
        boundary = {"boundary": 0, "raw_bytes": 2 * sent, "wire_bytes": sent}
        tell(made, answer([], bytes={"boundaries": [boundary]}, **facts), now)
        flows: list[dict[str, Any]] = made.snapshot(now)["flows"]
        return flows

    assert total(10**9, NOW) == [], "a total alone says nothing"
    (flow,) = total(10**9 + 5000, NOW + 1)
    assert (flow["wire_bps"], flow["raw_bps"]) == (5000.0, 10000.0)
    (flow,) = total(10**9 + 5000, NOW + 11)
    assert 0 < flow["wire_bps"] < 5000
    assert total(7, NOW + 12, life="cd34") == []
    (flow,) = total(7, NOW + 13, life="cd34")
    assert flow["wire_bps"] == 0.0


# ---- the stream -------------------------------------------------------------------------------


def merged(picture: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """As the page does it."""
    after = dict(picture)
    for key, value in change.items():
        if key == "replicas":
            rows = {**picture["replicas"], **value}
            after[key] = {name: row for name, row in rows.items() if row is not None}
        elif key == "feed" and picture["feed"]:
            after[key] = picture["feed"] + value
        else:
            after[key] = value
    return after


def test_differences_add_up_to_the_picture(peers: list[str]) -> None:
    made = board()
    before = made.snapshot(NOW)
    for number in range(1, 8):
        rows = [row(peer, 0, counted=number) for peer in peers[: number % 3 + 1]]
        event = {"t": NOW, "event": "left", "replica": f"{peers[0]}#00ff", "reason": str(number)}
        tell(made, answer(rows, events=[event]), NOW + number)
        after = made.snapshot(NOW + number)
        change = difference(before, after)
        assert merged(before, change) == after
        assert difference(after, after) == {}
        before = after


def test_viewers_get_the_whole_then_changes_and_the_slow_start_anew() -> None:
    async def run() -> None:
        broadcast = Broadcast(limit=2)
        broadcast.publish({"head": {"step": 0}}, NOW)
        quick, slow = broadcast.watch(), broadcast.watch()
        for viewer in (quick, slow):
            first = json.loads((await anext(viewer)).raw_data or "")
            assert first["whole"]
            assert first["head"] == {"step": 0}
        assert broadcast.full
        assert not broadcast.publish({"head": {"step": 0}}, NOW), "nothing new"
        for step in range(1, QUEUE + 3):
            assert broadcast.publish({"head": {"step": step}}, NOW)
            change = json.loads((await anext(quick)).raw_data or "")
            assert change["head"] == {"step": step}
            assert change["n"] == step + 1
        late = json.loads((await anext(slow)).raw_data or "")
        assert late["whole"]
        assert late["n"] == broadcast.number
        await quick.aclose()
        await slow.aclose()
        assert broadcast.num_viewers == 0

    asyncio.run(run())
