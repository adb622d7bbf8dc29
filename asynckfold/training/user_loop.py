"""The user's loop, `fit_fn`: it trains one job, and gets its folds and generators from here.

::

    train ── build ── restore ── fit_fn(context) ── score the held-out fold ── checkpoint ── result
                                    │
                                    ├─ train_loader  a pass is an epoch: seeded, ordered, beats
                                    ├─ report        an epoch in the table
                                    └─ save, load    a checkpoint of what the user keeps
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.jobs.messages import Note, Progress, Task
from asynckfold.jobs.result import Epoch, Result
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import loop, seeding, setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.evaluation import Divergence, accumulate_scores, check_held_out, evaluate
from asynckfold.training.job_log import JobLog
from asynckfold.training.losses import as_given
from asynckfold.training.optimizers import optimizers_of, schedules_of
from asynckfold.training.training_run import EVENT_SECONDS, Report, Training
from asynckfold.training.user_steps import TAKEN, Refusal, column_of

MEASURED = frozenset({"train_loss", "valid_loss", "accuracy"})
"""Reported numbers that have a column in the table of epochs."""

_NOT_REPORTED = TAKEN - MEASURED - {"loss"}


class StopSignal(BaseException):
    """Raised by the loader in a `fit_fn` whose job is to leave; let it pass."""


class Loader:
    """Batches (inputs, targets) of one fold, on the device of the job."""

    def __init__(self, length: int, batches: Callable[[], Iterator[Any]]) -> None:
        self._length, self._batches = length, batches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


@dataclass(frozen=True, eq=False)
class Context:
    """What a `fit_fn` gets.

    Parameters
    ----------
    model : torch.nn.Module
        To be trained; its `forward` is scored on the held-out fold at the end.
    train_loader, valid_loader : Loader
        The training fold, where each pass is the next epoch, with the order and the seeds of the
        built-in loop; and the held-out fold.
    optimizer, lr_schedule : object, or tuple of these
        As ``opt_fn`` and the schedule made them; both are stepped by the loop.
    criterion : callable
        The job's copy of the criterion.
    device : torch.device
        Where model and batches are.
    seed : int
        Seed of the job. The global generators are seeded, too.
    epochs, epoch_start : int
        How many epochs to train, and how many of them a loaded checkpoint has finished.
    report : callable
        ``report(**metrics)`` records numbers as an epoch of the table.
    save, load : callable
        ``save(state)`` writes a checkpoint of nested dicts and lists of tensors and numbers, which
        ``load()`` returns after an interruption; None at the first start. The first pass of the
        loader then continues behind the last batch before ``save``.
    """

    model: nn.Module
    train_loader: Loader
    valid_loader: Loader
    optimizer: Any
    lr_schedule: Any
    criterion: Callable[..., Any]
    device: torch.device
    seed: int
    epochs: int
    epoch_start: int
    report: Callable[..., None]
    save: Callable[[Mapping[str, Any]], None]
    load: Callable[[], Any]


def alone(parts: tuple[Any, ...]) -> Any:
    """Return the only part, or all."""
    return parts if len(parts) > 1 else parts[0]


def reported(metrics: Mapping[str, Any], number: int, lr: float) -> Epoch:
    """Return what was reported as an epoch.

    Raises
    ------
    Refusal
        A name or a value is not allowed.
    """
    if not metrics:
        raise Refusal("report() needs a metric", "none", "Write for instance report(loss=0.1).")
    what = "a reported metric"
    values = {
        name: float(column_of(what, name, value, _NOT_REPORTED)) for name, value in metrics.items()
    }
    logged = {name: value for name, value in values.items() if name not in MEASURED}
    train_loss, valid_loss = (values.get(name, math.nan) for name in ("train_loss", "valid_loss"))
    return Epoch(number, train_loss, valid_loss, values.get("accuracy"), lr, 0.0, logged)


@dataclass(eq=False)
class UserLoop(Training):
    """A job that the user's loop trains.

    Parameters
    ----------
    report_event, stop : callable
        As in `loop.train`.
    saved : dict or None
        The user's state in the checkpoint from which the job continues.
    loaded, begun, done : bool
        Whether the user asked for it, whether a batch was taken in this attempt, and whether the
        loop has ended.
    at : tuple of int
        Epoch and batch that were begun last, from 0, for errors.
    """

    report_event: Report = print
    stop: Callable[[], bool] = bool
    saved: dict[str, Any] | None = None
    loaded: bool = False
    begun: bool = False
    done: bool = False
    at: tuple[int, int] = (0, 0)
    epoch_began: float = field(default_factory=time.perf_counter)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to train."""
        return self.done

    def context(self) -> Context:
        """Return what the user's function gets."""
        size = self.params.eval_batch_size
        return Context(
            self.model,
            Loader(self.batches, self._train_batches),
            Loader(
                -(-len(self.valid) // size), lambda: (batch for batch, _ in self.held_out_batches())
            ),
            alone(optimizers_of(self.optimizer)),
            alone(schedules_of(self.lr_schedule)),
            as_given(self.criterion),
            self.device,
            self.task.job.seed,
            self.params.epochs,
            self.epoch,
            self._report,
            self._save,
            self._load,
        )

    def _train_batches(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or what is left of it."""
        if self.saved is not None and not self.loaded:
            raise Refusal(
                "a fit_fn that saves must load",
                "a checkpoint, and no call of context.load()",
                "Call context.load() first, and continue from what it returns.",
            )
        self.begin_epoch()
        try:
            while self.batch < self.batches:
                self._pause()
                inputs, targets = self.samples_of(self.batch)
                self.at = self.epoch, self.batch
                self.batch += 1
                yield inputs, self.data.asked_of(targets)
        except GeneratorExit:
            # By break, or by an exception in the loop's body.
            self._end_pass()
            raise
        self.at = self.epoch, self.batches
        self._end_pass()

    def _end_pass(self) -> None:
        self.epoch, self.batch = self.epoch + 1, 0
        # What follows a pass, such as an evaluation, may take longer than a batch.
        self.heartbeat.begin_long_phase()

    def _pause(self) -> None:
        """Between two batches: beat, report the position, and leave if that was asked for."""
        first, self.begun = not self.begun, True
        self.heartbeat.beat()
        now = time.monotonic()
        if now - self.reported_at >= EVENT_SECONDS:
            self.reported_at, job = now, self.task.job.id
            place = self.epoch + 1, self.params.epochs, self.batch, self.batches
            self.report_event(Progress(job, self.task.attempt, *place, math.nan))
        if (self.stopwatch.call_uncounted(self.stop) or self.stopwatch.expired) and not first:
            raise StopSignal

    def _report(self, **metrics: Any) -> None:
        item = reported(metrics, len(self.epochs) + 1, self._rate())
        for name in ("train_loss", "valid_loss"):
            if name in metrics and not math.isfinite(getattr(item, name)):
                value, number = getattr(item, name), item.number
                raise Divergence(f"the reported {name} became {value} in epoch {number}")
        measured = {name: getattr(item, name) for name in MEASURED & metrics.keys()}
        self.scores = {**measured, **item.logged}
        self._record(item)

    def _rate(self) -> float:
        return self.lr or float(self.optimizer.param_groups[0]["lr"])

    def _record(self, item: Epoch) -> None:
        now = time.perf_counter()
        item, self.epoch_began = replace(item, seconds=now - self.epoch_began), now
        self.tell_epoch(item, self.report_event)

    def _save(self, state: Mapping[str, Any]) -> None:
        self.saved, self.loaded = dict(state), True
        self.save(self.report_event)

    def _load(self) -> dict[str, Any] | None:
        self.loaded = True
        if self.random is not None:
            seeding.restore(self.random)
            self.random = None
        return self.saved

    def finish(self) -> None:
        """Score the held-out fold by the model as it is, and keep it.

        Raises
        ------
        Diverged
            An output is NaN, or the loss of the held-out fold is not finite.
        """
        self.heartbeat.begin_long_phase()
        began = time.perf_counter()
        held_out = evaluate(self, self.valid)
        self.outputs = held_out.outputs
        self.scores = accumulate_scores(self) | self.scores
        self.score_seconds = time.perf_counter() - began
        # Where the loop reports, the criterion need not fit the outputs.
        check_held_out(self, held_out, 0.0 if self.epochs else held_out.loss, "")
        if not self.epochs:
            self._record(Epoch(1, math.nan, held_out.loss, held_out.accuracy, self._rate(), 0.0))
        # Behind a checkpoint of the user's at the same position.
        self.done, self.batch = True, self.batch + 1
        self.save(self.report_event)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the user's state, or the end of the job."""
        return super().state_dict() if self.done else {**self.position(), "user": self.saved}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        if "user" in tree:
            self.load_position(tree)
            self.saved = tree["user"]
        else:
            super().load_state_dict(tree)
            self.done = True


def train(
    bundle: Bundle,
    task: Task,
    data: Batches,
    device: torch.device,
    report: Report,
    stop: Callable[[], bool],
    heartbeat: Heartbeat | None = None,
) -> Result | None:
    """Train one job by the user's `fit_fn`, as `loop.train` does by the built-in loop."""
    heartbeat = heartbeat or Heartbeat()
    heartbeat.begin_long_phase()
    with JobLog(bundle.root, task.job) as log:
        built = setup.build(bundle, task, data, device, log, heartbeat)
        training = UserLoop(**vars(built), report_event=report, stop=stop)
        # What the function draws before it loads must not depend on what `build` drew.
        seeding.seed_all(training.task.job.seed)
        setup.restore(training, report)
        if training.pretrained:
            report(Note(task.job.id, "pretrained", training.pretrained))
        try:
            if not training.done:
                # A callable object of the user's may keep a state, which no other job must see.
                fit_fn: Callable[[Context], Any] = copy.deepcopy(bundle.recipe.fit_fn)  # type: ignore[assignment]
                fit_fn(training.context())
                training.finish()
            return loop.result_of(training)
        except StopSignal:
            return loop.timed_out(training) if training.stopwatch.expired else None
        except Divergence as error:
            return loop.diverged(training, error)
        except BaseException as error:
            training.epoch, training.batch = training.at
            loop.note_position(error, training)
            raise
