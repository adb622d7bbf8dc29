"""Targets transformed by scikit-learn: fitted on what a job trains on, and back in its outputs.

::

    targets ─┬─ fit on `Fold.fitted` ──► transformer
             └─ transform ─────────────► criterion, steps, sampler, losses
    outputs ─── inverse_transform ─────► scores, predictions, out-of-fold outputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asynckfold.data.batches import Batches
from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.data.transforms.trees import Array
from asynckfold.errors import InputError
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.recipe import STANDARDIZE, Recipe
from asynckfold.training.preprocessing import fit_transform

NEAR = 1e-3
"""Largest difference of targets and what comes back, as a share of their range."""


@dataclass(frozen=True, eq=False)
class FittedTargets:
    """A transformer that was fitted on targets."""

    fitted: Any

    def transform(self, targets: torch.Tensor) -> torch.Tensor:
        """Return transformed targets (n, ...), in float32."""
        return torch.from_numpy(self._applied("transform", targets.cpu().numpy()))

    def inverse(self, outputs: Array) -> Array:
        """Return outputs (n, ...) in the units of the targets; those that are not finite stay."""
        return self._applied("inverse_transform", outputs)

    def _applied(self, method: str, values: Array) -> Array:
        rows = values.reshape(len(values), -1).astype(np.float64)
        finite = np.isfinite(rows).all(axis=1)
        if finite.any():
            with seeded(0):
                rows[finite] = np.asarray(getattr(self.fitted, method)(rows[finite]))
        return rows.astype(np.float32).reshape(values.shape)


def fit_targets(transform: Any, targets: torch.Tensor, train: Indices) -> FittedTargets:
    """Return a clone of a transformer, fitted on the targets of `train` only.

    Raises `InputError` where the inverse does not give these targets back.
    """
    from sklearn.base import clone
    from sklearn.preprocessing import StandardScaler

    fit = StandardScaler() if isinstance(transform, str) else clone(transform)
    some = targets.cpu()[torch.as_tensor(train)]
    rows = some.reshape(len(some), -1).double().numpy()
    with seeded(0):
        fit.fit(rows)
    made = FittedTargets(fit)
    again = made.inverse(made.transform(some).numpy()).reshape(rows.shape)
    known, apart = rows[np.isfinite(rows)], np.abs(again - rows)[np.isfinite(rows)]
    worst = float(apart.max(initial=0.0))
    spread = float(known.max(initial=-np.inf) - known.min(initial=np.inf))
    if not worst <= max(NEAR * spread, 1e-6 * float(np.abs(known).max(initial=0.0))):
        raise InputError.one(
            "inverse_transform of target_transform must give the targets back",
            f"{type(fit).__name__}, whose targets come back up to {worst:.3g} apart",
            f"Use another, or target_transform={STANDARDIZE!r}.",
        )
    return made


def seen_by(
    data: Batches, recipe: Recipe, train: Indices, tell: Callable[[str], None] | None = None
) -> Batches:
    """Return the data as a job sees it that trains on `train`: preprocessed, targets transformed.

    `tell` receives remarks, see `fit_transform`.
    """
    seen = fit_transform(data, recipe.preprocess, train, tell)
    if recipe.target_transform is None:
        return seen
    fit = fit_targets(recipe.target_transform, data.targets, train)
    return seen.with_targets(fit.transform(data.targets), fit.inverse)


def in_units(
    data: Batches, indices: Indices, batches: Iterator[tuple[torch.Tensor, Any]]
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield targets and outputs of batches of some samples in the units of the data set."""
    low, inverse = 0, data.inverse
    for targets, outputs in batches:
        if inverse is None:
            yield targets, outputs
            continue
        rows, low = indices[low : low + len(targets)], low + len(targets)
        yield data.targets_in_units[rows], torch.from_numpy(inverse(outputs.float().cpu().numpy()))
