"""Estimators of scikit-learn beside the candidates of a run, on the same folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckfold.jobs.folds import Fold
from asynckfold.results.candidates import Candidate, rank
from asynckfold.results.statistics import (
    Difference,
    Pairs,
    largest_difference,
    paired_differences,
    train_valid_ratio,
)
from asynckfold.results.verdict import VerdictText

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class EstimatorComparison:
    """Candidates of a run and estimators of scikit-learn, fitted and scored on the same folds.

    ``print`` shows the table and, for each estimator, the difference to the best candidate.

    Attributes
    ----------
    metric : str
        The score that ranks: the run's first.
    differences : tuple of Difference
        Each candidate against each estimator, fold by fold, by the test of `CVResults.compare`;
        p is corrected by Holm's method over all of them, so that it stays valid for the best
        candidate, which is chosen by its scores on these folds.
    errors : dict of str to str
        What failed, by estimator: its first failed fold and why.
    """

    metric: str
    candidates: Sequence[Candidate] = field(repr=False)
    estimators: Sequence[Candidate] = field(repr=False)
    folds: Sequence[Fold] = field(repr=False)
    errors: Mapping[str, str]

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Each candidate against each estimator."""
        rows = [*self.candidates, *self.estimators]
        scores = np.array([row.scores[self.metric] for row in rows])
        largest = largest_difference(self.metric, scores)
        # Unique, also where an estimator has the name of a candidate.
        places = [str(place) for place in range(len(rows))]
        count = len(self.candidates)
        columns = paired_differences(places, scores, self.folds, largest)
        first, second = columns["first"].astype(int), columns["second"].astype(int)
        mixed = (first < count) != (second < count)
        return tuple(
            replace(item, first=rows[int(item.first)].name, second=rows[int(item.second)].name)
            for item in Pairs({name: each[mixed] for name, each in columns.items()})
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas table: candidates and estimators, best first.

        Returns
        -------
        pandas.DataFrame
            ``kind`` is "candidate" or "estimator"; mean and standard deviation of each score over
            the folds, ``ci_low`` and ``ci_high`` of the first, seconds of fitting all folds, and
            ``folds_done`` of ``folds``.
        """
        import pandas as pd

        rows, ratio = [], train_valid_ratio(self.folds)
        for kind, items in (("candidate", self.candidates), ("estimator", self.estimators)):
            for item in items:
                row: dict[str, Any] = {"kind": kind, "name": item.name}
                for name in item.scores:
                    row |= {f"mean_{name}": item.mean(name), f"std_{name}": item.std(name)}
                row["ci_low"], row["ci_high"] = item.interval(self.metric, ratio)
                row["fit_seconds"] = float(np.nansum(item.fit_seconds))
                rows.append({**row, "folds_done": item.done, "folds": item.planned})
        frame: pd.DataFrame = pd.DataFrame(rows)
        column = f"mean_{self.metric}"
        return frame.sort_values(column, ascending=False, kind="stable", ignore_index=True)

    def compare(self) -> pd.DataFrame:
        """Return `differences` as a pandas table, with the columns of `CVResults.compare`."""
        import pandas as pd

        columns = [item.name for item in fields(Difference)]
        frame: pd.DataFrame = pd.DataFrame(map(vars, self.differences), columns=columns)
        return frame

    def __str__(self) -> str:
        shown = self.to_frame()[["kind", "name", f"mean_{self.metric}", f"std_{self.metric}"]]
        lines = [shown.to_string(index=False, float_format="{:.4f}".format)]
        ready = [row for row in self.candidates if row.ranks_by(self.metric)]
        if ready:
            best = ready[int(np.argmin(rank(ready, self.metric)))].name
            pairs = [item for item in self.differences if best in (item.first, item.second)]
            scores = np.array([row.scores[self.metric] for row in self.candidates])
            in_points = largest_difference(self.metric, scores) == 1
            repeats = len({fold.repeat for fold in self.folds})
            text = VerdictText(self.metric, in_points, len(self.folds), repeats)
            lines += [f"{text.of_pair(pair)}." for pair in pairs]
        lines += [f"{name}: {text}" for name, text in self.errors.items()]
        return "\n".join(lines)
