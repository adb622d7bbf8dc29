"""How much of the cores a sweep uses, and what a job costs beside its training."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import nn, optim

from asynckfold.api.kfold import AsyncKFold
from asynckfold.cli.bench.table import BenchTable, machine_facts
from asynckfold.models import MLP
from asynckfold.results.cv_results import CVResults
from asynckfold.results.utilization import Packing, packing_of
from asynckfold.store import RunStore

USE_TARGET, OVERHEAD_TARGET = 95.0, 5.0
"""Per cent of the cores, and milliseconds a job."""


@dataclass(frozen=True)
class Case:
    """Jobs to measure: a model for each width of its hidden layer, over some folds.

    Parameters
    ----------
    name : str
        What it is for.
    widths : tuple of int
        Of the hidden layers; a job is the longer, the wider its model.
    folds, samples, epochs : int
        How many.
    """

    name: str
    widths: tuple[int, ...]
    folds: int
    samples: int
    epochs: int


CASES = (
    Case("200 jobs of a few batches", (16,) * 40, 5, 160, 1),
    Case("40 uneven jobs", (64, 128, 256, 384, 512, 768, 1024, 2048), 5, 4_000, 4),
)


def use_table(cases: Sequence[Case] = CASES, turns: int = 3) -> BenchTable:
    """Run each case some times, with workers that are there already; return medians.

    Parameters
    ----------
    cases : sequence of Case
        What to run.
    turns : int
        How often.
    """
    rows = []
    for case in cases:
        _run(case)
        found = [_measured(*_run(case)) for _ in range(turns)]
        columns = zip(*found, strict=True)
        rows.append((case.name, *(median(column) for column in columns)))
    return BenchTable(
        "How much of the cores a sweep uses",
        (
            "sweep",
            "jobs",
            "cores",
            "seconds",
            "use %",
            "training %",
            "overhead ms a job",
            "wall ms a job beside its training",
        ),
        tuple(rows),
        (
            f"Medians of {turns} turns, one after another, from the start of the first job to the "
            "end of the last. use: core-seconds in which a core belonged to a job / core-seconds; "
            "training: those in which it trained or evaluated.",
            "overhead: the wall time of the sweep less what jobs took themselves / cores, a job: "
            "deciding, commits, the way to a worker and back, scoring, isolation, the model. A job "
            "takes training, evaluation, and its checkpoint with two fsyncs; the last column "
            "counts that checkpoint, too. "
            f"Targets: at least {USE_TARGET:g} % use, under {OVERHEAD_TARGET:g} ms.",
        ),
        machine_facts(),
    )


def _run(case: Case) -> tuple[CVResults, Packing]:
    """Do it once; return its results, and how they were packed."""
    random = np.random.default_rng(0)
    data = random.random((case.samples, 784), np.float32), random.integers(0, 10, case.samples)
    models: Mapping[str, Callable[[], nn.Module]] = {
        f"model-{number}": _Maker(width) for number, width in enumerate(case.widths)
    }
    # Beside the caller's files: a system's temporary folder may lie in memory.
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="asynckfold-bench-") as folder:
        kfold = AsyncKFold(
            case.folds,
            data,
            Path(folder) / "run",
            nn.CrossEntropyLoss(),
            32,
            baseline=None,
            verbose=0,
            threads_per_job=1,
        )
        results = kfold(
            models,
            ["constant"],
            lambda model: optim.SGD(model.parameters(), 1e-2),
            {"epochs": case.epochs},
        )
        with RunStore.read(results.root_dir) as store:
            packing = packing_of(store)
    assert packing is not None
    return results, packing


@dataclass(frozen=True)
class _Maker:
    """Makes the model of one width."""

    width: int

    def __call__(self) -> nn.Module:
        return MLP(784, (self.width,))


def _measured(results: CVResults, packing: Packing) -> tuple[Any, ...]:
    jobs = list(results.results.values())
    cores = len({core for job in jobs for core in job.cores})
    seconds = packing.makespan
    fitted = math.fsum(job.threads * job.fit_seconds for job in jobs)
    trained = math.fsum(
        # An epoch of jobs that are trained as one is that of all.
        job.threads * epoch.seconds / len(results.plan.group_of(job.job_id))
        for job in jobs
        for epoch in job.epochs
    )
    overhead, beside = (1000 * (seconds - own / cores) / len(jobs) for own in (fitted, trained))
    use, training = (100 * part / (cores * seconds) for part in (packing.core_seconds, trained))
    return len(jobs), cores, seconds, use, training, overhead, beside
