"""Is a sweep on a GPU faster than a loop there, and does it take as long as predicted?

::

    loop            one job after another: samples on the GPU, fused Adam, one wait of the host per
                    epoch; timed after a first job
    first, second   two calls of asynckfold in a new process, from the call to its return
    predicted       by the rule, for a call with workers that have started; seen: the second call's
                    seconds of training

Each work trains 5 folds × 2 LR schedules, ResNet18 2 × 2. With --device cpu, the same on cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import loops
import numpy as np
import torch
from torch import Tensor, nn

from asynckfold import get_scheduler
from asynckfold.models import MLP

SCHEDULES = ("cosine", "warm")


class Work(NamedTuple):
    """A model and the images that it learns."""

    name: str
    model: Callable[[], nn.Module]
    data: str
    samples: int
    epochs: int
    folds: int = 5
    precision: str = "fp32"


WORKS: tuple[Work, ...] = (
    Work("LeNet, MNIST, 450 steps", loops.lenet, "mnist", 6_000, 3),
    Work("LeNet, MNIST, 2,250 steps", loops.lenet, "mnist", 6_000, 15),
    Work("MLP 784-128-10, MNIST, 450 steps", MLP, "mnist", 6_000, 3),
    Work("ResNet18, CIFAR-10, 40 steps", loops.resnet, "cifar10", 2_560, 1, 2),
    Work("ResNet18, CIFAR-10, 40 steps, bf16", loops.resnet, "cifar10", 2_560, 1, 2, "bf16"),
)


def arrays_of(work: Work, data: Path | None) -> tuple[Tensor, Tensor]:
    """Return images as float32 (N, C, H, W), and their classes."""
    pixels, targets = loops.images(work.data, data, work.samples)
    images = torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255
    shaped = images.movedim(3, 1) if images.dim() == 4 else images[:, None]
    return shaped.contiguous(), torch.from_numpy(targets)


def train(work: Work, fold: Any, schedule: str, inputs: Tensor, targets: Tensor) -> Tensor:
    """Train one job where its samples are; return its accuracy."""
    device = inputs.device
    rows, valid = (torch.from_numpy(part).to(device) for part in fold)
    model, criterion = work.model().to(device), nn.CrossEntropyLoss()
    optimizer = loops.fast_adam(model)
    lr_schedule = get_scheduler(schedule, optimizer, work.epochs)
    autocast = torch.autocast(device.type, torch.bfloat16) if work.precision == "bf16" else None
    right = torch.zeros(())
    for _ in range(work.epochs):
        model.train()
        for part in torch.split(rows[torch.randperm(len(rows)).to(device)], loops.BATCH):
            optimizer.zero_grad()
            with autocast or nullcontext():
                loss = criterion(model(inputs[part]), targets[part])
            loss.backward()
            optimizer.step()
        lr_schedule.step()
        model.eval()
        with torch.inference_mode(), autocast or nullcontext():
            hits = [
                (model(inputs[part]).argmax(1) == targets[part]).sum()
                for part in torch.split(valid, loops.EVALUATION_BATCH)
            ]
        right = torch.stack(hits).sum().cpu()
    return right / len(valid)


def by_loop(work: Work, data: Path | None, device: str) -> tuple[float, float]:
    """Return the seconds of all jobs one after another, and their mean accuracy."""
    inputs, targets = (item.to(device) for item in arrays_of(work, data))
    folds = loops.folds_of(targets.cpu(), work.folds)
    train(work, folds[0], SCHEDULES[0], inputs, targets)
    started = time.perf_counter()
    scores = [train(work, fold, name, inputs, targets) for name in SCHEDULES for fold in folds]
    return time.perf_counter() - started, float(torch.stack(scores).mean())


class Calls(NamedTuple):
    """Two calls in a process, their prediction and what was seen of it."""

    first: float
    second: float
    predicted: float
    seen: float
    groups: str
    accuracy: float


def by_asynckfold(work: Work, data: Path | None, device: str) -> Calls:
    """Call twice, and ask for the prediction."""
    arrays = arrays_of(work, data)
    folds = loops.folds_of(arrays[1], work.folds)
    exercise = loops.Exercise(work.model, folds, work.epochs, SCHEDULES, work.precision)
    first = exercise.asynckfold(arrays, devices=device)
    started = time.perf_counter()
    results = exercise.results(arrays, report=True, devices=device)
    second = time.perf_counter() - started
    sizes = " + ".join(str(len(group)) for group in results.plan.groups)
    predicted = exercise.predicted_seconds(arrays, devices=device)
    return Calls(first.seconds, second, predicted, results.seconds, sizes or "none", first.accuracy)


def main() -> None:
    """Time each work, turn by turn, each way in a new process."""
    parsed = loops.arguments(__doc__, 3, "--data", "--device")
    works = WORKS
    if parsed.quick:
        chosen = WORKS[2], WORKS[2]._replace(precision="bf16"), WORKS[0]
        works = tuple(
            work._replace(
                name=f"{work.name.partition(',')[0]}, {work.precision}", samples=600, epochs=1
            )
            for work in chosen
        )
    table = loops.Table(
        "A sweep on a GPU" if parsed.device == "cuda" else "A sweep on cores",
        "work | jobs | loop | first call | second call | loop / first | loop / second | "
        "predicted | seen | fused groups | accuracy, loop | accuracy",
    )

    def apart(way: Callable[..., Any], work: Work) -> Any:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(way, work, parsed.data, parsed.device).result()

    for work in works:
        turns = [(apart(by_loop, work), apart(by_asynckfold, work)) for _ in range(parsed.turns)]
        loop = median(seconds for (seconds, _), _ in turns)
        first, second, predicted, seen = (
            median(calls[place] for _, calls in turns) for place in range(4)
        )
        (_, accuracy), last = turns[-1]
        table.add(
            *(work.name, work.folds * len(SCHEDULES), loop, first, second, loop / first),
            *(loop / second, predicted, seen, last.groups, accuracy, last.accuracy),
        )
    name = torch.cuda.get_device_name() if parsed.device == "cuda" else "cores"
    table.print(
        f"Medians of {parsed.turns} turns on {name}, in seconds. Batches of {loops.BATCH}, Adam, "
        f"evaluation after each epoch; LR schedules {' and '.join(SCHEDULES)}.",
        f"Samples: {(parsed.data and 'real') or 'noisy patterns of the named shapes'}.",
    )


if __name__ == "__main__":
    main()
