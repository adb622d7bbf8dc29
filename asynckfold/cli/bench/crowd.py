"""What it brings that the threads of a job spin little where others use its cores."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch

from asynckfold.cli.bench.formats import Case, step_of
from asynckfold.cli.bench.loops import small_vgg, threads
from asynckfold.cli.bench.table import BenchTable, machine_facts
from asynckfold.models import VGG, LeNet, LeNet5
from asynckfold.system import process
from asynckfold.system.limits import allowed_cores
from asynckfold.training import seeding
from asynckfold.training.worker.spinning import CORES, add_sleeping_threads, waited

CASES = (
    Case("LeNet5", LeNet5, (1, 32, 32)),
    Case("LeNet CIFAR", LeNet),
    Case("VGG11, quarter width", small_vgg),
    Case("VGG11", VGG),
)


def crowd_table(cases: Sequence[Case] = CASES, seconds: float = 3.0, turns: int = 5) -> BenchTable:
    """Time training steps on all cores, beside processes that always compute.

    Parameters
    ----------
    cases : sequence of Case
        What to train, with torch's fused Adam, on random samples.
    seconds : float
        How long each way is timed in each turn, at least one step.
    turns : int
        How often.
    """
    # As in a worker.
    process.keep_freed_memory()
    cores = len(allowed_cores())
    with seeding.preserved(), threads(cores):
        rows = tuple(
            row
            for others in dict.fromkeys((0, 1, cores, 3 * cores))
            for row in _rows(cases, others, seconds, turns)
        )
    return BenchTable(
        "Threads that wait for one another on crowded cores",
        (
            "model",
            "threads",
            "others",
            "spinning ms",
            "little ms",
            "spinning / little",
            "of the turns, from",
            "to",
            "waits spinning",
            "waits little",
        ),
        rows,
        (
            "A step in float32 with Adam, batches of 32; others are processes that always compute. "
            "Spinning is what libgomp does by itself, little what a worker has it do where its "
            "threads wait for cores. Both in each turn; medians, and the least and the greatest "
            "ratio. Waits are the seconds in a second that all its threads could have run, but "
            "had no core: from 0.1 on a worker tries little, and keeps to what is faster.",
        ),
        machine_facts(),
    )


def _rows(
    cases: Sequence[Case], others: int, seconds: float, turns: int
) -> Iterator[tuple[object, ...]]:
    with _busy(others):
        for case in cases:
            inputs = torch.randn(case.batch_size, *case.shape)
            step = step_of(case, inputs, torch.arange(case.batch_size) % 10, last=False)
            step()
            found = [_turn(step, seconds, turn % 2 == 1) for turn in range(turns)]
            ratios = sorted(spinning[0] / little[0] for spinning, little in found)
            spinning, little = zip(*found, strict=True)
            times = [1e3 * median(took for took, _ in way) for way in (spinning, little)]
            waits = [median(wait for _, wait in way) for way in (spinning, little)]
            yield (
                case.name,
                torch.get_num_threads(),
                others,
                *times,
                median(ratios),
                ratios[0],
                ratios[-1],
                *waits,
            )


@contextmanager
def _busy(count: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


Timed = tuple[float, float]
"""Seconds of a step, and what its threads waited in a second."""


def _turn(step: Callable[[], None], seconds: float, little_first: bool) -> tuple[Timed, Timed]:
    ways = {True: partial(_little, step, seconds), False: partial(_timed, step, seconds)}
    found = {little: ways[little]() for little in (little_first, not little_first)}
    return found[False], found[True]


def _little(step: Callable[[], None], seconds: float) -> Timed:
    end_threads = add_sleeping_threads(CORES)
    try:
        return _timed(step, seconds)
    finally:
        if end_threads is not None:
            end_threads()


def _timed(step: Callable[[], None], seconds: float) -> Timed:
    step()
    before, began, count = waited(), time.perf_counter(), 0
    while not count or time.perf_counter() - began < seconds:
        step()
        count += 1
    took = time.perf_counter() - began
    return took / count, (waited() - before) / took
