"""The plain trainer: one job, from its seed or its last checkpoint to its result.

::

    train ── seed, build ── restore? ──┐
                                       ▼
              ┌─ epoch: seeded order ─ batches: gather, step ─ (stop? checkpoint, leave)
              │                        evaluate the held-out fold
              └─ LR schedule ─ checkpoint ◄─┘                        ── result

A job's result depends on its plan alone: every random choice comes from (seed, epoch) or (seed,
epoch, sample), and a checkpoint carries the generators of an epoch that was left in the middle.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.data import Batches
from asynckfold.errors import StoreCorruptError
from asynckfold.folds import Indices
from asynckfold.messages import CheckpointWritten, EpochEnded, News, Progress, Remark, Task
from asynckfold.plan import Job
from asynckfold.pulse import Pulse
from asynckfold.result import DIVERGED, DONE, Epoch, Result
from asynckfold.store import CheckpointRef
from asynckfold.training import checkpoint, lr_schedules, saving, seeding
from asynckfold.training.bundle import Bundle, JobLog, job_folder

_PLACE = "__asynckfold_place__"
"""The attribute of an exception that says where it was raised."""

NEWS_SECONDS = 0.2
"""Between two pieces of news of one job: a display needs no more."""

Report = Callable[[News], None]


class Diverged(Exception):  # noqa: N818
    """The loss became infinite or NaN, or an output NaN."""


@dataclass(eq=False)
class Training:
    """A job in progress: the live objects and how far it is.

    ``train`` is divided into batches at ``bounds``; ``steer`` are the samples of the training fold
    that steer an LR schedule which reacts to a loss. ``epoch`` whole epochs and ``batch`` batches
    of the next are behind it, which began with the learning rate ``lr``. ``outputs`` are those of
    the last evaluation of ``valid``.
    """

    task: Task
    bundle: Bundle
    device: torch.device
    model: nn.Module
    criterion: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    lr_schedule: Any
    data: Batches
    train: Indices
    bounds: Sequence[tuple[int, int]]
    steer: Indices
    valid: Indices
    log: JobLog
    pulse: Pulse = field(default_factory=Pulse)
    clip: float | None = None
    epoch: int = 0
    batch: int = 0
    lr: float = 0.0
    losses: list[torch.Tensor] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    random: dict[str, Any] | None = None
    outputs: npt.NDArray[np.float32] | None = None
    score_seconds: float = 0.0

    @property
    def seed(self) -> int:
        """The job's seed."""
        return self.task.job.seed

    def tree(self) -> dict[str, Any]:
        """Return everything that a continuation needs."""
        return {
            "job": self.task.job.id,
            "plan": self.bundle.plan.fingerprint,
            "epoch": self.epoch,
            "batch": self.batch,
            "lr": self.lr,
            "losses": torch.stack(self.losses) if self.losses else None,
            "epochs": [vars(item) for item in self.epochs],
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_schedule": self.lr_schedule.state_dict(),
            "criterion": self.criterion.state_dict()
            if isinstance(self.criterion, nn.Module)
            else None,
            "random": seeding.state(),
            # A second evaluation need not give the same: a model may draw random numbers in it.
            "outputs": self.outputs if self.epoch == self.bundle.plan.params.epochs else None,
        }

    def continue_from(self, tree: dict[str, Any]) -> None:
        """Take up a tree that `tree` returned."""
        if tree["job"] != self.task.job.id:
            raise StoreCorruptError(f"a checkpoint of {tree['job']} stands for {self.task.job.id}")
        if tree["plan"] != self.bundle.plan.fingerprint:
            raise StoreCorruptError(f"a checkpoint of {tree['job']} comes from another plan")
        self.model.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])
        self.lr_schedule.load_state_dict(tree["lr_schedule"])
        if isinstance(self.criterion, nn.Module):
            self.criterion.load_state_dict(tree["criterion"])
        self.epoch, self.batch, self.lr = tree["epoch"], tree["batch"], tree["lr"]
        self.epochs = [Epoch(**item) for item in tree["epochs"]]
        losses = tree["losses"]
        self.losses = [] if losses is None else list(losses.to(self.device).unbind())
        self.random, self.outputs = tree["random"], tree["outputs"]


def train(
    bundle: Bundle,
    task: Task,
    data: Batches,
    device: torch.device,
    report: Report,
    stop: Callable[[], bool],
    pulse: Pulse | None = None,
) -> Result | None:
    """Train one job and score its held-out fold.

    Parameters
    ----------
    bundle : Bundle
        The sweep.
    task : Task
        The job, and where earlier attempts got to.
    data : Batches
        The samples, already on `device`.
    device : torch.device
        Where to train.
    report : callable
        Receives progress, epochs and checkpoints as they come.
    stop : callable
        Asked after every batch; when true, the training is saved and left.
    pulse : Pulse, optional
        Shows every finished batch to whoever watches.

    Returns
    -------
    Result or None
        None when it was asked to stop.
    """
    pulse = pulse or Pulse()
    pulse.aside()
    with JobLog(bundle.root, task.job) as log:
        training = build(bundle, task, data, device, log, pulse)
        _restore(training, report)
        started = time.perf_counter()
        try:
            if not _run(training, report, stop):
                return None
            return _result(training, time.perf_counter() - started)
        except Diverged as error:
            log.write(f"diverged: {error}\n")
            return Result(
                task.job.id,
                task.attempt,
                DIVERGED,
                epochs=tuple(training.epochs),
                fit_seconds=time.perf_counter() - started,
                error=str(error),
            )
        except BaseException as error:
            _note_place(error, training)
            raise


def _note_place(error: BaseException, training: Training) -> None:
    batch, batches = training.batch, len(training.bounds)
    where = "end of the epoch" if batch == batches else f"batch {batch + 1} of {batches}"
    # The user may have defined an exception that takes no attributes.
    with contextlib.suppress(Exception):
        setattr(error, _PLACE, f"epoch {training.epoch + 1}, {where}")


def place_of(error: BaseException) -> str:
    """Return in which epoch and batch of a training an exception was raised; "" before the first.

    Examples
    --------
    >>> place_of(ValueError())
    ''
    """
    return str(getattr(error, _PLACE, ""))


def build(
    bundle: Bundle, task: Task, data: Batches, device: torch.device, log: JobLog, pulse: Pulse
) -> Training:
    """Seed everything and make the live objects of a job, before its first step."""
    job, plan, recipe = task.job, bundle.plan, bundle.recipe
    fold = bundle.fold_of(job)
    seeding.seed_all(job.seed)
    model = recipe.models[job.model]().to(device)
    optimizer = recipe.opt_fn(model)
    schedule, train_part, steer = schedule_of(bundle, job, model, optimizer, fold.train)
    criterion = copy.deepcopy(recipe.criterion)
    if isinstance(criterion, nn.Module):
        criterion = criterion.to(device)
    return Training(
        task,
        bundle,
        device,
        model,
        criterion,
        optimizer,
        schedule,
        fitted(data, recipe.preprocess, fold.train).to(device),
        train_part,
        list(batch_bounds(len(train_part), plan.batch_size, model)),
        steer,
        fold.valid,
        log,
        pulse,
        plan.params.clip_grad_norm,
    )


def schedule_of(
    bundle: Bundle, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, train: Indices
) -> tuple[Any, Indices, Indices]:
    """Return the LR schedule, the samples to train on, and those that steer the schedule.

    A rule that reacts to a loss gets samples of the training fold, never the fold that is scored;
    for any other, all samples are trained on and none steer.

    Raises
    ------
    ValueError
        The training fold is too small to be divided.
    """
    plan, spec = bundle.plan, bundle.recipe.lr_schedules[job.lr_schedule]
    made = None if isinstance(spec, str) else lr_schedules.make(spec, optimizer, 0)
    steer = train[:0]
    if spec == "reduce" or lr_schedules.needs_metric(made):
        if len(train) < 2:
            raise ValueError(
                f"LR schedule {job.lr_schedule} sets samples of the training fold aside: the fold "
                f"must have at least 2, it has {len(train)}. Use more data or another LR schedule"
            )
        order = np.random.default_rng([job.seed, 1]).permutation(len(train))
        count = min(max(1, round(len(train) * plan.params.inner_val)), len(train) - 1)
        train, steer = train[np.sort(order[count:])], train[np.sort(order[:count])]
    if made is None:
        per_epoch = len(list(batch_bounds(len(train), plan.batch_size, model)))
        steps = plan.params.epochs * (per_epoch if plan.params.lr_step == "batch" else 1)
        made = lr_schedules.make(spec, optimizer, steps)
    return made, train, steer


def fitted(data: Batches, preprocess: Any, train: Indices) -> Batches:
    """Return the data as a scikit-learn transformer gives it that was fitted on `train` only.

    It is fitted with the targets, which those that need none ignore, and sees each sample as one
    row of features.
    """
    if preprocess is None:
        return data
    from sklearn.base import clone

    rows = data.inputs(np.arange(data.n_samples))
    flat = rows.reshape(len(rows), -1)
    targets = data.targets.cpu().numpy()
    changed = clone(preprocess).fit(flat[train], targets[train]).transform(flat)
    return data.with_inputs(torch.from_numpy(np.ascontiguousarray(changed, dtype=np.float32)))


def _restore(training: Training, report: Report) -> None:
    refs = training.task.checkpoints
    for position, ref in enumerate(refs, 1):
        try:
            root = training.bundle.root
            training.continue_from(checkpoint.load(root / ref.file, ref.sha256, root))
        except StoreCorruptError as error:
            instead = "an older one is used" if position < len(refs) else "the job starts anew"
            report(Remark(training.task.job.id, "damage", f"{error}; {instead}"))
        else:
            training.log.write(f"continues after epoch {training.epoch}, batch {training.batch}\n")
            return


def _run(training: Training, report: Report, stop: Callable[[], bool]) -> bool:
    """Train to the end; return False when asked to stop before."""
    params = training.bundle.plan.params
    saver = saving.Saver(lambda: _save(training, report))
    while training.epoch < params.epochs:
        started = time.perf_counter()
        if training.batch == 0:
            training.lr = float(training.optimizer.param_groups[0]["lr"])
        if not _train_epoch(training, report, stop, saver):
            saver.save()
            return False
        _end_epoch(training, started, report)
        last = training.epoch == params.epochs
        if not last and stop():
            saver.save()
            return False
        due = training.epoch % params.save_checkpoint_frequency == 0
        if last or (due and saver.due(saving.EPOCH_SECONDS)):
            saver.save()
    return True


def _train_epoch(
    training: Training, report: Report, stop: Callable[[], bool], saver: saving.Saver
) -> bool:
    plan, number = training.bundle.plan, training.epoch + 1
    order = torch.from_numpy(epoch_order(training.train, training.seed, training.epoch))
    bounds = training.bounds
    if training.random is not None:
        seeding.restore(training.random)
        training.random = None
    if training.batch == 0:
        seeding.seed_all(seeding.stream(training.seed, number))
    _set_mode(training, train=True)
    told = time.monotonic()
    for position in range(training.batch, len(bounds)):
        low, high = bounds[position]
        inputs, targets = training.data.train(order[low:high], training.seed, training.epoch)
        training.losses.append(training_step(training, inputs, targets))
        if plan.params.lr_step == "batch" and not lr_schedules.needs_metric(training.lr_schedule):
            training.lr_schedule.step()
        training.batch = position + 1
        training.pulse.beat()
        told = _tell(training, len(bounds), told, report)
        unfinished = training.batch < len(bounds)
        if stop() and unfinished:
            return False
        if unfinished and saver.due(saving.MIDDLE_SECONDS):
            saver.save()
    return True


def training_step(training: Training, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Take one step of the optimizer; return the loss, detached."""

    def backward() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss: torch.Tensor = training.criterion(training.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if training.clip is not None:
            nn.utils.clip_grad_norm_(training.model.parameters(), training.clip)
        return loss

    if isinstance(training.optimizer, torch.optim.LBFGS):
        # The only one of torch.optim that evaluates the loss more than once a step.
        return torch.as_tensor(training.optimizer.step(backward)).detach()  # type: ignore[no-untyped-call]
    loss = backward()
    training.optimizer.step()
    return loss.detach()


def _tell(training: Training, batches: int, told: float, report: Report) -> float:
    params, job = training.bundle.plan.params, training.task.job
    if training.batch % params.print_frequency == 0:
        training.log.write(
            f"epoch {training.epoch + 1}/{params.epochs} batch {training.batch}/{batches} "
            f"loss {float(training.losses[-1]):.4f}\n"
        )
    now = time.monotonic()
    if now - told < NEWS_SECONDS:
        return told
    report(
        Progress(
            job.id,
            training.task.attempt,
            training.epoch + 1,
            params.epochs,
            training.batch,
            batches,
            float(training.losses[-1]),
        )
    )
    return now


def _end_epoch(training: Training, started: float, report: Report) -> None:
    train_loss, lr = _mean_loss(training), training.lr
    # What is compiled for training may be compiled once more for evaluation.
    training.pulse.aside()
    scoring = time.perf_counter()
    training.outputs, valid_loss, accuracy = evaluate(training, training.valid)
    training.score_seconds = time.perf_counter() - scoring
    if np.isnan(training.outputs).any():
        raise Diverged(
            f"an output on the held-out fold became nan at epoch {training.epoch + 1} "
            f"(learning rate {lr:g})"
        )
    if not np.isfinite(valid_loss):
        raise Diverged(
            f"the loss on the held-out fold became {valid_loss} at epoch {training.epoch + 1} "
            f"(learning rate {lr:g})"
        )
    if lr_schedules.needs_metric(training.lr_schedule):
        training.lr_schedule.step(evaluate(training, training.steer)[1])
    elif training.bundle.plan.params.lr_step == "epoch":
        training.lr_schedule.step()
    training.epoch, training.batch, training.losses = training.epoch + 1, 0, []
    seconds = time.perf_counter() - started
    item = Epoch(training.epoch, train_loss, valid_loss, accuracy, lr, seconds)
    training.epochs.append(item)
    training.log.write(
        f"epoch {item.number} train_loss {train_loss:.4f} valid_loss {valid_loss:.4f} "
        + (f"accuracy {accuracy:.4f} " if accuracy is not None else "")
        + f"lr {lr:g} seconds {seconds:.2f}\n"
    )
    report(EpochEnded(training.task.job.id, training.task.attempt, item))


def _mean_loss(training: Training) -> float:
    """Mean over samples; one synchronisation with the device for a whole epoch."""
    sizes = np.array([high - low for low, high in training.bounds])
    losses = torch.stack(training.losses).flatten().double().cpu().numpy()
    if not np.isfinite(losses).all():
        first = int(np.flatnonzero(~np.isfinite(losses))[0])
        raise Diverged(
            f"the loss became {losses[first]} at epoch {training.epoch + 1}, batch {first + 1} "
            f"(learning rate {training.lr:g})"
        )
    return float(losses @ sizes / sizes.sum())


def evaluate(
    training: Training, indices: Indices
) -> tuple[npt.NDArray[np.float32], float, float | None]:
    """Return outputs, loss and accuracy (None for regression) of the model in hand."""
    _set_mode(training, train=False)
    size = training.bundle.plan.params.eval_batch_size
    outputs, targets = [], []
    # Not inference_mode: what a model keeps of such a pass could not be trained with afterwards.
    with torch.no_grad():
        for low in range(0, len(indices), size):
            inputs, wanted = training.data.eval(torch.from_numpy(indices[low : low + size]))
            outputs.append(training.model(inputs))
            targets.append(wanted)
            training.pulse.beat()
        found, wanted = torch.cat(outputs), torch.cat(targets)
        loss = float(training.criterion(found, wanted))
        accuracy = None
        if training.bundle.plan.classes:
            accuracy = float((found.argmax(1) == wanted).double().mean())
    return found.float().cpu().numpy(), loss, accuracy


def _set_mode(training: Training, *, train: bool) -> None:
    training.model.train(train)
    if isinstance(training.criterion, nn.Module):
        training.criterion.train(train)


def _save(training: Training, report: Report) -> None:
    task = training.task
    folder = job_folder(training.bundle.root, task.job)
    name = f"checkpoint-{training.epoch:04}-{training.batch:06}-{task.attempt}.safetensors"
    path = folder / name
    # A slow disk is no hang.
    training.pulse.aside()
    digest, size = checkpoint.save(path, training.tree(), training.bundle.root)
    report(
        CheckpointWritten(
            CheckpointRef(
                task.job.id,
                task.attempt,
                training.epoch,
                training.batch,
                str(Path(path).relative_to(training.bundle.root)),
                digest,
                size,
            )
        )
    )


def _result(training: Training, fit_seconds: float) -> Result:
    return Result(
        training.task.job.id,
        training.task.attempt,
        DONE,
        epochs=tuple(training.epochs),
        outputs=training.outputs,
        weights=checkpoint.weights_digest(training.model),
        fit_seconds=fit_seconds,
        score_seconds=training.score_seconds,
    )


def epoch_order(indices: Indices, seed: int, epoch: int) -> Indices:
    """Return the samples in the order of one epoch: a function of seed and epoch alone."""
    return np.random.default_rng([seed, 0, epoch]).permutation(indices)


def batch_bounds(count: int, size: int, model: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield (low, high) of each batch.

    A last batch of one sample cannot be normalised by BatchNorm; it then joins the one before.
    """
    low = 0
    while low < count:
        high = min(low + size, count)
        if count - high == 1 and _normalises_batches(model):
            high = count
        yield low, high
        low = high


def _normalises_batches(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
