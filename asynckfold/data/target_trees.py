"""Targets of several parts: a dict or tuple of arrays, or of what each sample has.

::

    (X, {"kind": (n,), "mass": (n,)})            ─┐
    (x, {"kind": 2, "mass": 0.5}) of each sample ─┼─► rows (n, width) ── Schema.split ──► criterion
    (x, {"boxes": (any, 4)}) of each sample      ─┘
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from asynckfold.data.arrays import by_position
from asynckfold.data.transforms import Array, TreeArrays
from asynckfold.errors import InputError
from asynckfold.jobs.schema import (
    Schema,
    UnfitTree,
    leaves_of,
    path_text,
    tree_of,
    with_arrays,
)

_RULE = "targets of several parts must be numbers, the same parts of each sample"


def targets_as_trees(targets: Any, samples: Any) -> Any:
    """Return a dict or tuple of arrays, one row a sample, as `TreeArrays`; else what is given.

    Raises `InputError` where the arrays are of different length.
    """
    # As many as the samples are one of each, and may be too many to be looked at.
    is_tuple = isinstance(targets, (tuple, list)) and 1 < len(targets) != _length(samples)
    if isinstance(targets, TreeArrays) or not (isinstance(targets, Mapping) or is_tuple):
        return targets
    leaves = [(path, by_position(leaf, f"y{path_text(path)}")) for path, leaf in _found(targets)]
    counts = {len(leaf) if np.ndim(leaf) else 0 for _, leaf in leaves if hasattr(leaf, "__array__")}
    is_arrays = bool(leaves) and all(hasattr(leaf, "__array__") for _, leaf in leaves)
    if is_tuple and not (is_arrays and counts == {_length(samples)}):
        return targets
    if not is_arrays or len(counts) != 1:
        shown = ", ".join(f"{path_text(path)} {_shape(leaf)}" for path, leaf in leaves[:4])
        raise InputError.one(
            "all parts of the targets must be arrays with a row for each sample",
            shown or "an empty dict",
            "Pass (X, {'name': array of shape (n, ...), ...}).",
        )
    return TreeArrays(tree_of(leaves))


def are_trees(values: Any) -> bool:
    """Whether targets have several parts; numbers in tuples of one length are rows, as always."""
    if isinstance(values, TreeArrays):
        return True
    if isinstance(values, (Tensor, np.ndarray)) or not len(values):
        return False
    first = values[0]
    if isinstance(first, Mapping):
        return True
    if not isinstance(first, tuple):
        return False
    return len({np.shape(part) for part in first}) > 1 or any(
        isinstance(part, (Mapping, tuple)) for part in first
    )


def rows_of(values: Any) -> tuple[Schema, Array]:
    """Return the columns of targets of several parts, and their rows (n, width), in float64.

    Raises `InputError` for targets that have no such rows.
    """
    try:
        if isinstance(values, TreeArrays):
            return Schema.of_arrays(values.tree)
        return Schema.of_samples(list(values))
    except UnfitTree as error:
        raise InputError.one(_RULE, *error.args) from error


def row_of(columns: Schema, target: Any, index: int, width: int) -> Array:
    """Return the row of one target; raise `InputError` where it is unlike those that were read."""
    try:
        row = columns.row(target)
    except UnfitTree as error:
        raise InputError.one(_RULE, f"dataset[{index}]: {error.args[0]}", error.args[1]) from error
    if len(row) > width:
        raise InputError.one(
            "a target must not become larger than the largest when all of them were read",
            f"dataset[{index}]: {len(row)} numbers, of {width}",
            "Let no transform add parts, such as boxes.",
        )
    return np.pad(row, (0, width - len(row)))


def _found(targets: Any) -> list[tuple[Any, Any]]:
    try:
        return list(leaves_of(with_arrays(targets) if isinstance(targets, Mapping) else targets))
    except UnfitTree as error:
        raise InputError.one("targets must be a dict of arrays by name", *error.args) from error


def _length(samples: Any) -> int:
    return len(samples) if hasattr(samples, "__len__") else -1


def _shape(leaf: Any) -> str:
    return str(np.shape(leaf)) if hasattr(leaf, "__array__") else type(leaf).__name__
