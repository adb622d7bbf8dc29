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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from asynckfold.data.arrays import exact
from asynckfold.data.batches import Batches
from asynckfold.data.transforms.trees import on_device
from asynckfold.jobs.criteria import TRANSFORMED, UNKNOWN
from asynckfold.jobs.folds import Fold, Indices
from asynckfold.jobs.messages import Task
from asynckfold.jobs.objective import REGRESSION
from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Baseline
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import evaluation, loop, setup
from asynckfold.training.batches import epoch_samples
from asynckfold.training.bundle import Bundle
from asynckfold.training.calls import outputs_of
from asynckfold.training.isolation.guard import isolated
from asynckfold.training.job_log import JobLog, NoLog
from asynckfold.training.preprocessing import fit_on, transform
from asynckfold.training.training_run import Report, Training

ESTIMATE_SECONDS = 0.3
"""How long an estimate times a model's batches, in training and in evaluation."""


_CPU = torch.device("cpu")


def measure(
    bundle: Bundle,
    data: Batches,
    stop: Callable[[], bool],
    device: torch.device = _CPU,
    report: Report = lambda event: None,
) -> Baseline | None:
    """Run the loop over all jobs of the plan; None if `stop` asked to leave."""
    by_job: dict[str, float] = {}
    epochs: dict[str, list[tuple[float, float]]] = {}
    class_counts: dict[str, list[tuple[int, int]]] = {}
    seconds: dict[str, float] = {}
    for job in bundle.plan.jobs:
        started = time.perf_counter()
        try:
            with isolated(patches=True), NoLog() as log:
                training = _built(bundle, job, data, device, log)
                loop.run(training, training.params, report, stop)
        except (Exception, SystemExit):  # noqa: BLE001
            # It fails in the sweep, too, which records the traceback.
            continue
        if stop():
            return None
        seconds[job.id] = time.perf_counter() - started
        passed = itertools.accumulate(item.seconds for item in training.epochs)
        losses = [item.train_loss for item in training.epochs]
        epochs[job.id] = [*zip(passed, losses, strict=True)]
        objective, accuracy = training.objective, training.epochs[-1].accuracy
        known = objective.scale not in (TRANSFORMED, UNKNOWN)
        # The scores of pixels are others than the share of pixels that are right.
        if objective.kind != REGRESSION and not objective.is_dense and known:
            assert accuracy is not None
            by_job[job.id] = accuracy
            class_counts[job.id] = _class_counts(training)
    scores: dict[str, list[float]] = {}
    for job in bundle.plan.jobs:
        if job.id in by_job:
            scores.setdefault(job.candidate, []).append(by_job[job.id])
    return _baseline(
        "measured",
        bundle.plan.jobs,
        seconds,
        accuracy={name: fmean(each) for name, each in scores.items()},
        by_job=by_job,
        epochs=epochs,
        class_counts=class_counts,
    )


def _baseline(
    kind: str, jobs: Sequence[Job], seconds: Mapping[str, float], **measured: Any
) -> Baseline:
    """Return what took these seconds by job, with those of candidates whose jobs were all timed."""
    by_candidate: dict[str, float] = {}
    for job in jobs:
        before = by_candidate.get(job.candidate, 0.0)
        by_candidate[job.candidate] = before + seconds.get(job.id, math.nan)
    timed = {name: total for name, total in by_candidate.items() if not math.isnan(total)}
    total, threads = math.fsum(seconds.values()), torch.get_num_threads()
    return Baseline(kind, total, threads, timed, seconds_by_job=seconds, **measured)


def _class_counts(training: Training) -> list[tuple[int, int]]:
    """Return (right, all) held-out samples of each class; empty unless each has one class."""
    objective, classes = training.objective, len(training.bundle.plan.classes)
    if training.outputs is None or not classes or not objective.is_classes:
        return []
    encoded = training.data.targets_of(training.valid).cpu()
    hits = evaluation.right(objective, torch.tensor(training.outputs), encoded)
    targets = objective.codes(encoded.numpy())
    if targets.ndim != 1 or hits is None:
        return []
    recognised = targets[hits.numpy()]
    return [
        (int((recognised == number).sum()), int((targets == number).sum()))
        for number in range(classes)
    ]


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
                with isolated(patches=True), NoLog() as log:
                    training = _built(bundle, job, data, device, log, accumulate=1, pretrains=False)
                    training.begin_epoch()
                    train = _per_batch(_steps(training), stop)
                    with evaluation.evaluating(training):
                        valid = _per_batch(training.batches_of(training.valid), stop)
                    by_model[where] = train, valid
            except (Exception, SystemExit):  # noqa: BLE001
                # As above.
                by_model[where] = None
        batch_seconds = by_model[where]
        if batch_seconds is None:
            continue
        fold, size = bundle.fold_of(job), bundle.plan.batch_size
        rows = zip(batch_seconds, (fold.train, fold.valid), strict=True)
        epoch = sum(each * math.ceil(len(indices) / size) for each, indices in rows)
        seconds[job.id] = epoch * bundle.plan.params.epochs
    return _baseline("estimated", bundle.plan.jobs, seconds)


def _steps(training: Training) -> Iterator[None]:
    for _ in training.bounds:
        training.step()
        yield


def _per_batch(work: Iterator[Any], stop: Callable[[], bool]) -> float:
    """Median seconds of a batch, without the first, which warms up."""
    seconds: list[float] = []
    started = moment = time.perf_counter()
    for _ in work:
        before, moment = moment, time.perf_counter()
        seconds.append(moment - before)
        if moment - started > ESTIMATE_SECONDS or stop():
            break
        moment = time.perf_counter()
    return median(seconds[1:] or seconds)


@dataclass(eq=False)
class _OrdinaryTraining(Training):
    """A job whose batches come from a DataLoader, in the sweep's order, and that saves nothing."""

    train_view: Any = None
    eval_view: Any = None
    loader: Iterator[Any] = field(default_factory=lambda: iter(()))
    taken: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def order_samples(self) -> None:
        """Begin an epoch, in the sweep's order."""
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        seed, sampler = self.task.job.seed, self.bundle.recipe.sampler
        self.order = torch.from_numpy(
            epoch_samples(sampler, self.data, self.train, seed, self.epoch)
        )
        parts = [self.order[low:high].tolist() for low, high in self.bounds]
        # Without its `generator`, it would draw from the one that dropout uses.
        draws = torch.Generator()
        self.loader = iter(DataLoader(self.train_view, batch_sampler=parts, generator=draws))
        self.reported_at, self.taken = time.monotonic(), {}

    def samples_of(self, batch: int) -> tuple[Any, torch.Tensor]:
        """Return the next batch; again, where an optimizer computes several gradients of it."""
        if batch not in self.taken:
            self.taken = {
                number: item for number, item in self.taken.items() if number >= self.batch
            }
            inputs, targets = self._moved(next(self.loader))
            rows = self.order[slice(*self.bounds[batch])]
            self.taken[batch] = inputs, self.data.weighted(targets, rows)
        return self.taken[batch]

    def batches_of(self, indices: Indices) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yield targets and outputs of some samples, batch by batch, in evaluation mode."""
        samples = Subset(self.eval_view, indices.tolist())
        for batch in DataLoader(samples, self.params.eval_batch_size):
            inputs, targets = self._moved(batch)
            yield targets, outputs_of(self.model, inputs, self.params.precision)

    def _moved(self, batch: Any) -> tuple[Any, torch.Tensor]:
        inputs, targets = batch
        return on_device(inputs, self.device), targets.to(self.device)

    def save(self, report: Report) -> None:
        """Write nothing: an ordinary loop has no checkpoints."""


def _built(
    bundle: Bundle,
    job: Job,
    data: Batches,
    device: torch.device,
    log: JobLog,
    *,
    pretrains: bool = True,
    **changes: Any,
) -> _OrdinaryTraining:
    """Build an ordinary training, on the kind of device that the sweep uses for the job."""
    plan = bundle.plan
    changes["eval_batch_size"] = plan.batch_size
    bundle = replace(bundle, plan=replace(plan, params=replace(plan.params, **changes)))
    device = device if plan.device_of(job.candidate) == "cuda" else _CPU
    built = setup.build(
        *(bundle, Task(job, 0), data, device, log, Heartbeat()), pretrains=pretrains, ordinary=True
    )
    train_view, eval_view = views(bundle, data, built.data, bundle.fold_of(job))
    return _OrdinaryTraining(**vars(built), train_view=train_view, eval_view=eval_view)


def views(
    bundle: Bundle, data: Batches, seen: Batches, fold: Fold
) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the train view and the eval view of all samples as torch datasets.

    `data` are the samples before preprocessing, `seen` after it.
    """
    train, valid = bundle.ordinary
    preprocess = bundle.recipe.preprocess
    targets = None if seen.inverse is None else seen.targets.cpu()
    if preprocess is None and targets is None:
        return train, valid
    if preprocess is None:
        return _SeenSamples(train, None, targets), _SeenSamples(valid, None, targets)
    whole = TensorDataset(*(part.cpu() for part in seen.eval(torch.arange(seen.n_samples))))
    if seen.one_view:
        return whole, whole
    rows = data.inputs(torch.arange(data.n_samples))
    fit = fit_on(preprocess, rows, data.targets, fold.fitted)
    return _SeenSamples(train, fit, targets), whole


@dataclass(frozen=True, eq=False)
class _SeenSamples(Dataset[Any]):
    """A dataset whose samples pass a fitted transformer one by one, with other targets."""

    samples: Any
    fit: Any
    targets: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
        sample, target = self.samples[index]
        if self.fit is not None:
            sample = transform(self.fit, exact(default_collate([sample])))[0]
        return sample, target if self.targets is None else self.targets[index]
