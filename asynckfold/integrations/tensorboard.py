"""A run in TensorBoard: the curves of each job, and its scores.

Written from the results, not by a callback inside the jobs: these stay fused, what was trained
before is there too, and so are the curves of the held-out folds, which no callback may see.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import DONE, Epoch, Result
from asynckfold.results.cv_results import CVResults
from asynckfold.store import RunStore
from asynckfold.store.layout import job_folder

_SUFFIX = ".asynckfold"


def write(results: CVResults, folder: str | os.PathLike[str]) -> int:
    """Write the finished jobs of a run as event files; return how many jobs there are.

    Writing again, during the run or after it, replaces what was written before.

    Parameters
    ----------
    results : CVResults
        Of a call, or by `load_results` of a run that goes on.
    folder : path
        For ``tensorboard --logdir``: a folder in it for each job.
    """
    # Not typed, and imports the package tensorboard.
    from torch.utils.tensorboard import SummaryWriter

    writer: Any
    jobs = [job for job in results.plan.jobs if job.id in results.results]
    for job in jobs:
        place = job_folder(Path(folder), job)
        for old in place.glob(f"events.out.tfevents.*{_SUFFIX}"):
            old.unlink()
        with SummaryWriter(place, filename_suffix=_SUFFIX) as writer:
            for epoch, at, numbers in points(results.results[job.id]):
                for name, value in numbers.items():
                    writer.add_scalar(name, value, epoch, walltime=at)
    return len(jobs)


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


def curves(results: CVResults) -> Iterator[tuple[Job, str, list[tuple[int, dict[str, float]]]]]:
    """Yield each job that has ended an epoch, its status, "" while it is trained, and `points`."""
    running: dict[str, list[Epoch]] = {}
    with RunStore.read(results.root_dir) as store:
        for name, epoch in store.epochs():
            running.setdefault(name, []).append(epoch)
    for job in results.plan.jobs:
        so_far = Result(job.id, 0, "", epochs=tuple(running.get(job.id, ())))
        result = results.results.get(job.id, so_far)
        if result.epochs:
            yield job, result.status, [(number, values) for number, _, values in points(result)]
