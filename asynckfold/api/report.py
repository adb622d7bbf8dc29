"""What a call leaves behind: the report, even of failed jobs, and pictures of hard samples."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.api.arguments import Settings
from asynckfold.errors import (
    AllJobsFailedError,
    AsyncKFoldError,
    InterruptedRunError,
    JobFailedError,
)
from asynckfold.jobs.argument import one_line
from asynckfold.store import RunReader, RunStore
from asynckfold.store.layout import DATABASE
from asynckfold.store.run_store import log_line
from asynckfold.system.files import make_folder, write_whole
from asynckfold.system.signals import listening

if TYPE_CHECKING:
    from asynckfold.data.prepare import PreparedData


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
        warnings.warn(text, RuntimeWarning, stacklevel=6)


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


def draw_meanwhile(store: RunReader) -> None:
    """Write the page of a run that goes on."""
    # Hours of training must not be lost for a drawing.
    with suppress(Exception):
        from asynckfold.results.report.page import write_page

        write_page(store)


EDGE = 32
"""Pixels of the longer edge: two dozen of them take some 100 KB of the page."""


def keep_pictures(run: RunStore, data: PreparedData) -> None:
    """Write ``oof/pictures.npz`` if samples are pictures that are held in memory.

    The report is drawn from the run's folder alone, and the data are not in it.
    """
    try:
        _keep(run.reader, data)
    except Exception as error:  # noqa: BLE001
        # Hours of training must not be lost for a picture.
        run.event("report", f"there are no pictures of samples: {one_line(error)}")


def _keep(run: RunReader, data: PreparedData) -> None:
    # Grey or coloured pictures, channels first.
    shape = data.checked.views.sample_shape
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape[1:]) < 8:
        return
    from asynckfold.results.cv_results import read_results
    from asynckfold.results.report.predictions import hard_samples, held_out
    from asynckfold.results.report.summary import PICTURES

    results, targets = read_results(run), run.splits()[1]
    hard = hard_samples(results, targets, held_out(results, targets))
    rows = [item.index for item in hard.samples] if hard else []
    stored = data.stored(rows) if rows else None
    if stored is None or stored.ndim not in (3, 4):
        return
    buffer = io.BytesIO()
    np.savez_compressed(buffer, samples=np.array(rows), pictures=_small(stored))
    make_folder(run.root / "oof")
    write_whole(run.root / PICTURES, buffer.getvalue())


def _small(stored: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return small pictures of bytes, channels last."""
    import torch

    rows = torch.from_numpy(np.nan_to_num(stored.astype(np.float64)))
    if rows.ndim == 3:
        rows = rows[:, None]
    elif rows.shape[1] not in (1, 3):
        rows = rows.movedim(-1, 1)
    if stored.dtype != np.uint8:
        low, high = rows.min(), rows.max()
        rows = 255 * (rows - low) / ((high - low) or 1)
    if max(rows.shape[2:]) > EDGE:
        sizes = [max(1, size * EDGE // max(rows.shape[2:])) for size in rows.shape[2:]]
        rows = torch.nn.functional.interpolate(rows, sizes, mode="area")
    return rows.round().byte().movedim(1, -1).numpy()
