"""One exercise for one model, and the loops that a user writes for it: asynckfold's measure.

All train the same samples in batches of the same size for the same epochs, on the same folds under
the same LR schedules, and evaluate the held-out fold after each epoch. Loops write nothing down;
asynckfold keeps its promises: checkpoints and results on the disk.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, Subset

from asynckfold.api.kfold import AsyncKFold
from asynckfold.jobs.folds import Fold, Indices
from asynckfold.models import MLP, VGG
from asynckfold.training import lr_schedules

BATCH = 32
EVALUATION_BATCH = 256
FOLDS = 5


def small_vgg() -> nn.Module:
    """VGG11 of a quarter of the width."""
    return VGG(width=0.25)


def digits_mlp() -> nn.Module:
    """MLP 64-128-10."""
    return MLP(64)


def adam(model: nn.Module) -> optim.Optimizer:
    """Return the optimizer of all ways, as users write it."""
    return optim.Adam(model.parameters(), 1e-3)


def fast_adam(model: nn.Module) -> optim.Optimizer:
    """Return the same with torch's faster kernel, as who wants speed writes it."""
    return optim.Adam(model.parameters(), 1e-3, fused=True)


OptFn = Callable[[nn.Module], optim.Optimizer]

Batches = Callable[[Indices, int, bool], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""(sample numbers, batch size, whether to shuffle) → batches of inputs and targets."""


def from_memory(inputs: torch.Tensor, targets: torch.Tensor) -> Batches:
    """Return what cuts batches out of whole arrays."""

    def batches(
        rows: Indices, size: int, shuffle: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.as_tensor(rows)
        order = order[torch.randperm(len(order))] if shuffle else order
        for part in torch.split(order, size):
            yield inputs.index_select(0, part), targets.index_select(0, part)

    return batches


def from_loader(dataset: Dataset[Any]) -> Batches:
    """Return what users write: a DataLoader, sample by sample."""

    def batches(
        rows: Indices, size: int, shuffle: bool
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return DataLoader(Subset(dataset, rows.tolist()), size, shuffle=shuffle)

    return batches


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads of torch meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Outcome:
    """How long one way took, and the mean accuracy over jobs."""

    seconds: float
    accuracy: float


@dataclass(frozen=True)
class Exercise:
    """Folds × LR schedules of one model.

    Parameters
    ----------
    model : callable
        Makes a new one.
    folds : sequence of Fold
        Who is held out when.
    epochs : int
        Passes over a training fold.
    schedules : tuple of str
        Names of built-in LR schedules.
    """

    model: Callable[[], nn.Module]
    folds: Sequence[Fold]
    epochs: int
    schedules: tuple[str, ...] = ("constant",)

    @property
    def jobs(self) -> list[tuple[str, Fold]]:
        """What is trained: LR schedule and fold of each."""
        return [(schedule, fold) for schedule in self.schedules for fold in self.folds]

    def train(
        self,
        fold: Fold,
        batches: Batches,
        schedule: str = "constant",
        opt_fn: OptFn = adam,
    ) -> float:
        """Train one job; return its accuracy after the last epoch."""
        torch.manual_seed(fold.index)
        model = self.model()
        optimizer, criterion = opt_fn(model), nn.CrossEntropyLoss()
        lr_schedule = lr_schedules.make(schedule, optimizer, self.epochs)
        right = 0
        for _ in range(self.epochs):
            model.train()
            for inputs, targets in batches(fold.train, BATCH, True):
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()
            lr_schedule.step()
            model.eval()
            with torch.inference_mode():
                right = sum(
                    int((model(inputs).argmax(1) == targets).sum())
                    for inputs, targets in batches(fold.valid, EVALUATION_BATCH, False)
                )
        return right / len(fold.valid)

    def one_by_one(self, batches: Batches, count: int, opt_fn: OptFn = adam) -> Outcome:
        """Train one job after another in this process, with `count` threads."""
        started = time.perf_counter()
        with threads(count):
            found = [self.train(fold, batches, schedule, opt_fn) for schedule, fold in self.jobs]
        return Outcome(time.perf_counter() - started, float(np.mean(found)))

    def asynckfold(self, dataset: Any, **settings: Any) -> Outcome:
        """Train all jobs by asynckfold; the whole call, from its arguments to its results."""
        started = time.perf_counter()
        # Beside the caller's files: a system's temporary folder may lie in memory.
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="asynckfold-bench-") as folder:
            kfold = AsyncKFold(
                [(fold.train, fold.valid) for fold in self.folds],
                dataset,
                Path(folder) / "run",
                nn.CrossEntropyLoss(),
                BATCH,
                baseline=None,
                verbose=0,
                **settings,
            )
            results = kfold(
                {"model": self.model}, list(self.schedules), adam, {"epochs": self.epochs}
            )
            seconds = time.perf_counter() - started
        return Outcome(seconds, float(np.mean(results.cv_results_["mean_test_accuracy"])))


def noisy_patterns(shape: tuple[int, ...], samples: int) -> tuple[Any, Any]:
    """Return samples of ten classes: patterns below so much noise that something is to be learned.

    Returns
    -------
    inputs : ndarray of float64, shape (samples, *shape)
        About normal, with a deviation of 3.
    targets : ndarray of int64, shape (samples,)
        Class indices.
    """
    random = np.random.default_rng(0)
    patterns = random.normal(size=(10, *shape))
    targets = random.integers(0, 10, samples)
    return patterns[targets] + random.normal(scale=3.0, size=(samples, *shape)), targets
