"""The page in a real browser, in front of a real swarm of several processes.

One swarm and one dashboard for all tests, which run in order: what they see is one run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from peer.launch import stamp
from peer.local import LocalSwarm
from swarm.config import load_config
from swarm.names import friendly_name
from swarm.net.identity import load_identity
from tests.browser.proxy import behind_proxy
from web.report import write_report

AXE = Path(__file__).parent / "axe.min.js"
LIMIT_MS = 60_000
TOML = """
[run]
name = "browser test"
seed = 1
[model]
stages = 2
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 32
vocab_size = 256
[data]
source = "stdlib"
tokenizer = "bytes"
sequence = 16
[batch]
microbatches = 4
[schedule]
steps = 100000
"""


class Run:
    """A swarm in a thread of its own, so that the browser can be driven from this one."""

    def __init__(self, folder: Path) -> None:
        (folder / "run.toml").write_text(TOML)
        self.folder, self.run_dir = folder, folder / "run"
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="swarm")
        self.thread.start()
        identity = load_identity(folder / "identity.key")
        config = stamp(load_config(folder / "run.toml"), identity.peer_id, folder / "cache")
        self.said: list[str] = []
        self.swarm = LocalSwarm(
            config,
            self.run_dir,
            identity_path=folder / "identity.key",
            peers={0: 2, 1: 2},
            threads=1,
            cache_dir=folder / "cache",
            web=True,
            say=self.said.append,
        )
        self.dashboard: subprocess.Popen[str] | None = None
        self.url = ""

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def tell(self, what: Any, *arguments: Any) -> None:
        """Call something of the swarm in its own thread."""

        async def call() -> None:
            what(*arguments)

        self.do(call())

    def serve(self, port: int = 0) -> None:
        """`swarm dashboard`, as a person starts it."""
        command = [sys.executable, "-c", "from peer.cli import main; main()", "dashboard",
                   "--join", self.swarm.link, "--port", str(port),
                   "--data-dir", str(self.folder / "dashboard")]  # fmt: skip
        self.dashboard = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.dashboard.stdout is not None
        line = self.dashboard.stdout.readline()
        assert line.startswith("dashboard: http://"), line
        self.url = line.removeprefix("dashboard: ").strip()

    def stop_serving(self) -> None:
        assert self.dashboard is not None
        with self.dashboard as process:
            process.send_signal(signal.SIGINT)
            process.wait(30)

    def close(self) -> None:
        with contextlib.suppress(AssertionError):
            self.stop_serving()
        self.do(self.swarm.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def name_of(self, process: str) -> str:
        """The friendly name of a peer of the local swarm, as `0a`."""
        path = self.swarm.processes[process].data_dir / "identity.key"
        return friendly_name(load_identity(path, create=False).peer_id)


@pytest.fixture(scope="module")
def run(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="sb-", dir="/tmp") as short:  # of unix sockets
        before = {key: os.environ.get(key) for key in ("TMPDIR", "XDG_RUNTIME_DIR")}
        os.environ.update(dict.fromkeys(before, short))
        made = Run(tmp_path_factory.mktemp("browser"))
        try:
            made.do(made.swarm.start())
            made.serve()
            yield made
        finally:
            made.close()
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value


class Watched:
    """A page whose console and requests are kept."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self.origin = url
        self.trouble: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.trouble.append(message.text)

    def close(self) -> None:
        self.context.close()
        assert self.trouble == []
        away = [url for url in self.requests if not url.startswith((self.origin, "data:"))]
        assert away == []


@pytest.fixture(scope="module")
def live(run: Run, browser: Any) -> Iterator[Watched]:
    """The one page that is never loaded again."""
    watched = Watched(browser, run.url)
    watched.page.evaluate("window.mark = 'never loaded again'")
    yield watched
    assert watched.page.evaluate("window.mark") == "never loaded again"
    watched.close()


def stage(page: Any, number: int) -> Any:
    return page.locator("li.stage", has=page.locator(f"h3:text('Stage {number}')"))


def until_serving(page: Any, *counts: int) -> None:
    for number, count in enumerate(counts):
        stage(page, number).locator(
            f"p:text-is('{count} serving'), p:text('{count} serving')"
        ).wait_for()


def violations(page: Any) -> list[str]:
    """What axe-core finds serious or worse."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run({resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def test_the_right_stages_and_replicas(run: Run, live: Watched) -> None:
    page = live.page
    until_serving(page, 2, 2)
    assert page.locator("li.stage").count() == 2
    for number, names in enumerate((("0a", "0b"), ("1a", "1b"))):
        shown = stage(page, number).locator(".who").all_inner_texts()
        assert sorted(text.split()[-1] for text in shown) == sorted(map(run.name_of, names))
    page.locator("#word:has-text('Healthy')").wait_for()
    assert page.title().startswith("Healthy · step ")
    assert page.locator("#peer-rows tr").count() == 4


def test_loss_and_step_move_without_reload(live: Watched) -> None:
    page = live.page
    texts = "[...document.querySelectorAll('#facts dd')].map((each) => each.textContent)"
    before = page.evaluate(texts)
    assert before[1] != "–"
    page.wait_for_function(
        f"(before) => {{ const now = {texts}; "
        "return now[0] !== before[0] && now[1] !== before[1]; }",
        arg=before,
    )
    page.locator("#loss-plot .uplot").wait_for()
    assert not page.locator("body.stale").count()
    assert page.locator("#updated").inner_text().startswith("updated ")


def test_sampled_microbatches_have_a_table(live: Watched) -> None:
    page = live.page
    page.locator("#samples summary").click()
    page.locator("#sample-rows tr").first.wait_for()
    assert "→" in page.locator("#sample-rows tr td:nth-child(3)").first.inner_text()
    assert page.locator("#flow-rows tr").count() == 1
    page.locator("#samples summary").click()


def test_how_peers_spend_their_time(run: Run, live: Watched) -> None:
    page = live.page
    page.locator("#timeline-rows canvas").nth(3).wait_for()
    names = page.locator("#timeline-rows > span:not(.quiet)").all_inner_texts()
    assert set(names) == {run.name_of(each) for each in ("0a", "0b", "1a", "1b")}


def test_a_killed_peer_disappears_with_its_event_and_reason(run: Run, live: Watched) -> None:
    page, name = live.page, run.name_of("1b")
    run.tell(run.swarm.kill_peer, "1b")
    until_serving(page, 2, 1)
    assert page.locator(f".tile:has-text('{name}')").count() == 0
    line = page.locator(f"#feed li[data-kind='left']:has-text('{name}')").first
    line.wait_for()
    assert "connection" in line.inner_text(), "the reason"
    page.locator("#status[data-state='degraded']").wait_for()
    assert "stage 1" in page.locator("#reason").inner_text()
    page.locator("#marks-legend").wait_for()


def test_help_is_asked_for_where_the_leader_would_send_it(run: Run, live: Watched) -> None:
    page, deadline = live.page, time.monotonic() + LIMIT_MS / 1000

    def agree() -> bool:
        wanted = run.swarm.status()["placement"]["help"]["stage"]
        said: str = page.locator("#help-why").inner_text()
        return said.startswith(f"One more peer helps most in stage {wanted}: it ")

    while not agree():  # the leader may change its mind while the page still shows the former word
        assert time.monotonic() < deadline, page.locator("#help-why").inner_text()
        page.wait_for_timeout(100)


def test_a_joiner_appears(run: Run, live: Watched) -> None:
    page = live.page
    added = run.do(run.swarm.add_peer(1))
    until_serving(page, 2, 2)
    name = run.name_of(added.name)
    stage(page, 1).locator(f".tile[data-state='serving']:has-text('{name}')").wait_for()
    page.locator(f"#feed li[data-kind='joined']:has-text('{name}')").first.wait_for()


def test_it_comes_back_when_the_server_does(run: Run, live: Watched) -> None:
    page = live.page
    port = int(run.url.rstrip("/").rpartition(":")[2])
    step = page.locator("#facts dd").first.inner_text()
    contributed = page.locator("#contributors td.num").first.inner_text()
    run.stop_serving()
    page.wait_for_function("() => document.body.classList.contains('stale')")
    run.serve(port)
    page.wait_for_function(
        "(step) => !document.body.classList.contains('stale') && "
        "document.querySelector('#facts dd').textContent !== step",
        arg=step,
    )
    until_serving(page, 2, 2)
    assert page.locator("#feed li[data-kind='left']").count() >= 1, "its history was kept"
    assert int(page.locator("#contributors td.num").first.inner_text()) >= int(contributed)
    refused = [each for each in live.trouble if "net::ERR_" in each]
    assert live.trouble == refused, "only that nobody answered"
    live.trouble.clear()


def test_behind_a_reverse_proxy_under_a_path(run: Run, browser: Any) -> None:
    with behind_proxy(run.url, "/training/ours/") as url:
        watched = Watched(browser, url)  # asks for nothing outside the path, and finds everything
        page = watched.page
        until_serving(page, 2, 2)
        step = page.locator("#facts dd").first.inner_text()
        page.wait_for_function(
            "(step) => document.querySelector('#facts dd').textContent !== step", arg=step
        )
        page.locator("#loss-plot .uplot").wait_for()
        page.locator("a.who").first.click()
        page.locator("h2:text('What happened')").wait_for()
        watched.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_screen_is_accessible_and_nothing_overflows(
    run: Run, browser: Any, scheme: str, width: int
) -> None:
    watched = Watched(
        browser, run.url, color_scheme=scheme, viewport={"width": width, "height": 844},
        reduced_motion="reduce",
    )  # fmt: skip
    page = watched.page
    until_serving(page, 2, 2)
    page.locator("#loss-plot .uplot").wait_for()
    for summary in page.locator("details > summary").all():
        summary.click()
    page.locator("#loss-table tr").nth(1).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 23)"
    assert dark == (scheme == "dark")
    assert violations(page) == []
    page.locator("a.who").first.click()
    page.locator("h2:text('What happened')").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []
    watched.close()


def test_the_keyboard_reaches_everything_in_order(run: Run, browser: Any) -> None:
    watched = Watched(browser, run.url)
    page = watched.page
    until_serving(page, 2, 2)
    seen: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "(() => { const e = document.activeElement; return e.id || e.className || "
                "e.name || e.closest('[id]').id; })()"
            )
        )
        if seen[-1] == "search":
            break
    places = [seen.index(each) for each in ("skip", "theme", "who", "span", "search")]
    assert places == sorted(places), seen
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.type("stage 1")
    page.wait_for_function("() => document.querySelectorAll('#peer-rows tr').length === 2")
    page.keyboard.press("Tab")  # the region that scrolls
    page.keyboard.press("Tab")  # the first heading
    page.keyboard.press("Enter")
    page.locator("th[data-key='name'][aria-sort='ascending']").wait_for()
    watched.close()


def test_without_javascript_the_page_is_readable(run: Run, browser: Any) -> None:
    watched = Watched(browser, run.url, java_script_enabled=False)
    text = watched.page.inner_text("main")
    for expected in (
        "Step",
        "Stage 0",
        "Stage 1",
        "serving",
        run.name_of("0a"),
        "swarm-peer --join",
    ):
        assert expected in text
    assert watched.page.locator("#loss-plot polyline").count() == 1
    watched.close()


def test_motion_stops_where_it_is_not_wanted(run: Run, browser: Any) -> None:
    watched = Watched(browser, run.url, reduced_motion="reduce")
    until_serving(watched.page, 2, 2)
    watched.page.wait_for_function("() => document.querySelector('#facts dd').textContent")
    assert watched.page.locator(".dot").count() == 0
    assert watched.page.locator("#dots-legend").is_hidden()
    watched.close()


def test_the_page_of_swarm_up(run: Run, browser: Any) -> None:
    """`--web`: the dashboard is one of the swarm's own processes, and its address is said."""
    assert run.swarm.url in " ".join(run.said)
    with urllib.request.urlopen(f"{run.swarm.url}healthz", timeout=30) as answered:
        assert b'"ok"' in answered.read()


def test_the_report_plays_the_run_again(run: Run, browser: Any) -> None:
    path = write_report(run.run_dir, run.folder / "report.html")
    watched = Watched(browser, path.as_uri(), viewport={"width": 390, "height": 844})
    page = watched.page
    slider = page.locator("#scrub")
    last = page.locator("#facts dd").first.inner_text()
    assert int(last.split()[0]) > 0
    assert stage(page, 1).locator("p").first.inner_text().startswith("2 serving")
    slider.focus()
    page.keyboard.press("Home")
    page.wait_for_function(
        "(last) => document.querySelector('#facts dd').textContent !== last", arg=last
    )
    first = int(page.locator("#facts dd").first.inner_text().split()[0])
    page.locator("#play").click()
    page.wait_for_function(
        "(step) => parseInt(document.querySelector('#facts dd').textContent) > step", arg=first
    )
    page.locator("#play").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(page) == []
    watched.close()
