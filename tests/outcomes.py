"""Results that are made of scores, without a sweep; from public names alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.model_selection import KFold

from asynckfold import CVResults, Fold, Job, Plan, Result, RunStore, TrainerParams

NAN = math.nan
Scores = Mapping[str, Sequence[float]]
"""One score for each fold, by ``"model/LR schedule"``."""


def folds_of(
    count: int, ratio: float = 0.25, repeats: int = 1, valid: Sequence[int] = ()
) -> tuple[Fold, ...]:
    """Return folds of 100 training samples and their share `ratio` that is held out.

    `valid` overrides how many samples each fold holds out.
    """
    each = count // repeats
    sizes = valid or [round(100 * ratio)] * count
    return tuple(
        Fold(at // each, at % each, np.arange(100), np.arange(size))
        for at, size in enumerate(sizes)
    )


def divided(samples: int, count: int, repeats: int = 1) -> tuple[Fold, ...]:
    """Return shuffled folds of samples, the same ones as those of a sweep with seed 0."""
    seeds = [0, *(seed_of(0, repeat) for repeat in range(1, repeats))]
    return tuple(
        Fold(repeat, index, *parts)
        for repeat, seed in enumerate(seeds)
        for index, parts in enumerate(
            KFold(count, shuffle=True, random_state=seed).split(np.zeros((samples, 1)))
        )
    )


@cache
def seed_of(*key: int) -> int:
    """Return a seed of its own for each key."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def jobs_of(candidates: Sequence[Sequence[str]], folds: Sequence[Fold]) -> tuple[Job, ...]:
    """Return the jobs of candidates (model, LR schedule)."""
    repeated = any(fold.repeat for fold in folds)
    return tuple(
        Job(*pair, fold.repeat, fold.index, seed_of(0, *fold.key), repeated, fold.inner)
        for pair in candidates
        for fold in folds
    )


def fingerprint_of(folds: Sequence[Fold]) -> str:
    """Return the fingerprint that a plan has of its folds."""
    digest = hashlib.sha256()
    for fold in folds:
        sizes = np.array([*fold.key, len(fold.train), len(fold.valid)], np.int64)
        for part in (sizes, fold.train, fold.valid, fold.inner_valid):
            digest.update(part.tobytes())
    return digest.hexdigest()


def plan_of(candidates: Sequence[Sequence[str]], folds: Sequence[Fold], **changes: Any) -> Plan:
    """Return the plan of candidates (model, LR schedule) on folds."""
    settings: dict[str, Any] = {"params": TrainerParams(), "batch_size": 4, "threads_per_job": 1}
    settings |= {"random_state": 0, "device": "cpu", "scoring": ("accuracy",), "dataset": "data"}
    settings |= {"jobs": jobs_of(candidates, folds), "folds": fingerprint_of(folds)}
    return Plan(**{**settings, **changes})


def results_of(
    scores: Scores,
    metric: str = "accuracy",
    *,
    folds: Sequence[Fold] = (),
    state: str = "failed",
    error_score: float = NAN,
    **plan: Any,
) -> CVResults:
    """Return results with these scores; jobs with NaN ended in `state`, or are pending."""
    folds = tuple(folds) or folds_of(len(next(iter(scores.values()))))
    made = plan_of(
        [name.rsplit("/", 1) for name in scores], folds, **{"scoring": (metric,), **plan}
    )
    values = [score for line in scores.values() for score in line]
    results = {
        job.id: Result(job.id, 1, state if math.isnan(score) else "done", {metric: score})
        for job, score in zip(made.jobs, values, strict=True)
        if state != "pending" or not math.isnan(score)
    }
    count = 1 + max(int(max(*fold.train, *fold.valid)) for fold in folds)
    return CVResults(made, folds, count, results, 1.0, None, Path("run"), error_score)


def written(root: Path, results: CVResults) -> Path:
    """Write results as a run, and return its folder."""
    with RunStore.hold(root) as store:
        store.begin(results.plan, results.folds, np.arange(results.n_samples) % 2)
        for result in results.results.values():
            attempt = store.start_attempt(result.job_id, (), 1, "cpu", 0.0)
            assert attempt == result.attempt
            store.record(result)
    return root
