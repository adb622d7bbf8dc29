"""What a person sees while a sweep runs: the numbers without a terminal, then how they show."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asynckfold.api.display import MOST_ROWS, Display, State, clock
from asynckfold.errors import InterruptedRunError
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import EpochEnded, Noted, Progress
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.jobs.plan import Plan, make_jobs
from asynckfold.jobs.result import DIVERGED, DONE, FAILED, Epoch, Result
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.signals import listening
from asynckfold.system.terminal import steady


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def make_plan(models: tuple[str, ...] = ("A", "B"), folds: int = 3, epochs: int = 4) -> Plan:
    one = np.array([0]), np.array([1])
    jobs = make_jobs(models, ["step"], [Fold(0, index, *one) for index in range(folds)], 0)
    params = TrainerParams(epochs=epochs)
    return Plan(jobs, params, 32, 1, 0, "cpu", ("accuracy",), "d", "f")


def requests(plan: Plan, seconds: float = 10.0) -> dict[str, Request]:
    return {job.id: Request(job.id, seconds) for job in plan.jobs}


def make_state(watch: Callable[[], float] | None = None, **changes: Any) -> State:
    plan = make_plan(**changes)
    return State(plan, requests(plan), [], watch or Clock())


def place(state: State | Display, name: str, core: int = 0, gpu: int | None = None) -> None:
    state.placed(Placement((name,), (core,), gpu=gpu))


def result(name: str, score: float = 0.5, status: str = DONE, error: str = "") -> Result:
    scores = {"accuracy": score} if status == DONE else {}
    return Result(name, 1, status, scores, fit_seconds=2.0, error=error)


def ended_epoch(name: str, seconds: float = 2.0, number: int = 1) -> EpochEnded:
    return EpochEnded(name, 1, Epoch(number, 0.5, 0.6, 0.7, 1e-3, seconds))


# The numbers


def test_counts_follow_a_job_from_waiting_to_its_end() -> None:
    state = make_state()
    assert state.summary() == "0/6 done, 6 waiting"
    place(state, "A/step/fold-0")
    assert state.summary() == "0/6 done, 1 running, 5 waiting"
    state.ended(result("A/step/fold-0"))
    assert state.summary() == "1/6 done, 5 waiting"
    place(state, "B/step/fold-2")
    state.ended(result("B/step/fold-2", status=DIVERGED))
    assert state.summary() == "1/6 done, 1 failed, 4 waiting"


def test_what_earlier_sessions_finished_is_not_waiting() -> None:
    plan = make_plan()
    found = [result("A/step/fold-0"), result("A/step/fold-1", status=FAILED)]
    assert State(plan, requests(plan), found).summary() == "1/6 done, 1 failed, 4 waiting"


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([DONE, FAILED])), max_size=6))
def test_every_job_is_in_one_place(ends: list[tuple[int, str]]) -> None:
    state = make_state()
    names = [job.id for job in state.plan.jobs]
    for index, status in ends:
        place(state, names[index])
        if index % 2:
            state.ended(result(names[index], status=status))
    parts = [set(state.waiting), set(state.running), set(state.results) - set(state.running)]
    assert set.union(*parts) == set(names)
    assert sum(map(len, parts)) == len(names)


def test_no_time_is_promised_before_an_epoch_was_measured() -> None:
    state = make_state()
    place(state, "A/step/fold-0")
    assert state.seconds_left() is None
    assert "left" not in state.summary()


def test_the_time_left_comes_from_measured_epochs() -> None:
    watch = Clock()
    state = make_state(watch, models=("A",), folds=4)
    for index in (0, 1):
        place(state, f"A/step/fold-{index}", index)
    state.heard(ended_epoch("A/step/fold-0", 2.0))
    # Four jobs of 4 epochs of 2 s, two at a time.
    assert state.seconds_left() == pytest.approx(16.0)
    watch.now += 4
    assert state.seconds_left() == pytest.approx(12.0)
    for index in (0, 1):
        state.ended(result(f"A/step/fold-{index}"))
    for index in (2, 3):
        place(state, f"A/step/fold-{index}", index)
    assert state.seconds_left() == pytest.approx(8.0)
    for index in (2, 3):
        state.ended(result(f"A/step/fold-{index}"))
    assert state.seconds_left() == 0.0


def test_a_model_without_an_epoch_counts_with_what_was_expected() -> None:
    state = make_state(folds=1)
    place(state, "A/step/fold-0")
    state.heard(ended_epoch("A/step/fold-0", 1.0))
    assert state.seconds_left() == pytest.approx(4.0 + 10.0)


def test_a_job_that_takes_longer_than_thought_is_not_owed_time() -> None:
    watch = Clock()
    state = make_state(watch, models=("A",), folds=1)
    place(state, "A/step/fold-0")
    state.heard(ended_epoch("A/step/fold-0", 1.0))
    watch.now += 1000
    assert state.seconds_left() == 0.0


def test_best_so_far_compares_candidates_with_equally_many_folds() -> None:
    state = make_state()
    assert state.best() == ""
    state.ended(result("B/step/fold-0", 0.99))
    assert state.best() == "best so far B/step accuracy 0.9900 (1 fold)"
    state.ended(result("A/step/fold-0", 0.5))
    state.ended(result("A/step/fold-1", 0.7))
    assert state.best() == "best so far A/step accuracy 0.6000 (2 folds)"
    state.ended(result("B/step/fold-1", status=FAILED))
    assert state.best() == "best so far A/step accuracy 0.6000 (2 folds)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert clock(seconds) == text


# The live table


def picture(state: State, width: int = 90) -> str:
    console = Console(record=True, force_terminal=True, width=width, file=io.StringIO())
    console.print(state.render())
    return console.export_text()


def test_the_table_shows_jobs_cores_and_the_best() -> None:
    state = make_state()
    state.ended(result("A/step/fold-0", 0.75))
    place(state, "A/step/fold-1", core=1)
    place(state, "B/step/fold-0", core=0)
    state.heard(Progress("A/step/fold-1", 1, 2, 4, 30, 120, 0.12345))
    state.load = Load((0, 1, 2), (1, 2), 1)
    lines = [line.rstrip() for line in picture(state).splitlines()]
    assert "1/6 done, 2 running, 3 waiting" in lines[0]
    assert lines[1].split() == ["job", "epoch", "batch", "loss", "core"]
    assert lines[2].split() == ["A/step/fold-1", "2/4", "30/120", "0.1235", "1"]
    assert lines[3].split() == ["B/step/fold-0", "-", "-", "-", "0"]
    assert lines[4] == "best so far A/step accuracy 0.7500 (1 fold)"
    assert lines[5] == "2 of 3 cores in use, 1 left to other programs"


def test_nothing_jumps_when_other_jobs_run() -> None:
    state = make_state(models=("A", "a_model_with_a_longer_name"))
    widths = []
    for name in ("A/step/fold-0", "a_model_with_a_longer_name/step/fold-0"):
        place(state, name)
        state.heard(Progress(name, 1, 1, 4, 1, 120, 2.0))
        widths.append(picture(state).splitlines()[1].index("core"))
        state.ended(result(name))
    assert widths[0] == widths[1]


@pytest.mark.parametrize("width", [60, 90, 200])
def test_long_names_and_many_jobs_fit(width: int) -> None:
    state = make_state(models=("m" * 200,), folds=MOST_ROWS + 3)
    for job in state.plan.jobs:
        place(state, job.id)
    lines = picture(state, width).splitlines()
    assert len(lines) == 1 + 1 + MOST_ROWS + 1
    assert lines[-1].split() == ["and", "3", "more"]
    assert all(len(line) <= width for line in lines)
    assert "…" in lines[2]


def test_a_gpu_stands_in_place_of_a_core() -> None:
    state = make_state()
    place(state, "A/step/fold-0", gpu=3)
    assert "GPU 3" in picture(state)


# The display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
        display.heard(Noted(None, "damage", "an older one is used"))


def test_silent_means_silent() -> None:
    for stream in (io.StringIO(), Terminal()):
        drive(Display(0, stream), make_plan())
        assert stream.getvalue() == ""


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    drive(Display(1, stream), make_plan())
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["labels were numbered", "6 jobs; 6 to do"]
    failed = [line for line in lines if "ValueError: no" in line]
    assert [line.split()[0] for line in failed] == ["A/step/fold-1", "B/step/fold-1"]
    assert lines[-1] == "run: an older one is used"
    # The last line always tells the end, however fast the jobs were.
    assert lines[-2] == "B/step/fold-2 accuracy 0.7500 in 2.0 s  [4/6 done, 2 failed]"
    assert "\x1b" not in stream.getvalue()


def test_a_line_per_job_and_a_line_per_epoch_when_asked() -> None:
    counts = []
    for verbose in (2, 3):
        stream = io.StringIO()
        drive(Display(verbose, stream), make_plan())
        lines = stream.getvalue().splitlines()
        counts.append(sum("accuracy 0.7500" in line for line in lines))
        epochs = [line for line in lines if "train_loss" in line]
    assert counts == [4, 4]
    assert len(epochs) == 6
    assert epochs[0] == "A/step/fold-0 epoch 1 train_loss 0.5000 valid_loss 0.6000 accuracy 0.7000"


def test_a_terminal_gets_a_live_table_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    display = Display(1, stream)
    plan = make_plan()
    with display:
        display.begin(plan, requests(plan), [])
        place(display, "A/step/fold-0")
        display.doing("timing")
        time.sleep(0.5)
    text = stream.getvalue()
    assert "A/step/fold-0" in text
    assert "0/6 done, 1 running, 5 waiting" in text
    assert "timing" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back
    assert text.endswith("\x1b[2K")  # erased


@pytest.mark.parametrize("hidden", [True, False])
def test_ctrl_c_takes_no_cursor_away(monkeypatch: pytest.MonkeyPatch, hidden: bool) -> None:
    """Neither when it has just been hidden nor when it is about to be shown."""
    monkeypatch.setenv("TERM", "xterm-256color")
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
    with pytest.raises(InterruptedRunError), listening(signal.SIGINT):
        show_and_wait()
    text = stream.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_names_are_no_markup() -> None:
    stream = io.StringIO()
    drive(Display(2, stream), make_plan(models=("[red]x[/red]",)))
    assert "[red]x[/red]/step/fold-0" in stream.getvalue()


def test_a_reader_that_goes_away_stops_nothing() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        os.close(reader)
        drive(Display(3, stream), make_plan())
        print("more", file=steady(stream))
