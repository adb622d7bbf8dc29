"""`Audit`: what makes scores of a cross-validation too good, or its ranking a matter of chance.

What takes the samples is checked at the call, which has them, and recorded with the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from asynckfold.jobs.criteria import PROBABILITIES, VALUES
from asynckfold.jobs.folds import Fold, fold_name, shares_of_folds
from asynckfold.jobs.objective import BINARY, MULTICLASS, MULTILABEL, REGRESSION
from asynckfold.results.run_scores import RunScores
from asynckfold.results.scoring import resolve
from asynckfold.results.statistics import TIE, confidence_interval, tied, train_valid_ratio
from asynckfold.results.verdict import listed
from asynckfold.system.plain_text import one_line

if TYPE_CHECKING:
    from asynckfold.results.cross_fitting import Array, Floats

OPTIMISM = 0.5
"""Standard errors above which the optimism of a choice is a finding: an interval of 95 % with that
bias covers the truth in 92 % of cases."""

NO_RATE, RATE_LEFT = 1e-9, 0.1
"""Share of the largest learning rate that counts as 0, and of the first that may be left."""

Outcome: TypeAlias = "tuple[str, Mapping[str, Any]] | str | None"
"""Of a check: sentence and evidence of a finding, or why it was not made, or nothing."""


@dataclass(frozen=True)
class Finding:
    """One thing that makes scores lie; the page "What is checked" lists the codes."""

    code: str
    sentence: str
    evidence: Mapping[str, Any] = field(hash=False)  # numbers, samples, folds: plain data


@dataclass(frozen=True)
class Audit(Sequence[Finding]):
    """The findings of `CVResults.audit`, at most one for each code."""

    findings: tuple[Finding, ...]
    not_checked: Mapping[str, str] = field(hash=False)  # why, by code; the other codes were checked

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings."""
        return tuple(item.code for item in self.findings)

    @property
    def summary(self) -> str:
        """One line: the codes of the findings, and those that were not checked."""
        text = f"{len(self) or 'no'} finding{'s' * (len(self) != 1)}"
        text += f": {', '.join(self.codes)}" * bool(self)
        return text + f"; not checked: {', '.join(self.not_checked)}" * bool(self.not_checked)

    def __getitem__(self, place: Any) -> Any:
        return self.findings[place]

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        lines = [f"{item.code}: {item.sentence}." for item in self.findings]
        lines += [f"{code} was not checked: {why}." for code, why in self.not_checked.items()]
        return "\n".join([self.summary, *lines])


@dataclass(frozen=True, eq=False)
class AuditedRun:
    """What the checks look at."""

    sweep: RunScores
    targets: Array | None  # of training; None without the run's folder
    leak_checks: Mapping[str, Any]  # what the call recorded, see `data.duplicates`
    groups: Array | None  # of each sample

    def ranked(self) -> tuple[list[str], Floats]:
        """Return names and scores of the candidates with a finite score on every fold, by mean."""
        metric = self.sweep.plan.scoring[0]
        rows = [row for row in self.sweep._samples if np.isfinite(row.scores[metric]).all()]
        rows.sort(key=lambda row: -row.mean(metric))
        return [row.name for row in rows], np.array([row.scores[metric] for row in rows])


def make_audit(
    sweep: RunScores, targets: Array | None, about: Mapping[str, Any], groups: Array | None = None
) -> Audit:
    """Make all checks, with what is recorded `about` the run."""
    run = AuditedRun(sweep, targets, about.get("leak checks", {}), groups)
    outcomes = {code: check(run) for code, check in CHECKS.items()}
    pairs = {code: item for code, item in outcomes.items() if isinstance(item, tuple)}
    return Audit(
        tuple(Finding(code, one_line(text), facts) for code, (text, facts) in pairs.items()),
        {code: one_line(why) for code, why in outcomes.items() if isinstance(why, str)},
    )


def _recorded(code: str, run: AuditedRun) -> Outcome:
    known = run.leak_checks.get(code)
    if known is None:
        return "the run has no record of its samples"
    return (known["note"], known["evidence"]) if known["note"] else known["why_not"] or None


def _groups(run: AuditedRun) -> Outcome:
    labels, shared = run.groups, dict[tuple[int, ...], list[int]]()
    if labels is None:
        return _recorded("groups", run)
    for fold in run.sweep.folds:
        if rows := fold.valid[np.isin(labels[fold.valid], labels[fold.train])].tolist():
            shared[fold.key] = rows
    text = (
        "validation samples whose group is trained on, so that scores are those of known groups: "
        f"{shares_of_folds(shared, run.sweep.folds)}. Pass groups= to the call, which divides none"
    )
    return (text, {"samples": sorted({*chain(*shared.values())})}) if shared else None


def _chosen(run: AuditedRun) -> Outcome:
    """Compare the best mean with that of choices by the other folds of the same repeat."""
    (names, scores), metric = run.ranked(), run.sweep.plan.scoring[0]
    repeats = np.array([fold.repeat for fold in run.sweep.folds])
    others = (repeats[:, None] == repeats) & ~np.eye(len(repeats), dtype=bool)
    if len(names) < 2 or not others.any(axis=1).all():
        return _NO_CHOICE if len(run.sweep._samples) > 1 else None
    choices = (scores @ others.T / others.sum(axis=1)).argmax(axis=0)
    mean, by_others = scores[0].mean(), scores[choices, np.arange(len(choices))].mean()
    if (nested := run.sweep.nested) is not None and np.isfinite(nested.bias):
        by_others = nested.mean
    error = scores[0].std(ddof=1) / np.sqrt(len(choices))
    if mean - by_others <= max(OPTIMISM * error, TIE * np.abs(scores).max()):
        return None
    text = (
        f"{names[0]}, the best of {len(names)} candidates, has {metric} {mean:.4g} on the folds "
        f"that chose it. Chosen on the other folds, the candidate of a fold has {by_others:.4g} on "
        "average: that is the score of the choice"
    )
    facts = {"score": mean, "score_of_choice": by_others, "standard_error": error}
    return text, {name: float(value) for name, value in facts.items()}


def _one_fold(run: AuditedRun) -> Outcome:
    (names, scores), folds = run.ranked(), run.sweep.folds
    if len(names) < 2 or len(folds) < 2:
        return _NO_CHOICE if len(run.sweep._samples) > 1 else None
    rest = (scores.sum(axis=1, keepdims=True) - scores) / (len(folds) - 1)
    size = float(np.abs(scores).max())
    leaders = {
        fold_name(*fold.key): names[int(means.argmax())]
        for fold, means in zip(folds, rest.T, strict=True)
        if not tied(float(means.max()), float(means[0]), size)
    }
    if not leaders:
        return None
    shown = listed([f"{name} without {fold}" for fold, name in leaders.items()])
    text = (
        f"{names[0]} has the highest mean, but {shown}: one fold decides. Repeat the folds "
        "(n_repeats=), or take these candidates for equal"
    )
    return text, {"first": names[0], "first_without": leaders}


_NO_CHOICE = "it takes two folds, and two candidates with a score on each"
_NO_TARGETS = "the run's folder, with the targets, is not there"
_NO_CLASS = "targets are not one class or number a sample"


def _class_missing(run: AuditedRun) -> Outcome:
    plan, targets = run.sweep.plan, run.targets
    objective, facts = plan.objective_of(""), dict[str, list[str]]()
    if targets is None or objective.kind == REGRESSION:
        return None if objective.kind == REGRESSION else _NO_TARGETS
    if not objective.is_classes or objective.is_of_trees or targets.size != len(targets):
        return _NO_CLASS
    codes = objective.codes(targets).reshape(-1)
    counts = np.bincount(codes[codes >= 0])
    names = [*plan.classes, *map(str, range(len(plan.classes), len(counts)))]
    for fold in run.sweep.folds:
        for part, rows in (("training", fold.fitted), ("validation", fold.valid)):
            there = np.bincount(codes[rows][codes[rows] >= 0], minlength=len(counts))
            if lacking := np.flatnonzero((there == 0) & (counts > 0)).tolist():
                facts[f"{part} part of {fold_name(*fold.key)}"] = [names[at] for at in lacking]
    if not facts:
        return None
    shown = listed([f"the {part} lacks {listed(classes)}" for part, classes in facts.items()])
    return f"{shown}. Pass a number of folds, which keep the proportions of classes", facts


def _worse_than_constant(run: AuditedRun) -> Outcome:
    (names, scores), metric = run.ranked(), run.sweep.plan.scoring[0]
    if not names or run.targets is None:
        return _NO_TARGETS if names else "no candidate has a score on every fold"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            constant = float(np.mean(_constant_scores(run.sweep, metric, run.targets)))
            if not np.isfinite(constant):
                raise ValueError("it is undefined")
    except (AttributeError, TypeError, ValueError) as error:
        return f"there is no {metric} of a constant prediction: {error}"
    means, size = scores.mean(axis=1).tolist(), float(np.abs(scores).max())
    pairs = zip(names, means, strict=True)
    low = {name: mean for name, mean in pairs if mean < constant or tied(mean, constant, size)}
    if not low:
        return None
    text = (
        "no better than one prediction for all samples, by the mean or the class shares of the "
        f"training part, which has {metric} {constant:.4g}: {listed([*low])}"
    )
    return text, {"constant": constant, "scores": low}


LITTLE = 0.1
"""Share of what is left above the most frequent class; who gains more has learned. An interval over
two folds reaches that class from almost everywhere."""


def unlearned(sweep: RunScores, targets: Array | None) -> str:
    """Return a sentence on candidates whose accuracy is about that of one class; empty for none."""
    run = AuditedRun(sweep, targets, {}, None)
    if targets is None or sweep.plan.scoring[0] != "accuracy":
        return ""
    try:
        constants = np.array(_constant_scores(sweep, "accuracy", targets))
    except (AttributeError, TypeError, ValueError):
        return ""
    ratio = train_valid_ratio(sweep.folds)
    gains = {name: scores - constants for name, scores in zip(*run.ranked(), strict=True)}
    most = LITTLE * (1 - constants.mean())
    low = [
        name
        for name, gain in gains.items()
        if gain.mean() < most and confidence_interval(gain, ratio)[0] <= 0
    ]
    if not low:
        return ""
    return (
        f"{listed(low)}: accuracy is not clearly above {constants.mean():.4g}, that of the most "
        "frequent class. If nothing is learned, try another learning rate, or more epochs"
    )


def _constant_scores(sweep: RunScores, metric: str, targets: Array) -> list[float]:
    objective = replace(sweep.plan.objective_of(""), apart=(), transform="")
    kind, scale = objective.kind, VALUES if objective.kind == REGRESSION else PROBABILITIES
    if objective.is_of_trees or kind not in (MULTICLASS, BINARY, MULTILABEL, REGRESSION):
        raise ValueError(_NO_CLASS)
    if "sample_weight" in sweep.plan.recipe:
        raise ValueError("the run's folder holds no sample_weight")
    values = targets if kind == REGRESSION else objective.codes(targets)
    if metric == "accuracy" and objective.is_classes:  # scikit-learn's import takes a second
        guesses = [np.bincount(values[fold.train]).argmax() for fold in sweep.folds]
        pairs = zip(sweep.folds, guesses, strict=True)
        return [float(np.mean(values[fold.valid] == guess)) for fold, guess in pairs]
    score = resolve({metric: metric}, replace(objective, scale=scale))[metric]
    size = max(len(sweep.plan.classes), 1 + int(values.max())) if kind == MULTICLASS else 0

    def score_of(fold: Fold) -> float:
        rows = values[fold.train]
        share = np.bincount(rows, minlength=size) / len(rows) if size else rows.mean(axis=0)
        return score(targets[fold.valid], np.tile(np.float32(share), (len(fold.valid), 1)))

    return [*map(score_of, sweep.folds)]


def _schedule(run: AuditedRun) -> Outcome:
    plan = run.sweep.plan
    rates_of: dict[str, Floats] = {}
    for job in plan.jobs:
        result = run.sweep.results.get(job.id)
        if result and result.epochs and job.candidate not in rates_of:
            rates_of[job.candidate] = np.array([item.lr for item in result.epochs])
    planned = {name: rates for name, rates in rates_of.items() if name not in plan.reacting}
    left = {name: _rate_left(rates, plan.params.epochs) for name, rates in planned.items()}
    facts = {name: share for name, share in left.items() if share == 0 or share > RATE_LEFT}
    if not facts:
        return None if rates_of else "no job has recorded a learning rate"
    shown = listed([f"{name} ({share:.0%} of its rate left)" for name, share in facts.items()])
    text = f"learning rates that are 0 before the last epoch, or far from 0 after it: {shown}"
    return text, {"rate_left": facts}


def _rate_left(rates: Floats, planned: float) -> float:
    """Return the share of the first rate that is left at the end; 0 if the rate becomes 0 before.

    NaN if neither is known. The rates of half a cosine tell its length, and all tell the same.
    """
    is_zero = rates <= NO_RATE * rates.max()
    if 0 < rates.max() < np.inf and is_zero[np.argmin(is_zero) :].any():
        return 0.0
    if len(rates) < 4 or not ((rates[1:] > 0) & (rates[1:] < rates[0])).all():
        return np.nan
    lengths = np.pi * np.arange(1, len(rates)) / np.arccos(2 * rates[1:] / rates[0] - 1)
    is_cosine = np.ptp(lengths) < 1e-4 * lengths[0] and lengths[0] > 1.01 * planned
    return float((1 + np.cos(np.pi * planned / lengths[0])) / 2) if is_cosine else np.nan


CHECKS: Mapping[str, Callable[[AuditedRun], Outcome]] = {
    "duplicates": partial(_recorded, "duplicates"),
    "groups": _groups,
    "standardized": partial(_recorded, "standardized"),
    "chosen": _chosen,
    "one-fold": _one_fold,
    "class-missing": _class_missing,
    "worse-than-constant": _worse_than_constant,
    "schedule": _schedule,
}
"""By code, in the order of the findings."""
