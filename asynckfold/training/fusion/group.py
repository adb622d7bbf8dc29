"""A fusion group: its jobs as replicas of one module, with the numbers of each.

::

    plan.group_of(job) ─ build all replicas ─ fuse ─ restore ─► loop.run(FusionGroup) ─► results

    GroupBatches ─► backward: one pass of all replicas ─► optimizer.step() per LR schedule
                    └─────────────── on a GPU, one CUDA graph ───────────────┘
                                                               │
       each replica: evaluate ─ LR schedule ─ progress ─ checkpoint ◄┘
            └─ on a GPU, outputs of all held-out folds in one pass

The width of a group and the place of each job in it touch the job's bits. A group therefore always
trains whole, from one common position: a job that has its result already, or that diverged or
raised, stays in the batch, and its output is discarded. No replica depends on the values of
another, so a job's numbers are a function of the plan alone, as in the plain loop.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from asynckfold.data.batches import Batches
from asynckfold.data.transforms.trees import mapped, tensors_in
from asynckfold.errors import StorageError, StoreCorruptError, WorkerDiedError
from asynckfold.jobs.folds import Fold, Indices
from asynckfold.jobs.messages import CheckpointRef, JobEnd, Note, RetryableFailure, RunEvent, Task
from asynckfold.jobs.result import Result
from asynckfold.system import process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import checkpoint, evaluation, loop, lr_schedules, seeding, setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.calls import call_model, outputs_of
from asynckfold.training.cuda_graph import recorder_on
from asynckfold.training.fusion.backward import (
    GroupCriterion,
    ReplicaBatches,
    backward,
    clip_gradients,
    fuse_criterion,
)
from asynckfold.training.fusion.module import FusedModule, fuse
from asynckfold.training.fusion.optimizers import StackedOptimizer, fuse_optimizers
from asynckfold.training.job_log import JobLog, NoLog
from asynckfold.training.losses import of_rows
from asynckfold.training.step_graph import GraphOptimizer, Step, StepGraph, taken_apart
from asynckfold.training.stopwatch import Stopwatch, mark, seconds_between
from asynckfold.training.target_transform import seen_by
from asynckfold.training.training_run import Report, Training

Tree = dict[str, Any]

Fail = Callable[[Task, BaseException], Result | RetryableFailure]
"""(job, what its code raised) → its result, or a retryable failure."""


@dataclass(eq=False)
class Replica(Training):
    """A job of a group: its optimizer and its generator are parts of the group's."""

    index: int = 0
    shared_optimizer: StackedOptimizer = field(kw_only=True)
    generator: torch.Generator = field(kw_only=True)
    loaded: dict[str, Any] | None = None
    saved: tuple[int, int] | None = None
    held_out: torch.Tensor | None = None

    def begin_epoch(self) -> None:
        """Order the samples, and seed or restore the replica's generator."""
        self.order_samples()
        if self.random is not None:
            self.generator.set_state(self.random[self._stream])
            self.random = None
        if self.batch == 0:
            self.generator.manual_seed(seeding.epoch_seed(self.task.job.seed, self.epoch))

    @property
    def _stream(self) -> str:
        """Which of the generators in a checkpoint is the replica's."""
        return "cuda" if self.device.type == "cuda" else "torch"

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the plain model draw from the replica's generator."""
        before = seeding.state_on(self.device)
        seeding.restore_on(self.device, self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(seeding.state_on(self.device))
            seeding.restore_on(self.device, before)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the replica's part of the shared optimizer's state."""
        return self.shared_optimizer.state_dict_of(self.index)

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Keep the state until all replicas of the optimizer have theirs."""
        self.loaded = state

    def random_state(self) -> dict[str, Any]:
        """Return the state of the generators as the plain loop has it.

        Models that draw from Python or NumPy are never fused: those are as the epoch began.
        """
        with seeding.preserved():
            seeding.seed_all(seeding.epoch_seed(self.task.job.seed, self.epoch))
            return {**seeding.state(), self._stream: self.generator.get_state()}

    def stand_at(self, epoch: int, batch: int) -> None:
        """Move a replica whose output is discarded to a position."""
        self.epoch, self.batch, self.losses = epoch, min(batch, self.batches), []

    def outputs_on(self, indices: Indices) -> torch.Tensor:
        """Return the outputs on some samples; the group may know those of the held-out fold."""
        if self.held_out is None or indices is not self.valid:
            return super().outputs_on(indices)
        return self.held_out

    def save(self, report: Report) -> None:
        """Write a checkpoint, unless there is one of this position."""
        if self.saved != (self.epoch, self.batch):
            super().save(report)
            self.saved = self.epoch, self.batch


TOGETHER = ("cuda",)
"""Devices where a group evaluates as one: launches are what an evaluation costs there. On cores,
each job has the bits of the plain model."""


class FusionGroup:
    """All jobs of a group in progress: the `Course` that the training loop drives.

    For a `StepGraph`, it is the `Step`. ``wanted`` are the ids of jobs without a result; `fail`
    makes the result of a job whose code raised.
    """

    def __init__(
        self,
        fused: FusedModule,
        criterion: GroupCriterion,
        optimizers: Sequence[StackedOptimizer],
        replicas: Sequence[Replica],
        wanted: Sequence[str],
        heartbeat: Heartbeat,
        fail: Fail,
    ) -> None:
        self.fused, self.criterion, self.optimizers = fused, criterion, optimizers
        self.replicas, self.heartbeat, self.fail = replicas, heartbeat, fail
        self.dim = 1
        self.gathering = GroupBatches(replicas)
        device = replicas[0].device
        # Activations of a group may take the memory that there is.
        recorder = recorder_on(device, share=1.0)
        # A circle would keep the memory of a group until it is collected.
        step: Step = weakref.proxy(self)
        self.graph = None if recorder is None else StepGraph(step, optimizers, device, recorder)
        self.live = [replica for replica in replicas if replica.task.job.id in wanted]
        lead, alike = replicas[0], {id(replica.data) for replica in replicas}
        self.evaluates_together = (device.type in TOGETHER and len(alike) == 1) and not (
            lead.bundle.plan.by_batch or lead.objective.columns
        )
        self.results: dict[str, Result] = {}
        self.unreported: list[Result] = []
        self.epoch = self.batch = 0

    @property
    def stopwatch(self) -> Stopwatch:
        """The stopwatch that all replicas share."""
        return self.replicas[0].stopwatch

    @property
    def batches(self) -> int:
        """Most batches that any replica has in an epoch."""
        return max(replica.batches for replica in self.replicas)

    @property
    def ended(self) -> bool:
        """Whether no job is left to train."""
        return not self.live or self.epoch == self.replicas[0].params.epochs

    def begin_epoch(self) -> None:
        """Begin the epoch in every replica."""
        for replica in self.replicas:
            replica.begin_epoch()
        self.gathering.begin_epoch()
        self.fused.train()
        self.criterion.train()

    def step(self) -> None:
        """Take one step of all replicas that have a batch left, and of their optimizers."""
        losses, stepped = self._losses()
        for optimizer in self.optimizers:
            lead = self.replicas[optimizer.replicas.start]
            if self.batch < lead.batches:
                with self._ends_only(self._replicas_of(optimizer)):
                    if optimizer not in stepped:
                        optimizer.step()
                    if lr_schedules.steps_each_batch(lead.lr_schedule, lead.params):
                        lead.lr_schedule.step()
        for replica, loss in zip(self.replicas, losses.unbind(), strict=True):
            if self.batch < replica.batches:
                replica.record_step(loss)
        self.batch += 1

    def _losses(self) -> tuple[torch.Tensor, Collection[GraphOptimizer]]:
        """Set the gradients; return the losses (R,), and the optimizers that took their step."""
        if self.graph is None:
            return self.gradients(self.gathering.parts(self.epoch, self.batch)), ()
        left = (self.replicas[0].params.epochs - self.epoch) * self.batches - self.batch
        leaves, make = self.gathering.made_of(self.epoch, self.batch)
        is_full = self.gathering.is_full(self.batch)
        return self.graph(leaves, make, left, begins=self.batch == 0, is_full=is_full)

    def gradients(self, parts: Sequence[ReplicaBatches]) -> torch.Tensor:
        """Set the gradients of a step, clipped if the plan says so; return the losses (R,)."""
        params = self.replicas[0].params
        losses = backward(self.fused, self.criterion, parts, params.precision)
        if params.clip_grad_norm is not None:
            clip_gradients(self.fused, params.clip_grad_norm)
        return losses

    def obstacles(self, parts: Sequence[ReplicaBatches]) -> Iterator[str]:
        """Yield why no graph is tried."""
        if len(parts) > 1:
            yield "its jobs have data of their own"
        if self.criterion.fused is None:
            yield "the losses of its jobs are computed one by one"

    def outputs(self, inputs: Any) -> Any:
        """Return the outputs (R, n, ...) of all replicas, in the mode that they are in."""
        return outputs_of(self.fused, inputs, self.replicas[0].params.precision)

    def side_effects(self, inputs: Any) -> Iterator[str]:
        """Yield nothing: replicas were traced."""
        yield from ()

    def held(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Generator]]:
        """Return parameters, buffers, and the generators of replicas."""
        parts = self.fused, self.criterion.fused
        stacks = [tensor for part in parts if part for tensor in part.stack.tensors.values()]
        buffers = [item for item in stacks if not isinstance(item, nn.Parameter)]
        generators = [item for part in parts if part for item in part.generators]
        return [*self.fused.parameters().values()], buffers, generators

    def frozen(self) -> list[Any]:
        """Return nothing: replicas were traced, and their stack stays where it is."""
        return []

    def log(self, text: str) -> None:
        """Write to the log of each job in training."""
        for replica in self.live:
            replica.log.write(text)

    def _replicas_of(self, optimizer: StackedOptimizer) -> Sequence[Replica]:
        return self.replicas[optimizer.replicas.start : optimizer.replicas.stop]

    @contextmanager
    def _ends_only(self, replicas: Sequence[Replica]) -> Iterator[None]:
        """Let what the code of these jobs raises end them alone.

        Retryable failures, such as running out of memory, end the attempt of the whole group.
        """
        try:
            yield
        except (StorageError, WorkerDiedError, evaluation.Divergence):
            raise
        except (Exception, SystemExit) as error:
            loop.note_position(error, self)
            for replica in [replica for replica in replicas if replica in self.live]:
                outcome = self.fail(replica.task, error)
                if isinstance(outcome, RetryableFailure):
                    raise
                self._end(replica, outcome)

    def _end(self, replica: Replica, result: Result) -> None:
        """Note the result of a job that ends before the others."""
        result = replace(result, pid=os.getpid(), peak_memory=process.peak_memory())
        self.results[result.job_id] = result
        self.live.remove(replica)
        self.unreported.append(result)

    def _report_ended(self, report: Report) -> None:
        while self.unreported:
            report(JobEnd(self.unreported.pop(0)))

    def report_progress(self, report: Report) -> None:
        """Report the progress of each job that took part in the step."""
        self._report_ended(report)
        for replica in self.live:
            if replica.batch == self.batch:
                replica.report_progress(report)

    def end_epoch(self, started: float, report: Report) -> None:
        """Evaluate each job, step each LR schedule, note the epoch."""
        marks = [mark(self.replicas[0].device)]
        if self.evaluates_together:
            for replica, rows in zip(self.replicas, self._held_out_outputs(), strict=True):
                replica.held_out = rows[: len(replica.valid)]
        marks.append(mark(self.replicas[0].device))
        scored = [(replica, self._scored(replica)) for replica in tuple(self.live)]
        epochs = {replica: epoch for replica, epoch in scored if epoch is not None}
        for optimizer in self.optimizers:
            replicas = self._replicas_of(optimizer)
            lead = replicas[0]
            # One that reacts to a loss has one replica; where that has ended, there is no loss.
            if lead in epochs or not lr_schedules.needs_metric(lead.lr_schedule):
                with self._ends_only(replicas), lead.drawing(), warnings.catch_warnings():
                    # After a resume, all steps of this epoch may lie before it.
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                    evaluation.step_lr_schedule(lead)
        self._report_ended(report)
        now = time.perf_counter()
        # The seconds of a job are its share of the group's time, as its stopwatch is.
        share = (now - started) / len(self.replicas)
        for replica in self.replicas:
            if replica in self.live:
                replica.score_seconds += seconds_between(*marks) / len(self.replicas)
                replica.record_epoch(epochs[replica], time.perf_counter() - share, report)
                with self._ends_only([replica]), replica.drawing():
                    replica.accumulate_scores()
            else:
                replica.stand_at(self.epoch + 1, 0)
        self.epoch, self.batch = self.epoch + 1, 0

    @torch.no_grad()
    def _held_out_outputs(self) -> torch.Tensor:
        """Return outputs (R, n, ...) on held-out folds of up to n samples; rows beyond are any."""
        lead, width = self.replicas[0], len(self.replicas)
        rows = pad_sequence([torch.tensor(replica.valid) for replica in self.replicas])
        # No more memory than a few steps of training, whatever the number of replicas.
        size = min(lead.params.eval_batch_size, 4 * lead.bundle.plan.batch_size)
        self.fused.train(False)
        forward: Callable[[Any], Any] = self.outputs
        if self.graph is not None:
            left = (lead.params.epochs - self.epoch) * (len(rows) // size)
            forward = self.graph.evaluation_forward(left)
        parts = []
        for part in torch.split(rows, size):
            inputs, _ = lead.data.eval(part.T.flatten())
            parts.append(forward(mapped(lambda x: x.reshape(width, -1, *x.shape[1:]), inputs)))
            self.heartbeat.beat()
        return torch.cat(parts, 1)

    def _scored(self, replica: Replica) -> Any:
        """Return the losses of a job's epoch; None where the job diverged or raised."""
        try:
            with self._ends_only([replica]), replica.drawing():
                return replica.score()
        except evaluation.Divergence as error:
            self._end(replica, loop.diverged(replica, error))
        return None

    def save(self, report: Report) -> None:
        """Write a checkpoint of each job.

        They are reported together, so that a kill rarely leaves them at different positions.
        """
        written: list[RunEvent] = []
        for replica in tuple(self.live):
            with self._ends_only([replica]):
                replica.save(written.append)
        self._report_ended(report)
        for event in written:
            report(event)

    def restore(self, report: Report) -> None:
        """Continue from the newest position of which all jobs have an intact checkpoint."""
        known = {(ref.epoch, ref.batch) for item in self.live for ref in item.task.checkpoints}
        for epoch, batch in sorted(known, reverse=True):
            refs = [_ref_at(replica, epoch, batch) for replica in self.live]
            if None in refs:
                continue
            trees = {
                replica: tree
                for replica, ref in zip(self.live, refs, strict=True)
                if ref is not None and (tree := _tree(replica, ref, report)) is not None
            }
            if len(trees) == len(self.live):
                self._take_up(trees, epoch, batch)
                return

    def _take_up(self, trees: dict[Replica, Tree], epoch: int, batch: int) -> None:
        self.epoch, self.batch = epoch, batch
        for optimizer in self.optimizers:
            replicas = self._replicas_of(optimizer)
            # An optimizer has one count of steps: finished jobs take another replica's state.
            tree = next((trees[replica] for replica in replicas if replica in trees), None)
            for replica in replicas:
                if tree is not None:
                    replica.load_state_dict(trees.get(replica, tree))
                if replica not in trees:
                    replica.stand_at(epoch, batch)
            states = [replica.loaded for replica in replicas if replica.loaded is not None]
            if states:
                optimizer.load(states)
        for replica in self.live:
            replica.saved = replica.epoch, replica.batch
            replica.log.write(f"continues after epoch {replica.epoch}, batch {replica.batch}\n")

    def end_all(self, result_of: Callable[[Training], Result]) -> None:
        """Note the result of every job that is still in training."""
        self.results |= {replica.task.job.id: result_of(replica) for replica in self.live}


def _ref_at(replica: Replica, epoch: int, batch: int) -> CheckpointRef | None:
    """Return the newest checkpoint of a position; a job with fewer batches waits at its last."""
    place = epoch, min(batch, replica.batches)
    return next((ref for ref in replica.task.checkpoints if (ref.epoch, ref.batch) == place), None)


def _tree(replica: Replica, ref: CheckpointRef, report: Report) -> Tree | None:
    try:
        return checkpoint.load_for(replica.task, replica.bundle, ref)
    except StoreCorruptError as error:
        text = f"{error}; its group continues from an older checkpoint, or starts again"
        report(Note(replica.task.job.id, "damage", text))
        return None


def _part(
    run: range, make: Callable[..., tuple[Any, torch.Tensor]], *leaves: torch.Tensor
) -> list[ReplicaBatches]:
    return [ReplicaBatches(run, *make(*leaves))]


CHUNK_BYTES = 1 << 20
"""Most bytes of inputs that are gathered at once: for small batches, a gather is all overhead."""


class GroupBatches:
    """Batches of the replicas of a group, whose orders of samples are stacked."""

    def __init__(self, replicas: Sequence[Training]) -> None:
        self._replicas = replicas
        self._seeds = [replica.task.job.seed for replica in replicas]
        self._orders = torch.empty(0, dtype=torch.int64)
        self._runs: dict[int, list[tuple[range, int]]] = {}
        self._ahead: dict[int, list[ReplicaBatches]] = {}
        self._on_device: list[torch.Tensor] | None = None
        self._at_once = 1

    def begin_epoch(self) -> None:
        """Take the order of every replica."""
        orders = [replica.order for replica in self._replicas]
        self._orders = pad_sequence(orders, batch_first=True)
        self._ahead.clear()
        self._on_device = None

    def _rows(self, run: range, batch: int) -> list[torch.Tensor]:
        """Sample numbers and draws (R, B) on the device; nothing if the host makes the batches."""
        if self._on_device is None:
            each = [replica.ordered.on_device for replica in self._replicas]
            pairs = zip(*(item or () for item in each), strict=False)
            self._on_device = [pad_sequence([*items], batch_first=True) for items in pairs]
        low, high = self._replicas[run.start].bounds[batch]
        return [item[run.start : run.stop, low:high] for item in self._on_device]

    def is_full(self, batch: int) -> bool:
        """Whether all replicas have a batch of full size."""
        low, high = self._replicas[0].bounds[0]
        runs = self._alike(batch)
        sizes = {size for _, size in runs}
        return sizes == {high - low} and sum(len(run) for run, _ in runs) == len(self._replicas)

    def made_of(
        self, epoch: int, batch: int
    ) -> tuple[list[torch.Tensor], Callable[..., list[ReplicaBatches]]]:
        """Return tensors on the device, and what makes the batches of `parts` of them."""
        (run, _), *others = self._alike(batch)
        if not others and (rows := self._rows(run, batch)):
            return rows, partial(_part, run, self._replicas[run.start].data.train_on_device)
        parts = self.parts(epoch, batch)
        if others:
            return [], lambda: parts
        leaves, make = taken_apart((parts[0].inputs, parts[0].targets))
        return leaves, partial(_part, run, make)

    def parts(self, epoch: int, batch: int) -> list[ReplicaBatches]:
        """Return one batch of every replica that has this one."""
        if batch not in self._ahead:
            count = self._alike_from(batch)
            gathered = [self._gathered(run, epoch, batch, count) for run, _ in self._alike(batch)]
            self._ahead = {
                batch + place: [*parts] for place, parts in enumerate(zip(*gathered, strict=True))
            }
        return self._ahead.pop(batch)

    def _alike(self, batch: int) -> list[tuple[range, int]]:
        """Adjacent replicas with the same bounds and data in this batch, and its size."""
        if batch not in self._runs:
            kinds = [
                (*replica.bounds[batch], id(replica.data)) if batch < replica.batches else None
                for replica in self._replicas
            ]
            grouped = groupby(range(len(kinds)), kinds.__getitem__)
            runs = [(list(run), kind[1] - kind[0]) for kind, run in grouped if kind is not None]
            self._runs[batch] = [(range(run[0], run[-1] + 1), size) for run, size in runs]
        return self._runs[batch]

    def _alike_from(self, batch: int) -> int:
        """Number of batches, from this one on, to gather at once: equal in form, and small."""
        end = max(replica.batches for replica in self._replicas)
        following = range(batch + 1, min(end, batch + self._at_once))
        return 1 + sum(
            1 for _ in takewhile(lambda item: self._alike(item) == self._alike(batch), following)
        )

    def _gathered(self, run: range, epoch: int, batch: int, count: int) -> Iterator[ReplicaBatches]:
        """Yield `count` batches of consecutive replicas, from `batch` on."""
        first, part = self._replicas[run.start], slice(run.start, run.stop)
        (low, high), (_, end) = first.bounds[batch], first.bounds[batch + count - 1]
        if first.device.type != "cpu" and (there := self._rows(run, batch)):
            yield from _part(run, first.data.train_on_device, *there)
            return
        # Rows by batch, then by replica: each batch lies in one piece.
        orders = self._orders[part, low:end].reshape(len(run), count, high - low).transpose(0, 1)
        rows, seeds = orders.flatten(0, 1), self._seeds[part] * count
        inputs, targets = first.data.train_together(rows, seeds, epoch)
        if count == 1 and first.data.in_memory:
            size = sum(item.nbytes for item in tensors_in(inputs))
            self._at_once = max(1, CHUNK_BYTES // max(1, size))
        for place in range(count):
            piece = slice(place * len(run), (place + 1) * len(run))
            yield ReplicaBatches(run, mapped(itemgetter(piece), inputs), targets[piece])


def train(
    bundle: Bundle,
    tasks: Sequence[Task],
    data: Batches,
    device: torch.device,
    report: Report,
    stop: Callable[[], bool],
    heartbeat: Heartbeat,
    fail: Fail,
) -> list[Result | None]:
    """Train the unfinished jobs (`tasks`) of one group of the plan as one module.

    ``stop`` is called after every batch; when it returns true, all jobs are saved and left. `fail`
    makes the result of a job whose code raised: its LR schedule, the transforms of its samples,
    the loss of its evaluation.

    Returns
    -------
    list of Result or None
        One for each task; None where `stop` ended it, a failure where the job's share of the
        seconds exceeds its timeout. Results of jobs that diverge or raise also go to `report` at
        once.

    Raises
    ------
    NotFusible
        The models have no batched form.
    """
    heartbeat.begin_long_phase()
    with ExitStack() as logs:
        group = build(bundle, tasks, data, device, heartbeat, logs, fail)
        group.restore(report)
        if loop.run(group, bundle.plan.params, report, stop):
            group.end_all(loop.result_of)
        elif group.stopwatch.expired:
            group.end_all(loop.timed_out)
        return [group.results.get(task.job.id) for task in tasks]


def build(
    bundle: Bundle,
    tasks: Sequence[Task],
    data: Batches,
    device: torch.device,
    heartbeat: Heartbeat,
    logs: ExitStack,
    fail: Fail,
) -> FusionGroup:
    """Build the group that the tasks belong to, before its first step."""
    plan, criterion = bundle.plan, of_rows(copy.deepcopy(bundle.recipe.criterion), data)
    wanted = {task.job.id: task for task in tasks}
    by_id = {job.id: job for job in plan.jobs}
    jobs = [by_id[name] for name in plan.group_of(tasks[0].job.id)]
    folds = [bundle.fold_of(job) for job in jobs]
    begun = [setup.build_model(bundle, job, device, criterion) for job in jobs]
    models = [model for model, _ in begun]
    seen = [*_data_by_job(bundle, folds, data, device)]
    bounds = [
        setup.epoch_bounds(bundle, job, model, fold.fitted, batches)
        for job, fold, model, batches in zip(jobs, folds, models, seen, strict=True)
    ]
    inputs, targets = seen[0].train(folds[0].fitted[: max(2, plan.batch_size)], 0, 0)
    if isinstance(criterion, nn.Module):
        criterion = criterion.to(device)
    # A forward changes buffers, and a fused model cannot run alone.
    example = copy.deepcopy(models[0])
    fused = fuse(models, [inputs])
    losses = fuse_criterion(criterion, len(jobs), call_model(example, inputs), targets)

    def shared(index: int) -> tuple[str, int, int]:
        """Equal for replicas that share an optimizer: schedule, steps, no reaction to a loss."""
        reacts = folds[index].inner_valid.size
        return jobs[index].lr_schedule, len(bounds[index]), index if reacts else -1

    runs = [[*run] for _, run in groupby(range(len(jobs)), shared)]
    ranges = [range(run[0], run[-1] + 1) for run in runs]
    optimizers = fuse_optimizers(fused, [optimizer for _, optimizer in begun], ranges)
    stopwatch = Stopwatch(bundle.job_timeout_s, len(jobs))
    replicas = []
    for optimizer in optimizers:
        lead = optimizer.replicas.start
        schedule = setup.build_lr_schedule(
            bundle, jobs[lead], models[lead], optimizer.optimizer, folds[lead], data
        )
        for index in optimizer.replicas:
            job, fold = jobs[index], folds[index]
            task = wanted.get(job.id)
            replicas.append(
                Replica(
                    task or Task(job),
                    bundle,
                    device,
                    models[index],
                    losses.criteria[index] if isinstance(criterion, nn.Module) else criterion,
                    optimizer.optimizer,
                    schedule,
                    seen[index],
                    fold.fitted,
                    bounds[index],
                    fold.inner_valid,
                    fold.valid,
                    logs.enter_context(JobLog(bundle.root, job) if task else NoLog()),
                    heartbeat,
                    index=index,
                    shared_optimizer=optimizer,
                    generator=fused.generators[index],
                    stopwatch=stopwatch,
                )
            )
    return FusionGroup(fused, losses, optimizers, replicas, list(wanted), heartbeat, fail)


def _data_by_job(
    bundle: Bundle, folds: Sequence[Fold], data: Batches, device: torch.device
) -> Iterator[Batches]:
    """Yield the data of each job: the same for all, unless something is fitted."""
    recipe, made = bundle.recipe, dict[Any, Batches]()
    is_fitted = recipe.preprocess is not None or recipe.target_transform is not None
    for fold in folds:
        # Jobs of one fold set the same samples aside, or none.
        fitted_on = is_fitted and (fold.key, fold.inner_valid.size)
        if fitted_on not in made:
            made[fitted_on] = setup.to_device(seen_by(data, recipe, fold.fitted), device)
        yield made[fitted_on]
