"""What callbacks must keep: rules seen from the outside, and a trial of one batch and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asynckfold.errors import Problem
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.recipe import pack
from asynckfold.training.callbacks import METHODS, SHIPPED, Callbacks
from asynckfold.training.own_step import StepError


def monitor_of(callback: Any) -> str:
    """Return the number of the epochs that a callback watches; empty if none."""
    monitor = getattr(callback, "monitor", "")
    return monitor if isinstance(monitor, str) else ""


INNER, HELD_OUT = "inner_", "valid_"
"""What the names of numbers of the inner part, and of the held-out fold, begin with."""


def callback_problems(given: Sequence[Any], *, has_inner: bool) -> Iterator[Problem]:
    """Yield what is wrong with callbacks; `has_inner`: a part is set aside to watch."""
    for item in given:
        name = type(item).__name__
        if isinstance(item, type):
            rule = "a callback must be an object, not a class"
            yield Problem(rule, item.__name__, f"Write {item.__name__}().")
            continue
        if not any(callable(getattr(item, method, None)) for method in METHODS):
            rule = f"a callback must have one of the methods {', '.join(METHODS)}"
            yield Problem(rule, one_line(item), "Define one, each of one argument, the state.")
        kept = [hasattr(item, method) for method in ("state_dict", "load_state_dict")]
        if any(kept) and not all(kept):
            rule = "a callback must have both state_dict and load_state_dict, or neither"
            yield Problem(rule, name, "Define the other, too.")
        # Others may call anything of theirs so.
        for rule, received in item.problems() if isinstance(item, SHIPPED) else ():
            yield Problem(f"{name}: {rule}", received, "Pass another.")
        monitor = monitor_of(item)
        if monitor.startswith(HELD_OUT):
            yield Problem(
                "a callback must not look at the fold that scores",
                f"{name}(monitor={monitor!r})",
                "Pass inner_valid=0.1 and monitor='inner_loss', a part of the training fold.",
            )
        elif monitor.startswith(INNER) and not has_inner:
            yield Problem(
                f"{name} watches a part of each training fold, which must be set aside",
                f"monitor={monitor!r}, inner_valid=None",
                "Pass inner_valid=0.1.",
            )


def try_callbacks(callbacks: Callbacks, metrics: Mapping[str, float]) -> None:
    """Call the methods as in a job of one batch and one epoch.

    Raises
    ------
    StepError
        A rule is broken: a monitored number that does not exist, a change that no state keeps.
    """
    for item in callbacks.items:
        monitor = monitor_of(item)
        if monitor and monitor not in metrics:
            raise StepError(
                f"{type(item).__name__} must watch a number of the epochs",
                f"monitor={monitor!r}",
                f"There are {', '.join(map(repr, metrics))}.",
            )
    callbacks.start()
    before = [_kept(item) for item in callbacks.items]
    callbacks.end_batch(0, 1)
    callbacks.end_epoch(1, metrics)
    for item, old in zip(callbacks.items, before, strict=True):
        if old and not hasattr(item, "state_dict") and _kept(item) != old:
            raise StepError(
                "a callback that changes must keep what changes in the checkpoints",
                f"{type(item).__name__} without state_dict",
                "Define state_dict(), which returns it, and load_state_dict(state).",
            )
    callbacks.end()


def _kept(item: Any) -> bytes:
    """Return what an object holds; empty if that cannot be said."""
    try:
        return pack(vars(item))
    # It may hold anything, such as an open file.
    except Exception:  # noqa: BLE001
        return b""
