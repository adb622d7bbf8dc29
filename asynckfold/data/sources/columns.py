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

from asynckfold.data.sources.counting import counts
from asynckfold.data.sources.labels import number
from asynckfold.data.sources.text_files import EXPONENTS, POINTS, ZEROS
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
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ]\d{1,2}:\d{2}.*)?|\d{1,2}:\d{2}(:\d{2}.*)?")
_WITH_UNIT = re.compile(r"[<>~]?\s*[$€£]?\s*[+-]?\d[\d.,'\s]*\s*[%$€£]?")

_REMEDIES = {
    "features must have no missing values": (
        "Fill these cells or drop the rows first, or leave the column out with --drop. Rows count "
        "from 1, without the header."
    ),
    "features must be finite and fit float32": "Replace these cells or rescale the column first.",
    "a column must hold numbers or names, not both": (
        "Correct the cells, or pass --category COLUMN if they are codes; if the first row is the "
        "header, pass --header yes."
    ),
    "numbers must have a decimal point": (
        "Write 1.5 for 1,5 where the comma is a decimal comma; write 1000 for 1,000 where it "
        "separates thousands."
    ),
    "numbers must be plain digits": (
        "Remove units and thousands separators first; if they are names, pass --category COLUMN."
    ),
    "dates and times must be turned into numbers": (
        "Write them as numbers, such as days since the first, or leave the column out with --drop."
    ),
    "numbers must have no leading zeros": (
        "If they are codes, pass --category COLUMN or --drop COLUMN; if they are amounts, --keep "
        "COLUMN."
    ),
    f"whole numbers must be at most 2**53, {_EXACT:,}": (
        "Greater ones are not exact as features: pass --drop COLUMN, or rescale the column first."
    ),
    f"a column of names must have at most {MAX_CATEGORIES} different ones": (
        "Leave the column out with --drop, group its values, or turn it into numbers; if each is a "
        "group of rows that belong together, such as a patient, pass --groups COLUMN."
    ),
    "a column must hold numbers, or those names, that the models were trained on": (
        "Correct these cells or drop the rows first. Rows count from 1, without the header."
    ),
}
_SPELLINGS = {
    EXPONENTS: (
        "numbers with an exponent",
        "where these are codes, pass --category COLUMN or --drop COLUMN",
    ),
    POINTS: (
        "numbers with a decimal point and three digits behind it",
        "where the point separates thousands, remove it from the file",
    ),
}
"""What numbers are taken for that may be something else, and the remedy."""

(
    _MISSING_RULE,
    _FINITE_RULE,
    _MIXED_RULE,
    _COMMA_RULE,
    _PLAIN_RULE,
    _DATE_RULE,
    _ZEROS_RULE,
    _EXACT_RULE,
    _CATEGORIES_RULE,
    _OTHER_RULE,
) = _REMEDIES


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
class Judged:
    """A column and its numbers, or the rule that it breaks and where."""

    column: Column
    values: npt.NDArray[Any] | None = None
    detail: str = ""  # where it breaks the rule, which is the column's `why`
    spelled: tuple[str, str] | None = None  # see `text_files.spellings`


def judge(
    name: str,
    position: int,
    cells: Any,
    chosen: ColumnChoice,
    *,
    unnamed: bool,
    spelled: tuple[str, str] | None = None,
) -> Judged:
    """Decide what a column other than the target is, by the rule of this module.

    `cells` is a Series as pandas read it. `unnamed`: the table has a header, but not for this
    column. `spelled`: how its numbers are, if they may be something else.
    """
    for why, positions in (
        (_GROUPS, chosen.groups),
        (_FOLDS, chosen.fold_column),
        (_ON_REQUEST, chosen.drop),
    ):
        if position in positions:
            return _left_out(name, cells, why)
    if position in chosen.keep or position in chosen.category:
        spelled = None
    zeros = spelled is not None and spelled[0] == ZEROS
    judged = _judge_kept(name, cells, position in chosen.category, zeros)
    why = "" if position in chosen.keep else _idle(name, position, cells, judged, unnamed)
    return _left_out(name, cells, why) if why else replace(judged, spelled=spelled)


def _idle(name: str, position: int, cells: Any, judged: Judged, unnamed: bool) -> str:
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


def _left_out(name: str, cells: Any, why: str) -> Judged:
    return Judged(replace(_column(name, cells), role=LEFT_OUT, why=why))


def _column(name: str, cells: Any, categories: Sequence[str] = ()) -> Column:
    kind = cells.dtype.kind
    dtype = str(cells.dtype) if kind in "iufb" else NAMES
    return Column(
        name, FEATURE, dtype, "", tuple(categories), int(cells.isna().sum()), int(cells.nunique())
    )


def _judge_kept(name: str, cells: Any, category: bool, zeros: bool) -> Judged:
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
) -> Judged:
    detail = name
    if len(bad):
        count = "1 cell" if len(bad) == 1 else f"{len(bad)} cells"
        example = "" if shown is None else f", {shown!r}"
        detail = f"{name} ({count}, first in row {bad[0] + 1}{example})"
    column = replace(_column(name, cells), role=REFUSED, why=rule)
    return Judged(column, None, detail)


def _numbers(name: str, cells: Any) -> Judged:
    values = cells.to_numpy()
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        great = np.flatnonzero((values > _EXACT) | (values < -_EXACT))
        if len(great):
            return _fault(name, cells, _EXACT_RULE, great, str(values[great[0]]))
    if values.dtype.kind != "f":
        return Judged(_column(name, cells), values)
    with np.errstate(over="ignore"):
        bad = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
    if len(bad):
        return _fault(name, cells, _FINITE_RULE, bad, str(values[bad[0]]))
    return Judged(_column(name, cells), values)


def _texts(name: str, cells: Any) -> Judged:
    texts = cells.to_numpy(object)
    numeric = {text: number(text) is not None for text in dict.fromkeys(texts)}
    others = np.flatnonzero([not numeric[text] for text in texts])
    if len(others) == 0:
        return _spelled_numbers(name, cells, texts)
    odd = list(dict.fromkeys(texts[others]))
    if all(_DECIMAL_COMMA.fullmatch(text) for text in odd):
        return _fault(name, cells, _COMMA_RULE, others, texts[others[0]])
    if all(_DATE.fullmatch(text) for text in odd):
        return _fault(name, cells, _DATE_RULE, others, texts[others[0]])
    if all(_WITH_UNIT.fullmatch(text) for text in odd):
        return _fault(name, cells, _PLAIN_RULE, others, texts[others[0]])
    if len(others) < len(texts):
        fewer = others
        if len(others) > len(texts) / 2:
            fewer = np.flatnonzero([numeric[text] for text in texts])
        return _fault(name, cells, _MIXED_RULE, fewer, texts[fewer[0]])
    return _one_hot(name, cells)


def _spelled_numbers(name: str, cells: Any, texts: npt.NDArray[np.object_]) -> Judged:
    """Numbers that pandas left as text: too long, or too large."""
    import pandas as pd

    if all(re.fullmatch(r"[+-]?\d+", text) for text in texts):
        great = np.flatnonzero([abs(int(text)) > _EXACT for text in texts])
        if len(great):
            return _fault(name, cells, _EXACT_RULE, great, texts[great[0]])
    return _numbers(name, pd.Series(texts.astype(np.float64)))


def _one_hot(name: str, cells: Any, categories: Sequence[str] | None = None) -> Judged:
    found = sorted(cells.unique()) if categories is None else categories
    column = Column(name, FEATURE, NAMES, "", tuple(found), 0, int(cells.nunique()))
    if categories is None and len(found) > MAX_CATEGORIES:
        refused = replace(column, role=REFUSED, why=_CATEGORIES_RULE, categories=())
        return Judged(refused, None, f"{name} ({len(found)})")
    texts = cells.to_numpy(object)
    return Judged(column, texts[:, None] == np.array(found, object)[None, :])


def encode_as(column: Column, cells: Any) -> Judged:
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


def matrix(judged: Sequence[Judged]) -> npt.NDArray[Any]:
    """Return the features as rows, shape (n, n_features)."""
    found = [item.values for item in judged if item.values is not None]
    width = sum(1 if values.ndim == 1 else values.shape[1] for values in found)
    rows = np.empty((len(found[0]), width), row_dtype([item.column for item in judged]))
    at = 0
    for values in found:
        size = 1 if values.ndim == 1 else values.shape[1]
        rows[:, at : at + size] = values.reshape(len(rows), size)
        at += size
    return rows


def feature_problems(what: str, judged: Sequence[Judged]) -> Iterator[Problem]:
    """Yield each broken rule once, with all columns that break it."""
    if all(item.column.role == LEFT_OUT for item in judged):
        left = (f"{_label(item.column.name)}: {item.column.why}" for item in judged)
        yield Problem(
            f"{what} must hold a feature besides the target",
            "; ".join(left) or "none",
            "Pass --keep COLUMN if it is a feature.",
        )
    for rule, remedy in _REMEDIES.items():
        found = [item.detail for item in judged if item.column.why == rule]
        more = f" and {len(found) - _NAMED_COLUMNS} more" if len(found) > _NAMED_COLUMNS else ""
        if found:
            yield Problem(rule, ", ".join(found[:_NAMED_COLUMNS]) + more, remedy)


def column_notes(
    judged: Sequence[Judged], targets: npt.NDArray[np.int64] | None = None
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
    for kind, (taken, remedy) in _SPELLINGS.items():
        spelled = [
            f"{_label(item.column.name)} such as {item.spelled[1]}, read as "
            f"{float(item.spelled[1]):g}"
            for item in judged
            if item.spelled and item.spelled[0] == kind and item.values is not None
        ]
        if spelled:
            more = f" and {len(spelled) - _NAMED_COLUMNS} more" if spelled[_NAMED_COLUMNS:] else ""
            yield f"{taken}: {', '.join(spelled[:_NAMED_COLUMNS])}{more}; {remedy}"
    for item in judged:
        if targets is not None and item.values is not None and _tells(item, targets):
            yield (
                f"{_label(item.column.name)} tells the class: each class has one value of its own; "
                f"if it follows from the class, pass --drop {flag_word(item.column.name)}"
            )
        elif item.values is not None and item.values.ndim == 1 and _rises(item.values):
            yield (
                f"{_label(item.column.name)} rises from row to row, as row numbers do; if that is "
                f"no feature, pass --drop {flag_word(item.column.name)}"
            )


def _label(name: str) -> str:
    return name if re.fullmatch(r"column \d+", name) else f"column {name!r}"


def flag_word(name: str) -> str:
    """Spell a column for a flag: by position where it has no name."""
    nameless = re.fullmatch(r"column (\d+)", name)
    if nameless:
        return nameless[1]
    return shlex.quote(f'"{name}"' if "," in name else name)


def _tells(item: Judged, targets: npt.NDArray[np.int64]) -> bool:
    """Whether values and classes partition the samples alike."""
    classes = int(targets.max(initial=0)) + 1
    if item.values is None or item.column.different != classes or classes < 2:
        return False
    values = item.values if item.values.ndim == 1 else item.values.argmax(axis=1)
    # With few samples to a class, that would be found by chance.
    pairs = np.unique(np.stack([values.astype(np.float64), targets.astype(np.float64)]), axis=1)
    return pairs.shape[1] == classes and len(targets) >= 10 * classes


def _rises(values: npt.NDArray[Any]) -> bool:
    return (
        values.dtype.kind == "f" and len(values) >= _FEW_ROWS and bool((np.diff(values) > 0).all())
    )
