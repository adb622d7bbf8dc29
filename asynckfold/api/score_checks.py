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
from asynckfold.jobs.candidate_names import base_of
from asynckfold.jobs.digests.run import digest_of
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.objective import Objective, OutputSample
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.recipe import sending_problems
from asynckfold.jobs.result import MakeAccumulator
from asynckfold.planning.feasibility import held_bytes, outputs_problems, why_not_kept
from asynckfold.results import scoring as scores
from asynckfold.results.batch_scores import accumulates
from asynckfold.results.scoring import (
    accumulator_of,
    fit_problems,
    score_notes,
    weight_problems,
    why_not_by_batch,
)
from asynckfold.system.machine import total_memory

if TYPE_CHECKING:
    from asynckfold.api.context import Call
    from asynckfold.data.prepare import PreparedData
    from asynckfold.jobs.objective import Array

MOST_TRIED = 20_000_000
"""Outputs of a fold with which scores are tried before a run; of more, none are."""


def must_be_numbered(
    data: PreparedData,
    criterion: criteria.Criterion | None,
    output_samples: Mapping[str, OutputSample],
) -> bool:
    """Whether models have no outputs for labels as they are, so that these must be numbered.

    Raises
    ------
    InputError
        Some models have outputs for them, and some have not.
    """
    if not data.labels.may_be_numbered:
        return False
    refuse(objectives.output_problems(data.labels.highest, criterion, output_samples))
    return objectives.must_be_numbered(data.labels.highest, criterion, output_samples)


def refuse_early(settings: Settings, data: PreparedData) -> None:
    """Refuse scores that fit the targets in no case, before a process is started for a dry run."""
    names = list(scores.resolve(settings.scoring, data.labels.objective))
    refuse(
        [
            *_rank_problems(settings, names),
            *_missing_problems(settings, data),
            *_unclear_problems(settings, data),
            *_weight_problems(settings, data),
        ]
    )


def with_objective(
    settings: Settings,
    draft: Plan,
    data: PreparedData,
    output_samples: Mapping[str, OutputSample],
    folds: Sequence[Fold],
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with the objective of its models, and notes; scores are tried on a fold."""
    objective, classes = data.labels.objective, data.classes
    if _may_be_classes(settings, data):
        objective, classes = replace(objective, kind=objectives.BINARY), ("0", "1")
    label, problems = objectives.pos_label_of(settings.pos_label, objective, classes)
    digest = "" if settings.output_transform is None else digest_of(settings.output_transform)
    objective, notes = objectives.decided(
        objective, settings.known_criterion, output_samples, label, digest
    )
    models = list(dict.fromkeys(job.model for job in draft.jobs))
    known = [model for model in models if model in output_samples] or models
    problems += _shape_problems(objective, output_samples)
    problems += fit_problems(settings.scoring, objective, known)
    problems += _transform_problems(settings, objective, output_samples)
    if not problems:
        problems += _trial_problems(settings, objective, data, folds[0].valid, output_samples)
        problems += _metric_problems(settings, objective, data, folds[0].train, output_samples)
    refuse(problems)
    names = ranked(settings, scores.resolve(settings.scoring, objective))
    plan = replace(draft, scoring=names, classes=classes).with_objective(objective)
    assumed = score_notes(settings.scoring, objective, known, settings.known_criterion is not None)
    return plan, tuple(dict.fromkeys((*notes, *assumed)))


def model_notes(plan: Plan, facts: Facts) -> Iterator[str]:
    """Yield which models have outputs that no class needs, and which are alike."""
    for name, seen in facts.output_samples.items():
        is_of_classes = (
            plan.objective_of(name).kind == objectives.MULTICLASS and seen.rows.ndim == 2
        )
        if is_of_classes and seen.columns > len(plan.classes) > 0:
            yield (
                f"model {name} has {seen.columns} outputs for {len(plan.classes)} classes: the "
                "others are never right, so its last layer may be that of other data"
            )
    alike: dict[str, dict[str, str]] = {}
    for name, digest in facts.recipe["architecture"].items():
        alike.setdefault(digest or name, {}).setdefault(base_of(name), name)
    for names in alike.values():
        if len(names) > 1:
            yield (
                f"models {', '.join(names.values())} have the same layers and start from the same "
                "seeds: unless their code or first weights differ, so will no score"
            )


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


def _weight_problems(settings: Settings, data: PreparedData) -> Iterator[Problem]:
    if data.sample_weight is not None:
        yield from weight_problems(settings.scoring, data.labels.objective)


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
    is_one = {objectives.BINARY: True, objectives.MULTICLASS: False}.get(objective.kind)
    for model, sample in output_samples.items():
        if objective.transform or sample.tree is not None or is_one is None:
            continue
        if is_one is not (sample.columns == 1):
            yield Problem(
                "models must have one output for two classes, or all of them one for each class",
                f"shape {sample.rows.shape} of {model}",
                "Change its last layer, or the criterion.",
            )


def _transform_problems(
    settings: Settings, objective: Objective, output_samples: Mapping[str, OutputSample]
) -> Iterator[Problem]:
    """Yield why `output_transform` does not make predictions of outputs that were seen."""
    is_number = objective.kind == objectives.REGRESSION
    make = objectives.predicted if is_number else objectives.probabilities
    is_used = settings.transform is not None and objective.scale == criteria.TRANSFORMED
    for model, sample in output_samples.items() if is_used else ():
        try:
            made = make(objective.of(model), sample.rows, settings.transform)
        except Exception as error:  # noqa: BLE001
            # A function of the user may raise anything.
            received = f"{type(error).__name__} on outputs of {model}: {one_line(error)}"
        else:
            received = f"{len(made)} rows of {len(sample.rows)} samples of {model}"
            if len(made) == len(sample.rows):
                continue
        what = "predictions" if is_number else "probabilities"
        yield Problem(
            f"output_transform must return {what}, one row per sample",
            received,
            "Pass a function of one tensor of shape (n, ...), such as torch.sigmoid.",
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
    seen = (sample.columns for sample in output_samples.values() if sample.tree is None)
    columns = max([len(data.classes), *seen])
    is_shaped = objective.is_dense or objective.targets is not None
    if is_shaped or columns * len(targets) > MOST_TRIED:
        return
    # Of a transform of the user only its results are known.
    scale, is_number = objective.scale, objective.kind == objectives.REGRESSION
    if scale in (criteria.TRANSFORMED, criteria.UNKNOWN):
        scale = criteria.VALUES if is_number else criteria.LOGITS
    columns *= not (is_number and objective.transform)
    tried = replace(objective, scale=scale, apart=(), transform="", outputs=())
    outputs = _good_outputs(tried, targets, columns)
    for name, item in scores.named_scores(settings.scoring, objective.kind):
        if accumulates(item):
            continue
        if scores.is_custom(item):
            yield from _index_problems(str(name), item, objective, targets, outputs)
        elif scores.is_from_sklearn(item) and (why := _why_not(item, tried, targets, outputs)):
            others = (name for name in _others(item) if not _why_not(name, tried, targets, outputs))
            fitting = ", ".join(repr(name) for name in islice(others, 3))
            yield Problem(
                "scoring must fit the labels",
                f"{repr(item) if isinstance(item, str) else item}, which says: {why}",
                f"Choose another, such as {fitting}."
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
    data: PreparedData,
    train: Array,
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
            rows = train[: len(sample.rows)]
            weights = () if data.sample_weight is None else (data.sample_weight[rows],)
            score = scores.resolve({name: item}, objective.of(model), settings.transform)[str(name)]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    score(data.targets[rows], sample.rows[: len(rows)], *weights)
            except Exception as error:  # noqa: BLE001
                # A metric may raise anything.
                yield Problem(
                    "a score must take these outputs and targets",
                    f"{name} of model {model}: {type(error).__name__}: {one_line(error)}",
                    "It gets targets and outputs with the parts that data set and model give. Give "
                    "a metric the number of classes and the ignore_index of the criterion.",
                )


def _good_outputs(objective: Objective, targets: Array, columns: int) -> Array:
    """Return outputs, on the scale of a model's, that say the right thing."""
    if objective.kind == objectives.REGRESSION:
        # A little off: numbers that are whole would pass for classes.
        near = np.asarray(targets, np.float64) + 0.125
        if columns not in (0, near[:1].size):
            return np.zeros((len(near), columns), np.float32)
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


def _index_problems(
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


# Scores by batch, where outputs are too large to keep


def with_outputs(call: Call, draft: Plan, before: Plan | None) -> Plan:
    """Decide whether outputs are scored by batch; count what of them a job holds as its memory."""
    settings, folds, samples = call.settings, call.folds, call.facts.output_samples
    objective = draft.objective_of(draft.jobs[0].model)
    why = why_not_by_batch(settings.scoring, objective, _measured(call.facts))
    if before is not None:
        by_batch, why = before.by_batch, why or "a run that was begun with them"
    else:
        is_large = bool(why_not_kept(draft, folds, samples, settings.keep_outputs_gib))
        by_batch = is_large and not why
    draft = replace(draft, by_batch=by_batch)
    if by_batch and settings.engine != "serial":
        names = ("scoring", "output_transform")
        refuse(sending_problems({name: getattr(settings, name) for name in names}))
    held = held_bytes(draft, folds, samples)
    refuse(outputs_problems(held, total_memory(), "" if by_batch else why))
    memory = {name: size + held.get(name, 0) for name, size in call.facts.memory.items()}
    call.facts = replace(call.facts, memory=memory)
    return draft


def accumulators(call: Call, plan: Plan) -> dict[str, MakeAccumulator]:
    """Return by model what scores outputs by batch; nothing where the plan does not."""
    settings, measured = call.settings, _measured(call.facts)
    return {
        model: accumulator_of(
            settings.scoring, plan.objective_of(model), settings.transform, measured
        )
        for model in dict.fromkeys(job.model for job in plan.jobs if plan.by_batch)
    }


def _measured(facts: Facts) -> set[str]:
    """Return what a validation step measures of every model."""
    every = [set(names) for names in facts.measured.values()]
    return set.intersection(*every) if every else set()
