"""What do more cores bring for one model? Each trainer on one and on all cores, turn by turn.

All ways train the same samples, Adam 1e-3, batches of 32 of each process (of allreduce, of all
together); seconds are those of the epochs, each with an evaluation on a fifth of the samples.
Speeds are against the plain trainer on one core in the same turn: the median, the least and the
greatest. *Jobs at once* are independent jobs, each on a core of its own: the throughput of these
cores for processes that share nothing. *Parts* are what each process of averaging trains on before
the clones are averaged, as a share of what it would have without overlap. A DBN is pretrained
before its epochs, untimed. Accuracies of hogwild and parameter_server differ from run to run.
``--picture FILE`` draws the training loss of the last turn against seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from loops import Table, arguments, cores, images, sweep
from torch import Tensor, nn

from asynckfold.models import DBN, MLP, LeNet5, Pretraining


class Work(NamedTuple):
    """A model, the size in pixels of its images, and the accuracy to reach (``target``)."""

    name: str
    model: Any
    size: int
    epochs: int = 8
    target: float = 0.97
    samples: int = 12_000


DEEP_BELIEF = partial(DBN, pretraining=Pretraining(epochs=2))
"""The deep belief network 784-500-500-10; each layer is pretrained for two epochs."""

WORKS = (
    Work("MLP 784-128-10", MLP, 28, epochs=12, target=0.93),
    Work("LeNet5", LeNet5, 32),
    Work("DBN 784-500-500-10", DEEP_BELIEF, 28, target=0.94),
)
"""With targets that each reaches on so few samples of MNIST."""


def normalised_images(size: int, samples: int, data: Path | None) -> tuple[Tensor, Tensor]:
    """Return MNIST or enlarged digits, (n, 1, size, size) of mean 0 and deviation 1."""
    pixels, targets = images("digits" if data is None else "mnist", data, samples)
    values = torch.as_tensor(pixels).float().unsqueeze(1)
    large = nn.functional.interpolate(values, (size, size), mode="bilinear")
    return (large - large.mean()) / large.std(), torch.as_tensor(targets)


def trained_on(count: int) -> int:
    """Return the number of training samples, the first ones, among `count`."""
    return count - round(count / 5)


def ways_for(samples: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return settings and trainer parameters by name: the plain trainer first."""
    count = cores()

    def several(trainer: str, **params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"trainer": trainer, "processes": count}, params

    return {
        "plain": ({}, {}),
        f"plain, {count} threads": ({"threads_per_job": count}, {}),
        f"plain, {count} jobs at once": ({"jobs": count}, {}),
        "hogwild": several("hogwild"),
        "hogwild, accumulate=4": several("hogwild", accumulate=4),
        "allreduce": several("allreduce"),
        "parameter_server": several("parameter_server"),
        "averaging": several("averaging"),
        **{
            f"averaging, parts × {share:g}": several(
                "averaging", partition_size=math.ceil(samples * share / count), epochs_per_round=1
            )
            for share in (1, 1.5, 2)
        },
    }


class Outcome(NamedTuple):
    """Samples per second, seconds and epochs to the target, final accuracy, losses by seconds."""

    speed: float
    seconds: float
    epochs: float
    accuracy: float
    losses: Sequence[tuple[float, float]]


def trained(
    work: Work, samples: tuple[Tensor, Tensor], params: Any, *, jobs: int = 1, **settings: Any
) -> Outcome:
    """Train the model on the first samples, in one job or several alike, and score the rest."""
    count = len(samples[0])
    fold = np.arange(trained_on(count)), np.arange(trained_on(count), count)
    rules = {f"rate {number}": "constant" for number in range(jobs)}
    settings = {"fuse": False, "devices": "cpu", "threads_per_job": 1, **settings}
    params = {"epochs": work.epochs, **params}
    results = sweep([fold], samples, {"model": work.model}, rules, params, **settings).results
    speed, seconds, epochs = 0.0, math.inf, math.inf
    for job in results.values():
        ends = list(accumulate(epoch.seconds for epoch in job.epochs))
        seen = sum(job.averaged.samples) if job.averaged else trained_on(count) * work.epochs
        speed += seen / ends[-1]
        for number, (end, epoch) in enumerate(zip(ends, job.epochs, strict=True), 1):
            if (epoch.accuracy or 0) >= work.target and end < seconds:
                seconds, epochs = end, number
        losses = [(end, epoch.train_loss) for end, epoch in zip(ends, job.epochs, strict=True)]
    accuracy = max(job.scores["accuracy"] for job in results.values())
    return Outcome(speed, seconds, epochs, accuracy, losses)


def draw(losses: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], path: Path) -> None:
    """Draw seconds against the training loss of each way, by model."""
    from matplotlib.figure import Figure

    figure = Figure((4.5 * len(losses), 4), layout="constrained")
    panels = figure.subplots(1, len(losses), squeeze=False)[0]
    for axes, (model, by_way) in zip(panels, losses.items(), strict=True):
        for way, points in by_way.items():
            axes.plot(*zip(*points, strict=True), "--" if "plain" in way else "-", label=way)
        axes.set(title=model, xlabel="seconds", ylabel="training loss", yscale="log")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path)


def main() -> None:
    """Train each model in each way, in turns."""
    parsed = arguments(__doc__, 5, "--data", "--picture")
    table = Table(
        "What more cores for one model bring",
        "model | trainer | processes | samples/s | speed against one | from | to | target | "
        "seconds to it | epochs to it | time against one | accuracy",
    )
    losses: dict[str, dict[str, Sequence[tuple[float, float]]]] = {}
    for work in WORKS:
        work = work._replace(samples=work.samples // (6 if parsed.quick else 1))
        samples = normalised_images(work.size, work.samples, parsed.data)
        ways = ways_for(trained_on(len(samples[0])))
        turns = [
            {
                way: trained(work, samples, params, **settings)
                for way, (settings, params) in ways.items()
            }
            for _ in range(parsed.turns)
        ]
        losses[work.name] = {way: outcome.losses for way, outcome in turns[-1].items()}
        for way, (settings, _) in ways.items():
            # Within one turn: the speed of a machine changes from minute to minute.
            speeds = [turn[way].speed / turn["plain"].speed for turn in turns]
            times = [turn["plain"].seconds / turn[way].seconds for turn in turns]
            seconds, epochs = (
                median(getattr(turn[way], name) for turn in turns) for name in ("seconds", "epochs")
            )
            table.add(
                work.name,
                way,
                settings.get("processes") or settings.get("jobs") or 1,
                median(turn[way].speed for turn in turns),
                *(median(speeds), min(speeds), max(speeds), work.target),
                *(seconds, epochs, median(times)),
                median(turn[way].accuracy for turn in turns),
            )
    origin = "MNIST" if parsed.data else "digits of scikit-learn, enlarged"
    table.print(f"Medians of {parsed.turns} turns; {origin}. –: the target was not reached.")
    if parsed.picture:
        draw(losses, parsed.picture)


if __name__ == "__main__":
    main()
