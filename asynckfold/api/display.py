"""What a person sees while a sweep runs: one live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from types import TracebackType
from typing import Protocol, TextIO

import numpy as np
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from asynckfold.api.notebook import Cell, is_notebook
from asynckfold.jobs.messages import EpochEnded, Noted, Progress, RunEvent
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import DONE, Result
from asynckfold.system.console import console, spinner
from asynckfold.system.plain_text import one_line
from asynckfold.system.signals import unbroken

LINE_SECONDS = 2.0
"""Between two plain lines at verbosity 1."""

MOST_ROWS = 16
"""Running jobs shown at once."""

BAR_COLUMNS, NAME_COLUMNS = 24, 48
"""Widths that leave room for the rest in 100 columns."""


class Shown(Protocol):
    """What hides the cursor of a terminal, and shows it again at its end."""

    def start(self) -> None:
        """Appear."""

    def stop(self) -> None:
        """Go away, if it is there."""


@unbroken
def _start(what: Shown) -> None:
    what.start()


@unbroken
def _stop(what: Shown) -> None:
    what.stop()


@contextmanager
def shown(what: Shown) -> Iterator[None]:
    """Show it for a while; no signal keeps the cursor."""
    try:
        _start(what)
        yield
    finally:
        _stop(what)


class Display:
    """The sweep's watch for people.

    Parameters
    ----------
    verbose : int
        0 silent, 1 one live table or some lines, 2 a line for each job, 3 a line for each epoch.
    stream : file, optional
        Standard error by default.
    """

    def __init__(self, verbose: int = 1, stream: TextIO | None = None) -> None:
        self._verbose = verbose
        cell = Cell(self._render) if stream is None and is_notebook() else None
        terminal = console(stderr=True, stream=stream, force_jupyter=False)
        self._cell, self._console = cell, cell.console if cell else terminal
        self._live: Live | Cell | None = None
        self._state: State | None = None
        self._printed = 0.0
        self._spinner = Spinner(spinner(self._console), style="dim")
        self._doing = ""

    @unbroken
    def __enter__(self) -> Display:
        if self._verbose and self._console.is_terminal:
            self._live = self._cell or Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=5,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    @unbroken
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._doing = ""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def warn(self, text: str, category: type[Warning]) -> None:
        """Warn of something; a notebook shows it in the same output."""
        if self._cell is None:
            warnings.warn(text, category, stacklevel=5)
            return
        # Not into the cell itself: to show it, ipykernel flushes standard error.
        with redirect_stderr(io.StringIO()) as told:
            warnings.warn(text, category, stacklevel=5)
        if told.getvalue():
            self._cell.write(told.getvalue())
            self._cell.flush()

    def doing(self, text: str) -> None:
        """Say which stage the run is in."""
        self._doing = text

    def note(self, text: str) -> None:
        """Say something once."""
        if self._verbose:
            self._console.print(Text(one_line(text)))

    def begin(self, plan: Plan, requests: Mapping[str, Request], results: list[Result]) -> None:
        """The jobs are known."""
        self._state = State(plan, requests, results)
        waiting = len(self._state.waiting)
        if self._verbose and not self._live:
            found = f", {len(results)} of them finished before" if results else ""
            count = f"{len(plan.jobs)} job{'s' if len(plan.jobs) > 1 else ''}"
            self.note(f"{count}{found}; {waiting} to do")

    def placed(self, placement: Placement) -> None:
        """A placement starts."""
        if self._state is not None:
            self._state.placed(placement)

    def heard(self, event: RunEvent) -> None:
        """A worker said something."""
        if self._state is None:
            return
        self._state.heard(event)
        if isinstance(event, EpochEnded) and self._verbose >= 3:
            item = event.epoch
            score = "" if item.accuracy is None else f" accuracy {item.accuracy:.4f}"
            self.note(
                f"{event.job_id} epoch {item.number} train_loss {item.train_loss:.4f} "
                f"valid_loss {item.valid_loss:.4f}{score}"
            )
        elif isinstance(event, Noted):
            self.note(f"{event.job_id or 'run'}: {event.text}")

    def ended(self, result: Result) -> None:
        """A result is durable."""
        if self._state is None:
            return
        self._state.ended(result)
        now = time.monotonic()
        failed = result.status != DONE
        last = not self._state.waiting and not self._state.running
        due = not self._live and (now - self._printed > LINE_SECONDS or last)
        if self._verbose and (failed or due or self._verbose >= 2):
            self._printed = now
            self.note(f"{_line(result)}  [{self._state.summary()}]")

    def ticked(self, load: Load) -> None:
        """The load was looked at."""
        if self._state is not None:
            self._state.load = load

    def _render(self) -> Group:
        self._spinner.update(text=Text(one_line(self._doing), style="dim"))
        parts = [] if self._state is None else [self._state.render()]
        return Group(*parts, self._spinner) if self._doing else Group(*parts)


def _line(result: Result) -> str:
    if result.status != DONE:
        return f"{result.job_id} {result.status}: {result.error}"
    scores = " ".join(f"{name} {value:.4f}" for name, value in result.scores.items())
    return f"{result.job_id} {scores} in {result.fit_seconds:.1f} s"


class State:
    """What the display knows, gathered from the events.

    Parameters
    ----------
    plan : Plan
        All jobs.
    requests : Mapping of str to Request
        Expected seconds by job id.
    results : list of Result
        What earlier sessions finished.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        plan: Plan,
        requests: Mapping[str, Request],
        results: list[Result],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.results = {result.job_id: result for result in results}
        self.waiting = {job.id for job in plan.jobs} - set(self.results)
        self.running: dict[str, tuple[Placement, float]] = {}
        self.progress: dict[str, Progress] = {}
        self.load: Load | None = None
        self._clock = clock
        self._candidate = {job.id: job.candidate for job in plan.jobs}
        self._expected = {name: request.seconds for name, request in requests.items()}
        self._epochs: dict[str, list[float]] = {}

    def placed(self, placement: Placement) -> None:
        """Jobs went from waiting to running."""
        for name in placement.jobs:
            self.waiting.discard(name)
            self.running[name] = (placement, self._clock())

    def heard(self, event: RunEvent) -> None:
        """Remember where a job is, and how long its epochs take."""
        if isinstance(event, Progress):
            self.progress[event.job_id] = event
        elif isinstance(event, EpochEnded):
            model = self._candidate[event.job_id].split("/")[0]
            self._epochs.setdefault(model, []).append(event.epoch.seconds)

    def ended(self, result: Result) -> None:
        """A job went from running, or from waiting when its worker died, to ended."""
        self.running.pop(result.job_id, None)
        self.waiting.discard(result.job_id)
        self.progress.pop(result.job_id, None)
        self.results[result.job_id] = result

    def seconds_left(self) -> float | None:
        """Expected wall time until the last job ends, from measured epochs where there are any."""
        now = self._clock()
        waiting = [self._seconds(name) for name in self.waiting]
        running = [
            max(0.0, self._seconds(name) - (now - since))
            for name, (_, since) in self.running.items()
        ]
        if not waiting and not running:
            return 0.0
        if not self._epochs:
            return None
        width = max(1, len(self.running))
        return max([sum(waiting + running) / width, *running])

    def _seconds(self, name: str) -> float:
        seen = self._epochs.get(self._candidate[name].split("/")[0])
        if seen:
            return float(np.mean(seen)) * self.plan.params.epochs
        return self._expected.get(name, 0.0)

    def best(self) -> str:
        """The candidate with the best mean so far, and on how many folds."""
        metric = self.plan.scoring[0]
        by_candidate: dict[str, list[float]] = {}
        for result in self.results.values():
            if result.status == DONE and not math.isnan(result.scores.get(metric, math.nan)):
                scores = by_candidate.setdefault(self._candidate[result.job_id], [])
                scores.append(result.scores[metric])
        if not by_candidate:
            return ""
        most = max(len(scores) for scores in by_candidate.values())
        means = {
            name: float(np.mean(scores))
            for name, scores in by_candidate.items()
            if len(scores) == most
        }
        name = max(means, key=lambda key: (means[key], key))
        folds = "1 fold" if most == 1 else f"{most} folds"
        return f"best so far {name} {metric} {means[name]:.4f} ({folds})"

    def summary(self) -> str:
        """Counts and the time left, on one line."""
        done = sum(result.status == DONE for result in self.results.values())
        failed = len(self.results) - done
        parts = [f"{done}/{len(self.plan.jobs)} done"]
        counts = {"failed": failed, "running": len(self.running), "waiting": len(self.waiting)}
        parts += [f"{count} {state}" for state, count in counts.items() if count]
        left = self.seconds_left()
        if left is not None and (self.waiting or self.running):
            parts.append(f"{clock(left)} left")
        return ", ".join(parts)

    def render(self) -> Group:
        """The live table."""
        bar = ProgressBar(total=len(self.plan.jobs), completed=len(self.results), width=BAR_COLUMNS)
        head = Table.grid(padding=(0, 1))
        head.add_row(bar, Text(self.summary()))
        lines = [Text(one_line(text), style="dim") for text in (self.best(), self._cores()) if text]
        return Group(head, self._table(), *lines) if self.running else Group(head, *lines)

    def _table(self) -> Table:
        # One width from the first job to the last, so that nothing jumps.
        width = min(NAME_COLUMNS, max(len(job.id) for job in self.plan.jobs))
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        table.add_column("job", width=width, no_wrap=True, overflow="ellipsis")
        for name, size in (("epoch", 7), ("batch", 9), ("loss", 8), ("core", 5)):
            table.add_column(name, justify="right", width=size, no_wrap=True)
        for name in sorted(self.running)[:MOST_ROWS]:
            table.add_row(*self._row(name))
        if len(self.running) > MOST_ROWS:
            table.add_row(Text(f"and {len(self.running) - MOST_ROWS} more", style="dim"))
        return table

    def _row(self, name: str) -> tuple[Text, str, str, str, str]:
        event, (placement, _) = self.progress.get(name), self.running[name]
        where = ",".join(map(str, placement.cores))
        if placement.gpu is not None:
            where = f"GPU {','.join(str(index) for index, _ in placement.gpus)}"
        if event is None:
            return Text(one_line(name)), "-", "-", "-", where
        return (
            Text(one_line(name)),
            f"{event.epoch}/{event.epochs}",
            f"{event.batch}/{event.batches}",
            f"{event.loss:.4g}",
            where,
        )

    def _cores(self) -> str:
        if self.load is None:
            return ""
        taken = {core for placement, _ in self.running.values() for core in placement.cores}
        used = f"{len(taken)} of {len(self.load.cores)} cores in use"
        others = len(self.load.cores) - len(self.load.idle)
        return f"{used}, {others} left to other programs" if others else used


def clock(seconds: float) -> str:
    """Return a duration for people.

    >>> clock(4.24), clock(75), clock(7300)
    ('4.2 s', '1 min 15 s', '2 h 01 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02} min"
