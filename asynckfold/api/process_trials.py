"""Timed trainings of several processes: what an exchange costs here, and what a model gains.

Each is a `fit` of a few short epochs in a folder of its own, which is removed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asynckfold.api.fit import fit
from asynckfold.api.planner import identity
from asynckfold.jobs.trainer_params import SEVERAL
from asynckfold.planning import calibration, cost_cache
from asynckfold.planning.calibration import Exchange
from asynckfold.system.machine import Machine

BATCH, STEPS, EPOCHS, PROCESSES = 32, 64, 4, 2
HIDDEN: Mapping[str, tuple[int, ...]] = {"small": (32,), "large": (1024, 512)}
"""Layers of the two networks of 64 inputs that are timed: 10 kB and 2.4 MB of parameters."""


@dataclass(frozen=True)
class Trial:
    """How fast a model trains by one way.

    Parameters
    ----------
    trainer : str
        Its trainer.
    processes, threads : int
        Of the job, and of each of its processes.
    samples_per_second : float
        In its fastest epoch.
    gain : float
        Over the plain trainer with one thread.
    """

    trainer: str
    processes: int
    threads: int
    samples_per_second: float
    gain: float


def exchange_of(trainer: str, machine: Machine) -> tuple[Exchange, str]:
    """Return what an exchange costs, measured once for each machine, and a remark, or ``""``.

    Takes about ten seconds the first time. On a machine that is busy nothing is measured.
    """
    facts, place = identity(machine), cost_cache.folder()
    known = calibration.recall(trainer, facts, place)
    if known.is_measured or machine.max_cores < PROCESSES:
        return known, ""
    if machine.describe()["cpu"]["busy"]:
        return known, (
            "what processes pay to exchange is not measured on a busy machine: the numbers of "
            "another machine are used"
        )
    exchange = _measured(trainer, known.share)
    calibration.remember(trainer, facts, exchange, place)
    return exchange, ""


def _measured(trainer: str, share: float) -> Exchange:
    """Time a small and a large network, alone and together."""
    from asynckfold.models import MLP

    random = np.random.default_rng(0)
    inputs = random.normal(size=((STEPS + 1) * BATCH, 64)).astype(np.float32)
    data = inputs, random.integers(10, size=len(inputs))
    divides = trainer == "allreduce"
    points = []
    for hidden in HIDDEN.values():
        make = partial(MLP, 64, hidden)
        size = sum(item.nbytes for item in make().parameters())
        # With all-reduce, each process computes a part of a batch.
        alone = _step_seconds(make, data, BATCH // PROCESSES if divides else BATCH)
        together = _step_seconds(make, data, BATCH, trainer) * (1 if divides else PROCESSES)
        points.append((size, max(0.0, together - alone * (1 + share))))
    (small, first), (large, second) = points
    per_byte = max(0.0, (second - first) / (large - small))
    return Exchange(max(0.0, first - per_byte * small), per_byte, share)


def _step_seconds(
    make: Callable[[], Any], data: Any, batch_size: int, trainer: str = "plain"
) -> float:
    import torch

    count = len(data[0]) - BATCH
    seconds = _epoch_seconds(
        make,
        lambda model: torch.optim.Adam(model.parameters()),
        torch.nn.CrossEntropyLoss(),
        data,
        np.arange(count, len(data[0])),
        batch_size,
        trainer,
    )
    return seconds * batch_size / count


def _epoch_seconds(
    make: Callable[[], Any],
    opt_fn: Callable[[Any], Any],
    criterion: Any,
    data: Any,
    valid: Any,
    batch_size: int,
    trainer: str,
    threads: int = 1,
) -> float:
    """Return the seconds of the fastest epoch."""
    with tempfile.TemporaryDirectory() as folder:
        several: dict[str, Any] = {"trainer": trainer, "processes": PROCESSES}
        fitted = fit(
            make,
            data,
            opt_fn,
            criterion,
            Path(folder),
            batch_size,
            valid=valid,
            epochs=EPOCHS,
            verbose=0,
            report=False,
            devices="cpu",
            threads_per_job=threads,
            **({} if trainer == "plain" else several),
        )
    return min(epoch.seconds for epoch in fitted.epochs)


def trials(
    make: Callable[[], Any],
    opt_fn: Callable[[Any], Any],
    criterion: Any,
    data: Any,
    count: int,
    batch_size: int,
) -> Iterator[Trial]:
    """Time a model by the plain trainer, by more threads, and by each trainer of two processes.

    `count` is the number of samples of `data`; a tenth of them is scored.
    """
    valid = np.arange(count - max(1, count // 10), count)
    trained, alone = count - len(valid), 0.0
    ways = [("plain", 1, 1), ("plain", 1, PROCESSES), *((name, PROCESSES, 1) for name in SEVERAL)]
    for trainer, processes, threads in ways:
        seconds = _epoch_seconds(make, opt_fn, criterion, data, valid, batch_size, trainer, threads)
        alone = alone or seconds
        yield Trial(trainer, processes, threads, trained / seconds, alone / seconds)
