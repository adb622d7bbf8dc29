"""The facts of the setup: what the plan says, and the command that reproduces the run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from asynckfold.cv_results import CVResults
from asynckfold.plan import Plan
from asynckfold.report.text import clean, flat


@dataclass(frozen=True)
class Facts:
    """What the plan says."""

    models: tuple[str, ...]
    lr_schedules: tuple[str, ...]
    folds: int
    repeats: int
    samples: int
    classes: tuple[str, ...]
    batch_size: int
    epochs: int
    random_state: int
    threads_per_job: str
    device: str
    params: Mapping[str, Any]
    recipe: Mapping[str, str]
    dataset: str
    folds_fingerprint: str
    plan_fingerprint: str


def facts(plan: Plan, found: CVResults) -> Facts:
    """Return what the plan says, in text that is safe to show."""
    keys = {fold.key for fold in found.folds}
    return Facts(
        models=tuple(dict.fromkeys(clean(job.model) for job in plan.jobs)),
        lr_schedules=tuple(dict.fromkeys(clean(job.lr_schedule) for job in plan.jobs)),
        folds=len({index for _, index in keys}),
        repeats=len({repeat for repeat, _ in keys}),
        samples=found.n_samples,
        classes=tuple(clean(name) for name in plan.classes),
        batch_size=plan.batch_size,
        epochs=plan.params.epochs,
        random_state=plan.random_state,
        threads_per_job=plan.threads_text,
        device=clean(plan.device),
        params={
            **{item.name: getattr(plan.params, item.name) for item in fields(plan.params)},
            "channels_last": ", ".join(map(clean, plan.channels_last)) or "no model",
        },
        recipe=flat(plan.recipe),
        dataset=clean(plan.dataset),
        folds_fingerprint=clean(plan.folds),
        plan_fingerprint=plan.fingerprint,
    )


def command(about: Mapping[str, Any]) -> str:
    """Return the command as one types it in a shell; empty where there was none."""
    given = about.get("command") or ""
    text = given if isinstance(given, str) else shlex.join(map(str, given))
    return clean(text, 4096)
