"""Held-out predictions of the best candidate against the true numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.criteria import TRANSFORMED
from asynckfold.jobs.objective import REGRESSION, predicted
from asynckfold.jobs.result import DONE
from asynckfold.results.outcome import Outcome
from asynckfold.results.report.sanitize import clean

POINTS = 400


@dataclass(frozen=True)
class Predictions:
    """True and predicted numbers of at most `POINTS` held-out samples, evenly chosen."""

    candidate: str
    true: tuple[float, ...]
    predicted: tuple[float, ...]
    total: int  # predictions of finite numbers


def predictions(found: Outcome, targets: npt.NDArray[Any]) -> Predictions | None:
    """Return the predictions of the best candidate; None unless it predicts one number a sample."""
    if not found.has_best or targets.size != len(targets):
        return None
    best = found.candidates[found.best_index_]
    objective = found.plan.objective_of(best.model)
    if objective.kind != REGRESSION or objective.scale == TRANSFORMED:
        return None
    valid = {fold.key: fold.valid for fold in found.folds}
    pairs = []
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        if job.candidate != best.name or result is None or result.status != DONE:
            continue
        truth = targets[valid[job.repeat, job.fold]].reshape(-1)
        if result.outputs is None or result.outputs.size != len(truth):
            return None
        guess = predicted(objective, result.outputs).reshape(-1)
        pairs.append(np.stack([truth, guess]).astype(np.float64))
    table = np.concatenate(pairs, axis=1)
    table = table[:, np.isfinite(table).all(axis=0)]
    count = table.shape[1]
    places = np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int))
    true, guess = table[:, places].tolist()
    return Predictions(clean(best.name), tuple(true), tuple(guess), count) if count else None
