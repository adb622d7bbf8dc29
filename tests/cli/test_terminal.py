"""What the command prints on a terminal of 60, 80 and 200 columns, and what `status` tells."""

from __future__ import annotations

import fcntl
import html
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from asynckfold import RunStore, load_results
from asynckfold.cli import main
from asynckfold.cli.output import Output
from asynckfold.cli.status import state_of
from asynckfold.cli.summary import print_results
from asynckfold.results.cv_results import read_results
from asynckfold.store import Interim
from tests.cli.test_cli import printed_json
from tests.synthetic import Synthetic, write_run

HERE = Path(__file__).parent.parent.parent
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\")
LONG = Synthetic(
    models=tuple(f"convolutional-network-{number}" for number in range(6)),
    lr_schedules=("cosine", "warm"),
    folds=3,
    samples=60,
    epochs=1,
)


class Terminal:
    """A pseudo-terminal."""

    def __init__(self, columns: int) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def read(self, until: str = "\x04") -> str:
        """Return what was written, up to a text."""
        text, deadline = b"", time.monotonic() + 60
        while until.encode() not in text and time.monotonic() < deadline:
            text += os.read(self.master, 1 << 16)
        return text.decode().replace("\r\n", "\n")


@contextmanager
def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Iterator[list[str]]:
    """Let this process print on a terminal; afterwards the list holds the text."""
    terminal, printed = Terminal(columns), list[str]()
    with os.fdopen(terminal.slave, "w") as stream, monkeypatch.context() as patch:
        for name in ("NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", str(columns))  # rich asks the descriptors of this process
        patch.setattr(sys, "stdout", stream)
        yield printed
        stream.write("\x04")
        stream.flush()
        printed.append(terminal.read().removesuffix("\x04"))
    os.close(terminal.master)


def bare(text: str) -> str:
    return SEQUENCE.sub("", text)


# What `status` tells


def test_status_tells_scores_verdict_and_time_of_a_sweep_that_runs(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Synthetic(
        models=("A", "B"),
        lr_schedules=("x",),
        folds=4,
        samples=40,
        epochs=2,
        status=lambda job: "done" if job.fold < 3 - (job.model == "B") else "pending",
    )
    write_run(root, run)
    with RunStore.hold(root) as store:
        state = state_of(store.reader)
        assert (state["progress"], state["verdict"]) == (None, [])  # none was recorded yet
        store.set_interim(Interim(30, 120, 75.0, ("So far, A against B: undecided (p = 0.4).",)))
        store.flush()
        state = printed_json(capsys, "status", root)
        assert state["progress"] == {"steps_done": 30, "steps": 120, "seconds_left": 75.0}
        assert {row["candidate"]: row["folds"] for row in state["scores"]} == {"A/x": 3, "B/x": 2}
        assert main(["status", str(root)]) == 0
        lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("5 of 8 jobs finished")
    assert lines[1] == "25 % of the steps, 1 min 15 s left"
    means = {row["candidate"]: row["mean"] for row in state["scores"]}
    scores = [line for line in lines if line.startswith(("  A/x: ", "  B/x: "))]
    assert set(scores) == {
        f"  A/x: accuracy {means['A/x']:.4f} (3 of 4 folds)",
        f"  B/x: accuracy {means['B/x']:.4f} (2 of 4 folds)",
    }
    assert lines.index(scores[-1]) + 1 == lines.index("So far, A against B: undecided (p = 0.4).")
    # Nobody holds it any more: the time left went, and the verdict is that of all results.
    state = printed_json(capsys, "status", root)
    assert state["progress"] is None
    with RunStore.read(root) as store:
        assert state["verdict"] == list(read_results(store).verdict.sentences)
    assert "(p = 0.4)" not in " ".join(state["verdict"])


def test_status_of_a_run_that_has_no_plan_yet(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(root.parent / "other", Synthetic(folds=2, samples=20, epochs=1))
    with RunStore.hold(root):
        state = printed_json(capsys, "status", root)
        assert main(["status", str(root)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no plan yet: the data are read, and the candidates are checked",
        f"held by process {os.getpid()} on {state['holder']['host']}",
    ]
    assert state.keys() == printed_json(capsys, "status", root.parent / "other").keys()
    assert main(["status", str(root)]) == 4
    assert "holds no plan yet" in capsys.readouterr().err


def test_watch_needs_a_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(root, Synthetic(folds=2, samples=20, epochs=1))
    for words in ([], ["--json"]):
        assert main(["status", str(root), "--watch", *words]) == 2
        assert "--watch needs a terminal: received " in capsys.readouterr().err


def test_watch_shows_the_state_on_the_whole_screen_until_ctrl_c(root: Path) -> None:
    write_run(root, Synthetic(folds=2, samples=20, epochs=1, status=lambda job: "pending"))
    terminal = Terminal(80)
    with RunStore.hold(root) as store:
        store.set_interim(Interim(3, 12, 8.0, ()))
        store.flush()
        watch = subprocess.Popen(
            [sys.executable, "-m", "asynckfold", "status", str(root), "--watch"],
            stdin=terminal.slave,
            stdout=terminal.slave,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(HERE), "TERM": "xterm-256color"},
        )
        shown = terminal.read(until="8.0 s left")
        assert "\x1b[?1049h" in shown  # the screen is put back at the end
        assert "0 of 8 jobs finished, 8 waiting" in shown
        store.set_interim(Interim(9, 12, 2.0, ()))
        store.flush()
        assert "75 % of the steps" in terminal.read(until="2.0 s left")
        watch.send_signal(signal.SIGINT)
        _, left, after = terminal.read(until="\x1b[?1049l").partition("\x1b[?1049l")
        while "held by process" not in after:
            after += terminal.read(until="held by process")
    assert watch.wait(30) == 0
    assert watch.stderr is not None
    assert watch.stderr.read() == b""
    watch.stderr.close()
    assert left
    os.close(terminal.slave)
    os.close(terminal.master)


# The end of a run


WIDE = Synthetic(
    models=("a-convolutional-network-of-three", "MLP"), lr_schedules=("x",), samples=60, epochs=1
)


def test_tables_fit_the_terminal_and_spare_columns_before_they_fold_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, wide, old, new = (tmp_path / name for name in ("long", "wide", "old-run", "another"))
    pair = replace(WIDE, models=("a-convolutional-net", "MLP"))
    for root, run in ((long, LONG), (wide, WIDE), (old, pair), (new, replace(pair, epochs=2))):
        write_run(root, run)
    for columns, is_wide in ((60, False), (200, True)):
        with on_terminal(monkeypatch, columns) as printed:
            print_results(long, Output(Namespace()), with_report=False)
            assert main(["status", str(long)]) == 0
        lines = bare(printed[0]).splitlines()
        assert all(cell_len(line) <= columns for line in lines if "continue with" not in line)
        assert lines[0].split()[:4] == ["rank", "model", "scheduler", "accuracy"]
        assert ("interval" in lines[0]) == is_wide
        assert "and 2 more, which -v and the report show" in lines
        assert any(line.startswith("36 of 36 jobs finished in") for line in lines)
        assert sum("fingerprint" in line for line in lines) == 1  # of `status` only
        with on_terminal(monkeypatch, columns) as printed:
            print_results(wide, Output(Namespace()), with_report=False)
        head, *lines = bare(printed[0]).splitlines()
        assert [word in head for word in ("interval", "seconds")] == [is_wide, is_wide]
        assert all(cell_len(line) <= columns for line in (head, *lines))
        with on_terminal(monkeypatch, columns) as printed:
            assert main(["compare", str(old), str(new)]) == 0
        lines = bare(printed[0]).splitlines()
        (head,) = (line for line in lines if line.startswith("accuracy of "))
        assert head.split()[2:4] == [old.name, new.name]
        assert ("interval" in head, "±" in printed[0]) == (is_wide, is_wide)
        assert any(line.startswith("a-convolutional-net/x ") for line in lines)
        assert all(cell_len(line) <= columns for line in lines)


def test_v_shows_all_candidates_and_the_fingerprint(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(root, LONG)
    print_results(root, Output(Namespace(verbose=1)), with_report=False)
    out = capsys.readouterr().out
    assert out.count("convolutional-network-") >= 12
    assert "more, which" not in out
    assert "\nfingerprint " in out


def test_the_winner_is_marked_and_a_tie_has_none(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models: Any = {"models": ("F", "G"), "lr_schedules": ("x",), "samples": 500, "epochs": 1}
    write_run(root, Synthetic(**models))
    write_run(tmp_path / "tie", Synthetic(**models, score=0.5))
    outputs = []
    for folder in (root, tmp_path / "tie"):
        print_results(folder, Output(Namespace()), with_report=False)
        outputs.append(capsys.readouterr().out.splitlines())
    marked = [line for line in outputs[0] if line.endswith("winner")]
    assert len(marked) == 1
    assert marked[0].split()[0] == "1"
    assert any(line.startswith(f"{marked[0].split()[1]} beats ") for line in outputs[0])
    assert not any("winner" in line for line in outputs[1])


def test_code_terminal_page_and_json_say_the_same(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"MLP/warm/fold-1": "failed"}
    write_run(root, Synthetic(samples=200, epochs=1, status=lambda job: lost.get(job.id, "done")))
    results = load_results(root)
    sentences = list(results.verdict.sentences)
    assert len(sentences) >= 3
    assert sentences[-1].startswith("Incomplete, and not ranked: MLP/warm")
    print_results(root, Output(Namespace()), with_report=True)
    printed = capsys.readouterr().out.splitlines()
    first = printed.index(sentences[0])
    assert printed[first : first + len(sentences)] == sentences
    print_results(root, Output(Namespace(json=True)), with_report=False)
    assert json.loads(capsys.readouterr().out)["verdict"] == " ".join(sentences)
    page = re.sub("<[^>]*>", "", (root / "report" / "index.html").read_text())
    shown = (page, results._repr_html_(), repr(results), str(results.verdict))
    for text in (" ".join(html.unescape(text).split()) for text in shown):
        for sentence in sentences:
            assert sentence.removesuffix(".") in text
