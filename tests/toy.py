"""A tiny sweep that every test can afford: 60 samples, three classes, an MLP 8-16-3."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold import Job, Plan, TrainerParams
from asynckfold.data.prepare import PreparedData, prepare
from asynckfold.jobs.folds import Fold, make_folds
from asynckfold.jobs.messages import Task
from asynckfold.jobs.plan import folds_fingerprint, jobs_of
from asynckfold.jobs.recipe import Recipe
from asynckfold.training.bundle import Bundle


def samples(count: int = 60, classes: int = 3) -> tuple[npt.NDArray[np.float32], Any]:
    """Return separable X (count, 8) and y (count,)."""
    random = np.random.default_rng(0)
    targets = np.arange(count) % classes
    inputs = random.normal(size=(count, 8)).astype(np.float32)
    inputs[:, :classes] += 2 * np.eye(classes, dtype=np.float32)[targets]
    return inputs, targets.astype(np.int64)


def make_jobs(
    models: Sequence[str], schedules: Sequence[str], folds: Sequence[Fold], seed: int
) -> tuple[Job, ...]:
    """Return the jobs of each model with each LR schedule."""
    return jobs_of([*product(models, schedules)], folds, seed)


class Tiny(nn.Module):
    """An MLP with dropout, so that random streams matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class Echo(nn.Module):
    """Says what it saw, trained or not."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.bias


class Slow(Tiny):
    """Takes its time in each step, without a core."""

    seconds = 0.1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.seconds)
        return super().forward(inputs)


class Moody(Tiny):
    """Raises where it is scored on the eighth of the `samples`: in exactly one fold."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training and (inputs == torch.from_numpy(samples()[0][7])).all(dim=1).any():
            raise ArithmeticError("seven")
        return super().forward(inputs)


class Failing(Tiny):
    """Cannot be trained on the first of the `samples`, which one fold holds out."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first = torch.from_numpy(samples()[0][0])
        if self.training and (inputs == first).all(dim=1).any():
            raise RuntimeError("that sample")
        return super().forward(inputs)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer function of the toy."""
    return torch.optim.Adam(model.parameters(), 1e-2)


@contextmanager
def toy_bundle(
    root: Path,
    models: dict[str, Callable[[], Any]] | None = None,
    lr_schedules: tuple[str, ...] = ("cosine",),
    epochs: int = 3,
    **changes: Any,
) -> Iterator[tuple[Bundle, PreparedData]]:
    """Yield a bundle over toy samples and the data it needs."""
    data = prepare(samples(), task="multiclass")
    recipe = Recipe(
        models or {"Tiny": Tiny},
        {name: name for name in lr_schedules},
        changes.pop("opt_fn", adam),
        changes.pop("criterion", nn.CrossEntropyLoss()),
    )
    folds = make_folds(data.n_samples, data.targets, 3)
    plan = Plan(
        make_jobs(list(recipe.models), list(lr_schedules), folds, 0),
        TrainerParams(epochs=epochs),
        10,
        1,
        0,
        "cpu",
        ("accuracy",),
        data.fingerprint,
        folds_fingerprint(folds),
        data.classes,
    )
    root.mkdir(parents=True, exist_ok=True)
    bundle = Bundle(dataclasses.replace(plan, **changes), folds, recipe, data.handle(), root)
    try:
        yield bundle, data
    finally:
        data.close()


def task(job: Job, attempt: int = 1) -> Task:
    """Return the first attempt at a job."""
    return Task(job, attempt)
