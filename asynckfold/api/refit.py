"""`refit`: a candidate, trained on all samples, as a separate run in the run's folder.

::

    root_dir/refit/LeNet5/cosine/run.db …     continued, reported and exported like any run

One job, with the epochs, the batch size and the trainer of the jobs of the folds. Where callbacks
chose the epochs, it has the LR schedule of the folds and ends after the mean of their epochs. No
fold is left to score it: its scores are those of samples that it was trained on, and what may be
expected of it on others is what the folds say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asynckfold.api.arguments import Settings
from asynckfold.errors import InputError, Problem, nearest
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


BEST, ONE_SE = "best", "1se"


def refit_problems(settings: Settings, names: Sequence[str]) -> Iterator[Problem]:
    """Yield that `refit` names no candidate."""
    asked: object = settings.refit
    if isinstance(asked, bool) or callable(asked) or asked in (BEST, ONE_SE, *names):
        return
    rule = "refit must be True, False, 'best', '1se', a function, or the name of a candidate"
    guess = nearest(asked, [BEST, ONE_SE, *names]) if isinstance(asked, str) else ""
    remedy = f"The candidates are {', '.join(names)}. The first in scoring chooses the best.{guess}"
    yield Problem(rule, one_line(asked), remedy)


def names_one(refit: Any) -> bool:
    """Whether `refit` is the name of a candidate."""
    return isinstance(refit, str) and refit not in (BEST, ONE_SE)


def selector(refit: Any) -> Callable[[CVResults], int] | None:
    """Return what selects the best candidate; None for the highest mean."""
    if callable(refit):
        return lambda results: _checked(results, refit(results.cv_results_))
    return simplest_within_one_se if refit == ONE_SE else None


def _checked(results: CVResults, index: Any) -> int:
    rows, metric = results.candidates, results.plan.scoring[0]
    is_whole = isinstance(index, int | np.integer) and not isinstance(index, bool)
    if not is_whole or not 0 <= index < len(rows) or not rows[index].ranks_by(metric):
        rule = "refit must return the index of a candidate that has a score on every fold"
        remedy = f"Return an int from 0 to {len(rows) - 1}; the folds keep their results."
        raise InputError.one(rule, one_line(index), remedy)
    return int(index)


def simplest_within_one_se(results: CVResults) -> int:
    """Return the index of the simplest candidate within one standard error of the best.

    The rule of Breiman, Friedman, Olshen and Stone (1984): the standard error is that of the
    highest mean, over its folds. Simplest is the model of the fewest parameters; of equal ones,
    the highest mean; of equal means, the first.
    """
    rows, metric, highest = results.candidates, results.plan.scoring[0], results._highest
    scores = rows[highest].scores[metric]
    error = float(scores.std(ddof=1)) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
    least = rows[highest].mean(metric) - error
    near = {
        place: row
        for place, row in enumerate(rows)
        if place == highest or (row.ranks_by(metric) and row.mean(metric) >= least)
    }

    def order(place: int) -> tuple[float, float, int]:
        model = results.model(near[place].name)
        size = sum(item.numel() for item in model.parameters())
        return size, -near[place].mean(metric), place

    return min(near, key=order) if len(near) > 1 else highest


def chosen(results: CVResults, refit: Any) -> Candidate | None:
    """Return the candidate that `refit` asks for, if it has a score on every fold."""
    if not names_one(refit):
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
