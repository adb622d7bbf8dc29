"""The criterion in the dry run: made for each fold, and watched, since it may be any function.

::

    outputs (n, 1) ─┐
                    ├─ any operation ─► (n, n): each output meets the targets of all samples
    targets (n,) ───┘

The storage of a tensor tells what it was computed from. An operand from outputs and one from
targets must not be broadcast over each other's samples by dimensions that they lack.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from asynckfold.data.batches import Batches, WeightedTargets
from asynckfold.training.bundle import Bundle
from asynckfold.training.dry_run.refusals import kinds_of, trying
from asynckfold.training.losses import WeightedCriterion, as_given, criterion_for, means, of_rows
from asynckfold.training.torch_internals import OperationWatch
from asynckfold.training.user_steps import Refusal

Shapes = tuple[torch.Size, torch.Size]

_OUTPUTS, _TARGETS = 1, 2

EXACT = 1e-4
"""Largest difference of losses that rounding explains, relative to the loss."""

ORDERS = 8
"""Orders of a batch in which it is divided."""

ALIKE = 1e-3
"""Largest difference of losses that count as equal, relative to the loss."""


def with_criterion(bundle: Bundle, data: Batches) -> Bundle:
    """Return the bundle with the criterion of the first fold, as a function of stored targets.

    Raises
    ------
    Refusal
        The factory of criteria raises for some fold.
    """
    recipe, made = bundle.recipe, []
    for fold in bundle.folds:
        rule = "a function of train_targets must return the criterion of a training fold"
        with trying(rule, "It gets a tensor, with a class as its index."):
            made.append(criterion_for(recipe, data, fold.fitted))
    criterion = made[0] if recipe.make_criterion else of_rows(recipe.criterion, data)
    return replace(bundle, recipe=replace(recipe, criterion=criterion))


def mixes_samples(
    criterion: Callable[..., Any], outputs: Any, targets: torch.Tensor
) -> Shapes | None:
    """Return the first shapes in which outputs are compared with the targets of other samples.

    torch broadcasts (n, 1) and (n,) to (n, n), silently for most losses. Comparisons of outputs
    with outputs, of targets with targets, and of operands with equally many dimensions are
    intended, and not reported. A copy of the criterion is called.

    Examples
    --------
    >>> def squared(outputs, targets):
    ...     return ((outputs - targets) ** 2).mean()
    >>> mixes_samples(squared, torch.ones(8, 1), torch.ones(8))
    (torch.Size([8, 1]), torch.Size([8]))
    """
    leaves = pytree.tree_map_only(
        torch.Tensor, lambda item: item.detach().requires_grad_(item.is_floating_point()), outputs
    )
    watch = _Watch(list(_tensors(leaves)), targets)
    # The criterion worked unwatched; if watching breaks it, that is no fault of the criterion.
    with suppress(Exception), watch:
        copy.deepcopy(criterion)(leaves, targets)
    return watch.mixed


def check_mixing(
    name: str, criterion: Any, outputs: Any, targets: torch.Tensor, users_targets: Any
) -> None:
    """Refuse a criterion that compares outputs of a model with the targets of other samples."""
    if mixed := mixes_samples(criterion, outputs, targets):
        (first, second), count = map(tuple, mixed), len(targets)
        raise Refusal(
            "the criterion must compare each output with the target of its own sample",
            f"model {name}: outputs {kinds_of(outputs)} and targets {kinds_of(users_targets)}, "
            f"of which it broadcasts {first} and {second} to all {count} × {count} pairs of a "
            "batch",
            "Give both the same shape, as by outputs.squeeze(1) in forward; for all pairs on "
            "purpose, the same number of dimensions, as outputs[:, None] and targets[None, :].",
        )


class _Watch(OperationWatch):
    """Tracks whether a tensor was computed from outputs, from targets, or from both."""

    def __init__(self, outputs: Sequence[torch.Tensor], targets: torch.Tensor) -> None:
        super().__init__()
        self.mixed: Shapes | None = None
        self.count = len(targets)
        # Kept alive: a later tensor must not get the storage of an earlier one.
        self.kept = [*outputs, targets]
        self.sources = {_storage(targets): _TARGETS}
        self.sources |= {_storage(item): _OUTPUTS for item in outputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands, made = list(_tensors((args, kwargs))), list(_tensors(result))
        sources = [self.sources.get(_storage(item), 0) for item in operands]
        for one, other in combinations(zip(operands, sources, strict=True), 2):
            is_pair = one[1] and other[1] and one[1] | other[1] == _OUTPUTS | _TARGETS
            if self.mixed is None and is_pair and self._broadcasts(one[0], other[0], made):
                self.mixed = one[0].shape, other[0].shape
        for item in made:
            place = _storage(item)
            self.kept.append(item)
            for source in (self.sources.get(place, 0), *sources):
                self.sources[place] = self.sources.get(place, 0) | source
        return result

    def _broadcasts(
        self, one: torch.Tensor, other: torch.Tensor, made: Sequence[torch.Tensor]
    ) -> bool:
        """Whether two operands were broadcast over each other's samples."""
        if one.dim() == other.dim() or _storage(one) == _storage(other) or self.count < 2:
            return False
        rank = max(one.dim(), other.dim())
        sizes = [(1,) * (rank - item.dim()) + tuple(item.shape) for item in (one, other)]
        pairs = list(zip(*sizes, strict=True))
        if not {(self.count, 1), (1, self.count)} <= set(pairs):
            return False
        # Element-wise operations only, not indexing.
        whole = [max(pair) for pair in pairs]
        return any(list(item.shape) == whole for item in made)


def adds_up(criterion: Callable[..., Any], outputs: Any, targets: torch.Tensor) -> bool:
    """Whether a loss sums over the samples of a batch: twice the samples give twice the loss.

    Examples
    --------
    >>> adds_up(torch.nn.MSELoss(reduction="sum"), torch.zeros(4, 1), torch.ones(4, 1))
    True
    """
    every = torch.arange(len(targets))
    # A criterion that does not take twice the samples has no such sum.
    with suppress(Exception):
        once = _loss_of(criterion, (outputs, targets), every)
        twice = _loss_of(criterion, (outputs, targets), every.repeat(2))
        return once != 0 and abs(twice - 2 * once) <= ALIKE * abs(once)
    return False


def check_weighing(name: str, criterion: Any, outputs: Any, targets: torch.Tensor) -> None:
    """Refuse a criterion that gives no losses of samples whose mean is its loss."""
    received = f"{type(as_given(criterion)).__name__} of model {name}"
    with suppress(Exception), torch.no_grad():
        if getattr(as_given(criterion), "reduction", "") == "mean":
            ones = torch.ones(len(targets), dtype=torch.float64)
            weighed = WeightedCriterion(copy.deepcopy(criterion))
            mean = float(weighed(outputs, WeightedTargets(targets, ones)))
            whole = float(copy.deepcopy(criterion)(outputs, targets))
            if math.isclose(mean, whole, rel_tol=ALIKE, abs_tol=1e-6):
                return
            received += f", {whole:.4g} on a batch, and {mean:.4g} as the mean of its losses"
    raise Refusal(
        "sample_weight needs a criterion with reduction='mean' that gives the loss of each sample "
        "for reduction='none'",
        received,
        "Pass one of torch such as nn.CrossEntropyLoss(), or give your own the attribute reduction "
        "and heed it; or draw samples by their weights, with sampler= in place of sample_weight=.",
    )


def check_parts(
    criterion: Callable[..., Any], outputs: Any, targets: torch.Tensor, parts: int, sums: bool
) -> None:
    """Refuse a criterion whose loss of a batch is not what its parts add up to.

    Its samples are tried in several orders: parts may be alike by chance. A random loss is spared.
    """
    every, batch = torch.arange(len(targets)), (outputs, targets)
    edges = [len(targets) * part // parts for part in range(parts + 1)]
    sizes = [high - low for low, high in pairwise(edges) if low < high]
    whole, again = (_loss_of(criterion, batch, every) for _ in range(2))
    for shift in range(min(ORDERS, len(targets))) if whole == again else ():
        rows = every.roll(shift)
        shares = [1.0] * len(sizes)
        if not sums:
            shares = means(criterion, sizes, lambda rows=rows: targets[rows])  # type: ignore[misc]
        together = math.fsum(
            share * _loss_of(criterion, batch, part)
            for share, part in zip(shares, torch.split(rows, sizes), strict=True)
            if share
        )
        if not math.isclose(whole, together, rel_tol=EXACT, abs_tol=1e-6):
            raise Refusal(
                "trainer='allreduce' needs a criterion that is the mean or the sum over samples: "
                "each process computes it on a part of the batch",
                f"one that is {whole:.4g} on a batch, and {together:.4g} as the mean over its "
                f"{parts} parts",
                "For class weights pass nn.CrossEntropyLoss(weight=...), whose mean is known; else "
                "pass trainer='averaging', or processes=1.",
            )


@torch.no_grad()
def _loss_of(criterion: Callable[..., Any], batch: Any, rows: torch.Tensor) -> float:
    """Return the loss of some samples of a batch, (outputs, targets), by a copy."""
    taken = pytree.tree_map_only(torch.Tensor, lambda item: item[rows], batch)
    return float(copy.deepcopy(criterion)(*taken))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (item for item in pytree.tree_leaves(tree) if isinstance(item, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    """Identify the storage that a tensor shares with its views."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
