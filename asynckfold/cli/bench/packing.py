"""One sweep in four ways, turn by turn: what users write today, the best serial loop, all at once.

::

    loader     one job after another, a DataLoader, torch's default threads     what users write
    serial     one after another, batches from memory, one thread or all        the best serial way
    at once    a process a job, all started together, torch's default threads   the ancestor's way
    asynckfold the call of `AsyncKFold`, from its arguments to its results

See `loops` for what they share.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from threading import Timer
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from asynckfold.cli.bench.images import noisy_patterns
from asynckfold.cli.bench.loops import (
    BATCH,
    FOLDS,
    Exercise,
    Outcome,
    cores,
    digits_mlp,
    from_memory,
    small_vgg,
)
from asynckfold.cli.bench.table import BenchTable, in_words, silent
from asynckfold.jobs.folds import make_folds
from asynckfold.models import MLP, LeNet, LeNet5, MobileNet


def _small_mobilenet() -> nn.Module:
    return MobileNet(width=0.5)


@dataclass(frozen=True)
class Work:
    """A sweep of one model over five folds; `model` is a function that other processes import."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int
    epochs: int


WORKS = (
    Work("MLP, digits", digits_mlp, (64,), 1_797, 40),
    Work("MLP, MNIST", MLP, (784,), 10_000, 10),
    Work("LeNet5, MNIST", LeNet5, (1, 32, 32), 4_000, 4),
    Work("LeNet, CIFAR-10", LeNet, (3, 32, 32), 4_000, 4),
    Work("VGG11, a quarter wide, CIFAR-10", small_vgg, (3, 32, 32), 1_000, 2),
    Work("MobileNet, half wide, CIFAR-10", _small_mobilenet, (3, 32, 32), 500, 2),
)

QUICK = {"works": tuple(replace(work, samples=work.samples // 4) for work in WORKS), "turns": 1}

HEADER = (
    "work | loader s | serial s, 1 thread | serial s, all threads | at once s | asynckfold s | "
    "asynckfold s, first call | against loader | against best serial | accuracy: loader | "
    "accuracy: serial | accuracy: asynckfold"
)

AT_ONCE_LIMIT = 3.0
"""All folds at once stop after this multiple of the loader's seconds: they took more than ten times
as long, and have lost by then."""


def table(
    works: Sequence[Work] = WORKS, turns: int = 3, *, tell: Callable[[str], None] = silent
) -> BenchTable:
    """Time each work in each way, turn by turn; `tell` receives each row when it is done."""
    rows: list[tuple[object, ...]] = []
    for work in works:
        ways = _ways(work)
        # Workers start once in the life of a process; a column of its own has that cost.
        cold = ways["asynckfold"]().seconds
        turned = [{name: way() for name, way in ways.items()} for _ in range(turns)]
        seconds = {name: median(turn[name].seconds for turn in turned) for name in ways}
        accuracies = {name: turned[-1][name].accuracy for name in ways}
        limit = AT_ONCE_LIMIT * seconds["loader"]
        at_once = _at_once(work, cores(), limit)
        serial = min(seconds[name] for name in ways if name.startswith("serial"))
        rows.append(
            (
                work.name,
                seconds["loader"],
                *(seconds[name] for name in ways if name.startswith("serial")),
                f"> {limit:.3g}" if at_once is None else at_once.seconds,
                seconds["asynckfold"],
                cold,
                seconds["loader"] / seconds["asynckfold"],
                serial / seconds["asynckfold"],
                accuracies["loader"],
                accuracies["serial, 1 thread"],
                accuracies["asynckfold"],
            )
        )
        tell(in_words(HEADER, rows[-1]))
    return BenchTable(
        "One sweep of 5 folds in four ways",
        HEADER,
        tuple(rows),
        (
            f"Medians of {turns} turns, each way once a turn, except at once, which is timed once "
            f"and stopped after {AT_ONCE_LIMIT:g} times the seconds of the loader. Batches of "
            f"{BATCH}, Adam at 0.001, evaluation after each epoch.",
            "loader: one job after another from a DataLoader with torch's default threads. "
            "serial: from memory with torch's fused Adam, the better of 1 thread and all. at once: "
            "one process a fold, timed from when all have imported torch. asynckfold: the whole "
            "call, in a process that has workers already; the first call of a process starts them "
            "and probes.",
            "Samples are drawn from ten noisy patterns of the named data's shape: accuracies only "
            "show that all ways learn alike.",
        ),
    )


def _samples(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = noisy_patterns(work.shape, work.samples)
    return torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets)


def _sweep(work: Work, targets: torch.Tensor) -> Exercise:
    folds = make_folds(work.samples, targets.numpy(), FOLDS)
    return Exercise(work.model, folds, work.epochs)


def _ways(work: Work) -> dict[str, Callable[[], Outcome]]:
    samples = _samples(work)
    sweep = _sweep(work, samples[1])
    serial = sweep.serial_ways(TensorDataset(*samples), *samples, cores())
    return {**serial, "asynckfold": lambda: sweep.asynckfold(samples)}


def _at_once(work: Work, threads: int, limit: float) -> Outcome | None:
    """Train all folds at once, each in a process of its own; None after `limit` seconds."""
    with ExitStack() as stack:
        processes = [stack.enter_context(_started(work, fold, threads)) for fold in range(FOLDS)]
        for process in processes:
            process.stdout.readline()
        started = time.perf_counter()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        stop = Timer(limit, lambda: [process.kill() for process in processes])
        stop.start()
        told = [process.stdout.readline() for process in processes]
        seconds = time.perf_counter() - started
        stop.cancel()
    if not all(told):
        return None
    found = [float(line) for line in told]
    return Outcome(seconds, float(np.mean(found)))


def _started(work: Work, fold: int, threads: int) -> Any:
    """Start a process that trains one fold on command."""
    maker = work.model
    lines = (
        f"from {__name__} import Work, alone",
        f"from {maker.__module__} import {maker.__qualname__} as model",
        f"work = Work({work.name!r}, model, {work.shape}, {work.samples}, {work.epochs})",
        f"alone(work, {fold}, {threads})",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii"
    )


def alone(work: Work, fold: int, threads: int) -> None:
    """In a process of its own: report ready, wait, train one fold, report the accuracy."""
    torch.set_num_threads(threads)
    samples = _samples(work)
    sweep = _sweep(work, samples[1])
    _tell("ready")
    sys.stdin.readline()
    _tell(str(sweep.train(sweep.folds[fold], from_memory(*samples))))


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
