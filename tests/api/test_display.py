"""What a person sees while a sweep runs: bars on a terminal, some lines elsewhere, and a log."""

from __future__ import annotations

import io
import logging
import os
import signal
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from asynckfold import InterruptedRunError, Plan
from asynckfold.api.display import LINE_SECONDS, MOST_ROWS, Display
from asynckfold.jobs.messages import Note
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.result import FAILED
from asynckfold.system.signals import listening
from asynckfold.system.terminal import steady
from tests.api.test_progress import Clock, at_batch, ended_epoch, make_plan, requests, result


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def an_ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def place(display: Display, *names: str, core: int = 0) -> None:
    trainer = "fused" if len(names) > 1 else "plain"
    display.placed(Placement(names, (core,), trainer=trainer))


# The live view


def picture(display: Display, width: int) -> list[str]:
    """Return the lines of the live view at a width, without colours."""
    console = Console(record=True, force_terminal=True, width=width, file=io.StringIO())
    display._console.width = width
    console.print(display._render())
    return [line.rstrip() for line in console.export_text().splitlines()]


def begun(plan: Plan, batches: int = 120) -> Display:
    display = Display(1, Terminal(), Clock())
    display.begin(plan, requests(plan), [], {job.id: batches for job in plan.jobs})
    return display


def test_the_view_shows_steps_time_placements_cores_and_the_best() -> None:
    display = begun(make_plan())
    display.ended(result("A/step/fold-0", 0.75))
    place(display, "A/step/fold-1", core=1)
    place(display, "B/step/fold-0", "B/step/fold-1")
    display.heard(at_batch("A/step/fold-1", 30, epoch=2, batches=120))
    display.ticked(Load((0, 1, 2), (1, 2), 1))
    head, *lines = picture(display, 90)
    assert head.endswith(" 21 %")
    assert lines == [
        "1 of 6 jobs finished, 3 running, 2 waiting",
        "0.0 s elapsed",
        "A/step/fold-1 · epoch 2/4 · batch 30/120 · loss 0.5 · core 1",
        "B/step · starting · 2 folds fused · core 0",
        "so far A/step accuracy 0.7500 (1 fold)",
        "jobs on 2 of 3 cores, other programs on 1",
    ]


def test_at_the_end_the_view_gives_way_to_a_line() -> None:
    plan, terminal = make_plan(models=("A",), folds=1), Terminal()
    display = Display(1, terminal, Clock())
    display.begin(plan, requests(plan), [])
    assert picture(display, 90) != []
    display.ended(result(plan.jobs[0].id, 0.75))
    assert picture(display, 90) == []
    assert "1 of 1 job finished, 0.0 s elapsed\n" in terminal.getvalue()


def test_the_serial_baseline_has_a_bar_of_its_own() -> None:
    display, plan = begun(make_plan()), make_plan(models=("A",))
    display.begin(plan, requests(plan), [], title="serial baseline")
    place(display, *(job.id for job in plan.jobs))
    assert picture(display, 90)[1] == "serial baseline: job 1 of 3"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_lines_break_between_words(width: int) -> None:
    plan = make_plan(models=("convolutional-network", "梯度提升决策树"), folds=MOST_ROWS + 3)
    display = begun(plan)
    for job in plan.jobs:
        place(display, job.id)
        display.heard(at_batch(job.id, 30, epoch=2, batches=120))
    display.ended(result(plan.jobs[0].id, 0.75))
    display.ticked(Load((0, 1, 2), (1, 2), 1))
    lines = picture(display, width)
    assert all(cell_len(line) <= width for line in lines)
    whole = {word for line in picture(display, 1000) for word in line.split()}
    assert {word for line in lines[1:] for word in line.split()} <= whole
    assert "and 21 more" in lines


# The display


def drive(display: Display, plan: Plan) -> None:
    with display:
        display.doing("reading the data")
        display.note("labels were numbered")
        display.doing("")
        display.begin(plan, requests(plan), [])
        for job in plan.jobs:
            place(display, job.id)
            display.ticked(Load((0,), (0,), 1))
            display.heard(ended_epoch(job.id))
            failed = job.fold == 1
            display.ended(
                result(job.id, status=FAILED, error="ValueError: no")
                if failed
                else result(job.id, 0.75)
            )
        display.heard(Note(None, "damage", "an older one is used"))


def test_silent_means_silent() -> None:
    for stream in (io.StringIO(), Terminal()):
        drive(Display(0, stream), make_plan())
        assert stream.getvalue() == ""


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    drive(Display(1, stream, Clock()), make_plan())
    assert stream.getvalue().splitlines() == [
        "labels were numbered",
        "6 jobs; 6 to do",
        "A/step/fold-1 failed: ValueError: no",
        "B/step/fold-1 failed: ValueError: no",
        # The last line always tells the end, however fast the jobs were.
        "4 of 6 jobs finished, 2 failed, 0.0 s elapsed",
        "run: an older one is used",
    ]


def test_without_a_terminal_there_is_a_line_every_half_minute() -> None:
    stream, watch, plan = io.StringIO(), Clock(), make_plan()
    display = Display(1, stream, watch)
    with display:
        display.begin(plan, requests(plan), [])
        place(display, "A/step/fold-0")
        for _ in range(4 * 65):
            watch.now += 0.25
            display.ticked(Load((0,), (0,), 1))
    lines = stream.getvalue().splitlines()[1:]
    assert lines == [
        f"0 % of the steps: 0 of 6 jobs finished, 1 running, 5 waiting, {text} elapsed"
        for text in ("30.0 s", "1 min 00 s")
    ]
    assert LINE_SECONDS == 30


@pytest.mark.parametrize("name", ["dumb", "unknown", ""])
def test_a_terminal_that_moves_no_cursor_gets_lines(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TERM", name)
    stream = Terminal()
    drive(Display(1, stream), make_plan())
    assert "6 jobs; 6 to do" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_dumb_terminal_gets_lines_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "60")
    text, terminal = "images were scaled to [0, 1], " * 5, Terminal()
    Display(1, terminal).note(text)
    lines = terminal.getvalue().splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert {word for line in lines for word in line.split()} == set(text.split())


# The log


def test_all_of_it_goes_to_the_log_also_where_nothing_is_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.DEBUG, "asynckfold"):
        shown = Display(0, stream)
        drive(shown, make_plan())
        for number in (1, 2):
            shown.doing(f"reading the data: {number} of 9 samples")
        with pytest.warns(UserWarning, match="2 of 6 jobs failed"):
            shown.warn("2 of 6 jobs failed", UserWarning)
    assert stream.getvalue() == ""
    found = [(item.levelname, item.getMessage()) for item in caplog.records]
    assert found[:2] == [("DEBUG", "reading the data"), ("INFO", "labels were numbered")]
    assert found[-2:] == [
        ("DEBUG", "reading the data: 1 of 9 samples"),
        ("WARNING", "2 of 6 jobs failed"),
    ]
    assert ("WARNING", "A/step/fold-1 failed: ValueError: no") in found
    assert ("INFO", "A/step/fold-0 accuracy 0.7500 in 2.0 s") in found
    assert [level for level, text in found if "train_loss" in text] == ["DEBUG"] * 6


def test_a_line_per_job_and_a_line_per_epoch_when_asked() -> None:
    counts = []
    for verbose in (2, 3):
        stream = io.StringIO()
        drive(Display(verbose, stream), make_plan())
        lines = stream.getvalue().splitlines()
        counts.append(sum("accuracy 0.7500 in 2.0 s" in line for line in lines))
        epochs = [line for line in lines if "train_loss" in line]
    assert counts == [4, 4]
    assert len(epochs) == 6
    assert epochs[0] == "A/step/fold-0 epoch 1 train_loss 0.5000 valid_loss 0.6000 accuracy 0.7000"


def test_a_terminal_gets_a_live_view_that_goes_away() -> None:
    stream = Terminal()
    display = Display(1, stream)
    plan = make_plan()
    with display:
        display.begin(plan, requests(plan), [])
        place(display, "A/step/fold-0")
        display.doing("timing")
        time.sleep(0.5)
    text = stream.getvalue()
    assert "A/step/fold-0 · starting · core 0" in text
    assert "0 of 6 jobs finished, 1 running, 5 waiting" in text
    assert "timing" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back
    assert text.endswith("\x1b[2K")  # erased


@pytest.mark.parametrize("hidden", [True, False])
def test_ctrl_c_takes_no_cursor_away(monkeypatch: pytest.MonkeyPatch, hidden: bool) -> None:
    """Neither when it has just been hidden nor when it is about to be shown."""
    real, stream = Console.show_cursor, Terminal()

    def struck(console: Console, show: bool = True) -> bool:
        if show and not hidden:
            signal.raise_signal(signal.SIGINT)
        done = real(console, show)
        if hidden and not show:
            signal.raise_signal(signal.SIGINT)
        return done

    def show_and_wait() -> None:
        with Display(1, stream):
            pass
        time.sleep(60)

    monkeypatch.setattr(Console, "show_cursor", struck)
    with pytest.raises(InterruptedRunError), listening():
        show_and_wait()
    text = stream.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_a_reader_that_goes_away_stops_nothing() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        os.close(reader)
        drive(Display(3, stream), make_plan())
        print("more", file=steady(stream))
