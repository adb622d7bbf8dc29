"""Choices made on out-of-fold outputs, each scored on folds that had no part in it.

::

    held-out values ─┬─ all folds ──────────► the choice, such as weights of candidates
                     └─ samples outside k ──► a choice for fold k ──► its score on fold k

The choice of a fold never sees targets of that fold. The models whose outputs it sees were trained
on them, as in stacking (Wolpert 1992); only nested cross-validation separates these, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.criteria import MARGINS, PROBABILITIES, TRANSFORMED, UNKNOWN, VALUES
from asynckfold.jobs.folds import Fold, Indices
from asynckfold.jobs.objective import BINARY, REGRESSION, Objective, Transform, probabilities
from asynckfold.jobs.objective import predicted as numbers_of
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import Result
from asynckfold.results.batch_scores import accumulates
from asynckfold.results.candidates import done_jobs
from asynckfold.results.out_of_fold import kept_problems
from asynckfold.results.scoring import fit_problems, is_custom, named_scores, resolve

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Score = Callable[[Array, Any], float]
_Choice = TypeVar("_Choice")


@dataclass(frozen=True, eq=False)
class HeldOutFold:
    """What candidates say of the samples that a fold holds out."""

    samples: Indices
    targets: Array  # those of training
    values: Floats  # (candidates, samples, ...): probabilities, of one output the positive one's

    def without(self, samples: Indices) -> HeldOutFold:
        """Return the part that holds none of these samples."""
        kept = ~np.isin(self.samples, samples)
        return HeldOutFold(self.samples[kept], self.targets[kept], self.values[:, kept])


def held_out_folds(
    plan: Plan,
    folds: Sequence[Fold],
    results: Mapping[str, Result],
    names: Sequence[str],
    targets: Array,
    transform: Transform | None,
) -> tuple[Objective, list[HeldOutFold]]:
    """Return the objective of these values, and for each fold what the candidates say of it.

    Raises `InputError` if a job is not done, its outputs were not kept, or mean neither.
    """
    by_name = [done_jobs(plan, results, name) for name in names]
    kept = {job.id: results[job.id] for jobs in by_name for job in jobs}
    objectives = [plan.objective_of(jobs[0].model) for jobs in by_name]
    problems = [*kept_problems(kept), *_meaning_problems(names, objectives, transform)]
    refuse([*problems, *_weight_problems(plan)])
    objective, parts = objectives[0], []
    for fold in folds:
        jobs = [job for each in by_name for job in each if job.key == fold.key]
        each = [_values(objective, results[job.id].outputs, transform) for job in jobs]
        refuse(_value_problems([job.id for job in jobs], each))
        parts.append(HeldOutFold(fold.valid, targets[fold.valid], np.stack(each)))
    scale = VALUES if objective.kind == REGRESSION else PROBABILITIES
    return replace(objective, scale=scale, transform=""), parts


def _values(objective: Objective, outputs: Any, transform: Transform | None) -> Floats:
    if objective.kind == REGRESSION:
        return np.asarray(numbers_of(objective, outputs, transform), np.float64)
    shares = probabilities(objective, outputs, transform)
    return shares[:, 1:] if objective.kind == BINARY else shares


def _weight_problems(plan: Plan) -> Iterator[Problem]:
    if "sample_weight" in plan.recipe:
        rule = "what is chosen on held-out samples takes them to weigh the same"
        yield Problem(rule, "a run with sample_weight", "Compute on results.oof.")


def _meaning_problems(
    names: Sequence[str], objectives: Sequence[Objective], transform: Transform | None
) -> Iterator[Problem]:
    for name, objective in zip(names, objectives, strict=True):
        scale, remedy = objective.scale, "Make the run, or call it again, with output_transform=."
        if objective.is_of_trees or objective.is_dense:
            rule, received = "there must be one output a sample", f"{name}: several, or pixels"
            yield Problem(rule, received, "Compute on results.oof.")
        elif scale == UNKNOWN or (scale == MARGINS and objective.kind != REGRESSION):
            rule, received = "outputs must have known probabilities or numbers", f"{name}: {scale}"
            yield Problem(rule, received, remedy)
        elif scale == TRANSFORMED and transform is None:
            yield Problem("the run's folder does not hold its output_transform", name, remedy)
        elif objective != objectives[0]:
            rule = f"outputs must be of the scale of {names[0]}, {objectives[0].scale}"
            yield Problem(rule, f"{name}: {scale}", "Name candidates of one scale.")


def _value_problems(ids: Sequence[str], values: Sequence[Floats]) -> Iterator[Problem]:
    for name, each in zip(ids, values, strict=True):
        if not np.isfinite(each).all():
            yield Problem("outputs must be finite", f"NaN or inf of {name}", "Name others.")
        elif each.shape != values[0].shape:
            rule, received = f"{name} must have the outputs of {ids[0]}", f"shape {each.shape}"
            yield Problem(rule, received, "Name candidates of one shape.")


def cross_fitted(
    parts: Sequence[HeldOutFold],
    choose: Callable[[Sequence[HeldOutFold]], _Choice],
    score: Callable[[_Choice, HeldOutFold], Any],
) -> tuple[_Choice, list[Any]]:
    """Return the choice on all folds, and each fold's score by a choice on the other samples."""
    scores = []
    for part in parts:
        others = [other.without(part.samples) for other in parts]
        rest = [other for other in others if len(other.samples)]
        if not rest:
            rule, received = "what is chosen on folds is scored on others", "no sample outside one"
            refuse([Problem(rule, received, "Make the run with at least two folds.")])
        scores.append(score(choose(rest), part))
    return choose(parts), scores


# Blends


def blend_problems(names: Sequence[str], rounds: int) -> Iterator[Problem]:
    """Yield that there is nothing to blend."""
    if len(names) < 2:
        rule = "a blend needs two candidates with a score on every fold"
        received = ", ".join(names) or "none"
        yield Problem(rule, received, "Use results.ensemble(), or name candidates.")
    if rounds < 1:
        yield Problem("rounds must be at least 1", str(rounds), "Leave it out for 20.")


def score_of_values(scoring: Any, metric: str, objective: Objective) -> Score:
    """Return a score of the run, or of scikit-learn, as a function (targets, values) → float."""
    item = dict(named_scores(scoring, objective.kind)).get(metric, metric)
    if is_custom(item) and not accumulates(item):
        rule = "the metric must take probabilities or numbers, not outputs of a model"
        refuse([Problem(rule, metric, "Pass the name of a scikit-learn scorer as metric=.")])
    function = resolve({metric: item}, objective)[metric]
    refuse(fit_problems({metric: item}, objective, []))
    return function


def blended(
    names: Sequence[str], parts: Sequence[HeldOutFold], score: Score, rounds: int
) -> tuple[dict[str, float], Floats]:
    """Return the weights of those selected, and each fold's score by weights of the others."""

    counts, scores = cross_fitted(
        parts,
        lambda some: greedy_counts(some, score, rounds),
        lambda chosen, part: score(part.targets, np.average(part.values, axis=0, weights=chosen)),
    )
    shares = (counts / counts.sum()).tolist()
    weights = {name: share for name, share in zip(names, shares, strict=True) if share}
    return weights, np.array(scores)


def greedy_counts(parts: Sequence[HeldOutFold], score: Score, rounds: int) -> Indices:
    """Select candidates with replacement, each time the one whose addition scores best.

    Greedy ensemble selection of Caruana et al. (2004): the mean of those selected is scored on each
    fold. Returns how often each was selected up to the round with the best mean score.

    >>> low, high, far = [0.0, 1.0], [2.0, 3.0], [9.0, 9.0]
    >>> part = HeldOutFold(np.arange(2), np.array([1.0, 2.0]), np.array([low, high, far]))
    >>> greedy_counts([part], lambda true, mean: -np.abs(true - mean).max(), 4).tolist()
    [1, 1, 0]
    """
    counts = np.zeros(len(parts[0].values), np.int64)
    totals = [np.zeros(part.values.shape[1:]) for part in parts]
    best, selected = -math.inf, counts
    for size in range(1, rounds + 1):
        pairs = list(zip(parts, totals, strict=True))
        scores = [
            np.mean([score(p.targets, (total + p.values[place]) / size) for p, total in pairs])
            for place in range(len(counts))
        ]
        place = int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))
        counts[place] += 1
        totals = [total + part.values[place] for part, total in pairs]
        if size == 1 or scores[place] > best:
            best, selected = float(scores[place]), counts.copy()
    return selected
