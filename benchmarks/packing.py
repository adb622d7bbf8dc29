"""Does packing use the cores? One sweep in four ways, and what of the cores' time its jobs have.

::

    loader     one job after another, a DataLoader, torch's default threads     what users write
    serial     one after another, batches from memory, one thread or all        the best serial way
    at once    a process a job, all started together, torch's default threads
    asynckfold the call of `AsyncKFold`, from its arguments to its results

At once is timed once, from when all processes have imported torch, and stopped after 3 times the
seconds of the loader. Use is the share of the core-seconds, from the start of the first job to the
end of the last, in which jobs trained, evaluated and wrote checkpoints; overhead is the rest, a
job. Samples are ten noisy patterns: accuracies only show that all ways learn alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import TimeoutError, get_context
from statistics import median
from typing import Any

import loops
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from asynckfold import Result
from asynckfold.models import MLP, LeNet, LeNet5, MobileNet

WORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "MLP, digits": (loops.digits_mlp, (64,), 1_797, 40),
    "MLP, MNIST": (MLP, (784,), 10_000, 10),
    "LeNet5, MNIST": (LeNet5, (1, 32, 32), 4_000, 4),
    "LeNet, CIFAR-10": (LeNet, (3, 32, 32), 4_000, 4),
    "VGG11, a quarter wide, CIFAR-10": (loops.small_vgg, (3, 32, 32), 1_000, 2),
    "MobileNet, half wide, CIFAR-10": (partial(MobileNet, width=0.5), (3, 32, 32), 500, 2),
}
"""Model, shape of a sample, samples and epochs."""


def alone(exercise: loops.Exercise, data: tuple[Tensor, Tensor], fold: int) -> float:
    """In a process of its own: train one fold, return the accuracy."""
    return exercise.train(fold, loops.from_memory(*data))


def at_once(exercise: loops.Exercise, data: tuple[Tensor, Tensor], limit: float) -> float | None:
    """Train all folds at once, each in a process of its own; None after `limit` seconds."""
    with get_context("spawn").Pool(loops.FOLDS, torch.set_num_threads, (loops.cores(),)) as pool:
        pool.map(time.sleep, [1.0] * loops.FOLDS, 1)  # until all have imported torch
        started = time.perf_counter()
        work = pool.starmap_async(alone, [(exercise, data, fold) for fold in range(loops.FOLDS)], 1)
        try:
            work.get(limit)
        except TimeoutError:
            return None
        return time.perf_counter() - started


def use_of_cores(jobs: list[Result]) -> tuple[float, float]:
    """Return the share of the cores' time in which jobs trained, and the other ms a job."""
    count = len({core for job in jobs for core in job.cores})
    seconds = max(job.ended for job in jobs) - min(job.started for job in jobs)
    fitted = math.fsum(job.threads * job.fit_seconds for job in jobs)
    return 100 * fitted / (count * seconds), 1000 * (seconds - fitted / count) / len(jobs)


def main() -> None:
    """Time each work in each way, turn by turn."""
    parsed = loops.arguments(__doc__, 3)
    table = loops.Table(
        f"One sweep of {loops.FOLDS} folds in four ways",
        "work | loader s | serial s, 1 thread | serial s, all threads | asynckfold s | at once s | "
        "against loader | against best serial | use % | overhead ms a job | accuracy: loader | "
        "serial | serial | asynckfold",
    )
    works = [*WORKS.items()]
    for name, (model, shape, samples, epochs) in works[:3] if parsed.quick else works:
        data = loops.noisy_patterns(shape, samples // (4 if parsed.quick else 1))
        exercise = loops.Exercise(model, loops.folds_of(data[1]), epochs)
        used: list[tuple[float, float]] = []

        def packed(
            exercise: loops.Exercise = exercise, data: Any = data, used: Any = used
        ) -> loops.Outcome:
            started = time.perf_counter()
            results = exercise.results(data)
            used.append(use_of_cores(list(results.results.values())))
            scores = results.cv_results_["mean_test_accuracy"]
            return loops.Outcome(time.perf_counter() - started, float(scores.mean()))

        ways = exercise.serial_ways(TensorDataset(*data), *data)
        outcomes = loops.in_turns(
            {**ways, "asynckfold": packed}, parsed.turns, ("asynckfold",)
        ).values()
        loader, *serial, ours = (median(item.seconds for item in found) for found in outcomes)
        together = at_once(exercise, data, 3 * loader) or f"> {3 * loader:.3g}"
        use = (median(column) for column in zip(*used[1:], strict=True))
        scores = (found[-1].accuracy for found in outcomes)
        table.add(
            name, loader, *serial, ours, together, loader / ours, min(serial) / ours, *use, *scores
        )
    table.print(f"Medians of {parsed.turns} turns, each way once a turn; batches of 32, Adam 1e-3.")


if __name__ == "__main__":
    main()
