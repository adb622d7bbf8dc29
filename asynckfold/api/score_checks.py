"""What the outputs of a sweep's models mean, and whether its scores can be computed of them.

Decided after the dry run, which has seen outputs, and before a plan is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckfold.api.arguments import Settings
from asynckfold.errors import Problem, refuse
from asynckfold.jobs import criteria
from asynckfold.jobs import objective as objectives
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.digests.run import digest_of
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.objective import Objective, OutputSample
from asynckfold.jobs.plan import Plan
from asynckfold.results import scoring as scores
from asynckfold.results.batch_scores import accumulates
from asynckfold.results.score_fit import fit_problems, score_notes

if TYPE_CHECKING:
    from asynckfold.data.prepare import PreparedData
    from asynckfold.jobs.objective import Array

MOST_TRIED = 20_000_000
"""Outputs of a fold with which scores are tried before a run; of more, none are."""


def must_be_numbered(
    data: PreparedData,
    criterion: criteria.Criterion | None,
    output_samples: Mapping[str, OutputSample],
) -> bool:
    """Whether some model lacks outputs for labels as they are, so that these must be numbered."""
    if not data.labels.may_be_numbered:
        return False
    return objectives.must_be_numbered(data.labels.highest, criterion, output_samples)


def refuse_early(settings: Settings, data: PreparedData) -> None:
    """Refuse scores that fit the targets in no case, before a process is started for a dry run.

    Raises
    ------
    InputError
        There is no such score, or it cannot be computed.
    """
    names = list(scores.resolve(settings.scoring, data.labels.objective))
    refuse(
        [
            *_rank_problems(settings, names),
            *_missing_problems(settings, data),
            *_unclear_problems(settings, data),
        ]
    )


def with_objective(
    settings: Settings,
    draft: Plan,
    data: PreparedData,
    output_samples: Mapping[str, OutputSample],
    folds: Sequence[Fold],
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with the objective of its models, and notes.

    Parameters
    ----------
    settings : Settings
        What the user says: criterion, scores, `pos_label`, `output_transform`.
    draft : Plan
        What is known without outputs.
    data : Prepared
        Labels.
    output_samples : Mapping of str to OutputSample
        What was seen of the outputs of each model that ran.
    folds : sequence of Fold
        Scores are tried on the first.

    Raises
    ------
    InputError
        Scores do not fit labels or outputs, or it takes the user to tell what outputs mean.
    """
    given, classes = data.labels.objective, data.classes
    if _may_be_classes(settings, data):
        given, classes = replace(given, kind=objectives.BINARY), ("0", "1")
    label, problems = objectives.pos_label_of(settings.pos_label, given, classes)
    digest = "" if settings.output_transform is None else digest_of(settings.output_transform)
    objective, notes = objectives.decided(
        given, settings.known_criterion, output_samples, label, digest
    )
    models = list(dict.fromkeys(job.model for job in draft.jobs))
    known = [model for model in models if model in output_samples] or models
    problems += _shape_problems(objective, output_samples)
    problems += fit_problems(settings.scoring, objective, known)
    problems += _prediction_problems(settings, objective, data.targets, output_samples)
    if not problems:
        problems += _trial_problems(settings, objective, data, folds[0].valid, output_samples)
        problems += _metric_problems(
            settings, objective, data.targets[folds[0].train], output_samples
        )
    refuse(problems)
    names = ranked(settings, scores.resolve(settings.scoring, objective))
    plan = replace(draft, scoring=names, classes=classes).with_objective(objective)
    assumed = score_notes(settings.scoring, objective, known, settings.known_criterion is not None)
    return plan, tuple(dict.fromkeys((*notes, *assumed)))


def ranked(settings: Settings, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of scores, the one that ranks first."""
    return tuple(sorted(names, key=lambda name: name != settings.rank_by))


def _rank_problems(settings: Settings, names: Sequence[str]) -> Iterator[Problem]:
    if settings.rank_by is not None and settings.rank_by not in names:
        shown = ", ".join(map(repr, names))
        remedy = f"Pass one of {shown}, or name it in scoring, too."
        yield Problem("rank_by must name one of the scores", repr(settings.rank_by), remedy)
    items = [item for _, item in scores.named_scores(settings.scoring, objectives.REGRESSION)]
    if settings.task == objectives.CUSTOM and not all(map(scores.is_custom, items)):
        rule = "task='custom' needs functions (targets, outputs) → float as scores"
        yield Problem(rule, ", ".join(names), "Leave task out for scikit-learn's scores.")


def _missing_problems(settings: Settings, data: PreparedData) -> Iterator[Problem]:
    """Yield that targets hold NaN, which the criterion may leave out, and a score does not."""
    pairs = scores.named_scores(settings.scoring, data.labels.objective.kind)
    names = [str(name) for name, item in pairs if not scores.is_custom(item)]
    if data.labels.objective.targets is not None or data.targets.dtype.kind != "f" or not names:
        return
    rows = np.isfinite(data.targets.reshape(len(data.targets), -1)).all(axis=1)
    for at in np.flatnonzero(~rows)[:1]:
        yield Problem(
            "targets must be finite for scores of scikit-learn",
            f"{data.targets[at]} at index {at}, {int((~rows).sum())} in all, scored by {names[0]}",
            "Remove these samples or fill in their targets; or pass scoring={'name': function}, of "
            "(targets, outputs) → float, which leaves them out as the criterion does.",
        )


# Floats that are 0 and 1 only, of a custom criterion


def _are_unclear(settings: Settings, data: PreparedData) -> bool:
    """Whether targets may be classes as well as numbers, and neither task nor scores say which."""
    objective = data.labels.objective
    if settings.known_criterion is not None or settings.task is not None:
        return False
    if objective.kind != objectives.REGRESSION or objective.targets is not None:
        return False
    if settings.scoring is not None:
        pairs = scores.named_scores(settings.scoring, objectives.REGRESSION)
        if all(scores.is_custom(item) or _is_of_numbers(item) for _, item in pairs):
            return False
    # Numbers differ in the first rows already.
    parts = (data.targets[low : low + 1024] for low in range(0, len(data.targets), 1024))
    is_two = all(bool(((part == 0) | (part == 1)).all()) for part in parts)
    return is_two and 0 < data.targets.mean() < 1


def _may_be_classes(settings: Settings, data: PreparedData) -> bool:
    """Whether such targets are one for each sample."""
    one = data.targets.size == len(data.targets) and data.targets.ndim < 3
    return one and _are_unclear(settings, data)


def _is_of_numbers(item: Any) -> bool:
    name = item if isinstance(item, str) else getattr(item._score_func, "__name__", "")
    ofs = ("r2", "explained_variance", "d2_absolute", "neg_m", "neg_root", "max_error", "mean_")
    return str(name).startswith((*ofs, "median_", "root_", "d2_pinball", "d2_tweedie"))


def _unclear_problems(settings: Settings, data: PreparedData) -> Iterator[Problem]:
    if settings.scoring is not None or not _are_unclear(settings, data):
        return
    dimensions = 1 if _may_be_classes(settings, data) else data.targets.ndim
    if dimensions == 1 and settings.output_transform is not None:
        return
    task = {1: objectives.BINARY, 2: objectives.MULTILABEL}.get(dimensions, objectives.SEGMENTATION)
    yield Problem(
        "targets of 0 and 1 need a criterion, a task or a score that says whether they are "
        "classes or numbers",
        f"{one_line(settings.criterion)}, and targets of shape {data.targets.shape}",
        f"Pass task={task!r} and output_transform=torch.sigmoid (or another function from outputs "
        "to probabilities) for classes, task='regression' for numbers.",
    )


# Whether outputs fit


def _shape_problems(
    objective: Objective, output_samples: Mapping[str, OutputSample]
) -> Iterator[Problem]:
    if objective.transform:
        return
    for model, sample in output_samples.items():
        if sample.tree is not None:
            continue
        if objective.kind == objectives.BINARY and sample.columns != 1:
            yield Problem(
                f"model {model} must have one output for two classes, as its criterion asks for",
                f"shape {sample.rows.shape}",
                "Give its last layer one output, or use CrossEntropyLoss.",
            )
        if objective.kind == objectives.MULTICLASS and sample.columns == 1:
            yield Problem(
                f"model {model} must have an output for each class, as other models have",
                f"shape {sample.rows.shape}",
                "Give its last layer an output for each class.",
            )


def _prediction_problems(
    settings: Settings,
    objective: Objective,
    targets: Array,
    output_samples: Mapping[str, OutputSample],
) -> Iterator[Problem]:
    """Yield what is wrong with predictions made of outputs that were seen.

    `output_transform` may fail, and scikit-learn's scores would compare each target with more or
    fewer numbers.
    """
    is_transformed = settings.transform is not None and objective.scale == criteria.TRANSFORMED
    is_number = objective.kind == objectives.REGRESSION
    pairs = scores.named_scores(settings.scoring, objective.kind)
    names = [str(name) for name, item in pairs if scores.is_from_sklearn(item)] * is_number
    make = objectives.predicted if is_number else objectives.probabilities
    for model, sample in output_samples.items() if is_transformed or names else ():
        received = ""
        try:
            made = make(objective.of(model), sample.rows, settings.transform)
        except Exception as error:  # noqa: BLE001
            # A function of the user may raise anything.
            received = f"{type(error).__name__} on outputs of {model}: {one_line(error)}"
        else:
            if len(made) != len(sample.rows):
                received = f"{len(made)} rows of {len(sample.rows)} samples of {model}"
        if received and is_transformed:
            what = "predictions" if is_number else "probabilities"
            yield Problem(
                f"output_transform must return {what}, one row per sample",
                received,
                "Pass a function of one tensor of shape (n, ...), such as torch.sigmoid.",
            )
        elif names and not received and made[:1].size != targets[:1].size:
            yield Problem(
                "scores of numbers need one output for each number of a target",
                f"{made[:1].size} of model {model} for {targets[:1].size}, scored by {names[0]!r}",
                "Pass scoring={'name': function}, of (targets, outputs) → float; or "
                "output_transform= with a function from outputs to predictions.",
            )


def _trial_problems(
    settings: Settings,
    objective: Objective,
    data: PreparedData,
    valid: Array,
    output_samples: Mapping[str, OutputSample],
) -> Iterator[Problem]:
    """Try scikit-learn's scores on good outputs: one that cannot be computed fails all jobs."""
    targets = data.targets[valid]
    if objective.is_dense or objective.targets is not None:
        return
    # Of a transform of the user only its results are known.
    tried = replace(objective, scale=_tried_scale(objective), apart=(), transform="", outputs=())
    seen = (sample.columns for sample in output_samples.values() if sample.tree is None)
    columns = max([len(data.classes), *seen])
    if columns * len(targets) > MOST_TRIED:
        return
    outputs = _good_outputs(tried, targets, columns)
    pairs = scores.named_scores(settings.scoring, objective.kind)
    for name, item in pairs:
        if accumulates(item):
            continue
        if scores.is_custom(item):
            yield from _own_problems(str(name), item, objective, targets, outputs)
            continue
        if not scores.is_from_sklearn(item):
            continue
        if why := _why_not(item, tried, targets, outputs):
            others = (name for name in _others(item) if not _why_not(name, tried, targets, outputs))
            fitting = [repr(name) for name in islice(others, 3)]
            shown = repr(item) if isinstance(item, str) else item
            yield Problem(
                "scoring must fit the labels",
                f"{shown}, which says: {why}",
                f"Choose another, such as {', '.join(fitting)}."
                if fitting
                else "Pass scoring={'name': function}, of (targets, outputs) → float.",
            )


def _why_not(item: Any, objective: Objective, targets: Array, outputs: Array) -> str:
    """Return what a score of scikit-learn raises; empty where it can be computed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scores.resolve({"": item}, objective)[""](targets, outputs)
    except (ValueError, TypeError, AttributeError) as error:
        return one_line(error).rstrip(".")
    return ""


def _others(item: Any) -> Iterator[str]:
    """Yield other scores: variants of this one, such as ``roc_auc_ovr``, and common ones.

    >>> list(_others("f1"))[:4]
    ['f1_macro', 'f1_micro', 'f1_samples', 'f1_weighted']
    """
    from sklearn.metrics import get_scorer_names

    yield from (name for name in get_scorer_names() if name.startswith(f"{item}_"))
    yield from ("accuracy", "f1_macro", "neg_log_loss", "r2")


def _metric_problems(
    settings: Settings,
    objective: Objective,
    targets: Array,
    output_samples: Mapping[str, OutputSample],
) -> Iterator[Problem]:
    """Try metrics, and functions of trees, on outputs that were seen.

    One that cannot be computed fails all jobs.
    """
    for name, item in scores.named_scores(settings.scoring, objective.kind):
        is_reported = isinstance(item, scores.ReportedScore)
        is_tried = accumulates(item) or (
            scores.is_custom(item) and objective.is_of_trees and not is_reported
        )
        for model, sample in output_samples.items() if is_tried else ():
            count = min(len(targets), len(sample.rows))
            score = scores.resolve({name: item}, objective.of(model), settings.transform)[str(name)]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    score(targets[:count], sample.rows[:count])
            except Exception as error:  # noqa: BLE001
                # A metric may raise anything.
                received = f"{name} of model {model}: {type(error).__name__}: {one_line(error)}"
                remedy = (
                    "It gets targets and outputs with the parts that data set and model give."
                    if objective.is_of_trees
                    else "Give it the number of classes and the ignore_index of the criterion."
                )
                yield Problem("a score must take these outputs and targets", received, remedy)


def _tried_scale(objective: Objective) -> str:
    if objective.scale not in (criteria.TRANSFORMED, criteria.UNKNOWN):
        return objective.scale
    return criteria.VALUES if objective.kind == objectives.REGRESSION else criteria.LOGITS


def _good_outputs(objective: Objective, targets: Array, columns: int) -> Array:
    """Return outputs, on the scale of a model's, that say the right thing."""
    if objective.kind == objectives.REGRESSION:
        # A little off: numbers that are whole would pass for classes.
        near = np.asarray(targets, np.float64) + 0.125
        with np.errstate(invalid="ignore", divide="ignore"):
            near = np.log(near) if objective.scale == criteria.LOG_RATE else near
        return np.nan_to_num(near).astype(np.float32)
    codes = objective.codes(targets)
    if objective.kind == objectives.MULTICLASS:
        shares = np.full((len(codes), max(2, columns)), 0.1 / max(2, columns))
        shares[np.arange(len(codes)), codes] += 0.9
        logs = objective.scale in (criteria.LOGITS, criteria.LOG_PROBABILITIES, criteria.MARGINS)
        return (np.log(shares) if logs else shares).astype(np.float32)
    shares = np.where(codes == 1, 0.9, 0.1)
    signed = objective.scale not in (criteria.PROBABILITIES, criteria.TRANSFORMED)
    return (np.log(shares / (1 - shares)) if signed else shares).astype(np.float32)


# Functions of the user, which get labels as the data have them


def _own_problems(
    name: str, item: Any, objective: Objective, targets: Array, outputs: Array
) -> Iterator[Problem]:
    """Yield that a function takes labels for the numbers of outputs, which they are not.

    It is called here only where labels were numbered: with outputs that are all right.
    """
    codes = objective.codes(targets) if objective.is_classes else targets
    originals = objective.originals(targets)
    if not objective.labels or (originals.dtype.kind in "biu" and np.array_equal(originals, codes)):
        return
    of_labels, of_numbers = (_tried(item, truth, outputs) for truth in (originals, codes))
    if of_numbers > of_labels:
        yield Problem(
            f"scores must compare predictions with the labels of the data, and {name} compares "
            "class indices",
            f"{of_labels:.4g} for perfect outputs, {of_numbers:.4g} if labels were class indices",
            "Map outputs to labels by numpy.unique(all_labels), number the labels from 0 in the "
            "data, or use make_scorer, which gets labels and predicted labels.",
        )


def _tried(item: Any, truth: Array, outputs: Array) -> float:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(item(truth, outputs))
    except Exception:  # noqa: BLE001
        # A function of the user may raise anything; its jobs report it again.
        return float("-inf")
