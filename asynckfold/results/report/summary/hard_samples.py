"""The held-out samples that most candidates got wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.result import DONE
from asynckfold.results.confusion import guesses, has_one_class
from asynckfold.results.outcome import Outcome
from asynckfold.results.report.summary.predictions import Targets, predicted_numbers

SHOWN = 24


@dataclass(frozen=True)
class HardSample:
    """A sample, and what the candidates say of it; with repeats, each says it several times."""

    index: int  # in the dataset
    true: int | float  # class by its place, or number
    predicted: int | float  # most frequent wrong class, or the mean prediction
    wrong: int  # predictions of another class; 0 for numbers
    predictions: int
    error: float  # mean absolute error; NaN for classes


@dataclass(frozen=True)
class HardSamples:
    """At most `SHOWN` samples: those wrong in most predictions, or with the largest mean error."""

    of_classes: bool
    samples: tuple[HardSample, ...]
    wrong_by_most: int  # samples that more than half of their predictions got wrong
    total: int  # samples with predictions


Guesses = tuple[npt.NDArray[np.int64], Targets, Targets]
"""Samples by index, their truth, and what one job predicts."""


def hard_samples(found: Outcome, targets: Targets) -> HardSamples | None:
    """Return the hardest samples; None without predictions of one class or number a sample."""
    if has_one_class(found, targets):
        return _of_classes(list(_classes(found, targets)), found.n_samples)
    if targets.size != len(targets):
        return None
    return _of_numbers(list(_numbers(found, targets)), found.n_samples)


def _classes(found: Outcome, targets: Targets) -> Iterator[Guesses]:
    valid = {fold.key: fold.valid for fold in found.folds}
    for job in found.plan.jobs:
        rows = valid[job.repeat, job.fold]
        table = guesses(
            found.results.get(job.id), targets[rows], found.plan.objective_of(job.model)
        )
        if table is not None:
            places, true, guess = table
            yield rows[places], true, guess


def _of_classes(parts: Sequence[Guesses], count: int) -> HardSamples | None:
    seen, wrong = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for rows, true, guess in parts:
        np.add.at(seen, rows, 1)
        np.add.at(wrong, rows, true != guess)
    if not seen.any():
        return None
    by_most = np.flatnonzero(2 * wrong > seen)
    hardest = by_most[np.lexsort((by_most, seen[by_most], -wrong[by_most]))][:SHOWN]
    said: dict[int, Counter[int]] = {int(index): Counter() for index in hardest}
    truth: dict[int, int] = {}
    for rows, true, guess in parts:
        for place in np.flatnonzero(np.isin(rows, hardest)):
            index, truth[int(rows[place])] = int(rows[place]), int(true[place])
            if guess[place] != true[place]:
                said[index][int(guess[place])] += 1
    samples = tuple(
        HardSample(
            index,
            truth[index],
            guessed.most_common(1)[0][0],
            int(wrong[index]),
            int(seen[index]),
            float("nan"),
        )
        for index, guessed in said.items()
    )
    return HardSamples(True, samples, len(by_most), int((seen > 0).sum()))


def _numbers(found: Outcome, targets: Targets) -> Iterator[Guesses]:
    valid = {fold.key: fold.valid for fold in found.folds}
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        rows = valid[job.repeat, job.fold]
        if result is None or result.status != DONE:
            continue
        table = predicted_numbers(found.plan.objective_of(job.model), result, targets[rows])
        if table is not None:
            known = np.isfinite(table).all(axis=0)
            yield rows[known], table[0, known], table[1, known]


def _of_numbers(parts: Sequence[Guesses], count: int) -> HardSamples | None:
    seen = np.zeros(count, np.int64)
    truth, guessed, missed = np.zeros((3, count))
    for rows, true, guess in parts:
        np.add.at(seen, rows, 1)
        truth[rows] = true
        np.add.at(guessed, rows, guess)
        np.add.at(missed, rows, np.abs(true - guess))
    known = np.flatnonzero(seen)
    if not len(known):
        return None
    error, mean = missed[known] / seen[known], guessed[known] / seen[known]
    samples = tuple(
        HardSample(
            int(known[place]),
            float(truth[known[place]]),
            float(mean[place]),
            0,
            int(seen[known[place]]),
            float(error[place]),
        )
        for place in np.argsort(-error, kind="stable")[:SHOWN]
    )
    return HardSamples(False, samples, 0, len(known))
