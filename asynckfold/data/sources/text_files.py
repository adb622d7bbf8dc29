"""A text file of rows: its delimiter and header, and its cells as pandas reads them.

The delimiter is the first of tab, semicolon and comma that divides the first lines without a row
longer than the first. Where both semicolon and comma do, every comma must be a decimal comma.
`header_of` decides on the header; where the first row may be either, the caller is asked.

Cells have the dtype that `pandas.read_csv` infers over the whole column (``low_memory=False``):
int64, float64, bool, or text. `MISSING` lists the only cells that are missing. Labels and
categories stay text, so that 007 and 7 differ.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from asynckfold.data.sources.labels import number
from asynckfold.errors import InputError, Problem, refuse

HEADER_CHOICES = ("auto", "yes", "no")
MISSING = ("", "?", "NA", "N/A", "NaN", "null", "na", "n/a", "nan", "NAN", "Null", "NULL")
"""Cells that hold no value. Others, such as None, are names."""

# Comma last: it also stands in decimal numbers and in texts.
_DELIMITERS = ("\t", ";", ",")
_HEAD_LINES = 200
_READING: Any = {
    "index_col": False,
    "keep_default_na": False,
    "skipinitialspace": True,
    "encoding": "utf-8-sig",
}
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
ZEROS, EXPONENTS, POINTS = "leading zeros", "exponents", "points"
"""Spellings of numbers that may be no numbers, or others: see `spellings`."""

_SPELLED = {
    "i": (ZEROS, re.compile(r"[+-]?0\d")),
    "f": (EXPONENTS, re.compile(r"\d+[eE]\d+$")),
}
"""By kind of the column's dtype."""

# 1.037 may be 1037, if no cell with a point has another form.
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}|[+-]?\d{1,3}|")
_LEADING_ZERO = re.compile(rb"""(?:^|[,;\t"' +-])0[0-9]""", re.MULTILINE)
# Read by pandas as they are.
_COMPRESSED = frozenset({".bz2", ".gz", ".tar", ".xz", ".zip", ".zst"})
# A column of labels has few, each in several rows: a tenth of the rows is far above both.
_FEW_NAMES, _ENOUGH_ROWS, _LONG_SERIES, _GREAT = 0.1, 10, 3, 1e12


@dataclass(frozen=True)
class Head:
    """What the first lines tell about a file."""

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
    refuse(_kind_problems(path))
    rows, delimiter = _divided(path)
    refuse(_head_problems(path, rows, least))
    first = tuple(rows[0])
    found: bool | None = header == "yes"
    if header == "auto":
        found, why = (True, "") if _holds(first, known) else header_of(rows)
        if found is None:
            rule = f"it must be clear whether the first row of {path} names the columns"
            remedy = "Pass --header yes if it does, --header no if it is a sample."
            refuse([Problem(rule, why, remedy)])
    names = first if found else ()
    refuse(_name_problems(path, names))
    return Head(delimiter, len(first), names, bool(found))


def _holds(first: Sequence[str], known: Sequence[str]) -> bool:
    """Whether a row holds all names; one or two numbers may be a coincidence."""
    telling = len(known) >= _LONG_SERIES or any(number(name) is None for name in known)
    return telling and set(known) <= set(first)


def _divided(path: Path) -> tuple[list[list[str]], str]:
    """Return the first rows, and the delimiter."""
    import pandas as pd

    found: dict[str, list[list[str]]] = {}
    failure: Exception | None = None
    for delimiter in _DELIMITERS:
        try:
            found[delimiter] = _first_rows(path, delimiter)
        except pd.errors.ParserError as error:
            failure = error
        except pd.errors.EmptyDataError:
            return [], delimiter
        except (OSError, UnicodeError) as error:
            _refuse_file(path, error)
    usable = [delimiter for delimiter, rows in found.items() if _divides(rows)]
    if len(usable) > 1:
        refuse(_delimiter_problems(path, found[usable[0]], usable))
    if usable:
        return found[usable[0]], usable[0]
    if failure is not None:
        refuse([_ragged(path, failure)])
    return found[","], ","


def _first_rows(path: Path, delimiter: str) -> list[list[str]]:
    import pandas as pd

    frame = pd.read_csv(path, sep=delimiter, header=None, dtype=str, nrows=_HEAD_LINES, **_READING)
    cells = frame.fillna("").to_numpy(object).tolist()
    rows = [[cell.strip() for cell in row] for row in cells]
    return [row for row in rows if any(row)]


def _divides(rows: Sequence[Sequence[str]]) -> bool:
    """Whether most rows have several columns."""
    return bool(rows) and len(rows[0]) > 1 and sum(bool(row[-1]) for row in rows) * 2 > len(rows)


def _delimiter_problems(
    path: Path, rows: Sequence[Sequence[str]], usable: Sequence[str]
) -> Iterator[Problem]:
    odd = [
        cell
        for row in rows
        for cell in row
        if usable[-1] in cell and not _DECIMAL_COMMA.fullmatch(cell)
    ]
    if odd:
        named = {"\t": "tab", ";": "semicolon", ",": "comma"}
        yield Problem(
            f"one delimiter must divide the rows of {path}",
            f"{' and '.join(named[item] for item in usable)}, both do, as in {odd[0][:40]!r}",
            "Put cells that hold a delimiter into quotes.",
        )


def _head_problems(path: Path, rows: Sequence[Sequence[str]], least: int) -> Iterator[Problem]:
    if not rows:
        yield Problem(f"{path} must hold rows", "an empty file", "Check the path.")
    elif len(rows[0]) < least:
        yield Problem(
            f"{path} must hold two columns or more",
            f"one column, such as {rows[0][0][:40]!r}",
            "Separate features and class label by commas, semicolons or tabs.",
        )


def _name_problems(path: Path, names: Sequence[str]) -> Iterator[Problem]:
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        yield Problem(
            f"the columns of {path} must have different names",
            f"{', '.join(map(repr, twice[:5]))} more than once",
            "Rename them; if the first row is a sample, pass --header no.",
        )


def _kind_problems(path: Path) -> Iterator[Problem]:
    if path.exists() and not path.is_file() and not path.is_dir():
        yield Problem(
            "csv: must name a regular file, because it is read several times",
            f"{path}, a pipe or a device",
            "Save its content in a file first.",
        )


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


def _ragged(path: Path, error: Exception) -> Problem:
    return Problem(
        f"every row of {path} must have the columns of the first",
        str(error).strip().removeprefix("Error tokenizing data. C error: "),
        "Correct that line; a cell that holds the delimiter or a quote needs quotes around it.",
    )


def header_of(rows: Sequence[Sequence[str]]) -> tuple[bool | None, str]:
    """Return whether the first row names the columns; None, and why, where it is ambiguous.

    Judged by the columns that are numeric below the first row. Text above them makes it a header,
    numbers make it a sample. Ambiguous are: both kinds, a series such as 0, 1, 2, and numbers next
    to a label that no other row has. Without numeric columns, the first row is a header if its
    cells are distinct texts and none of them occurs below.

    >>> header_of([["width", "kind"], ["1.5", "a"]])
    (True, '')
    >>> header_of([["2.5", "b"], ["1.5", "a"], ["1.5", "b"]])
    (False, '')
    >>> header_of([["0", "1", "2"], ["1.5", "2.5", "1"]])
    (None, "'0', '1', '2' above numbers: a series, or a sample")
    """
    first, below = rows[0], rows[1:]
    columns = [[row[index] for row in below] for index in range(len(first))]
    above = [cell for cell, column in zip(first, columns, strict=True) if _all_numbers(column)]
    texts = [cell for cell in above if cell not in MISSING and number(cell) is None]
    numbers = [cell for cell in above if number(cell) is not None]
    if not above:
        return _names_all(first, columns), ""
    if texts and numbers:
        return None, f"{texts[0]!r} and {numbers[0]!r} above numbers"
    if texts:
        return True, ""
    labels = [
        cell for cell, column in zip(first, columns, strict=True) if _is_odd_label(cell, column)
    ]
    if labels:
        return None, f"{labels[0]!r}, which occurs in no other row, next to numbers above numbers"
    if _is_series([float(cell) for cell in numbers]):
        shown = ", ".join(map(repr, numbers[:3]))
        return None, f"{shown} above numbers: a series, or a sample"
    return False, ""


def _names_all(first: Sequence[str], columns: Sequence[Sequence[str]]) -> bool:
    if any(number(cell) is not None for cell in first):
        return False
    apart = all(cell not in column for cell, column in zip(first, columns, strict=True))
    return bool(columns[0]) and apart and "" not in first and len(set(first)) == len(first)


def _is_odd_label(cell: str, column: Sequence[str]) -> bool:
    if _all_numbers(column) or len(column) < _ENOUGH_ROWS or cell in column or not cell:
        return False
    return len(set(column)) <= max(2, _FEW_NAMES * len(column)) and number(cell) is None


def _is_series(numbers: Sequence[float]) -> bool:
    if len(numbers) < _LONG_SERIES or max(map(abs, numbers)) > _GREAT:
        return False
    gaps = np.diff(np.array(numbers))
    if gaps.min() <= 0:
        return False
    return bool(np.allclose(gaps, gaps[0], rtol=1e-6))


def _all_numbers(cells: Sequence[str]) -> bool:
    present = [cell for cell in cells if cell not in MISSING]
    return bool(present) and all(number(cell) is not None for cell in present)


def read_cells(path: Path, head: Head, texts: Sequence[int]) -> Any:
    """Return all cells as a frame whose columns are positions; `texts` stay as they are written."""
    import pandas as pd

    try:
        return _frame(path, head, texts)
    except UnicodeError as error:
        _refuse_file(path, error)
    except pd.errors.EmptyDataError:
        return pd.DataFrame(columns=range(head.n_columns))
    except pd.errors.ParserError as error:
        raise InputError([_ragged(path, error)]) from error
    except MemoryError as error:
        rule, size = f"{path} must fit into memory", f"{path.stat().st_size / 2**30:.1f} GiB"
        remedy = "Use fewer rows, or write its numbers with numpy.savez and pass npz:PATH."
        raise InputError.one(rule, size, remedy) from error


def _frame(path: Path, head: Head, texts: Sequence[int], only: Sequence[int] | None = None) -> Any:
    import pandas as pd

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


def spellings(path: Path, head: Head, cells: Any) -> dict[int, tuple[str, str]]:
    """Return how columns of numbers are spelled that may be something else, with an example.

    007 and 7 may be two codes; 1E5 may be one; 1.037 may be 1037.
    """
    whole = [int(at) for at in cells.columns if cells[at].dtype.kind in "iu"]
    broken = [int(at) for at in cells.columns if cells[at].dtype.kind == "f"]
    first = _first_rows(path, head.delimiter)[head.has_header :] if broken else []
    pointed = [at for at in broken if _is_grouped(row[at] for row in first)]
    numbers = [
        *(whole if whole and _may_lead_with_zeros(path) else ()),
        *(at for at in broken if at in pointed or (cells[at].dropna() % 1 == 0).all()),
    ]
    odd: dict[int, tuple[str, str]] = {}
    if not numbers:
        return odd
    written = _frame(path, head, numbers, numbers)
    for at in numbers:
        texts = written[at].dropna().str.strip()
        kind, pattern = _SPELLED["f" if at in broken else "i"]
        if (those := texts.str.match(pattern)).any():
            odd[at] = kind, texts[those].iloc[0]
        if at in pointed and _is_grouped(texts):
            odd[at] = POINTS, texts[texts.str.contains(".", regex=False)].iloc[0]
    return odd


def _is_grouped(texts: Iterable[str]) -> bool:
    """Whether points in numbers may separate thousands."""
    texts = list(texts)
    return any("." in text for text in texts) and all(map(_GROUPED.fullmatch, texts))


def _may_lead_with_zeros(path: Path) -> bool:
    if path.suffix.lower() in _COMPRESSED:
        return True
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _LEADING_ZERO.search(content) is not None
