"""Named data for the shell: a word or a path becomes labelled samples.

========================================== =================================================
``digits``                                 scikit-learn's, 1,797 images of 8×8, no download
``mnist fashion-mnist kmnist cifar10``     torchvision's training parts
``folder:PATH``                            images, one folder per class
``csv:PATH``                               a table with one column of class labels, or numbers
``npz:PATH``                               arrays ``X`` and ``y``
========================================== =================================================

torch, torchvision, scikit-learn and pandas are imported when data is loaded, not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asynckfold.data.sources.arrays import inspect_arrays, npz_samples, npz_source
from asynckfold.data.sources.columns import FOLDS, GROUPS, matrix
from asynckfold.data.sources.images import (
    TORCHVISION,
    digits,
    folder_samples,
    folder_source,
    image_transform,
    inspect_folder,
    torchvision_source,
)
from asynckfold.data.sources.source import (
    TABLE,
    Inspection,
    Samples,
    Source,
    TableOptions,
    balanced_subset,
    limited,
)
from asynckfold.data.sources.tables import (
    column_words,
    csv_samples,
    read_frame,
    read_table,
    table_source,
)
from asynckfold.data.sources.text_files import HEADER_CHOICES
from asynckfold.errors import InputError, Problem, nearest, refuse

__all__ = [
    "Inspection",
    "SOURCES",
    "Samples",
    "Source",
    "TableOptions",
    "balanced_subset",
    "column_words",
    "image_transform",
    "inspect",
    "load_frame",
    "load_samples",
    "load_source",
]

_AS_FOUND = TableOptions()
_PATHS = ("csv", "folder", "npz")

SOURCES: tuple[str, ...] = tuple(
    sorted(("digits", *TORCHVISION, *(f"{word}:PATH" for word in _PATHS)))
)
"""What `load_source` takes."""


def load_source(
    spec: str,
    *,
    data_root: Path = Path("data"),
    download: bool = False,
    target: str | None = None,
    header: str = "auto",
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    category: Sequence[str] = (),
    groups: Sequence[str] = (),
    fold_column: Sequence[str] = (),
    regression: bool = False,
    limit: int | None = None,
    random_state: int = 0,
) -> Source:
    """Load data by its name.

    Parameters
    ----------
    spec : str
        One of `SOURCES`.
    data_root : Path
        Folder of torchvision's collections.
    download : bool
        Whether torchvision may fetch what is not in `data_root`.
    target : str, optional
        For ``csv:`` only: column of the class labels, by name or position; the last by default.
    header : {"auto", "yes", "no"}
        For ``csv:`` only: whether the first row names the columns.
    drop, keep, category : sequence of str
        For tables only: columns, by name or position, to leave out; to use though they seem to
        count the samples; that hold names, even where these are numbers.
    groups, fold_column : sequence of str
        For tables only: the column of which no value is divided between folds; and the one of which
        each value is a fold. At most one each.
    regression : bool
        For ``csv:`` and ``npz:`` only: targets are numbers, not classes.
    limit : int, optional
        Use only so many samples, classes balanced.
    random_state : int
        Seed of that choice.

    Returns
    -------
    Source
        Samples as they are: nothing resized, scaled or augmented.

    Raises
    ------
    InputError
        There is no such source, an option does not apply to it, or its data cannot be used.

    Examples
    --------
    >>> source = load_source("digits", limit=100)
    >>> source.sample_shape, len(source.dataset), source.classes[:3]
    ((1, 8, 8), 100, ('0', '1', '2'))
    """
    columns = map(tuple, (drop, keep, category, groups, fold_column))
    choice = TableOptions(target, header, *columns, regression=regression)
    word, place = _checked(spec, data_root, choice, limit)
    source = _load(spec, word, place, download, choice)
    return source if limit is None else limited(source, limit, random_state)


def load_frame(spec: str, *, regression: bool = False) -> tuple[Any, Any, list[str]]:
    """Return a ``csv:`` as features in a DataFrame, targets, and notes, see `read_frame`."""
    choice = TableOptions(regression=regression)
    return read_frame(_checked(spec, Path(), choice, None)[1], choice)


def load_samples(
    spec: str,
    like: Source | None = None,
    *,
    data_root: Path = Path("data"),
    download: bool = False,
    target: str | None = None,
    header: str = "auto",
) -> Samples:
    """Load samples whose labels may be missing: ``y``, a column, or folders of classes.

    Arguments as for `load_source`. `like`: the source that the models were trained on; a text file
    must have its columns, and its target column is the default for `target`.
    """
    choice = TableOptions(target, header)
    word, place = _checked(spec, data_root, choice, None)
    if word == "csv":
        return csv_samples(place, like, target=target, header=header)
    if word in _PATHS:
        return npz_samples(place, like) if word == "npz" else folder_samples(place)
    source = _load(spec, word, place, download, choice)
    labels = tuple(source.classes[index] for index in source.targets)
    return Samples(source.dataset, labels, notes=source.notes)


def inspect(
    spec: str,
    *,
    data_root: Path = Path("data"),
    download: bool = False,
    choice: TableOptions = _AS_FOUND,
    limit: int | None = None,
    random_state: int = 0,
) -> Inspection:
    """Describe what a run would read: columns, classes, what is left out, and all problems.

    Raises `InputError` only where the source cannot be read at all.

    >>> inspection = inspect("digits")
    >>> inspection.samples, inspection.sample_shape, inspection.classes["0"], inspection.repeated
    (1797, (1, 8, 8), 178, 0)
    """
    word, place = _checked(spec, data_root, choice, limit)
    samples: Any = ()
    if word == "folder":
        inspection = inspect_folder(spec, place)
    elif word == "csv":
        inspection = read_table(spec, place, choice)
    elif word == "npz":
        inspection, samples = inspect_arrays(spec, place, choice)
    else:
        source = _load(spec, word, place, download, choice)
        samples = source.dataset.data  # type: ignore[attr-defined]
        shape, classes = source.sample_shape, source.classes
        facts = len(samples), shape, classes, source.targets, source.notes
        inspection = Inspection(spec, source.kind, *facts)
    if inspection.kind == TABLE:
        samples = () if inspection.problems else matrix(inspection.columns)
    if len(samples):
        inspection = inspection.with_repeats(np.asarray(sample).tobytes() for sample in samples)
    return inspection if limit is None else inspection.limited(limit, random_state)


def _checked(
    spec: str, data_root: Path, choice: TableOptions, limit: int | None
) -> tuple[str, Path]:
    """Return the kind of a source and where its data is."""
    word, colon, path = spec.partition(":")
    refuse([*_spec_problems(spec), *_option_problems(word, choice, limit)])
    place = Path(path if colon else data_root).expanduser()
    if colon and not place.exists():
        siblings = [item.name for item in place.parent.iterdir()] if place.parent.is_dir() else []
        remedy = f"Check the path.{nearest(place.name, siblings)}"
        raise InputError.one(f"{word}: must name an existing path", str(place), remedy)
    return word, place


def _load(spec: str, word: str, place: Path, download: bool, choice: TableOptions) -> Source:
    if word == "digits":
        return digits()
    if word == "folder":
        return folder_source(spec, place)
    if word == "npz":
        return npz_source(spec, place, choice)
    if word == "csv":
        return table_source(read_table(spec, place, choice))
    return torchvision_source(word, place, download)


def _spec_problems(spec: str) -> Iterator[Problem]:
    word, colon, path = spec.partition(":")
    if word in _PATHS and not path:
        yield Problem(f"{word} needs a path", repr(spec), f"Pass {word}:PATH.")
    elif word not in _PATHS and (colon or word not in SOURCES):
        kinds = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".npz": "npz"}
        kind = "folder" if Path(spec).is_dir() else kinds.get(Path(spec).suffix.lower())
        remedy = f" Did you mean '{kind}:{spec}'?" if kind else nearest(spec, SOURCES)
        known = f"Known: {', '.join(SOURCES)}.{remedy}"
        yield Problem("data must be a known source", repr(spec), known)


def _option_problems(word: str, choice: TableOptions, limit: int | None) -> Iterator[Problem]:
    if choice.header not in HEADER_CHOICES:
        yield Problem("header must be auto, yes or no", repr(choice.header), "The default is auto.")
    header = choice.header if choice.header != "auto" else None
    if choice.regression and word not in ("csv", "npz"):
        rule = "--task regression applies to csv: and npz: only"
        yield Problem(rule, word, "Drop it.")
    flags = [("--target", choice.target, "csv:"), ("--header", header, "csv:")]
    for flag, columns in choice.columns:
        flags.append((flag, ",".join(columns) or None, "csv: and npz:"))
        if len(columns) > 1 and flag in (GROUPS, FOLDS):
            yield Problem(f"{flag} must be one column", ", ".join(columns), "Name one.")
    for flag, value, words in flags:
        if value is not None and f"{word}:" not in words:
            yield Problem(
                f"{flag} applies to {words} only", f"{flag} {value} with {word}", "Drop it."
            )
    if limit is not None and limit < 1:
        yield Problem("limit must be at least 1", str(limit), "Leave it out to use all samples.")
