"""Serve the page of a run over HTTP on the loopback interface, and redraw it during the run.

::

    browser ── GET /TOKEN/ ──► changed since the last drawing? ── read the run, draw the page
       ▲                                                                  │
       └───── again every 2 s, while jobs are left ◄──────────────────────┘

A script refreshes the page and keeps the selected tab and scroll position; browsers without
scripts reload it.

Other users of the machine can reach the loopback interface, and so can pages of other sites through
the browser (DNS rebinding). The address therefore holds a random token, and the Host header must
match it. Requests without either get an empty 404, which does not reveal that a run exists.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from markupsafe import escape

from asynckfold.errors import AsyncKFoldError
from asynckfold.results.cv_results import read_results
from asynckfold.results.report.page import REFRESH_SECONDS, RENEWING, render
from asynckfold.results.report.summary import interim_of, pictures_of, summarize
from asynckfold.store import RunStore
from asynckfold.store.layout import DATABASE

HOST = "127.0.0.1"

SHARE = 0.05
"""Largest share of a core's time spent on drawing: the machine is there to train."""

HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

NOTICE = (
    "<!DOCTYPE html><html lang=en><head><meta charset=utf-8><title>{0}</title>"
    f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}"><p>{{0}}'
)


class LivePage:
    """The page of a run as it is now.

    Parameters
    ----------
    root : Path
        The run's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._seen: object = None
        self._page, self._goes_on = "", True
        self._next = 0.0

    def now(self) -> tuple[str, bool]:
        """Return the page and whether it may change; it is drawn if the run has changed.

        A run that cannot be read has a page that says why.
        """
        with self._lock:
            state = _state(self._root)
            if state != self._seen and time.monotonic() >= self._next:
                started = time.monotonic()
                self._page, self._goes_on = self._drawn()
                took = time.monotonic() - started
                self._seen, self._next = state, started + took / SHARE
            return self._page, self._goes_on or state != self._seen

    def _drawn(self) -> tuple[str, bool]:
        try:
            with RunStore.read(self._root) as store:
                if not store.has_plan:
                    return NOTICE.format("The run has no plan yet."), True
                summary = summarize(store, read_results(store))
                pictures, interim = pictures_of(store), interim_of(store)
        except AsyncKFoldError as error:
            return NOTICE.format(escape(str(error))), True
        return render(summary, pictures, interim), summary.counts["pending"] > 0


def _state(root: Path) -> list[object]:
    """Return a value that differs after every change of the run's database."""
    state: list[object] = []
    for name in (DATABASE, f"{DATABASE}-wal"):
        with suppress(OSError):
            status = (root / name).stat()
            state.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
    return state


class LiveServer(ThreadingHTTPServer):
    """Serves the page of a run on the loopback interface, at a port that is free.

    Parameters
    ----------
    root : Path
        The run's folder.

    Raises
    ------
    OSError
        No port can be opened.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__((HOST, 0), _Handler)
        self.page = LivePage(root)
        self.path = f"/{secrets.token_urlsafe(32)}/"

    @property
    def host(self) -> str:
        """What a request must name."""
        return f"{HOST}:{self.server_port}"

    @property
    def address(self) -> str:
        """The page's address."""
        return f"http://{self.host}{self.path}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: browsers close connections whenever they like."""


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "asynckfold", ""
    timeout = 30

    def do_GET(self) -> None:
        is_path = secrets.compare_digest(self.path.encode(), self.server.path.encode())
        if not is_path or self.headers.get("Host") != self.server.host:
            self.send_response_only(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        text, goes_on = self.server.page.now()
        if goes_on:
            text = text.replace("</head>", RENEWING, 1)
        body = text.encode()
        self.send_response_only(200)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""
