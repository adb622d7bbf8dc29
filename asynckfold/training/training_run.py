"""One job in training: the live objects, the position, one step and the end of an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from asynckfold.data.batches import Batches, OrderedBatches
from asynckfold.data.device_copies import fetched, fetched_together
from asynckfold.data.transforms.trees import mapped
from asynckfold.errors import refuse
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.messages import (
    CheckpointRef,
    EpochEnd,
    NewCheckpoint,
    Progress,
    RunEvent,
    Task,
)
from asynckfold.jobs.objective import Objective
from asynckfold.jobs.result import AveragingSummary, Epoch, StageEpoch
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.store import job_folder
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import checkpoint, evaluation, gradients, lr_schedules, seeding
from asynckfold.training.batches import epoch_samples, length_problems
from asynckfold.training.bundle import Bundle
from asynckfold.training.callbacks import Callbacks
from asynckfold.training.calls import outputs_of
from asynckfold.training.evaluation import (
    accumulate_scores,
    check_finite,
    check_held_out,
    counts_of,
    evaluated,
    inner_metrics,
    measured,
    numbers,
    score_again,
    step_lr_schedule,
)
from asynckfold.training.job_log import JobLog
from asynckfold.training.losses import adds_up, as_given, mean_loss
from asynckfold.training.optimizers import follow_parameters, optimizers_of
from asynckfold.training.stopwatch import Stopwatch, mark, seconds_between
from asynckfold.training.user_steps import TrainingStep, ValidationStep, joined

EVENT_SECONDS = 0.2
"""Least time between two progress events of a job."""

Report = Callable[[RunEvent], None]

StepTaker = Callable[["Training"], torch.Tensor]
"""Training → the loss of its next batch, detached, after a step of the optimizer."""


@dataclass(eq=False)
class Training:
    """A job in training: the live objects, and the position.

    ``train``, ``inner_valid`` and ``valid`` are samples to train on, divided into batches by
    ``bounds``; inner-validation samples, for an LR schedule that reacts to a loss; the held-out
    fold. ``epoch`` and ``batch`` count finished epochs, and finished batches of the next one;
    ``lr`` is the learning rate at its start, ``losses`` the loss of each of its batches. ``random``
    is the state of the generators in a checkpoint, until the epoch continues. ``outputs`` are those
    on `valid`, unless they are scored by batch, which ``scores`` then has at the end. ``order`` and
    ``ordered`` are the samples in the order of the epoch, and their batches. ``pretrained`` sums
    the pretraining up in the attempt that ran it. ``readings`` are losses that a GPU still
    computes: whether each has arrived, and what reports it. ``graph`` takes a step on a GPU, and
    returns its loss; ``evaluation_forward`` is that of `StepGraph`. ``like`` are outputs without
    samples, where these are trees.
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
    inner_valid: Indices
    valid: Indices
    log: JobLog
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    epoch: int = 0
    batch: int = 0
    lr: float = 0.0
    losses: list[torch.Tensor] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    random: dict[str, Any] | None = None
    outputs: npt.NDArray[np.float32] | None = None
    score_seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    order: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    ordered: OrderedBatches = field(init=False)
    reported_at: float = 0.0
    pretrained: str = ""
    pretraining: tuple[StageEpoch, ...] = ()
    logged: int = 0
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    scaler: GradScaler | None = None
    readings: list[tuple[Callable[[], bool], Callable[[Report], None]]] = field(
        default_factory=list
    )
    graph: StepTaker | None = None
    evaluation_forward: Callable[[int], Callable[[Any], Any]] | None = None
    user_step: TrainingStep | None = None
    user_validation: ValidationStep | None = None
    callbacks: Callbacks | None = None
    like: Any = None

    @property
    def params(self) -> TrainerParams:
        """The trainer's parameters."""
        return self.bundle.plan.params

    @property
    def objective(self) -> Objective:
        """What the model's outputs mean."""
        return self.bundle.plan.objective_of(self.task.job.model)

    @property
    def batches(self) -> int:
        """Batches per epoch."""
        return len(self.bounds)

    @property
    def steps_left(self) -> int:
        """Batches to train on until the last epoch ends."""
        return (self.params.epochs - self.epoch) * self.batches - self.batch

    @property
    def ended(self) -> bool:
        """Whether all epochs are finished, or a callback stopped the training."""
        stopped = self.callbacks is not None and self.callbacks.state.stopped
        # Asked for in the middle of an epoch, it is to be the last.
        is_stopped = stopped and self.batch == 0 and bool(self.epochs)
        return self.epoch == self.params.epochs or self.reached_target or is_stopped

    @property
    def reached_target(self) -> bool:
        """Whether the last epoch's training loss is at most `target_loss`."""
        target = self.params.target_loss
        return target is not None and bool(self.epochs) and self.epochs[-1].train_loss <= target

    def begin_epoch(self) -> None:
        """Begin or continue an epoch: order the samples, seed or restore the generators."""
        self.order_samples()
        if self.random is not None:
            seeding.restore(self.random)
            self.random = None
        if self.batch == 0:
            seeding.seed_all(seeding.epoch_seed(self.task.job.seed, self.epoch))
        evaluation.set_mode(self.model, self.criterion, self.optimizer, train=True)

    def order_samples(self) -> None:
        """Begin or continue an epoch, without touching the generators."""
        if self.batch == 0:
            self.lr = float(self.optimizer.param_groups[0]["lr"])
        seed = self.task.job.seed
        sampler = self.bundle.recipe.sampler
        drawn = epoch_samples(sampler, self.data, self.train, seed, self.epoch)
        if sampler is not None:
            refuse(length_problems(self.bounds[-1][1], len(drawn)))
        self.order = torch.from_numpy(drawn)
        self.ordered = self.data.ordered(self.order, seed, self.epoch, training=True)
        self.reported_at = time.monotonic()
        self.logged = self.batch // self.params.print_frequency

    def samples_of(self, batch: int) -> tuple[Any, torch.Tensor]:
        """Return inputs and targets of a batch of the epoch."""
        following = self.bounds[batch + 1] if batch + 1 < self.batches else None
        return self.ordered.batch(*self.bounds[batch], following)

    def step(self) -> None:
        """Train on the next batch, or on the next `accumulate` batches by one step."""
        following = range(self.batch, min(self.batch + self.params.accumulate, self.batches))
        if len(following) > 1:
            losses = gradients.accumulated_step(self, following)
        elif self.graph is not None:
            losses = [self.graph(self)]
        else:
            losses = [gradients.training_step(self, *self.samples_of(self.batch))]
        for loss in losses:
            self.record_step(loss)
            if lr_schedules.steps_each_batch(self.lr_schedule, self.params):
                self.lr_schedule.step()
            if self.callbacks is not None:
                self.callbacks.end_batch(self.epoch, self.batch)

    def record_step(self, loss: torch.Tensor) -> None:
        """Count a finished batch."""
        self.losses.append(loss)
        if self.user_step is not None:
            low, high = self.bounds[self.batch]
            self.user_step.keep_measures(high - low)
        self.batch += 1

    def report_progress(self, report: Report) -> None:
        """Log every `print_frequency` batches; report progress every `EVENT_SECONDS`.

        A loss that a GPU still computes is reported after a later batch: nothing waits for it.
        """
        # Several processes may finish several batches at once.
        before, self.logged = self.logged, self.batch // self.params.print_frequency
        now = time.monotonic()
        reports = now - self.reported_at >= EVENT_SECONDS
        if self.logged > before or reports:
            self.reported_at = now if reports else self.reported_at
            loss, arrived = fetched(self.losses[-1])
            place = self.epoch + 1, self.params.epochs, self.batch, self.batches
            tell = partial(self._tell, loss, place, self.logged > before, reports)
            self.readings.append((arrived, tell))
        self._tell_arrived(report)

    def _tell_arrived(self, report: Report) -> None:
        while self.readings and self.readings[0][0]():
            _, tell = self.readings.pop(0)
            tell(report)

    def _tell(
        self, loss: torch.Tensor, place: tuple[int, ...], logs: bool, reports: bool, report: Report
    ) -> None:
        number, epochs, batch, batches = place
        value = float(loss)
        if self.user_step is None and adds_up(self.criterion, self.bundle.plan):
            low, high = self.bounds[batch - 1]
            value /= high - low
        if logs:
            self.log.write(f"epoch {number}/{epochs} batch {batch}/{batches} loss {value:.4f}\n")
        if reports:
            report(
                Progress(self.task.job.id, self.task.attempt, number, epochs, batch, batches, value)
            )

    def end_epoch(self, started: float, report: Report) -> None:
        """Evaluate, step the LR schedule, record the epoch."""
        try:
            item = self.score()
        finally:
            # All of them have arrived, since this waited for the losses of the epoch.
            self._tell_arrived(report)
        inner = inner_metrics(self)
        item = replace(item, logged={**item.logged, **inner})
        step_lr_schedule(self, inner.get("inner_loss"))
        if self.callbacks is not None:
            held_out = {} if self.user_validation is None else self.user_validation.measures
            seen = {name: of for name, of in item.logged.items() if name not in held_out}
            seen |= {"train_loss": item.train_loss, "lr": item.lr}
            logged = self.callbacks.end_epoch(item.number, seen)
            item = replace(item, logged={**item.logged, **logged})
            # A callback may leave another mode; what is saved at the end must be what was scored.
            evaluation.set_mode(self.model, self.criterion, self.optimizer, train=False)
        self.record_epoch(item, started, report)
        if self.ended and self.callbacks is not None and self.callbacks.end():
            score_again(self)
        self.accumulate_scores()

    def accumulate_scores(self) -> None:
        """Score the held-out fold by batch, at the end of the training, where the plan does so."""
        if self.ended:
            self.scores = accumulate_scores(self)

    def score(self) -> Epoch:
        """Evaluate the held-out fold; return the losses of the epoch.

        A GPU is waited for once, when it has computed all of it.
        """
        losses = torch.stack(self.losses).flatten().double()
        if losses.is_cpu:
            check_finite(self, losses)
        counts = counts_of(self)
        # torch.compile may compile once more for evaluation.
        self.heartbeat.begin_long_phase()
        began = mark(self.device)
        try:
            tensors = evaluated(self, self.valid)
        except Exception:
            # A model that diverged may raise.
            check_finite(self, losses.cpu())
            raise
        ended = mark(self.device)
        losses, *rest = fetched_together([losses, *counts, *tensors])
        check_finite(self, losses)
        weights = rest.pop(0).numpy() if counts else None
        train_loss = (
            mean_loss(self.criterion, self.bundle.plan, losses.numpy(), self.bounds, weights)
            if self.user_step is None
            # Of whatever it returns: the criterion may be another loss.
            else mean_loss(None, self.bundle.plan, losses.numpy(), self.bounds, None)
        )
        held_out = numbers(self, self.valid, rest)
        self.outputs = held_out.outputs
        valid_loss, measures = measured(self, held_out.loss)
        self.score_seconds = seconds_between(began, ended)
        where = f" at epoch {self.epoch + 1} (learning rate {self.lr:g})"
        check_held_out(self, held_out, valid_loss, where)
        logged = {} if self.user_step is None else self.user_step.means()
        logged = joined(logged, measures)
        number, accuracy = self.epoch + 1, held_out.accuracy
        return Epoch(number, train_loss, valid_loss, accuracy, self.lr, 0.0, logged)

    def outputs_on(self, indices: Indices) -> torch.Tensor:
        """Return the outputs on some samples, in evaluation mode."""

        def keep_form(outputs: Any) -> None:
            if self.like is None and not isinstance(outputs, torch.Tensor):
                self.like = mapped(lambda item: item[:0], outputs)

        batches = self.batches_of(indices)
        return evaluation.outputs_of_batches(batches, self.objective.columns, keep_form)

    def batches_of(self, indices: Indices) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yield targets and outputs of some samples, batch by batch, in evaluation mode."""
        params, size = self.params, self.params.eval_batch_size
        forward: Callable[[Any], Any] = partial(outputs_of, self.model, precision=params.precision)
        if self.evaluation_forward is not None:
            forward = self.evaluation_forward((params.epochs - self.epoch) * (len(indices) // size))
        return evaluation.batches_of(forward, self.data, indices, size, self.heartbeat.beat)

    def held_out_batches(self) -> Iterator[tuple[tuple[Any, Any], int]]:
        """Yield (inputs, targets) of the held-out fold as the user's code gets them, and sizes."""
        ordered = self.data.ordered(self.valid, training=False)
        for low, high in evaluation.batch_bounds(len(self.valid), self.params.eval_batch_size):
            self.heartbeat.beat()
            inputs, targets = ordered.batch(low, high, None)
            yield (inputs, self.data.asked_of(targets)), high - low

    def figures_of(self, indices: Indices) -> torch.Tensor:
        """Return the figures of each batch of some samples, see `evaluation.figures_of`."""
        return evaluation.figures_of(self.batches_of(indices), self.criterion, self.objective)

    def record_epoch(self, item: Epoch, started: float, report: Report) -> None:
        """Record, log and report an epoch that `score` returned."""
        self.epoch, self.batch, self.losses = self.epoch + 1, 0, []
        item = replace(item, seconds=time.perf_counter() - started)
        self.tell_epoch(item, report)

    def tell_epoch(self, item: Epoch, report: Report) -> None:
        """Keep, log and report a recorded epoch, with what was measured in it."""
        self.epochs.append(item)
        names = ("train_loss", "valid_loss", "accuracy")
        measured = {name: getattr(item, name) for name in names} | dict(item.logged)
        text = "".join(
            f"{name} {value:.4g} " if name in item.logged else f"{name} {value:.4f} "
            for name, value in measured.items()
            if value is not None and not np.isnan(value)
        )
        self.log.write(f"epoch {item.number} {text}lr {item.lr:g} seconds {item.seconds:.2f}\n")
        report(EpochEnd(self.task.job.id, self.task.attempt, item))

    def save(self, report: Report) -> None:
        """Write a checkpoint, and report it."""
        task, root = self.task, self.bundle.root
        name = f"checkpoint-{self.epoch:04}-{self.batch:06}-{task.attempt}.safetensors"
        path = job_folder(root, task.job) / name
        # A slow disk is not a hang.
        self.heartbeat.begin_long_phase()
        digest, size = checkpoint.save(path, self.state_dict(), is_last=self.ended)
        file = str(path.relative_to(root))
        report(
            NewCheckpoint(
                CheckpointRef(task.job.id, task.attempt, self.epoch, self.batch, file, digest, size)
            )
        )

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint says of the job's way so far."""
        return {
            "job": self.task.job.id,
            "plan": self.bundle.plan.fingerprint,
            "epoch": self.epoch,
            "batch": self.batch,
            "lr": self.lr,
            "epochs": [item.to_dict() for item in self.epochs],
            "seconds": self.stopwatch.seconds,
            "random": self.random_state(),
            "pretraining": [vars(item) for item in self.pretraining],
            "scores": self.scores,
        }

    def load_position(self, tree: dict[str, Any]) -> None:
        """Continue from what `position` returned."""
        self.epoch, self.batch, self.lr = tree["epoch"], tree["batch"], tree["lr"]
        self.epochs = [Epoch(**item) for item in tree["epochs"]]
        self.stopwatch.continue_from(tree["seconds"])
        self.random, self.scores = tree["random"], tree["scores"]
        self.pretraining = tuple(StageEpoch(**item) for item in tree["pretraining"])

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds: everything needed to continue."""
        criterion, losses = as_given(self.criterion), self.losses
        tree: dict[str, Any] = {
            **self.position(),
            "losses": torch.stack(losses) if losses else None,
            "model": self.model.state_dict(),
            # No step follows the last one.
            "optimizer": None if self.ended else self.optimizer_state(),
            "lr_schedule": self.lr_schedule.state_dict(),
            "criterion": criterion.state_dict() if isinstance(criterion, nn.Module) else None,
            # A second evaluation may differ: a model may draw random numbers in it.
            "outputs": self.outputs if self.ended else None,
            "score_seconds": self.score_seconds,
        }
        if self.scaler is not None:
            tree["scaler"] = self.scaler.state_dict()
        if self.user_step is not None:
            tree["logged"] = self.user_step.state_dict()
        if self.user_validation is not None:
            tree["measured"] = self.user_validation.measures
        if self.callbacks is not None:
            tree["callbacks"] = self.callbacks.state_dict(ended=self.ended)
        return tree

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.load_position(tree)
        self.model.load_state_dict(tree["model"])
        if tree["optimizer"] is not None:
            # Optimizers that have modes may keep the present one outside of their state: it is that
            # of an evaluation at the end of an epoch. Without a state, they switch no weights.
            is_amid = tree["batch"] > 0
            evaluation.set_mode(self.model, self.criterion, self.optimizer, train=is_amid)
            self.load_optimizer(tree["optimizer"])
        self.lr_schedule.load_state_dict(tree["lr_schedule"])
        if isinstance(criterion := as_given(self.criterion), nn.Module):
            criterion.load_state_dict(tree["criterion"])
        losses = tree["losses"]
        self.losses = [] if losses is None else list(losses.to(self.device).unbind())
        self.outputs, self.score_seconds = tree["outputs"], tree["score_seconds"]
        if self.scaler is not None:
            self.scaler.load_state_dict(tree["scaler"])
        if self.user_step is not None:
            self.user_step.load_state_dict(tree["logged"])
        if self.user_validation is not None:
            self.user_validation.measures = tree["measured"]
        if self.callbacks is not None:
            self.callbacks.load_state_dict(tree["callbacks"])

    def averaged(self) -> AveragingSummary | None:
        """Return what parameter averaging has done so far; None for other trainers."""
        return None

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state, in the form of ``state_dict``."""
        return self.optimizer.state_dict()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load what `optimizer_state` returned."""
        self.optimizer.load_state_dict(state)
        for part in optimizers_of(self.optimizer):
            follow_parameters(part)

    def random_state(self) -> dict[str, Any]:
        """Return the state of the random generators."""
        return seeding.state()
