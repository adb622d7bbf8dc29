"""One batch of the user's own `fit_fn`, twice: it must run, and have the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from asynckfold.training import checkpoint
from asynckfold.training.bundle import Bundle
from asynckfold.training.checkpoint import weights_digest
from asynckfold.training.dry_run.checks import Refused
from asynckfold.training.fold_criterion import as_given
from asynckfold.training.own_loop import Context, Loader, alone, reported
from asynckfold.training.own_step import StepError
from asynckfold.training.several_optimizers import optimizers_of, schedules_of


class _BatchEnded(BaseException):
    """Raised by the loader of a trial, which has one batch."""


def run(
    bundle: Bundle,
    live: tuple[nn.Module, Any, Any, Any],
    batch: tuple[Any, Any],
    device: torch.device,
) -> str:
    """Train on one batch; return the digest of the weights.

    `live` are model, optimizer, LR schedule and criterion.

    Raises
    ------
    Refused
        The function breaks a rule.
    """
    model, optimizer, lr_schedule, criterion = live
    taken: list[Any] = []

    def train_batches() -> Iterator[Any]:
        taken.append(batch)
        yield batch
        raise _BatchEnded

    def report(**metrics: Any) -> None:
        reported(metrics, 1, 0.0)

    def save(state: Mapping[str, Any]) -> None:
        try:
            checkpoint.check_storable({"state": dict(state)})
        except (TypeError, ValueError) as error:
            raise Refused(
                "context.save must get a dict that a checkpoint can hold",
                str(error),
                "Save nested dicts and lists of tensors, arrays, numbers and text.",
            ) from error

    context = Context(
        model,
        Loader(2, train_batches),
        Loader(1, lambda: iter([batch])),
        alone(optimizers_of(optimizer)),
        alone(schedules_of(lr_schedule)),
        as_given(criterion),
        device,
        bundle.folds[0].index,
        bundle.plan.params.epochs,
        0,
        report,
        save,
        lambda: None,
    )
    try:
        fit_fn: Callable[[Context], Any] = copy.deepcopy(bundle.recipe.fit_fn)  # type: ignore[assignment]
        fit_fn(context)
    except _BatchEnded:
        pass
    except StepError as error:
        raise Refused(*error.args) from error
    if not taken:
        raise Refused(
            "fit_fn must train on the batches of context.train_loader",
            "a function that takes none",
            "Write for instance: for inputs, targets in context.train_loader: ...",
        )
    return weights_digest(model.state_dict())


def check_same(first: str, second: str) -> None:
    """Refuse a function whose weights differ between two runs of the same seed."""
    if first != second:
        raise Refused(
            "fit_fn must give the same bits each time",
            "other weights after one batch of the same seed",
            "Draw from the global generators of torch, NumPy and random, which are seeded, or "
            "seed your own by context.seed.",
        )
