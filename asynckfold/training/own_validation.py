"""The user's own `validation_step`: measures of the held-out fold, batch by batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from asynckfold.training.evaluation import evaluating
from asynckfold.training.own_step import StepError, StepState, autocast, parsed


class OwnValidation:
    """The user's function, and what it found in the last epoch.

    Parameters
    ----------
    function : callable
        (model, batch, state) → None, a loss, or a dict of these and other measures.
    optimizers, criterion, device, precision
        As for an `OwnStep`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        optimizers: tuple[torch.optim.Optimizer, ...],
        criterion: Callable[..., Any],
        device: torch.device,
        precision: str,
    ) -> None:
        self._function, self._precision = function, precision
        self.state = StepState(optimizers, criterion, device, precision)
        self.found: dict[str, float] = {}
        self.has_loss = False

    def loss(
        self, model: nn.Module, batches: Iterable[tuple[tuple[Any, Any], int]], epoch: int
    ) -> float | None:
        """Measure a model in evaluation mode; return the loss, if the function returns any.

        The loss and what was logged, in `found`, are means over the samples that had them.
        `batches` are pairs of inputs and targets, and how many samples they hold.
        """
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}
        state = self.state
        with torch.no_grad():
            for number, (batch, size) in enumerate(batches):
                state.epoch, state.batch_index, state.measures = epoch, number, {}
                with autocast(state.device, self._precision):
                    loss = self._function(model, batch, state)
                loss = parsed("validation_step", loss, state, differentiable=False, needed=False)
                own = {} if loss is None else {"loss": loss.detach().reshape(()).double()}
                for name, value in {**state.measures, **own}.items():
                    sums[name] = sums[name] + value * size if name in sums else value * size
                    counts[name] = counts.get(name, 0) + size
        means = {name: float(total) / counts[name] for name, total in sums.items()}
        found = means.pop("loss", None)
        self.found, self.has_loss = means, found is not None
        return found


def own_validation(
    recipe: Any, optimizers: tuple[Any, ...], criterion: Any, device: torch.device, precision: str
) -> OwnValidation | None:
    """Return the `validation_step` of a recipe for one job; None if it has none."""
    if recipe.validation_step is None:
        return None
    function = copy.deepcopy(recipe.validation_step)
    return OwnValidation(function, optimizers, criterion, device, precision)


def measured(training: Any, valid_loss: float) -> tuple[float, dict[str, float]]:
    """Return loss and measures of a job's held-out fold; `valid_loss` where no step returns one."""
    own: OwnValidation | None = training.own_validation
    if own is None:
        return valid_loss, {}
    size, count = training.params.eval_batch_size, len(training.valid)
    ordered = training.data.ordered(training.valid, training=False)

    def batches() -> Iterator[tuple[tuple[Any, Any], int]]:
        for low in range(0, count, size):
            inputs, targets = ordered.batch(low, min(low + size, count), None)
            yield (inputs, training.data.asked_of(targets)), len(targets)
            training.heartbeat.beat()

    with evaluating(training):
        loss = own.loss(training.model, batches(), training.epoch)
    return valid_loss if loss is None else loss, own.found


def joined(logged: dict[str, Any], found: dict[str, float]) -> dict[str, Any]:
    """Return what both steps logged in an epoch."""
    if both := sorted(logged.keys() & found.keys()):
        raise StepError(
            "training_step and validation_step must log different names",
            ", ".join(map(repr, both)),
            "Rename one of them.",
        )
    return logged | found
