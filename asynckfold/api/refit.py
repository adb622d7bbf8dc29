"""`refit`: a candidate, trained on all samples, as a separate run in the run's folder.

::

    root_dir/refit/LeNet5/cosine/run.db …     continued, reported and exported like any run

One job, with the epochs, the batch size and the trainer of the jobs of the folds. Where callbacks
chose the epochs, it has the LR schedule of the folds and ends after the mean of their epochs. No
fold is left to score it: its scores are those of samples that it was trained on, and what may be
expected of it on others is what the folds say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asynckfold.api.arguments import Settings
from asynckfold.errors import Problem, nearest
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.result import BEST_EPOCH
from asynckfold.results.candidates import Candidate
from asynckfold.results.cv_results import CVResults
from asynckfold.scheduling.racing import ALPHA
from asynckfold.store.layout import refit_folder

SEEN_AGAIN = 1000
"""Of the samples that are trained on, how many are scored where there are no others."""

SEEN = "on training samples, so it says nothing about new ones"
"""What a run says of such scores."""


BEST = "best"


def refit_problems(settings: Settings, names: Sequence[str]) -> Iterator[Problem]:
    """Yield that `refit` names no candidate."""
    asked: object = settings.refit
    if isinstance(asked, bool) or asked == BEST or asked in names:
        return
    rule = "refit must be True, False, 'best', or the name of a candidate"
    guess = nearest(asked, [BEST, *names]) if isinstance(asked, str) else ""
    remedy = f"The candidates are {', '.join(names)}. The first in scoring chooses the best.{guess}"
    yield Problem(rule, one_line(asked), remedy)


def chosen(results: CVResults, refit: bool | str) -> Candidate | None:
    """Return the candidate that `refit` asks for, if it has a score on every fold."""
    if refit is True or refit == BEST:
        return results.candidates[results.best_index_] if results.has_best else None
    metric = results.plan.scoring[0]
    rows = (row for row in results.candidates if row.name == refit and row.ranks_by(metric))
    return next(rows, None)


def chosen_epochs(settings: Settings, results: CVResults, candidate: Candidate) -> int | None:
    """Return the mean of the epochs that callbacks chose; None for all that were planned."""
    if not any(hasattr(item, "monitor") for item in settings.called_back):
        return None
    jobs = [job for job in results.plan.jobs if job.candidate == candidate.name]
    lasts = [results.results[job.id].epochs[-1] for job in jobs]
    epochs = [last.logged.get(BEST_EPOCH, last.number) for last in lasts]
    mean = max(1, round(float(np.mean(epochs))))
    return mean if mean < results.plan.params.epochs else None


def on_all_samples(
    settings: Settings, candidate: Candidate, seconds: float | None, epochs: int | None = None
) -> Settings:
    """Return the settings of the run that trains a candidate on all samples.

    `seconds` are left of the time budget; `epochs` are what `chosen_epochs` returned.
    """
    from asynckfold.data.dataset import evenly, repeated
    from asynckfold.training.callbacks import LastEpoch

    samples, train, again = repeated(settings.dataset, SEEN_AGAIN)
    rows = np.concatenate([train, evenly(len(train), SEEN_AGAIN)])
    targets = None if settings.targets is None else np.asarray(settings.targets)[rows]
    sampler = settings.sampler
    if sampler is not None and not (isinstance(sampler, str) or callable(sampler)):
        sampler = np.asarray(sampler)[rows]
    weights = None if settings.sample_weight is None else np.asarray(settings.sample_weight)[rows]
    words = settings.about.get("cli")
    about = {"refit": f"{candidate.name} on all {len(train):,} samples", "scored": SEEN}
    return replace(
        settings,
        kfolds=[(train, again)],
        cv=None,
        n_splits=None,
        dataset=samples,
        root_dir=refit_folder(settings.root, candidate.model, candidate.lr_schedule),
        n_repeats=1,
        groups=None,
        sample_weight=weights,
        targets=targets,
        sampler=sampler,
        resume="auto",
        baseline=None,
        plan_from=None,
        # Not the words themselves: what is continued by the folder is the cross-validation.
        about=about | ({"command": ["asynckfold", *words]} if words else {}),
        # Nothing is left to watch.
        callbacks=[
            *(item for item in settings.called_back if not hasattr(item, "monitor")),
            *([] if epochs is None else [LastEpoch(epochs)]),
        ],
        inner_valid=None,
        fuse=False,
        time_budget_s=seconds,
        refit=False,
        race=False,
        nested=None,
        race_alpha=ALPHA,
        report=False,
        devices=_devices(settings, candidate.device),
    )


def _devices(settings: Settings, kind: str) -> Any:
    """Return the part of the `devices` that are of the candidate's kind."""
    given = settings.devices
    if kind == "cpu":
        return "cpu"
    if settings.engine == "ray" and not settings.machine().gpus().gpus:
        # Its GPUs are on other nodes, where its processes get them again.
        return given
    return "cuda" if isinstance(given, str) else [item for item in given if item != "cpu"]
