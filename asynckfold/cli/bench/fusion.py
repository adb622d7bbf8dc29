"""What fusing brings: R jobs step after step, plain one after another against as one group."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import nn, optim

from asynckfold.cli.bench.table import BenchTable, machine_facts
from asynckfold.data.prepare import prepare
from asynckfold.jobs.folds import make_folds
from asynckfold.jobs.messages import Task
from asynckfold.jobs.plan import Plan, folds_fingerprint, make_jobs
from asynckfold.jobs.recipe import Recipe
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.models import MLP, VGG, LeNet, LeNet5
from asynckfold.system import process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import seeding, setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.flops import FlopCounter
from asynckfold.training.fusion import trainer
from asynckfold.training.job_log import JobLog
from asynckfold.training.loop import Trainable
from asynckfold.training.training_run import Training

FOLDS, SAMPLES = 5, 2000

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A model, the shape of its samples, and how many of them a step takes."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int = 32


CASES = (
    Case("MLP 64-128-10", partial(MLP, 64), (64,)),
    Case("MLP 784-128-10", MLP, (784,)),
    Case("MLP 784-128-10, batch 128", MLP, (784,), 128),
    Case("LeNet5", LeNet5, (1, 32, 32)),
    Case("LeNet5, batch 128", LeNet5, (1, 32, 32), 128),
    Case("LeNet CIFAR", LeNet, (3, 32, 32)),
    Case("VGG11, quarter width", partial(VGG, width=0.25), (3, 32, 32)),
)

WIDTHS = (5, 10)


def fusion_table(
    cases: Sequence[Case] = CASES, widths: Sequence[int] = WIDTHS, seconds: float = 6.0
) -> BenchTable:
    """Time steps of R plain jobs one after another against one step of their group, in turns.

    Parameters
    ----------
    cases : sequence of Case
        What to train, with Adam, on random samples.
    widths : sequence of int
        Numbers of jobs, multiples of the number of folds.
    seconds : float
        How long each row is timed.
    """
    # As in a worker.
    process.keep_freed_memory()
    with seeding.preserved():
        torch.set_num_threads(1)
        rows = tuple(_row(case, width, seconds) for case in cases for width in widths)
    return BenchTable(
        "What fusing brings",
        ("model", "MFLOP a step", "jobs", "plain ms", "fused ms", "plain / fused", "turns"),
        rows,
        (
            "1 thread, float32, Adam, batches of 32 unless said; medians of the thread's own time "
            "for one step of one job, its batch included.",
            "In each turn the plain jobs take one step each, one after another, then their group "
            "takes one.",
        ),
        machine_facts(),
    )


def _row(case: Case, width: int, seconds: float) -> tuple[object, ...]:
    with _bundle(case, width // FOLDS) as bundle, ExitStack() as logs:
        handle = bundle.data
        data = handle.open(handle.fds)
        tasks = [Task(job) for job in bundle.plan.jobs]
        plain: list[Trainable] = [
            setup.build(
                bundle,
                task,
                data,
                CPU,
                logs.enter_context(JobLog(bundle.root, task.job)),
                Heartbeat(),
            )
            for task in tasks
        ]
        group = trainer.build(bundle, tasks, data, CPU, Heartbeat(), logs)
        with FlopCounter() as counter:
            _step(plain[:1])
        times: list[tuple[float, float]] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(times) < 4:
            times.append((_step(plain), _step([group])))
    # The first turns warm up.
    turns = times[max(1, len(times) // 10) :]
    one, other = (median(column) / width * 1e3 for column in zip(*turns, strict=True))
    return case.name, counter.flops / 1e6, width, one, other, one / other, len(turns)


def _step(courses: Sequence[Trainable]) -> float:
    for course in courses:
        if course.batch == 0:
            course.begin_epoch()
    # Seconds of this thread: a busy machine does not count.
    started = time.thread_time()
    for course in courses:
        course.step()
    seconds = time.thread_time() - started
    for course in courses:
        if course.batch == course.batches:
            _rewind(course)
    return seconds


def _rewind(course: Trainable) -> None:
    """Begin the epoch anew: what is between two epochs is not timed."""
    course.batch = 0
    if isinstance(course, trainer.Group):
        for row in course.rows:
            row.stand_at(0, 0)
    elif isinstance(course, Training):
        course.losses = []


@contextmanager
def _bundle(case: Case, schedules: int) -> Iterator[Bundle]:
    """Random samples in a folder that goes away again, one group of all jobs."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(SAMPLES, *case.shape)).astype(np.float32)
    targets = random.integers(10, size=SAMPLES)
    names = {f"constant {number}": "constant" for number in range(schedules)}
    recipe = Recipe(
        {"model": case.model},
        names,
        lambda model: optim.Adam(model.parameters(), 1e-3),
        nn.CrossEntropyLoss(),
    )
    folds = make_folds(SAMPLES, targets, FOLDS)
    jobs = make_jobs(["model"], list(names), folds, 0)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="asynckfold-bench-") as folder,
        closing(prepare((inputs, targets), criterion_wants_classes=True)) as data,
    ):
        plan = Plan(
            jobs,
            TrainerParams(epochs=1),
            case.batch_size,
            1,
            0,
            "cpu",
            ("accuracy",),
            data.fingerprint,
            folds_fingerprint(folds),
            data.classes,
            groups=(tuple(job.id for job in jobs),),
        )
        yield Bundle(plan, folds, recipe, data.handle(), Path(folder))
