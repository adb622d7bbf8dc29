"""Arrays X and y in an ``.npz`` file: rows of numbers, or images."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.columns import (
    FEATURE,
    NAMES,
    TARGET,
    column_notes,
    feature_problems,
    judge,
    row_dtype,
)
from asynckfold.data.sources.source import IMAGE, Samples, Source, TableOptions
from asynckfold.data.sources.tables import (
    Table,
    column_choice,
    divided_by,
    position_problems,
    table_source,
)
from asynckfold.data.sources.text_files import Head, class_indices, class_note, label_problems
from asynckfold.errors import InputError, Problem, nearest, refuse

Array = npt.NDArray[Any]

DARK = 128
"""Images without a number of this size were perhaps not written with 255 as white."""


def npz_source(name: str, path: Path, choice: TableOptions) -> Source:
    """Return samples ``X`` and labels ``y`` of an ``.npz`` file; nothing in it is unpickled.

    ``X`` of shape (n, features) is a table, whose columns `columns` judges. uint8 of shape (n,
    height, width) or (n, height, width, channels), with 1 or 3 channels, is images.
    """
    arrays = read_arrays(path)
    refuse(arrays.problems)
    if arrays.samples.ndim == 2:
        return table_source(name, array_table(arrays, choice))
    classes, targets, problems, notes = arrays.classes()
    problems += [
        Problem(f"{flag} applies to tables only", "it with images", "Drop it.")
        for flag, words in choice.columns
        if words
    ]
    refuse(problems)
    return _images(name, arrays.samples, classes, targets, tuple(notes))


def npz_samples(path: Path, like: Source | None = None) -> Samples:
    """Return the samples ``X`` of an ``.npz`` file, with ``y`` if it is there.

    Columns that were left out in `like` are left out here, too.
    """
    from asynckfold.data.sources.datasets import TableRows

    arrays = read_arrays(path, needed=("X",))
    refuse(arrays.problems)
    samples = arrays.samples
    nothing = np.zeros(len(samples), np.int64)
    if samples.ndim == 2:
        # Where a run was defined by code, what its models take is unknown but for what most take.
        dtype = row_dtype(like.columns) if like and like.columns else np.float32
        rows = np.ascontiguousarray(samples[:, _used(samples, like)], dtype)
        dataset: Any = TableRows(rows, nothing, ())
    else:
        dataset = _images(str(path), samples, (), nothing, ()).dataset
    named = None if arrays.labels is None else tuple(arrays.names())
    return Samples(dataset, named, notes=arrays.notes)


def _used(samples: Array, like: Source | None) -> list[int]:
    """Return the columns of X that the models were trained on."""
    known = [column for column in (like.columns if like else ()) if column.role != TARGET]
    if samples.shape[1] != len(known) or any(column.dtype == NAMES for column in known):
        return list(range(samples.shape[1]))
    return [at for at, column in enumerate(known) if column.role == FEATURE]


@dataclass(frozen=True, eq=False)
class Arrays:
    """The arrays of an ``.npz`` file, and every problem."""

    samples: Array
    labels: Array | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    def names(self) -> list[str]:
        """Return the labels as text, whole numbers without a fraction."""
        labels = self.labels
        assert labels is not None
        if labels.dtype.kind == "f" and (labels == np.rint(labels)).all():
            labels = labels.astype(np.int64)
        return [str(label) for label in labels.tolist()]

    def classes(self) -> tuple[tuple[str, ...], npt.NDArray[np.int64], list[Problem], list[str]]:
        """Return class names and indices, with problems and all notes."""
        classes, targets = class_indices(self.names())
        problems = list(label_problems("y", classes, len(targets)))
        notes = [*self.notes, *class_note("y", classes)]
        greatest = 255 if self.samples.ndim == 2 else int(self.samples.max())
        if greatest == 1:
            rule, remedy = "images in X must be 0 to 255", "Multiply X by 255."
            problems.append(Problem(rule, "0 and 1, of which 255 makes 0 and 0.0039", remedy))
        elif 0 < greatest < DARK:
            notes.append(
                f"the greatest number in X is {greatest}, and 255 is white: if {greatest} is, "
                f"multiply X by 255 / {greatest}"
            )
        return classes, targets, problems, notes


def read_arrays(path: Path, needed: Sequence[str] = ("X", "y")) -> Arrays:
    """Read an ``.npz`` file; raise `InputError` where it is none, or lacks an array."""
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                raise ValueError("a single array, not an .npz file")
            names = content.files
            arrays = {name: content[name] for name in ("X", "y") if name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError.one(
            f"{path} must be an .npz file of plain arrays",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
            "Write it with numpy.savez(path, X=..., y=...), without arrays of objects.",
        ) from error
    refuse(
        Problem(
            f"{path} must hold an array {wanted}",
            ", ".join(names) or "no array",
            "Write it with numpy.savez(path, X=..., y=...)." + nearest(wanted.swapcase(), names),
        )
        for wanted in needed
        if wanted not in names
    )
    samples, labels = arrays["X"], arrays.get("y")
    others = [name for name in names if name not in ("X", "y")]
    notes = [f"only X and y are read, not {', '.join(others)}"] if others else []
    problems = tuple(_problems(samples, labels))
    if not problems and samples.ndim > 2:
        channels, height, width = image_shape(samples)
        kind = "grey" if channels == 1 else "RGB"
        notes.append(f"X is read as {kind} images of {height}×{width}")
    return Arrays(samples, labels, problems, tuple(notes))


def image_shape(samples: Array) -> tuple[int, int, int]:
    """Return (channels, height, width)."""
    height, width, *channels = samples.shape[1:]
    return (channels[0] if channels else 1, height, width)


def _problems(samples: Array, labels: Array | None) -> Iterator[Problem]:
    if labels is not None:
        yield from _label_array_problems(labels)
    if samples.dtype.kind not in "biuf":
        yield Problem("X must hold numbers", f"dtype {samples.dtype}", "Encode them first.")
    elif samples.ndim == 2:
        yield from _number_problems(samples)
    else:
        yield from _image_problems(samples)
    if labels is not None and labels.ndim == 1 and samples.ndim and len(samples) != len(labels):
        yield Problem(
            "X and y must have one row per sample",
            f"{len(samples)} rows in X, {len(labels)} in y",
            "Write them from the same samples.",
        )


def _label_array_problems(labels: Array) -> Iterator[Problem]:
    if labels.ndim != 1 or len(labels) == 0:
        yield Problem("y must be one label per sample", f"shape {labels.shape}", "Pass shape (n,).")
    elif labels.dtype.kind not in "biufU":
        yield Problem("y must hold class labels", f"dtype {labels.dtype}", "Use numbers or texts.")
    elif labels.dtype.kind == "f" and not np.isfinite(labels).all():
        bad = np.flatnonzero(~np.isfinite(labels))
        yield Problem(
            "y must have no missing labels",
            f"{len(bad)} that are NaN or infinite, first in row {bad[0]}",
            "Drop these rows.",
        )


def _number_problems(samples: Array) -> Iterator[Problem]:
    if samples.shape[1] == 0:
        yield Problem("X must have a feature", f"shape {samples.shape}", "Pass (n, features).")
    if samples.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        bad = np.argwhere(~np.isfinite(samples.astype(np.float32)))
    if len(bad):
        row, column = bad[0]
        columns = np.unique(bad[:, 1])
        yield Problem(
            "X must hold finite numbers that fit float32",
            f"{len(bad)} that do not, in {len(columns)} columns, first in row {row}, "
            f"column {column}",
            "Fill or drop these cells first.",
        )


def _image_problems(samples: Array) -> Iterator[Problem]:
    if samples.ndim not in (3, 4) or 0 in samples.shape:
        yield Problem(
            "X must be a table or images",
            f"shape {samples.shape}",
            "Pass (n, features), (n, height, width), or (n, height, width, channels).",
        )
        return
    if samples.dtype != np.uint8:
        yield Problem(
            "images in X must be uint8, 0 to 255",
            f"dtype {samples.dtype}",
            "Convert them, or reshape X to (n, features) to use it as a table.",
        )
    if samples.ndim == 4 and samples.shape[3] not in (1, 3):
        yield Problem(
            "images in X must have 1 or 3 channels, in the last axis",
            f"shape {samples.shape}",
            "Move them there: X.transpose(0, 2, 3, 1) for channels in the second axis.",
        )


def array_table(arrays: Arrays, choice: TableOptions) -> Table:
    """Return X and y as a table."""
    import pandas as pd

    samples, count = arrays.samples, arrays.samples.shape[1]
    classes, targets, problems, notes = arrays.classes()
    head = Head("", count, tuple(f"column {at}" for at in range(count)), True)
    refuse(position_problems(head, choice))
    chosen = column_choice(head, choice, None)
    judged = [
        judge(head.names[at], at, pd.Series(cells), chosen, unnamed=False)
        for at, cells in enumerate(np.ascontiguousarray(samples.T))
    ]
    problems += feature_problems("X", judged)
    is_usable = not problems
    frame = pd.DataFrame(samples)
    groups, fold_of = divided_by(head, frame, chosen, targets, problems, notes)
    notes += column_notes(judged, targets if is_usable else None)
    return Table(
        tuple(item.column for item in judged),
        tuple(judged),
        classes,
        targets,
        len(samples),
        tuple(problems),
        tuple(notes),
        groups=groups,
        fold_of=fold_of,
    )


def _images(
    name: str,
    samples: Array,
    classes: tuple[str, ...],
    targets: npt.NDArray[np.int64],
    notes: tuple[str, ...],
) -> Source:
    from asynckfold.data.sources.datasets import ImageArrays

    if samples.ndim == 4 and samples.shape[3] == 1:
        samples = samples[..., 0]
    dataset = ImageArrays(np.ascontiguousarray(samples), targets, classes=classes)
    return Source(name, dataset, classes, image_shape(samples), IMAGE, notes=notes)
