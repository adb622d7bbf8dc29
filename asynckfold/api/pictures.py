"""Keep small pictures of the samples that most candidates got wrong, for the report."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.argument import one_line
from asynckfold.store import RunReader, RunStore
from asynckfold.system.files import make_folders, write_whole

if TYPE_CHECKING:
    from asynckfold.data.prepare import Prepared

EDGE = 32
"""Pixels of the longer edge: two dozen of them take some 100 KB of the page."""


def keep_pictures(run: RunStore, data: Prepared) -> None:
    """Write ``oof/pictures.npz`` if samples are pictures that are held in memory.

    The report is drawn from the run's folder alone, and the data are not in it.
    """
    try:
        _keep(run.reader, data)
    except Exception as error:  # noqa: BLE001
        # Hours of training must not be lost for a picture.
        run.event("report", f"there are no pictures of samples: {one_line(error)}")


def _keep(run: RunReader, data: Prepared) -> None:
    if not _is_picture(data.sample_shape):
        return
    from asynckfold.results.cv_results import read_results
    from asynckfold.results.report.predictions import hard_samples
    from asynckfold.results.report.summary import PICTURES

    hard = hard_samples(read_results(run), run.splits()[1])
    rows = [item.index for item in hard.samples] if hard else []
    stored = data.stored(rows) if rows else None
    pictures = None if stored is None else _channels_last(stored)
    if pictures is None:
        return
    buffer = io.BytesIO()
    np.savez_compressed(buffer, samples=np.array(rows), pictures=_small(pictures))
    make_folders(run.root, run.root / "oof")
    write_whole(run.root / PICTURES, buffer.getvalue(), run.root)


def _is_picture(shape: Sequence[int]) -> bool:
    """Whether samples are grey or coloured pictures, channels first."""
    return len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= 8


def _channels_last(stored: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return pictures (n, height, width, channels); None of samples that are stored as others."""
    if stored.ndim == 3:
        return stored[..., None]
    if stored.ndim != 4:
        return None
    return np.moveaxis(stored, 1, -1) if stored.shape[1] in (1, 3) else stored


def _small(stored: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return pictures of bytes."""
    from PIL import Image

    known = np.nan_to_num(stored.astype(np.float64))
    if stored.dtype != np.uint8:
        low, high = known.min(), known.max()
        known = 255 * (known - low) / ((high - low) or 1)
    pictures = []
    for picture in known.round().astype(np.uint8):
        image = Image.fromarray(picture.squeeze(-1) if picture.shape[-1] == 1 else picture)
        image.thumbnail((EDGE, EDGE))
        pixels = np.asarray(image)
        pictures.append(pixels.reshape(*pixels.shape[:2], -1))
    return np.stack(pictures)
