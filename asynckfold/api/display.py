"""What a person sees while a sweep runs: bars on a terminal, some lines elsewhere, and a log.

All of it also goes to the logger ``asynckfold`` of the module `logging`, at every verbosity: epochs
and stages as DEBUG, jobs and notes as INFO, failed jobs and warnings as WARNING.
"""

from __future__ import annotations

import contextvars
import io
import logging
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from asynckfold.api.progress import SweepProgress, cores_in_use, overview
from asynckfold.jobs.messages import EpochEnd, Note, RunEvent
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import CANCELLED, Result
from asynckfold.system.console import animates, console, spinner
from asynckfold.system.plain_text import one_line
from asynckfold.system.signals import unbroken
from asynckfold.system.terminal import steady

LINE_SECONDS = 30.0
"""Between two lines where there is no terminal."""

MOST_ROWS = 16
"""Running placements shown at once."""

BAR_COLUMNS = 40

CELL_COLUMNS, CELL_LINES = 100, 200
"""Of a notebook's cell; older lines are in the log of the run."""

REFRESH_SECONDS = 0.5

_STYLE = (
    "margin:0;line-height:normal;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;"
    "font-family:Menlo,DejaVu Sans Mono,Consolas,monospace"
)
_LOOK: dict[str, Any] = {
    "width": CELL_COLUMNS,
    "force_jupyter": False,
    "force_terminal": True,
    "color_system": "truecolor",
    # On white and on black; those of rich are for black.
    "theme": Theme({"bar.back": "#a0a0a0", "bar.complete": "#0072b2", "bar.finished": "#009e73"}),
}

LOG = logging.getLogger("asynckfold")
# Else Python prints warnings of a program that has set up no logging.
LOG.addHandler(logging.NullHandler())


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, such as Jupyter, VS Code or Colab."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Display:
    """The sweep's watch for people, on standard error or in a notebook.

    `verbose` is 0 for silence, 1 for bars or some lines, 2 also for a line for each job and how it
    is trained, 3 also for a line for each epoch.
    """

    def __init__(self, verbose: int = 1) -> None:
        self._verbose = verbose
        cell: Cell | None = None
        if is_notebook():
            cell = Cell(self._render)
        self._animates = cell is not None or animates(stderr=True)
        # A terminal gets lines broken between words; a file gets them whole.
        is_file = not steady(sys.stderr).isatty()
        terminal = console(stderr=True, force_jupyter=False, soft_wrap=is_file)
        self._cell, self._console = cell, cell.console if cell else terminal
        self._live: Live | Cell | None = None
        self._progress: SweepProgress | None = None
        self._lock = threading.Lock()  # of the progress, which a thread draws
        self._printed = time.monotonic()
        self._spinner = Spinner(spinner(self._console), style="dim")
        self._doing = ""
        self._publish: Callable[[SweepProgress], None]

    @unbroken
    def __enter__(self) -> Display:
        if self._verbose and self._animates:
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
        """Warn of something, at the line of the call."""
        LOG.warning("%s", one_line(text))
        warnings.warn(text, category, stacklevel=6)

    def doing(self, text: str) -> None:
        """Say which stage the run is in."""
        if text and text.partition(":")[0] != self._doing.partition(":")[0]:
            LOG.debug("%s", one_line(text))
        self._doing = text

    def note(self, text: str, verbose: int = 1, level: int = logging.INFO) -> None:
        """Say something once, from a verbosity on."""
        LOG.log(level, "%s", one_line(text))
        if self._verbose >= verbose:
            self._console.print(Text(one_line(text)))

    def begin(
        self,
        plan: Plan,
        requests: Mapping[str, Request],
        results: Sequence[Result],
        batches: Mapping[str, int],
        publish: Callable[[SweepProgress], None],
    ) -> None:
        """Begin the sweep, whose jobs are known, see `SweepProgress`.

        `publish` gets its progress now and then, and when the last job has ended.
        """
        self._progress, self._publish = SweepProgress(plan, requests, results, batches), publish
        before = f", {len(results)} of them finished before" if results else ""
        count = f"{len(plan.jobs)} job{'s' if len(plan.jobs) > 1 else ''}"
        self.note(f"{count}{before}; {len(self._progress.waiting)} to do")

    def placed(self, placement: Placement) -> None:
        """Note that a placement starts."""
        with self._lock:
            self._begun.placed(placement)

    def heard(self, event: RunEvent) -> None:
        """Take an event of a worker."""
        with self._lock:
            self._begun.heard(event)
        if isinstance(event, EpochEnd):
            item = event.epoch
            measures = {"train_loss": item.train_loss, "valid_loss": item.valid_loss}
            if item.accuracy is not None:
                measures["accuracy"] = item.accuracy
            known = (f"{name} {value:.4f}" for name, value in measures.items() if value == value)
            text = f"{event.job_id} epoch {item.number} {' '.join(known)}"
            self.note(text, verbose=3, level=logging.DEBUG)
        elif isinstance(event, Note):
            self.note(f"{event.job_id or 'run'}: {event.text}")

    def ended(self, result: Result) -> None:
        """Note a result, which is durable."""
        with self._lock:
            self._begun.ended(result)
        if result.is_failure:
            text = f"{result.job_id} {result.status}: {result.error}"
            self.note(text, level=logging.WARNING)
        elif result.status == CANCELLED:
            self.note(f"{result.job_id} {result.error}", verbose=2)
        else:
            scores = " ".join(f"{name} {value:.4f}" for name, value in result.scores.items())
            self.note(f"{result.job_id} {scores} in {result.fit_seconds:.1f} s", verbose=2)
        if self._begun.is_over:
            self._publish(self._begun)
            self.note(overview(self._begun))

    def ticked(self, load: Load) -> None:
        """Note that time passed, and the load."""
        self._begun.load = load
        self._publish(self._begun)
        now = time.monotonic()
        if not self._live and now - self._printed >= LINE_SECONDS:
            self._printed = now
            self.note(overview(self._begun))

    @property
    def _begun(self) -> SweepProgress:
        assert self._progress is not None
        return self._progress

    def _render(self) -> Group:
        self._spinner.update(text=_row(self._doing, "dim"))
        with self._lock:
            shown = self._progress
            parts = [] if shown is None or shown.is_over else self._parts(shown)
        return Group(*parts, self._spinner) if self._doing else Group(*parts)

    def _parts(self, progress: SweepProgress) -> list[RenderableType]:
        columns = self._console.width
        width = max(1, min(BAR_COLUMNS, columns - 8))
        bar = ProgressBar(total=max(1, progress.steps), completed=progress.steps_done, width=width)
        head = Table.grid(padding=(0, 1))
        head.add_row(bar, f"{progress.percent} %")
        lines = progress.lines(columns)
        more = [f"and {len(lines) - MOST_ROWS} more"] if len(lines) > MOST_ROWS else []
        below = [*more, progress.best(columns), cores_in_use(progress)]
        return [
            head,
            *map(_row, [progress.summary(), progress.times(), *lines[:MOST_ROWS]]),
            *(_row(text, "dim") for text in below if text),
        ]


def _row(text: str, style: str = "") -> Text:
    """Return a row of the live view, which never wraps."""
    return Text(one_line(text), style, no_wrap=True, overflow="ellipsis")


class Cell(io.TextIOBase):
    """One output of a cell: what was printed to its `console`, and below it a `live` part."""

    def __init__(self, live: Callable[[], RenderableType]) -> None:
        self.console = console(stream=cast("TextIO", self), **_LOOK)
        self._live = live
        self._handle: Any = None
        self._lines = deque[str](maxlen=CELL_LINES)
        self._shown: dict[str, str] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> int:
        """Take whole lines, with escape sequences for colours."""
        with self._lock:
            self._lines.extend(text.splitlines())
        return len(text)

    def flush(self) -> None:
        """Show what was written; a running thread does so soon."""
        if self._thread is None:
            self._refresh()

    def start(self) -> None:
        """Keep the live part fresh."""
        self._refresh()
        # In the context of the cell: ipykernel reads there whose output it is.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._keep_fresh,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the last state."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._refresh()

    def _keep_fresh(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            # A job may start or end while its line is drawn.
            with suppress(RuntimeError):
                self._refresh()

    def _refresh(self) -> None:
        with self._lock:
            printed = [Text.from_ansi("\n".join(self._lines))] if self._lines else []
            bundle = _exported(Group(*printed, self._live()))
            if bundle == self._shown:
                return
            self._shown = bundle
            if self._handle is None:
                from IPython import display

                publish: Any = display.display
                self._handle = publish(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)


def _exported(what: RenderableType) -> dict[str, str]:
    recorder = console(stream=io.StringIO(), record=True, **_LOOK)
    recorder.print(what)
    html = recorder.export_html(clear=False, inline_styles=True, code_format="{code}").rstrip("\n")
    text = recorder.export_text().rstrip("\n")
    return {"text/html": f"<pre style='{_STYLE}'>{html}</pre>", "text/plain": text}
