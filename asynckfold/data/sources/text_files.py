"""A text file of rows: its delimiter and header, its cells as pandas reads them, its labels.

The delimiter is that of tab, semicolon and comma which divides the first lines into most columns.
`header_of` decides on the header; where the first row may be either, the caller is asked.

Cells have the dtype that `pandas.read_csv` infers over the whole column: int64, float64, bool, or
text. Only the cells in `MISSING` are missing. Labels and categories stay text, so that 007 and 7
differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from asynckfold.errors import InputError, Problem

HEADER_CHOICES = ("auto", "yes", "no")
MISSING = ("", "?", "NA", "N/A", "NaN", "null", "na", "n/a", "nan", "NAN", "Null", "NULL")
"""Cells that hold no value. Others, such as None, are names."""

# Comma last: it also stands in decimal numbers.
_DELIMITERS = "\t;,"
_HEAD_LINES = 200
_READING: Any = {
    "index_col": False,
    "keep_default_na": False,
    "skipinitialspace": True,
    "encoding": "utf-8-sig",
}
LEADING_ZERO = re.compile(r"\s*[+-]?0\d")
_CODE = r"[+-]?0\d+|\d+[eE]\d+"
_GROUPED = r"[+-]?[1-9]\d{0,2}\.\d{3}|[+-]?\d{1,3}"  # 1.037 may be 1037
_DOUBTFUL_BYTES = re.compile(rb"(?<![\d.])0\d|\d[eE]\d|\d\.\d{3}(?!\d)")
_LONG_SERIES = 3


@dataclass(frozen=True)
class Head:
    """The first lines of a file: delimiter and names of columns."""

    delimiter: str
    names: tuple[str, ...]  # ``""`` for a column without a name
    has_header: bool

    def name(self, position: int) -> str:
        """Return the name of a column."""
        return self.names[position] or f"column {position}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns."""
        return tuple(map(self.name, range(len(self.names))))


def read_head(path: Path, header: str) -> Head:
    """Read the first lines of a file.

    Raises `InputError` where it has no rows, a name twice, or an ambiguous first row.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        rule = "csv: must name a regular file, because it is read several times"
        remedy = "Save its content in a file first."
        raise InputError.one(rule, f"{path}, a pipe or a device", remedy)
    rows, delimiter = _first_rows(path)
    if not rows:
        raise InputError.one(f"{path} must hold rows", "an empty file", "Check the path.")
    first = tuple(rows[0])
    has_header, why = header_of(rows) if header == "auto" else (header == "yes", "")
    if why:
        rule = f"it must be clear whether the first row of {path} names the columns"
        remedy = "Pass --header yes if it does, --header no if it is a sample."
        raise InputError.one(rule, why, remedy)
    if not has_header:
        return Head(delimiter, ("",) * len(first), False)
    if twice := sorted({name for name in first if name and first.count(name) > 1}):
        raise InputError.one(
            f"the columns of {path} must have different names",
            f"{', '.join(map(repr, twice[:5]))} more than once",
            "Rename them; if the first row is a sample, pass --header no.",
        )
    return Head(delimiter, first, True)


def _first_rows(path: Path) -> tuple[list[list[str]], str]:
    """Return the first rows, and the delimiter."""
    import pandas as pd

    widest, delimiter = None, ","
    failure: Exception | None = None
    for sep in _DELIMITERS:
        try:
            head = pd.read_csv(
                path, sep=sep, header=None, dtype=str, nrows=_HEAD_LINES, **_READING
            ).fillna("")
        except pd.errors.EmptyDataError:
            return [], sep
        except pd.errors.ParserError as error:
            failure = error
        except (OSError, ValueError) as error:
            _refuse(path, error)
        else:
            if widest is None or head.shape[1] > widest.shape[1]:
                widest, delimiter = head, sep
    if failure is not None and (widest is None or widest.shape[1] == 1):
        _refuse(path, failure)
    assert widest is not None
    rows = [[cell.strip() for cell in row] for row in widest.to_numpy(object).tolist()]
    return [row for row in rows if any(row)], delimiter


def _refuse(path: Path, error: Exception) -> NoReturn:
    raise InputError.one(
        f"{path} must be a readable text file in UTF-8, each row with the columns of the first",
        str(error).strip(),
        "Correct that line (a cell that holds the delimiter or a quote needs quotes around it), or "
        f"convert the file: iconv -f latin1 -t utf-8 {path.name} > new.csv",
    ) from error


def header_of(rows: Sequence[Sequence[str]]) -> tuple[bool, str]:
    """Return whether the first row names the columns, or why it may be either.

    Judged by the columns that are numeric below the first row. Text above them makes it a header,
    numbers make it a sample. Both kinds, and a series such as 0, 1, 2, are ambiguous. Without
    numeric columns, the first row is a header if its cells are distinct texts and none of them
    occurs below.

    >>> header_of([["width", "kind"], ["1.5", "a"]])
    (True, '')
    >>> header_of([["2.5", "b"], ["1.5", "a"], ["1.5", "b"]])
    (False, '')
    >>> header_of([["0", "1", "2"], ["1.5", "2.5", "1"]])
    (False, "'0', '1', '2' above numbers: a series, or a sample")
    """
    first, below = rows[0], rows[1:]
    columns = [[row[at] for row in below if row[at] not in MISSING] for at in range(len(first))]
    above = [
        cell
        for cell, column in zip(first, columns, strict=True)
        if column and None not in map(number, column)
    ]
    numbers = [cell for cell in above if number(cell) is not None]
    texts = [cell for cell in above if cell not in MISSING and number(cell) is None]
    if not above:
        pairs = zip(first, columns, strict=True)
        apart = all(number(cell) is None and cell not in column for cell, column in pairs)
        return apart and bool(below) and "" not in first and len(set(first)) == len(first), ""
    if texts and numbers:
        return False, f"{texts[0]!r} and {numbers[0]!r} above numbers"
    with np.errstate(over="ignore", invalid="ignore"):
        gaps = np.diff(np.array(numbers, float))
    if len(numbers) >= _LONG_SERIES and 0 < gaps[0] < np.inf and np.allclose(gaps, gaps[0], 1e-6):
        return False, f"{', '.join(map(repr, numbers[:3]))} above numbers: a series, or a sample"
    return bool(texts), ""


def read_cells(
    path: Path, head: Head, texts: Sequence[int], only: Sequence[int] | None = None
) -> Any:
    """Return all cells, or some columns, as a frame whose columns are positions.

    The columns `texts` stay as they are written.
    """
    import pandas as pd

    try:
        return pd.read_csv(
            path,
            sep=head.delimiter,
            header=0 if head.has_header else None,
            names=list(range(len(head.names))),
            usecols=only,
            dtype=dict.fromkeys(texts, str),
            na_values=list(MISSING),
            low_memory=False,
            # The default of pandas 2 may miss the last bit; pandas 3 warns of the argument.
            **({"float_precision": "round_trip"} if pd.__version__ < "3" else {}),
            **_READING,
        )
    except (OSError, ValueError) as error:
        _refuse(path, error)


def second_meanings(path: Path, head: Head, cells: Any) -> dict[int, str]:
    """Return a cell of each column whose numbers may be others: 007 or 1E5 a code, 1.037 be 1037.

    Codes with leading zeros differ where numbers do not: 007 and 7.
    """
    plain = path.suffix.lower() in (".csv", ".tsv", ".txt")
    if plain and not _DOUBTFUL_BYTES.search(path.read_bytes()):
        return {}
    numbers = [int(at) for at in cells.columns if cells[at].dtype.kind in "iuf"]
    columns = [at for at in numbers if cells[at].round(3).equals(cells[at])]
    written = read_cells(path, head, columns, columns) if columns else None
    examples: dict[int, str] = {}
    for at in columns:
        texts = written[at].dropna().str.strip()  # type: ignore[index]
        odd = texts.str.fullmatch(_CODE)
        if not odd.any() and texts.str.fullmatch(_GROUPED).all():
            odd = texts.str.contains(".", regex=False)
        if odd.any():
            examples[at] = texts[odd].iloc[0]
    return examples


# Class labels

_MOST_FRACTIONAL_CLASSES = 50
# Digits are ten; counts, such as of rings, are more.
_FEW_NUMBERS = 10


def number(text: str) -> Decimal | None:
    """Return the finite number that a text spells, or None.

    >>> number(" 1.50 "), number("1e3"), number("nan"), number("1_000"), number("one")
    (Decimal('1.50'), Decimal('1E+3'), None, None, None)
    """
    try:
        value = Decimal("_" if "_" in text else text.strip())
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _key(label: str) -> Decimal | str:
    value = number(label)
    return label if value is None else value


def class_indices(labels: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """Return the class names in order, and the index of each label.

    Sorted by value if all are numbers, else as text. Equal numbers are one class, named by its
    first spelling.

    >>> classes, indices = class_indices(["10", "2", "2.0", "10"])
    >>> classes, indices.tolist()
    (('2', '10'), [1, 0, 0, 1])
    """
    keys: dict[str, Any] = {label: _key(label) for label in dict.fromkeys(labels)}
    if any(isinstance(key, str) for key in keys.values()):
        keys = {label: label for label in keys}
    names = {key: label for label, key in reversed(keys.items())}
    order = {key: index for index, key in enumerate(sorted(names))}
    indices = np.array([order[keys[label]] for label in labels], np.int64)
    return tuple(names[key] for key in order), indices


def indices_in(classes: Sequence[str], labels: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the index of each label in `classes`, -1 if missing; equal numbers are one class.

    >>> indices_in(("2", "10"), ["10", "2.0", "3"]).tolist()
    [1, 0, -1]
    """
    known = {_key(name): index for index, name in enumerate(classes)}
    return np.array([known.get(_key(label), -1) for label in labels], np.int64)


ClassesOf = tuple[tuple[str, ...], npt.NDArray[Any], list[Problem], list[str]]
"""Class names, class indices or numbers, problems, and notes."""


def classes_of(what: str, labels: Sequence[str]) -> ClassesOf:
    """Return the classes of labels; `what` names these.

    Problems are a single class, continuous values, and labels that are equal as numbers but may be
    different codes. A note says that numbers which may be quantities are taken as classes.

    >>> classes_of("kind", ["7", "07", "1", "1.0"])[2][0].received
    "'7' and '07'"
    """
    names, targets = class_indices(labels)
    values = [number(name) for name in names]
    are_numbers = None not in values
    fractional = any(value is not None and value != value.to_integral_value() for value in values)
    problems, notes = [], []
    many = are_numbers and fractional and len(names) > _MOST_FRACTIONAL_CLASSES
    if len(names) < 2:
        received = f"{', '.join(map(repr, names)) or 'none'} in all {len(labels)} rows"
        rule = f"{what} must hold two classes or more"
        problems.append(Problem(rule, received, "Choose another target."))
    elif many or len(names) > max(2, len(labels) / 2):
        received = f"{len(names)} different values in {len(labels)} rows"
        remedy = "Pass --task regression, group its values into classes, or choose another target."
        problems.append(Problem(f"{what} must hold class labels", received, remedy))
    spellings: dict[Decimal | str, str] = {}
    for label in dict.fromkeys(labels):
        other = spellings.setdefault(_key(label), label)
        if other != label and (LEADING_ZERO.match(label) or LEADING_ZERO.match(other)):
            rule = f"classes of {what} must differ as numbers, too"
            remedy = "Put a letter before codes, such as c07, or spell equal numbers alike."
            problems.append(Problem(rule, f"{other!r} and {label!r}", remedy))
            break
    if are_numbers and (fractional or len(names) > _FEW_NUMBERS):
        text = f"the {len(names)} different numbers of {what} are taken as classes, not as amounts"
        notes.append(f"{text}: for these pass --task regression")
    return names, targets, problems, notes


def numbers_of(what: str, labels: Sequence[str]) -> ClassesOf:
    """Return the numbers of a regression's targets, of which there are no classes.

    >>> numbers_of("age", ["7", "7.5"])[1].tolist(), numbers_of("age", ["7", "x"])[2][0].received
    ([7.0, 7.5], "1 of 2 rows, first 'x' in row 2")
    """
    values = [number(label) for label in labels]
    bad = [at for at, value in enumerate(values) if value is None]
    if bad or len(set(values)) < 2:
        received = f"{len(bad)} of {len(labels)} rows"
        received += f", first {labels[bad[0]]!r} in row {bad[0] + 1}" if bad else " with another"
        rule, remedy = f"{what} must hold different, finite numbers", "Choose another target."
        return (), np.zeros(len(labels)), [Problem(rule, received, remedy)], []
    return (), np.array(labels, np.float64), [], []
