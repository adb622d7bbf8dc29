"""What is written to other libraries: a job's epochs as numbers by name, and its scores."""

from __future__ import annotations

from collections.abc import Iterator

from asynckfold.errors import InputError
from asynckfold.jobs.result import DONE, Epoch, Result


def numbers_of(epoch: Epoch) -> dict[str, float]:
    """Return the numbers of an epoch by name; what the user's code logged keeps its names.

    >>> numbers_of(Epoch(1, 0.5, 0.75, None, 0.1, 2.0, {"margin": 3.0}))
    {'margin': 3.0, 'train_loss': 0.5, 'valid_loss': 0.75, 'lr': 0.1}
    """
    numbers = {"train_loss": epoch.train_loss, "valid_loss": epoch.valid_loss, "lr": epoch.lr}
    if epoch.accuracy is not None:
        numbers["accuracy"] = epoch.accuracy
    return {**epoch.logged, **numbers}


def points(result: Result) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield (epoch, time in seconds since 1970, numbers) of a job; its scores with the last one."""
    # An attempt that continued a job began later: its epochs end with it all the same.
    at = result.ended - sum(epoch.seconds for epoch in result.epochs)
    for epoch in result.epochs:
        at += epoch.seconds
        numbers = numbers_of(epoch)
        if epoch is result.epochs[-1] and result.status == DONE:
            numbers |= {f"score/{name}": value for name, value in result.scores.items()}
        yield epoch.number, at, numbers


def missing(extra: str) -> InputError:
    """Return the refusal for a library that is not installed."""
    rule = f"asynckfold.integrations.{extra} needs the package {extra}"
    return InputError.one(rule, "an environment without it", f"Run: pip install {extra}")
