"""The report that a call leaves behind, whether its jobs finished, failed or were interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asynckfold.api.arguments import Settings
from asynckfold.api.notebook import warn
from asynckfold.errors import (
    AllJobsFailedError,
    AsyncKFoldError,
    InterruptedRunError,
    JobFailedError,
)
from asynckfold.jobs.argument import one_line
from asynckfold.store import RunStore
from asynckfold.store.layout import DATABASE
from asynckfold.store.run_store import log_line
from asynckfold.system.signals import listening


@contextmanager
def leave_report(settings: Settings) -> Iterator[None]:
    """Write the report after a call, which has released the run; a fault is only a warning."""
    try:
        yield
    except (AllJobsFailedError, JobFailedError, InterruptedRunError):
        with suppress(InterruptedRunError):
            _leave(settings)
        raise
    _leave(settings)


def _leave(settings: Settings) -> None:
    if not settings.report:
        return
    # This imports compiled libraries, which a signal must not leave halfway.
    with listening():
        _, fault = written(settings.root)
    if fault:
        text = f"{fault}. The results stay; `asynckfold report {settings.root}` tries again"
        warn(text, RuntimeWarning, 6)


def written(root: Path) -> tuple[Path | None, str]:
    """Write the page of a run; return it, or what prevented it, which is logged.

    A process beside this one draws the PNG files; the exit waits for it. Neither
    for a run that ended before it had a plan: there is nothing to tell.
    """
    if not (root / DATABASE).exists():
        return None, ""
    try:
        from asynckfold.results.report.page import write_report

        with RunStore.read(root) as store:
            return (write_report(store, beside=True), "") if store.has_plan else (None, "")
    except Exception as error:  # noqa: BLE001
        # Hours of training must not be lost for a drawing.
        fault = f"there is no report: {one_line(error) or type(error).__name__}"
    with suppress(AsyncKFoldError, OSError):
        log_line(root, "report", fault)
    return None, fault
