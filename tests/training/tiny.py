"""Sweeps that train in milliseconds, and models that tell what they see."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold import Job, Plan, Result, TrainerParams
from asynckfold.data.batches import Batches
from asynckfold.data.prepare import PreparedData, prepare
from asynckfold.jobs.folds import make_folds
from asynckfold.jobs.messages import CheckpointRef, NewCheckpoint, RunEvent, Task
from asynckfold.jobs.placement import Command, Placement
from asynckfold.jobs.plan import folds_fingerprint
from asynckfold.jobs.recipe import Recipe
from asynckfold.store import job_folder
from asynckfold.training import loop, lr_schedules
from asynckfold.training.bundle import Bundle
from asynckfold.training.worker.execute import execute
from tests.toy import make_jobs

CPU = torch.device("cpu")
FEATURES, CLASSES = 8, 3


def samples(count: int = 60, seed: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Three noisy clusters; the first feature is the sample's number."""
    rng = np.random.default_rng(seed)
    targets = np.arange(count) % CLASSES
    inputs = rng.normal(size=(count, FEATURES)) + 2 * np.eye(CLASSES, FEATURES, 1)[targets]
    inputs[:, 0] = np.arange(count)
    return inputs.astype(np.float32), targets


class Plain(nn.Module):
    """A linear model that does not look at the sample's number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES - 1, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs[:, 1:])
        return outputs


class Mlp(nn.Module):
    """A perceptron with dropout and running statistics: whatever could be mixed up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES - 1, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, CLASSES),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs[:, 1:])
        return outputs


class Noisy(Mlp):
    """The same, with random numbers from everywhere."""

    def __init__(self, noisy_evaluation: bool = False) -> None:
        super().__init__()
        self.noisy_evaluation = noisy_evaluation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        if self.training or self.noisy_evaluation:
            noise = random.gauss(0, 1) + np.random.normal()  # noqa: NPY002
            outputs = outputs * (1 + 0.01 * noise) + 0.01 * torch.randn(outputs.shape)
        return outputs


@dataclass
class Seen:
    """What a model was shown, in order: whether in training, and the numbers of the samples."""

    batches: list[tuple[bool, list[int]]] = field(default_factory=list)

    def of(self, training: bool) -> list[list[int]]:
        return [numbers for mode, numbers in self.batches if mode is training]

    def numbers(self, training: bool) -> set[int]:
        return {number for batch in self.of(training) for number in batch}


def watched(make: Callable[[], nn.Module], seen: Seen) -> Callable[[], nn.Module]:
    """A factory of models that note what they are shown."""

    def build() -> nn.Module:
        model = make()

        def note(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            seen.batches.append((module.training, [int(value) for value in inputs[0][:, 0]]))

        model.register_forward_pre_hook(note)
        return model

    return build


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_epochs(context: Any) -> None:
    """A `fit_fn` of two epochs that reports and saves nothing."""
    for _ in range(2):
        for inputs, targets in context.train_loader:
            context.optimizer.zero_grad()
            context.criterion(context.model(inputs), targets).backward()
            context.optimizer.step()


def never() -> bool:
    return False


def always() -> bool:
    return True


@dataclass
class Tiny:
    """A sweep, ready to be trained in this process."""

    root: Path
    models: Mapping[str, Callable[[], Any]] = field(default_factory=lambda: {"plain": Plain})
    lr_schedules: Mapping[str, Any] = field(default_factory=lambda: {"constant": "constant"})
    opt_fn: Callable[[Any], Any] = sgd
    criterion: Callable[..., Any] = field(default_factory=nn.CrossEntropyLoss)
    params: TrainerParams = field(default_factory=lambda: TrainerParams(epochs=2))
    batch_size: int = 10
    preprocess: Any = None
    training_step: Callable[..., Any] | None = None
    data: tuple[Any, Any] = field(default_factory=samples)
    cv: Any = 3
    task: str = "multiclass"
    job_timeout_s: float | None = None

    @cached_property
    def prepared(self) -> PreparedData:
        return prepare(self.data, task=self.task)

    @cached_property
    def batches(self) -> Batches:
        handle = self.prepared.handle()
        return handle.open(handle.fds)

    @cached_property
    def bundle(self) -> Bundle:
        data = self.prepared
        folds = make_folds(
            data.n_samples, data.targets, self.cv, stratify=data.labels.classification
        )
        plan = Plan(
            make_jobs(list(self.models), list(self.lr_schedules), folds, 0),
            self.params,
            self.batch_size,
            1,
            0,
            "cpu",
            ("accuracy",),
            data.fingerprint,
            folds_fingerprint(folds),
            data.classes,
        )
        reacting = (job.candidate for job in plan.jobs if self.reacts(job.lr_schedule))
        plan = replace(plan, reacting=tuple(dict.fromkeys(reacting)))
        self.root.mkdir(parents=True, exist_ok=True)
        recipe = Recipe(
            self.models,
            self.lr_schedules,
            self.opt_fn,
            self.criterion,
            self.preprocess,
            training_step=self.training_step,
        )
        return Bundle(
            plan,
            folds,
            recipe,
            data.handle(),
            self.root,
            data.ordinary(),
            job_timeout_s=self.job_timeout_s,
        )

    def reacts(self, name: str) -> bool:
        """Whether a dry run finds that an LR schedule reacts to a loss."""
        schedule = self.lr_schedules[name]
        if isinstance(schedule, str):
            return schedule == "reduce"
        return lr_schedules.needs_metric(schedule(sgd(nn.Linear(1, 1))))

    @property
    def jobs(self) -> tuple[Job, ...]:
        return self.bundle.plan.jobs

    def attempt(
        self,
        job: Job | None = None,
        attempt: int = 1,
        refs: Sequence[CheckpointRef] = (),
        stop: Callable[[], bool] = never,
    ) -> tuple[Result | None, list[RunEvent]]:
        """One attempt at a job, and what it told."""
        events: list[RunEvent] = []
        task = Task(job or self.jobs[0], attempt, tuple(refs))
        return loop.train(self.bundle, task, self.batches, CPU, events.append, stop), events

    def train(self, job: Job | None = None) -> Result:
        """A job from its start to its end."""
        result, _ = self.attempt(job)
        assert result is not None
        return result

    def train_with_stops(self, job: Job | None = None) -> tuple[Result, int]:
        """A job stopped after every batch, and how many attempts it took."""
        refs: list[CheckpointRef] = []
        for attempt in range(1, 1000):
            result, events = self.attempt(job, attempt, refs, always)
            if result is not None:
                return result, attempt
            refs = checkpoints(events)
        raise AssertionError("the training makes no progress")

    def execute(
        self, *jobs: Job, trainer: str = "plain", threads: int = 1, command: Command = Command.TRAIN
    ) -> list[Any]:
        """What a worker answers."""
        tasks = [Task(job) for job in jobs]
        ids = tuple(job.id for job in jobs)
        placement = Placement(ids, (0,), threads, trainer=trainer, command=command)
        return execute(self.bundle, self.batches, placement, tasks, lambda event: None, never)

    def log(self, job: Job | None = None) -> str:
        """The text of a job's log."""
        return (job_folder(self.root, job or self.jobs[0]) / "log.txt").read_text()


def checkpoints(events: Sequence[RunEvent]) -> list[CheckpointRef]:
    """The checkpoints that were written, newest first."""
    return [item.ref for item in reversed(events) if isinstance(item, NewCheckpoint)]
