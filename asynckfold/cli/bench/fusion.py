"""The gain of fusion: steps of R plain jobs, one after another, against steps of their group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import nn

from asynckfold.cli.bench.loops import (
    FOLDS,
    Case,
    adam,
    as_in_worker,
    scratch_folder,
    small_vgg,
    thread_seconds,
    turns_for,
)
from asynckfold.cli.bench.table import BenchTable
from asynckfold.data.prepare import prepare
from asynckfold.jobs.folds import make_folds
from asynckfold.jobs.messages import Task
from asynckfold.jobs.plan import Plan, folds_fingerprint, make_jobs
from asynckfold.jobs.recipe import Recipe
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.models import MLP, LeNet, LeNet5
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.flops import FlopCounter
from asynckfold.training.fusion import trainer
from asynckfold.training.fusion.group import FusionGroup
from asynckfold.training.job_log import JobLog
from asynckfold.training.loop import Trainable
from asynckfold.training.training_run import Training

SAMPLES = 2000

CPU = torch.device("cpu")


CASES = (
    Case("MLP 64-128-10", partial(MLP, 64), (64,)),
    Case("MLP 784-128-10", MLP, (784,)),
    Case("MLP 784-128-10, batch 128", MLP, (784,), 128),
    Case("LeNet5", LeNet5, (1, 32, 32)),
    Case("LeNet5, batch 128", LeNet5, (1, 32, 32), 128),
    Case("LeNet CIFAR", LeNet),
    Case("VGG11, quarter width", small_vgg),
)

WIDTHS = (5, 10)
QUICK = {"seconds": 1.0}


def table(
    cases: Sequence[Case] = CASES, widths: Sequence[int] = WIDTHS, seconds: float = 6.0
) -> BenchTable:
    """Time steps of R plain jobs against one step of their group, `seconds` per row.

    ``widths`` are multiples of the number of folds.
    """
    with as_in_worker(1):
        rows = tuple(_row(case, width, seconds) for case in cases for width in widths)
    return BenchTable(
        "What fusing brings",
        "model | MFLOP a step | jobs | plain ms | fused ms | plain / fused | turns",
        rows,
        (
            "1 thread, float32, Adam, batches of 32 unless noted; medians of the thread's own time "
            "of one step of one job, its batch included.",
            "In each turn the plain jobs take one step each, one after another, then their group "
            "takes one.",
        ),
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
        turns = turns_for(seconds, lambda _: (_step(plain), _step([group])))
    one, other = (median(column) / width * 1e3 for column in zip(*turns, strict=True))
    return case.name, counter.flops / 1e6, width, one, other, one / other, len(turns)


def _step(courses: Sequence[Trainable]) -> float:
    for course in courses:
        if course.batch == 0:
            course.begin_epoch()
    seconds = thread_seconds(lambda: _step_all(courses))
    for course in courses:
        if course.batch == course.batches:
            _rewind(course)
    return seconds


def _step_all(courses: Sequence[Trainable]) -> None:
    for course in courses:
        course.step()


def _rewind(course: Trainable) -> None:
    """Restart the epoch: the end of an epoch is not timed."""
    course.batch = 0
    if isinstance(course, FusionGroup):
        for replica in course.replicas:
            replica.stand_at(0, 0)
    elif isinstance(course, Training):
        course.losses = []


@contextmanager
def _bundle(case: Case, schedules: int) -> Iterator[Bundle]:
    """Yield random samples, and a plan with one group of all jobs."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(SAMPLES, *case.shape)).astype(np.float32)
    targets = random.integers(10, size=SAMPLES)
    names = {f"constant {number}": "constant" for number in range(schedules)}
    recipe = Recipe({"model": case.model}, names, adam, nn.CrossEntropyLoss())
    folds = make_folds(SAMPLES, targets, FOLDS)
    jobs = make_jobs(["model"], list(names), folds, 0)
    with (
        scratch_folder() as folder,
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
        yield Bundle(plan, folds, recipe, data.handle(), folder)
