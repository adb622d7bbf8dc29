"""What checkpoints cost: their share of the time of real runs, synced to the disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from torch import nn, optim

from asynckfold.api.kfold import AsyncKFold
from asynckfold.cli.bench.table import BenchTable, machine_facts
from asynckfold.jobs.result import Result
from asynckfold.models import MLP, VGG, LeNet5

TARGET = 0.01
"""Largest share of a run that checkpoints should take, at one for each epoch of `EPOCH_SECONDS`."""

EPOCH_SECONDS = 5.0


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


def checkpoint_table(
    works: Sequence[Work] = WORKS, epoch_seconds: float = EPOCH_SECONDS, epochs: int = 3
) -> BenchTable:
    """Train each work for some epochs, a checkpoint after each; tell what the checkpoints took.

    The seconds of checkpoints are those of a job that belong to none of its epochs.

    Parameters
    ----------
    works : sequence of Work
        What to train, with Adam, whose state makes a checkpoint three times the model.
    epoch_seconds : float
        Length of an epoch; the number of samples is chosen for it.
    epochs : int
        Epochs, and so checkpoints, of a job.
    """
    rows = []
    for work in works:
        probe = _train(work, work.probe, 2)
        second = median(job.epochs[-1] for job in probe)
        samples = max(work.probe, round(work.probe * epoch_seconds / second))
        rows.append((work.name, *_costs(_train(work, samples, epochs))))
    return BenchTable(
        "What checkpoints cost",
        (
            "model",
            "checkpoint MB",
            "epoch s",
            "checkpoint ms",
            "share of the run %",
            "target %",
        ),
        tuple(rows),
        (
            f"{epochs} epochs of about {epoch_seconds:g} s, one checkpoint each, "
            "fsync of file and folder; two folds side by side, medians over both.",
        ),
        machine_facts(),
    )


def _train(work: Work, samples: int, epochs: int) -> list[_Timed]:
    random = np.random.default_rng(0)
    data = random.random((samples, *work.shape), np.float32), random.integers(0, 10, samples)
    # Beside the caller's files: a system's temporary folder may lie in memory.
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="asynckfold-bench-") as folder:
        kfold = AsyncKFold(
            2, data, Path(folder) / "run", nn.CrossEntropyLoss(), 32, baseline=None, verbose=0
        )
        results = kfold(
            {"model": work.model},
            ["constant"],
            lambda model: optim.Adam(model.parameters(), 1e-4),
            {"epochs": epochs},
        )
        return [
            _Timed(result, _checkpoint_size(Path(folder), job))
            for job, result in results.results.items()
        ]


def _checkpoint_size(folder: Path, job: str) -> int:
    files = (folder / "run").rglob(f"{Path(job).name}/checkpoint-*.safetensors")
    return max(file.stat().st_size for file in files)


@dataclass(frozen=True)
class _Timed:
    """A result, and the bytes of its last checkpoint."""

    result: Result
    size: int

    @property
    def epochs(self) -> list[float]:
        """Seconds of each epoch."""
        return [epoch.seconds for epoch in self.result.epochs]

    @property
    def outside(self) -> float:
        """Seconds of the job that belong to no epoch."""
        return self.result.fit_seconds - sum(self.epochs)


def _costs(jobs: Sequence[_Timed]) -> tuple[float, ...]:
    return (
        median(job.size for job in jobs) / 1e6,
        median(seconds for job in jobs for seconds in job.epochs),
        median(job.outside / len(job.epochs) for job in jobs) * 1e3,
        median(job.outside / job.result.fit_seconds for job in jobs) * 100,
        TARGET * 100,
    )
