"""How much of the cores a sweep uses, and the overhead of a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from torch import nn, optim

from asynckfold.cli.bench.loops import scratch_folder, sweep
from asynckfold.cli.bench.table import BenchTable
from asynckfold.models import MLP
from asynckfold.results.cv_results import CVResults
from asynckfold.results.utilization import Packing, packing_of
from asynckfold.store import RunStore

USE_TARGET, OVERHEAD_TARGET = 95.0, 5.0
"""Per cent of the cores, and milliseconds per job."""

QUICK = {"turns": 1}


@dataclass(frozen=True)
class Case:
    """Jobs to measure: one MLP per width of its hidden layer; wider models take longer."""

    name: str
    widths: tuple[int, ...]
    folds: int
    samples: int
    epochs: int


CASES = (
    Case("200 jobs of a few batches", (16,) * 40, 5, 160, 1),
    Case("40 uneven jobs", (64, 128, 256, 384, 512, 768, 1024, 2048), 5, 4_000, 4),
)


def table(cases: Sequence[Case] = CASES, turns: int = 3) -> BenchTable:
    """Run each case `turns` times on workers that have started; return medians."""
    rows = []
    for case in cases:
        _run(case)
        found = [_measured(*_run(case)) for _ in range(turns)]
        columns = zip(*found, strict=True)
        rows.append((case.name, *(median(column) for column in columns)))
    return BenchTable(
        "How much of the cores a sweep uses",
        "sweep | jobs | cores | seconds | use % | training % | overhead ms a job | "
        "wall ms a job beside its training",
        tuple(rows),
        (
            f"Medians of {turns} turns, one after another, from the start of the first job to the "
            "end of the last. use: core-seconds in which a core belonged to a job / core-seconds; "
            "training: those in which it trained or evaluated.",
            "overhead: (wall time of the sweep - time of all jobs / cores) / jobs: placement, "
            "commits, messages to and from workers, scoring, isolation, building the model. The "
            "time of a job is training, evaluation, and its checkpoint with two fsyncs; the last "
            "column counts that checkpoint as overhead too. "
            f"Targets: at least {USE_TARGET:g} % use, under {OVERHEAD_TARGET:g} ms.",
        ),
    )


def _run(case: Case) -> tuple[CVResults, Packing]:
    """Return the results of one run, and how its jobs were packed."""
    random = np.random.default_rng(0)
    data = random.random((case.samples, 784), np.float32), random.integers(0, 10, case.samples)
    models = {
        f"model-{number}": partial(MLP, 784, (width,)) for number, width in enumerate(case.widths)
    }
    with scratch_folder() as folder:
        params = {"epochs": case.epochs}
        results = sweep(
            folder, case.folds, data, models, ["constant"], _sgd, params, threads_per_job=1
        )
        with RunStore.read(results.root_dir) as store:
            packing = packing_of(store)
    assert packing is not None
    return results, packing


def _sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 1e-2)


def _measured(results: CVResults, packing: Packing) -> tuple[Any, ...]:
    jobs = list(results.results.values())
    cores = len({core for job in jobs for core in job.cores})
    seconds = packing.makespan
    fitted = math.fsum(job.threads * job.fit_seconds for job in jobs)
    trained = math.fsum(
        # The seconds of a fused job's epoch are those of its whole group.
        job.threads * epoch.seconds / len(results.plan.group_of(job.job_id))
        for job in jobs
        for epoch in job.epochs
    )
    overhead, beside = (1000 * (seconds - own / cores) / len(jobs) for own in (fitted, trained))
    use, training = (100 * part / (cores * seconds) for part in (packing.core_seconds, trained))
    return len(jobs), cores, seconds, use, training, overhead, beside
