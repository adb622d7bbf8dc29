"""What is written to other libraries: a job's epochs as numbers by name, and its scores."""

from __future__ import annotations

from collections.abc import Iterator

from asynckfold.errors import InputError
from asynckfold.jobs.result import DONE, Result


def points(result: Result) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield (epoch, time in seconds since 1970, numbers) of a job; its scores with the last one.

    What the user's code logged keeps its names.
    """
    # An attempt that continued a job began later: its epochs end with it all the same.
    at = result.ended - sum(epoch.seconds for epoch in result.epochs)
    for epoch in result.epochs:
        at += epoch.seconds
        numbers = {"train_loss": epoch.train_loss, "valid_loss": epoch.valid_loss, "lr": epoch.lr}
        numbers |= {} if epoch.accuracy is None else {"accuracy": epoch.accuracy}
        numbers = {**epoch.logged, **numbers}
        if epoch is result.epochs[-1] and result.status == DONE:
            numbers |= {f"score/{name}": value for name, value in result.scores.items()}
        yield epoch.number, at, numbers


def missing(extra: str) -> InputError:
    """Return the refusal for a library that is not installed."""
    rule = f"asynckfold.integrations.{extra} needs the package {extra}"
    return InputError.one(rule, "an environment without it", f"Run: pip install {extra}")
