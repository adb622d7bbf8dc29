"""A job on several processes: what its trainers have in common.

::

    rank 0 (the worker)  first batch ─ share, fork ─ order ─ its part ─ hear the others …
    rank 1, 2 …                                        └──── their part ─ answer

Rank 0 alone steps the LR schedule and writes checkpoints, while the others wait for an order; the
batches of an evaluation are divided among all. They are forked after the first batch: by then the
optimizer has what it keeps. Only one that computes on a GPU is forked before it, see `hide_gpus`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.jobs.folds import Indices
from asynckfold.system import process
from asynckfold.training import evaluation, seeding
from asynckfold.training.fused_optimizers import follow_parameters
from asynckfold.training.process_group.gpu_handoff import GpuToTake
from asynckfold.training.process_group.members import ProcessGroup
from asynckfold.training.process_group.shared_tensors import share_state
from asynckfold.training.training_run import Training


class _Frozen(NamedTuple):
    """A tensor: its bytes, its type and its shape."""

    bytes_: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class _Outputs:
    """Evaluate the model on your share of these samples."""

    indices: Indices


@dataclass(eq=False)
class MultiprocessTraining(Training):
    """A job in progress on several processes, one of which this is; rank 0 is the worker.

    ``cores`` are those of each rank, and ``gpu`` what the last one computes on instead, where it
    does. ``process_group`` are the others, and ``ahead`` those who are forked before them.
    """

    cores: tuple[int, ...] = ()
    gpu: GpuToTake | None = None
    rank: int = 0
    process_group: ProcessGroup | None = None
    ahead: ProcessGroup | None = None

    def assembled(self) -> ProcessGroup | None:
        """Return the others, who are forked when it is time; None before, and of one process."""
        begun = self.batch > 0 or self.epoch > 0
        if begun and self.process_group is None and self.params.processes > 1:
            self.share()
            process.pin(0, self.cores[:1])
            process_group = self.ahead or ProcessGroup(0, self._obey, self.cores)
            process_group.enlist(range(1, self.params.processes))
            self.process_group = process_group
        return self.process_group

    def enlist_ahead(self) -> None:
        """Fork, when the job is built, whoever must not be forked later."""

    def share(self) -> None:
        """Move into shared memory what all are to see, before the others are forked."""

    def enter(self) -> None:
        """In a member: what comes before its first order."""

    def obey(self, order: Any) -> Any:
        """In a member: carry out an order."""

    def _obey(self, rank: int, order: Any) -> Any:
        if self.rank != rank:
            self.rank = rank
            self.enter()
        if isinstance(order, _Outputs):
            return self._outputs_of_share(order.indices)
        return self.obey(order)

    def catch_up(self) -> None:
        """In a member, all of which are at rest: come to have the model that rank 0 has."""

    def outputs_on(self, indices: Indices) -> torch.Tensor:
        """Return the outputs on some samples, of which each process evaluates its share.

        A share is whole batches, so that no bit depends on who computes it, unless the model draws
        random numbers in evaluation: then they are those of the process.
        """
        if self.process_group is None or len(indices) <= self.params.eval_batch_size:
            return super().outputs_on(indices)
        self.process_group.order(_Outputs(indices))
        own = super().outputs_on(indices[self._share_of(indices)])
        self.process_group.gather()
        others = [self.process_group.answers[rank] for rank in range(1, self.params.processes)]
        return torch.cat([own, *(thawed(item) for item in others if item is not None)])

    def _share_of(self, indices: Indices) -> slice:
        params = self.params
        return evaluation.shares(len(indices), params.eval_batch_size, params.processes)[self.rank]

    def _outputs_of_share(self, indices: Indices) -> Any:
        self.catch_up()
        evaluation.set_mode(self.model, self.criterion, train=False)
        try:
            part = indices[self._share_of(indices)]
            with torch.no_grad():
                return (
                    frozen(
                        evaluation.outputs_on(self.model, self.data, part, self.params, _unheard)
                    )
                    if len(part)
                    else None
                )
        finally:
            evaluation.set_mode(self.model, self.criterion, train=True)

    def begin(self, epoch: int, step: int) -> None:
        """In a member: begin or continue an epoch, with random numbers of its own."""
        if self.epoch != epoch:
            self.epoch = epoch
            self.put_in_order()
            evaluation.set_mode(self.model, self.criterion, train=True)
        seeding.seed_all(seeding.stream(self.seed, epoch + 1, self.rank, step))

    def note_step(self, loss: torch.Tensor) -> None:
        """One more batch is behind it; losses of others come as numbers of 64 bits."""
        super().note_step(loss.double())

    def close(self) -> None:
        """End the other processes."""
        for process_group in (self.process_group, self.ahead):
            if process_group is not None:
                process_group.close()


@dataclass(eq=False)
class Stepping(MultiprocessTraining):
    """One in which each process takes steps with what its own optimizer keeps, in ``states``."""

    states: list[Any] = field(default_factory=list)

    def share(self) -> None:
        """Give each rank what the optimizer keeps now, or what a checkpoint has of it."""
        count = self.params.processes
        loaded = self.states or [self.optimizer.state] * count
        if self.params.shared_state:
            self.states = [_shared_state(loaded[0])] * count
        else:
            self.states = [_shared_state(state) for state in loaded]
        self.optimizer.state = self.states[0]

    def enter(self) -> None:
        """Take up one's own."""
        self.optimizer.state = self.states[self.rank]

    def optimizer_state(self) -> dict[str, Any]:
        """Return what each process's optimizer keeps; one entry where they share it."""
        states = self.states[:1] if self.params.shared_state else self.states
        found = []
        own = self.optimizer.state
        for state in states or [own]:
            self.optimizer.state = state
            found.append(self.optimizer.state_dict())
        self.optimizer.state = own
        return {"ranks": found}

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take up what `optimizer_state` returned; a single entry stands for all."""
        loaded: list[Any] = []
        for entry in reversed(state["ranks"]):
            self.optimizer.load_state_dict(entry)
            follow_parameters(self.optimizer)
            loaded.insert(0, self.optimizer.state)
        missing = self.params.processes - len(loaded)
        self.states = [*loaded, *loaded[:1] * missing]


def _unheard() -> None:
    """Signs of life are rank 0's."""


def frozen(tree: Any) -> Any:
    """Return tensors, also in dicts, lists and tuples, as bytes, whatever device they are on.

    All else stays as it is. Torch would send a tensor as a name of shared memory, which a kill
    leaves.

    Examples
    --------
    >>> thawed(frozen({"step": torch.tensor(2.0), "groups": [("x", torch.tensor(1))]}))
    {'step': tensor(2.), 'groups': [('x', tensor(1))]}
    """
    if isinstance(tree, dict):
        return {key: frozen(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(frozen, tree))
    if not isinstance(tree, torch.Tensor):
        return tree
    plain = tree.detach().cpu().contiguous()
    return _Frozen(plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, plain.shape)


def thawed(tree: Any) -> Any:
    """Return what `frozen` was given, tensors on the CPU."""
    if isinstance(tree, dict):
        return {key: thawed(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(thawed, tree))
    if not isinstance(tree, _Frozen):
        return tree
    return torch.from_numpy(tree.bytes_).view(tree.dtype).view(tree.shape)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of the parameter groups, such as learning rates."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_settings(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Put the parameter groups at settings that `settings_of` returned."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers, each once."""
    return list(dict.fromkeys([*model.parameters(), *model.buffers()]))


def average(copies: Sequence[Sequence[torch.Tensor]], shares: Sequence[float]) -> None:
    """Set each rank's copy of some tensors to the mean of all.

    The sum goes in the order of the ranks, so that its bits are the same each time; whole numbers,
    such as counts, become those of the first.

    Parameters
    ----------
    copies : sequence of sequences of Tensor
        By rank: tensors of the same shapes.
    shares : sequence of float
        Weight of each rank; they sum to 1. A rank without weight is left out of the sum.

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
    """In shared memory, and such that a parameter without an entry gets one."""
    return defaultdict(dict, share_state(state))
