"""The arguments of `AsyncKFold` by which the user's own code trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from asynckfold.errors import Problem
from asynckfold.jobs.argument import argument, one_line


@dataclass(frozen=True, kw_only=True)
class OwnTraining:
    """The arguments of `AsyncKFold` by which the user's own code trains.

    Parameters
    ----------
    training_step : callable, optional
        Computes the loss of a batch, (model, (inputs, targets), state) → loss, or a dict of
        ``loss`` and what else to record. Backward, clipping, autocast, optimizer and LR schedule
        stay ours. ``opt_fn`` may return a tuple of several optimizers: the step then calls
        ``state.backward(loss, optimizer)``. The held-out fold is scored as always.
    """

    training_step: Callable[..., Any] | None = argument(None, group="training")

    def own_training_problems(self, trainer: str) -> Iterator[Problem]:
        """Yield why the user's own code cannot train the jobs."""
        given: object = self.training_step
        if given is None:
            return
        if not callable(given):
            yield Problem(
                "training_step must be a function (model, batch, state) → loss",
                one_line(given),
                "Write for instance: def training_step(model, batch, state): inputs, targets = "
                "batch; return state.criterion(model(inputs), targets)",
            )
        if trainer != "plain":
            yield Problem(
                "training_step needs the plain trainer",
                f"trainer={trainer!r}",
                "Leave trainer and processes out.",
            )
        baseline = getattr(self, "baseline", None)
        if baseline not in (None, "none"):
            yield Problem(
                "the serial baseline trains by the criterion, not by a training_step",
                f"baseline={baseline!r}",
                "Leave baseline out.",
            )
