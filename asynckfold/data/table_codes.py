"""A pandas table with columns of any type, as rows of numbers that workers share, and back.

::

    DataFrame ── coded ──► rows (n, n_columns) in float64  +  TableCodes: types, and values by code
    DataFrame ◄─ TableCodes.table ──┘

A column of numbers that float64 holds exactly stays as it is. Of any other one (text, categories,
dates, missing values of nullable types) a row holds the code of its value, so that `preprocess`
gets each value again, in its type, under the name of its column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asynckfold.data.transforms.trees import Array
from asynckfold.errors import InputError, Problem, nearest, refuse

_EXACT = 2**53
_KINDS = {"M": "dates", "m": "durations", **dict.fromkeys("biuf", "numbers")}


@dataclass(frozen=True, eq=False)
class TableCodes:
    """Names and types of a table's columns, and the values that codes stand for."""

    columns: Any  # Index of pandas
    dtypes: tuple[Any, ...]
    values: tuple[Any, ...]  # by column: a Series with the value of each code; None for numbers

    @property
    def digest(self) -> bytes:
        """Digest of names, types and values."""
        parts = [(name, str(dtype)) for name, dtype in zip(self.columns, self.dtypes, strict=True)]
        digest = hashlib.sha256(repr(parts).encode())
        for values in self.values:
            categories = getattr(getattr(values, "dtype", None), "categories", ())
            held = () if values is None else values.tolist()
            digest.update(repr(([*held], [*categories])).encode())
        return digest.digest()

    def table(self, rows: Array) -> Any:
        """Return the table of some rows (n, n_columns), in the types of its columns."""
        import pandas as pd

        parts = {
            at: rows[:, at].astype(dtype)
            if values is None
            else values.array.take(rows[:, at].astype(np.int64))
            for at, (dtype, values) in enumerate(zip(self.dtypes, self.values, strict=True))
        }
        table = pd.DataFrame(parts)
        table.columns = self.columns
        return table


def kinds_of(dtypes: Sequence[Any]) -> tuple[str, ...]:
    """Return what columns of these types hold: numbers, dates, durations, or names.

    >>> kinds_of([np.dtype("float32"), np.dtype("datetime64[ns]"), np.dtype(object)])
    ('numbers', 'dates', 'names')
    """
    return tuple(_KINDS.get(dtype.kind, "names") for dtype in dtypes)


def coded(table: Any) -> tuple[TableCodes, Array]:
    """Return a table as rows of numbers, and what turns them back into it.

    Raises `InputError` where two columns share a name, or values are lists and the like.
    """
    names = list(table.columns)
    if twice := sorted({str(name) for name in names if names.count(name) > 1}):
        rule, received = "the columns of X must have different names", ", ".join(twice[:5])
        raise InputError.one(rule, f"{received} more than once", "Rename them.")
    rows, every = np.empty(table.shape, np.float64), list[Any]()
    for at, name in enumerate(names):
        column, values = table.iloc[:, at], None
        if _is_exact(column):
            rows[:, at] = column.to_numpy()
        else:
            rows[:, at], firsts = _codes(name, column)
            values = column.iloc[firsts].reset_index(drop=True)
        every.append(values)
    return TableCodes(table.columns, tuple(table.dtypes), tuple(every)), rows


def _is_exact(column: Any) -> bool:
    """Whether float64 holds all numbers of a column."""
    dtype = column.dtype
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf" or dtype.itemsize > 8:
        return False
    is_large = dtype.kind in "iu" and dtype.itemsize == 8 and len(column)
    return not is_large or bool(column.min() >= -_EXACT and column.max() <= _EXACT)


def _codes(name: Any, column: Any) -> tuple[Array, Array]:
    """Return the code of each value, and where each value stands first."""
    import pandas as pd

    if column.dtype != object:
        codes, _ = pd.factorize(column, use_na_sentinel=False)
        return codes, np.unique(codes, return_index=True)[1]
    # pandas takes 1, 1.0 and True for one value, and all that is missing, too.
    seen: dict[Any, int] = {}
    # Each NaN is another object, which equals none.
    keys = ((type(item), None if item is not pd.NA and item != item else item) for item in column)
    try:
        codes = np.array([seen.setdefault(key, len(seen)) for key in keys])
    except TypeError as error:
        rule = "columns of X must hold numbers, text, dates or categories"
        raise InputError.one(rule, f"{name!r}: {error}", "Leave it out, or divide it.") from error
    return codes, np.unique(codes, return_index=True)[1]


def names_columns(preprocess: Any) -> bool:
    """Whether a transformer, or one that it holds, chooses columns of a table by name or type.

    >>> from sklearn.compose import make_column_transformer
    >>> names_columns(make_column_transformer(("drop", ["age"]))), names_columns(None)
    (True, False)
    """
    if not hasattr(preprocess, "get_params") or isinstance(preprocess, type):
        return False
    every = [preprocess, *preprocess.get_params().values()]
    chosen = [part[-1] for item in every for part in getattr(item, "transformers", None) or ()]
    return any(map(_is_by_name, chosen))


def _is_by_name(columns: Any) -> bool:
    if isinstance(columns, slice):
        columns = [columns.start, columns.stop]
    return callable(columns) or any(isinstance(item, str) for item in np.ravel(columns))


def with_columns(table: Any, columns: Sequence[Any], what: str) -> Any:
    """Return the columns of a table that have these names, in this order; others are left out.

    Raises `InputError` where one is missing, or there twice; `what` names the table.
    """
    there = list(table.columns)
    bad = [name for name in columns if there.count(name) != 1]
    if bad:
        received = f"{', '.join(map(repr, there[:20]))}, where {bad[0]!r} is "
        received += "missing" if bad[0] not in there else "there twice"
        remedy = f"Add it, or correct its name.{nearest(str(bad[0]), map(str, there))}"
        raise InputError.one(f"{what} must have the columns of the data set", received, remedy)
    return table if there == list(columns) else table[list(columns)]


def table_like(inputs: Any, columns: Sequence[Any], kinds: Sequence[str]) -> Any:
    """Return samples as a table with these columns; raise `InputError` where they are none."""
    table = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 2 else inputs
    if not hasattr(table, "iloc") or not hasattr(table, "columns"):
        rule = "inputs must be a DataFrame with the columns of the data set"
        shown = ", ".join(map(repr, columns[:20]))
        raise InputError.one(rule, type(table).__name__, f"Its columns are {shown}.")
    table = with_columns(table, columns, "inputs")
    refuse(
        Problem(
            f"column {name!r} of inputs must hold {kind}, as in the data set",
            f"{other} ({dtype})",
            "Convert it, or correct its cells.",
        )
        for name, kind, other, dtype in zip(
            columns, kinds, kinds_of(table.dtypes), table.dtypes, strict=True
        )
        if kind != other
    )
    if not len(table):
        raise InputError.one("inputs must hold a sample", "none", "Pass a row or more.")
    return table
