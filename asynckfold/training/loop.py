"""The plain trainer: one job, from its seed or its last checkpoint to its result.

::

    train ── seed, build ── restore? ──┐
                                       ▼  run
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
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.data import Batches
from asynckfold.errors import StoreCorruptError
from asynckfold.folds import Indices
from asynckfold.messages import CheckpointWritten, EpochEnded, News, Progress, Remark, Task
from asynckfold.plan import Job, Plan, TrainerParams
from asynckfold.pulse import Pulse
from asynckfold.result import DIVERGED, DONE, Averaged, Epoch, Result, StageEpoch
from asynckfold.store import CheckpointRef
from asynckfold.training import (
    checkpoint,
    evaluation,
    lr_schedules,
    partitions,
    pretraining,
    saving,
    seeding,
)
from asynckfold.training.bundle import Bundle, JobLog, job_folder
from asynckfold.training.compiling import compile_whole
from asynckfold.training.kernels import follow_parameters, with_fused_kernel
from asynckfold.training.partitions import Deal
from asynckfold.training.precision import outputs_of
from asynckfold.training.pretraining import Pretrained

_PLACE = "__asynckfold_place__"
"""The attribute of an exception that says where it was raised."""

NEWS_SECONDS = 0.2
"""Between two pieces of news of one job: a display needs no more."""

RESIDENT_SHARE = 0.5
"""Of the free memory of a GPU, what inputs may take to reside there: the rest is for the model, its
gradients and activations, and for another job. No bit depends on where they are."""

Report = Callable[[News], None]


class Diverged(Exception):  # noqa: N818
    """The loss became infinite or NaN, or an output NaN."""


class Course(Protocol):
    """What `run` takes from batch to batch: one job, or several that are trained as one.

    ``epoch`` whole epochs and ``batch`` of the ``batches`` of the next are behind it.
    """

    epoch: int
    batch: int
    pulse: Pulse

    @property
    def batches(self) -> int:
        """Batches of an epoch."""

    @property
    def ended(self) -> bool:
        """Whether nothing is left to be trained."""

    def begin_epoch(self) -> None:
        """Seed, or take up the random state of a checkpoint."""

    def step(self) -> None:
        """Train on the next batch."""

    def tell(self, report: Report) -> None:
        """Say where it is, when it is time."""

    def end_epoch(self, started: float, report: Report) -> None:
        """Evaluate, step the LR schedule, note the epoch."""

    def save(self, report: Report) -> None:
        """Write a checkpoint."""


@dataclass(eq=False)
class Training:
    """A job in progress: the live objects and how far it is.

    ``train`` is divided into batches at ``bounds``; ``steer`` are the samples of the training fold
    that steer an LR schedule which reacts to a loss. ``epoch`` whole epochs and ``batch`` batches
    of the next are behind it, which began with the learning rate ``lr``. ``outputs`` are those of
    the last evaluation of ``valid``, ``logged`` how many lines the log has of the epoch's batches.
    ``pretraining`` is what a stage before the training reported, ``pretrained`` what came of it,
    where there was one just now.
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
    order: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    told: float = 0.0
    pretrained: str = ""
    pretraining: tuple[StageEpoch, ...] = ()
    logged: int = 0

    @property
    def seed(self) -> int:
        """The job's seed."""
        return self.task.job.seed

    @property
    def params(self) -> TrainerParams:
        """How it is trained."""
        return self.bundle.plan.params

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return len(self.bounds)

    @property
    def ended(self) -> bool:
        """Whether all epochs are behind it."""
        return self.epoch == self.params.epochs

    @property
    def steps_each_batch(self) -> bool:
        """Whether the LR schedule steps after every batch."""
        reacts = lr_schedules.needs_metric(self.lr_schedule)
        return self.params.lr_step == "batch" and not reacts

    def begin_epoch(self) -> None:
        """Put the samples in the epoch's order, and the generators where they have to be."""
        self.put_in_order()
        if self.random is not None:
            seeding.restore(self.random)
            self.random = None
        if self.batch == 0:
            seeding.seed_all(self.epoch_seed)
        evaluation.set_mode(self, train=True)

    def put_in_order(self) -> None:
        """Begin or continue an epoch, but for the generators."""
        if self.batch == 0:
            self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.order = torch.from_numpy(epoch_order(self.train, self.seed, self.epoch))
        self.told = time.monotonic()
        self.logged = self.batch // self.params.print_frequency

    @property
    def epoch_seed(self) -> int:
        """What the generators are seeded with at the start of the epoch."""
        return seeding.stream(self.seed, self.epoch + 1)

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets."""
        return self.samples_of(self.batch)

    def samples_of(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of a batch of the epoch."""
        low, high = self.bounds[batch]
        return self.data.train(self.order[low:high], self.seed, self.epoch)

    def step(self) -> None:
        """Train on the next batch."""
        self.note_step(training_step(self, *self.next_batch()))
        if self.steps_each_batch:
            self.lr_schedule.step()

    def note_step(self, loss: torch.Tensor) -> None:
        """One more batch is behind it."""
        self.losses.append(loss)
        self.batch += 1

    def tell(self, report: Report) -> None:
        """Write the log, and report progress where the last is some time ago."""
        params, job = self.params, self.task.job
        # Several processes may do several batches at once.
        before, self.logged = self.logged, self.batch // params.print_frequency
        if self.logged > before:
            self.log.write(
                f"epoch {self.epoch + 1}/{params.epochs} batch {self.batch}/{self.batches} "
                f"loss {float(self.losses[-1]):.4f}\n"
            )
        now = time.monotonic()
        if now - self.told < NEWS_SECONDS:
            return
        self.told = now
        report(
            Progress(
                job.id,
                self.task.attempt,
                self.epoch + 1,
                params.epochs,
                self.batch,
                self.batches,
                float(self.losses[-1]),
            )
        )

    def end_epoch(self, started: float, report: Report) -> None:
        """Evaluate, step the LR schedule, note the epoch."""
        item = self.scored()
        self.step_lr_schedule()
        self.close_epoch(item, started, report)

    def scored(self) -> Epoch:
        """Return the losses of the epoch, which still has to end.

        Raises
        ------
        Diverged
            A loss is not finite, or an output NaN.
        """
        train_loss = _mean_loss(self)
        # What is compiled for training may be compiled once more for evaluation.
        self.pulse.aside()
        scoring = time.perf_counter()
        self.outputs, valid_loss, accuracy = evaluation.evaluate(self, self.valid)
        self.score_seconds = time.perf_counter() - scoring
        where = f"at epoch {self.epoch + 1} (learning rate {self.lr:g})"
        if np.isnan(self.outputs).any():
            raise Diverged(f"an output on the held-out fold became nan {where}")
        if not np.isfinite(valid_loss):
            raise Diverged(f"the loss on the held-out fold became {valid_loss} {where}")
        return Epoch(self.epoch + 1, train_loss, valid_loss, accuracy, self.lr, 0.0)

    def outputs_on(self, indices: Indices) -> torch.Tensor:
        """Return the outputs on some samples, in evaluation mode."""
        return evaluation.outputs_on(self, indices, self.pulse.beat)

    def step_lr_schedule(self) -> None:
        """Step it at the end of an epoch, with the loss that it may want."""
        if lr_schedules.needs_metric(self.lr_schedule):
            self.lr_schedule.step(evaluation.evaluate(self, self.steer)[1])
        elif self.params.lr_step == "epoch":
            self.lr_schedule.step()

    def close_epoch(self, item: Epoch, started: float, report: Report) -> None:
        """Note an epoch that `scored` returned."""
        self.epoch, self.batch, self.losses = self.epoch + 1, 0, []
        item = replace(item, seconds=time.perf_counter() - started)
        self.epochs.append(item)
        self.log.write(
            f"epoch {item.number} train_loss {item.train_loss:.4f} "
            f"valid_loss {item.valid_loss:.4f} "
            + (f"accuracy {item.accuracy:.4f} " if item.accuracy is not None else "")
            + f"lr {item.lr:g} seconds {item.seconds:.2f}\n"
        )
        report(EpochEnded(self.task.job.id, self.task.attempt, item))

    def save(self, report: Report) -> None:
        """Write a checkpoint, and report it."""
        task, root = self.task, self.bundle.root
        name = f"checkpoint-{self.epoch:04}-{self.batch:06}-{task.attempt}.safetensors"
        path = job_folder(root, task.job) / name
        # A slow disk is no hang.
        self.pulse.aside()
        digest, size = checkpoint.save(path, self.tree(), root)
        file = str(path.relative_to(root))
        report(
            CheckpointWritten(
                CheckpointRef(task.job.id, task.attempt, self.epoch, self.batch, file, digest, size)
            )
        )

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
            # A step after the last there will not be.
            "optimizer": None if self.ended else self.optimizer_state(),
            "lr_schedule": self.lr_schedule.state_dict(),
            "criterion": self.criterion.state_dict()
            if isinstance(self.criterion, nn.Module)
            else None,
            "random": self.random_state(),
            # A second evaluation need not give the same: a model may draw random numbers in it.
            "outputs": self.outputs if self.ended else None,
            **self._stages(),
        }

    def _stages(self) -> dict[str, Any]:
        """Checkpoints of models without a stage are as they were before there was one."""
        stages = [vars(item) for item in self.pretraining]
        return {"pretraining": stages} if stages else {}

    def averaged(self) -> Averaged | None:
        """Return what averaging has done so far; None where nothing is averaged."""
        return None

    def optimizer_state(self) -> dict[str, Any]:
        """Return what the optimizer keeps, as the plain one does."""
        return self.optimizer.state_dict()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take up what `optimizer_state` returned."""
        self.optimizer.load_state_dict(state)
        follow_parameters(self.optimizer)

    def random_state(self) -> dict[str, Any]:
        """Return the state of the generators."""
        return seeding.state()

    def take_up(self, tree: dict[str, Any]) -> None:
        """Put everything where a tree says it was."""
        self.model.load_state_dict(tree["model"])
        if tree["optimizer"] is not None:
            self.load_optimizer(tree["optimizer"])
        self.lr_schedule.load_state_dict(tree["lr_schedule"])
        if isinstance(self.criterion, nn.Module):
            self.criterion.load_state_dict(tree["criterion"])
        self.epoch, self.batch, self.lr = tree["epoch"], tree["batch"], tree["lr"]
        self.epochs = [Epoch(**item) for item in tree["epochs"]]
        losses = tree["losses"]
        self.losses = [] if losses is None else list(losses.to(self.device).unbind())
        self.random, self.outputs = tree["random"], tree["outputs"]
        self.pretraining = tuple(StageEpoch(**item) for item in tree.get("pretraining", ()))


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
        The samples, wherever they are.
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
        return trained(build(bundle, task, data, device, log, pulse), report, stop)


def trained(training: Training, report: Report, stop: Callable[[], bool]) -> Result | None:
    """Train from the newest good checkpoint to the result; None when asked to stop before."""
    _restore(training, report)
    if training.pretrained:
        report(Remark(training.task.job.id, "pretrained", training.pretrained))
        training.save(report)
    started = time.perf_counter()
    try:
        if not run(training, training.params, report, stop):
            return None
        return result_of(training, time.perf_counter() - started)
    except Diverged as error:
        return diverged(training, error, time.perf_counter() - started)


def note_place(error: BaseException, course: Course) -> None:
    """Let an exception know where a training was when it was raised."""
    batch, batches = course.batch, course.batches
    where = "end of the epoch" if batch == batches else f"batch {batch + 1} of {batches}"
    # The user may have defined an exception that takes no attributes.
    with contextlib.suppress(Exception):
        setattr(error, _PLACE, f"epoch {course.epoch + 1}, {where}")


def place_of(error: BaseException) -> str:
    """Return in which epoch and batch of a training an exception was raised; "" before the first.

    Examples
    --------
    >>> place_of(ValueError())
    ''
    """
    return str(getattr(error, _PLACE, ""))


def build(
    bundle: Bundle,
    task: Task,
    data: Batches,
    device: torch.device,
    log: JobLog,
    pulse: Pulse,
    *,
    pretrains: bool = True,
    cores: Sequence[int] = (),
) -> Training:
    """Seed everything and make the live objects of a job, before its first step.

    A model's stage before the training is done, too, unless a checkpoint has what came of it; on
    these cores where the job has several processes.
    """
    job, plan, recipe = task.job, bundle.plan, bundle.recipe
    fold = bundle.fold_of(job)
    data = moved(fitted(data, recipe.preprocess, fold.train), device)
    pretrained = Pretrained()

    def prepare(model: nn.Module) -> None:
        nonlocal pretrained
        if pretrains and pretraining.wanted(model) and not _restorable(bundle, task):
            size, count = plan.params.eval_batch_size, plan.params.processes
            pretrained = pretraining.pretrain(
                model, data, fold.train, job.seed, log, pulse, size, count, cores
            )

    model, optimizer = begun(bundle, job, device, prepare)
    schedule, train_part, steer = schedule_of(bundle, job, model, optimizer, fold.train)
    if plan.params.compile:
        compile_whole(model)
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
        data,
        train_part,
        list(batch_bounds(len(train_part), plan.batch_size, model)),
        steer,
        fold.valid,
        log,
        pulse,
        plan.params.clip_grad_norm,
        pretrained=pretrained.text,
        pretraining=pretrained.epochs,
    )


def begun(
    bundle: Bundle,
    job: Job,
    device: torch.device,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Seed everything, and return the model, prepared, and the optimizer of a job."""
    seeding.seed_all(job.seed)
    model = bundle.recipe.models[job.model]().to(device)
    if bundle.plan.is_channels_last(job):
        model = model.to(memory_format=torch.channels_last)
    prepare(model)
    return model, with_fused_kernel(bundle.recipe.opt_fn, model)


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
        dealt = deal_of(plan, len(train), model)
        size = plan.batch_size
        per_epoch = len(dealt.bounds if dealt else list(batch_bounds(len(train), size, model)))
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


def moved(data: Batches, device: torch.device) -> Batches:
    """Return the data on the device: inputs reside there where they fit, see `RESIDENT_SHARE`."""
    if device.type != "cuda":
        return data.to(device)
    free, _ = torch.cuda.mem_get_info(device)
    return data.to(device, int(RESIDENT_SHARE * free))


def _tree(bundle: Bundle, task: Task, ref: CheckpointRef) -> dict[str, Any]:
    """Return what a checkpoint holds; raise `StoreCorruptError` where it is not this job's."""
    tree = checkpoint.load(bundle.root / ref.file, ref.sha256, bundle.root)
    check(bundle, task, tree)
    return tree


def check(bundle: Bundle, task: Task, tree: dict[str, Any]) -> None:
    """Refuse a tree that `Training.tree` returned for another job or plan."""
    if tree["job"] != task.job.id:
        raise StoreCorruptError(f"a checkpoint of {tree['job']} stands for {task.job.id}")
    if tree["plan"] != bundle.plan.fingerprint:
        raise StoreCorruptError(f"a checkpoint of {tree['job']} comes from another plan")


def _restorable(bundle: Bundle, task: Task) -> bool:
    for ref in task.checkpoints:
        with contextlib.suppress(StoreCorruptError):
            _tree(bundle, task, ref)
            return True
    return False


def _restore(training: Training, report: Report) -> None:
    refs = training.task.checkpoints
    for position, ref in enumerate(refs, 1):
        try:
            training.take_up(_tree(training.bundle, training.task, ref))
        except StoreCorruptError as error:
            instead = "an older one is used" if position < len(refs) else "the job starts anew"
            report(Remark(training.task.job.id, "damage", f"{error}; {instead}"))
        else:
            training.log.write(f"continues after epoch {training.epoch}, batch {training.batch}\n")
            return


def run(course: Course, params: TrainerParams, report: Report, stop: Callable[[], bool]) -> bool:
    """Train to the end; return False when asked to stop before.

    What is raised meanwhile knows from then on where: see `place_of`.
    """
    try:
        return _run(course, params, report, stop)
    except BaseException as error:
        note_place(error, course)
        raise


def _run(course: Course, params: TrainerParams, report: Report, stop: Callable[[], bool]) -> bool:
    saver = saving.Saver(lambda: course.save(report))
    while not course.ended:
        started = time.perf_counter()
        course.begin_epoch()
        while course.batch < course.batches:
            course.step()
            course.pulse.beat()
            course.tell(report)
            unfinished = course.batch < course.batches
            if stop() and unfinished:
                saver.save()
                return False
            if unfinished and saver.due(saving.MIDDLE_SECONDS):
                saver.save()
        course.end_epoch(started, report)
        if not course.ended and stop():
            saver.save()
            return False
        due = course.epoch % params.save_checkpoint_frequency == 0
        if course.ended or (due and saver.due(saving.EPOCH_SECONDS)):
            saver.save()
    return True


def training_step(training: Training, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Take one step of the optimizer; return the loss, detached."""

    def backward() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = add_gradient(training, inputs, targets)
        clip(training)
        return loss

    if isinstance(training.optimizer, torch.optim.LBFGS):
        # The only one of torch.optim that evaluates the loss more than once a step.
        return torch.as_tensor(training.optimizer.step(backward)).detach()  # type: ignore[no-untyped-call]
    loss = backward()
    training.optimizer.step()
    return loss


def add_gradient(
    training: Training, inputs: torch.Tensor, targets: torch.Tensor, weight: float = 1.0
) -> torch.Tensor:
    """Add the gradient of the loss, times a weight, to what the parameters have.

    With the weight 1, its bits are those without any. Returns the loss, detached, without weight.
    """
    outputs = outputs_of(training.model, inputs, training.params.precision)
    loss: torch.Tensor = training.criterion(outputs, targets)
    (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def weight(criterion: Callable[..., Any], share: float) -> float:
    """Return the weight of the loss of a part of a batch, which has this share of its samples.

    Means are weighted by samples; a criterion whose ``reduction`` says that it sums needs no
    weights.
    """
    return 1.0 if getattr(criterion, "reduction", "mean") == "sum" else share


def clip(training: Training) -> None:
    """Shorten the gradient where the plan says so."""
    if training.clip is not None:
        nn.utils.clip_grad_norm_(training.model.parameters(), training.clip)


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


def result_of(training: Training, fit_seconds: float) -> Result:
    """Return the result of a training that reached its end."""
    return Result(
        training.task.job.id,
        training.task.attempt,
        DONE,
        epochs=tuple(training.epochs),
        outputs=training.outputs,
        weights=checkpoint.weights_digest(training.model),
        fit_seconds=fit_seconds,
        score_seconds=training.score_seconds,
        pretraining=training.pretraining,
        averaged=training.averaged(),
    )


def diverged(training: Training, error: Diverged, fit_seconds: float) -> Result:
    """Return the result of a training that diverged."""
    training.log.write(f"diverged: {error}\n")
    return Result(
        training.task.job.id,
        training.task.attempt,
        DIVERGED,
        epochs=tuple(training.epochs),
        fit_seconds=fit_seconds,
        error=str(error),
        pretraining=training.pretraining,
        averaged=training.averaged(),
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
        if count - high == 1 and normalises_batches(model):
            high = count
        yield low, high
        low = high


def deal_of(plan: Plan, count: int, model: nn.Module) -> Deal | None:
    """Return how so many samples are dealt out to the processes of averaging, where they are."""
    return partitions.deal_of(
        plan.params, count, lambda part: batch_bounds(part, plan.batch_size, model)
    )


def normalises_batches(model: nn.Module) -> bool:
    """Whether it has BatchNorm."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
