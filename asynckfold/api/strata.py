"""What folds are stratified by: classes, a given array, or quantiles of a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import InputError

if TYPE_CHECKING:
    from asynckfold.data.labels import Labels

QUANTILES = 10
"""Bins of ``stratify="quantile"``, or as many as the folds leave samples for."""

Strata = tuple[npt.NDArray[Any], tuple[str, ...]]


def strata_of(stratify: Any, labels: Labels, n_splits: int) -> Strata | None:
    """Return the stratum of each sample by number, and the names of strata; None without any.

    Raises
    ------
    InputError
        There is no such stratification of these targets.
    """
    if stratify is False or (stratify is True and labels.strata is None):
        return None
    if stratify is True:
        assert labels.strata is not None
        return labels.strata, labels.classes
    if isinstance(stratify, (str, int)):
        return _quantiles(stratify, labels, n_splits)
    found = np.asarray(stratify)
    count = len(labels.targets)
    missing = found.dtype.kind == "f" and not np.isfinite(found).all()
    if found.shape != (count,) or found.dtype.kind not in "biufUO" or missing:
        raise InputError.one(
            f"stratify must hold one label for each of the {count} samples",
            f"an array of {found.dtype} of shape {found.shape}" + ", with NaN" * missing,
            "Pass an array of that length, True, False, 'quantile', or a number of bins.",
        )
    if found.dtype.kind == "O":
        found = found.astype(str)
    names, codes = np.unique(found, return_inverse=True)
    return codes, tuple(map(str, names.tolist()))


def _quantiles(stratify: str | int, labels: Labels, n_splits: int) -> Strata:
    targets = labels.targets
    is_number = labels.objective.kind == "regression" and targets.size == len(targets)
    if not is_number or (stratify != "quantile" and not isinstance(stratify, int)):
        rule = "stratify by quantiles needs one number per sample as its target"
        received = f"stratify={stratify!r} and targets of shape {targets.shape}"
        remedy = "Pass stratify='quantile' or a number of bins for a regression, else an array."
        raise InputError.one(rule, received, remedy)
    bins = stratify if isinstance(stratify, int) else min(QUANTILES, len(targets) // n_splits)
    if bins < 2:
        rule = "stratify by quantiles needs at least 2 bins"
        raise InputError.one(rule, f"{bins} bins", "Pass more bins or fewer folds.")
    numbers = targets.reshape(-1)
    edges = np.unique(np.quantile(numbers, np.arange(1, bins) / bins))
    names, codes = np.unique(np.searchsorted(edges, numbers, "right"), return_inverse=True)
    return codes, tuple(f"quantile {name + 1}" for name in names.tolist())
