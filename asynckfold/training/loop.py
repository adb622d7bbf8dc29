"""The plain trainer: one job, from its seed or its last checkpoint to its result.

::

    train ── seed, build ── restore? ──┐
                                       ▼  run
              ┌─ epoch: seeded order ─ batches: gather, step ─ (stop? time out? checkpoint, leave)
              │                        evaluate the held-out fold
              └─ LR schedule ─ checkpoint ◄─┘                        ── result

A job's result depends on its plan alone: every random choice comes from (seed, epoch) or (seed,
epoch, sample), and a checkpoint in the middle of an epoch holds the state of the generators.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from asynckfold.data.batches import Batches
from asynckfold.jobs.messages import Note, Task
from asynckfold.jobs.result import DIVERGED, DONE, FAILED, Result
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import checkpoint, setup, step_graph
from asynckfold.training.bundle import Bundle
from asynckfold.training.evaluation import Divergence
from asynckfold.training.job_log import JobLog
from asynckfold.training.training_run import Report, Training

if TYPE_CHECKING:
    from asynckfold.training.fusion.group import FusionGroup

_POSITION, _SECONDS = "__asynckfold_place__", "__asynckfold_seconds__"
"""Attributes set on an exception: position and training time of the job when it was raised."""


def train(
    bundle: Bundle,
    task: Task,
    data: Batches,
    device: torch.device,
    report: Report,
    stop: Callable[[], bool],
    heartbeat: Heartbeat | None = None,
) -> Result | None:
    """Train one job and score its held-out fold; None if `stop` asked to leave.

    `stop` is called after every batch; time spent in it is a pause. A job that exceeds its time
    limit is saved and fails.
    """
    heartbeat = heartbeat or Heartbeat()
    heartbeat.begin_long_phase()
    with JobLog(bundle.root, task.job) as log:
        training = setup.build(bundle, task, data, device, log, heartbeat)
        step_graph.prepare(training)
        return train_to_end(training, report, stop)


def train_to_end(training: Training, report: Report, stop: Callable[[], bool]) -> Result | None:
    """Train from the newest intact checkpoint to the result; None if `stop` asked to leave."""
    if training.callbacks is not None:
        training.callbacks.start()
    setup.restore(training, report)
    if training.pretrained:
        report(Note(training.task.job.id, "pretrained", training.pretrained))
        training.save(report)
    try:
        if not run(training, training.params, report, stop):
            return timed_out(training) if training.stopwatch.expired else None
        return result_of(training)
    except Divergence as error:
        return diverged(training, error)


def note_position(error: BaseException, training: Training | FusionGroup) -> None:
    """Attach position and training time to an exception."""
    batch, batches = training.batch, training.batches
    where = "end of the epoch" if batch == batches else f"batch {batch + 1} of {batches}"
    position = f"epoch {training.epoch + 1}, {where}"
    # A user's exception may refuse attributes.
    with contextlib.suppress(Exception):
        setattr(error, _POSITION, "after the last epoch" if training.ended else position)
        setattr(error, _SECONDS, training.stopwatch.seconds)


def position_of(error: BaseException) -> str:
    """Return the epoch and batch in which an exception was raised; "" before the training."""
    return str(getattr(error, _POSITION, ""))


def seconds_of(error: BaseException, otherwise: float) -> float:
    """Return the training time when an exception was raised; `otherwise` before the training."""
    return float(getattr(error, _SECONDS, otherwise))


def run(
    training: Training | FusionGroup,
    params: TrainerParams,
    report: Report,
    stop: Callable[[], bool],
) -> bool:
    """Train to the end; return False if `stop` asked to leave or the time limit was reached.

    Exceptions get position and training time attached, see `position_of`.
    """
    saver, stopwatch = checkpoint.Saver(lambda: training.save(report)), training.stopwatch

    def leaves() -> bool:
        return stopwatch.call_uncounted(stop) or stopwatch.expired

    try:
        while not training.ended:
            started = time.perf_counter()
            training.begin_epoch()
            while training.batch < training.batches:
                training.step()
                training.heartbeat.beat()
                training.report_progress(report)
                unfinished = training.batch < training.batches
                if leaves() and unfinished:
                    saver.save()
                    return False
                if unfinished and saver.due(checkpoint.MIDDLE_SECONDS):
                    saver.save()
            training.end_epoch(started, report)
            if not training.ended and leaves():
                saver.save()
                return False
            due = training.epoch % params.save_checkpoint_frequency == 0
            if training.ended or (due and saver.due(checkpoint.EPOCH_SECONDS)):
                saver.save()
    except BaseException as error:
        note_position(error, training)
        raise
    return True


def result_of(training: Training) -> Result:
    """Return the result of a finished training."""
    step = training.user_validation
    return replace(
        _ended(training, DONE),
        outputs=training.outputs,
        weights=checkpoint.weights_digest(training.model.state_dict()),
        score_seconds=training.score_seconds,
        scores={**training.scores, **({} if step is None else step.measures)},
    )


def with_gpu_memory(answer: Any, device: torch.device) -> Any:
    """Return a result with the peak of this process's memory on a GPU; anything else unchanged."""
    if device.type != "cuda" or not isinstance(answer, Result):
        return answer
    # With the allocator's cache, which other processes cannot use.
    return replace(answer, peak_gpu_memory=torch.cuda.max_memory_reserved(device))


def diverged(training: Training, error: Divergence) -> Result:
    """Return the result of a training that diverged."""
    training.log.write(f"diverged: {error}\n")
    return replace(_ended(training, DIVERGED), error=str(error))


def _ended(training: Training, status: str) -> Result:
    return Result(
        training.task.job.id,
        training.task.attempt,
        status,
        epochs=tuple(training.epochs),
        fit_seconds=training.stopwatch.seconds,
        pretraining=training.pretraining,
        averaged=training.averaged(),
    )


def timed_out(training: Training) -> Result:
    """Return the failure of a training that reached its time limit and saved itself."""
    stopwatch, epochs = training.stopwatch, training.params.epochs
    text = (
        f"timed out: trained {stopwatch.seconds:.2f} s, at epoch {training.epoch + 1} of {epochs}, "
        f"batch {training.batch} of {training.batches}; job_timeout_s is {stopwatch.limit_s:g}. "
        "Pass more to continue it"
    )
    training.log.write(f"{text}\n")
    job, attempt = training.task.job, training.task.attempt
    return Result(job.id, attempt, FAILED, fit_seconds=stopwatch.seconds, error=text)
