"""What follows a sweep: out-of-fold outputs and the report are written into a finished run.

A nursery like `tests.durability.work`. The figures, which take seconds and touch no disk, are drawn
once for all processes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from asynckfold import RunStore, load_results
from asynckfold.api.kfold import write_out_of_fold
from asynckfold.results.report import charts, page
from asynckfold.results.report.summary import summarize
from tests.durability.work import FOLDS, PLAN, TARGETS, nursery, work


def finish(root: Path, acknowledge: int) -> None:
    """Do what a command does once every job has its result."""
    with RunStore.hold(root) as store:
        store.begin(PLAN, FOLDS, TARGETS)
        write_out_of_fold(load_results(store.reader))
    with RunStore.read(root) as store:
        path = page.write_report(store)
    os.write(acknowledge, f"report {path}\n".encode())


def draw_once() -> None:
    """Draw the figures of such a run now."""
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("wb") as nowhere:
        work(Path(folder), nowhere.fileno())
        with RunStore.read(folder) as store:
            drawn = charts.draw(summarize(store))
    charts.draw = lambda *_: drawn


if __name__ == "__main__":
    draw_once()
    nursery(finish)
