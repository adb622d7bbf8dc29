"""One sweep by each engine beside plain tasks of Ray, turn by turn.

::

    serial, process, ray   the call of `AsyncKFold`, from its arguments to its results
    plain tasks            samples by `ray.put`, a `ray.remote` task for each job, one thread

The engine "ray" and the plain tasks use the same Ray of this machine, which has been started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from asynckfold.cli.bench import peers
from asynckfold.cli.bench.images import noisy_patterns
from asynckfold.cli.bench.loops import BATCH, Exercise, cores, digits_mlp
from asynckfold.cli.bench.table import BenchTable, in_words, silent
from asynckfold.errors import Problem, refuse
from asynckfold.jobs.folds import Fold, make_folds
from asynckfold.models import MLP
from asynckfold.system.machine import Machine

ENGINES, PLAIN = ("serial", "process", "ray"), "plain tasks"

SCHEDULES = ("constant", "cosine", "step", "exponential")

ROOM = 8
"""Free memory needed, as a multiple of the data: several copies exist at once."""

WIDTH = 1024
"""Numbers in a sample of the large data, of 4 bytes each."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Parameters
    ----------
    few, many : int
        Jobs of the two calls whose difference is the overhead of a job.
    sweep, epochs : int
        Jobs of the sweep, and their epochs.
    megabytes : int
        Of the data that go to the first job, if memory allows.
    """

    few: int = 20
    many: int = 120
    sweep: int = 200
    epochs: int = 5
    megabytes: int = 1000


QUICK = {"size": Size(4, 24, 40, 2, 64), "turns": 1}

HEADER = f"work | unit | {' | '.join(ENGINES)} | {PLAIN} | ray / plain | process / plain"


def table(
    size: Size | None = None, turns: int = 3, *, tell: Callable[[str], None] = silent
) -> BenchTable:
    """Time each work in each way, turn by turn; `tell` receives each row when it is done."""
    if not peers.installed("ray"):
        rule, remedy = "bench engines needs Ray", "Run: pip install 'asynckfold[ray]'"
        refuse([Problem(rule, "an environment without it", remedy)])
    size = size or Size()
    megabytes = _megabytes(size)
    few, many = _short(size.few), _short(size.many)
    jobs = _sweep(size.sweep, size.epochs)
    works: list[tuple[str, str, Callable[[str], float]]] = [
        (
            "overhead of a job",
            "ms",
            lambda way: (
                (_seconds(way, *many, fuse=False) - _seconds(way, *few, fuse=False))
                * 1000
                / (size.many - size.few)
            ),
        ),
        (f"data of {megabytes} MB, one job", "s", partial(_of, _large(megabytes), fuse=False)),
        (f"sweep of {size.sweep} jobs, not fused", "s", partial(_of, jobs, fuse=False)),
        (f"sweep of {size.sweep} jobs, by default", "s", partial(_of, jobs)),
    ]
    ways = (*ENGINES, PLAIN)
    rows: list[tuple[Any, ...]] = []
    for name, unit, measured in works:
        for way in ways:
            measured(way)  # starts what stays: workers, and Ray's processes
        turned = [{way: measured(way) for way in ways} for _ in range(turns)]
        found = {way: median(turn[way] for turn in turned) for way in ways}
        ratios = (found[way] / found[PLAIN] for way in ("ray", "process"))
        rows.append((name, unit, *found.values(), *ratios))
        tell(in_words(HEADER, rows[-1]))
    return BenchTable("The engines beside plain tasks of Ray", HEADER, tuple(rows), _notes(turns))


def _notes(turns: int) -> tuple[str, ...]:
    return (
        f"Medians of {turns} turns, each way once a turn, after one that is not counted. Seconds "
        "of the whole call; the engines also check, plan, store and score.",
        "The overhead of a job is the difference of two calls by the difference of their jobs, of "
        "an MLP and one step.",
        "Plain tasks: samples by ray.put, read without a copy; a task for each job with one "
        "thread and torch's fused Adam; nothing is stored, and a failure is not handled.",
    )


def _megabytes(size: Size) -> int:
    room = Machine("cpu").free_memory({}) / (ROOM * 1e6)
    return size.megabytes if room >= size.megabytes else min(256, size.megabytes)


Work = tuple[Exercise, torch.Tensor, torch.Tensor]


def _sweep(jobs: int, epochs: int) -> Work:
    """Return a sweep of digits-like samples."""
    samples, targets = _tensors(1_797)
    folds = make_folds(len(samples), targets.numpy(), jobs // len(SCHEDULES))
    return Exercise(digits_mlp, folds, epochs, SCHEDULES), samples, targets


def _short(jobs: int) -> Work:
    """Return jobs of one step."""
    samples, targets = _tensors(20 * BATCH)
    return (
        Exercise(digits_mlp, [_step(len(samples), at) for at in range(jobs)], 1),
        samples,
        targets,
    )


def _tensors(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = noisy_patterns((64,), count)
    return torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets)


def _large(megabytes: int) -> Work:
    """Return a job of one step on large data."""
    count = megabytes * 1_000_000 // (4 * WIDTH)
    inputs, targets = torch.randn(count, WIDTH), torch.arange(count) % 10
    return Exercise(_wide_mlp, [_step(count, 0)], 1), inputs, targets


def _step(count: int, index: int) -> Fold:
    """Return a fold of one batch to train on and one to score."""
    rows = np.random.default_rng(index).choice(count, 2 * BATCH, replace=False)
    return Fold(0, index, rows[:BATCH], rows[BATCH:])


def _wide_mlp() -> MLP:
    return MLP(WIDTH, (16,))


def _of(work: Work, way: str, **settings: Any) -> float:
    return _seconds(way, *work, **settings)


def _seconds(
    way: str, exercise: Exercise, inputs: torch.Tensor, targets: torch.Tensor, **settings: Any
) -> float:
    if way == PLAIN:
        return peers.run("ray", exercise, inputs, targets).seconds
    given = {"engine": way, "threads_per_job": 1, "n_jobs": cores(), **settings}
    return exercise.asynckfold((inputs, targets), **given).seconds
