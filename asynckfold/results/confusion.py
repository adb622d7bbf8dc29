"""Confusion matrices over the held-out samples of all finished folds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.criteria import TRANSFORMED, UNKNOWN
from asynckfold.jobs.objective import BINARY, MULTICLASS, Objective, predicted
from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import DONE
from asynckfold.results.outcome import Outcome

Counts = npt.NDArray[np.int64]
Targets = npt.NDArray[Any]


def finished(outcome: Outcome) -> Iterator[tuple[Job, Targets, Counts]]:
    """Yield the jobs that kept outputs: job, outputs, and the held-out samples by index."""
    valid = {fold.key: fold.valid for fold in outcome.folds}
    for job in outcome.plan.jobs:
        result = outcome.results.get(job.id)
        if result is not None and result.status == DONE and result.outputs is not None:
            yield job, result.outputs, valid[job.repeat, job.fold]


def count_classes(outcome: Outcome, targets: Targets) -> dict[str, Counts]:
    """Return a confusion matrix for each candidate that has outputs.

    A row per true class, a column per predicted class; all of one size: the classes, or the outputs
    of models that have more. Targets are those of training; only shapes (n_samples,) and
    (n_samples, 1) are counted.
    """
    if not has_one_class(outcome, targets):
        return {}
    parts: dict[str, list[Counts]] = {}
    for job, outputs, rows in finished(outcome):
        pairs = guesses(outcome.plan.objective_of(job.model), outputs, targets[rows])
        if pairs is not None:
            parts.setdefault(job.candidate, []).append(pairs[1:])
    joined = {name: np.concatenate(pairs, axis=1) for name, pairs in parts.items()}
    known = [int(pairs.max()) + 1 for pairs in joined.values() if pairs.size]
    size = max(len(outcome.plan.classes), *known, 0)
    return {
        name: np.bincount(true * size + guess, minlength=size * size).reshape(size, size)
        for name, (true, guess) in joined.items()
    }


def has_one_class(outcome: Outcome, targets: Targets) -> bool:
    """Whether each sample has one class, in a shape that is counted."""
    is_column = targets.size == len(targets) and outcome.plan.objective_of("").kind == BINARY
    return bool(outcome.plan.classes) and (targets.ndim == 1 or is_column)


def guesses(objective: Objective, outputs: Targets, truth: Targets) -> Counts | None:
    """Return place in `truth`, true and predicted class of each held-out sample, shape (3, n).

    None if the outputs do not fit, and if only the user's `output_transform` could tell the class.
    """
    if objective.is_of_trees:
        return None
    columns = outputs[:1].size
    fits = outputs.ndim == 2 and columns > 1 if objective.kind == MULTICLASS else columns == 1
    if not fits or len(outputs) != len(truth):
        return None
    if objective.scale == TRANSFORMED or (objective.kind, objective.scale) == (BINARY, UNKNOWN):
        return None
    known = np.isfinite(outputs.reshape(len(outputs), -1)).all(axis=1)
    places = known.nonzero()[0]
    return np.stack([places, objective.codes(truth[known]), predicted(objective, outputs[known])])


def class_accuracy(confusion: Counts, n_classes: int) -> tuple[float, ...]:
    """Return the recall of each class; NaN for a class without samples.

    Examples
    --------
    >>> class_accuracy(np.array([[3, 1], [0, 2]]), 2)
    (0.75, 1.0)
    """
    with np.errstate(invalid="ignore"):
        shares = confusion.diagonal() / confusion.sum(axis=1)
    return tuple(shares[:n_classes].tolist())
