"""Runs that nobody trained: made up by seed, written through the store's own write API.

The numbers hang together (accuracy is counted from the outputs, losses fall, jobs are packed onto
cores without overlap), so that what reads a run can be tested without torch and without waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold import Baseline, Epoch, Fold, Job, Plan, Result, RunStore, TrainerParams
from tests.outcomes import divided, plan_of

DIGITS = tuple("0123456789")
DONE, FAILED, PENDING = "done", "failed", "pending"
TRACEBACK = 'Traceback (most recent call last):\n  File "model.py", line 7, in forward\n'


def all_done(job: Job) -> str:
    """Every job succeeds."""
    return DONE


@dataclass(frozen=True)
class Synthetic:
    """What the run looks like.

    Parameters
    ----------
    status : callable
        Job → ``"done"``, ``"failed"``, ``"diverged"``, ``"cancelled"`` or ``"pending"``.
    classes : tuple of str
        Empty for regression.
    baseline : {"measured", "estimated", None}
        Which serial baseline is recorded.
    error, traceback : str
        What failed jobs say.
    retried : tuple of str
        Ids of jobs whose first attempt died.
    score : float, callable, or None
        Overrides every score, to make NaN or ties; or Job → score.
    others : float
        Cores that other programs used while the baseline was timed.
    processes : int
        Of a job.
    averaged : AveragingSummary or None
        What averaging did, by which jobs of several processes were trained; None for another
        trainer.
    software : Mapping
        With what the session trained.
    objective : Objective or None
        What targets and outputs mean.
    """

    models: Sequence[str] = ("LeNet5", "MLP")
    lr_schedules: Sequence[str] = ("cosine", "warm")
    folds: int | Sequence[tuple[Any, Any]] = 5
    n_repeats: int = 1
    samples: int = 300
    classes: tuple[str, ...] = DIGITS
    epochs: int = 5
    cores: int = 2
    status: Callable[[Job], str] = all_done
    baseline: str | None = "measured"
    others: float = 0.0
    processes: int = 1
    averaged: Any = None
    software: Mapping[str, str] = field(default_factory=lambda: {"torch": "2.6.0"})
    cpu_samples: bool = True
    objective: Any = None
    metrics: tuple[str, ...] = ("accuracy",)
    error: str = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x64 and 100x10)"
    traceback: str = TRACEBACK
    events: tuple[tuple[str, str], ...] = (("load", "one core is used by others; one job runs"),)
    retried: tuple[str, ...] = ()
    score: float | Callable[[Job], float] | None = None
    about: Mapping[str, Any] = field(
        default_factory=lambda: {
            "command": ["asynckfold", "run", "--data", "digits", "--root", "runs/x y"],
            "versions": {"python": "3.11.7", "torch": "2.6.0"},
            "machine": {"cores": 2, "memory_gib": 7.6},
        }
    )


class FakeClockStore(RunStore):
    """A store whose run seconds are set by hand, and that does not wait for the disk."""

    clock = 0.0

    def now(self) -> float:
        return self.clock


def write_run(root: Path, run: Synthetic | None = None) -> Path:
    """Write the run into `root` and return it."""
    run = run or Synthetic()
    targets, folds = _data(run)
    plan = _plan(run, folds)
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        store.file.connection.execute("PRAGMA synchronous=OFF")
        store.begin(plan, folds, targets, run.about)
        store.set_software(run.software)
        _write_jobs(store, run, plan, folds, targets)
    return root


def _data(run: Synthetic) -> tuple[npt.NDArray[Any], tuple[Fold, ...]]:
    rng = np.random.default_rng(0)
    targets: npt.NDArray[Any] = np.arange(run.samples) % max(1, len(run.classes))
    if not run.classes:
        targets = rng.normal(size=(run.samples, 1))
    if isinstance(run.folds, int):
        return targets, divided(run.samples, run.folds, run.n_repeats)
    return targets, tuple(
        Fold(0, index, np.array(train), np.array(valid))
        for index, (train, valid) in enumerate(run.folds)
    )


def _plan(run: Synthetic, folds: Sequence[Fold]) -> Plan:
    trainer = "averaging" if run.averaged else "plain" if run.processes == 1 else "hogwild"
    return plan_of(
        [*itertools.product(run.models, run.lr_schedules)],
        folds,
        params=TrainerParams(epochs=run.epochs, trainer=trainer, processes=run.processes),
        batch_size=32,
        scoring=run.metrics,
        dataset="d" * 64,
        classes=run.classes,
        objective=run.objective,
        recipe={"optimizer": "Adam(lr=0.001)", "models": {name: name for name in run.models}},
    )


def _write_jobs(
    store: FakeClockStore,
    run: Synthetic,
    plan: Plan,
    folds: Sequence[Fold],
    targets: npt.NDArray[Any],
) -> None:
    by_key = {fold.key: fold for fold in folds}
    moments, makespan = _pack(run, plan)
    store.packing(0.0)
    for at, _, act, job, core in sorted(moments, key=lambda moment: (moment[0], moment[1])):
        store.clock = at
        if act == "start":
            _start(store, run, job, core)
        else:
            _end(store, run, job, core, targets, by_key[(job.repeat, job.fold)])
    store.clock = makespan
    for kind, text in run.events:
        store.event(kind, text, plan.jobs[0].id)
    store.packing(None)
    _write_use(store, run, plan, makespan)
    _write_baseline(store, run, plan, makespan)


def _pack(run: Synthetic, plan: Plan) -> tuple[list[tuple[float, int, str, Job, int]], float]:
    free = [1.5] * run.cores
    moments = []
    for job in plan.jobs:
        if run.status(job) == PENDING:
            continue
        core = int(np.argmin(free))
        start, end = free[core], free[core] + _seconds(job)
        moments += [(start, 1, "start", job, core), (end, 0, "end", job, core)]
        free[core] = end + 0.02
    return moments, max(free) + 0.3


def _seconds(job: Job) -> float:
    return 2.0 + sum(job.model.encode("utf-8", "replace")) % 5 + 0.2 * (job.seed % 5)


def _start(store: FakeClockStore, run: Synthetic, job: Job, core: int) -> None:
    attempt = store.start_attempt(job.id, (core,), 1, "cpu", 2.0)
    if job.id in run.retried:
        store.clock += 0.5
        store.end_attempt(job.id, attempt, "died", pid=9, error="worker process 9 died: SIGKILL")
        store.start_attempt(job.id, (core,), 1, "cpu", 2.0)


def _end(
    store: FakeClockStore,
    run: Synthetic,
    job: Job,
    core: int,
    targets: npt.NDArray[Any],
    fold: Fold,
) -> None:
    status = run.status(job)
    good = status == DONE
    outputs = _outputs(run, job, targets[fold.valid]) if good else None
    scores = _scores(run, job, outputs, targets[fold.valid]) if outputs is not None else {}
    attempt = 2 if job.id in run.retried else 1
    accepted = store.record(
        Result(
            job.id,
            attempt,
            status,
            scores,
            _epochs(run, scores, job) if good else (),
            outputs,
            "w" * 64 if good else "",
            _seconds(job) - 0.1,
            0.1,
            200 << 20,
            4000 + core,
            (core,),
            started=store.now() - _seconds(job),
            ended=store.now(),
            error="" if good else run.error,
            traceback=run.traceback + run.error if status == FAILED else "",
            averaged=run.averaged if good else None,
        )
    )
    assert accepted


def _rng(job: Job) -> np.random.Generator:
    return np.random.default_rng([*job.candidate.encode("utf-8", "replace"), job.repeat, job.fold])


def _outputs(run: Synthetic, job: Job, truth: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    rng = _rng(job)
    skill = 2.6 + sum(job.candidate.encode("utf-8", "replace")) % 17 / 8
    if not run.classes:
        return (truth + rng.normal(scale=1 / skill, size=truth.shape)).astype(np.float32)
    outputs = rng.normal(size=(len(truth), len(run.classes)))
    outputs[np.arange(len(truth)), truth] += skill
    if len(run.classes) > 8:
        outputs[truth == 8, 3] += skill - 0.8
    return outputs.astype(np.float32)


def _scores(
    run: Synthetic, job: Job, outputs: npt.NDArray[np.float32], truth: npt.NDArray[Any]
) -> dict[str, float]:
    if run.classes:
        value = float((outputs.argmax(axis=1) == truth).mean())
    else:
        value = 1 - float(((outputs - truth) ** 2).mean() / truth.var())
    given = run.score(job) if callable(run.score) else run.score
    return dict.fromkeys(run.metrics, value if given is None else given)


def _epochs(run: Synthetic, scores: Mapping[str, float], job: Job) -> tuple[Epoch, ...]:
    rng = _rng(job)
    last = next(iter(scores.values()))
    rows = []
    for number in range(1, run.epochs + 1):
        left = float(np.exp(-1.2 * number)) + 0.02 * float(rng.random())
        accuracy = last - 0.8 * left * (number < run.epochs) if run.classes else None
        rows.append(Epoch(number, 2.3 * left, 2.3 * left + 0.1 * (1 - last), accuracy, 1e-3, 0.5))
    return tuple(rows)


def _write_use(store: FakeClockStore, run: Synthetic, plan: Plan, makespan: float) -> None:
    if not run.cpu_samples:
        return
    rng = np.random.default_rng(1)
    serial = sum(_seconds(job) for job in plan.jobs)
    phases = [("packed", 0.0, makespan, 0.95)]
    if run.baseline == "measured":
        phases.append(("serial", makespan, makespan + serial, 0.6))
    for phase, start, end, busy in phases:
        for at in np.arange(start, end, 0.5):
            store.clock = float(at)
            level = busy if at > start + 1.4 else 0.1
            cores = np.clip(rng.normal(level, 0.05, run.cores), 0, 1)
            store.sample(phase, float(cores.sum()), float(cores.sum() * 0.95), cores.tolist())


def _write_baseline(store: FakeClockStore, run: Synthetic, plan: Plan, makespan: float) -> None:
    if run.baseline is None:
        return
    seconds: dict[str, float] = {}
    for job in plan.jobs:
        seconds[job.candidate] = seconds.get(job.candidate, 0.0) + _seconds(job)
    accuracy = dict.fromkeys(seconds, 0.91) if run.baseline == "measured" else {}
    total = sum(seconds.values())
    by_job = {job.id: 0.91 for job in plan.jobs} if accuracy else {}
    known = plan.jobs if run.baseline == "measured" else ()
    ends = [(0.9 * number, 0.05 + float(np.exp(-number))) for number in range(1, run.epochs + 1)]
    store.set_baseline(
        Baseline(
            run.baseline,
            total,
            2,
            seconds,
            accuracy,
            run.others,
            by_job,
            {job.id: ends for job in known},
            {job.id: [(9, 10)] * len(run.classes) for job in known},
            {job.id: _seconds(job) for job in plan.jobs},
            cores=run.cores,
        )
    )
