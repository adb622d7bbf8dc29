"""What a dry run finds out about a criterion by watching it: it may be any function.

::

    outputs (n, 1) ─┐
                    ├─ any operation ─► (n, n): each output meets the targets of all samples
    targets (n,) ───┘

A tensor's memory tells what it was computed from. Of two operands that come from outputs and from
targets, neither may be spread over all samples of the other by dimensions that it does not have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Shapes = tuple[torch.Size, torch.Size]

_OUTPUTS, _TARGETS = 1, 2

ALIKE = 1e-3
"""Largest difference between losses that are called the same, as a share of the loss."""


def mixes_samples(
    criterion: Callable[..., Any], outputs: torch.Tensor, targets: torch.Tensor
) -> Shapes | None:
    """Return the shapes with which outputs are compared with the targets of other samples.

    That is what torch's broadcasting makes of (n, 1) and (n,), silently for most losses. Ordinary
    are comparisons of all outputs with each other, of all targets, of anything with itself, and
    those of which both operands have equally many dimensions: these were written on purpose.

    Parameters
    ----------
    criterion : callable
        (outputs, targets) → loss; a copy of it is called.
    outputs, targets : Tensor
        (n, ...): of one batch.

    Returns
    -------
    (Size, Size) or None
        Of the first operands for which this is so.

    Examples
    --------
    >>> def squared(outputs, targets):
    ...     return ((outputs - targets) ** 2).mean()
    >>> mixes_samples(squared, torch.ones(8, 1), torch.ones(8))
    (torch.Size([8, 1]), torch.Size([8]))
    >>> mixes_samples(squared, torch.ones(8), torch.ones(8))
    """
    watch = _Watch(outputs.detach().requires_grad_(outputs.is_floating_point()), targets)
    # The criterion has worked without being watched; what it does not bear is not its fault.
    try:
        with watch:
            copy.deepcopy(criterion)(*watch.kept)
    except Exception:  # noqa: BLE001
        return watch.found
    return watch.found


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows of each tensor whether it was computed from outputs, from targets, or from both."""

    def __init__(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Shapes | None = None
        self.count = len(targets)
        # Kept, so that no later tensor gets the memory of an earlier one.
        self.kept = [outputs, targets]
        self.sources = {_memory(outputs): _OUTPUTS, _memory(targets): _TARGETS}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in `FlopCounter`: torch's own answer imports its compiler, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = list(_tensors((args, kwargs))), list(_tensors(result))
        sources = [self.sources.get(_memory(item), 0) for item in given]
        for one, other in combinations(zip(given, sources, strict=True), 2):
            if self.found is None and self._mixes(one, other, made):
                self.found = one[0].shape, other[0].shape
        for item in made:
            place = _memory(item)
            self.kept.append(item)
            for source in (self.sources.get(place, 0), *sources):
                self.sources[place] = self.sources.get(place, 0) | source
        return result

    def _mixes(
        self,
        one: tuple[torch.Tensor, int],
        other: tuple[torch.Tensor, int],
        made: Sequence[torch.Tensor],
    ) -> bool:
        (first, mine), (second, theirs) = one, other
        if not mine or not theirs or mine | theirs != _OUTPUTS | _TARGETS:
            return False
        if first.dim() == second.dim() or _memory(first) == _memory(second) or self.count < 2:
            return False
        rank = max(first.dim(), second.dim())
        sizes = [(1,) * (rank - item.dim()) + tuple(item.shape) for item in (first, second)]
        pairs = list(zip(*sizes, strict=True))
        if not {(self.count, 1), (1, self.count)} <= set(pairs):
            return False
        # Of operations on elements only, unlike indexing.
        whole = [max(pair) for pair in pairs]
        return any(list(item.shape) == whole for item in made)


def adds_up(criterion: Callable[..., Any], outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether a loss is the sum over the samples of a batch: twice the samples, twice the loss.

    Parameters
    ----------
    criterion : callable
        (outputs, targets) → loss; copies of it are called.
    outputs, targets : Tensor
        (n, ...): of one batch.

    Examples
    --------
    >>> outputs, targets = torch.zeros(4, 1), torch.ones(4, 1)
    >>> adds_up(torch.nn.MSELoss(), outputs, targets)
    False
    >>> adds_up(lambda outputs, targets: ((outputs - targets) ** 2).sum(), outputs, targets)
    True
    """
    # As in `mixes_samples`.
    try:
        with torch.no_grad():
            once, twice = (
                float(copy.deepcopy(criterion)(torch.cat([outputs] * n), torch.cat([targets] * n)))
                for n in (1, 2)
            )
    except Exception:  # noqa: BLE001
        return False
    return once != 0 and abs(twice - 2 * once) <= ALIKE * abs(once)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (item for item in pytree.tree_leaves(tree) if isinstance(item, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    """What a tensor and its views have in common."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
