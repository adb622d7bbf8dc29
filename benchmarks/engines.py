"""What does each engine cost beside plain tasks of Ray?

::

    serial, process, ray   the call of `AsyncKFold`, from its arguments to its results: the engines
                           also check, plan, store and score
    plain tasks            samples by `ray.put`, a `ray.remote` task for each job, one thread, fused
                           Adam: nothing is stored, and a failure is not handled

The engine "ray" and the plain tasks use the same Ray of this machine, which has been started. The
overhead of a job is the difference of two calls by the difference of their jobs, of one step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import loops
import numpy as np
from torch import Tensor

ENGINES, PLAIN = ("serial", "process", "ray"), "plain tasks"

SCHEDULES = ("constant", "cosine", "step", "exponential")

Work = tuple[loops.Exercise, tuple[Tensor, Tensor]]


def short_jobs(samples: tuple[Tensor, Tensor], jobs: int) -> Work:
    """Return jobs that train on one batch and score another."""
    draw = np.random.default_rng(0)
    rows = [draw.choice(len(samples[0]), 2 * loops.BATCH, replace=False) for _ in range(jobs)]
    return loops.Exercise(
        loops.digits_mlp, [(chosen[: loops.BATCH], chosen[loops.BATCH :]) for chosen in rows], 1
    ), samples


def seconds_of(way: str, work: Work, **settings: Any) -> float:
    """Return the seconds of a work in one way."""
    exercise, samples = work
    if way == PLAIN:
        return loops.by_ray(exercise, *samples).seconds
    settings = {"threads_per_job": 1, "n_jobs": loops.cores(), **settings}
    return exercise.asynckfold(samples, engine=way, **settings).seconds


def main() -> None:
    """Time each work in each way, turn by turn."""
    parsed = loops.arguments(__doc__, 3)
    if "ray" not in loops.PEERS:
        sys.exit("benchmarks/engines.py needs Ray. Run: pip install 'asynckfold[ray]'")
    few, many, jobs = (4, 24, 40) if parsed.quick else (20, 120, 200)
    digits = loops.noisy_patterns((64,), 1_797)
    sweep = (
        loops.Exercise(loops.digits_mlp, loops.folds_of(digits[1], jobs // 4), 5, SCHEDULES),
        digits,
    )
    less, more = (short_jobs(digits, number) for number in (few, many))

    def overhead_ms(way: str) -> float:
        difference = seconds_of(way, more, fuse=False) - seconds_of(way, less, fuse=False)
        return 1000 * difference / (many - few)

    works: dict[str, Callable[[str], float]] = {
        "overhead of a job, ms": overhead_ms,
        f"sweep of {jobs} jobs, not fused, s": lambda way: seconds_of(way, sweep, fuse=False),
        f"sweep of {jobs} jobs, by default, s": lambda way: seconds_of(way, sweep),
    }
    ways = (*ENGINES, PLAIN)
    header = f"work | {' | '.join(ways)} | ray / plain | process / plain"
    table = loops.Table("The engines beside plain tasks of Ray", header)
    for name, measured in works.items():
        for way in ways:
            measured(way)  # starts what stays: workers, and Ray's processes
        turned = [{way: measured(way) for way in ways} for _ in range(parsed.turns)]
        times = {way: median(turn[way] for turn in turned) for way in ways}
        ratios = (times[way] / times[PLAIN] for way in ("ray", "process"))
        table.add(name, *times.values(), *ratios)
    table.print(f"Medians of {parsed.turns} turns, after one that is not counted.")


if __name__ == "__main__":
    main()
