"""Apply a scikit-learn transformer: fitted on what a job trains on, applied to all samples.

::

    dataset ─ eval view ──┬─ fit on `Fold.fitted` ───────► transformer
                          └─ transform ───────────────────► for evaluation, in float32
    dataset ─ train view ─── transform, batch by batch ───► for training, in float32
              (if it has further transforms, as random ones)

`preprocess` is the last step before the model, after the transforms of the view. It is fitted on
the eval view, in the type of the data; only its output is converted to float32. If both views are
the same, training samples are the output of ``fit_transform``, as in a scikit-learn pipeline;
cross-fitting transformers give others from ``transform``.

A table of pandas whose columns are not all numbers is shared as rows of numbers, see `TableCodes`;
the transformer gets the table again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from asynckfold.data.arrays import NOT_FINITE, is_table, rounded
from asynckfold.data.batches import Batches
from asynckfold.data.table_codes import TableCodes
from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.data.transforms.trees import Array
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.folds import Indices

ALIKE = 1e-2
"""Largest difference between ``fit_transform`` and ``transform`` of the same samples, relative to
the size of a column: solvers round by some 1e-6, cross-fitting changes values by some tenths."""


def fit_transform(
    data: Batches, preprocess: Any, train: Indices, tell: Callable[[str], None] | None = None
) -> Batches:
    """Return the data transformed by a clone of a scikit-learn transformer, fitted on `train` only.

    The transformer sees one row of features per sample, and the targets. `tell` receives remarks on
    the output (rounded or non-finite numbers), "" for none.

    Raises
    ------
    InputError
        The output is not one row of numbers per sample; or ``fit_transform`` and ``transform``
        differ on training samples while the train view has further transforms.
    """
    if preprocess is None:
        return data
    rows = data.inputs(np.arange(data.n_samples))
    fit, fitted_rows = _fitted(preprocess, rows, data.targets, train, data.codes)
    alike = data.one_view
    if alike:
        others = np.setdiff1d(np.arange(data.n_samples), train)
        rest = _changed(fit, rows[others]) if others.size else fitted_rows[:0]
        changed = np.empty((len(rows), *fitted_rows.shape[1:]), np.result_type(fitted_rows, rest))
        changed[train], changed[others] = fitted_rows, rest
    else:
        changed = _changed(fit, rows)
        refuse(_difference_problems(preprocess, fitted_rows, changed[train]))
    if tell is not None:
        tell(rounded(changed, "what preprocess gives"))
        bad = int((~np.isfinite(changed).reshape(len(changed), -1).all(axis=1)).sum())
        tell(f"{bad} of {len(changed)} samples {NOT_FINITE} after preprocess" if bad else "")
    return data.with_inputs(_narrow(changed), None if alike else partial(transform, fit))


@dataclass(frozen=True, eq=False)
class FittedOnTable:
    """A fitted transformer of tables, which takes them, or their rows, see `TableCodes`."""

    fitted: Any
    codes: TableCodes

    def transform(self, rows: Any) -> Any:
        """Return what the transformer makes of a table, or of the table of some rows."""
        return self.fitted.transform(rows if is_table(rows) else self.codes.table(rows))


def fit_on(
    preprocess: Any,
    rows: Array,
    targets: torch.Tensor,
    train: Indices,
    codes: TableCodes | None = None,
) -> Any:
    """Return a clone of a scikit-learn transformer, fitted on the rows `train` only."""
    return _fitted(preprocess, rows, targets, train, codes)[0]


def transform(fit: Any, rows: Any) -> torch.Tensor:
    """Transform rows, or a table, and return them in float32."""
    return _narrow(_changed(fit, rows))


def _fitted(
    preprocess: Any, rows: Array, targets: torch.Tensor, train: Indices, codes: TableCodes | None
) -> tuple[Any, Array]:
    """Return a fitted clone, and its output for the training rows."""
    from sklearn.base import clone

    fit, inputs = clone(preprocess), rows.reshape(len(rows), -1)[train]
    if codes is not None:
        inputs = codes.table(inputs)
    wanted = targets.cpu().numpy()[train]
    if wanted.shape[1:] == (1,):
        wanted = wanted[:, 0]  # transformers of scikit-learn warn of one column
    # Without a random_state, a transformer draws from the global generators.
    with seeded(0):
        if hasattr(fit, "fit_transform"):
            output = fit.fit_transform(inputs, wanted)
        else:
            output = fit.fit(inputs, wanted).transform(inputs)
    dense = _dense(fit, output, len(inputs))
    return fit if codes is None else FittedOnTable(fit, codes), dense


def _changed(fit: Any, rows: Any) -> Array:
    flat = rows if is_table(rows) else rows.reshape(len(rows), -1)
    with seeded(0):
        return _dense(fit, fit.transform(flat), len(rows))


def _dense(fit: Any, output: Any, count: int) -> Array:
    """Return a transformer's output as a dense array of real numbers."""
    array = np.asarray(output.toarray() if hasattr(output, "toarray") else output)
    if array.dtype == object:
        with suppress(TypeError, ValueError):
            array = array.astype(np.float64)
    if array.dtype.kind not in "biuf" or array.shape[:1] != (count,):
        name = type(getattr(fit, "fitted", fit)).__name__
        received = f"{array.dtype} of shape {array.shape} for {count} samples, from {name}"
        remedy = "Use transformers that return numbers, and as many rows as samples."
        raise InputError.one("preprocess must give real numbers for each sample", received, remedy)
    return array


def _narrow(array: Array) -> torch.Tensor:
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _difference_problems(preprocess: Any, fitted_rows: Array, later: Array) -> list[Problem]:
    if fitted_rows.shape == later.shape:
        sizes = np.abs(np.where(np.isfinite(later), later, 0)).max(axis=0, initial=0.0)
        # Nearly empty columns, as the last ones of a PCA, hold only rounding errors.
        near = ALIKE * np.maximum(sizes, 1e-6 * sizes.max(initial=0.0))
        with np.errstate(invalid="ignore"):
            apart = np.abs(fitted_rows.astype(np.float64) - later) > near
        if not apart.any() and np.array_equal(np.isnan(fitted_rows), np.isnan(later)):
            return []
    return [
        Problem(
            "with a train_transform, or random transforms in the dataset, preprocess must return "
            "the same from transform as from fit_transform",
            f"{type(preprocess).__name__}, which returns something else for training samples",
            "Leave out the transforms of the train view, or preprocess.",
        )
    ]
