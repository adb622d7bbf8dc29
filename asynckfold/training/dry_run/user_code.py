"""The live objects of a trial, and a trial of each function that the user passes.

A broken rule raises `Refusal`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.data.transforms.trees import tensors_in
from asynckfold.errors import refuse
from asynckfold.training import gradients, seeding
from asynckfold.training.batches import BALANCED, epoch_samples, length_problems
from asynckfold.training.bundle import Bundle
from asynckfold.training.calls import outputs_of
from asynckfold.training.dry_run.refusals import trying
from asynckfold.training.evaluation import set_mode
from asynckfold.training.losses import as_given
from asynckfold.training.model_state import same
from asynckfold.training.optimizers import optimizers_of, schedules_of
from asynckfold.training.user_loop import Context, Loader, alone, reported
from asynckfold.training.user_steps import (
    ONE_REMEDY,
    ONE_RULE,
    SEVERAL_REMEDY,
    SEVERAL_RULE,
    Refusal,
    TrainingStep,
)

MOST = 256
"""Samples of a batch that are tried: an evaluation may take all samples at once."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets as a job gets them, and the targets as the user's code does."""

    inputs: Any
    targets: torch.Tensor
    users_targets: Any

    @property
    def pair(self) -> tuple[Any, Any]:
        """What the user's steps and loop get."""
        return self.inputs, self.users_targets


@dataclass(frozen=True, eq=False)
class Live:
    """The live objects of a job."""

    model: nn.Module
    optimizer: Any
    criterion: Any
    user_step: TrainingStep | None
    precision: str

    def set_mode(self, *, train: bool) -> None:
        """Set the mode of all that has one."""
        set_mode(self.model, self.criterion, self.optimizer, train=train)

    def step(self, batch: Batch) -> torch.Tensor:
        """Take a step; return its loss. LBFGS only gets a gradient: its step takes twenty."""
        self.set_mode(train=True)
        if self.user_step:
            return train_step(self.user_step, self.model, batch.pair)

        def backward() -> torch.Tensor:
            self.optimizer.zero_grad()
            outputs = outputs_of(self.model, batch.inputs, self.precision)
            loss: torch.Tensor = self.criterion(outputs, batch.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        is_lbfgs = isinstance(self.optimizer, torch.optim.LBFGS)
        return backward() if is_lbfgs else gradients.update(self.optimizer, backward)

    def evaluated(self, batch: Batch) -> list[torch.Tensor]:
        """Return the outputs in evaluation mode, of a fixed seed."""
        self.set_mode(train=False)
        seeding.seed_all(0)
        with torch.no_grad():
            return list(tensors_in(outputs_of(self.model, batch.inputs, self.precision)))


def check_collation(bundle: Bundle, data: Batches) -> None:
    """Refuse a `collate_fn` that raises, or gives other inputs for the same samples."""
    if data.collation is None:
        return
    rule = "collate_fn must make a batch of any samples of the data set"
    remedy = "Try it on [dataset[0], dataset[1]]; classes arrive as their index."
    rows, batches = bundle.folds[0].valid[: min(MOST, bundle.plan.params.eval_batch_size)], []
    for seed in (0, 1):
        with trying(rule, remedy), seeded(seed):
            batches.append([*tensors_in(data.eval(rows)[0])])
    if not all(map(same, *batches)):
        raise Refusal(
            "collate_fn must give the same inputs for the same samples",
            "other numbers at the second call",
            "Draw random numbers in train_transform or in a training_step.",
        )


def check_sampler(bundle: Bundle, data: Batches) -> None:
    """Refuse a sampler that breaks a rule in the first epochs of a fold.

    Raises
    ------
    Refusal
        It raises, gives no weights or places, or other draws from the same seed.
    """
    sampler, objective = bundle.recipe.sampler, bundle.plan.objective_of("")
    if sampler is None:
        return
    if isinstance(sampler, str) and not objective.is_classes:
        rule, received = f"sampler={BALANCED!r} needs one class for each sample", objective.kind
        raise Refusal(rule, f"targets of kind {received}", "Pass weights, one for each sample.")
    is_array = not (isinstance(sampler, str) or callable(sampler))
    if is_array and np.shape(sampler) != (data.n_samples,):
        raise Refusal(
            "weights of a sampler must be one for each sample of the data set",
            f"shape {np.shape(sampler)} for {data.n_samples} samples",
            "Pass an array in the data set's order, or a function of the training fold's targets.",
        )
    rule = "sampler must work on the targets of each training fold"
    for fold in bundle.folds:
        with trying(rule, "It gets a tensor, with a class as its index."):
            first, again, second = (
                epoch_samples(sampler, data, fold.fitted, 0, epoch) for epoch in (0, 0, 1)
            )
            refuse(length_problems(len(first), len(second)))
        if not np.array_equal(first, again):
            raise Refusal(
                "sampler must give the same draws from the same seed",
                "other draws at the second call",
                "Draw from the global generators of torch, NumPy and random, or from a generator "
                "attribute, which are seeded for each epoch.",
            )


def train_step(step: TrainingStep, model: nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    """Train on the batch by a `training_step`; return the loss.

    Raises
    ------
    Refusal
        The function breaks a rule.
    """
    state, stepped = step.state, []
    with ExitStack() as hooks:
        for optimizer in state.optimizers:
            optimizer.zero_grad()
            hook = optimizer.register_step_pre_hook(lambda *call: stepped.append(call))
            hooks.callback(hook.remove)
        loss = step.loss(model, batch, 0, 0)
    if step.is_several:
        if not 0 < len(stepped) == state.backwards:
            received = f"{len(stepped)} steps of optimizers and {state.backwards} calls of it"
            raise Refusal(SEVERAL_RULE, received, SEVERAL_REMEDY)
        return loss
    parameters = [item for group in state.optimizer.param_groups for item in group["params"]]
    if stepped or any(item.grad is not None for item in parameters):
        called = "optimizer.step()" if stepped else "backward()"
        raise Refusal(ONE_RULE, f"a call of {called}", ONE_REMEDY)

    def backward(loss: torch.Tensor | None = None) -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = step.loss(model, batch, 0, 0) if loss is None else loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    backward(loss)
    if not isinstance(state.optimizer, torch.optim.LBFGS):
        gradients.take_step(state.optimizer, backward)
    return loss


class _EndOfBatch(BaseException):
    """Raised by the loader of a trial, which has one batch."""


def run_loop(bundle: Bundle, live: Live, lr_schedule: Any, batch: tuple[Any, Any]) -> None:
    """Train on one batch by a `fit_fn`.

    Raises
    ------
    Refusal
        The function breaks a rule.
    """
    passes: list[Any] = []

    def train_batches() -> Iterator[Any]:
        passes.append(batch)
        yield batch
        raise _EndOfBatch

    def report(**metrics: Any) -> None:
        reported(metrics, 1, 0.0)

    context = Context(
        live.model,
        Loader(2, train_batches),
        Loader(1, lambda: iter([batch])),
        alone(optimizers_of(live.optimizer)),
        alone(schedules_of(lr_schedule)),
        as_given(live.criterion),
        torch.device("cpu"),
        bundle.folds[0].index,
        bundle.plan.params.epochs,
        0,
        report,
        lambda state: None,
        lambda: None,
    )
    fit_fn: Callable[[Context], Any] = copy.deepcopy(bundle.recipe.fit_fn)  # type: ignore[assignment]
    with suppress(_EndOfBatch):
        fit_fn(context)
    if not passes:
        raise Refusal(
            "fit_fn must train on the batches of context.train_loader",
            "a function that takes none",
            "Write for instance: for inputs, targets in context.train_loader: ...",
        )
