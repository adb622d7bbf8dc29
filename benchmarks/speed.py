"""Is a sweep faster than users' loops, the best serial loop, skorch and Ray?

::

    loader              one job after another, the user's data set through a DataLoader
    serial              one after another, batches of arrays in memory, one thread or all
    skorch, ray         one job per core, arrays in memory, workers started before (--peers)
    asynckfold          the whole call over the user's data set, workers started before; also
                        unfused, and over arrays in memory
    asynckfold, cold    the first call of a process, which starts the workers

Each work runs twice: 5 folds, and 5 folds × 4 LR schedules; with --quick only the former. On a GPU:
see gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import loops
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from asynckfold.models import MLP, VGG, LeNet, LeNet5, MobileNet

SCHEDULES = ("constant", "cosine", "exponential", "step")


class Work(NamedTuple):
    """A model and the images that it learns, resized to ``size`` pixels unless it is 0.

    Each of ``counts`` is a number of LR schedules, and an exercise of its own.
    """

    name: str
    model: Callable[[], nn.Module]
    data: str
    samples: int
    epochs: int = 2
    size: int = 0
    counts: tuple[int, ...] = (1, len(SCHEDULES))


WORKS = (
    Work("MLP 64-128-10, digits", loops.digits_mlp, "digits", 1_797, epochs=20),
    Work("MLP 784-128-10, MNIST", MLP, "mnist", 6_000),
    Work("LeNet5, MNIST", LeNet5, "mnist", 4_000, size=32),
    Work("LeNet, CIFAR-10", LeNet, "cifar10", 2_000),
    Work("VGG11, a quarter wide, CIFAR-10", loops.small_vgg, "cifar10", 600),
    # A few steps of large models.
    Work("MobileNet, CIFAR-10, 4 steps", MobileNet, "cifar10", 160, epochs=1, counts=(1,)),
    Work("VGG11, CIFAR-10, 4 steps", VGG, "cifar10", 160, epochs=1, counts=(1,)),
    Work("VGG11, CIFAR-10, 12 steps", VGG, "cifar10", 480, epochs=1, counts=(1,)),
)


def samples_of(work: Work, data: Path | None) -> tuple[Dataset[Any], Tensor, Tensor]:
    """Return the data set as a user has it, and its arrays."""
    pixels, targets = loops.images(work.data, data, work.samples)
    if work.data == "digits":
        arrays = torch.from_numpy(pixels).flatten(1).float() / 255, torch.from_numpy(targets)
        return TensorDataset(*arrays), *arrays
    dataset = loops.ImageDataset(pixels, targets, work.size)
    return dataset, *next(iter(DataLoader(dataset, len(dataset))))


def cold_call(exercise: loops.Exercise, dataset: Dataset[Any]) -> loops.Outcome:
    """Time the first call of a process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(exercise.asynckfold, dataset, devices="cpu").result()


def add_rows(
    table: loops.Table, name: str, jobs: int, outcomes: dict[str, list[loops.Outcome]]
) -> None:
    """Add a row for each way."""
    seconds = {way: median(item.seconds for item in turns) for way, turns in outcomes.items()}
    serial = min(value for way, value in seconds.items() if way.startswith("serial"))
    peer = min((seconds[way] for way in loops.PEERS if way in seconds), default=None)
    for way, turns in outcomes.items():
        times, middle = [item.seconds for item in turns], seconds[way]
        spread = 100 * (max(times) - min(times)) / middle if len(times) > 1 else None
        ratios = (
            seconds[next(iter(seconds))] / middle,
            serial / middle,
            peer / middle if peer else None,
        )
        table.add(name, jobs, way, middle, spread, *ratios, turns[-1].accuracy)


def main() -> None:
    """Time each work in each way, turn by turn."""
    parsed = loops.arguments(__doc__, 3, "--data", "--peers")
    works: Sequence[Work] = WORKS
    if parsed.quick:
        works = [work._replace(samples=work.samples // 6, counts=(1,)) for work in WORKS[:4]]
    table = loops.Table(
        "The same work in several ways",
        "work | jobs | way | seconds | spread % | against the loop | against best serial | "
        "against best peer | accuracy",
    )
    # All before the first work: data that lack are not found out an hour later.
    samples = [samples_of(work, parsed.data) for work in works]
    for work, (dataset, inputs, targets) in zip(works, samples, strict=True):
        for count in work.counts:
            exercise = loops.Exercise(
                work.model, loops.folds_of(targets), work.epochs, SCHEDULES[:count]
            )
            ways = exercise.serial_ways(dataset, inputs, targets)
            for peer in loops.PEERS if parsed.peers else ():
                ways[peer] = partial(loops.by_peer, peer, exercise, inputs, targets)
            ours = partial(exercise.asynckfold, devices="cpu")
            ways["asynckfold, unfused"] = partial(ours, dataset, fuse=False)
            ways["asynckfold, arrays"] = partial(ours, (inputs, targets))
            ways["asynckfold"] = partial(ours, dataset)
            cold = cold_call(exercise, dataset)
            outcomes = loops.in_turns(ways, parsed.turns, starting=(*loops.PEERS, "asynckfold"))
            outcomes["asynckfold, cold"] = [cold]
            add_rows(table, work.name, len(exercise.jobs), outcomes)
    table.print(
        f"Medians of {parsed.turns} turns, each way once a turn, a cold one once; spread: from the "
        f"fastest to the slowest / median. Batches of {loops.BATCH}, float32, Adam, evaluation "
        f"after each epoch; LR schedules: the first of {', '.join(SCHEDULES)}.",
        f"Samples: {(parsed.data and 'real') or 'noisy patterns of the named shapes'}.",
    )


if __name__ == "__main__":
    main()
