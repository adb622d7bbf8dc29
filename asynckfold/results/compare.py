"""Compare two runs bit for bit, and find where they first differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asynckfold.errors import InputError
from asynckfold.jobs import reproducibility
from asynckfold.jobs.reproducibility import Reproducibility
from asynckfold.jobs.result import Epoch, Result, StageEpoch
from asynckfold.results.candidates import Candidate, candidates, rank
from asynckfold.results.outcome import Outcome
from asynckfold.results.statistics import (
    Difference,
    compare_levels,
    holm,
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
    plan = first.plan.first_difference(second.plan) or ""
    mine, theirs = first.results(), second.results()
    software = first.software(), second.software()
    names = dict.fromkeys(job.id for store in (first, second) for job in store.plan.jobs)
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
        (first.fingerprint(), second.fingerprint()),
        reproducibility.differences(*(next(iter(item), {}) for item in software)),
        (
            reproducibility.reproducibility_of(first.plan, software[0]),
            reproducibility.reproducibility_of(second.plan, software[1]),
        ),
    )


def _difference(name: str, one: Result | None, other: Result | None) -> str:
    states = [item.status if item else "pending" for item in (one, other)]
    if states[0] != states[1]:
        return f"{name}: {states[0]} there, {states[1]} here"
    if one is None or other is None or one.digest == other.digest:
        return ""
    where = (
        _stages(one.pretraining, other.pretraining)
        or _epochs(one.epochs, other.epochs)
        or _ends(one, other)
    )
    return f"{name}: {where}"


def _stages(one: tuple[StageEpoch, ...], other: tuple[StageEpoch, ...]) -> str:
    for mine, theirs in zip(one, other, strict=False):
        there, here = ((item.stage, item.number, dict(item.measures)) for item in (mine, theirs))
        # Compared as text, in which NaN equals NaN.
        if repr(there) != repr(here):
            return f"pretraining {there} there, {here} here"
    counts = len(one), len(other)
    return "" if counts[0] == counts[1] else "{} epochs pretrained there, {} here".format(*counts)


def _epochs(one: tuple[Epoch, ...], other: tuple[Epoch, ...]) -> str:
    for mine, theirs in zip(one, other, strict=False):
        for metric in ("lr", "train_loss", "valid_loss", "accuracy"):
            a, b = getattr(mine, metric), getattr(theirs, metric)
            if a != b and not (a != a and b != b):
                return f"epoch {mine.number}, {metric} {a!r} there, {b!r} here"
    return "" if len(one) == len(other) else f"{len(one)} epochs there, {len(other)} here"


def _ends(one: Result, other: Result) -> str:
    if one.weights != other.weights:
        return "other weights after equal epochs"
    if one.outputs is not None and other.outputs is not None:
        if one.outputs.shape != other.outputs.shape:
            return f"outputs of shape {one.outputs.shape} there, {other.outputs.shape} here"
        rows = np.flatnonzero((one.outputs != other.outputs).reshape(len(one.outputs), -1).any(1))
        if rows.size:
            return f"out-of-fold outputs of {rows.size} samples, first in row {rows[0]}"
    elif one.outputs is not other.outputs:
        return f"outputs kept {'here' if one.outputs is None else 'there'} only"
    return "other scores from equal outputs"


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


def compare_scores(first: Outcome, second: Outcome, names: tuple[str, str]) -> ScoreComparison:
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
    text = VerdictText(metric, one_line(metric), in_points, len(first.folds), repeats)
    pairs = [[table[name] for name in common] if common else _best(table, metric) for table in rows]
    difference, compared, single = None, 0, dict[str, Difference]()
    if is_paired and all(pairs):
        scores = np.array([[row.scores[metric] for row in side] for side in pairs])
        largest = largest_difference(metric, scores)
        levels = common or ["the best candidates"]
        factor = compare_levels(names, levels, scores, first.folds, largest, 0)
        difference, compared = factor.pairs[0] if factor.pairs else None, len(factor.over)
        each = (
            paired_differences(names, scores[:, place], first.folds, largest)[0]
            for place in range(len(levels))
        )
        single = dict(zip(levels, holm(list(each)), strict=True))
    sentences = [
        *_on_runs(text, difference, compared, names, pairs, common),
        *_on_folds(text, first, second, is_paired),
        *_on_rest(rows, common, names),
    ]
    return ScoreComparison(
        text.name,
        names,
        difference,
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


def _on_runs(
    text: VerdictText,
    pair: Difference | None,
    compared: int,
    names: tuple[str, str],
    pairs: Sequence[Sequence[Candidate]],
    common: Sequence[str],
) -> Iterator[str]:
    """Say which run has the better scores."""
    if not common:
        yield f"{names[0]} and {names[1]} have no candidate in common."
    if pair is None:
        return
    if common:
        over = f"Over the {compared} candidates of both, " if len(common) > 1 else ""
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
