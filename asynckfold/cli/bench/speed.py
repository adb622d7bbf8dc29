"""The same work as users write it, by the best serial loop, by other tools, and by asynckfold.

::

    loader              one job after another, the user's data set through a DataLoader
    serial              one after another, batches of arrays in memory, one thread or all
    skorch, ray         one job per core, arrays in memory, workers started before
    asynckfold          the whole call over the user's data set, workers started before; also
                        unfused, and over arrays in memory
    asynckfold, cold    the first call of a process: workers start, every model is probed

Each work runs twice: 5 folds, and 5 folds × 4 LR schedules; with --quick only the former.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from asynckfold.cli.bench import peers
from asynckfold.cli.bench.images import chosen, digits, images_of, noisy_patterns
from asynckfold.cli.bench.loops import (
    BATCH,
    FOLDS,
    Exercise,
    Outcome,
    batch_norm_lenet,
    cores,
    digits_mlp,
    scratch_folder,
    small_vgg,
    threads,
)
from asynckfold.cli.bench.table import BenchTable, in_words, silent
from asynckfold.data.sources.datasets import ImageArrays
from asynckfold.engines import warm_pool
from asynckfold.errors import InputError, Problem
from asynckfold.jobs.folds import make_folds
from asynckfold.models import MLP, VGG, LeNet, LeNet5, MobileNet
from asynckfold.training.flops import FlopCounter

SCHEDULES = ("constant", "cosine", "exponential", "step")

MATRIX = 2048
"""Rows and columns of the matrices whose product measures the peak of the machine."""

BUSY = 0.25
"""Load average / cores above which other processes are computing."""

DISTURBED = (
    " Other processes were computing: no ratio here is reliable, least of all those with all "
    "threads, which wait for each other while one of them has no core."
)

HEADER = (
    "work | jobs | way | seconds | spread % | against loader | against best serial | "
    "against best peer | accuracy | GFLOP/s | of the peak %"
)


@dataclass(frozen=True)
class Work:
    """A model and the data that it learns: "digits", "mnist" or "cifar10".

    Images are resized to ``size`` pixels, unless it is 0; each of ``counts`` is a number of LR
    schedules, and an exercise of its own.
    """

    name: str
    model: Callable[[], nn.Module]
    data: str
    samples: int
    epochs: int = 2
    size: int = 0
    counts: Sequence[int] = (1, len(SCHEDULES))

    def quick(self) -> Work:
        """Return a sixth of it, under one LR schedule."""
        return replace(self, samples=self.samples // 6, counts=(1,))


WORKS = (
    Work("MLP 64-128-10, digits", digits_mlp, "digits", 1_797, epochs=20),
    Work("MLP 784-128-10, MNIST", MLP, "mnist", 6_000),
    Work("LeNet5, MNIST", LeNet5, "mnist", 4_000, size=32),
    Work("LeNet with BatchNorm, MNIST", batch_norm_lenet, "mnist", 4_000, size=32),
    Work("LeNet, CIFAR-10", LeNet, "cifar10", 2_000),
    Work("VGG11, a quarter wide, CIFAR-10", small_vgg, "cifar10", 600),
    Work("MobileNet, CIFAR-10, 4 steps", MobileNet, "cifar10", 160, epochs=1, counts=(1,)),
    Work("VGG11, CIFAR-10, 4 steps", VGG, "cifar10", 160, epochs=1, counts=(1,)),
    Work("MobileNet, CIFAR-10, 12 steps", MobileNet, "cifar10", 480, epochs=1, counts=(1,)),
    Work("VGG11, CIFAR-10, 12 steps", VGG, "cifar10", 480, epochs=1, counts=(1,)),
)
"""The last four take seconds for a few steps."""

QUICK = {"works": tuple(work.quick() for work in WORKS[:5]), "turns": 1}


@dataclass(frozen=True)
class Way:
    """A call to time, once if `cold`; None where its library is not installed."""

    call: Callable[[], Outcome] | None
    cold: bool = False


def table(
    works: Sequence[Work] = WORKS,
    turns: int = 3,
    *,
    data: Path | None = None,
    with_peers: bool = False,
    tell: Callable[[str], None] = silent,
) -> BenchTable:
    """Time each work in each way, turn by turn; return medians, spreads and accuracies.

    Samples are those of `images_of` in the folder `data`, generated ones of the same shapes where
    it has none. ``tell`` receives the rows of each work when they are done.
    """
    if data is not None and not data.is_dir():
        problem = Problem(
            "data must name an existing folder", str(data), "Leave it out for generated samples."
        )
        raise InputError([problem])
    load, peak = os.getloadavg()[0], matmul_peak(cores())
    rows: list[tuple[object, ...]] = []
    origins: dict[str, str] = {}
    for work in works:
        dataset, origins[work.data] = _dataset(work, data)
        inputs, targets = next(iter(DataLoader(dataset, len(dataset))))  # type: ignore[arg-type]
        folds = make_folds(len(targets), targets.numpy(), FOLDS)
        for count in work.counts:
            exercise = Exercise(work.model, folds, work.epochs, SCHEDULES[:count])
            ways = _ways(exercise, dataset, inputs, targets, with_peers)
            found = _timed(ways, turns)
            rows += _rows(work.name, exercise, found, _flops(exercise, inputs), peak)
            for row in rows[-len(found) :]:
                tell(in_words(HEADER, row))
    return BenchTable(
        "The same work in several ways",
        HEADER,
        tuple(rows),
        (
            f"Medians of {turns} turns, each way once a turn, a cold one once; spread: from the "
            f"fastest to the slowest / median. Batches of {BATCH}, float32, Adam at 0.001, "
            f"evaluation after each epoch; jobs are {FOLDS} folds under the first one or more of "
            f"the LR schedules {', '.join(SCHEDULES)}.",
            "loader: one job after another, torchvision's way: PIL images through transforms, "
            "sample by sample, in a DataLoader; all threads. serial: the same loop over arrays in "
            "memory, whose loading is not timed, with torch's fused Adam, which is asynckfold's "
            "default. asynckfold: the whole call over loader's data set, checkpoints and page "
            "included; it fuses jobs where its rule expects a gain; unfused: fuse=False. arrays: "
            "loading is not timed, as for serial and peers. cold: workers start and models are "
            "probed.",
            "GFLOP/s: matrix products and convolutions only; the peak is the product of "
            f"two {MATRIX} × {MATRIX} matrices with all threads: {peak / 1e9:.0f} GFLOP/s.",
            f"Load average before the start: {load:.2g}."
            + (DISTURBED if load > BUSY * cores() else ""),
            *(f"{name}: {origin}." for name, origin in origins.items()),
        ),
    )


def matmul_peak(count: int, seconds: float = 0.5) -> float:
    """Return operations per second of a large float32 product, the fastest of several."""
    factors = torch.rand(2, MATRIX, MATRIX)
    best, until = float("inf"), time.perf_counter() + seconds
    with threads(count):
        while time.perf_counter() < until or best == float("inf"):
            started = time.perf_counter()
            torch.mm(*factors)
            best = min(best, time.perf_counter() - started)
    return 2 * MATRIX**3 / best


def _ways(
    exercise: Exercise,
    dataset: Dataset[Any],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    others: bool,
) -> dict[str, Way]:
    serial = exercise.serial_ways(dataset, inputs, targets, cores())
    ways = {name: Way(call) for name, call in serial.items()}
    for peer in peers.PEERS if others else ():
        call = partial(peers.run, peer, exercise, inputs, targets)
        ways[peer] = Way(call if peers.installed(peer) else None)
    ways["asynckfold, unfused"] = Way(lambda: exercise.asynckfold(dataset, fuse=False))
    ways["asynckfold, arrays"] = Way(lambda: exercise.asynckfold((inputs, targets)))
    ways["asynckfold"] = Way(lambda: exercise.asynckfold(dataset))
    return ways | {"asynckfold, cold": replace(ways["asynckfold"], cold=True)}


def _timed(ways: Mapping[str, Way], turns: int) -> dict[str, list[Outcome]]:
    """Return outcomes: one per turn, one of a cold way, none of a peer that is not installed."""
    found: dict[str, list[Outcome]] = {name: [] for name in ways}
    for name, way in ways.items():
        if way.cold and way.call is not None:
            with _first_call():
                found[name].append(way.call())
    for name, way in ways.items():
        # Peers start their workers before they are timed.
        if name in peers.PEERS and way.call is not None:
            way.call()
    for _ in range(turns):
        for name, way in ways.items():
            if way.call is not None and not way.cold:
                found[name].append(way.call())
    return found


@contextmanager
def _first_call() -> Iterator[None]:
    """Run as the first call of a process, on a machine without measured costs."""
    warm_pool.close_warm()
    before = os.environ.get("XDG_CACHE_HOME")
    with scratch_folder() as folder:
        os.environ["XDG_CACHE_HOME"] = str(folder)
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def _rows(
    name: str, exercise: Exercise, found: Mapping[str, Sequence[Outcome]], flops: float, peak: float
) -> Iterator[tuple[object, ...]]:
    seconds = {way: median(item.seconds for item in turns) for way, turns in found.items() if turns}
    serial = min(value for way, value in seconds.items() if way.startswith("serial"))
    others = [seconds[peer] for peer in peers.PEERS if peer in seconds]
    for way, turns in found.items():
        if not turns:
            yield name, len(exercise.jobs), way, "not installed", *(None,) * 7
            continue
        own = seconds[way]
        all_seconds = [item.seconds for item in turns]
        yield (
            name,
            len(exercise.jobs),
            way,
            own,
            100 * (max(all_seconds) - min(all_seconds)) / own if len(turns) > 1 else None,
            seconds["loader"] / own,
            serial / own,
            min(others) / own if others else None,
            turns[-1].accuracy,
            flops / own / 1e9,
            100 * flops / own / peak,
        )


def _flops(exercise: Exercise, inputs: torch.Tensor) -> float:
    """Return the operations of the whole exercise, from those of a step and an evaluation."""
    model, batch = exercise.model(), inputs[:BATCH]
    with FlopCounter() as training:
        model(batch).sum().backward()
    with FlopCounter() as evaluation, torch.no_grad():
        model.eval()(batch)
    of_an_epoch: int = sum(
        training.flops * len(fold.train) + evaluation.flops * len(fold.valid)
        for _, fold in exercise.jobs
    )
    return of_an_epoch * exercise.epochs / len(batch)


def _dataset(work: Work, data: Path | None) -> tuple[Dataset[Any], str]:
    """Return the data set as a user has it, and the origin of its samples."""
    if work.data == "digits":
        images, targets = digits()
        order = chosen(len(targets), work.samples)
        rows = images[order].reshape(len(order), -1).astype(np.float32) / 255
        return TensorDataset(torch.from_numpy(rows), torch.from_numpy(targets[order])), "real"
    found = None if data is None else images_of(work.data, data, work.samples)
    if found is None:
        origin = "generated, noisy patterns of the same shape"
        found = _generated((28, 28) if work.data == "mnist" else (32, 32, 3), work.samples)
    else:
        origin = "real"
    return ImageArrays(*found, _transform(work)), origin


def _generated(shape: tuple[int, ...], samples: int) -> tuple[Any, Any]:
    values, targets = noisy_patterns(shape, samples)
    return np.clip(128 + 30 * values, 0, 255).astype(np.uint8), targets


def _transform(work: Work) -> Callable[[Any], Any]:
    """Return the transform of the tutorials: (resize,) to tensor, normalise."""
    from torchvision import transforms

    resized = [transforms.Resize((work.size, work.size))] if work.size else []
    channels = 3 if work.data == "cifar10" else 1
    normalised = transforms.Normalize((0.5,) * channels, (0.5,) * channels)
    return transforms.Compose([*resized, transforms.ToTensor(), normalised])  # type: ignore[no-any-return]
