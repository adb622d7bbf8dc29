"""A job on several processes: the common part of its trainers.

::

    rank 0 (the worker)  first batch ─ share, fork ─ order ─ its part ─ gather answers …
    rank 1, 2 …                                        └──── their part ─ answer

Only rank 0 steps the LR schedule and writes checkpoints, while the others wait for an order; all
ranks share the batches of an evaluation. They are forked after the first batch, when the optimizer
has its state. Only ranks of jobs with a GPU are forked before it, see `hide_gpus`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asynckfold.jobs.folds import Indices
from asynckfold.system import process
from asynckfold.training import evaluation, seeding, setup
from asynckfold.training.optimizers import follow_parameters, leave_open
from asynckfold.training.process_group.gpu_handoff import HiddenGpu
from asynckfold.training.process_group.ranks import ProcessGroup
from asynckfold.training.process_group.shared_tensors import share_state
from asynckfold.training.training_run import Training


@dataclass(eq=False)
class MultiprocessTraining(Training):
    """A job in progress on several processes, seen from one of them; rank 0 is the worker.

    ``cores`` has one core per rank; ``gpu`` is that of the last ranks. ``process_group`` are the
    other ranks, and ``ahead`` those of them that are forked early.
    """

    cores: tuple[int, ...] = ()
    gpu: HiddenGpu | None = None
    rank: int = 0
    process_group: ProcessGroup | None = None
    ahead: ProcessGroup | None = None

    def assembled(self) -> ProcessGroup | None:
        """Return the other ranks, forked after the first batch; None before, or without others."""
        begun = self.batch > 0 or self.epoch > 0
        if begun and self.process_group is None and self.params.processes > 1:
            self.share()
            process.pin(0, self.cores[:1])
            process_group = self.ahead or ProcessGroup(0, self.carry_out, self.cores)
            process_group.fork(range(1, self.params.processes))
            self.process_group = process_group
        return self.process_group

    def fork_ahead(self) -> None:
        """Fork the ranks that must not be forked after the first batch."""

    def take_gpu(self, gpu: HiddenGpu) -> None:
        """Let this rank compute on a GPU; its optimizer has no state yet."""
        self.device = gpu.take()
        self.model.to(self.device)
        self.data = setup.to_device(self.data, self.device)
        if isinstance(self.criterion, nn.Module):
            self.criterion = self.criterion.to(self.device)
        if self.device.type != "cpu":
            leave_open(self.optimizer)

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
        return self._shared(indices, super().outputs_on, by_batch=False)

    def figures_of(self, indices: Indices) -> torch.Tensor:
        """Return figures of the batches of some samples, as `outputs_on` returns outputs."""
        return self._shared(indices, super().figures_of, by_batch=True)

    def _shared(
        self, indices: Indices, evaluate: Callable[[Indices], torch.Tensor], *, by_batch: bool
    ) -> torch.Tensor:
        """Return what all ranks compute for their shares, in the order of the samples."""
        if self.process_group is None or len(indices) <= self.params.eval_batch_size:
            return evaluate(indices)
        self.process_group.order(("evaluate_share", indices, by_batch))
        first = evaluate(indices[self._share_of(indices)])
        self.process_group.gather()
        others = [self.process_group.answers[rank] for rank in range(1, self.params.processes)]
        parts = (item.to(first.device) for item in others if item is not None)
        columns = self.objective.columns
        if by_batch or columns is None:
            return torch.cat([first, *parts])
        joined: torch.Tensor = columns.stack([first, *parts])
        return joined

    def _share_of(self, indices: Indices) -> slice:
        params = self.params
        return evaluation.shares(len(indices), params.eval_batch_size, params.processes)[self.rank]

    def evaluate_share(self, indices: Indices, by_batch: bool) -> Any:
        """On ranks > 0: return outputs on this rank's share, or figures of its batches."""
        self.catch_up()
        evaluation.set_mode(self.model, self.criterion, train=False)
        kept = evaluation.kept_of(self.bundle.plan, self.task.job, self.model)
        try:
            part = indices[self._share_of(indices)]
            with torch.no_grad():
                if not len(part):
                    return None
                # Only rank 0 beats.
                batches = evaluation.batches_of(
                    self.model, self.data, part, self.params, lambda: None
                )
                if by_batch:
                    return evaluation.figures_of(batches, self.criterion, self.objective)
                return evaluation.outputs_of_batches(batches, self.objective.columns)
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
        for process_group in (self.process_group, self.ahead):
            if process_group is not None:
                process_group.close()


@dataclass(eq=False)
class SteppingTraining(MultiprocessTraining):
    """A job whose ranks take separate steps; ``states`` are the optimizer states by rank."""

    states: list[Any] = field(default_factory=list)

    @property
    def apart(self) -> range:
        """The ranks whose optimizer state is not in shared memory."""
        return range(0)

    def share(self) -> None:
        """Give each rank the present optimizer state, or that of a checkpoint."""
        count = self.params.processes
        loaded = self.states or [self.optimizer.state] * count
        if self.params.shared_state:
            self.states = [_shared_state(loaded[0])] * count
        else:
            self.states = [
                state if rank in self.apart else _shared_state(state)
                for rank, state in enumerate(loaded)
            ]
        self.optimizer.state = self.states[0]

    def enter(self) -> None:
        """Take the rank's state."""
        self.optimizer.state = self.states[self.rank]

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer state of each rank; one entry where they share it."""
        states = self.states[:1] if self.params.shared_state else self.states
        entries = []
        current = self.optimizer.state
        for state in states or [current]:
            self.optimizer.state = state
            entries.append(self.optimizer.state_dict())
        self.optimizer.state = current
        if self.apart and self.process_group is not None:
            self.process_group.order(("plain_optimizer_state",), self.apart)
            self.process_group.gather()
            for rank in self.apart:
                entries[rank]["state"] = self.process_group.answers[rank]
        return {"ranks": entries}

    def plain_optimizer_state(self) -> Any:
        """On ranks > 0: return the state of this rank's optimizer."""
        return self.optimizer.state_dict()["state"]

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load what `optimizer_state` returned; a single entry stands for all."""
        loaded: list[Any] = []
        for entry in reversed(state["ranks"]):
            self.optimizer.load_state_dict(entry)
            follow_parameters(self.optimizer)
            loaded.insert(0, self.optimizer.state)
        missing = self.params.processes - len(loaded)
        self.states = [*loaded, *loaded[:1] * missing]


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

    Examples
    --------
    >>> first, second = [torch.tensor([1.0, 2.0])], [torch.tensor([5.0, 2.0])]
    >>> average([first, second], [0.75, 0.25])
    >>> first[0].tolist(), second[0].tolist()
    ([2.0, 2.0], [2.0, 2.0])
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


def _shared_state(state: Any) -> Any:
    """Return the state in shared memory, as a defaultdict."""
    return defaultdict(dict, share_state(state))
