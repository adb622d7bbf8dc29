"""Compare two runs bit for bit, and find where they first differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asynckfold.errors import InputError
from asynckfold.jobs import reproducibility
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.reproducibility import Reproducibility
from asynckfold.jobs.result import Result, fingerprint
from asynckfold.results.candidates import Candidate, candidates, rank
from asynckfold.results.cv_results import CVResults
from asynckfold.results.statistics import (
    Difference,
    Pairs,
    compare_levels,
    largest_difference,
    paired_differences,
)
from asynckfold.results.verdict import VerdictText, listed
from asynckfold.store import RunReader
from asynckfold.system.plain_text import one_line


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common."""

    identical: bool  # both complete, with equal plans and results
    plan: str  # first difference of the plans; empty if they are equal
    results: str  # first difference of the results, in the order of the first run's plan
    equal_jobs: int
    jobs: int  # that either run plans
    fingerprints: tuple[str, str]
    software: tuple[str, ...]  # differences at the start that may change bits
    claims: tuple[Reproducibility, Reproducibility]  # of each run; the name is a JSON key


def compare_runs(first: RunReader, second: RunReader) -> Comparison:
    """Compare the weights, outputs and metrics of two runs, complete or not; no time, no place."""
    (one, mine), (other, theirs) = _uniform(first), _uniform(second)
    plan = one.first_difference(other) or ""
    software = first.software(), second.software()
    names = dict.fromkeys(job.id for each in (one, other) for job in each.jobs)
    differences = [
        difference
        for name in names
        if (difference := _difference(name, mine.get(name), theirs.get(name)))
    ]
    missing = any(name not in mine or name not in theirs for name in names)
    return Comparison(
        not plan and not differences and not missing,
        plan,
        differences[0] if differences else "",
        len(names) - len(differences) - sum(n not in mine and n not in theirs for n in names),
        len(names),
        (_fingerprint(mine), _fingerprint(theirs)),
        reproducibility.differences(*(next(iter(item), {}) for item in software)),
        (
            reproducibility.reproducibility_of(first.plan, software[0]),
            reproducibility.reproducibility_of(second.plan, software[1]),
        ),
    )


def _uniform(store: RunReader) -> tuple[Plan, dict[str, Result]]:
    """Return plan and results; where repeats were added, by the ids of a run that began so."""
    plan, results = store.plan, store.results()
    if len({job.repeated for job in plan.jobs}) == 1:
        return plan, results
    jobs = tuple(replace(job, repeated=True) for job in plan.jobs)
    ids = {old.id: new.id for old, new in zip(plan.jobs, jobs, strict=True)}
    plan = replace(
        plan,
        jobs=jobs,
        groups=tuple(tuple(map(ids.__getitem__, group)) for group in plan.groups),
        last_threads={ids[name]: count for name, count in plan.last_threads.items()},
    )
    return plan, {ids[name]: replace(item, job_id=ids[name]) for name, item in results.items()}


def _fingerprint(results: Mapping[str, Result]) -> str:
    return fingerprint({name: item.digest for name, item in results.items()})


def _difference(name: str, one: Result | None, other: Result | None) -> str:
    states = [item.status if item else "pending" for item in (one, other)]
    if states[0] != states[1]:
        return f"{name}: {states[0]} there, {states[1]} here"
    if one is None or other is None or one.digest == other.digest:
        return ""
    return f"{name}: {_epochs(one, other) or _ends(one, other)}"


def _epochs(one: Result, other: Result) -> str:
    if repr(one.pretraining) != repr(other.pretraining):
        return "other pretraining"
    for mine, theirs in zip(one.epochs, other.epochs, strict=False):
        for metric in ("lr", "train_loss", "valid_loss", "accuracy"):
            # Compared as text, in which NaN equals NaN.
            a, b = repr(getattr(mine, metric)), repr(getattr(theirs, metric))
            if a != b:
                return f"epoch {mine.number}, {metric} {a} there, {b} here"
    counts = len(one.epochs), len(other.epochs)
    return "" if counts[0] == counts[1] else "{} epochs there, {} here".format(*counts)


def _ends(one: Result, other: Result) -> str:
    if one.weights != other.weights:
        return "other weights after equal epochs"
    ours, theirs = one.outputs, other.outputs
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return "other scores or outputs from equal weights"
    rows = np.flatnonzero((ours != theirs).reshape(len(ours), -1).any(1))
    if rows.size:
        return f"out-of-fold outputs of {rows.size} samples, first in row {rows[0]}"
    return "other scores from equal outputs"


@dataclass(frozen=True)
class CandidateScores:
    """A candidate in two runs."""

    name: str
    means: tuple[float, float]  # NaN in a run without it
    stds: tuple[float, float]
    difference: Difference | None  # of the runs; None if not both have it, or the folds differ
    by_fold: tuple[float, ...] = ()  # second - first in each fold; empty without a difference

    def change(self, second: str) -> tuple[float, float, float, float]:
        """Return `second` - the other run, both ends of its interval, and p; NaN if unknown."""
        pair = self.difference
        if pair is None:
            return self.means[1] - self.means[0], np.nan, np.nan, np.nan
        sign = 1 if pair.first == second else -1
        low, high = sorted((sign * pair.ci_low, sign * pair.ci_high))
        return sign * pair.mean + 0.0, low, high, pair.p


@dataclass(frozen=True)
class ScoreComparison:
    """The scores of two runs, by one metric; p values are corrected as in a `Verdict`.

    Parameters
    ----------
    metric : str
        Name of the score; greater is better.
    runs : tuple of str
        Names of the two runs.
    difference : Difference or None
        Of the runs, by their mean over the candidates that both have; of their best candidates if
        there are none. None if the runs have different folds, or no score.
    candidates : tuple of CandidateScores
        Every candidate of either run.
    sentences : tuple of str
        The comparison in words.
    """

    metric: str
    runs: tuple[str, str]
    difference: Difference | None
    candidates: tuple[CandidateScores, ...]
    sentences: tuple[str, ...]


def compare_scores(first: CVResults, second: CVResults, names: tuple[str, str]) -> ScoreComparison:
    """Compare two runs, in pairs of folds if both have the same folds.

    `names` are those of the runs.

    Raises
    ------
    InputError
        The runs have no score in common.
    """
    runs, metric = (first, second), _common_metric(first, second)
    rows = [{one_line(row.name): row for row in candidates(run.plan, run.results)} for run in runs]
    common = [name for name in rows[0] if name in rows[1]]
    is_paired = first.plan.folds == second.plan.folds
    repeats = len({fold.repeat for fold in first.folds})
    every = np.array([row.scores[metric] for row in rows[0].values()])
    in_points = largest_difference(metric, every) == 1
    text = VerdictText(metric, in_points, len(first.folds), repeats)
    pairs = [[table[name] for name in common] if common else _best(table, metric) for table in rows]
    difference, compared, single = None, 0, dict[str, Difference]()
    if is_paired and all(pairs):
        scores = np.array([[row.scores[metric] for row in side] for side in pairs])
        largest = largest_difference(metric, scores)
        levels = common or ["the best candidates"]
        factor = compare_levels(names, levels, scores, first.folds, largest, 0)
        difference, compared = factor.pairs[0] if factor.pairs else None, len(factor.over)
        each = [
            paired_differences(names, scores[:, place], first.folds, largest)
            for place in range(len(levels))
        ]
        every_pair = {name: np.concatenate([item[name] for item in each]) for name in each[0]}
        single = dict(zip(levels, Pairs(every_pair), strict=True))
    said = ""
    if difference is not None and common:
        over = f"Over the {compared} candidates of both, " if len(common) > 1 else ""
        said = f"{over}{text.of_pair(difference)}"
    elif difference is not None:
        best = {name: f"{side[0].name} of {name}" for name, side in zip(names, pairs, strict=True)}
        renamed = replace(difference, first=best[difference.first], second=best[difference.second])
        said = f"Their best candidates: {text.of_pair(renamed)}"
    return ScoreComparison(
        one_line(metric),
        names,
        difference,
        tuple(_scores_of(name, rows, metric, single.get(name)) for name in {**rows[0], **rows[1]}),
        tuple(map(one_line, _sentences(runs, rows, names, common, said))),
    )


def _common_metric(first: CVResults, second: CVResults) -> str:
    for metric in first.plan.scoring:
        if metric in second.plan.scoring:
            return metric
    scores = " and ".join(", ".join(run.plan.scoring) for run in (first, second))
    raise InputError.one(
        "runs that are compared must have a score in common",
        scores,
        "Pass the same scoring to both, or --bits to compare them bit for bit.",
    )


def _best(table: dict[str, Candidate], metric: str) -> list[Candidate]:
    """Return the first complete candidate of the best, if there is any."""
    rows = list(table.values())
    ranked = zip(rank(rows, metric), rows, strict=True)
    complete = [(place, row) for place, row in ranked if row.ranks_by(metric)]
    return [min(complete, key=lambda pair: pair[0])[1]] if complete else []


def _sentences(
    runs: tuple[CVResults, CVResults],
    rows: Sequence[dict[str, Candidate]],
    names: tuple[str, str],
    common: Sequence[str],
    pair: str,
) -> Iterator[str]:
    """Say which run has the better scores, what limits the comparison, and what only one has."""
    first, second = runs
    if not common:
        yield f"{names[0]} and {names[1]} have no candidate in common."
    if pair:
        yield f"{pair}."
    if first.plan.folds != second.plan.folds:
        seeds = first.plan.random_state, second.plan.random_state
        why = f" (random_state {seeds[0]} and {seeds[1]})" if seeds[0] != seeds[1] else ""
        yield (
            f"The runs have different folds{why}: no test in pairs is possible, and a difference "
            "of means may come from the folds."
        )
    elif len(first.folds) == 2:
        yield "Two folds make a weak test."
    if first.plan.dataset != second.plan.dataset:
        yield "The samples or transforms of the runs differ."
    for table, name in zip(rows, names, strict=True):
        only = [candidate for candidate in table if candidate not in common]
        if only and common:
            yield f"Only in {name}: {listed(only)}."
        lacking = [candidate for candidate, row in table.items() if not row.complete]
        if lacking:
            yield f"Incomplete in {name}: {listed(lacking)}."


def _scores_of(
    name: str, rows: Sequence[dict[str, Candidate]], metric: str, difference: Difference | None
) -> CandidateScores:
    sides = [table.get(name) for table in rows]
    means = [row.mean(metric) if row else np.nan for row in sides]
    stds = [row.std(metric) if row else np.nan for row in sides]
    by_fold: tuple[float, ...] = ()
    if difference is not None and all(sides):
        before, after = (row.scores[metric] for row in sides if row)
        by_fold = tuple((after - before).tolist())
    return CandidateScores(name, (means[0], means[1]), (stds[0], stds[1]), difference, by_fold)
