"""A job on several processes: the common part of its trainers, which differ in how ranks meet.

::

    rank 0 (the worker)  first batch ─ share, fork ─ order ─ its part ─ gather answers …
    rank 1, 2 …                                        └──── their part ─ answer

A trainer says what the ranks `share`, what each does when it begins (`enter`), and how rank 0 takes
a step with the others. Only rank 0 steps the LR schedule and writes checkpoints, while the others
wait for an order; all ranks share the batches of an evaluation. They are forked after the first
batch, when the optimizer has its state. Only ranks of jobs with a GPU are forked before it, see
`hide_gpus`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from asynckfold.data.batches import Batches
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.messages import Task
from asynckfold.jobs.result import Result
from asynckfold.system import process
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import evaluation, loop, seeding, setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.job_log import JobLog
from asynckfold.training.optimizers import follow_parameters
from asynckfold.training.process_group.gpu_handoff import HiddenGpu
from asynckfold.training.process_group.ranks import ProcessGroup
from asynckfold.training.process_group.shared_tensors import share_state
from asynckfold.training.training_run import Report, Training


@dataclass(eq=False)
class MultiprocessTraining(Training):
    """A job in progress on several processes, seen from one of them; rank 0 is the worker.

    ``cores`` has one core per rank; ``gpu`` is that of the last ranks. ``others`` are the other
    ranks, which are ``assembled`` once all are forked.
    """

    cores: tuple[int, ...] = ()
    gpu: HiddenGpu | None = None
    rank: int = 0
    others: ProcessGroup = field(init=False)
    assembled: bool = False

    def __post_init__(self) -> None:
        self.others = ProcessGroup(self.carry_out, self.cores)

    def assemble(self) -> bool:
        """Fork the other ranks after the first batch; return whether there are any."""
        begun = self.batch > 0 or self.epoch > 0
        if begun and not self.assembled and self.params.processes > 1:
            self.share()
            process.pin(0, self.cores[:1])
            self.others.fork(range(1, self.params.processes))
            self.assembled = True
        return self.assembled

    def fork_ahead(self) -> None:
        """Fork the ranks that must not be forked after the first batch."""

    def share(self) -> None:
        """Move what all ranks see into shared memory, before the others are forked."""

    def enter(self) -> None:
        """On ranks > 0: prepare for the first order."""

    def carry_out(self, rank: int, order: tuple[Any, ...]) -> Any:
        """On ranks > 0: call the method that an order names."""
        if self.rank != rank:
            self.rank = rank
            self.enter()
        name, *arguments = order
        return getattr(self, name)(*arguments)

    def catch_up(self) -> None:
        """On ranks > 0, at a barrier: copy rank 0's model."""

    def outputs_on(self, indices: Indices) -> torch.Tensor:
        """Return the outputs on some samples; each rank evaluates its share, of whole batches.

        No bit depends on which rank computes it, unless the model draws random numbers in
        evaluation, which differ by rank.
        """
        columns, parts = self.objective.columns, self._parts("outputs_on", indices)
        joined: torch.Tensor = torch.cat(parts) if columns is None else columns.stack(parts)
        return joined

    def figures_of(self, indices: Indices) -> torch.Tensor:
        """Return figures of the batches of some samples, as `outputs_on` returns outputs."""
        return torch.cat(self._parts("figures_of", indices))

    def _parts(self, name: str, indices: Indices) -> list[torch.Tensor]:
        """Return what all ranks compute for their shares, in the order of the samples."""
        if not self.assembled or len(indices) <= self.params.eval_batch_size:
            return [getattr(super(), name)(indices)]
        self.others.order(("evaluate_share", name, indices))
        first = getattr(super(), name)(self._share_of(indices))
        parts = self.others.gather()
        return [first, *(part.to(first.device) for part in parts if part is not None)]

    def _share_of(self, indices: Indices) -> Indices:
        params = self.params
        shares = evaluation.shares(len(indices), params.eval_batch_size, params.processes)
        return indices[shares[self.rank]]

    def evaluate_share(self, name: str, indices: Indices) -> torch.Tensor | None:
        """On ranks > 0: return outputs on this rank's share, or figures of its batches."""
        self.catch_up()
        share = self._share_of(indices)
        # Not the optimizer's mode: it may change the parameters, which all ranks may share.
        evaluation.set_mode(self.model, self.criterion, train=False)
        kept = evaluation.kept_of(self.bundle.plan, self.task.job, self.model)
        try:
            with torch.no_grad():
                return getattr(super(), name)(share) if len(share) else None
        finally:
            # Where ranks share the buffers, rank 0 restores them once all others have answered.
            kept.restore()
            evaluation.set_mode(self.model, self.criterion, train=True)

    def begin(self, epoch: int, step: int) -> None:
        """On ranks > 0: begin or continue an epoch, with random numbers of the rank."""
        if self.epoch != epoch:
            self.epoch = epoch
            self.order_samples()
            evaluation.set_mode(self.model, self.criterion, train=True)
        seeding.seed_all(seeding.stream(self.task.job.seed, epoch + 1, self.rank, step))

    def record_step(self, loss: torch.Tensor) -> None:
        """Count one more batch; losses of other ranks are float64."""
        super().record_step(loss.double())

    def close(self) -> None:
        """End the other processes."""
        self.others.close()


@dataclass(eq=False)
class SteppingTraining(MultiprocessTraining):
    """A job whose ranks take separate steps; ``loaded`` are optimizer states of a checkpoint."""

    loaded: list[dict[str, Any]] = field(default_factory=list)

    def share(self) -> None:
        """Share the optimizer state, if the ranks have one together."""
        if self.params.shared_state:
            self.optimizer.state = defaultdict(dict, share_state(self.optimizer.state))

    def enter(self) -> None:
        """Take the rank's state of a checkpoint."""
        if self.rank < len(self.loaded):
            self.take_state(self.loaded[self.rank])

    def take_state(self, entry: dict[str, Any]) -> None:
        """Load an optimizer state, with the present learning rates."""
        settings = settings_of(self.optimizer)
        self.optimizer.load_state_dict(entry)
        follow_parameters(self.optimizer)
        set_settings(self.optimizer, settings)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer state of each rank; one entry where they share it."""
        entries = [self.optimizer.state_dict()]
        if self.assembled and not self.params.shared_state:
            self.others.order(("plain_optimizer_state",))
            entries += self.others.gather()
        return {"ranks": entries}

    def plain_optimizer_state(self) -> dict[str, Any]:
        """On ranks > 0: return the state of this rank's optimizer."""
        return self.optimizer.state_dict()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load what `optimizer_state` returned; a single entry stands for all."""
        self.loaded = state["ranks"]
        super().load_optimizer(self.loaded[0])


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return settings of the parameter groups, such as learning rates."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_settings(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Restore what `settings_of` returned."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def average(copies: Sequence[Sequence[torch.Tensor]], shares: Sequence[float]) -> None:
    """Set each rank's copy of some tensors to the mean of all, summed in the order of the ranks.

    Integers, such as counts, become those of the first rank. ``shares`` are the weights of the
    ranks, and sum to 1; a rank of weight 0 is left out of the sum.
    """
    with torch.no_grad():
        for tensors in zip(*copies, strict=True):
            total = tensors[0]
            if total.is_floating_point() or total.is_complex():
                total.mul_(shares[0])
                for tensor, share in zip(tensors[1:], shares[1:], strict=True):
                    if share:
                        total.add_(tensor, alpha=share)
            for tensor in tensors[1:]:
                tensor.copy_(total)


TRAINERS = {
    "hogwild": ("hogwild", "HogwildTraining"),
    "allreduce": ("allreduce", "AllReduceTraining"),
    "averaging": ("averaging", "AveragingTraining"),
    "parameter_server": ("downpour", "DownpourTraining"),
}
"""Module and class of each trainer; only the one that is used is imported."""


def train(
    bundle: Bundle,
    task: Task,
    data: Batches,
    cores: Sequence[int],
    report: Report,
    stop: Callable[[], bool],
    heartbeat: Heartbeat | None = None,
    gpu: HiddenGpu | None = None,
) -> Result | None:
    """Train one job on the processes of its plan, and score its held-out fold.

    As `loop.train`, with the samples in memory. `cores` has one for each process, or is empty for
    no pinning; `gpu` is that of the last ranks: neither this process nor the model's pretraining
    may have run a backward pass before.
    """
    heartbeat = heartbeat or Heartbeat()
    heartbeat.begin_long_phase()
    with JobLog(bundle.root, task.job) as log:
        plain = setup.build(bundle, task, data, torch.device("cpu"), log, heartbeat, cores=cores)
        module, name = TRAINERS[bundle.plan.params.trainer]
        make: type[MultiprocessTraining] = getattr(import_module(f"{__package__}.{module}"), name)
        training = make(**vars(plain), cores=tuple(cores), gpu=gpu)
        try:
            training.fork_ahead()
            result: Result | None = loop.with_gpu_memory(
                loop.train_to_end(training, report, stop), training.device
            )
            return result
        finally:
            training.close()
