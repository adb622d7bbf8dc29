"""The cost of checkpoints: their share of the time of real runs, synced to disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from torch import nn

from asynckfold.cli.bench.loops import adam, scratch_folder, sweep
from asynckfold.cli.bench.table import BenchTable
from asynckfold.jobs.result import Result
from asynckfold.models import MLP, VGG, LeNet5

TARGET = 0.01
"""Largest share of a run that checkpoints should take, one per epoch of `EPOCH_SECONDS`."""

EPOCH_SECONDS = 5.0
QUICK = {"epoch_seconds": 0.5}


@dataclass(frozen=True)
class Work:
    """A model and the shape of its samples; ``probe`` samples are enough to time it."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    probe: int


WORKS = (
    Work("MLP 784-128-10", MLP, (784,), 8192),
    Work("LeNet5", LeNet5, (1, 32, 32), 2048),
    Work("VGG11", VGG, (3, 32, 32), 128),
)


def table(
    works: Sequence[Work] = WORKS, epoch_seconds: float = EPOCH_SECONDS, epochs: int = 3
) -> BenchTable:
    """Train each work for epochs of about `epoch_seconds`, with a checkpoint after each.

    The cost of checkpoints is the part of a job's time outside its epochs.
    """
    rows = []
    for work in works:
        probe = _train(work, work.probe, 2)
        second = median(job.epochs[-1].seconds for job, _ in probe)
        samples = max(work.probe, round(work.probe * epoch_seconds / second))
        rows.append((work.name, *_costs(_train(work, samples, epochs))))
    return BenchTable(
        "What checkpoints cost",
        "model | checkpoint MB | epoch s | checkpoint ms | share of the run % | target %",
        tuple(rows),
        (
            f"{epochs} epochs of about {epoch_seconds:g} s, one checkpoint each, "
            "fsync of file and folder; two folds side by side, medians over both.",
        ),
    )


def _train(work: Work, samples: int, epochs: int) -> list[tuple[Result, int]]:
    """Return the results, each with the bytes of its largest checkpoint."""
    random = np.random.default_rng(0)
    data = random.random((samples, *work.shape), np.float32), random.integers(0, 10, samples)
    with scratch_folder() as folder:
        models, params = {"model": work.model}, {"epochs": epochs}
        results = sweep(folder, 2, data, models, ["constant"], adam, params)
        files = {
            job: results.root_dir.rglob(f"{job.rpartition('/')[2]}/checkpoint-*.safetensors")
            for job in results.results
        }
        sizes = {job: max(file.stat().st_size for file in found) for job, found in files.items()}
    return [(result, sizes[job]) for job, result in results.results.items()]


def _costs(jobs: Sequence[tuple[Result, int]]) -> tuple[float, ...]:
    outside = [(job, job.fit_seconds - sum(item.seconds for item in job.epochs)) for job, _ in jobs]
    return (
        median(size for _, size in jobs) / 1e6,
        median(epoch.seconds for job, _ in jobs for epoch in job.epochs),
        median(seconds / len(job.epochs) for job, seconds in outside) * 1e3,
        median(seconds / job.fit_seconds for job, seconds in outside) * 100,
        TARGET * 100,
    )
