"""The rule that says what each column of a table is: one rule, for text files and arrays.

=============================================== ================================================
A column of                                     is
=============================================== ================================================
numbers                                         a feature, float64 or int64 as in the file
True and False                                  a feature, 1 and 0
up to 50 different names                        one feature per name, 1 or 0
whole numbers that count the samples, in any    left out: in a file sorted by class they give
order, with any offset and with gaps            the class away
names nearly all of which differ                left out: they name the rows
anything without a name, as the first column,   left out: it numbers or names the rows, or each
or empty                                        line ends in a delimiter
whole numbers or names, nearly all different,   left out: they identify the rows
called ``id``, ``…_id``, ``index`` or alike
one value only                                  a feature; the notes say so
missing cells, infinities, dates, numbers with  refused, with the remedy
units or decimal commas, codes with leading
zeros, whole numbers beyond 2**53, numbers and
names mixed, more than 50 names
=============================================== ================================================

Columns that the caller names, to be dropped, kept, or taken as names, are above the rule.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.text_files import LEADING_ZERO, number
from asynckfold.errors import Problem

MAX_CATEGORIES = 50
FEATURE, TARGET, LEFT_OUT, REFUSED = "feature", "target", "left out", "refused"
NAMES = "names"
DROP, KEEP, CATEGORY = "--drop", "--keep", "--category"
GROUPS, FOLDS = "--groups", "--fold-column"
Chosen = Mapping[str, frozenset[int]]
"""Positions of the columns that each flag names."""

_NAMED_COLUMNS = 5
# A row or two may be there twice.
_NEARLY_ALL = 0.9
# Below these many rows, names that are all different may well be categories.
_FEW_ROWS = 9
_EXACT = 2**53
_FEW_BITS = frozenset({NAMES, "bool", "int8", "uint8", "int16", "uint16", "float16", "float32"})
_IDENTIFIER = re.compile(
    # Not price_index, which is a number of its own.
    r"(?i:^(unnamed: \d+|row|rownames?|row_?num(ber)?|idx|index)$|(^|[^a-z])(id|uid|uuid)$)"
    r"|[a-z](Id|ID)$"
)
_NUMBERLIKE = re.compile(r"[^\w]*\d[\d\W_]*[a-zA-Zµ]{0,3}")
"""A number with a unit, a decimal comma or separators; a date, a time, a range."""

_MISSING, _RANGE, _PLAIN, _ZEROS, _MANY, _OTHER = (
    "features must have no missing values",
    "whole numbers must be at most 2**53, and all be finite and fit float32",
    "a column must hold plain numbers or names, not both",
    "numbers with leading zeros may be codes",
    f"a column of names must have at most {MAX_CATEGORIES} different ones",
    "a column must hold numbers, or those names, that the models were trained on",
)
_REMEDIES = {
    _MISSING: (
        "Fill these cells or drop the rows first, or leave the column out with --drop; in Python, "
        "a preprocess may fill columns that it takes by name, such as make_column_transformer("
        "(SimpleImputer(), ['age'])). Rows count from 1, without the header."
    ),
    _RANGE: "Replace these cells, rescale the column, or leave it out with --drop.",
    _PLAIN: (
        "Write plain digits with a decimal point, without units: 1.5 for 1,5 and 1000 for 1,000; "
        "turn dates and times into numbers. If these are names or codes, pass --category COLUMN; "
        "if the first row is the header, --header yes."
    ),
    _ZEROS: "Pass --category COLUMN if they are codes, --keep COLUMN if they are numbers.",
    _MANY: (
        "Leave the column out with --drop, group its values, or turn it into numbers; if each is a "
        "group of rows that belong together, such as a patient, pass --groups COLUMN."
    ),
    _OTHER: "Correct these cells or drop the rows first.",
}


@dataclass(frozen=True, eq=False)
class Column:
    """What a column of a table is, and its numbers."""

    name: str  # from the header, or ``"column 3"``
    role: str  # feature, target, left out, or refused
    dtype: str  # float64, int64, bool, or names
    why: str = ""  # reason why it is left out, or the rule that it breaks
    categories: tuple[str, ...] = ()  # of a column of names; each becomes a feature
    missing: int = 0  # cells without a value
    different: int = 0  # distinct values
    numbers: npt.NDArray[Any] | None = None  # of a feature: shape (n,) or (n, n_categories)
    where: str = ""  # the cells that break the rule
    example: str = ""  # a number of it that may mean another

    @classmethod
    def of(cls, name: str, cells: Any) -> Column:
        """Return a feature without its numbers."""
        dtype = str(cells.dtype) if cells.dtype.kind in "iufb" else NAMES
        missing, different = int(cells.isna().sum()), int(cells.nunique())
        return cls(name, FEATURE, dtype, missing=missing, different=different)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        if self.role != FEATURE:
            return ()
        if self.dtype != NAMES:
            return (self.name,)
        return tuple(f"{self.name}={category}" for category in self.categories)

    @property
    def values(self) -> str:
        """The range of its numbers, or its names."""
        if self.dtype == NAMES or self.numbers is None or self.numbers.dtype.kind == "b":
            return ", ".join(self.categories)
        low, high = self.numbers.min(), self.numbers.max()
        return f"{low:.6g}" if low == high else f"{low:.6g} … {high:.6g}"


def judge(
    name: str, position: int, cells: Any, chosen: Chosen, *, unnamed: bool, example: str = ""
) -> Column:
    """Decide what a column other than the target is, by the rule of this module.

    `cells` is a Series as pandas read it. `unnamed`: the table has a header, but not for this
    column. `example` is a number that may mean another, or be a code.
    """
    column = Column.of(name, cells)
    flags = [flag for flag, positions in chosen.items() if position in positions]
    for flag in (GROUPS, FOLDS, DROP):
        if flag in flags:
            return replace(column, role=LEFT_OUT, why=flag)
    is_code = not flags and LEADING_ZERO.match(example) is not None
    encoded = _encoded(column, cells, as_names=CATEGORY in flags, is_code=is_code)
    why = "" if KEEP in flags else _idle(encoded, position, cells, unnamed)
    if why:
        return replace(column, role=LEFT_OUT, why=why)
    return encoded if flags else replace(encoded, example=example)


def _idle(column: Column, position: int, cells: Any, unnamed: bool) -> str:
    """Return why a column says nothing but which row it is; ``""`` if it may say more."""
    values = cells.dropna()
    if unnamed and (position == 0 or not len(values)):
        return "it has no name, and stands first, as row numbers do, or is empty"
    numbers = values.to_numpy() if values.dtype.kind in "iuf" else column.numbers
    names = column.dtype == NAMES and column.why in ("", _MANY)
    is_whole = (
        numbers is not None and numbers.dtype.kind != "b" and (numbers == np.rint(numbers)).all()
    )
    different = len(values) > 1 and column.different >= _NEARLY_ALL * len(values)
    if different and _IDENTIFIER.search(column.name) and (names or is_whole):
        return "nearly all its values differ, and its name is that of an identifier"
    if names and different and len(values) >= _FEW_ROWS:
        return "nearly all its names differ: they name the rows"
    if not names and numbers is not None and counts(numbers):
        return "it counts the samples"
    return ""


def _encoded(column: Column, cells: Any, *, as_names: bool, is_code: bool) -> Column:
    """Return a column with its numbers, or as refused."""
    if column.missing:
        return _refused(column, _MISSING, cells.isna())
    if cells.dtype.kind in "iufb" and not as_names:
        if is_code:
            return replace(column, role=REFUSED, why=_ZEROS, where=column.name)
        return _numeric(column, cells.to_numpy(), whole=cells.dtype.kind != "f")
    texts = cells.astype(str).str.strip()
    plain = {text: number(text) is not None for text in texts.unique()}
    is_number = texts.map(plain).to_numpy(bool)
    if as_names or not (is_number.any() or all(map(_NUMBERLIKE.fullmatch, plain))):
        return _one_hot(column, texts)
    if is_number.all():
        # pandas left them as text: too long for int64.
        values = texts.to_numpy(object).astype(np.float64)
        return _numeric(replace(column, dtype="float64"), values, whole=True)
    fewer = is_number if 0 < is_number.sum() * 2 < len(texts) else ~is_number
    return _refused(column, _PLAIN, fewer, texts)


def _refused(column: Column, rule: str, bad: Any, cells: Any = None) -> Column:
    """Return a column as refused; `bad` says which cells break the rule."""
    places = np.flatnonzero(bad)
    example = "" if cells is None else f", {str(np.asarray(cells)[places[0]])!r}"
    count = f"{len(places)} cell{'s' * (len(places) > 1)}"
    where = f"{column.name} ({count}, first in row {places[0] + 1}{example})"
    return replace(column, role=REFUSED, why=rule, where=where)


def _numeric(column: Column, values: npt.NDArray[Any], *, whole: bool) -> Column:
    with np.errstate(over="ignore"):
        finite = np.isfinite(values.astype(np.float32))
    bad = (values > _EXACT) | (values < -_EXACT) if whole else ~finite
    return _refused(column, _RANGE, bad, values) if bad.any() else replace(column, numbers=values)


def _one_hot(column: Column, texts: Any, categories: tuple[str, ...] = ()) -> Column:
    names = categories or tuple(sorted(texts.unique()))
    column = replace(column, dtype=NAMES, different=int(texts.nunique()))
    if not categories and len(names) > MAX_CATEGORIES:
        where = f"{column.name} ({len(names)})"
        return replace(column, role=REFUSED, why=_MANY, where=where)
    numbers = texts.to_numpy(object)[:, None] == np.array(names, object)[None, :]
    return replace(column, categories=names, numbers=numbers)


def encode_as(known: Column, cells: Any) -> Column:
    """Encode a column as the models were trained on it."""
    column = Column.of(known.name, cells)
    if column.missing or known.dtype != NAMES:
        encoded = _encoded(column, cells, as_names=False, is_code=False)
        if encoded.dtype != NAMES or encoded.role == REFUSED:
            return encoded
    texts = cells.astype(str).str.strip()
    others = ~texts.isin(known.categories)
    return (
        _refused(column, _OTHER, others, texts)
        if others.any()
        else _one_hot(column, texts, known.categories)
    )


def row_dtype(columns: Sequence[Column]) -> npt.DTypeLike:
    """Return float32 where every feature is exact in it, else float64."""
    few = all(column.dtype in _FEW_BITS for column in columns if column.role == FEATURE)
    return np.float32 if few else np.float64


def matrix(columns: Sequence[Column]) -> npt.NDArray[Any]:
    """Return the features as rows, shape (n, n_features)."""
    blocks = [column.numbers for column in columns if column.numbers is not None]
    widths = [1 if block.ndim == 1 else block.shape[1] for block in blocks]
    rows = np.empty((len(blocks[0]), sum(widths)), row_dtype(columns))
    # Written block by block: a table may take half of the memory.
    for block, end, width in zip(blocks, np.cumsum(widths), widths, strict=True):
        rows[:, end - width : end] = block.reshape(len(rows), width)
    return rows


def feature_problems(what: str, columns: Sequence[Column]) -> Iterator[Problem]:
    """Yield each broken rule once, with all columns that break it."""
    if all(column.role == LEFT_OUT for column in columns):
        yield Problem(
            f"{what} must hold a feature besides the target",
            "; ".join(f"{label(column.name)}: {column.why}" for column in columns) or "none",
            "Pass --keep COLUMN if it is a feature; commas, semicolons or tabs divide columns.",
        )
    for rule, remedy in _REMEDIES.items():
        broken = [column.where for column in columns if column.why == rule]
        more = f" and {len(broken) - _NAMED_COLUMNS} more" if len(broken) > _NAMED_COLUMNS else ""
        if broken:
            yield Problem(rule, ", ".join(broken[:_NAMED_COLUMNS]) + more, remedy)


def column_notes(
    columns: Sequence[Column], targets: npt.NDArray[np.int64] | None = None
) -> Iterator[str]:
    """Yield notes on columns that are left out, constant, encoded, or suspicious."""
    for column in columns:
        if column.role == LEFT_OUT and not column.why.startswith("--"):
            keep = f"--keep {flag_word(column.name)} uses it"
            yield f"{label(column.name)} is left out: {column.why} ({keep})"
    if dropped := [label(column.name) for column in columns if column.why == DROP]:
        yield f"left out by --drop: {', '.join(dropped)}"
    used = [column for column in columns if column.numbers is not None]
    if constant := [column.name for column in used if column.different == 1]:
        yield f"one value only in {len(constant)}: {', '.join(constant[:_NAMED_COLUMNS])}"
    if encoded := sum(column.dtype == NAMES for column in used):
        yield f"columns of names that are one-hot encoded: {encoded}"
    for column in [column for column in used if column.example][:_NAMED_COLUMNS]:
        remedy = (
            "where these are codes, pass --category COLUMN or --drop COLUMN"
            if "e" in column.example.lower()
            else "where the point separates thousands, remove it from the file"
        )
        number_read = f"{column.example}, read as {float(column.example):g}"
        yield f"numbers in {label(column.name)} such as {number_read}; {remedy}"
    for column in used:
        if targets is not None and _tells(column, targets):
            yield (
                f"{label(column.name)} tells the class: each class has one value of its own; "
                f"if it follows from the class, pass --drop {flag_word(column.name)}"
            )


def label(name: str) -> str:
    """Return how messages call a column."""
    return name if re.fullmatch(r"column \d+", name) else f"column {name!r}"


def flag_word(name: str) -> str:
    """Spell a column for a flag: by position where it has no name."""
    if nameless := re.fullmatch(r"column (\d+)", name):
        return nameless[1]
    return shlex.quote(f'"{name}"' if "," in name else name)


def _tells(column: Column, targets: npt.NDArray[np.int64]) -> bool:
    """Whether values and classes partition the samples alike."""
    classes = int(targets.max(initial=0)) + 1
    # With few samples to a class, chance would do.
    if column.numbers is None or column.different != classes or len(targets) < 10 * classes:
        return False
    values = column.numbers if column.numbers.ndim == 1 else column.numbers.argmax(axis=1)
    pairs = set(zip(values.tolist(), targets.tolist(), strict=True))
    return len(pairs) == classes > 1


def counts(values: npt.NDArray[Any]) -> bool:
    """Return whether numbers only count rows: nearly all different, and in order or without gaps.

    By chance, 7 different numbers are in order in one of 5,000 columns, 9 numbers of a range of 9
    are all different in one of 1,000, and 30 of a range of 60 in far fewer. A range counts in any
    order, with any offset and step; numbers with a fraction count where they are evenly spaced.

    >>> rows = np.random.default_rng(0).permutation(300)
    >>> counts(rows), counts(rows[:200] + 7000), counts(np.sort(rows[:20]))
    (True, True, True)
    >>> counts(np.array([41, 23, 35, 67, 52, 19, 28, 74, 33, 60])), counts(rows % 100)
    (False, False)
    """
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        return False
    distinct = np.unique(values)
    count = len(distinct)
    if count < 7 or count < _NEARLY_ALL * len(values):
        return False
    if distinct.dtype.kind == "f" and (distinct != np.rint(distinct)).any():
        step = (distinct[-1] - distinct[0]) / (count - 1)
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.abs((distinct - distinct[0]) / step - np.arange(count)).max() < 1e-3)
    if (values[1:] >= values[:-1]).all():
        return True
    if max(abs(int(distinct[0])), abs(int(distinct[-1]))) >= _EXACT:
        return False
    offsets = distinct.astype(np.int64) - int(distinct[0])
    spread = int(offsets[-1]) // int(np.gcd.reduce(np.diff(offsets))) + 1
    return (count >= 9 and spread == count) or (count >= 30 and spread <= 2 * count)
