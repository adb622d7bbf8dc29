"""When a running job writes a checkpoint, and which one it continues from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from asynckfold.errors import StoreCorruptError
from asynckfold.jobs.messages import CheckpointRef, Noted, Task
from asynckfold.training import checkpoint
from asynckfold.training.bundle import Bundle
from asynckfold.training.training_run import Report, Training

EPOCH_SECONDS = 1.0
"""Least time between two checkpoints at epoch ends: repeating less work is cheaper."""

MIDDLE_SECONDS = 30.0
"""Time without a checkpoint after which one is written in the middle of an epoch."""

SHARE = 0.01
"""Largest share of a job's time spent on checkpoints: a large model on a slow disk is saved less
often, after 99 seconds of training for each second of saving."""


class Saver:
    """Writes a job's checkpoints, and limits the time that they take.

    Examples
    --------
    >>> now = iter([0, 10, 12, 100, 300])
    >>> saver = Saver(lambda: None, lambda: next(now))
    >>> saver.save()  # from 10 to 12: the next is due 200 seconds later
    >>> saver.due(EPOCH_SECONDS), saver.due(EPOCH_SECONDS)
    (False, True)
    """

    def __init__(
        self, save: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._save = save
        self._clock = clock
        self._cost = 0.0
        self._saved = clock()

    def due(self, least: float) -> bool:
        """Whether `least` seconds have passed, and enough to keep within `SHARE`."""
        return self._clock() - self._saved >= max(least, self._cost / SHARE)

    def save(self) -> None:
        """Write a checkpoint."""
        started = self._clock()
        self._save()
        self._saved = self._clock()
        self._cost = self._saved - started


def load(bundle: Bundle, task: Task, ref: CheckpointRef) -> dict[str, Any]:
    """Read a checkpoint; raise `StoreCorruptError` if it is damaged or of another job or plan."""
    tree = checkpoint.load(bundle.root / ref.file, ref.sha256, bundle.root)
    if tree["job"] != task.job.id:
        raise StoreCorruptError(
            f"{ref.file} is a checkpoint of {tree['job']}, not of {task.job.id}"
        )
    if tree["plan"] != bundle.plan.fingerprint:
        raise StoreCorruptError(f"{ref.file} is a checkpoint of {tree['job']} in another plan")
    return tree


def restorable(bundle: Bundle, task: Task) -> bool:
    """Whether the job has an intact checkpoint."""
    for ref in task.checkpoints:
        with contextlib.suppress(StoreCorruptError):
            load(bundle, task, ref)
            return True
    return False


def restore(training: Training, report: Report) -> None:
    """Continue from the newest intact checkpoint; report the damaged ones."""
    refs = training.task.checkpoints
    for position, ref in enumerate(refs, 1):
        try:
            training.load_state_dict(load(training.bundle, training.task, ref))
        except StoreCorruptError as error:
            instead = (
                "an older one is used"
                if position < len(refs)
                else "the job starts from the beginning"
            )
            report(Noted(training.task.job.id, "damage", f"{error}; {instead}"))
        else:
            training.log.write(f"continues after epoch {training.epoch}, batch {training.batch}\n")
            return
