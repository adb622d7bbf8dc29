"""What folds are stratified by: classes, labels, a given array, or quantiles of a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import InputError
from asynckfold.jobs.objective import MULTILABEL

if TYPE_CHECKING:
    from asynckfold.data.labels import Labels
    from asynckfold.jobs.folds import Fold

QUANTILES = 10
"""Bins of ``stratify="quantile"``, or as many as the folds leave samples for."""

Strata = tuple[npt.NDArray[Any], tuple[str, ...]]


def strata_of(stratify: Any, labels: Labels, n_splits: int) -> Strata | None:
    """Return the stratum of each sample by number, and the names of strata; None without any.

    Where a sample has several labels, its row of 0 and 1 comes back, and no names.

    Raises
    ------
    InputError
        There is no such stratification of these targets.
    """
    if stratify is False:
        return None
    if stratify is True:
        if labels.objective.kind == MULTILABEL and labels.targets.ndim == 2:
            return labels.objective.codes(labels.targets), ()
        return None if labels.strata is None else (labels.strata, labels.classes)
    if isinstance(stratify, (str, int)):
        return _quantiles(stratify, labels, n_splits)
    strata = np.asarray(stratify)
    count = len(labels.targets)
    if strata.ndim == 2 and len(strata) == count and np.isin(strata, (0, 1)).all():
        return strata.astype(np.int64), ()
    missing = strata.dtype.kind == "f" and not np.isfinite(strata).all()
    if strata.shape != (count,) or strata.dtype.kind not in "biufUO" or missing:
        raise InputError.one(
            f"stratify must hold one label, or a row of 0 and 1, for each of the {count} samples",
            f"an array of {strata.dtype} of shape {strata.shape}" + ", with NaN" * missing,
            "Pass an array of that length, True, False, 'quantile', or a number of bins.",
        )
    if strata.dtype.kind == "O":
        strata = strata.astype(str)
    names, codes = np.unique(strata, return_inverse=True)
    return codes, tuple(map(str, names.tolist()))


def absent_note(labels: Labels, folds: Sequence[Fold]) -> str:
    """Return a note about labels that no held-out sample of a fold has; "" without any."""
    if labels.objective.kind != MULTILABEL or labels.targets.ndim != 2:
        return ""
    absent = [
        (label, fold)
        for fold in folds
        for label in np.flatnonzero(~(labels.targets[fold.valid] != 0).any(axis=0)).tolist()
    ]
    if not absent:
        return ""
    (label, fold), more = absent[0], len(absent) - 1
    where = f"fold {fold.index}" + f" of repeat {fold.repeat}" * bool(fold.repeat)
    others = f", and {more} more such {'pair' if more == 1 else 'pairs'}" * bool(more)
    return (
        f"{where} holds out no sample with label {label}{others}: there, scores that average over "
        "labels say little"
    )


def _quantiles(stratify: str | int, labels: Labels, n_splits: int) -> Strata:
    targets = labels.targets
    is_number = labels.objective.kind == "regression" and targets.size == len(targets)
    missing = not np.isfinite(targets).all()
    if not is_number or missing or (stratify != "quantile" and not isinstance(stratify, int)):
        rule = "stratify by quantiles needs one number per sample as its target"
        of = f"targets of shape {targets.shape}" + ", with NaN" * missing
        received = f"stratify={stratify!r} and {of}"
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
