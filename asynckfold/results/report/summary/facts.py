"""The setup: what the plan says, and the command that reproduces the run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from asynckfold.jobs.objective import (
    BINARY,
    MASKS,
    MULTICLASS,
    MULTILABEL,
    REGRESSION,
    SEGMENTATION,
)
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import DONE
from asynckfold.results.outcome import Outcome
from asynckfold.results.report.sanitize import ERROR_LIMIT, clean, flat


@dataclass(frozen=True)
class RunFacts:
    """What the plan says."""

    models: tuple[str, ...]
    lr_schedules: tuple[str, ...]
    folds: int
    repeats: int
    samples: int
    classes: tuple[str, ...]
    targets: str
    outputs: str
    batch_size: int
    epochs: int
    stopped_early: bool  # a job ended before its last epoch
    random_state: int
    threads_per_job: str
    device: str
    params: Mapping[str, Any]
    recipe: Mapping[str, str]
    dataset: str
    folds_fingerprint: str
    plan_fingerprint: str


def facts(plan: Plan, found: Outcome) -> RunFacts:
    """Return what the plan says, in text that is safe to show."""
    keys = {fold.key for fold in found.folds}
    return RunFacts(
        models=tuple(dict.fromkeys(clean(job.model) for job in plan.jobs)),
        lr_schedules=tuple(dict.fromkeys(clean(job.lr_schedule) for job in plan.jobs)),
        folds=len({index for _, index in keys}),
        repeats=len({repeat for repeat, _ in keys}),
        samples=found.n_samples,
        classes=tuple(clean(name) for name in plan.classes),
        targets=_targets(plan),
        outputs=_outputs(plan),
        batch_size=plan.batch_size,
        epochs=plan.params.epochs,
        stopped_early=any(
            item.status == DONE and item.epochs and item.epochs[-1].number < plan.params.epochs
            for item in found.results.values()
        ),
        random_state=plan.random_state,
        threads_per_job=plan.threads_text,
        device=clean(plan.device_text),
        params={
            **{item.name: getattr(plan.params, item.name) for item in fields(plan.params)},
            "channels_last": ", ".join(map(clean, plan.channels_last)) or "no model",
        },
        recipe=flat(plan.recipe),
        dataset=clean(plan.dataset),
        folds_fingerprint=clean(plan.folds),
        plan_fingerprint=plan.fingerprint,
    )


_KINDS = {
    MULTICLASS: "one class for each sample",
    BINARY: "one of two classes for each sample, by one output",
    MULTILABEL: "several labels for each sample",
    REGRESSION: "numbers",
    SEGMENTATION: "a class for each pixel",
    MASKS: "0 or 1 for each pixel",
}


def _targets(plan: Plan) -> str:
    objective = plan.objective_of("")
    if objective.targets is not None:
        return clean(objective.targets.text)
    positive = "" if objective.pos_label is None else f"; positive is {objective.pos_label}"
    return clean(f"{_KINDS[objective.kind]}{positive}")


def _outputs(plan: Plan) -> str:
    """Return the scale of outputs, and the models of each if there are several."""
    models: dict[str, list[str]] = {}
    for name in dict.fromkeys(job.model for job in plan.jobs):
        objective = plan.objective_of(name)
        told = objective.scale if objective.columns is None else objective.columns.text
        models.setdefault(told, []).append(name)
    if len(models) < 2:
        return clean("".join(models))
    return clean("; ".join(f"{scale}: {', '.join(names)}" for scale, names in models.items()))


def command(about: Mapping[str, Any]) -> str:
    """Return the shell command; empty if the run was started from Python."""
    given = about.get("command") or ""
    text = given if isinstance(given, str) else shlex.join(map(str, given))
    return clean(text, ERROR_LIMIT)
