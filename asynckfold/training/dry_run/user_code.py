"""A trial of each function that the user passes, and the rules that it must keep.

A broken rule raises `Refusal`, or the `StepError` of a job.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asynckfold.data.batches import Batches
from asynckfold.data.collation import structure
from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.data.transforms.trees import leaves_by_path
from asynckfold.errors import refuse
from asynckfold.training.batches import BALANCED, epoch_samples, length_problems
from asynckfold.training.bundle import Bundle
from asynckfold.training.checkpoint import weights_digest
from asynckfold.training.dry_run.refusals import Refusal, trying
from asynckfold.training.dry_run.saved_state import Live
from asynckfold.training.gradients import take_step
from asynckfold.training.losses import as_given
from asynckfold.training.optimizers import optimizers_of, schedules_of
from asynckfold.training.user_loop import Context, Loader, alone, reported
from asynckfold.training.user_steps import (
    ONE_REMEDY,
    ONE_RULE,
    SEVERAL_REMEDY,
    SEVERAL_RULE,
    TrainingStep,
    ValidationStep,
    joined,
)

MOST = 256
"""Samples of a batch that are tried: an evaluation may take all samples at once."""


def check_collation(bundle: Bundle, data: Batches) -> None:
    """Refuse a `collate_fn` that breaks a rule on a first, a last or a held-out batch.

    Raises
    ------
    Refused
        It raises, gives another structure, other targets, or other inputs for the same samples.
    """
    if data.collation is None:
        return
    fold, size = bundle.folds[0], bundle.plan.batch_size
    rest, most = len(fold.fitted) % size or size, min(MOST, bundle.plan.params.eval_batch_size)
    batches = [
        partial(data.train, fold.fitted[:size][:MOST], 0, 0),
        partial(data.train, fold.fitted[-rest:][:MOST], 0, 0),
        partial(data.eval, fold.valid[:most]),
    ]
    first = ""
    for make in batches:
        inputs = _collated(make, 0)
        form = structure(inputs)
        first = first or form
        if form != first:
            raise Refusal(
                "collate_fn must give batches of one structure",
                f"{first}, and for other samples {form}",
                "Return the same keys, types and dimensions for any samples.",
            )
        if not _same_inputs(inputs, _collated(make, 1)):
            raise Refusal(
                "collate_fn must give the same inputs for the same samples",
                f"other numbers at the second call: {form}",
                "Draw random numbers in train_transform or in a training_step.",
            )


def _collated(make: Callable[[], Any], seed: int) -> Any:
    rule = "collate_fn must make a batch of any samples of the data set"
    remedy = "Try it on [dataset[0], dataset[1]]; classes arrive as their index."
    with trying(rule, remedy), seeded(seed):
        return make()[0]


def _same_inputs(one: Any, other: Any) -> bool:
    mine, theirs = (list(leaves_by_path(inputs)[0].values()) for inputs in (one, other))
    return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)
    # Objects such as a batch of graphs are compared by their type.
    return type(one) is type(other) and (one == other or not isinstance(one, (int, float, str)))


def check_sampler(bundle: Bundle, data: Batches) -> None:
    """Refuse a sampler that breaks a rule in the first epochs of a fold.

    Raises
    ------
    Refused
        It raises, gives no weights or places, or other draws from the same seed.
    """
    sampler = bundle.recipe.sampler
    if sampler is None:
        return
    objective = bundle.plan.objective_of("")
    if isinstance(sampler, str) and not objective.is_classes:
        raise Refusal(
            f"sampler={BALANCED!r} needs one class for each sample",
            f"targets of kind {objective.kind}",
            "Pass weights, one for each sample.",
        )
    is_array = not (isinstance(sampler, str) or callable(sampler))
    if is_array and np.shape(sampler) != (data.n_samples,):
        raise Refusal(
            "weights of a sampler must be one for each sample of the data set",
            f"shape {np.shape(sampler)} for {data.n_samples} samples",
            "Pass an array of that length, in the data set's order, or a function of the targets "
            "of the training fold.",
        )
    for fold in bundle.folds:
        rule = "sampler must work on the targets of each training fold"
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
    Refused
        The function breaks a rule.
    """
    state, stepped = step.state, []
    for optimizer in state.optimizers:
        optimizer.zero_grad()
    with ExitStack() as hooks:
        for optimizer in state.optimizers:
            hook = optimizer.register_step_pre_hook(lambda *call: stepped.append(call))
            hooks.callback(hook.remove)
        loss = step.loss(model, batch, 0, 0)
    if step.is_several:
        if not state.backwards:
            raise Refusal(SEVERAL_RULE, "a step that never calls it", SEVERAL_REMEDY)
        if len(stepped) != state.backwards:
            received = f"{len(stepped)} steps of optimizers and {state.backwards} calls of "
            raise Refusal(SEVERAL_RULE, f"{received}state.backward", SEVERAL_REMEDY)
        return loss
    if stepped:
        raise Refusal(ONE_RULE, "a call of optimizer.step()", ONE_REMEDY)
    groups = state.optimizer.param_groups
    if any(item.grad is not None for group in groups for item in group["params"]):
        raise Refusal(ONE_RULE, "a call of backward()", ONE_REMEDY)
    loss.backward()  # type: ignore[no-untyped-call]

    def backward() -> torch.Tensor:
        state.optimizer.zero_grad()
        again = step.loss(model, batch, 0, 0)
        again.backward()  # type: ignore[no-untyped-call]
        return again

    if not isinstance(state.optimizer, torch.optim.LBFGS):
        take_step(state.optimizer, backward)
    return loss


def validate(
    step: ValidationStep,
    model: nn.Module,
    batch: tuple[Any, Any],
    size: int,
    logged: dict[str, Any],
) -> None:
    """Measure a batch of `size` samples; refuse a `validation_step` that breaks a rule.

    `logged` is what the `training_step` logs.
    """
    loss = step.loss(model, [(batch, size)], 0)
    joined(logged, step.measures)
    if loss is None and not step.measures:
        raise Refusal(
            "validation_step must measure something",
            "a function that returns and logs nothing",
            "Return a loss or a dict of numbers, or call state.log(name=number).",
        )


class _EndOfBatch(BaseException):
    """Raised by the loader of a trial, which has one batch."""


def run_loop(
    bundle: Bundle,
    live: Live,
    lr_schedule: Any,
    batch: tuple[Any, Any],
    device: torch.device,
) -> str:
    """Train on one batch by a `fit_fn`; return the digest of the weights.

    Raises
    ------
    Refused
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
        device,
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
    return weights_digest(live.model.state_dict())
