"""Held-out predictions of the best candidate against the true numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.criteria import TRANSFORMED, UNKNOWN
from asynckfold.jobs.objective import REGRESSION, Objective, predicted
from asynckfold.jobs.result import DONE, Result
from asynckfold.results.outcome import Outcome
from asynckfold.results.report.sanitize import clean

POINTS = 400

Targets = npt.NDArray[Any]


@dataclass(frozen=True)
class Predictions:
    """True and predicted numbers of at most `POINTS` held-out samples, evenly chosen."""

    candidate: str
    true: tuple[float, ...]
    predicted: tuple[float, ...]
    total: int  # predictions of finite numbers


def predictions(found: Outcome, targets: Targets) -> Predictions | None:
    """Return the predictions of the best candidate; None unless it predicts one number a sample."""
    if not found.has_best or targets.size != len(targets):
        return None
    best = found.candidates[found.best_index_]
    valid = {fold.key: fold.valid for fold in found.folds}
    pairs = []
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        if job.candidate != best.name or result is None or result.status != DONE:
            continue
        truth = targets[valid[job.repeat, job.fold]]
        pair = predicted_numbers(found.plan.objective_of(best.model), result, truth)
        if pair is None:
            return None
        pairs.append(pair)
    table = np.concatenate(pairs, axis=1)
    table = table[:, np.isfinite(table).all(axis=0)]
    count = table.shape[1]
    places = np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int))
    true, guess = table[:, places].tolist()
    return Predictions(clean(best.name), tuple(true), tuple(guess), count) if count else None


def predicted_numbers(
    objective: Objective, result: Result, truth: Targets
) -> npt.NDArray[np.float64] | None:
    """Return true and predicted numbers of a job, shape (2, n).

    None unless it predicts one number a sample, and without the user's `output_transform`.
    """
    if objective.kind != REGRESSION or objective.scale in (TRANSFORMED, UNKNOWN):
        return None
    if objective.is_of_trees:
        return None
    if result.outputs is None or result.outputs.size != truth.size:
        return None
    guess = predicted(objective, result.outputs)
    return np.stack([truth.reshape(-1), guess.reshape(-1)]).astype(np.float64)
