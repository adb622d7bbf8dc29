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
anything, as the first column, without a name   left out: it numbers or names the rows
whole numbers or names, nearly all different,   left out: they identify the rows
called ``id``, ``…_id``, ``index`` or alike
nothing, without a name                         left out: each line ends in a delimiter
one value only                                  a feature; the notes say so
missing cells, infinities, dates, numbers with  refused, with the remedy
units or decimal commas, codes with leading
zeros, whole numbers beyond 2**53, numbers and
names mixed, more than 50 names
=============================================== ================================================

`ColumnChoice` stands above the rule: what is to be dropped, kept, or taken as names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.text_files import LEADING_ZERO, number
from asynckfold.errors import Problem

MAX_CATEGORIES = 50
FEATURE, TARGET, LEFT_OUT, REFUSED = "feature", "target", "left out", "refused"
NAMES = "names"

_ON_REQUEST, _EMPTY = "--drop", "it is empty and has no name"
_GROUPS, _FOLDS = "--groups", "--fold-column"
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

_MISSING_RULE = "features must have no missing values"
_RANGE_RULE = "whole numbers must be at most 2**53, and all be finite and fit float32"
_PLAIN_RULE = "a column must hold plain numbers or names, not both"
_ZEROS_RULE = "numbers with leading zeros may be codes"
_CATEGORIES_RULE = f"a column of names must have at most {MAX_CATEGORIES} different ones"
_OTHER_RULE = "a column must hold numbers, or those names, that the models were trained on"
_REMEDIES = {
    _MISSING_RULE: (
        "Fill these cells or drop the rows first, or leave the column out with --drop. Rows count "
        "from 1, without the header."
    ),
    _RANGE_RULE: "Replace these cells, rescale the column, or leave it out with --drop.",
    _PLAIN_RULE: (
        "Write plain digits with a decimal point, without units: 1.5 for 1,5 and 1000 for 1,000; "
        "turn dates and times into numbers. If these are names or codes, pass --category COLUMN; "
        "if the first row is the header, --header yes."
    ),
    _ZEROS_RULE: "Pass --category COLUMN if they are codes, --keep COLUMN if they are numbers.",
    _CATEGORIES_RULE: (
        "Leave the column out with --drop, group its values, or turn it into numbers; if each is a "
        "group of rows that belong together, such as a patient, pass --groups COLUMN."
    ),
    _OTHER_RULE: (
        "Correct these cells or drop the rows first. Rows count from 1, without the header."
    ),
}


@dataclass(frozen=True)
class Column:
    """What a column of a table is."""

    name: str  # from the header, or ``"column 3"``
    role: str  # feature, target, left out, or refused
    dtype: str = ""  # float64, int64, bool, or names
    why: str = ""  # reason why it is left out or refused
    categories: tuple[str, ...] = ()  # of a column of names; each becomes a feature
    missing: int = 0  # cells without a value
    different: int = 0  # distinct values

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        if self.role != FEATURE:
            return ()
        if self.dtype != NAMES:
            return (self.name,)
        return tuple(f"{self.name}={category}" for category in self.categories)


@dataclass(frozen=True)
class ColumnChoice:
    """The caller's `TableOptions` for columns, by position."""

    drop: frozenset[int] = frozenset()
    keep: frozenset[int] = frozenset()
    category: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    fold_column: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class JudgedColumn:
    """A column and its numbers, or the rule that it breaks and where."""

    column: Column
    values: npt.NDArray[Any] | None = None
    detail: str = ""  # where it breaks the rule, which is the column's `why`
    example: str = ""  # a number of it that may mean another


def judge(
    name: str,
    position: int,
    cells: Any,
    choice: ColumnChoice,
    *,
    unnamed: bool,
    example: str = "",
) -> JudgedColumn:
    """Decide what a column other than the target is, by the rule of this module.

    `cells` is a Series as pandas read it. `unnamed`: the table has a header, but not for this
    column. `example` is a number that may mean another, or be a code.
    """
    for why, positions in (
        (_GROUPS, choice.groups),
        (_FOLDS, choice.fold_column),
        (_ON_REQUEST, choice.drop),
    ):
        if position in positions:
            return _left_out(name, cells, why)
    is_code = LEADING_ZERO.match(example) is not None
    is_kept, is_category = position in choice.keep, position in choice.category
    judged = _judge_kept(name, cells, is_category, is_code and not (is_kept or is_category))
    why = "" if is_kept else _idle(name, position, cells, judged, unnamed)
    doubted = judged if is_kept or is_category else replace(judged, example=example)
    return _left_out(name, cells, why) if why else doubted


def _idle(name: str, position: int, cells: Any, judged: JudgedColumn, unnamed: bool) -> str:
    """Return why a column says nothing but which row it is; ``""`` if it may say more."""
    if unnamed and cells.isna().all():
        return _EMPTY
    if unnamed and position == 0:
        return "it has no name and stands first, as row numbers do"
    values = cells.dropna()
    numbers = judged.values
    if numbers is None and values.dtype.kind in "iuf":
        numbers = values.to_numpy()
    names = judged.column.dtype == NAMES and judged.column.why in ("", _CATEGORIES_RULE)
    different = len(values) > 1 and judged.column.different >= _NEARLY_ALL * len(values)
    if different and _IDENTIFIER.search(name) and (names or _is_whole(numbers)):
        return "nearly all its values differ, and its name is that of an identifier"
    if names and different and len(values) >= _FEW_ROWS:
        return "nearly all its names differ: they name the rows"
    if not names and numbers is not None and counts(numbers):
        return "it counts the samples"
    return ""


def _is_whole(numbers: npt.NDArray[Any] | None) -> bool:
    if numbers is None or numbers.dtype.kind == "b":
        return False
    return bool((numbers == np.rint(numbers)).all())


def _left_out(name: str, cells: Any, why: str) -> JudgedColumn:
    return JudgedColumn(replace(_column(name, cells), role=LEFT_OUT, why=why))


def _column(name: str, cells: Any) -> Column:
    dtype = str(cells.dtype) if cells.dtype.kind in "iufb" else NAMES
    return Column(name, FEATURE, dtype, "", (), int(cells.isna().sum()), int(cells.nunique()))


def _judge_kept(name: str, cells: Any, category: bool, zeros: bool) -> JudgedColumn:
    missing = np.flatnonzero(cells.isna())
    if len(missing):
        return _fault(name, cells, _MISSING_RULE, missing)
    if category:
        return _one_hot(name, cells.astype(str).str.strip())
    if cells.dtype.kind in "iufb":
        if zeros:
            return _fault(name, cells, _ZEROS_RULE, np.array([], np.int64))
        return _numbers(name, cells)
    return _texts(name, cells.astype(str).str.strip())


def _fault(
    name: str, cells: Any, rule: str, bad: npt.NDArray[np.int64], shown: object = None
) -> JudgedColumn:
    detail = name
    if len(bad):
        count = "1 cell" if len(bad) == 1 else f"{len(bad)} cells"
        example = "" if shown is None else f", {shown!r}"
        detail = f"{name} ({count}, first in row {bad[0] + 1}{example})"
    column = replace(_column(name, cells), role=REFUSED, why=rule)
    return JudgedColumn(column, None, detail)


def _numbers(name: str, cells: Any) -> JudgedColumn:
    values = cells.to_numpy()
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            bad = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
    else:
        bad = np.flatnonzero((values > _EXACT) | (values < -_EXACT))
    if len(bad):
        return _fault(name, cells, _RANGE_RULE, bad, str(values[bad[0]]))
    return JudgedColumn(_column(name, cells), values)


def _texts(name: str, cells: Any) -> JudgedColumn:
    import pandas as pd

    texts = cells.to_numpy(object)
    plain = {text: number(text) is not None for text in dict.fromkeys(texts)}
    is_number = np.array([plain[text] for text in texts])
    if is_number.all():
        # pandas left them as text: too long for int64.
        values = texts.astype(np.float64)
        if len(great := np.flatnonzero(np.abs(values) > _EXACT)):
            return _fault(name, cells, _RANGE_RULE, great, texts[great[0]])
        return _numbers(name, pd.Series(values))
    if is_number.any() or all(map(_NUMBERLIKE.fullmatch, plain)):
        fewer = is_number if 0 < is_number.sum() * 2 < len(texts) else ~is_number
        bad = np.flatnonzero(fewer)
        return _fault(name, cells, _PLAIN_RULE, bad, texts[bad[0]])
    return _one_hot(name, cells)


def _one_hot(name: str, cells: Any, categories: Sequence[str] | None = None) -> JudgedColumn:
    names = sorted(cells.unique()) if categories is None else categories
    column = Column(name, FEATURE, NAMES, "", tuple(names), 0, int(cells.nunique()))
    if categories is None and len(names) > MAX_CATEGORIES:
        refused = replace(column, role=REFUSED, why=_CATEGORIES_RULE, categories=())
        return JudgedColumn(refused, None, f"{name} ({len(names)})")
    texts = cells.to_numpy(object)
    return JudgedColumn(column, texts[:, None] == np.array(names, object)[None, :])


def encode_as(column: Column, cells: Any) -> JudgedColumn:
    """Encode a column as the models were trained on it."""
    missing = np.flatnonzero(cells.isna())
    if len(missing):
        return _fault(column.name, cells, _MISSING_RULE, missing)
    if column.dtype != NAMES:
        judged = _judge_kept(column.name, cells, False, False)
        if judged.column.dtype != NAMES or judged.column.role == REFUSED:
            return judged
        return _fault(column.name, cells, _OTHER_RULE, np.arange(len(cells)), cells.iloc[0])
    names = cells.astype(str).str.strip()
    others = np.flatnonzero(~names.isin(column.categories).to_numpy())
    if len(others):
        return _fault(column.name, cells, _OTHER_RULE, others, names.iloc[others[0]])
    return _one_hot(column.name, names, column.categories)


def row_dtype(columns: Sequence[Column]) -> npt.DTypeLike:
    """Return float32 where every feature is exact in it, else float64."""
    few = all(column.dtype in _FEW_BITS for column in columns if column.role == FEATURE)
    return np.float32 if few else np.float64


def matrix(judged: Sequence[JudgedColumn]) -> npt.NDArray[Any]:
    """Return the features as rows, shape (n, n_features)."""
    blocks = [item.values for item in judged if item.values is not None]
    widths = [1 if values.ndim == 1 else values.shape[1] for values in blocks]
    rows = np.empty((len(blocks[0]), sum(widths)), row_dtype([item.column for item in judged]))
    # Written block by block: a table may take half of the memory.
    for values, end, width in zip(blocks, np.cumsum(widths), widths, strict=True):
        rows[:, end - width : end] = values.reshape(len(rows), width)
    return rows


def feature_problems(what: str, judged: Sequence[JudgedColumn]) -> Iterator[Problem]:
    """Yield each broken rule once, with all columns that break it."""
    if all(item.column.role == LEFT_OUT for item in judged):
        left = (f"{_label(item.column.name)}: {item.column.why}" for item in judged)
        yield Problem(
            f"{what} must hold a feature besides the target",
            "; ".join(left) or "none",
            "Pass --keep COLUMN if it is a feature.",
        )
    for rule, remedy in _REMEDIES.items():
        broken = [item.detail for item in judged if item.column.why == rule]
        more = f" and {len(broken) - _NAMED_COLUMNS} more" if len(broken) > _NAMED_COLUMNS else ""
        if broken:
            yield Problem(rule, ", ".join(broken[:_NAMED_COLUMNS]) + more, remedy)


def column_notes(
    judged: Sequence[JudgedColumn], targets: npt.NDArray[np.int64] | None = None
) -> Iterator[str]:
    """Yield notes on columns that are left out, constant, encoded, or suspicious."""
    left_out = [item.column for item in judged if item.column.role == LEFT_OUT]
    for column in left_out:
        if column.why not in (_ON_REQUEST, _GROUPS, _FOLDS):
            keep = "" if column.why == _EMPTY else f" (--keep {flag_word(column.name)} uses it)"
            yield f"{_label(column.name)} is left out: {column.why}{keep}"
    if dropped := [_label(column.name) for column in left_out if column.why == _ON_REQUEST]:
        yield f"left out by --drop: {', '.join(dropped)}"
    constant = [
        item.column.name
        for item in judged
        if item.values is not None and item.column.different == 1
    ]
    if constant:
        word = "column holds" if len(constant) == 1 else f"{len(constant)} columns hold"
        yield f"{word} one value only: {', '.join(constant[:_NAMED_COLUMNS])}"
    if encoded := sum(item.column.dtype == NAMES for item in judged if item.values is not None):
        yield f"{encoded} {'column' if encoded == 1 else 'columns'} of names one-hot encoded"
    yield from _doubts(judged)
    for item in judged:
        if targets is not None and item.values is not None and _tells(item, targets):
            yield (
                f"{_label(item.column.name)} tells the class: each class has one value of its own; "
                f"if it follows from the class, pass --drop {flag_word(item.column.name)}"
            )


def _doubts(judged: Sequence[JudgedColumn]) -> Iterator[str]:
    """Yield notes on numbers that may be codes, or thousands."""
    doubtful = [item for item in judged if item.example and item.values is not None]
    for item in doubtful[:_NAMED_COLUMNS]:
        remedy = (
            "where these are codes, pass --category COLUMN or --drop COLUMN"
            if "e" in item.example.lower()
            else "where the point separates thousands, remove it from the file"
        )
        number_read = f"{item.example}, read as {float(item.example):g}"
        yield f"numbers in {_label(item.column.name)} such as {number_read}; {remedy}"


def _label(name: str) -> str:
    return name if re.fullmatch(r"column \d+", name) else f"column {name!r}"


def flag_word(name: str) -> str:
    """Spell a column for a flag: by position where it has no name."""
    nameless = re.fullmatch(r"column (\d+)", name)
    if nameless:
        return nameless[1]
    return shlex.quote(f'"{name}"' if "," in name else name)


def _tells(item: JudgedColumn, targets: npt.NDArray[np.int64]) -> bool:
    """Whether values and classes partition the samples alike."""
    classes = int(targets.max(initial=0)) + 1
    if item.values is None or item.column.different != classes or classes < 2:
        return False
    values = item.values if item.values.ndim == 1 else item.values.argmax(axis=1)
    # With few samples to a class, chance would do.
    pairs = np.unique(np.stack([values.astype(np.float64), targets.astype(np.float64)]), axis=1)
    return pairs.shape[1] == classes and len(targets) >= 10 * classes


# Columns that only number the samples


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
    if distinct.dtype.kind == "f" and np.abs(distinct).max() >= _EXACT:
        return False
    # Differences of int64 may need 64 bits without a sign; these wrap around as they should.
    offsets = distinct.astype(np.int64 if distinct.dtype.kind == "f" else distinct.dtype)
    offsets = offsets.astype(np.uint64) - offsets[0].astype(np.uint64)
    spread = int(offsets[-1]) // int(np.gcd.reduce(np.diff(offsets))) + 1
    return (count >= 9 and spread == count) or (count >= 30 and spread <= 2 * count)
