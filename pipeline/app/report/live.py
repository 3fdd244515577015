"""The report of a folder of runs, served on this host: a page that loads itself again when they grow."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Sequence
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from creditgraph.pipeline.app.overview import find_runs
from creditgraph.pipeline.app.report.page import report_html
from creditgraph.pipeline.app.report.source import read_run
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.run.run_directory import METRICS

MOST_RUNS = 8  # of one page; those written last


def newest(folders: Sequence[Path]) -> list[Path]:
    """The runs of some folders that were written last, at most `MOST_RUNS`, by name."""
    found = {path for folder in folders for path in find_runs(folder)}
    return sorted(sorted(found, key=lambda path: -_written(path))[:MOST_RUNS])


def _written(run: Path) -> float:
    try:
        return (run / METRICS).stat().st_mtime
    except OSError:
        return 0.0


def state_of(runs: Sequence[Path]) -> str:
    """A text that changes when one of the runs has another line of metrics."""
    sizes = [(str(run), (run / METRICS).stat().st_size if (run / METRICS).exists() else 0) for run in runs]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]


class LivePage:
    """The page of the runs in some folders, made again when it is asked for after they have grown."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = threading.Lock()  # one page at a time: making it takes a second of processor time
        self._context = copy_context()  # requests have threads of their own, which know nothing of --trust
        self._state = ""
        self._page = b""

    def state(self) -> str:
        """The state of the runs now."""
        return state_of(newest(self._folders))

    def page(self) -> bytes:
        """The page, of the newest state."""
        with self._lock:
            runs = newest(self._folders)
            state = state_of(runs)
            if state != self._state:
                self._page = self._context.run(lambda: report_html([read_run(r) for r in runs], live=state)).encode()
                self._state = state
            return self._page


class Server(ThreadingHTTPServer):
    """Serves a `LivePage` on the loopback interface, below a random key; any other request gets 404.

    Args:
        page: what is served.
        port: 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page = page
        self.key = secrets.token_urlsafe(16)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise RunError(f"--port {port}: {error.strerror}; choose another port, or leave it out.") from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}/{self.key}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        # A page of another site may not read it by a name that leads here.
        host = self.headers.get("Host", "")
        answers = {f"/{self.server.key}/": "page", f"/{self.server.key}/state": "state"}
        what = answers.get(self.path) if host.rpartition(":")[0] in ("127.0.0.1", "localhost") else None
        if what is None:
            self.send_error(404)
            return
        try:
            body = self.server.page.page() if what == "page" else self.server.page.state().encode()
        except RunError as error:  # the runs were removed meanwhile
            self.send_error(410, str(error).splitlines()[0][:200])
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8" if what == "page" else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs no request."""
