"""Tables: a text file with commas, semicolons or tabs becomes rows of numbers and classes.

::

    head ──► delimiter, header ──► pandas ──► target column ──► class names, class indices
                                        └───► features: numbers as they are, names one-hot encoded

Nothing is scaled here, and nothing is filled in: standardising belongs to each training fold, and a
missing value is the caller's to judge.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.sources.labels import class_indices, label_problems, number
from asynckfold.sources.source import TABLE, Samples, Source

HEADER_CHOICES = ("auto", "yes", "no")
MAX_CATEGORIES = 50

# Comma last: it also stands in decimal numbers and in texts.
_DELIMITERS = ("\t", ";", ",")
_HEAD_LINES = 200
_MISSING = ("", "?", "NA", "N/A", "NaN", "null", "na", "n/a", "nan", "NAN", "Null", "NULL")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_COUNTER_NAMES = frozenset({"", "id", "index", "row", "unnamed: 0"})
_NAMED_COLUMNS = 5


@dataclass(frozen=True)
class _Head:
    """What the first lines tell about a file."""

    delimiter: str
    n_columns: int
    names: tuple[str, ...]
    has_header: bool

    def name(self, position: int) -> str:
        return (self.names[position] if self.names else "") or f"column {position}"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(map(self.name, range(self.n_columns)))

    def label(self, position: int) -> str:
        named = self.names[position] if self.names else ""
        return f"column {named!r}" if named else f"column {position}"


@dataclass(frozen=True)
class _Feature:
    """One column, encoded; or the rule that it breaks, and how."""

    names: tuple[str, ...] = ()
    values: npt.NDArray[np.float32] | None = None
    fault: str = ""
    detail: str = ""
    one_hot: bool = False


_REMEDIES = {
    "features must have no missing values": (
        "Fill these cells or drop the rows first. Rows count from 1, without the header."
    ),
    "features must be finite and fit float32": "Replace these cells or rescale the column first.",
    "a column must hold numbers or names, not both": (
        "Correct the cells; if the first row is the header, pass --header yes."
    ),
    "numbers must have a decimal point": "Replace the decimal commas first.",
    f"a column of names must have at most {MAX_CATEGORIES} different ones": (
        "Drop the column, group its values, or turn it into numbers."
    ),
    "a column must hold numbers, or those names, that the models were trained on": (
        "Correct these cells or drop the rows first. Rows count from 1, without the header."
    ),
}
_MISSING_RULE, _FINITE_RULE, _MIXED_RULE, _COMMA_RULE, _CATEGORIES_RULE, _OTHER_RULE = _REMEDIES


def csv_source(name: str, path: Path, *, target: str | None = None, header: str = "auto") -> Source:
    """Return the rows of a text file as samples and one of its columns as classes.

    The delimiter is the first of tab, semicolon and comma that divides each of the first lines into
    equally many columns. Empty cells, ``?``, ``NA``, ``N/A``, ``NaN`` and ``null`` are missing
    values. Columns of numbers, and of True and False, become one float32 feature each; columns of
    names become one feature per name, 0 or 1. A column that is called ``id``, ``index``, ``row`` or
    nothing at all and only counts the rows is left out, and the notes say so: in a file sorted by
    class it would give the classes away.

    Parameters
    ----------
    name : str
        What to call the source.
    path : Path
        The file, in UTF-8.
    target : str, optional
        Column of the class labels, by name or by position from 0, negative from the end; a name
        goes before a position. The last column by default.
    header : {"auto", "yes", "no"}
        Whether the first row names the columns. ``"auto"``: it does when, in those columns that
        hold only numbers below it, it holds no number and at least one text. When no column holds
        only numbers: when its cells are all different texts and none occurs below in its column.

    Raises
    ------
    InputError
        Naming all columns that cannot be features, or what else is wrong with the file.
    """
    head = _read_head(path, header)
    position = _target_position(head, target)
    cells = _read_cells(path, head, [position])
    labels = cells[position]
    problems = [*_no_rows(path, cells), *_label_problems(labels, head.label(position))]
    classes, targets = class_indices([str(text).strip() for text in labels.dropna()])
    if not problems:
        problems += label_problems(head.label(position), classes, len(targets))
    features, dropped = _features(cells, head, position)
    refuse([*problems, *_feature_problems(path, features, dropped)])
    found = _source(name, features, (*_notes(head, position), *dropped), classes, targets)
    return replace(found, columns=head.columns, target=head.name(position))


def csv_samples(
    path: Path, like: Source | None, *, target: str | None = None, header: str = "auto"
) -> Samples:
    """Return the rows of a text file as samples, encoded as those of another one were.

    Columns are found by their names, or by their order where one of the files has none; those that
    the other one has not are left out, and the notes say so. The classes may be missing.

    Parameters
    ----------
    path : Path
        The file.
    like : Source or None
        The other one; where it is no text file, all columns but `target` are taken as they are.
    target : str, optional
        Column of the class labels; that of the other file by default, where this one has it.
    header : {"auto", "yes", "no"}
        Whether the first row names the columns. ``"auto"``: it does when it names one of the other
        file's, or as for `csv_source` where there is none.

    Raises
    ------
    InputError
        Naming all columns that are missing or hold something else, or what else is wrong.
    """
    like = like if like and like.columns else None
    head = _read_head(path, header, like.columns if like else (), least=1)
    position = None if target is None else _target_position(head, target)
    if like:
        head, position = _as_columns(path, head, like, position)
    texts = {name for name, names in _categories(like).items() if names} if like else set()
    text_columns = [at for at, name in enumerate(head.columns) if name in texts or at == position]
    cells = _read_cells(path, head, text_columns)
    if like:
        refuse([*_no_rows(path, cells), *_missing_columns(path, head, like)])
        features, notes = _features_like(cells, head, like), _left_out(head, like, position)
    else:
        features, notes = _features(cells, head, position)
    refuse([*_no_rows(path, cells), *_feature_problems(path, features, notes)])
    labels = None if position is None or cells[position].isna().any() else cells[position]
    from asynckfold.sources.datasets import TableRows

    rows = _matrix(features)
    dataset = TableRows(rows, np.zeros(len(rows), np.int64), ())
    named = None if labels is None else tuple(labels.str.strip())
    return Samples(dataset, named, notes=tuple(notes))


# The head of the file


def _read_head(path: Path, header: str, known: Sequence[str] = (), least: int = 2) -> _Head:
    try:
        rows, delimiter = _divided(_first_lines(path))
    except csv.Error as error:
        raise InputError([_ragged(path, str(error))]) from error
    refuse(_head_problems(path, rows, least))
    found = header == "yes"
    if header == "auto":
        shared = set(known).intersection(cell.strip() for cell in rows[0])
        found = bool(shared) if known else has_header(rows)
    names = tuple(cell.strip() for cell in rows[0]) if found else ()
    return _Head(delimiter, len(rows[0]), names, found)


def _first_lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return [line for line in islice(file, _HEAD_LINES) if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError([_not_text(path, error)]) from error
    except OSError as error:
        raise InputError([_unreadable(path, error)]) from error


def _not_text(path: Path, error: UnicodeDecodeError) -> Problem:
    return Problem(
        f"{path} must be a text file in UTF-8",
        f"byte 0x{error.object[error.start]:02x} at position {error.start}",
        "Convert it, for example with iconv.",
    )


def _unreadable(path: Path, error: OSError) -> Problem:
    return Problem("csv: must name a readable file", f"{path} ({error.strerror})", "Check it.")


def _divided(lines: Sequence[str]) -> tuple[list[list[str]], str]:
    divided = {delimiter: _rows(lines, delimiter) for delimiter in _DELIMITERS}
    for delimiter, rows in divided.items():
        widths = {len(row) for row in rows}
        if len(widths) == 1 and widths != {1}:
            return rows, delimiter
    widest = max(_DELIMITERS, key=lambda delimiter: max(map(len, divided[delimiter]), default=0))
    return divided[widest], widest


def _rows(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    rows = [row for row in csv.reader(lines, delimiter=delimiter, skipinitialspace=True) if row]
    # The last of many lines may end inside quotes.
    return rows[:-1] if len(lines) == _HEAD_LINES else rows


def _head_problems(path: Path, rows: Sequence[Sequence[str]], least: int) -> Iterator[Problem]:
    if not rows:
        yield Problem(f"{path} must hold rows", "an empty file", "Check the path.")
    elif len(rows[0]) < least:
        yield Problem(
            f"{path} must hold two columns or more",
            f"one column, such as {rows[0][0][:40]!r}",
            "Separate features and class label by commas, semicolons or tabs.",
        )
    else:
        yield from _wider_rows(path, rows)


def _wider_rows(path: Path, rows: Sequence[Sequence[str]]) -> Iterator[Problem]:
    for index, row in enumerate(rows):
        if len(row) > len(rows[0]):
            yield _ragged(path, f"{len(rows[0])} in the first, {len(row)} in row {index + 1}")
            return


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Tell whether the first row names the columns; the rule is in `csv_source`.

    Examples
    --------
    >>> has_header([["width", "kind"], ["1.5", "a"]]), has_header([["2.5", "b"], ["1.5", "a"]])
    (True, False)
    """
    first, below = [cell.strip() for cell in rows[0]], rows[1:]
    columns = [
        [row[index].strip() for row in below if index < len(row)] for index in range(len(first))
    ]
    numeric = [cell for cell, column in zip(first, columns, strict=True) if _all_numbers(column)]
    if numeric:
        return not any(map(_is_number, numeric)) and any(cell not in _MISSING for cell in numeric)
    if any(map(_is_number, first)):
        return False
    apart = all(cell not in column for cell, column in zip(first, columns, strict=True))
    return bool(below) and apart and "" not in first and len(set(first)) == len(first)


def _all_numbers(cells: Sequence[str]) -> bool:
    present = [cell for cell in cells if cell not in _MISSING]
    return bool(present) and all(map(_is_number, present))


def _is_number(cell: str) -> bool:
    return number(cell) is not None


# The target column


def _target_position(head: _Head, target: str | None) -> int:
    if target is None:
        return head.n_columns - 1
    refuse(_target_problems(head, target))
    if target in head.names:
        return head.names.index(target)
    return int(target) % head.n_columns


def _target_problems(head: _Head, target: str) -> Iterator[Problem]:
    last = head.n_columns - 1
    if head.names.count(target) > 1:
        yield Problem(
            "--target must name one column",
            f"{target!r}, which {head.names.count(target)} columns are called",
            f"Pass a position from 0 to {last}.",
        )
    elif target not in head.names and not _is_position(target, head.n_columns):
        if head.has_header:
            remedy = f"Columns: {', '.join(head.names)}.{nearest(target, head.names)}"
        else:
            remedy = f"The file has no header: pass a position from 0 to {last}, or --header yes."
        yield Problem("--target must be a column of the file", repr(target), remedy)


def _is_position(text: str, n_columns: int) -> bool:
    return re.fullmatch(r"-?\d+", text) is not None and -n_columns <= int(text) < n_columns


def _no_rows(path: Path, cells: Any) -> Iterator[Problem]:
    if len(cells) == 0:
        yield Problem(
            f"{path} must hold rows", "a header only", "If that is a row, pass --header no."
        )


def _label_problems(labels: Any, label: str) -> Iterator[Problem]:
    missing = np.flatnonzero(labels.isna())
    if len(missing):
        yield Problem(
            f"target {label} must have no missing labels",
            f"{len(missing)} missing, first in row {missing[0] + 1}",
            "Drop these rows first. Rows count from 1, without the header.",
        )


# The cells


def _read_cells(path: Path, head: _Head, texts: Sequence[int]) -> Any:
    import pandas as pd

    try:
        return pd.read_csv(
            path,
            sep=head.delimiter,
            header=0 if head.has_header else None,
            names=list(range(head.n_columns)),
            index_col=False,
            dtype=dict.fromkeys(texts, str),
            na_values=list(_MISSING),
            keep_default_na=False,
            skipinitialspace=True,
            low_memory=False,
            encoding="utf-8-sig",
        )
    except UnicodeDecodeError as error:
        raise InputError([_not_text(path, error)]) from error
    except (pd.errors.ParserError, csv.Error) as error:
        raise InputError([_ragged(path, str(error))]) from error


def _ragged(path: Path, found: str) -> Problem:
    return Problem(
        f"every row of {path} must have the columns of the first",
        found.strip().removeprefix("Error tokenizing data. C error: "),
        "Correct that line; a cell that holds the delimiter or a quote needs quotes around it.",
    )


# The features


def _features(cells: Any, head: _Head, target: int | None) -> tuple[list[_Feature], list[str]]:
    features, dropped = [], []
    for position in range(head.n_columns):
        if position == target:
            continue
        if _counts_rows(head, position, cells[position]):
            dropped.append(f"{head.label(position)} only counts the rows and is left out")
        else:
            features.append(_encoded(head.name(position), cells[position]))
    return features, dropped


def _counts_rows(head: _Head, position: int, column: Any) -> bool:
    if not head.has_header or head.names[position].lower() not in _COUNTER_NAMES:
        return False
    if column.dtype.kind not in "iu" or len(column) == 0:
        return False
    values = column.to_numpy()
    return values[0] in (0, 1) and bool((np.diff(values) == 1).all())


def _encoded(name: str, column: Any) -> _Feature:
    missing = np.flatnonzero(column.isna())
    if len(missing):
        return _fault(_MISSING_RULE, name, len(missing), missing[0])
    if column.dtype.kind in "iufb":
        return _numbers(name, column.to_numpy(np.float64))
    return _texts(name, column.astype(str).str.strip())


def _fault(rule: str, name: str, count: int, first: int, cell: str = "") -> _Feature:
    plural = "cells" if count > 1 else "cell"
    shown = f", {cell!r}" if cell else ""
    detail = f"{name} ({count} {plural}, first in row {first + 1}{shown})"
    return _Feature(fault=rule, detail=detail)


def _numbers(name: str, values: npt.NDArray[np.float64]) -> _Feature:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(narrow))
    if len(bad):
        return _fault(_FINITE_RULE, name, len(bad), bad[0], str(values[bad[0]]))
    return _Feature((name,), narrow[:, None])


def _texts(name: str, column: Any) -> _Feature:
    texts = column.to_numpy(object)
    numeric = {text: _is_number(text) for text in dict.fromkeys(texts)}
    others = np.flatnonzero([not numeric[text] for text in texts])
    if len(others) == 0:
        return _numbers(name, texts.astype(np.float64))
    if len(others) < len(texts) / 2:
        return _fault(_MIXED_RULE, name, len(others), others[0], texts[others[0]])
    if all(_DECIMAL_COMMA.fullmatch(texts[index]) for index in others):
        return _fault(_COMMA_RULE, name, len(others), others[0], texts[others[0]])
    return _one_hot(name, texts, sorted(numeric))


def _one_hot(name: str, texts: npt.NDArray[np.object_], categories: Sequence[str]) -> _Feature:
    if len(categories) > MAX_CATEGORIES:
        return _Feature(fault=_CATEGORIES_RULE, detail=f"{name} ({len(categories)})")
    values = (texts[:, None] == np.array(categories, object)[None, :]).astype(np.float32)
    names = tuple(f"{name}={category}" for category in categories)
    return _Feature(names, values, one_hot=True)


def _feature_problems(
    path: Path, features: Sequence[_Feature], dropped: Sequence[str]
) -> Iterator[Problem]:
    if not features:
        yield Problem(
            f"{path} must hold a feature beside the target",
            "; ".join(dropped),
            "Rename the column if it is a feature.",
        )
    for rule, remedy in _REMEDIES.items():
        found = [feature.detail for feature in features if feature.fault == rule]
        more = f" and {len(found) - _NAMED_COLUMNS} more" if len(found) > _NAMED_COLUMNS else ""
        if found:
            yield Problem(rule, ", ".join(found[:_NAMED_COLUMNS]) + more, remedy)


def _notes(head: _Head, target: int) -> tuple[str, ...]:
    header = "the first row is the header" if head.has_header else "no header"
    return (f"{header}; the class is {head.label(target)}",)


def _source(
    name: str,
    features: Sequence[_Feature],
    notes: Sequence[str],
    classes: tuple[str, ...],
    targets: npt.NDArray[np.int64],
) -> Source:
    from asynckfold.sources.datasets import TableRows

    rows = _matrix(features)
    encoded = sum(feature.one_hot for feature in features)
    columns = "column" if encoded == 1 else "columns"
    more = (f"{encoded} {columns} of names one-hot encoded",) if encoded else ()
    return Source(
        name,
        TableRows(rows, targets, classes),
        classes,
        (rows.shape[1],),
        TABLE,
        standardize=True,
        features=tuple(item for feature in features for item in feature.names),
        notes=(*notes, *more),
    )


def _matrix(features: Sequence[_Feature]) -> npt.NDArray[np.float32]:
    found = [feature.values for feature in features if feature.values is not None]
    return np.ascontiguousarray(np.hstack(found))


# Another file with the same columns


def _as_columns(
    path: Path, head: _Head, like: Source, position: int | None
) -> tuple[_Head, int | None]:
    """Return the head with the names of the other file's columns, and where the classes are."""
    named = like.columns != tuple(f"column {at}" for at in range(len(like.columns)))
    if named and head.names:
        at = head.columns.index(like.target) if like.target in head.columns else None
        return head, at if position is None else position
    if position is None and head.n_columns == len(like.columns):
        position = like.columns.index(like.target)
    here = [at for at in range(head.n_columns) if at != position]
    there = [name for name in like.columns if name != like.target]
    if len(here) != len(there):
        rule = f"{path} must have the {len(there)} columns of {like.name}, or their names"
        refuse([Problem(rule, str(len(here)), f"They are: {', '.join(there)}.")])
    names = dict(zip(here, there, strict=True))
    given = tuple(names.get(at, like.target) for at in range(head.n_columns))
    return replace(head, names=given), position


def _categories(like: Source) -> dict[str, list[str]]:
    """Return the columns that were encoded, and the names that each of them held."""
    found = {}
    for name in like.columns:
        start = f"{name}="
        names = [item[len(start) :] for item in like.features if item.startswith(start)]
        if name != like.target and (name in like.features or names):
            found[name] = [] if name in like.features else names
    return found


def _missing_columns(path: Path, head: _Head, like: Source) -> Iterator[Problem]:
    missing = [name for name in _categories(like) if name not in head.columns]
    if missing:
        yield Problem(
            f"{path} must have all columns of {like.name} but its target",
            f"{', '.join(head.columns)}, without {', '.join(missing)}",
            "Add them, or correct their names.",
        )


def _left_out(head: _Head, like: Source, position: int | None) -> list[str]:
    known = {*_categories(like), like.target}
    return [
        f"{head.label(at)} is left out: the models were not trained on it"
        for at, name in enumerate(head.columns)
        if at != position and name not in known
    ]


def _features_like(cells: Any, head: _Head, like: Source) -> list[_Feature]:
    return [
        _encoded_as(name, cells[head.columns.index(name)], categories)
        for name, categories in _categories(like).items()
    ]


def _encoded_as(name: str, column: Any, categories: Sequence[str]) -> _Feature:
    missing = np.flatnonzero(column.isna())
    if len(missing):
        return _fault(_MISSING_RULE, name, len(missing), missing[0])
    if not categories:
        found = _encoded(name, column)
        return _fault(_OTHER_RULE, name, len(column), 0, column[0]) if found.one_hot else found
    texts = column.str.strip().to_numpy(object)
    others = np.flatnonzero([text not in categories for text in texts])
    if len(others):
        return _fault(_OTHER_RULE, name, len(others), others[0], texts[others[0]])
    return _one_hot(name, texts, categories)
