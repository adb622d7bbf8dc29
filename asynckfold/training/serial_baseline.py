"""The serial baseline: the loop that a PyTorch user writes today, over the same jobs.

One job after another, with torch's default threads (but none on busy cores), and a DataLoader over
the dataset with its transforms, sample by sample. Folds, seeds, batches in their order, epochs,
inner-validation samples and the evaluation after each epoch are those of the sweep. What remains to
differ is rounding, and what random transforms draw.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from asynckfold.data.arrays import exact
from asynckfold.data.batches import Batches
from asynckfold.data.transforms.trees import on_device
from asynckfold.jobs.criteria import TRANSFORMED, UNKNOWN
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import EpochEnd, Progress
from asynckfold.jobs.objective import REGRESSION, Objective
from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Baseline, Epoch
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import lr_schedules, seeding
from asynckfold.training.bundle import Bundle
from asynckfold.training.calls import outputs_of, scaler_of
from asynckfold.training.evaluation import kept_of, right, set_mode
from asynckfold.training.gradients import update
from asynckfold.training.isolation.guard import isolated
from asynckfold.training.job_log import NoLog
from asynckfold.training.losses import criterion_for, factor_and_count, portions
from asynckfold.training.optimizers import opt_fn_for
from asynckfold.training.preprocessing import fit_on, fit_transform, transform
from asynckfold.training.pretraining import has_pretraining, pretrain
from asynckfold.training.sampling import epoch_samples
from asynckfold.training.setup import build_lr_schedule, epoch_bounds
from asynckfold.training.training_run import EVENT_SECONDS, Report

ESTIMATE_SECONDS = 0.3
"""How long an estimate times a model's batches, in training and in evaluation."""


_CPU = torch.device("cpu")

Judged = tuple[torch.Tensor, torch.Tensor]
"""Targets of a batch, and which samples or pixels are predicted right."""


def measure(
    bundle: Bundle,
    data: Batches,
    stop: Callable[[], bool],
    device: torch.device = _CPU,
    report: Report = lambda event: None,
) -> Baseline | None:
    """Run the loop over all jobs of the plan; None if `stop` asked to leave.

    Reports some progress, not every epoch: a message costs time that an ordinary loop has not.
    """
    by_job: dict[str, float] = {}
    scores: dict[str, list[float]] = {job.candidate: [] for job in bundle.plan.jobs}
    epochs: dict[str, list[tuple[float, float]]] = {}
    class_counts: dict[str, list[tuple[int, int]]] = {}
    classes = len(bundle.plan.classes)
    seconds: dict[str, float] = {}
    for job in bundle.plan.jobs:
        started = time.perf_counter()
        try:
            with isolated(patches=True):
                trained = _train(bundle, job, data, stop, device, report)
        except (Exception, SystemExit):  # noqa: BLE001
            # It fails in the sweep, too, which records the traceback.
            trained = None
        if stop():
            return None
        if trained is None:
            continue
        seconds[job.id] = time.perf_counter() - started
        objective = bundle.plan.objective_of(job.model)
        known = objective.scale not in (TRANSFORMED, UNKNOWN)
        # The scores of pixels are others than the share of pixels that are right.
        if objective.kind != REGRESSION and not objective.is_dense and known:
            by_job[job.id] = trained.accuracy
            scores[job.candidate].append(trained.accuracy)
            class_counts[job.id] = trained.class_counts(classes, objective)
        epochs[job.id] = trained.epochs
    return Baseline(
        "measured",
        math.fsum(seconds.values()),
        torch.get_num_threads(),
        _by_candidate(bundle.plan.jobs, seconds),
        {name: sum(each) / len(each) for name, each in scores.items() if each},
        by_job=by_job,
        epochs=epochs,
        class_counts=class_counts,
        seconds_by_job=seconds,
    )


def estimate(
    bundle: Bundle, data: Batches, stop: Callable[[], bool], device: torch.device = _CPU
) -> Baseline | None:
    """Time some batches of each model and extrapolate; None if `stop` asked to leave.

    Extrapolates the median: other processes delay some batches, and must not make the baseline look
    slower than it is.
    """
    by_model: dict[tuple[str, str], tuple[float, float] | None] = {}
    seconds: dict[str, float] = {}
    for job in bundle.plan.jobs:
        if stop():
            return None
        where = job.model, bundle.plan.device_of(job.candidate)
        if where not in by_model:
            try:
                with isolated(patches=True):
                    by_model[where] = _batch_seconds(bundle, job, data, stop, device)
            except (Exception, SystemExit):  # noqa: BLE001
                # As above.
                by_model[where] = None
        batch_seconds = by_model[where]
        if batch_seconds is None:
            continue
        train, valid = batch_seconds
        fold, size = bundle.fold_of(job), bundle.plan.batch_size
        epoch = train * math.ceil(len(fold.train) / size) + valid * math.ceil(
            len(fold.valid) / size
        )
        seconds[job.id] = epoch * bundle.plan.params.epochs
    return Baseline(
        "estimated",
        math.fsum(seconds.values()),
        torch.get_num_threads(),
        _by_candidate(bundle.plan.jobs, seconds),
        seconds_by_job=seconds,
    )


def _by_candidate(jobs: Sequence[Job], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each candidate whose jobs were all timed."""
    by_candidate: dict[str, list[float]] = {job.candidate: [] for job in jobs}
    for job in jobs:
        by_candidate[job.candidate].append(seconds.get(job.id, math.nan))
    sums = {name: sum(each) for name, each in by_candidate.items()}
    return {name: total for name, total in sums.items() if not math.isnan(total)}


class _Loop:
    """An ordinary training of one job, on the kind of device that the sweep uses for it."""

    def __init__(
        self,
        bundle: Bundle,
        job: Job,
        data: Batches,
        device: torch.device,
        *,
        pretrains: bool = False,
    ) -> None:
        plan, recipe = bundle.plan, bundle.recipe
        self.plan, self.params = plan, plan.params
        self.job, self.fold = job, bundle.fold_of(job)
        self.data, self.sampler = data, recipe.sampler
        self.objective = plan.objective_of(job.model)
        self.device = device if plan.device_of(job.candidate) == "cuda" else _CPU
        seeding.seed_all(job.seed)
        self.model = recipe.models[job.model]().to(self.device)
        if pretrains and has_pretraining(self.model):
            seen = fit_transform(data, recipe.preprocess, self.fold.fitted).to(self.device)
            size = plan.params.eval_batch_size
            with NoLog() as log:
                pretrain(self.model, seen, self.fold.fitted, job.seed, log, Heartbeat(), size)
        self.criterion = criterion_for(recipe, data, self.fold.fitted)
        if isinstance(self.criterion, nn.Module):
            self.criterion = self.criterion.to(self.device)
        self.optimizer = opt_fn_for(recipe, job.lr_schedule, self.criterion)(self.model)
        self.scaler = scaler_of(self.params.precision, self.device, self.optimizer)
        self.lr_schedule = build_lr_schedule(
            bundle, job, self.model, self.optimizer, self.fold, data
        )
        self.reacts = lr_schedules.needs_metric(self.lr_schedule)
        self.per_batch = lr_schedules.steps_each_batch(self.lr_schedule, plan.params)
        self.train = self.fold.fitted
        self.bounds = epoch_bounds(bundle, job, self.model, self.train, data)
        self.train_view, eval_view = views(bundle, data, self.fold)
        self.inner_valid_loader = DataLoader(
            Subset(eval_view, self.fold.inner_valid.tolist()), plan.batch_size
        )
        self.valid_loader = DataLoader(Subset(eval_view, self.fold.valid.tolist()), plan.batch_size)

    def set_mode(self, *, train: bool) -> None:
        """Set the mode of all that has one."""
        set_mode(self.model, self.criterion, self.optimizer, train=train)

    def train_loader(self, epoch: int) -> DataLoader[Any]:
        """Seed an epoch (from 0) as the sweep does; return its batches in the sweep's order."""
        seeding.seed_all(seeding.epoch_seed(self.job.seed, epoch))
        drawn = epoch_samples(self.sampler, self.data, self.train, self.job.seed, epoch)
        order = drawn.tolist()
        parts = [order[low:high] for low, high in self.bounds]
        # Without a generator of its own, it would draw from the one that dropout uses.
        return DataLoader(self.train_view, batch_sampler=parts, generator=torch.Generator())

    def step(self, batches: Sequence[tuple[Any, torch.Tensor]]) -> list[float]:
        """Take one step on batches, with the mean gradient over their samples; return losses."""
        held = [(on_device(inputs, self.device), y.to(self.device)) for inputs, y in batches]
        sizes = [len(targets) for _, targets in held]
        weights = portions(
            self.criterion, self.plan, sizes, lambda: torch.cat([targets for _, targets in held])
        )
        losses: list[torch.Tensor] = []

        def backward() -> torch.Tensor:
            self.optimizer.zero_grad()
            losses.clear()
            for (inputs, targets), weight in zip(held, weights, strict=True):
                loss: torch.Tensor = self.criterion(self.outputs_of(inputs), targets)
                losses.append(loss.detach())
                weighted = loss if len(held) == 1 else loss * weight
                scaled = weighted if self.scaler is None else self.scaler.scale(weighted)
                scaled.backward()  # type: ignore[no-untyped-call]
            if self.params.clip_grad_norm is not None:
                if self.scaler is not None:
                    self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.params.clip_grad_norm)
            return torch.stack(losses).dot(losses[0].new_tensor(weights))

        update(self.optimizer, backward, self.scaler)
        return [loss.item() for loss in losses]

    def outputs_of(self, inputs: Any) -> Any:
        return outputs_of(self.model, inputs, self.params.precision)

    def score(self, inputs: Any, targets: torch.Tensor) -> tuple[float, float, torch.Tensor]:
        """Return the summed loss, its divisor, and which samples are right."""
        inputs, targets = on_device(inputs, self.device), targets.to(self.device)
        factor, count = self.counted(targets)
        with torch.no_grad():
            outputs = self.outputs_of(inputs)
            loss = float(self.criterion(outputs, targets)) * factor
        hits = right(self.objective, outputs, targets)
        return loss, count, torch.zeros(len(targets), dtype=torch.bool) if hits is None else hits

    def counted(self, targets: torch.Tensor) -> tuple[float, float]:
        """Return `factor_and_count` of a batch."""
        return factor_and_count(self.criterion, self.plan, targets.to(self.device))

    def evaluate(self, loader: DataLoader[Any]) -> tuple[float, list[Judged]]:
        """Return the mean loss, and targets with predictions."""
        self.set_mode(train=False)
        kept = kept_of(self.plan, self.job, self.model)
        total, counted, judged = 0.0, 0.0, []
        for inputs, targets in loader:
            loss, count, right = self.score(inputs, targets)
            total += loss
            counted += count
            judged.append((targets, right))
        kept.restore()
        return total / counted if counted else 0.0, judged


@dataclass(frozen=True)
class _BaselineJob:
    """A trained job: (seconds, training loss) after each epoch, and the last evaluation."""

    epochs: list[tuple[float, float]]
    judged: list[Judged]

    @property
    def accuracy(self) -> float:
        """Accuracy on the held-out fold."""
        right = sum(float(right.sum()) for _, right in self.judged)
        return right / sum(len(right) for _, right in self.judged)

    def class_counts(self, classes: int, objective: Objective) -> list[tuple[int, int]]:
        """Return (right, all) held-out samples of each class; empty unless each has one class."""
        if not classes or not objective.is_classes:
            return []
        encoded, right = (
            torch.cat([part.cpu() for part in parts]) for parts in zip(*self.judged, strict=True)
        )
        targets = objective.codes(encoded.numpy())
        if targets.ndim != 1:
            return []
        hits = targets[right.numpy()]
        return [
            (int((hits == number).sum()), int((targets == number).sum()))
            for number in range(classes)
        ]


def _train(
    bundle: Bundle,
    job: Job,
    data: Batches,
    stop: Callable[[], bool],
    device: torch.device,
    report: Report,
) -> _BaselineJob | None:
    loop = _Loop(bundle, job, data, device, pretrains=True)
    epochs: list[tuple[float, float]] = []
    judged: list[Judged] = []
    began = reported = time.perf_counter()
    for epoch in range(loop.params.epochs):
        loop.set_mode(train=True)
        loss, count = 0.0, 0.0
        loader, batch = iter(loop.train_loader(epoch)), 0
        while step := list(itertools.islice(loader, loop.params.accumulate)):
            for (_, targets), value in zip(step, loop.step(step), strict=True):
                factor, samples = loop.counted(targets)
                loss += value * factor
                count += samples
                batch += 1
                if loop.per_batch:
                    loop.lr_schedule.step()
            if time.perf_counter() - reported >= EVENT_SECONDS:
                reported = time.perf_counter()
                place = epoch + 1, loop.params.epochs, batch, len(loop.bounds)
                report(Progress(job.id, 0, *place, value))
            if stop():
                return None
        valid_loss, judged = loop.evaluate(loop.valid_loader)
        if loop.reacts:
            loop.lr_schedule.step(loop.evaluate(loop.inner_valid_loader)[0])
        elif not loop.per_batch:
            loop.lr_schedule.step()
        before = epochs[-1][0] if epochs else 0.0
        passed, mean = time.perf_counter() - began, loss / count if count else 0.0
        epochs.append((passed, mean))
        if began + passed - reported >= EVENT_SECONDS:
            reported = began + passed
            rate = float(loop.optimizer.param_groups[0]["lr"])
            ended = Epoch(epoch + 1, mean, valid_loss, None, rate, passed - before)
            report(EpochEnd(job.id, 0, ended))
    return _BaselineJob(epochs, judged)


def _batch_seconds(
    bundle: Bundle, job: Job, data: Batches, stop: Callable[[], bool], device: torch.device
) -> tuple[float, float]:
    """Seconds of a batch in training and in evaluation."""
    loop = _Loop(bundle, job, data, device)
    loop.set_mode(train=True)
    train = _per_batch(loop.train_loader(0), lambda batch: loop.step([batch]), stop)
    loop.set_mode(train=False)
    return train, _per_batch(loop.valid_loader, lambda batch: loop.score(*batch), stop)


def _per_batch(
    loader: DataLoader[Any], work: Callable[[Any], Any], stop: Callable[[], bool]
) -> float:
    """Median seconds of a batch, without the first, which warms up."""
    seconds: list[float] = []
    started = moment = time.perf_counter()
    for batch in loader:
        work(batch)
        before, moment = moment, time.perf_counter()
        seconds.append(moment - before)
        if moment - started > ESTIMATE_SECONDS or stop():
            break
        moment = time.perf_counter()
    return median(seconds[1:] or seconds)


def views(bundle: Bundle, data: Batches, fold: Fold) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the train view and the eval view of all samples as torch datasets."""
    train, valid = bundle.ordinary
    preprocess = bundle.recipe.preprocess
    if preprocess is None:
        return train, valid
    seen = fit_transform(data, preprocess, fold.fitted)
    whole = TensorDataset(*seen.eval(torch.arange(seen.n_samples)))
    if seen.one_view:
        return whole, whole
    rows = data.inputs(torch.arange(data.n_samples))
    return _PreprocessedSamples(train, fit_on(preprocess, rows, data.targets, fold.fitted)), whole


@dataclass(frozen=True, eq=False)
class _PreprocessedSamples(Dataset[Any]):
    """A dataset whose samples pass a fitted transformer one by one."""

    samples: Any
    fit: Any

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample, target = self.samples[index]
        return transform(self.fit, exact(default_collate([sample])))[0], target
