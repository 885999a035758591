"""The web application: first paint, live events, REST, metrics. Read-only throughout.

Everything but static files is answered from memory (`Broadcast.picture`) or from the store, and
nothing that is sent depends on who asks, so viewers share every byte. Paths in pages are relative:
the app works under any prefix of a reverse proxy without being told.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi import Path as PathField
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel

from swarm.errors import StorageError
from swarm.names import friendly_name
from swarm.net.identity import is_peer_id
from web import metrics as prometheus
from web.board import Board, contributor_row, feed_line
from web.broadcast import Broadcast
from web.intake import ACTIVITIES
from web.limits import Guard, Limits
from web.render import page, peer_page
from web.store import METRICS, RANGES

STATIC = Path(__file__).parent / "static"
STALE_S = 60.0
Span = Literal["1h", "6h", "1d", "all"]
PeerId = Annotated[str, PathField(min_length=1, max_length=128, description="A libp2p peer id.")]
Limit = Annotated[int, Query(ge=1, le=500)]
Offset = Annotated[int, Query(ge=0, le=1_000_000)]


def known(peer: PeerId) -> str:
    """A peer id, or 404."""
    if not is_peer_id(peer):
        raise HTTPException(404, "no such peer")
    return peer


Peer = Annotated[str, Depends(known)]


class Picture(BaseModel):
    """Everything the page shows. Keys are added over time; none changes its meaning."""

    n: int
    head: dict[str, Any]
    stages: list[dict[str, Any]]
    flows: list[dict[str, Any]]
    replicas: dict[str, dict[str, Any]]
    feed: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    contributors: list[dict[str, Any]]
    help: dict[str, Any]


class Series(BaseModel):
    """Columns of equal length over `t` (unix seconds), and what happened meanwhile."""

    span: Span
    t: list[float]
    loss: list[float | None]
    validation_loss: list[float | None]
    tokens_per_s: list[float | None]
    raw_bps: list[float | None]
    wire_bps: list[float | None]
    utilisation: list[float | None]
    peers: list[float | None]
    marks: list[dict[str, Any]]


class Timeline(BaseModel):
    """Seconds by activity, per peer and time bucket; null where nothing is known."""

    activities: list[str]
    t: list[float]
    peers: list[dict[str, Any]]


class PeerFacts(BaseModel):
    """One peer: what it has done, its replicas at this moment, and what happened to it."""

    peer: str
    name: str
    contributor: dict[str, Any] | None
    replicas: list[dict[str, Any]]
    events: list[dict[str, Any]]


class Alive(BaseModel):
    """Whether the dashboard itself is well."""

    status: Literal["ok", "stale"]
    heard_s: float | None
    viewers: int


def create_app(
    board: Board,
    broadcast: Broadcast,
    *,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.time,
) -> Any:
    """An ASGI app over what `board` and `broadcast` hold at the moment of each request."""
    limits = limits or Limits()
    app = FastAPI(
        title="swarm dashboard",
        version="1",
        description="What a run of a swarm is doing. Read-only.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/v1/openapi.json",
        redirect_slashes=False,  # it would leave the prefix of a reverse proxy
        responses={
            414: {"description": "Path or query too long."},  # both by the guard, `web.limits`
            429: {"description": "Too many requests."},
            503: {"description": "The history cannot be read."},
        },
    )
    board_at = clock

    @app.exception_handler(StorageError)
    async def no_history(request: Request, error: StorageError) -> Response:
        """The file became unreadable. It is on a disk of the host, so its name is not told."""
        return PlainTextResponse("the history cannot be read\n", 503, {"Retry-After": "30"})

    def room() -> None:
        if broadcast.full:
            raise HTTPException(503, "too many viewers", {"Retry-After": "30"})

    def picture() -> dict[str, Any]:
        return broadcast.picture or board.snapshot(board_at())

    def facts(peer: str) -> PeerFacts:
        replicas = [
            {"key": key, **row} for key, row in picture()["replicas"].items() if row["peer"] == peer
        ]
        row = board.store.contributor(peer)
        events = [feed_line(event) for event in board.store.events(peer=peer, limit=100)]
        if not replicas and row is None and not events:
            raise HTTPException(404, "no such peer")
        return PeerFacts(
            peer=peer,
            name=friendly_name(peer),
            contributor=contributor_row(row) if row else None,
            replicas=replicas,
            events=[event for event in events if event is not None],
        )

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def first_paint() -> HTMLResponse:
        try:
            series = board.store.series("1h", board_at())
        except StorageError:  # the present can be shown without the past
            series = {name: [] for name in ("t", *METRICS)}
        html = page(picture(), series, broadcast.number, board_at(), _versions())
        return HTMLResponse(html, headers={"Cache-Control": "no-store"})

    @app.get("/peer/{peer}", response_class=HTMLResponse, include_in_schema=False)
    async def one_peer(peer: Peer) -> HTMLResponse:
        html = peer_page(facts(peer).model_dump(), picture(), board_at(), _versions())
        return HTMLResponse(html, headers={"Cache-Control": "no-store"})

    @app.get("/api/v1/status", tags=["run"])
    async def status() -> Picture:
        """The whole picture, as the page gets it: for polling where a stream cannot be had."""
        return Picture(n=broadcast.number, **picture())

    @app.get(
        "/api/v1/stream",
        tags=["run"],
        response_class=EventSourceResponse,
        dependencies=[Depends(room)],
        responses={503: {"description": "Too many viewers."}},
    )
    async def stream() -> AsyncIterator[ServerSentEvent]:
        """The whole picture, then what changes, as server-sent events."""
        async for event in broadcast.watch():
            yield event

    @app.get("/api/v1/series", tags=["run"])
    async def series(span: Span = "1h") -> Series:
        """Loss, speed, traffic and more over time, at most 1000 points."""
        now = board_at()
        columns: dict[str, Any] = board.store.series(span, now)
        since = now - RANGES.get(span, now)
        return Series(span=span, marks=board.marks(since), **columns)

    @app.get("/api/v1/timeline", tags=["run"])
    async def timeline(
        span: Annotated[int, Query(ge=60, le=3600, description="Seconds.")] = 600,
    ) -> Timeline:
        """How peers have spent their time, in buckets of 10 s."""
        found = board.store.activity(board_at(), float(span))
        peers = [
            {"peer": peer, "name": friendly_name(peer), "seconds": seconds}
            for peer, seconds in found["peers"].items()
        ]
        return Timeline(activities=list(ACTIVITIES), t=found["t"], peers=peers)

    @app.get("/api/v1/events", tags=["run"])
    async def events(
        before: Annotated[int | None, Query(ge=0, le=1 << 53)] = None,
        limit: Limit = 50,
    ) -> list[dict[str, Any]]:
        """What happened, newest first, in words; `before` pages on by number `n`."""
        found = board.store.events(before=before, limit=limit)
        return [line for event in found if (line := feed_line(event)) is not None]

    @app.get("/api/v1/peers", tags=["peers"])
    async def peers(
        stage: Annotated[int | None, Query(ge=0, le=255)] = None,
        limit: Limit = 100,
        offset: Offset = 0,
    ) -> list[dict[str, Any]]:
        """The replicas, by stage and name."""
        rows = [{"key": key, **row} for key, row in picture()["replicas"].items()]
        rows = [row for row in rows if stage is None or row["stage"] == stage]
        rows.sort(key=lambda row: (row["stage"], row["name"], row["key"]))
        return rows[offset : offset + limit]

    @app.get("/api/v1/peers/{peer}", tags=["peers"], responses={404: {"description": "Unknown."}})
    async def peer_facts(peer: Peer) -> PeerFacts:
        """One peer."""
        return facts(peer)

    @app.get("/api/v1/contributors", tags=["peers"])
    async def contributors(limit: Limit = 50, offset: Offset = 0) -> list[dict[str, Any]]:
        """Who has trained how many committed microbatches, most first."""
        return [contributor_row(row) for row in board.store.contributors(limit, offset)]

    @app.get("/metrics", tags=["operation"], response_class=PlainTextResponse)
    async def prometheus_metrics() -> Response:
        """For Prometheus."""
        body = prometheus.metrics(picture(), broadcast.num_viewers)
        return Response(body, media_type=prometheus.CONTENT_TYPE)

    @app.get("/healthz", tags=["operation"])
    async def healthz() -> Alive:
        """Whether the dashboard answers, and how fresh what it shows is."""
        heard = board_at() - board.heard_at if board.heard_at else None
        fresh = heard is not None and heard < STALE_S
        return Alive(
            status="ok" if fresh else "stale", heard_s=heard, viewers=broadcast.num_viewers
        )

    app.mount("/static", _Static(directory=STATIC), name="static")
    app.add_middleware(GZipMiddleware, minimum_size=1024)
    return Guard(app, limits)


class _Static(StaticFiles):
    """Files that are asked for by their digest never change."""

    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        if scope["query_string"].startswith(b"v=") and response.status_code == 200:
            response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


@cache
def _versions() -> dict[str, str]:
    """Digests of the static files, so that browsers keep them until they change."""
    return {
        path.relative_to(STATIC).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:10]
        for path in sorted(STATIC.rglob("*"))
        if path.is_file()
    }
