"""Losses and gradients of fused replicas, also where their batches differ in size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from asynckfold.data.transforms.trees import mapped
from asynckfold.training.calls import outputs_of
from asynckfold.training.fusion.module import FusedModule, fuse

Batch = tuple[Any, torch.Tensor]
"""(inputs, targets) of one replica; inputs may be a dict or tuple of tensors."""


class GroupCriterion:
    """A loss for each replica, computed together where the criteria can be fused.

    ``criteria`` are those whose state is saved and loaded.
    """

    def __init__(self, criteria: Sequence[Any], fused: FusedModule | None = None) -> None:
        self.criteria, self.fused = criteria, fused

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return losses (R,)."""
        if self.fused is not None:
            losses: torch.Tensor = self.fused(outputs, targets)
            return losses.reshape(len(self.criteria))
        each = [
            criterion(mapped(itemgetter(at), outputs), targets[at])
            for at, criterion in enumerate(self.criteria)
        ]
        return torch.stack([loss.reshape(()) for loss in each])

    def beside(self, criteria: Sequence[Any]) -> GroupCriterion:
        """Return the same computation for other copies of the criterion."""
        fused = None if self.fused is None else self.fused.beside([*map(_as_module, criteria)])
        return GroupCriterion(criteria, fused)

    def part(self, replicas: range) -> GroupCriterion:
        """Return the criterion of consecutive replicas."""
        fused = None if self.fused is None else self.fused.part(replicas)
        return GroupCriterion(self.criteria[replicas.start : replicas.stop], fused)

    def train(self, mode: bool = True) -> None:
        """Set the mode of the criteria that are modules."""
        for criterion in self.criteria:
            if isinstance(criterion, nn.Module):
                criterion.train(mode)


class _AsModule(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, outputs: Any, targets: Any) -> Any:
        return self.function(outputs, targets)


def _as_module(criterion: Any) -> nn.Module:
    return criterion if isinstance(criterion, nn.Module) else _AsModule(criterion)


def fuse_criterion(
    criterion: Callable[..., Any], width: int, outputs: Any, targets: torch.Tensor
) -> GroupCriterion:
    """Make copies of a criterion compute together, or one after another where they cannot.

    Outputs, a tensor or a tree, and targets (B, ...) are examples of one replica.
    """
    copies = [copy.deepcopy(criterion) for _ in range(width)]
    examples = [mapped(_leaf, outputs), targets]
    # Whatever the user's code raises, the criteria are computed one by one.
    try:
        together = GroupCriterion(copies, fuse([*map(_as_module, copies)], examples))
        together(*mapped(lambda item: torch.stack([item] * width), tuple(examples)))
    except Exception:  # noqa: BLE001
        return GroupCriterion(copies)
    return together


def _leaf(item: torch.Tensor) -> torch.Tensor:
    leaf = item.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


@dataclass(frozen=True)
class ReplicaBatches:
    """Inputs and targets (R, B, ...) of consecutive replicas, with the same B for all.

    Inputs are a tensor or a tree of them.
    """

    replicas: range
    inputs: Any
    targets: torch.Tensor


def parts_of(batches: Sequence[Batch | None]) -> list[ReplicaBatches]:
    """Group the replicas' batches into parts of equal shape.

    Parameters
    ----------
    batches : sequence of (inputs, targets), or None
        One for each replica; None for a replica that does not take part.

    Examples
    --------
    >>> two, three = (torch.zeros(n, 4) for n in (2, 3))
    >>> [part.replicas for part in parts_of([(two, two), (two, two), None, (three, three)])]
    [range(0, 2), range(3, 4)]
    """
    parts: list[ReplicaBatches] = []
    start = 0
    for stop in range(1, len(batches) + 1):
        if stop < len(batches) and _alike(batches[start], batches[stop]):
            continue
        some = [batch for batch in batches[start:stop] if batch is not None]
        if some:
            inputs, targets = zip(*some, strict=True)
            stacked = pytree.tree_map(lambda *items: torch.stack(items), *inputs)
            parts.append(ReplicaBatches(range(start, stop), stacked, torch.stack(targets)))
        start = stop
    return parts


def _alike(one: Batch | None, other: Batch | None) -> bool:
    if one is None or other is None:
        return one is other
    mine, theirs = (pytree.tree_leaves(batch) for batch in (one, other))
    return [item.shape for item in mine] == [item.shape for item in theirs]


def backward(
    fused: FusedModule,
    criterion: GroupCriterion,
    parts: Sequence[ReplicaBatches],
    precision: str = "fp32",
) -> torch.Tensor:
    """Compute losses (R,), and gradients into the fused parameters, whose old ones are dropped.

    The parts hold some or all replicas, none twice; the loss of replicas in no part is NaN.
    """
    fused.zero_grad()
    if len(parts) == 1 and parts[0].replicas == range(fused.width):
        return _backward(fused, criterion, parts[0], precision)
    losses_of: list[tuple[range, torch.Tensor]] = []
    for part in parts:
        replicas = part.replicas
        view = fused.part(replicas)
        view.zero_grad()
        losses_of.append((replicas, _backward(view, criterion.part(replicas), part, precision)))
        if view is not fused:
            _copy_gradients(view, fused, replicas)
    losses = losses_of[0][1].new_full((fused.width,), float("nan"))
    for replicas, values in losses_of:
        losses[replicas.start : replicas.stop] = values
    return losses


def _backward(
    fused: FusedModule, criterion: GroupCriterion, part: ReplicaBatches, precision: str
) -> torch.Tensor:
    losses = criterion(outputs_of(fused, part.inputs, precision), part.targets)
    # No replica's loss depends on another's parameters: the gradients of their sum are theirs.
    losses.backward(torch.ones_like(losses))  # type: ignore[no-untyped-call]
    return losses.detach()


def _copy_gradients(view: FusedModule, fused: FusedModule, replicas: range) -> None:
    whole = fused.parameters()
    for name, parameter in view.parameters().items():
        if parameter.grad is None:
            continue
        target = whole[name]
        if target.grad is None:
            target.grad = torch.zeros_like(target)
        target.grad[replicas.start : replicas.stop] = parameter.grad
        parameter.grad = None


def clip_gradients(fused: FusedModule, max_norm: float) -> None:
    """Clip each replica's gradients as `torch.nn.utils.clip_grad_norm_` does."""
    gradients = [p.grad for p in fused.parameters().values() if p.grad is not None]
    norms = torch.stack([gradient.reshape(fused.width, -1).norm(dim=1) for gradient in gradients])
    totals: torch.Tensor = norms.norm(dim=0)
    factors = (max_norm / (totals + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *(1,) * (gradient.dim() - 1)))
