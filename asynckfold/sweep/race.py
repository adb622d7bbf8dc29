"""A race during a sweep: the scores so far, and the jobs that are not to be used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import CANCELLED, DONE
from asynckfold.scheduling.racing import left_out


class Race:
    """Decides which jobs of a sweep are left out.

    What it decides depends on the results of complete folds alone: a run that goes on takes them
    from its store, and decides the same.
    """

    def __init__(self, plan: Plan, folds: Sequence[Fold]) -> None:
        self._alpha, self._metric = plan.race, plan.scoring[0]
        self._sizes = [(len(fold.train), len(fold.valid)) for fold in folds]
        self._rows: dict[str, list[str]] = {}
        for job in plan.jobs:
            self._rows.setdefault(job.candidate, []).append(job.id)
        self._places = {
            name: (row, column)
            for row, names in enumerate(self._rows.values())
            for column, name in enumerate(names)
        }
        self._scores = np.full((len(self._rows), len(folds)), np.nan)
        self._alive = np.ones(len(self._rows), bool)
        self._out: set[str] = set()
        self._is_due = False  # whether a fold became complete

    def __contains__(self, job_id: object) -> bool:
        """Whether a job was left out."""
        return job_id in self._out

    def take(self, job_id: str, status: str, scores: Mapping[str, float]) -> None:
        """Note the result of a job, unless it was left out."""
        if status == CANCELLED:
            return
        score = scores.get(self._metric, math.nan) if status == DONE else math.nan
        row, column = self._places[job_id]
        self._scores[row, column] = -math.inf if math.isnan(score) else score
        self._is_due = self._is_due or not np.isnan(self._scores[self._alive, column]).any()

    def losers(self) -> Iterator[tuple[str, str]]:
        """Yield each job that is left out from now on, with the reason."""
        if self._alpha is None or not self._is_due:
            return
        self._is_due = False
        candidates = list(self._rows.values())
        for row, look in left_out(self._scores, self._sizes, self._alpha).items():
            self._alive[row] = False
            for name in candidates[row][look:]:
                if name not in self._out:
                    self._out.add(name)
                    yield name, f"left out after {look} of {len(self._sizes)} folds"
