"""What a training takes up again: its newest checkpoint that is whole and its own."""

from __future__ import annotations

import contextlib
from typing import Any

from asynckfold.errors import StoreCorruptError
from asynckfold.jobs.messages import CheckpointRef, Noted, Task
from asynckfold.training import checkpoint
from asynckfold.training.bundle import Bundle
from asynckfold.training.training_run import Report, Training


def _tree(bundle: Bundle, task: Task, ref: CheckpointRef) -> dict[str, Any]:
    """Return what a checkpoint holds; raise `StoreCorruptError` where it is not this job's."""
    tree = checkpoint.load(bundle.root / ref.file, ref.sha256, bundle.root)
    check(bundle, task, tree)
    return tree


def check(bundle: Bundle, task: Task, tree: dict[str, Any]) -> None:
    """Refuse a tree that `Training.tree` returned for another job or plan."""
    if tree["job"] != task.job.id:
        raise StoreCorruptError(f"a checkpoint of {tree['job']} stands for {task.job.id}")
    if tree["plan"] != bundle.plan.fingerprint:
        raise StoreCorruptError(f"a checkpoint of {tree['job']} comes from another plan")


def restorable(bundle: Bundle, task: Task) -> bool:
    """Whether any checkpoint of the job is whole and its own."""
    for ref in task.checkpoints:
        with contextlib.suppress(StoreCorruptError):
            _tree(bundle, task, ref)
            return True
    return False


def restore(training: Training, report: Report) -> None:
    """Continue from the newest checkpoint that is whole; report the damage of others."""
    refs = training.task.checkpoints
    for position, ref in enumerate(refs, 1):
        try:
            training.take_up(_tree(training.bundle, training.task, ref))
        except StoreCorruptError as error:
            instead = "an older one is used" if position < len(refs) else "the job starts anew"
            report(Noted(training.task.job.id, "damage", f"{error}; {instead}"))
        else:
            training.log.write(f"continues after epoch {training.epoch}, batch {training.batch}\n")
            return
