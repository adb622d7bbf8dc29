"""What a person sees while a sweep runs: bars on a terminal, some lines elsewhere, and a log."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.cells import cell_len
from rich.console import Console
from torch import nn

from asynckfold import AsyncKFold, CVResults, InterruptedRunError, JobsFailedWarning
from asynckfold.system.plain_text import plain
from tests.toy import Moody, Slow, Tiny, adam, samples


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """An ordinary terminal in place of standard error."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def called(
    root: Path, *models: Any, verbose: int = 1, stream: Any = None, **settings: Any
) -> CVResults:
    settings = {"engine": "serial", "fuse": False, "report": False, **settings}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, verbose=verbose, **settings)
    by_name = models[0] if isinstance(models[0], dict) else [*models]
    # In the test itself: pytest sets standard error before each of its parts.
    with mock.patch.object(sys, "stderr", stream or sys.stderr):
        return kfold(by_name, ["step"], adam, {"epochs": 2})


@pytest.mark.parametrize("verbose", [1, 3])
def test_lines_where_there_is_no_terminal_and_all_of_it_in_the_log(
    root: Path, verbose: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.DEBUG, "asynckfold"),
        pytest.warns(JobsFailedWarning, match="1 of 6 jobs failed"),
    ):
        called(root, Moody, Tiny, verbose=verbose)
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert "6 jobs; 6 to do" in lines
    assert (
        sum(bool(re.match(r"Moody/step/fold-\d failed: ArithmeticError: seven", x)) for x in lines)
        == 1
    )
    assert any(re.fullmatch(r"5 of 6 jobs finished, 1 failed, .* elapsed", line) for line in lines)
    jobs = [line for line in lines if re.match(r"Tiny/step/fold-\d accuracy 0\.\d{4} in ", line)]
    epochs = [line for line in lines if re.match(r"Tiny/.* epoch 1 train_loss .* valid_loss", line)]
    assert (len(jobs), len(epochs)) == ((3, 3) if verbose == 3 else (0, 0))
    logged = [(item.levelname, item.getMessage()) for item in caplog.records]
    assert ("DEBUG", "reading the data") in logged
    assert [level for level, text in logged if "failed: ArithmeticError: seven" in text] == [
        "WARNING"
    ]
    assert {level for level, text in logged if "accuracy 0." in text and " in " in text} == {"INFO"}
    assert {level for level, text in logged if "train_loss" in text} == {"DEBUG"}
    assert any(level == "WARNING" and text.startswith("1 of 6 jobs") for level, text in logged)


def test_a_terminal_gets_a_live_view_that_goes_away(root: Path, terminal: Terminal) -> None:
    called(root, Slow, stream=terminal, engine="process", n_jobs=1)
    text = terminal.getvalue()
    assert re.search(r"Slow/step/fold-0 · epoch \d/2 · batch \d/4 · loss [\d.]+ · core", text)
    assert "0 of 3 jobs finished, 1 running, 2 waiting" in text
    assert re.search(r"so far Slow/step accuracy 0\.\d{4} \(\d fold", text)
    assert re.search(r"jobs on \d of \d+ core", text)
    assert re.search(r"elapsed, .* left", text)
    assert "3 of 3 jobs finished, " in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


def test_no_line_of_the_live_view_wraps(
    root: Path, monkeypatch: pytest.MonkeyPatch, terminal: Terminal
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "a-residual-network-of-many-layers-with-squeeze-and-excitation-and-a-long-name"
    called(root, {name: Slow}, stream=terminal, engine="process", n_jobs=1)
    lines = terminal.getvalue().splitlines()
    running = [line for line in lines if "batch " in line and " · core" in line]
    leading = [line for line in lines if "so far a-res" in line]
    assert running
    assert leading
    assert all(
        "a-resid" in line and "…" in line and len(plain(line).strip()) <= 80
        for line in running + leading
    )


def test_without_a_terminal_lines_tell_how_far_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asynckfold.api.display.LINE_SECONDS", 0.0)
    called(root, Tiny)
    lines = capfd.readouterr().err.splitlines()
    shares = [int(line.partition(" ")[0]) for line in lines if " % of the steps: " in line]
    assert shares == sorted(shares)
    assert {0, 33, 66} <= {*shares}


@pytest.mark.parametrize("name", ["dumb", "unknown", ""])
def test_a_terminal_that_moves_no_cursor_gets_lines_broken_between_words(
    root: Path, monkeypatch: pytest.MonkeyPatch, terminal: Terminal, name: str
) -> None:
    monkeypatch.setenv("TERM", name)
    monkeypatch.setenv("COLUMNS", "40")
    called(root, Tiny(), stream=terminal)
    text = terminal.getvalue()
    assert "\x1b" not in text
    assert "3 jobs; 3 to do" in text
    assert all(cell_len(line) <= 40 for line in text.splitlines())
    assert "model Tiny was given as an instance" in " ".join(text.split())


@pytest.mark.parametrize("hidden", [True, False])
def test_ctrl_c_takes_no_cursor_away(
    root: Path, monkeypatch: pytest.MonkeyPatch, terminal: Terminal, hidden: bool
) -> None:
    """Neither when it has just been hidden nor when it is about to be shown."""
    real = Console.show_cursor

    def struck(console: Console, show: bool = True) -> bool:
        if show and not hidden:
            signal.raise_signal(signal.SIGINT)
        shown = real(console, show)
        if hidden and not show:
            signal.raise_signal(signal.SIGINT)
        return shown

    monkeypatch.setattr(Console, "show_cursor", struck)
    # At the end, the call may return before it hears of the signal.
    ended: Any = contextlib.suppress if not hidden else pytest.raises
    with ended(InterruptedRunError):
        called(root, Tiny, stream=terminal)
    text = terminal.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
