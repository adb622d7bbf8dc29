"""The serial baseline: the loop that a PyTorch user writes today, over the same jobs.

One job after another, torch's default threads, a DataLoader over the data set with its transforms,
sample by sample. The same folds, seeds, batches and epochs as the sweep, an evaluation of the
held-out fold after each epoch as there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from asynckfold.data import Batches
from asynckfold.folds import Fold, Indices
from asynckfold.plan import Job
from asynckfold.result import Baseline
from asynckfold.training import lr_schedules, seeding
from asynckfold.training.bundle import Bundle
from asynckfold.training.loop import batch_bounds, fitted

ESTIMATE_SECONDS = 0.3
"""How long an estimate times the batches of one model, for training and for evaluation each."""


def measure(bundle: Bundle, data: Batches, stop: Callable[[], bool]) -> Baseline | None:
    """Run the whole loop; None when asked to stop."""
    by_candidate = dict.fromkeys((job.candidate for job in bundle.plan.jobs), 0.0)
    scores: dict[str, list[float]] = {name: [] for name in by_candidate}
    for job in bundle.plan.jobs:
        started = time.perf_counter()
        try:
            accuracy = _train(bundle, job, data, stop)
        except Exception:  # noqa: BLE001
            # The job fails in the sweep as well, where its traceback is recorded.
            accuracy = None
        if stop():
            return None
        by_candidate[job.candidate] += time.perf_counter() - started
        if accuracy is not None:
            scores[job.candidate].append(accuracy)
    return Baseline(
        "measured",
        sum(by_candidate.values()),
        torch.get_num_threads(),
        by_candidate,
        {name: sum(found) / len(found) for name, found in scores.items() if found},
    )


def estimate(bundle: Bundle, data: Batches, stop: Callable[[], bool]) -> Baseline | None:
    """Time some batches of each model and multiply; None when asked to stop."""
    by_model: dict[str, float] = {}
    for job in bundle.plan.jobs:
        if stop():
            return None
        if job.model not in by_model:
            try:
                by_model[job.model] = _job_seconds(bundle, job, data)
            except Exception:  # noqa: BLE001
                # Its jobs fail in the sweep as well, where the traceback is recorded.
                by_model[job.model] = 0.0
    by_candidate = dict.fromkeys((job.candidate for job in bundle.plan.jobs), 0.0)
    for job in bundle.plan.jobs:
        by_candidate[job.candidate] += by_model[job.model]
    return Baseline("estimated", sum(by_candidate.values()), torch.get_num_threads(), by_candidate)


class _Loop:
    """An ordinary training of one job."""

    def __init__(self, bundle: Bundle, job: Job, data: Batches) -> None:
        plan, recipe = bundle.plan, bundle.recipe
        self.params, self.job, self.fold = plan.params, job, bundle.fold_of(job)
        seeding.seed_all(job.seed)
        self.model = recipe.models[job.model]()
        self.optimizer = recipe.opt_fn(self.model)
        self.criterion = copy.deepcopy(recipe.criterion)
        train, valid = datasets(bundle, data, self.fold)
        bounds = list(batch_bounds(len(self.fold.train), plan.batch_size, self.model))
        self.train_loader = DataLoader(train, batch_sampler=_Shuffled(bounds))
        self.valid_loader = DataLoader(valid, batch_size=plan.batch_size)
        per_batch = plan.params.lr_step == "batch"
        self.lr_schedule = lr_schedules.make(
            recipe.lr_schedules[job.lr_schedule],
            self.optimizer,
            plan.params.epochs * (len(bounds) if per_batch else 1),
        )
        self.per_batch = per_batch and not lr_schedules.needs_metric(self.lr_schedule)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        def backward() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = self.criterion(self.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if self.params.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.params.clip_grad_norm)
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            return float(self.optimizer.step(backward))  # type: ignore[no-untyped-call]
        loss = backward()
        self.optimizer.step()
        return loss.item()

    def score(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        with torch.no_grad():
            outputs = self.model(inputs)
            loss = float(self.criterion(outputs, targets)) * len(targets)
        right = outputs.argmax(1) == targets if outputs.ndim == 2 else targets != targets
        return loss, float(right.sum()) if right.shape == targets.shape else 0.0


def _train(bundle: Bundle, job: Job, data: Batches, stop: Callable[[], bool]) -> float | None:
    loop = _Loop(bundle, job, data)
    accuracy = 0.0
    for _ in range(loop.params.epochs):
        loop.model.train()
        for inputs, targets in loop.train_loader:
            loop.step(inputs, targets)
            if loop.per_batch:
                loop.lr_schedule.step()
            if stop():
                return None
        loop.model.eval()
        pairs = [loop.score(inputs, targets) for inputs, targets in loop.valid_loader]
        count = len(loop.fold.valid)
        loss, accuracy = (sum(column) / count for column in zip(*pairs, strict=True))
        if lr_schedules.needs_metric(loop.lr_schedule):
            loop.lr_schedule.step(loss)
        elif not loop.per_batch:
            loop.lr_schedule.step()
    return accuracy if bundle.plan.classes else None


def _job_seconds(bundle: Bundle, job: Job, data: Batches) -> float:
    loop = _Loop(bundle, job, data)
    loop.model.train()
    train = _per_batch(loop.train_loader, lambda batch: loop.step(*batch))
    loop.model.eval()
    valid = _per_batch(loop.valid_loader, lambda batch: loop.score(*batch))
    epoch = train * len(loop.train_loader) + valid * len(loop.valid_loader)
    return epoch * loop.params.epochs


def _per_batch(loader: DataLoader[Any], work: Callable[[Any], Any]) -> float:
    """Mean seconds of a batch, the first left out: it warms up."""
    batches = iter(loader)
    first = time.perf_counter()
    work(next(batches))
    started, count = time.perf_counter(), 0
    for batch in batches:
        work(batch)
        count += 1
        if time.perf_counter() - started > ESTIMATE_SECONDS:
            break
    if count == 0:
        return started - first
    return (time.perf_counter() - started) / count


def datasets(bundle: Bundle, data: Batches, fold: Fold) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the training and the held-out samples as ordinary data sets."""
    if bundle.recipe.preprocess is not None:
        seen = fitted(data, bundle.recipe.preprocess, fold.train)
        return _tensors(seen, fold.train), _tensors(seen, fold.valid)
    train, valid = bundle.ordinary
    return Subset(train, fold.train.tolist()), Subset(valid, fold.valid.tolist())


def _tensors(data: Batches, indices: Indices) -> TensorDataset:
    return TensorDataset(*data.eval(torch.from_numpy(indices)))


class _Shuffled:
    """Batches of a shuffled order, of the same sizes as in the sweep."""

    def __init__(self, bounds: list[tuple[int, int]]) -> None:
        self.bounds = bounds

    def __len__(self) -> int:
        return len(self.bounds)

    def __iter__(self) -> Iterator[list[int]]:
        count = self.bounds[-1][1] if self.bounds else 0
        order = torch.randperm(count).tolist()
        for low, high in self.bounds:
            yield order[low:high]
