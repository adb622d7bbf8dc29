"""A text file of rows: its delimiter and header, and its cells as pandas reads them.

The delimiter is the first of tab, semicolon and comma that divides the first lines without a row
longer than the first. If both semicolon and comma do, every comma must be a decimal comma.
`header_of` decides on the header; where the first row may be either, the caller is asked.

Cells have the dtype that `pandas.read_csv` infers over the whole column: int64, float64, bool, or
text. Only the cells in `MISSING` are missing. Labels and categories stay text, so that 007 and 7
differ.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
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

# Comma last: it also stands in decimal numbers and in texts.
_DELIMITERS = {"\t": "tab", ";": "semicolon", ",": "comma"}
_HEAD_LINES = 200
_READING: Any = {
    "index_col": False,
    "keep_default_na": False,
    "skipinitialspace": True,
    "encoding": "utf-8-sig",
}
_COMPRESSED = frozenset({".bz2", ".gz", ".tar", ".xz", ".zip", ".zst"})
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
LEADING_ZERO = re.compile(r"\s*[+-]?0\d")
_ZERO_BYTES = re.compile(rb"""(?:^|[,;\t"' +-])0[0-9]""", re.MULTILINE)
_EXPONENT = re.compile(r"\d+[eE]\d+")
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}|[+-]?\d{1,3}|")  # 1.037 may be 1037
_LONG_SERIES = 3


@dataclass(frozen=True)
class Head:
    """The first lines of a file: delimiter and names of columns."""

    delimiter: str
    n_columns: int
    names: tuple[str, ...]  # ``""`` for a column without a name; empty without a header
    has_header: bool

    def name(self, position: int) -> str:
        """Return the name of a column."""
        return (self.names[position] if self.names else "") or f"column {position}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns."""
        return tuple(map(self.name, range(self.n_columns)))

    def label(self, position: int) -> str:
        """Return the name of a column for messages."""
        named = self.names[position] if self.names else ""
        return f"column {named!r}" if named else f"column {position}"


def read_head(path: Path, header: str, known: Sequence[str] = (), least: int = 2) -> Head:
    """Read the first lines of a file.

    `known`: names that make the first row a header where it holds them all. `least`: minimum number
    of columns.

    Raises `InputError` where the file has no rows, a name twice, or an ambiguous first row.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        rule = "csv: must name a regular file, because it is read several times"
        remedy = "Save its content in a file first."
        raise InputError.one(rule, f"{path}, a pipe or a device", remedy)
    rows, delimiter = _first_rows(path)
    if not rows:
        raise InputError.one(f"{path} must hold rows", "an empty file", "Check the path.")
    if len(rows[0]) < least:
        raise InputError.one(
            f"{path} must hold two columns or more",
            f"one column, such as {rows[0][0][:40]!r}",
            "Separate features and class label by commas, semicolons or tabs.",
        )
    first, has_header = tuple(rows[0]), header == "yes"
    if header == "auto":
        has_header = _holds(first, known) or _decided(path, rows)
    names = first if has_header else ()
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise InputError.one(
            f"the columns of {path} must have different names",
            f"{', '.join(map(repr, twice[:5]))} more than once",
            "Rename them; if the first row is a sample, pass --header no.",
        )
    return Head(delimiter, len(first), names, has_header)


def _holds(first: Sequence[str], known: Sequence[str]) -> bool:
    """Whether a row holds all names; one or two numbers may be a coincidence."""
    telling = len(known) >= _LONG_SERIES or any(number(name) is None for name in known)
    return telling and set(known) <= set(first)


def _first_rows(path: Path) -> tuple[list[list[str]], str]:
    """Return the first rows, and the delimiter."""
    import pandas as pd

    by_delimiter: dict[str, list[list[str]]] = {}
    failure: Exception | None = None
    for delimiter in _DELIMITERS:
        try:
            frame = pd.read_csv(
                path, sep=delimiter, header=None, dtype=str, nrows=_HEAD_LINES, **_READING
            )
        except pd.errors.ParserError as error:
            failure = error
            continue
        except pd.errors.EmptyDataError:
            return [], delimiter
        except (OSError, UnicodeError) as error:
            _refuse_file(path, error)
        cells = frame.fillna("").to_numpy(object).tolist()
        rows = [[cell.strip() for cell in row] for row in cells]
        by_delimiter[delimiter] = [row for row in rows if any(row)]
    # Those that give most rows several columns.
    usable = [
        delimiter
        for delimiter, rows in by_delimiter.items()
        if rows and len(rows[0]) > 1 and sum(bool(row[-1]) for row in rows) * 2 > len(rows)
    ]
    if not usable and failure is not None:
        _refuse_rows(path, failure)
    if not usable:
        return by_delimiter[","], ","
    rows = by_delimiter[usable[0]]
    for cell in (cell for row in rows for cell in row) if len(usable) > 1 else ():
        if usable[-1] in cell and not _DECIMAL_COMMA.fullmatch(cell):
            names = " and ".join(_DELIMITERS[delimiter] for delimiter in usable)
            raise InputError.one(
                f"one delimiter must divide the rows of {path}",
                f"{names}, both do, as in {cell[:40]!r}",
                "Put cells that hold a delimiter into quotes.",
            )
    return rows, usable[0]


def _refuse_file(path: Path, error: OSError | UnicodeError) -> NoReturn:
    if isinstance(error, OSError):
        received = f"{path} ({error.strerror or error})"
        raise InputError.one("csv: must name a readable file", received, "Check it.") from error
    at = f"{error}"
    if isinstance(error, UnicodeDecodeError):
        at = f"byte 0x{error.object[error.start]:02x}, such as in Latin-1 or UTF-16"
    rule = f"{path} must be a text file in UTF-8"
    remedy = f"Convert it: iconv -f latin1 -t utf-8 {path.name} > new.csv"
    raise InputError.one(rule, at, remedy) from error


def _refuse_rows(path: Path, error: Exception) -> NoReturn:
    raise InputError.one(
        f"every row of {path} must have the columns of the first",
        str(error).strip().removeprefix("Error tokenizing data. C error: "),
        "Correct that line; a cell that holds the delimiter or a quote needs quotes around it.",
    ) from error


def _decided(path: Path, rows: Sequence[Sequence[str]]) -> bool:
    has_header, why = header_of(rows)
    if has_header is None:
        rule = f"it must be clear whether the first row of {path} names the columns"
        remedy = "Pass --header yes if it does, --header no if it is a sample."
        raise InputError.one(rule, why, remedy)
    return has_header


def header_of(rows: Sequence[Sequence[str]]) -> tuple[bool | None, str]:
    """Return whether the first row names the columns; None, and why, where it is ambiguous.

    Judged by the columns that are numeric below the first row. Text above them makes it a header,
    numbers make it a sample. Both kinds, and a series such as 0, 1, 2, are ambiguous. Without
    numeric columns, the first row is a header if its cells are distinct texts and none of them
    occurs below.

    >>> header_of([["width", "kind"], ["1.5", "a"]])
    (True, '')
    >>> header_of([["2.5", "b"], ["1.5", "a"], ["1.5", "b"]])
    (False, '')
    >>> header_of([["0", "1", "2"], ["1.5", "2.5", "1"]])
    (None, "'0', '1', '2' above numbers: a series, or a sample")
    """
    first, below = rows[0], rows[1:]
    columns = [[row[at] for row in below] for at in range(len(first))]
    pairs = list(zip(first, columns, strict=True))
    above = [cell for cell, column in pairs if _all_numbers(column)]
    numbers = [cell for cell in above if number(cell) is not None]
    texts = [cell for cell in above if cell not in MISSING and number(cell) is None]
    if not above:
        distinct = "" not in first and len(set(first)) == len(first)
        apart = all(number(cell) is None and cell not in column for cell, column in pairs)
        return bool(below) and distinct and apart, ""
    if texts and numbers:
        return None, f"{texts[0]!r} and {numbers[0]!r} above numbers"
    if texts:
        return True, ""
    with np.errstate(over="ignore", invalid="ignore"):
        gaps = np.diff([float(cell) for cell in numbers])
    if (
        len(numbers) >= _LONG_SERIES
        and 0 < gaps[0] < np.inf
        and np.allclose(gaps, gaps[0], rtol=1e-6)
    ):
        shown = ", ".join(map(repr, numbers[:3]))
        return None, f"{shown} above numbers: a series, or a sample"
    return False, ""


def _all_numbers(cells: Sequence[str]) -> bool:
    present = [cell for cell in cells if cell not in MISSING]
    return bool(present) and all(number(cell) is not None for cell in present)


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
            names=list(range(head.n_columns)),
            usecols=only,
            dtype=dict.fromkeys(texts, str),
            na_values=list(MISSING),
            low_memory=False,
            # The default of pandas 2 may miss the last bit; pandas 3 warns of the argument.
            **({"float_precision": "round_trip"} if pd.__version__ < "3" else {}),
            **_READING,
        )
    except UnicodeError as error:
        _refuse_file(path, error)
    except pd.errors.EmptyDataError:
        return pd.DataFrame(columns=range(head.n_columns))
    except pd.errors.ParserError as error:
        _refuse_rows(path, error)
    except MemoryError as error:
        rule, size = f"{path} must fit into memory", f"{path.stat().st_size / 2**30:.1f} GiB"
        remedy = "Use fewer rows, or write its numbers with numpy.savez and pass npz:PATH."
        raise InputError.one(rule, size, remedy) from error


def _may_lead_with_zeros(path: Path) -> bool:
    """Whether a table is worth a second reading; of a compressed one, nobody knows."""
    if path.suffix.lower() in _COMPRESSED:
        return True
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _ZERO_BYTES.search(content) is not None


def second_meanings(path: Path, head: Head, cells: Any) -> dict[int, str]:
    """Return a cell of each column whose numbers may be others: 007 or 1E5 a code, 1.037 be 1037.

    Codes with leading zeros differ where numbers do not: 007 and 7.
    """
    kinds = {int(at): cells[at].dtype.kind for at in cells.columns}
    whole = [at for at, kind in kinds.items() if kind in "iu"]
    whole = whole if whole and _may_lead_with_zeros(path) else []
    broken = [at for at, kind in kinds.items() if kind == "f"]
    rows = _first_rows(path)[0][head.has_header :] if broken else []
    pointed = [at for at in broken if _is_grouped(row[at] for row in rows if at < len(row))]
    columns = [at for at in broken if at in pointed or (cells[at].dropna() % 1 == 0).all()] + whole
    written = read_cells(path, head, columns, columns) if columns else None
    examples: dict[int, str] = {}
    for at in columns:
        texts = written[at].dropna().str.strip()  # type: ignore[index]
        odd = texts.str.match(LEADING_ZERO) if at in whole else texts.str.fullmatch(_EXPONENT)
        if at in pointed and not odd.any() and _is_grouped(texts):
            odd = texts.str.contains(".", regex=False)
        if odd.any():
            examples[at] = texts[odd].iloc[0]
    return examples


def _is_grouped(texts: Iterable[str]) -> bool:
    """Whether points in numbers may separate thousands."""
    texts = list(texts)
    return any("." in text for text in texts) and all(map(_GROUPED.fullmatch, texts))


# Class labels


_MOST_FRACTIONAL_CLASSES = 50
# Digits are ten; counts, such as of rings, are more.
_FEW_NUMBERS = 10


def class_indices(labels: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """Return the class names in order, and the index of each label.

    Sorted by value if all are numbers, else as text. Equal numbers are one class, named by its
    first spelling.

    >>> classes, indices = class_indices(["10", "2", "2.0", "10"])
    >>> classes, indices.tolist()
    (('2', '10'), [1, 0, 0, 1])
    """
    spellings = dict.fromkeys(labels)
    numbers = {label: number(label) for label in spellings}
    numeric = all(value is not None for value in numbers.values())
    keys: dict[str, Decimal | str] = {
        label: value if numeric and value is not None else label for label, value in numbers.items()
    }
    names: dict[Decimal | str, str] = {}
    for label in spellings:
        names.setdefault(keys[label], label)
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


def _key(label: str) -> Decimal | str:
    value = number(label)
    return label if value is None else value


def number(text: str) -> Decimal | None:
    """Return the finite number that a text spells, or None.

    >>> number(" 1.50 "), number("1e3"), number("nan"), number("1_000"), number("one")
    (Decimal('1.50'), Decimal('1E+3'), None, None, None)
    """
    if "_" in text:
        return None
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def class_note(what: str, classes: Sequence[str]) -> Iterator[str]:
    """Yield a note where numbers that may be quantities were taken as classes.

    >>> list(class_note("rings", ["1", "2.5"]))
    ['the 2 different numbers of rings are taken as classes, not as amounts']
    """
    values = [number(name) for name in classes]
    fractions = any(value is not None and value != value.to_integral_value() for value in values)
    if None not in values and (len(classes) > _FEW_NUMBERS or fractions):
        yield f"the {len(classes)} different numbers of {what} are taken as classes, not as amounts"


def spelling_problems(what: str, labels: Iterable[str]) -> Iterator[Problem]:
    """Yield that two labels are equal as numbers but may be different codes: 07 and 7.

    >>> [problem.received for problem in spelling_problems("kind", ["7", "07", "1", "1.0"])]
    ["'7' and '07'"]
    """
    spellings: dict[Decimal | str, str] = {}
    for label in dict.fromkeys(labels):
        other = spellings.setdefault(_key(label), label)
        if other != label and (LEADING_ZERO.match(label) or LEADING_ZERO.match(other)):
            yield Problem(
                f"classes of {what} must differ as numbers, too",
                f"{other!r} and {label!r}",
                "Put a letter before codes, such as c07, or spell equal numbers alike.",
            )
            return


def label_problems(what: str, classes: Sequence[str], n_samples: int) -> Iterator[Problem]:
    """Yield what keeps labels from being classes: a single class, or continuous values."""
    if len(classes) < 2:
        yield Problem(
            f"{what} must hold two classes or more",
            f"{', '.join(map(repr, classes)) or 'none'} in all {n_samples} rows",
            "Choose another target.",
        )
    elif len(classes) > max(2, n_samples / 2) or _looks_continuous(classes):
        yield Problem(
            f"{what} must hold class labels",
            f"{len(classes)} different values in {n_samples} rows",
            "Choose another target, or group its values into classes first.",
        )


def _looks_continuous(classes: Sequence[str]) -> bool:
    values = [number(label) for label in classes]
    fractional = any(value is not None and value != value.to_integral_value() for value in values)
    return len(classes) > _MOST_FRACTIONAL_CLASSES and fractional and None not in values
