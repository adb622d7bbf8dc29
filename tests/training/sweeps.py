"""Sweeps that train in this process, and a plain loop with their seeds: through public names."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold import AllJobsFailedError, AsyncKFold, CVResults, InputError, Result, RunStore
from tests.training.tiny import Plain, samples

ONE_FOLD = [(np.arange(20, 60), np.arange(20))]
"""Forty samples to train on: four batches of ten."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose kernel a plain loop has, too."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def sweep(
    root: Path,
    models: Any = None,
    schedules: Any = ("constant",),
    opt_fn: Callable[..., Any] = sgd,
    criterion: Any = None,
    *,
    data: Any = None,
    cv: Any = 3,
    batch_size: int = 10,
    params: dict[str, Any] | None = None,
    **settings: Any,
) -> CVResults:
    """Train in this process, two epochs unless `params` says otherwise, each job by itself."""
    quiet = {"baseline": None, "verbose": 0, "report": False, "threads_per_job": 1}
    words = {**quiet, "engine": "serial", "fuse": False, **settings}
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    kfold = AsyncKFold(
        cv, samples() if data is None else data, root, criterion, batch_size, **words
    )
    models = {"plain": Plain} if models is None else models
    schedules = list(schedules) if isinstance(schedules, tuple) else schedules
    return kfold(models, schedules, opt_fn, {"epochs": 2, **(params or {})})


def train(root: Path, *args: Any, **parts: Any) -> Result:
    """Return the result of a single job, also of one that failed."""
    (result,) = results_of(root, *args, **{"cv": ONE_FOLD, **parts}).values()
    return result


def results_of(root: Path, *args: Any, **parts: Any) -> dict[str, Result]:
    """Return the results of all jobs by id, also of those that failed."""
    with contextlib.suppress(AllJobsFailedError):
        sweep(root, *args, **parts)
    with RunStore.read(root) as store:
        return dict(store.results())


def in_pieces(root: Path, *args: Any, **parts: Any) -> tuple[Result, int]:
    """Train a job that is saved and ended after each batch; return its result, and the attempts."""
    for attempt in range(1, 100):
        result = train(root, *args, job_timeout_s=1e-9, **parts)
        if not result.error.startswith("timed out"):
            return result, attempt
    raise AssertionError("the training makes no progress")


def problems(root: Path, *args: Any, **parts: Any) -> list[tuple[str, str, str]]:
    """Return rule, received and remedy of what the sweep is refused for; nothing if it runs."""
    try:
        results_of(root, *args, **{"cv": ONE_FOLD, **parts})
    except InputError as error:
        assert not (root / "run.db").exists()
        return [(item.rule, item.received, item.remedy) for item in error.problems]
    return []


def events(root: Path, kind: str) -> list[str]:
    """Return the texts of a run's events of a kind."""
    with RunStore.read(root) as store:
        return [event.text for event in store.events() if event.kind == kind]


def log_of(root: Path, job: str = "plain/constant/fold-0") -> str:
    """Return the log of a job."""
    return (root / job / "log.txt").read_text()


# A plain loop


def seed_all(seed: int, *path: int) -> None:
    """Seed as a job does at its start, or for an epoch: ``seed_all(job.seed, epoch + 1)``."""
    if path:
        seed = int(np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)[0])
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def epoch_batches(rows: Any, seed: int, epoch: int, size: int = 10) -> Iterator[torch.Tensor]:
    """Yield the samples of each batch of an epoch, after its generators are seeded."""
    seed_all(seed, epoch + 1)
    order = np.random.default_rng([seed, 0, epoch]).permutation(rows)
    yield from torch.from_numpy(order).split(size)
