"""What the benchmarks share: models, timing, one sweep by asynckfold, and the loops users write.

All loops train the same samples in equal batches for the same epochs, on the same folds under the
same LR schedules, and evaluate the held-out fold after each epoch. Loops write nothing to disk;
asynckfold keeps its promises: checkpoints and results.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, Subset

from asynckfold.api.kfold import AsyncKFold
from asynckfold.jobs.folds import Fold, Indices
from asynckfold.models import MLP, VGG
from asynckfold.results.cv_results import CVResults
from asynckfold.system import process
from asynckfold.training import lr_schedules, seeding

T = TypeVar("T")

BATCH = 32
EVALUATION_BATCH = 256
FOLDS = 5


def small_vgg() -> nn.Module:
    """VGG11, a quarter wide."""
    return VGG("VGG11", width=0.25)


def digits_mlp() -> nn.Module:
    """MLP 64-128-10."""
    return MLP(64)


def batch_norm_lenet() -> nn.Module:
    """LeNet-5 with a batch normalisation after each convolution."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def adam(model: nn.Module) -> optim.Optimizer:
    """Return Adam as users write it."""
    return optim.Adam(model.parameters(), 1e-3)


def fast_adam(model: nn.Module) -> optim.Optimizer:
    """Return Adam with torch's fused kernel."""
    return optim.Adam(model.parameters(), 1e-3, fused=True)


OptFn = Callable[[nn.Module], optim.Optimizer]

Batches = Callable[[Indices, int, bool], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""(sample numbers, batch size, whether to shuffle) → batches of inputs and targets."""


@dataclass(frozen=True)
class Case:
    """A model, the shape of its samples, and the batch size of a step."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 32, 32)
    batch_size: int = BATCH


def step_of(case: Case, *, channels_last: bool = False) -> Callable[[], None]:
    """Return a training step on random samples."""
    torch.manual_seed(0)
    inputs = torch.randn(case.batch_size, *case.shape)
    targets = torch.arange(case.batch_size) % 10
    model = case.model()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = fast_adam(model)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def thread_seconds(work: Callable[[], object]) -> float:
    """Return the time of this thread: other processes do not count."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def turns_for(seconds: float, turn: Callable[[int], T]) -> list[T]:
    """Call with 0, 1, … for some seconds, 4 times or more; drop the first tenth, which warms up."""
    found: list[T] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(found) < 4:
        found.append(turn(len(found)))
    return found[max(1, len(found) // 10) :]


def from_memory(inputs: torch.Tensor, targets: torch.Tensor) -> Batches:
    """Cut batches out of whole arrays."""

    def batches(
        rows: Indices, size: int, shuffle: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.as_tensor(rows)
        order = order[torch.randperm(len(order))] if shuffle else order
        for part in torch.split(order, size):
            yield inputs.index_select(0, part), targets.index_select(0, part)

    return batches


def from_loader(dataset: Dataset[Any]) -> Batches:
    """Load sample by sample through a DataLoader, as users do."""

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
    """Set torch's threads for a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def as_in_worker(count: int) -> Iterator[None]:
    """Compute as a worker with `count` threads does; the generators stay as they are."""
    process.keep_freed_memory()
    with seeding.preserved(), threads(count):
        yield


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder that is deleted afterwards."""
    # Beside the caller's files: the temporary folder of the system may be in memory.
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="asynckfold-bench-") as folder:
        yield Path(folder)


def sweep(
    folder: Path,
    folds: Any,
    dataset: Any,
    models: Mapping[str, Callable[[], nn.Module]],
    schedules: Any,
    opt_fn: OptFn,
    params: Mapping[str, Any],
    **settings: Any,
) -> CVResults:
    """Train all jobs by asynckfold, silently, without a baseline, by default without a report."""
    run, criterion = folder / "run", nn.CrossEntropyLoss()
    quiet: dict[str, Any] = {"verbose": 0, "report": False, **settings}
    kfold = AsyncKFold(folds, dataset, run, criterion, BATCH, **quiet)
    return kfold(models, schedules, opt_fn, params)


@dataclass(frozen=True)
class Outcome:
    """Seconds of one way, and the mean accuracy over jobs."""

    seconds: float
    accuracy: float


@dataclass(frozen=True)
class Exercise:
    """Folds × built-in LR schedules of one model; `model` makes a new one."""

    model: Callable[[], nn.Module]
    folds: Sequence[Fold]
    epochs: int
    schedules: tuple[str, ...] = ("constant",)

    @property
    def jobs(self) -> list[tuple[str, Fold]]:
        """LR schedule and fold of each job."""
        return [(schedule, fold) for schedule in self.schedules for fold in self.folds]

    def train(
        self, fold: Fold, batches: Batches, schedule: str = "constant", opt_fn: OptFn = adam
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

    def serial_ways(
        self, dataset: Dataset[Any], inputs: torch.Tensor, targets: torch.Tensor, cores: int
    ) -> dict[str, Callable[[], Outcome]]:
        """Return the serial ways by name: users' loops over a data set, and over its arrays."""
        loader, memory = from_loader(dataset), from_memory(inputs, targets)
        return {
            "loader": lambda: self.one_by_one(loader, cores),
            "serial, 1 thread": lambda: self.one_by_one(memory, 1, fast_adam),
            "serial, all threads": lambda: self.one_by_one(memory, cores, fast_adam),
        }

    def asynckfold(self, dataset: Any, **settings: Any) -> Outcome:
        """Train all jobs by asynckfold; the whole call, from its arguments to its report."""
        started = time.perf_counter()
        folds = [(fold.train, fold.valid) for fold in self.folds]
        models, schedules = {"model": self.model}, list(self.schedules)
        with scratch_folder() as folder:
            params, settings = {"epochs": self.epochs}, {"report": True, **settings}
            results = sweep(folder, folds, dataset, models, schedules, adam, params, **settings)
            seconds = time.perf_counter() - started
            # What draws the figures must disturb no other way.
            results.report()
        return Outcome(seconds, float(np.mean(results.cv_results_["mean_test_accuracy"])))
