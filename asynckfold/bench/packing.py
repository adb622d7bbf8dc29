"""One sweep in four ways, turn by turn: what users write today, the best serial loop, all at once.

::

    loader     one job after another, a DataLoader, torch's default threads     what users write
    serial     one after another, batches from memory, one thread or all        the best serial way
    at once    a process a job, all started together, torch's default threads   the ancestor's way
    asynckfold the call of `AsyncKFold`, from its arguments to its results

All train the same samples in batches of the same size for the same epochs, on the same folds, and
evaluate the held-out fold after each epoch. The others write nothing down; asynckfold keeps its
promises: checkpoints and results on the disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Subset, TensorDataset

from asynckfold.bench.table import BenchTable, machine_facts
from asynckfold.folds import Fold, make_folds
from asynckfold.kfold import AsyncKFold
from asynckfold.models import MLP, VGG, LeNet, LeNet5, MobileNet

BATCH = 32
EVALUATION_BATCH = 256
FOLDS = 5


def _small_vgg() -> nn.Module:
    return VGG(width=0.25)


def _small_mobilenet() -> nn.Module:
    return MobileNet(width=0.5)


def _digits_mlp() -> nn.Module:
    return MLP(64)


@dataclass(frozen=True)
class Work:
    """A sweep of one model over five folds.

    Parameters
    ----------
    name : str
        Of model and samples.
    model : callable
        Makes a new model; of a module, so that another process can import it.
    shape : tuple of int
        Of one sample.
    samples, epochs : int
        How much of them.
    """

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int
    epochs: int


WORKS = (
    Work("MLP, digits", _digits_mlp, (64,), 1_797, 40),
    Work("MLP, MNIST", MLP, (784,), 10_000, 10),
    Work("LeNet5, MNIST", LeNet5, (1, 32, 32), 4_000, 4),
    Work("LeNet, CIFAR-10", LeNet, (3, 32, 32), 4_000, 4),
    Work("VGG11, a quarter wide, CIFAR-10", _small_vgg, (3, 32, 32), 1_000, 2),
    Work("MobileNet, half wide, CIFAR-10", _small_mobilenet, (3, 32, 32), 500, 2),
)


@dataclass(frozen=True)
class Outcome:
    """How long one way took, and the mean accuracy over folds."""

    seconds: float
    accuracy: float


def packing_table(works: Sequence[Work] = WORKS, turns: int = 3) -> BenchTable:
    """Time each work in each way, turn by turn; return medians and ratios of medians.

    Parameters
    ----------
    works : sequence of Work
        What to train.
    turns : int
        How often each way is timed, the ways one after another in each turn.
    """
    rows = []
    for work in works:
        contest = _Contest(work)
        ways = contest.ways()
        # Workers start once in the life of a process; what that costs is told apart.
        cold = ways["asynckfold"]().seconds
        turned = [{name: way() for name, way in ways.items()} for _ in range(turns)]
        seconds = {name: median(turn[name].seconds for turn in turned) for name in ways}
        accuracies = {name: turned[-1][name].accuracy for name in ways}
        serial = min(seconds[name] for name in ways if name.startswith("serial"))
        rows.append(
            (
                work.name,
                seconds["loader"],
                *(seconds[name] for name in ways if name.startswith("serial")),
                seconds["at once"],
                seconds["asynckfold"],
                cold,
                seconds["loader"] / seconds["asynckfold"],
                serial / seconds["asynckfold"],
                accuracies["loader"],
                accuracies["serial, 1 thread"],
                accuracies["asynckfold"],
            )
        )
    return BenchTable(
        "One sweep of 5 folds in four ways",
        (
            "work",
            "loader s",
            "serial s, 1 thread",
            "serial s, all threads",
            "at once s",
            "asynckfold s",
            "asynckfold s, first call",
            "against loader",
            "against best serial",
            "accuracy: loader",
            "accuracy: serial",
            "accuracy: asynckfold",
        ),
        tuple(rows),
        (
            f"Medians of {turns} turns, each way once a turn. Batches of {BATCH}, Adam at 0.001, "
            "evaluation after each epoch.",
            "loader: one job after another from a DataLoader with torch's default threads. "
            "serial: from memory, the better of 1 thread and all. at once: one process a fold, "
            "timed from when all have imported torch. asynckfold: the whole call, in a process "
            "that has workers already; the first call of a process starts them and probes.",
            "Samples are drawn from ten noisy patterns of the named data's shape, so accuracies "
            "say only that all ways learn alike.",
        ),
        machine_facts(),
    )


def _samples(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten patterns below so much noise that a model has something to learn."""
    random = np.random.default_rng(0)
    patterns = random.normal(size=(10, *work.shape))
    targets = random.integers(0, 10, work.samples)
    noise = random.normal(scale=3.0, size=(work.samples, *work.shape))
    inputs = (patterns[targets] + noise).astype(np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


class _Contest:
    """A work with its samples and folds, and the ways to do it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.inputs, self.targets = _samples(work)
        self.folds = make_folds(work.samples, self.targets.numpy(), FOLDS)

    def ways(self) -> dict[str, Callable[[], Outcome]]:
        """Return what to call and time, by name."""
        cores = len(os.sched_getaffinity(0))
        return {
            "loader": lambda: self.one_by_one(_from_loader, cores),
            "serial, 1 thread": lambda: self.one_by_one(_from_memory, 1),
            "serial, all threads": lambda: self.one_by_one(_from_memory, cores),
            "at once": lambda: self.at_once(cores),
            "asynckfold": self.asynckfold,
        }

    def one_by_one(self, batches: _Batches, threads: int) -> Outcome:
        """Train one fold after another in this process."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        started = time.perf_counter()
        try:
            found = [self.train(fold, batches) for fold in self.folds]
        finally:
            torch.set_num_threads(before)
        return Outcome(time.perf_counter() - started, float(np.mean(found)))

    def at_once(self, threads: int) -> Outcome:
        """Train each fold in a process of its own, all at the same time."""
        with ExitStack() as stack:
            processes = [
                stack.enter_context(_started(self.work, fold, threads))
                for fold in range(len(self.folds))
            ]
            for process in processes:
                process.stdout.readline()
            started = time.perf_counter()
            for process in processes:
                process.stdin.write("go\n")
                process.stdin.flush()
            found = [float(process.stdout.readline()) for process in processes]
            seconds = time.perf_counter() - started
        return Outcome(seconds, float(np.mean(found)))

    def asynckfold(self) -> Outcome:
        """Train all folds by asynckfold, with its defaults."""
        started = time.perf_counter()
        # Beside the caller's files: a system's temporary folder may lie in memory.
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="asynckfold-bench-") as folder:
            kfold = AsyncKFold(
                FOLDS,
                (self.inputs, self.targets),
                Path(folder) / "run",
                nn.CrossEntropyLoss(),
                BATCH,
                baseline=None,
                verbose=0,
            )
            results = kfold(
                {"model": self.work.model}, ["constant"], adam, {"epochs": self.work.epochs}
            )
            seconds = time.perf_counter() - started
        return Outcome(seconds, float(results.best_score_))

    def train(self, fold: Fold, batches: _Batches) -> float:
        """Train one fold; return its accuracy after the last epoch."""
        torch.manual_seed(fold.index)
        model = self.work.model()
        optimizer, criterion = adam(model), nn.CrossEntropyLoss()
        right = 0
        for _ in range(self.work.epochs):
            model.train()
            for inputs, targets in batches(self.inputs, self.targets, fold.train, BATCH, True):
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()
            model.eval()
            with torch.inference_mode():
                pairs = batches(self.inputs, self.targets, fold.valid, EVALUATION_BATCH, False)
                right = sum(
                    int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in pairs
                )
        return right / len(fold.valid)


def adam(model: nn.Module) -> optim.Optimizer:
    """Return the optimizer of all ways."""
    return optim.Adam(model.parameters(), 1e-3)


_Batches = Callable[..., Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""(inputs, targets, sample numbers, batch size, whether to shuffle) → batches."""


def _from_memory(
    inputs: torch.Tensor, targets: torch.Tensor, rows: Any, size: int, shuffle: bool
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    order = torch.as_tensor(rows)
    order = order[torch.randperm(len(order))] if shuffle else order
    for low in range(0, len(order), size):
        part = order[low : low + size]
        yield inputs.index_select(0, part), targets.index_select(0, part)


def _from_loader(
    inputs: torch.Tensor, targets: torch.Tensor, rows: Any, size: int, shuffle: bool
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    subset = Subset(TensorDataset(inputs, targets), rows.tolist())
    return DataLoader(subset, size, shuffle=shuffle)


def _started(work: Work, fold: int, threads: int) -> Any:
    """Start a process that trains one fold as soon as it is told to."""
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
    """Train one fold, in a process of its own: ready, wait, train, tell the accuracy."""
    torch.set_num_threads(threads)
    contest = _Contest(work)
    _tell("ready")
    sys.stdin.readline()
    _tell(str(contest.train(contest.folds[fold], _from_memory)))


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
