"""A reverse proxy that shows a server under a path, as nginx's `proxy_pass` with a slash does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PIECE = 1 << 14
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "upgrade"})


@contextlib.contextmanager
def behind_proxy(url: str, path: str) -> Iterator[str]:
    """The address at which `url` is seen under `path`, which ends in a slash. All else is 404."""
    behind = urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(path):
                self.send_error(404)
                return
            there = HTTPConnection(behind.hostname or "", behind.port)
            with contextlib.closing(there), contextlib.suppress(ConnectionError):
                there.request(
                    "GET",
                    "/" + self.path.removeprefix(path),
                    headers={
                        "Host": self.headers["Host"],
                        "Accept": self.headers.get("Accept", "*/*"),
                        "X-Forwarded-For": self.client_address[0],
                    },
                )
                answer = there.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                while piece := answer.read1(PIECE):  # events as they come
                    self.wfile.write(piece)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever, name="proxy")
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{path}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
