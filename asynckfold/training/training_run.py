"""What the loop drives: the course of a training, and that of one job in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.messages import (
    CheckpointRef,
    CheckpointWritten,
    EpochEnded,
    Progress,
    RunEvent,
    Task,
)
from asynckfold.jobs.result import Averaged, Epoch, StageEpoch
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import (
    batches as batching,
)
from asynckfold.training import (
    checkpoint,
    evaluation,
    lr_schedules,
    seeding,
)
from asynckfold.training.bundle import Bundle, JobLog, job_folder
from asynckfold.training.fused_optimizers import follow_parameters
from asynckfold.training.losses import adds_up, mean_loss
from asynckfold.training.precision import outputs_of
from asynckfold.training.stopwatch import Stopwatch

EVENT_SECONDS = 0.2
"""Between two pieces of news of one job: a display needs no more."""

Report = Callable[[RunEvent], None]


class Diverged(Exception):  # noqa: N818
    """The loss became infinite or NaN, or an output NaN."""


class Course(Protocol):
    """What `run` takes from batch to batch: one job, or several that are trained as one.

    ``epoch`` whole epochs and ``batch`` of the ``batches`` of the next are behind it.
    """

    epoch: int
    batch: int
    heartbeat: Heartbeat

    @property
    def stopwatch(self) -> Stopwatch:
        """What has been trained, and may be."""

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
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
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
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

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
        evaluation.set_mode(self.model, self.criterion, train=True)

    def put_in_order(self) -> None:
        """Begin or continue an epoch, but for the generators."""
        if self.batch == 0:
            self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.order = torch.from_numpy(batching.epoch_order(self.train, self.seed, self.epoch))
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
                f"loss {self._last_loss:.4f}\n"
            )
        now = time.monotonic()
        if now - self.told < EVENT_SECONDS:
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
                self._last_loss,
            )
        )

    @property
    def _last_loss(self) -> float:
        """Mean over the samples of the last batch."""
        loss = float(self.losses[-1])
        if not adds_up(self.criterion, self.bundle.plan):
            return loss
        low, high = self.bounds[self.batch - 1]
        return loss / (high - low)

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
        self.heartbeat.begin_long_phase()
        scoring = time.perf_counter()
        self.outputs, valid_loss, accuracy = self.evaluate(self.valid)
        self.score_seconds = time.perf_counter() - scoring
        where = f"at epoch {self.epoch + 1} (learning rate {self.lr:g})"
        if np.isnan(self.outputs).any():
            raise Diverged(f"an output on the held-out fold became nan {where}")
        if not np.isfinite(valid_loss):
            raise Diverged(f"the loss on the held-out fold became {valid_loss} {where}")
        return Epoch(self.epoch + 1, train_loss, valid_loss, accuracy, self.lr, 0.0)

    def evaluate(self, indices: Indices) -> tuple[npt.NDArray[np.float32], float, float | None]:
        """Return outputs (n, ...) on samples (n,), loss and accuracy; leaves evaluation mode on."""
        evaluation.set_mode(self.model, self.criterion, train=False)
        # Not inference_mode: what a model keeps of a pass could not be trained with afterwards.
        with torch.no_grad():
            found = self.outputs_on(indices)
            wanted = self.data.targets_of(indices)
            plan = self.bundle.plan
            objective = plan.objective_of(self.task.job.model)
            loss, accuracy = evaluation.loss_and_accuracy(
                found, wanted, self.criterion, plan, objective
            )
        return found.float().cpu().numpy(), loss, accuracy

    def outputs_on(self, indices: Indices) -> torch.Tensor:
        """Return the outputs on some samples, in evaluation mode."""
        return evaluation.outputs_on(
            self.model, self.data, indices, self.params, self.heartbeat.beat
        )

    def step_lr_schedule(self) -> None:
        """Step it at the end of an epoch, with the loss that it may want."""
        if lr_schedules.needs_metric(self.lr_schedule):
            self.lr_schedule.step(self.evaluate(self.steer)[1])
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
        self.heartbeat.begin_long_phase()
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
            "seconds": self.stopwatch.seconds,
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
            "score_seconds": self.score_seconds,
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
        # Earlier checkpoints tell neither.
        self.score_seconds = tree.get("score_seconds", 0.0)
        self.stopwatch.go_on_from(tree.get("seconds", 0.0))
        self.pretraining = tuple(StageEpoch(**item) for item in tree.get("pretraining", ()))


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


def clip(training: Training) -> None:
    """Shorten the gradient where the plan says so."""
    if training.clip is not None:
        nn.utils.clip_grad_norm_(training.model.parameters(), training.clip)


def _mean_loss(training: Training) -> float:
    """Mean over samples; one synchronisation with the device for a whole epoch."""
    losses = torch.stack(training.losses).flatten().double().cpu().numpy()
    if not np.isfinite(losses).all():
        first = int(np.flatnonzero(~np.isfinite(losses))[0])
        raise Diverged(
            f"the loss became {losses[first]} at epoch {training.epoch + 1}, batch {first + 1} "
            f"(learning rate {training.lr:g})"
        )
    plan, order = training.bundle.plan, training.order
    return mean_loss(
        training.criterion, plan, losses, training.bounds, lambda: training.data.targets_of(order)
    )
