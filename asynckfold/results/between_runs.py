"""Compare the scores of two runs: over the candidates that both have, then one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asynckfold.errors import InputError
from asynckfold.results.candidates import Candidate, candidates, rank
from asynckfold.results.factor import Factor, compare_levels
from asynckfold.results.outcome import Outcome
from asynckfold.results.statistics import Difference, holm, largest_difference, paired_differences
from asynckfold.results.verdict_text import VerdictText, listed
from asynckfold.system.plain_text import one_line

BEST = "the best candidates"
"""What is compared of runs that have no candidate in common."""


@dataclass(frozen=True)
class CandidateScores:
    """A candidate in two runs."""

    name: str
    means: tuple[float, float]  # NaN in a run without it
    stds: tuple[float, float]
    difference: Difference | None  # of the runs; None if not both have it, or the folds differ


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


def compare_scores(
    first: Outcome, second: Outcome, names: tuple[str, str], shown: Callable[[str], str] = one_line
) -> ScoreComparison:
    """Compare two runs, in pairs of folds if both have the same folds.

    `names` are those of the runs; `shown` makes names of candidates safe to show.

    Raises
    ------
    InputError
        The runs have no score in common.
    """
    found, metric = (first, second), _common_metric(first, second)
    rows = [{shown(row.name): row for row in candidates(run.plan, run.results)} for run in found]
    common = [name for name in rows[0] if name in rows[1]]
    is_paired = first.plan.folds == second.plan.folds
    repeats = len({fold.repeat for fold in first.folds})
    every = np.array([row.scores[metric] for row in rows[0].values()])
    in_points = largest_difference(metric, every) == 1
    text = VerdictText(metric, shown(metric), in_points, len(first.folds), repeats)
    pairs = [[table[name] for name in common] if common else _best(table, metric) for table in rows]
    factor, single = None, dict[str, Difference]()
    if is_paired and all(pairs):
        factor, single = _in_pairs(names, pairs, common or [BEST], metric, first)
    sentences = [
        *_on_runs(text, factor, names, pairs, common),
        *_on_folds(text, first, second, is_paired),
        *_on_rest(rows, common, names),
    ]
    return ScoreComparison(
        text.name,
        names,
        factor.pairs[0] if factor and factor.pairs else None,
        tuple(_scores_of(name, rows, metric, single.get(name)) for name in {**rows[0], **rows[1]}),
        tuple(map(one_line, sentences)),
    )


def _common_metric(first: Outcome, second: Outcome) -> str:
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


def _in_pairs(
    names: tuple[str, str],
    pairs: Sequence[Sequence[Candidate]],
    common: Sequence[str],
    metric: str,
    run: Outcome,
) -> tuple[Factor, dict[str, Difference]]:
    """Compare the runs over their candidates, and each candidate of both."""
    scores = np.array([[row.scores[metric] for row in side] for side in pairs])
    largest = largest_difference(metric, scores)
    factor = compare_levels(names, common, scores, run.folds, largest, 0)
    single = [
        paired_differences(names, scores[:, place], run.folds, largest)[0]
        for place in range(len(common))
    ]
    return factor, dict(zip(common, holm(single), strict=True))


def _on_runs(
    text: VerdictText,
    factor: Factor | None,
    names: tuple[str, str],
    pairs: Sequence[Sequence[Candidate]],
    common: Sequence[str],
) -> Iterator[str]:
    """Say which run has the better scores."""
    if not common:
        yield f"{names[0]} and {names[1]} have no candidate in common."
    if factor is None or not factor.pairs:
        return
    (pair,) = factor.pairs
    if common:
        over = f"Over the {len(factor.over)} candidates of both, " if len(common) > 1 else ""
        yield f"{over}{text.of_pair(pair)}."
        return
    best = {name: f"{side[0].name} of {name}" for name, side in zip(names, pairs, strict=True)}
    renamed = replace(pair, first=best[pair.first], second=best[pair.second])
    yield f"Their best candidates: {text.of_pair(renamed)}."


def _on_folds(text: VerdictText, first: Outcome, second: Outcome, is_paired: bool) -> Iterator[str]:
    """Say what limits the comparison."""
    if not is_paired:
        seeds = first.plan.random_state, second.plan.random_state
        why = f" (random_state {seeds[0]} and {seeds[1]})" if seeds[0] != seeds[1] else ""
        yield (
            f"The runs have different folds{why}: no test in pairs is possible, and a difference "
            "of means may come from the folds."
        )
    elif text.folds == 2:
        yield "Two folds make a weak test."
    if first.plan.dataset != second.plan.dataset:
        yield "The samples or transforms of the runs differ."


def _on_rest(
    rows: Sequence[dict[str, Candidate]], common: Sequence[str], names: tuple[str, str]
) -> Iterator[str]:
    """Name the candidates that only one run has, and incomplete ones."""
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
    return CandidateScores(name, (means[0], means[1]), (stds[0], stds[1]), difference)
