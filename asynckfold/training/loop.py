"""The plain trainer: one job, from its seed or its last checkpoint to its result.

::

    train ── seed, build ── restore? ──┐
                                       ▼  run
              ┌─ epoch: seeded order ─ batches: gather, step ─ (stop? late? checkpoint, leave)
              │                        evaluate the held-out fold
              └─ LR schedule ─ checkpoint ◄─┘                        ── result

A job's result depends on its plan alone: every random choice comes from (seed, epoch) or (seed,
epoch, sample), and a checkpoint carries the generators of an epoch that was left in the middle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

from asynckfold.data.batches import Batches
from asynckfold.jobs.messages import Noted, Task
from asynckfold.jobs.result import DIVERGED, DONE, FAILED, Result
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import checkpoint, checkpointing, saving, setup
from asynckfold.training.bundle import Bundle, JobLog
from asynckfold.training.training_run import Course, Diverged, Report, Training

_PLACE, _SECONDS = "__asynckfold_place__", "__asynckfold_seconds__"
"""Attributes of an exception: where it was raised, and how long the job had trained by then."""


def train(
    bundle: Bundle,
    task: Task,
    data: Batches,
    device: torch.device,
    report: Report,
    stop: Callable[[], bool],
    heartbeat: Heartbeat | None = None,
) -> Result | None:
    """Train one job and score its held-out fold.

    Parameters
    ----------
    bundle : Bundle
        The sweep.
    task : Task
        The job, and where earlier attempts got to.
    data : Batches
        The samples, wherever they are.
    device : torch.device
        Where to train.
    report : callable
        Receives progress, epochs and checkpoints as they come.
    stop : callable
        Asked after every batch; when true, the training is saved and left. Seconds that pass in it
        are a pause.
    heartbeat : Heartbeat, optional
        Shows every finished batch to whoever watches.

    Returns
    -------
    Result or None
        None when it was asked to stop; a failure when it has trained for longer than it may, saved
        in the same way.
    """
    heartbeat = heartbeat or Heartbeat()
    heartbeat.begin_long_phase()
    with JobLog(bundle.root, task.job) as log:
        return trained(setup.build(bundle, task, data, device, log, heartbeat), report, stop)


def trained(training: Training, report: Report, stop: Callable[[], bool]) -> Result | None:
    """Train from the newest good checkpoint to the result; None when asked to stop before."""
    checkpointing.restore(training, report)
    if training.pretrained:
        report(Noted(training.task.job.id, "pretrained", training.pretrained))
        training.save(report)
    try:
        if not run(training, training.params, report, stop):
            return timed_out(training) if training.stopwatch.over else None
        return result_of(training)
    except Diverged as error:
        return diverged(training, error)


def note_place(error: BaseException, course: Course) -> None:
    """Let an exception know where a training was when it was raised, and for how long it ran."""
    batch, batches = course.batch, course.batches
    where = "end of the epoch" if batch == batches else f"batch {batch + 1} of {batches}"
    # The user may have defined an exception that takes no attributes.
    with contextlib.suppress(Exception):
        setattr(error, _PLACE, f"epoch {course.epoch + 1}, {where}")
        setattr(error, _SECONDS, course.stopwatch.seconds)


def place_of(error: BaseException) -> str:
    """Return in which epoch and batch of a training an exception was raised; "" before the first.

    Examples
    --------
    >>> place_of(ValueError())
    ''
    """
    return str(getattr(error, _PLACE, ""))


def seconds_of(error: BaseException, otherwise: float) -> float:
    """Return how long a job had trained when an exception was raised.

    Parameters
    ----------
    error : BaseException
        What ended it.
    otherwise : float
        Returned where it was raised before the training.

    Examples
    --------
    >>> seconds_of(ValueError(), 0.5)
    0.5
    """
    return float(getattr(error, _SECONDS, otherwise))


def run(course: Course, params: TrainerParams, report: Report, stop: Callable[[], bool]) -> bool:
    """Train to the end; return False when asked to stop before, or when its seconds are over.

    What is raised meanwhile knows from then on where: see `place_of`.
    """
    try:
        return _run(course, params, report, stop)
    except BaseException as error:
        note_place(error, course)
        raise


def _run(course: Course, params: TrainerParams, report: Report, stop: Callable[[], bool]) -> bool:
    saver, stopwatch = saving.Saver(lambda: course.save(report)), course.stopwatch

    def leaves() -> bool:
        return stopwatch.leaving_out(stop) or stopwatch.over

    while not course.ended:
        started = time.perf_counter()
        course.begin_epoch()
        while course.batch < course.batches:
            course.step()
            course.heartbeat.beat()
            course.tell(report)
            unfinished = course.batch < course.batches
            if leaves() and unfinished:
                saver.save()
                return False
            if unfinished and saver.due(saving.MIDDLE_SECONDS):
                saver.save()
        course.end_epoch(started, report)
        if not course.ended and leaves():
            saver.save()
            return False
        due = course.epoch % params.save_checkpoint_frequency == 0
        if course.ended or (due and saver.due(saving.EPOCH_SECONDS)):
            saver.save()
    return True


def result_of(training: Training) -> Result:
    """Return the result of a training that reached its end."""
    return Result(
        training.task.job.id,
        training.task.attempt,
        DONE,
        epochs=tuple(training.epochs),
        outputs=training.outputs,
        weights=checkpoint.weights_digest(training.model.state_dict()),
        fit_seconds=training.stopwatch.seconds,
        score_seconds=training.score_seconds,
        pretraining=training.pretraining,
        averaged=training.averaged(),
    )


def diverged(training: Training, error: Diverged) -> Result:
    """Return the result of a training that diverged."""
    training.log.write(f"diverged: {error}\n")
    return Result(
        training.task.job.id,
        training.task.attempt,
        DIVERGED,
        epochs=tuple(training.epochs),
        fit_seconds=training.stopwatch.seconds,
        error=str(error),
        pretraining=training.pretraining,
        averaged=training.averaged(),
    )


def timed_out(training: Training) -> Result:
    """Return the failure of a training that saved itself because its seconds are over."""
    stopwatch, epochs = training.stopwatch, training.params.epochs
    text = (
        f"timed out: trained {stopwatch.seconds:.2f} s, at epoch {training.epoch + 1} of {epochs}, "
        f"batch {training.batch} of {training.batches}; job_timeout_s is {stopwatch.limit_s:g}. "
        "Pass more to continue it"
    )
    training.log.write(f"{text}\n")
    job, attempt = training.task.job, training.task.attempt
    return Result(job.id, attempt, FAILED, fit_seconds=stopwatch.seconds, error=text)
