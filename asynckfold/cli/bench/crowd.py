"""The gain of short spinning: steps of several threads on cores that others use too."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch

from asynckfold.cli.bench.loops import Case, as_in_worker, small_vgg, step_of
from asynckfold.cli.bench.table import BenchTable
from asynckfold.models import VGG, LeNet, LeNet5
from asynckfold.system.limits import allowed_cores
from asynckfold.training.worker.spinning import CORES, add_sleeping_threads, waited

CASES = (
    Case("LeNet5", LeNet5, (1, 32, 32)),
    Case("LeNet CIFAR", LeNet),
    Case("VGG11, quarter width", small_vgg),
    Case("VGG11", VGG),
)
QUICK = {"seconds": 0.5, "turns": 1}

Timed = tuple[float, float]
"""Seconds of a step, and seconds that its threads waited per second."""


def table(cases: Sequence[Case] = CASES, seconds: float = 3.0, turns: int = 5) -> BenchTable:
    """Time training steps on all cores, beside processes that always compute."""
    cores = len(allowed_cores())
    with as_in_worker(cores):
        rows = tuple(
            row
            for others in dict.fromkeys((0, 1, cores, 3 * cores))
            for row in _rows(cases, others, seconds, turns)
        )
    return BenchTable(
        "Threads that wait for one another on crowded cores",
        "model | threads | others | spinning ms | little ms | spinning / little | "
        "of the turns, from | to | waits spinning | waits little",
        rows,
        (
            "A step in float32 with Adam, batches of 32; others are processes that always compute. "
            "Spinning is libgomp's default; little is what a worker sets where its threads wait "
            "for cores. Both in each turn; medians, and the least and the greatest ratio. Waits "
            "are seconds per second in which all threads could have run, but had no core: from "
            "0.1 on, a worker tries little, and keeps the faster of the two.",
        ),
    )


def _rows(
    cases: Sequence[Case], others: int, seconds: float, turns: int
) -> Iterator[tuple[object, ...]]:
    with _busy(others):
        for case in cases:
            step = step_of(case)
            step()
            found = [_turn(step, seconds, turn % 2 == 1) for turn in range(turns)]
            ratios = sorted(spinning[0] / little[0] for spinning, little in found)
            ways = [list(zip(*way, strict=True)) for way in zip(*found, strict=True)]
            yield (
                case.name,
                torch.get_num_threads(),
                others,
                *(1e3 * median(seconds) for seconds, _ in ways),
                median(ratios),
                ratios[0],
                ratios[-1],
                *(median(waits) for _, waits in ways),
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


def _turn(step: Callable[[], None], seconds: float, little_first: bool) -> tuple[Timed, Timed]:
    ways = {True: partial(_little, step, seconds), False: partial(_timed, step, seconds)}
    found = {little: ways[little]() for little in (little_first, not little_first)}
    return found[False], found[True]


def _little(step: Callable[[], None], seconds: float) -> Timed:
    take_back = add_sleeping_threads(CORES)
    try:
        return _timed(step, seconds)
    finally:
        if take_back is not None:
            take_back()


def _timed(step: Callable[[], None], seconds: float) -> Timed:
    step()
    before, began, count = waited(), time.perf_counter(), 0
    while not count or time.perf_counter() - began < seconds:
        step()
        count += 1
    took = time.perf_counter() - began
    return took / count, (waited() - before) / took
