"""The page over HTTP: what a browser on this machine sees, and what nobody else does."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.cli import main
from asynckfold.jobs.result import Epoch
from asynckfold.results.report import live
from asynckfold.results.report.live import REFRESH_SECONDS, LiveServer
from asynckfold.results.report.summary import summarize
from asynckfold.store import Interim
from tests.results.report.reports import Report
from tests.synthetic import Synthetic, write_run


@contextmanager
def served(root: Path) -> Iterator[LiveServer]:
    with LiveServer(root) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(
    server: LiveServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_a_finished_run_is_shown_and_not_asked_for_again(complete: Report) -> None:
    with served(complete.root) as server:
        status, headers, text = asked(server, server.path)
        assert status == 200
        assert '<meta name="renewal-seconds"' not in text
        assert 'http-equiv="refresh"' not in text
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Frame-Options"] == "DENY"
        assert "LeNet5" in text
        assert "http-equiv" in text
        assert headers["Content-Length"] == f"{len(text.encode())}"


def test_a_run_that_goes_on_is_asked_for_again_until_its_end(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SHARE", 1e9)  # draw at every change
    again = f'http-equiv="refresh" content="{REFRESH_SECONDS}"'
    with served(root) as server:
        _, _, notice = asked(server, server.path)
        assert "no run" in notice
        assert again in notice
        assert "<noscript>" not in notice
        write_run(root, Synthetic(status=lambda job: "done" if job.fold < 2 else "pending"))
        _, headers, text = asked(server, server.path)
        shutil.rmtree(root)
        write_run(root, Synthetic())
        _, _, ended = asked(server, server.path)
    head = text.partition("</head>")[0]
    assert "8 of 20 jobs" in text
    assert f"<noscript><meta {again}></noscript>" in head
    assert f'<meta name="renewal-seconds" content="{REFRESH_SECONDS}">' in head
    # The script of the page does it, to keep the tab.
    assert "meta[name=renewal-seconds]" in head
    assert "Refresh" not in headers
    assert "20 of 20 jobs" in ended
    assert again not in ended


def test_what_runs_is_told_before_any_fold_has_ended(root: Path) -> None:
    write_run(root, Synthetic(status=lambda job: "pending", epochs=4))
    epochs = tuple(Epoch(number, 1 / number, 0.5, 0.9, 0.1, 1.0, {}) for number in (1, 2))
    line = "<b>/cosine · epoch 2/4 · valid 0.900 · core 1"
    with RunStore.hold(root) as store, served(root) as server:
        jobs = [job.id for job in store.reader.plan.jobs]
        late = epochs[1:]  # continued from a checkpoint, so that its first epochs are not known
        interim = Interim(30, 120, 75.0, (), "so far A valid accuracy 0.9000", (line,))
        store.set_interim(replace(interim, epochs={jobs[0]: epochs, jobs[5]: late}))
        store.flush()
        text = asked(server, server.path)[2]
        with RunStore.read(root) as reader:
            curves = [row.curves for row in summarize(reader).candidates if row.curves]
    assert "25 % of the steps, 1 min 15 s left" in unescape(text).replace("\u00a0", " ")
    assert '<progress max="120" value="30"' in text
    assert "<h1>So far A valid accuracy 0.9000" in text
    assert line.replace("<b>", "&lt;b&gt;") in text
    assert [len(each[0].mean) for each in curves] == [2]
    # Nobody holds it any more.
    with served(root) as server:
        assert "<progress" not in asked(server, server.path)[2]


def test_without_the_token_or_by_another_name_there_is_nothing(complete: Report) -> None:
    with served(complete.root) as server, LiveServer(complete.root) as other:
        assert server.server_address[0] == "127.0.0.1"
        assert server.address == f"http://127.0.0.1:{server.server_port}{server.path}"
        assert server.server_port != other.server_port
        assert server.path != other.path
        assert len(server.path) > 40
        for path in ("/", server.path[:-1], server.path[:-2] + "x/", f"{server.path}index.html"):
            assert asked(server, path)[::2] == (404, "")
        for host in ("example.com", f"localhost:{server.server_port}", "127.0.0.1"):
            assert asked(server, server.path, host=host)[::2] == (404, "")
        assert asked(server, "/nothing")[1].keys() == {"Content-Length"}
        assert asked(server, server.path, "POST")[0] == 501
        assert asked(server, server.path)[0] == 200


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_the_command_prints_the_address_and_ends_with_ctrl_c(
    complete: Report, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    pages: list[str] = []

    def read_and_interrupt() -> None:
        printed = ""
        while "Ctrl-C ends it" not in printed:
            printed += capsys.readouterr().out
            time.sleep(0.01)
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/\S+/", printed)
        with urllib.request.urlopen(address, timeout=60) as answer:
            pages.append(answer.read().decode())
        os.kill(os.getpid(), number)

    reader = threading.Thread(target=read_and_interrupt)
    reader.start()
    assert main(["report", str(complete.root), "--serve"]) == code
    reader.join()
    assert "LeNet5" in pages[0]
