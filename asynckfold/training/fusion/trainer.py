"""The fused trainer: the jobs of a group as replicas of one module, each with its own numbers.

::

    group of the plan ─ build all rows ─ restore ─► run: one step of all rows, and one of each arm
       │                                                      │
       └ jobs with a result already go along as passengers    └─ each row evaluates, tells, saves

How many replicas compute together touches their bits, and so does the place of each. Therefore a
group is always trained whole, from one common position on: a job that has its result already, or
that diverged or raised, stays in its row, and what becomes of it is thrown away. No row's numbers
depend on what is in another, so that those of a job are a function of the plan alone, as in the
plain loop.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from asynckfold.data import Batches
from asynckfold.errors import StorageError, StoreCorruptError, WorkerDiedError
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import (
    CheckpointRef,
    JobEnded,
    Noted,
    RetryableFailure,
    RunEvent,
    Task,
)
from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Result
from asynckfold.system import process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import (
    batches as batching,
)
from asynckfold.training import (
    checkpoint,
    checkpointing,
    loop,
    lr_schedules,
    seeding,
    setup,
    training_run,
)
from asynckfold.training.bundle import Bundle, JobLog, NoLog
from asynckfold.training.fusion.backward import (
    Criterion,
    Part,
    backward,
    clip_gradients,
    fuse_criterion,
    parts_of,
)
from asynckfold.training.fusion.module import FusedModule, fuse
from asynckfold.training.fusion.optimizers import ReplicaOptimizer, fuse_optimizers
from asynckfold.training.preprocessing import fitted
from asynckfold.training.stopwatch import Stopwatch
from asynckfold.training.training_run import Report, Training

Tree = dict[str, Any]

Fail = Callable[[Task, BaseException], Result | RetryableFailure]
"""(job, what its code raised) → its result, or a retryable failure."""


def raised(task: Task, error: BaseException) -> Result | RetryableFailure:
    """Raise it, so that it ends all jobs of the group."""
    raise error


@dataclass(eq=False)
class Replica(Training):
    """A row of a group: a training whose optimizer and generator are parts of the group's."""

    row: int = 0
    arm: ReplicaOptimizer = field(kw_only=True)
    generator: torch.Generator = field(kw_only=True)
    loaded: dict[str, Any] | None = None
    saved: tuple[int, int] | None = None

    def begin_epoch(self) -> None:
        """Put the samples in the epoch's order, and the row's generator where it has to be."""
        self.put_in_order()
        if self.random is not None:
            self.generator.set_state(self.random["torch"])
            self.random = None
        if self.batch == 0:
            self.generator.manual_seed(self.epoch_seed)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the row's plain model draw from the row's generator meanwhile."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the row's part of what the arm's optimizer keeps."""
        return self.arm.state_dict_of(self.row)

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Keep it until all rows of the arm have theirs."""
        self.loaded = state

    def random_state(self) -> dict[str, Any]:
        """Return the state of the generators as the plain loop has it.

        No model that draws from Python or NumPy is fused: theirs are as the epoch began.
        """
        with seeding.preserved():
            seeding.seed_all(self.epoch_seed)
            return {**seeding.state(), "torch": self.generator.get_state()}

    def stand_at(self, epoch: int, batch: int) -> None:
        """Go along: at a position, with nothing to be told of it."""
        self.epoch, self.batch, self.losses = epoch, min(batch, self.batches), []

    def save(self, report: Report) -> None:
        """Write a checkpoint, unless it stands where it stood at the last one."""
        if self.saved != (self.epoch, self.batch):
            super().save(report)
            self.saved = self.epoch, self.batch


class Group:
    """A course of all rows together.

    Parameters
    ----------
    fused : FusedModule
        All models.
    criterion : Criterion
        All losses.
    arms : sequence of ReplicaOptimizer
        All optimizers.
    rows : sequence of Replica
        All jobs of the group.
    wanted : sequence of str
        Ids of the jobs that have no result yet.
    heartbeat : Heartbeat
        Beats once a fused step.
    fail : callable
        Says what a job comes to whose own code raised.
    """

    def __init__(
        self,
        fused: FusedModule,
        criterion: Criterion,
        arms: Sequence[ReplicaOptimizer],
        rows: Sequence[Replica],
        wanted: Sequence[str],
        heartbeat: Heartbeat,
        fail: Fail,
    ) -> None:
        self.fused, self.criterion, self.arms, self.rows = fused, criterion, arms, rows
        self.heartbeat, self.fail = heartbeat, fail
        self.untold: list[Result] = []
        self.live = [row for row in rows if row.task.job.id in wanted]
        self.results: dict[str, Result] = {}
        self.apart = False
        self.seeds = [row.seed for row in rows]
        self.orders = torch.empty(0, dtype=torch.int64)
        self.alike: dict[int, list[range]] = {}
        self.epoch = self.batch = 0

    @property
    def stopwatch(self) -> Stopwatch:
        """What each job has trained: all rows look at the same one."""
        return self.rows[0].stopwatch

    @property
    def batches(self) -> int:
        """Most batches that any row has in an epoch."""
        return max(row.batches for row in self.rows)

    @property
    def ended(self) -> bool:
        """Whether no job is left to be trained."""
        return not self.live or self.epoch == self.rows[0].params.epochs

    def begin_epoch(self) -> None:
        """Begin it in every row."""
        for row in self.rows:
            row.begin_epoch()
        self.orders = pad_sequence([row.order for row in self.rows], batch_first=True)
        self.fused.train()
        self.criterion.train()

    def step(self) -> None:
        """One step of all rows that have a batch left, and of their optimizers."""
        busy = [self.batch < row.batches for row in self.rows]
        parts = self._next_parts(busy)
        if not self.live:
            self.batch += 1
            return
        precision = self.rows[0].params.precision
        losses = backward(self.fused, self.criterion, parts, precision)
        clip = self.rows[0].clip
        if clip is not None:
            clip_gradients(self.fused, clip)
        for arm in self.arms:
            lead = arm.rows.start
            if busy[lead]:
                with self._sparing_others(self._rows_of(arm)):
                    arm.step()
                    if self.rows[lead].steps_each_batch:
                        self.rows[lead].lr_schedule.step()
        for row, part, loss in zip(self.rows, busy, losses.unbind(), strict=True):
            if part:
                row.note_step(loss)
        self.batch += 1

    def _next_parts(self, busy: Sequence[bool]) -> list[Part]:
        """What the rows that have a batch left train on, gathered together where they can be."""
        if not self.apart:
            try:
                return [self._gathered(rows) for rows in self._alike()]
            except (Exception, SystemExit):  # noqa: BLE001
                # Whose samples raise is known when each job gathers its own.
                self.apart = True
        return parts_of(self._next_batches(busy))

    def _alike(self) -> list[range]:
        """Neighbours whose batches are the same part of their orders, out of the same data."""
        if self.batch not in self.alike:
            kinds = [
                (*row.bounds[self.batch], id(row.data)) if self.batch < row.batches else None
                for row in self.rows
            ]
            found = groupby(range(len(self.rows)), kinds.__getitem__)
            places = [list(own) for kind, own in found if kind is not None]
            self.alike[self.batch] = [range(own[0], own[-1] + 1) for own in places]
        return self.alike[self.batch]

    def _gathered(self, places: range) -> Part:
        row, part = self.rows[places.start], slice(places.start, places.stop)
        orders = self.orders[part, slice(*row.bounds[self.batch])]
        return Part(places, *row.data.train_together(orders, self.seeds[part], self.epoch))

    def _next_batches(self, busy: Sequence[bool]) -> list[Any]:
        """The batch of each row that has one left."""
        found: list[Any] = [None] * len(self.rows)
        for place, row in enumerate(self.rows):
            if busy[place]:
                with self._sparing_others([row]):
                    found[place] = row.next_batch()
        there = next((batch for batch in found if batch is not None), None)
        for place, row in enumerate(self.rows):
            if busy[place] and found[place] is None and there is not None:
                # How many compute together touches bits: a job without samples takes others'.
                low, high = row.bounds[self.batch]
                taken = torch.arange(high - low, device=there[1].device) % len(there[1])
                found[place] = tuple(item.index_select(0, taken) for item in there)
        return found

    def _rows_of(self, arm: ReplicaOptimizer) -> Sequence[Replica]:
        return self.rows[arm.rows.start : arm.rows.stop]

    @contextmanager
    def _sparing_others(self, rows: Sequence[Replica]) -> Iterator[None]:
        """Let what the code of these jobs raises end them, and no other of the group.

        What may pass by itself, such as want of memory, ends the attempt of all.
        """
        try:
            yield
        except (StorageError, WorkerDiedError, training_run.Diverged):
            raise
        except (Exception, SystemExit) as error:
            loop.note_place(error, self)
            for row in [row for row in rows if row in self.live]:
                found = self.fail(row.task, error)
                if isinstance(found, RetryableFailure):
                    raise
                self._end(row, found)

    def _end(self, row: Replica, result: Result) -> None:
        """Note what a job came to before the others; it goes along from now on."""
        result = replace(result, pid=os.getpid(), peak_memory=process.peak_memory())
        self.results[result.job_id] = result
        self.live.remove(row)
        self.untold.append(result)

    def _tell_ended(self, report: Report) -> None:
        while self.untold:
            report(JobEnded(self.untold.pop(0)))

    def tell(self, report: Report) -> None:
        """Say where each job is that has got on."""
        self._tell_ended(report)
        for row in self.live:
            if row.batch == self.batch:
                row.tell(report)

    def end_epoch(self, started: float, report: Report) -> None:
        """Evaluate each job, step each LR schedule, note the epoch."""
        scored = [(row, self._scored(row)) for row in tuple(self.live)]
        items = {row: item for row, item in scored if item is not None}
        for arm in self.arms:
            lead = self.rows[arm.rows.start]
            # One that reacts to a loss has a row of its own, and wants no loss of a passenger.
            if lead in items or not lr_schedules.needs_metric(lead.lr_schedule):
                with (
                    self._sparing_others(self._rows_of(arm)),
                    lead.drawing(),
                    warnings.catch_warnings(),
                ):
                    # Its steps of this epoch may all have been taken before a resume.
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                    lead.step_lr_schedule()
        self._tell_ended(report)
        for row in self.rows:
            if row in self.live:
                row.close_epoch(items[row], started, report)
            else:
                row.stand_at(self.epoch + 1, 0)
        self.epoch, self.batch = self.epoch + 1, 0

    def _scored(self, row: Replica) -> Any:
        """The losses of a job's epoch, or None: it diverged or raised, and has its result."""
        try:
            with self._sparing_others([row]), row.drawing():
                return row.scored()
        except training_run.Diverged as error:
            self._end(row, loop.diverged(row, error))
        return None

    def save(self, report: Report) -> None:
        """Write a checkpoint of each job, as the plain loop would.

        They are told together, so that hardly a kill leaves some jobs with newer ones than others.
        """
        written: list[RunEvent] = []
        for row in tuple(self.live):
            with self._sparing_others([row]):
                row.save(written.append)
        self._tell_ended(report)
        for item in written:
            report(item)

    def restore(self, report: Report) -> None:
        """Go on from the newest position that all jobs have a checkpoint of."""
        for epoch, batch in _positions(self.live):
            refs = [_ref_at(row, epoch, batch) for row in self.live]
            trees = {
                row: tree
                for row, ref in zip(self.live, refs, strict=True)
                if ref is not None and (tree := _tree(row, ref, report)) is not None
            }
            if len(trees) == len(self.live):
                self._take_up(trees, epoch, batch)
                return

    def _take_up(self, trees: dict[Replica, Tree], epoch: int, batch: int) -> None:
        self.epoch, self.batch = epoch, batch
        for arm in self.arms:
            rows = self.rows[arm.rows.start : arm.rows.stop]
            # An arm has one count of steps: a passenger takes all that a neighbour has.
            tree = next((trees[row] for row in rows if row in trees), None)
            for row in rows:
                if tree is not None:
                    row.take_up(trees.get(row, tree))
                if row not in trees:
                    row.stand_at(epoch, batch)
            states = [row.loaded for row in rows if row.loaded is not None]
            if states:
                arm.load(states)
        for row in self.live:
            row.saved = row.epoch, row.batch
            row.log.write(f"continues after epoch {row.epoch}, batch {row.batch}\n")

    def finish(self) -> None:
        """Note the results of the jobs that reached their end."""
        for row in self.live:
            self.results[row.task.job.id] = loop.result_of(row)

    def time_out(self) -> None:
        """Note that the seconds of all jobs that are left are over."""
        for row in self.live:
            self.results[row.task.job.id] = loop.timed_out(row)


def _positions(rows: Sequence[Replica]) -> list[tuple[int, int]]:
    """Positions that all rows have a checkpoint of, the newest first."""
    known = {(ref.epoch, ref.batch) for row in rows for ref in row.task.checkpoints}
    return [
        (epoch, batch)
        for epoch, batch in sorted(known, reverse=True)
        if all(_ref_at(row, epoch, batch) for row in rows)
    ]


def _ref_at(row: Replica, epoch: int, batch: int) -> CheckpointRef | None:
    """The row's newest checkpoint of a position; one with fewer batches waits at its last."""
    place = epoch, min(batch, row.batches)
    return next((ref for ref in row.task.checkpoints if (ref.epoch, ref.batch) == place), None)


def _tree(row: Replica, ref: CheckpointRef, report: Report) -> Tree | None:
    root = row.bundle.root
    try:
        tree = checkpoint.load(root / ref.file, ref.sha256, root)
        checkpointing.check(row.bundle, row.task, tree)
    except StoreCorruptError as error:
        text = f"{error}; its group goes on from an older one, or starts anew"
        report(Noted(row.task.job.id, "damage", text))
        return None
    return tree


def train(
    bundle: Bundle,
    tasks: Sequence[Task],
    data: Batches,
    device: torch.device,
    report: Report,
    stop: Callable[[], bool],
    heartbeat: Heartbeat | None = None,
    fail: Fail = raised,
) -> list[Result | None]:
    """Train the jobs of one group of the plan as one module.

    Parameters
    ----------
    bundle : Bundle
        The sweep, whose plan has the group.
    tasks : sequence of Task
        The jobs of it that have no result yet.
    data : Batches
        The samples, already on `device`.
    device : torch.device
        Where to train.
    report : callable
        Receives progress, epochs, checkpoints, and results of jobs that diverge or raise, as they
        come.
    stop : callable
        Asked after every batch; when true, all jobs are saved and left.
    heartbeat : Heartbeat, optional
        Shows every finished step to whoever watches.
    fail : callable
        Says what a job comes to whose own code raised: its LR schedule, the transforms of its
        samples, the loss of its evaluation.

    Returns
    -------
    list of Result or None
        One for each task; None where it was asked to stop, a failure where each job's part of the
        seconds is longer than it may train.

    Raises
    ------
    NotFusible
        The models have no batched form.
    """
    heartbeat = heartbeat or Heartbeat()
    heartbeat.aside()
    with ExitStack() as logs:
        group = build(bundle, tasks, data, device, heartbeat, logs, fail)
        group.restore(report)
        if loop.run(group, bundle.plan.params, report, stop):
            group.finish()
        elif group.stopwatch.over:
            group.time_out()
        return [group.results.get(task.job.id) for task in tasks]


def build(
    bundle: Bundle,
    tasks: Sequence[Task],
    data: Batches,
    device: torch.device,
    heartbeat: Heartbeat,
    logs: ExitStack,
    fail: Fail = raised,
    *,
    logged: bool = True,
) -> Group:
    """Make the live objects of the group that the tasks belong to, before its first step."""
    wanted = {task.job.id: task for task in tasks}
    ids = bundle.plan.group_of(tasks[0].job.id)
    by_id = {job.id: job for job in bundle.plan.jobs}
    jobs = [by_id[name] for name in ids]
    stopwatch = Stopwatch(bundle.job_timeout_s, len(jobs))
    begun = [setup.begun(bundle, job, device) for job in jobs]
    seen = _data_by_fold(bundle, [bundle.fold_of(job) for job in jobs], data, device)
    divided = [
        _Division.of(bundle, job, *pair, seen[job.repeat, job.fold])
        for job, pair in zip(jobs, begun, strict=True)
    ]
    inputs, targets = divided[0].first_batch(bundle)
    models, optimizers = [pair[0] for pair in begun], [pair[1] for pair in begun]
    criterion = copy.deepcopy(bundle.recipe.criterion)
    if isinstance(criterion, nn.Module):
        criterion = criterion.to(device)
    # Run, a model changes its buffers; fused, it is no module of its own any more.
    example = copy.deepcopy(models[0])
    fused = fuse(models, [inputs])
    losses = fuse_criterion(criterion, len(jobs), example(inputs), targets)
    arms, _ = fuse_optimizers(fused, optimizers, _ranges(jobs, divided))
    rows = []
    for arm in arms:
        lead = arm.rows.start
        schedule, *_ = setup.schedule_of(
            bundle, jobs[lead], models[lead], arm.optimizer, bundle.fold_of(jobs[lead]).train
        )
        for row in arm.rows:
            job, part = jobs[row], divided[row]
            task = wanted.get(job.id)
            rows.append(
                Replica(
                    task or Task(job),
                    bundle,
                    device,
                    models[row],
                    losses.criteria[row] if isinstance(criterion, nn.Module) else criterion,
                    arm.optimizer,
                    schedule,
                    part.data,
                    part.train,
                    part.bounds,
                    part.steer,
                    bundle.fold_of(job).valid,
                    logs.enter_context(JobLog(bundle.root, job) if task and logged else NoLog()),
                    heartbeat,
                    bundle.plan.params.clip_grad_norm,
                    row=row,
                    arm=arm,
                    generator=fused.generators[row],
                    stopwatch=stopwatch,
                )
            )
    return Group(fused, losses, arms, rows, list(wanted), heartbeat, fail)


def _data_by_fold(
    bundle: Bundle, folds: Sequence[Fold], data: Batches, device: torch.device
) -> dict[tuple[int, int], Batches]:
    """What each fold sees: the same for all, unless something is fitted on its training part."""
    preprocess = bundle.recipe.preprocess
    if preprocess is None:
        return dict.fromkeys((fold.key for fold in folds), setup.moved(data, device))
    return {
        fold.key: setup.moved(fitted(data, preprocess, fold.train), device)
        for fold in {fold.key: fold for fold in folds}.values()
    }


@dataclass(frozen=True, eq=False)
class _Division:
    """A job's data, the samples to train on with their batches, and those that steer."""

    data: Batches
    train: Any
    bounds: list[tuple[int, int]]
    steer: Any
    reacts: bool

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Batches,
    ) -> _Division:
        fold, plan = bundle.fold_of(job), bundle.plan
        # An LR schedule changes the optimizer that it is made for.
        spare = copy.copy(optimizer)
        spare.param_groups = [dict(group) for group in optimizer.param_groups]
        schedule, train, steer = setup.schedule_of(bundle, job, model, spare, fold.train)
        return cls(
            data,
            train,
            list(batching.bounds(len(train), plan.batch_size, model)),
            steer,
            lr_schedules.needs_metric(schedule),
        )

    def first_batch(self, bundle: Bundle) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data.train(self.train[: max(2, bundle.plan.batch_size)], 0, 0)


def _ranges(jobs: Sequence[Job], divided: Sequence[_Division]) -> Iterator[range]:
    """Rows that can share an optimizer: one LR schedule, as many steps, no reaction to a loss."""

    def kind(row: int) -> tuple[str, int, int]:
        part = divided[row]
        return jobs[row].lr_schedule, len(part.bounds), row if part.reacts else -1

    for _, rows in groupby(range(len(jobs)), kind):
        found = list(rows)
        yield range(found[0], found[-1] + 1)
