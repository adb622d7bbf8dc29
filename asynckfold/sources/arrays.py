"""Arrays X and y in an ``.npz`` file: rows of numbers, or images."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.sources.labels import class_indices, label_problems
from asynckfold.sources.source import IMAGE, TABLE, Samples, Source

Array = npt.NDArray[Any]


def npz_source(name: str, path: Path) -> Source:
    """Return the samples ``X`` and labels ``y`` of an ``.npz`` file; nothing in it is unpickled.

    ``X`` of shape (n, features) is a table. Of dtype uint8 and shape (n, height, width),
    (n, height, width, channels) or (n, channels, height, width), with 1 or 3 channels, it is
    images; channels are looked for in the last axis first.

    Raises
    ------
    InputError
        The file is no ``.npz`` file, lacks an array, or the arrays cannot be samples and labels.
    """
    samples, labels = _read(path)
    assert labels is not None
    refuse(_problems(samples, labels))
    classes, targets = class_indices([str(label) for label in _whole(labels).tolist()])
    refuse(label_problems("y", classes, len(targets)))
    if samples.ndim == 2:
        return _table(name, samples, classes, targets)
    return _images(name, samples, classes, targets)


def npz_samples(path: Path) -> Samples:
    """Return the samples ``X`` of an ``.npz`` file as `npz_source` does, with ``y`` if it is there.

    Raises
    ------
    InputError
        As for `npz_source`, but for what it says of classes.
    """
    samples, labels = _read(path, needed=("X",))
    refuse(_problems(samples, labels))
    made = _table if samples.ndim == 2 else _images
    dataset = made(str(path), samples, (), np.zeros(len(samples), np.int64)).dataset
    if labels is None:
        return Samples(dataset)
    return Samples(dataset, tuple(str(label) for label in _whole(labels).tolist()))


def _read(path: Path, needed: Sequence[str] = ("X", "y")) -> tuple[Array, Array | None]:
    try:
        with path.open("rb") as file:
            names, arrays = _wanted(np.load(file, allow_pickle=False))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        problem = Problem(
            f"{path} must be an .npz file of plain arrays",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
            "Write it with numpy.savez(path, X=..., y=...), without arrays of objects.",
        )
        raise InputError([problem]) from error
    refuse(_name_problems(path, names, needed))
    return arrays["X"], arrays.get("y")


def _wanted(content: Any) -> tuple[list[str], dict[str, Array]]:
    if isinstance(content, np.ndarray):
        raise ValueError("a single array, not an .npz file")
    return content.files, {name: content[name] for name in ("X", "y") if name in content.files}


def _name_problems(path: Path, found: list[str], needed: Sequence[str]) -> Iterator[Problem]:
    for wanted in needed:
        if wanted not in found:
            swapped = nearest(wanted.swapcase(), found)
            yield Problem(
                f"{path} must hold an array {wanted}",
                ", ".join(found) or "no array",
                f"Write it with numpy.savez(path, X=..., y=...).{swapped}",
            )


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
            "Pass (n, features), (n, height, width), or that with 1 or 3 channels.",
        )
        return
    if samples.dtype != np.uint8:
        yield Problem(
            "images in X must be uint8, 0 to 255",
            f"dtype {samples.dtype}",
            "Convert them, or reshape X to (n, features) to use it as a table.",
        )
    if samples.ndim == 4 and not {samples.shape[1], samples.shape[3]} & {1, 3}:
        yield Problem(
            "images in X must have 1 or 3 channels",
            f"shape {samples.shape}",
            "Put the channels into the last or the second axis.",
        )


def _whole(labels: Array) -> Array:
    if labels.dtype.kind == "f" and (labels == np.rint(labels)).all():
        return labels.astype(np.int64)
    return labels


def _table(
    name: str, samples: Array, classes: tuple[str, ...], targets: npt.NDArray[np.int64]
) -> Source:
    from asynckfold.sources.datasets import TableRows

    rows = np.ascontiguousarray(samples, dtype=np.float32)
    return Source(
        name,
        TableRows(rows, targets, classes),
        classes,
        (rows.shape[1],),
        TABLE,
        standardize=True,
        features=tuple(f"column {index}" for index in range(rows.shape[1])),
    )


def _images(
    name: str, samples: Array, classes: tuple[str, ...], targets: npt.NDArray[np.int64]
) -> Source:
    from asynckfold.sources.datasets import ImageArrays

    if samples.ndim == 4 and samples.shape[3] not in (1, 3):
        samples = samples.transpose(0, 2, 3, 1)
    if samples.ndim == 4 and samples.shape[3] == 1:
        samples = samples[..., 0]
    channels = 1 if samples.ndim == 3 else 3
    dataset = ImageArrays(np.ascontiguousarray(samples), targets, classes=classes)
    return Source(name, dataset, classes, (channels, *samples.shape[1:3]), IMAGE)
