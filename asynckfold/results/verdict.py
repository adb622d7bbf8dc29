"""`Verdict`: which model is better, then which LR schedule, and whether that may be chance.

One factor at a time: models by their mean over the LR schedules, then LR schedules by their mean
over the models that no other beats, of these the complete ones if there are any; fold by fold, see
`statistics.paired_differences`. The values of a grid belong to the models or the LR schedules that
take them. Where these are not crossed, as of random draws, a mean would compare other things as
well: then candidates are compared, as if each were a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asynckfold.jobs.candidate_names import values_of
from asynckfold.jobs.folds import Fold
from asynckfold.results.candidates import Candidate, rank
from asynckfold.results.factor import Factor, compare_levels
from asynckfold.results.statistics import Difference, largest_difference
from asynckfold.results.verdict_text import VerdictText
from asynckfold.system.plain_text import one_line


@dataclass(frozen=True)
class Verdict:
    """What a sweep says about its models and its LR schedules, by the first metric.

    ``str(verdict)`` gives the sentences. The p values are corrected by Holm's method over all pairs
    of both factors: the probability that any sentence wrongly says "beats" is at most 5 %, as far
    as the test holds. Nadeau and Bengio (2003) derived it for random divisions; for k-fold it is a
    heuristic.

    Parameters
    ----------
    metric : str
        Name of the score; greater is better.
    models : tuple of Difference
        Every pair of models, by their mean over the LR schedules.
    lr_schedules : tuple of Difference
        Every pair of LR schedules, by their mean over `best_models`, or those of them that have a
        score on every fold.
    best_models, best_lr_schedules : tuple of str
        Those that no other beats; several if the folds do not decide.
    best : str or None
        ``"LeNet5/cosine"`` if its model beats all others, and so does its LR schedule.
    sentences : tuple of str
        The verdict in words.
    """

    metric: str
    models: tuple[Difference, ...]
    lr_schedules: tuple[Difference, ...]
    best_models: tuple[str, ...]
    best_lr_schedules: tuple[str, ...]
    best: str | None
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.sentences)


def make_verdict(
    rows: Sequence[Candidate],
    metric: str,
    folds: Sequence[Fold],
    shown: Callable[[str], str] = str,
) -> Verdict:
    """Compare models, then LR schedules; `shown` makes names safe to show.

    Scores of `rows` are NaN where a fold has none.
    """
    rows = _crossed(rows)
    scores = np.array([row.scores[metric] for row in rows])
    in_points = largest_difference(metric, scores) == 1
    models, lr_schedules = (each.shown_by(shown) for each in _factors(rows, metric, folds))
    rows = [
        replace(row, model=shown(row.model), lr_schedule=shown(row.lr_schedule)) for row in rows
    ]
    pairs, best = models.pairs + lr_schedules.pairs, models.unbeaten + lr_schedules.unbeaten
    first = _sole_first(rows, metric)
    levels = (first.model, first.lr_schedule) if first else ()
    beaten = [
        level
        for level, factor in zip(levels, (models, lr_schedules), strict=False)
        if level in factor.beaten
    ]
    repeats = len({fold.repeat for fold in folds})
    text = VerdictText(metric, shown(metric), in_points, len(folds), repeats)
    sentences = text.of_sweep(models, lr_schedules, rows, first.name if first else "", beaten)
    return Verdict(
        text.name,
        models.pairs,
        lr_schedules.pairs,
        models.unbeaten,
        tuple(filter(None, lr_schedules.unbeaten)),
        first.name if first and pairs and best == levels else None,
        tuple(map(one_line, sentences)),
    )


def _crossed(rows: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return candidates of a grid whose models all have the same LR schedules."""
    if not any(values_of(row.model, row.lr_schedule) for row in rows):
        return rows
    models, lr_schedules = {row.model for row in rows}, {row.lr_schedule for row in rows}
    if len(rows) == len(models) * len(lr_schedules):
        return rows
    return [replace(row, model=row.name, lr_schedule="") for row in rows]


def _factors(
    rows: Sequence[Candidate], metric: str, folds: Sequence[Fold]
) -> tuple[Factor, Factor]:
    models = list(dict.fromkeys(row.model for row in rows))
    lr_schedules = list(dict.fromkeys(row.lr_schedule for row in rows))
    scores = np.full((len(models), len(lr_schedules), len(folds)), np.nan)
    for row in rows:
        scores[models.index(row.model), lr_schedules.index(row.lr_schedule)] = row.scores[metric]
    largest = largest_difference(metric, scores)
    undecided = math.comb(len(lr_schedules), 2)
    first = compare_levels(models, lr_schedules, scores, folds, largest, undecided)
    # One without all folds would take them from the comparison of the others, too.
    complete = {name for name, own in zip(models, scores, strict=True) if not np.isnan(own).any()}
    best = [name for name in first.unbeaten if name in complete] or first.unbeaten
    kept = scores[[models.index(name) for name in best]].swapaxes(0, 1)
    undecided = sum(pair.conclusion == "undecided" for pair in first.pairs)
    return first, compare_levels(lr_schedules, best, kept, folds, largest, undecided)


def _sole_first(rows: Sequence[Candidate], metric: str) -> Candidate | None:
    """Return the complete candidate with the highest mean; None without one, and of a tie."""
    first = [row for row, place in zip(rows, rank(rows, metric), strict=True) if place == 1]
    return first[0] if len(first) == 1 and first[0].ranks_by(metric) else None
