"""The same work as users write it, by the best serial loop, by other tools, and by asynckfold.

::

    loader              one job after another, the user's data set through a DataLoader
    serial              one after another, batches of arrays in memory, one thread or all
    skorch, ray         a job a core, arrays in memory, workers there already
    asynckfold          the whole call over the user's data set, workers there already; also
                        unfused, and over arrays in memory
    asynckfold, cold    the first call of a process: workers start, every model is probed

Each work is done twice: 5 folds, and 5 folds × 4 LR schedules; in a quick table the former only.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from asynckfold.cli.bench import peers
from asynckfold.cli.bench.loops import (
    BATCH,
    FOLDS,
    Exercise,
    Outcome,
    cores,
    digits_mlp,
    fast_adam,
    from_loader,
    from_memory,
    noisy_patterns,
    small_vgg,
    threads,
)
from asynckfold.cli.bench.table import BenchTable, in_words, machine_facts, silent
from asynckfold.data.sources import load_source
from asynckfold.data.sources.datasets import ImageArrays
from asynckfold.engines import warm_pool
from asynckfold.errors import InputError, Problem
from asynckfold.jobs.folds import make_folds
from asynckfold.models import MLP, VGG, LeNet, LeNet5, MobileNet
from asynckfold.training.flops import FlopCounter

SCHEDULES = ("constant", "cosine", "exponential", "step")

MATRIX = 2048
"""Rows and columns of the matrices whose product tells what the machine can do."""

BUSY = 0.25
"""Load average / cores above which somebody else computes."""

DISTURBED = (
    " Others were computing: no ratio here is to be trusted, least of all those with all threads, "
    "whose threads wait for each other while one of them has no core."
)

COLUMNS = (
    "work",
    "jobs",
    "way",
    "seconds",
    "spread %",
    "against loader",
    "against best serial",
    "against best peer",
    "accuracy",
    "GFLOP/s",
    "of the peak %",
)


@dataclass(frozen=True)
class Work:
    """A model and what it learns.

    Parameters
    ----------
    name : str
        Of model and samples.
    model : callable
        Makes a new one.
    data : {"digits", "mnist", "cifar10"}
        What it learns.
    samples, epochs : int
        How much of it.
    size : int
        Pixels to which images are resized; 0 leaves them as they are.
    counts : sequence of int
        Numbers of LR schedules, each an exercise of its own.
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
    Work("LeNet, CIFAR-10", LeNet, "cifar10", 2_000),
    Work("VGG11, a quarter wide, CIFAR-10", small_vgg, "cifar10", 600),
    Work("MobileNet, CIFAR-10, 4 steps", MobileNet, "cifar10", 160, epochs=1, counts=(1,)),
    Work("VGG11, CIFAR-10, 4 steps", VGG, "cifar10", 160, epochs=1, counts=(1,)),
    Work("MobileNet, CIFAR-10, 12 steps", MobileNet, "cifar10", 480, epochs=1, counts=(1,)),
    Work("VGG11, CIFAR-10, 12 steps", VGG, "cifar10", 480, epochs=1, counts=(1,)),
)
"""The last four take seconds for a few steps."""

QUICK = tuple(work.quick() for work in WORKS[:4])


@dataclass(frozen=True)
class Way:
    """What is timed, and in how many turns."""

    call: Callable[[], Outcome] | None
    cold: bool = False


def speed_table(
    works: Sequence[Work] = WORKS,
    turns: int = 3,
    *,
    data: Path | None = None,
    with_peers: bool = False,
    tell: Callable[[str], None] = silent,
) -> BenchTable:
    """Time each work in each way, turn by turn; return medians, spreads and accuracies.

    Parameters
    ----------
    works : sequence of Work
        What to train.
    turns : int
        How often each way is timed, the ways one after another in each turn; a cold one once.
    data : Path, optional
        Folder of MNIST and CIFAR-10, see `images_of`; generated samples of the same shapes stand
        for what is not there.
    with_peers : bool
        Also by skorch and Ray, where they are installed.
    tell : callable
        Is told the rows of a work as soon as they are there.

    Raises
    ------
    InputError
        There is no such folder.
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
                tell(in_words(COLUMNS, row))
    return BenchTable(
        "The same work in several ways",
        COLUMNS,
        tuple(rows),
        (
            f"Medians of {turns} turns, each way once a turn, a cold one once; spread: from the "
            f"fastest to the slowest / median. Batches of {BATCH}, float32, Adam at 0.001, "
            f"evaluation after each epoch; jobs are {FOLDS} folds under the first one or more of "
            f"the LR schedules {', '.join(SCHEDULES)}.",
            "loader: one job after another, torchvision's way: PIL images through transforms, "
            "sample by sample, in a DataLoader; all threads. serial: the same loop over arrays in "
            "memory, which it gets for nothing, and with torch's fused Adam, which asynckfold "
            "takes by itself. asynckfold: the whole call over loader's data "
            "set, with its checkpoints; it trains jobs as one where its rule says that this is "
            "faster, unfused: with fuse=False. arrays: it gets for nothing what serial and peers "
            "get. cold: workers are started and models probed.",
            "GFLOP/s: products of matrices and convolutions only; the peak is that of a product of "
            f"two {MATRIX} × {MATRIX} matrices with all threads: {peak / 1e9:.0f} GFLOP/s.",
            f"Load average before the start: {load:.2g}."
            + (DISTURBED if load > BUSY * cores() else ""),
            *(f"{name}: {origin}." for name, origin in origins.items()),
        ),
        machine_facts(),
    )


def matmul_peak(count: int, seconds: float = 0.5) -> float:
    """Return the operations a second of a large float32 product, by the fastest of several."""
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
    loader, memory = from_loader(dataset), from_memory(inputs, targets)
    ways = {
        "loader": Way(lambda: exercise.one_by_one(loader, cores())),
        "serial, 1 thread": Way(lambda: exercise.one_by_one(memory, 1, fast_adam)),
        "serial, all threads": Way(lambda: exercise.one_by_one(memory, cores(), fast_adam)),
    }
    for peer in peers.PEERS if others else ():
        call = _of_peer(peer, exercise, inputs, targets) if peers.installed(peer) else None
        ways[peer] = Way(call)
    ways["asynckfold, unfused"] = Way(lambda: exercise.asynckfold(dataset, fuse=False))
    ways["asynckfold, arrays"] = Way(lambda: exercise.asynckfold((inputs, targets)))
    ways["asynckfold"] = Way(lambda: exercise.asynckfold(dataset))
    return ways | {"asynckfold, cold": replace(ways["asynckfold"], cold=True)}


def _of_peer(
    peer: str, exercise: Exercise, inputs: torch.Tensor, targets: torch.Tensor
) -> Callable[[], Outcome]:
    return lambda: peers.run(peer, exercise, inputs, targets)


def _timed(ways: Mapping[str, Way], turns: int) -> dict[str, list[Outcome]]:
    """Return the outcomes: one a turn, one of a cold way, none of what is not installed."""
    found: dict[str, list[Outcome]] = {name: [] for name in ways}
    for name, way in ways.items():
        if way.cold and way.call is not None:
            with _first_call():
                found[name].append(way.call())
    for name, way in ways.items():
        # What is timed from here on has its workers.
        if name in peers.PEERS and way.call is not None:
            way.call()
    for _ in range(turns):
        for name, way in ways.items():
            if way.call is not None and not way.cold:
                found[name].append(way.call())
    return found


@contextmanager
def _first_call() -> Iterator[None]:
    """As in a process that has no workers, on a machine that knows no costs."""
    warm_pool.close_warm()
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="asynckfold-bench-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
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
            yield name, len(exercise.jobs), way, "not installed", *(None,) * (len(COLUMNS) - 4)
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
    """Operations of the whole exercise: those of a step and of an evaluation, by sample."""
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
    """Return the data set as a user has it, and where its samples come from."""
    if work.data == "digits":
        digits: Any = load_source("digits").dataset
        images, targets = digits.data, digits.targets
        chosen = _chosen(len(targets), work.samples)
        rows = images[chosen].reshape(len(chosen), -1).astype(np.float32) / 255
        return TensorDataset(torch.from_numpy(rows), torch.from_numpy(targets[chosen])), "real"
    found = None if data is None else images_of(work.data, data, work.samples)
    if found is None:
        origin = "generated, noisy patterns of the same shape"
        found = _generated((28, 28) if work.data == "mnist" else (32, 32, 3), work.samples)
    else:
        origin = "real"
    return ImageArrays(*found, _transform(work)), origin


def images_of(name: str, data: Path, samples: int) -> tuple[Any, Any] | None:
    """Return images as uint8 and their classes, chosen at random; None where there are none.

    Parameters
    ----------
    name : {"mnist", "cifar10"}
        What is wanted.
    data : Path
        As torchvision keeps its files there; CIFAR-10 may also be images, one folder per class, in
        its folder ``train``.
    samples : int
        How many.
    """
    try:
        source = load_source(name, data_root=data)
    except InputError:
        if name != "cifar10" or not (data / "train").is_dir():
            return None
        source = load_source(f"folder:{data / 'train'}")
    dataset: Any = source.dataset
    pairs = [dataset[index] for index in _chosen(len(dataset), samples)]
    images = np.stack([np.asarray(image) for image, _ in pairs])
    return images, np.array([target for _, target in pairs], np.int64)


def _chosen(count: int, samples: int) -> Any:
    return np.random.default_rng(0).permutation(count)[:samples]


def _generated(shape: tuple[int, ...], samples: int) -> tuple[Any, Any]:
    values, targets = noisy_patterns(shape, samples)
    return np.clip(128 + 30 * values, 0, 255).astype(np.uint8), targets


def _transform(work: Work) -> Callable[[Any], Any]:
    """Return what stands in the tutorials: (resized,) as a tensor, normalised."""
    from torchvision import transforms

    resized = [transforms.Resize((work.size, work.size))] if work.size else []
    channels = 3 if work.data == "cifar10" else 1
    normalised = transforms.Normalize((0.5,) * channels, (0.5,) * channels)
    return transforms.Compose([*resized, transforms.ToTensor(), normalised])  # type: ignore[no-any-return]
