"""Arrays X and y in an ``.npz`` file: rows of numbers, or images."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.columns import FEATURE, NAMES, TARGET, row_dtype
from asynckfold.data.sources.source import IMAGE, TABLE, Inspection, Samples, Source, TableOptions
from asynckfold.data.sources.tables import (
    chosen_columns,
    judged_table,
    position_problems,
    table_source,
)
from asynckfold.data.sources.text_files import Head, classes_of, numbers_of
from asynckfold.errors import InputError, Problem, nearest, refuse

Array = npt.NDArray[Any]

DARK = 128
"""Images without a number of this size were perhaps not written with 255 as white."""


def inspect_arrays(name: str, path: Path, choice: TableOptions) -> tuple[Inspection, Array]:
    """Return what samples ``X`` and labels ``y`` of an ``.npz`` file are, and the samples.

    ``X`` of shape (n, features) is a table, whose columns `columns` judges. uint8 of shape (n,
    height, width) or (n, height, width, channels), with 1 or 3 channels, is images. Nothing in the
    file is unpickled.
    """
    samples, labels, array_notes = _read(path, ("X", "y"))
    resolve = numbers_of if choice.regression else classes_of
    names, targets, problems, notes = resolve("y", _texts(labels))
    notes[:0] = array_notes
    if samples.ndim == 2:
        import pandas as pd

        head = Head("", tuple(f"column {at}" for at in range(samples.shape[1])), True)
        refuse(position_problems(head, choice))
        chosen = chosen_columns(head, choice, None)
        classes, cells = (names, targets, problems, notes), pd.DataFrame(samples)
        return judged_table(name, "X", head, cells, chosen, classes, {}), samples
    greatest = int(samples.max())
    if greatest == 1:
        rule, remedy = "images in X must be 0 to 255", "Multiply X by 255."
        problems.append(Problem(rule, "0 and 1, of which 255 makes 0 and 0.0039", remedy))
    elif 0 < greatest < DARK:
        notes.append(
            f"the greatest number in X is {greatest}, and 255 is white: if {greatest} is, "
            f"multiply X by 255 / {greatest}"
        )
    problems += [
        Problem(f"{flag} applies to tables only", "it with images", "Drop it.")
        for flag, words in choice.columns
        if words
    ]
    shape, count = _image_shape(samples), len(samples)
    images = Inspection(name, IMAGE, count, shape, names, targets, tuple(notes), tuple(problems))
    return images, samples


def npz_source(name: str, path: Path, choice: TableOptions) -> Source:
    """Return samples and labels of an ``.npz`` file as a source."""
    inspection, samples = inspect_arrays(name, path, choice)
    if inspection.kind == TABLE:
        return table_source(inspection)
    refuse(inspection.problems)
    names, targets = inspection.class_names, inspection.targets
    dataset = _image_arrays(samples, targets, names)
    return Source(name, dataset, names, inspection.sample_shape, IMAGE, notes=inspection.notes)


def npz_samples(path: Path, like: Source | None = None) -> Samples:
    """Return the samples ``X`` of an ``.npz`` file, with ``y`` if it is there.

    Columns that were left out in `like` are left out here, too.
    """
    from asynckfold.data.sources.datasets import TableRows

    samples, labels, notes = _read(path, ("X",))
    nothing = np.zeros(len(samples), np.int64)
    if samples.ndim == 2:
        # Where a run was defined by code, what its models take is unknown but for what most take.
        dtype = row_dtype(like.columns) if like and like.columns else np.float32
        rows = np.ascontiguousarray(samples[:, _used(samples, like)], dtype)
        if len(bad := np.flatnonzero(~np.isfinite(rows).all(axis=1))):
            received = f"{len(bad)} rows that do not, first row {bad[0] + 1}"
            rule, remedy = "X must hold finite numbers that fit float32", "Fill or drop these."
            raise InputError.one(rule, received, remedy)
        dataset: Any = TableRows(rows, nothing, ())
    else:
        dataset = _image_arrays(samples, nothing)
    return Samples(dataset, None if labels is None else tuple(_texts(labels)), notes=tuple(notes))


def _used(samples: Array, like: Source | None) -> list[int]:
    """Return the columns of X that the models were trained on."""
    known = [column for column in (like.columns if like else ()) if column.role != TARGET]
    if samples.shape[1] != len(known) or any(column.dtype == NAMES for column in known):
        return list(range(samples.shape[1]))
    return [at for at, column in enumerate(known) if column.role == FEATURE]


def _texts(labels: Array) -> list[str]:
    """Return labels as text, whole numbers without a fraction."""
    if labels.dtype.kind == "f" and (labels == np.rint(labels)).all():
        labels = labels.astype(np.int64)
    return [str(label) for label in labels.tolist()]


def _read(path: Path, needed: Sequence[str]) -> tuple[Array, Any, list[str]]:
    """Return X, y or None, and notes; raise `InputError` with all problems."""
    rule, remedy = f"{path} must be an .npz file", "Write it with numpy.savez(path, X=..., y=...)."
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                raise ValueError("a single array, not an .npz file")
            names = content.files
            arrays = {name: content[name] for name in ("X", "y") if name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        received = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError.one(f"{rule} of plain arrays", received, remedy) from error
    received = ", ".join(names) or "no array"
    refuse(
        Problem(f"{rule} with an array {name}", received, remedy + nearest(name.swapcase(), names))
        for name in needed
        if name not in names
    )
    samples, labels = arrays["X"], arrays.get("y")
    refuse([*_label_problems(labels, len(samples) if samples.ndim else 0), *_problems(samples)])
    others = [name for name in names if name not in ("X", "y")]
    notes = [f"only X and y are read, not {', '.join(others)}"] if others else []
    if samples.ndim > 2:
        channels, height, width = _image_shape(samples)
        kind = "grey" if channels == 1 else "RGB"
        notes.append(f"X is read as {kind} images of {height}×{width}")
    return samples, labels, notes


def _image_shape(samples: Array) -> tuple[int, int, int]:
    """Return (channels, height, width)."""
    height, width, *channels = samples.shape[1:]
    return (channels[0] if channels else 1, height, width)


def _label_problems(labels: Array | None, count: int) -> Iterator[Problem]:
    if labels is None:
        return
    if labels.ndim != 1 or len(labels) != count or not count:
        received = f"shape {labels.shape}, and {count} samples in X"
        yield Problem("y must be one label per sample", received, "Pass shape (n,).")
    elif labels.dtype.kind not in "biufU":
        yield Problem("y must hold class labels", f"dtype {labels.dtype}", "Use numbers or texts.")
    elif labels.dtype.kind == "f" and len(bad := np.flatnonzero(~np.isfinite(labels))):
        received = f"{len(bad)} that are NaN or infinite, first in row {bad[0]}"
        yield Problem("y must have no missing labels", received, "Drop these rows.")


def _problems(samples: Array) -> Iterator[Problem]:
    if samples.dtype.kind not in "biuf":
        yield Problem("X must hold numbers", f"dtype {samples.dtype}", "Encode them first.")
    elif samples.ndim != 2 and (
        samples.dtype != np.uint8
        or samples.ndim not in (3, 4)
        or 0 in samples.shape
        or (samples.ndim == 4 and samples.shape[3] not in (1, 3))
    ):
        yield Problem(
            "X must be a table (n, features), or images of uint8, 0 to 255: (n, height, width), or "
            "(n, height, width, channels) with 1 or 3 channels in the last axis",
            f"{samples.dtype} of shape {samples.shape}",
            "X.transpose(0, 2, 3, 1) moves channels from the second axis to the last.",
        )


def _image_arrays(samples: Array, targets: Array, classes: Sequence[str] = ()) -> Any:
    from asynckfold.data.sources.datasets import ImageArrays

    if samples.ndim == 4 and samples.shape[3] == 1:
        samples = samples[..., 0]
    return ImageArrays(np.ascontiguousarray(samples), targets, classes=classes)
