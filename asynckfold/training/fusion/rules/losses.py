"""Loss functions: one loss for each replica, (R,)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import Layout, NotFusible, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule


def _check(reduction: str, size_average: Any, reduce: Any) -> None:
    if size_average is not None or reduce is not None:
        raise NotFusible("size_average and reduce, which torch deprecates")
    if reduction not in ("mean", "sum", "none", "batchmean"):
        raise NotFusible(f"reduction {reduction!r}")


def _elementwise_rule(function: Callable[..., Any]) -> Rule:
    """Return the rule of a loss that compares element with element."""

    def loss(
        low: Lowering,
        input: Value,
        target: Value,
        *,
        size_average: None = None,
        reduce: None = None,
        reduction: str = "mean",
        **settings: Any,
    ) -> Emitted:
        _check(reduction, size_average, reduce)
        rank = max(input.rank, target.rank)
        aligned = {
            name: low.aligned(item, rank) if isinstance(item, Value) else item
            for name, item in settings.items()
            if item is not None
        }
        nodes = low.aligned(input, rank), low.aligned(target, rank)
        found = low.emit(function, *nodes, reduction="none", **aligned)
        return Layout.STACKED, low.emit(_reduced, found, reduction)

    return loss


def _reduced(losses: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none" or losses.dim() == 1:
        return losses
    flat = losses.flatten(1)
    if reduction == "mean":
        return flat.mean(1)
    return flat.sum(1) / (losses.shape[1] if reduction == "batchmean" else 1)


def _classification_rule(name: str) -> Rule:
    """Return the rule of ``F.cross_entropy`` or ``F.nll_loss``."""

    def loss(
        low: Lowering,
        input: Value,
        target: Value,
        weight: Value | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Emitted:
        _check(reduction, size_average, reduce)
        if input.rank < 2:
            raise NotFusible(f"{name} without a batch dimension")
        probabilities = name == "cross_entropy" and target.example.dtype.is_floating_point
        if weight is not None and (probabilities or label_smoothing):
            raise NotFusible("class weights with label smoothing or with probabilities")
        nodes = low.stacked(input), low.stacked(target), weight and low.stacked(weight)
        settings: dict[str, Any] = {"ignore_index": ignore_index}
        if name == "cross_entropy":
            settings["label_smoothing"] = label_smoothing
        return Layout.STACKED, low.emit(
            _classified, name, *nodes, reduction, probabilities, settings
        )

    return loss


def _classified(
    function: str,
    scores: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    probabilities: bool,
    settings: dict[str, Any],
) -> torch.Tensor:
    """Return (R,) for scores (R, B, classes, ...): the replicas as one long batch, then apart."""
    width = scores.shape[0]
    joined = targets.flatten(0, 1)
    losses: torch.Tensor = getattr(F, function)(
        scores.flatten(0, 1), joined, reduction="none", **settings
    )
    losses = losses.view(width, -1, *losses.shape[1:])
    if probabilities:
        return _reduced(losses, reduction)
    counted = targets != settings["ignore_index"]
    shares = counted.to(losses.dtype)
    if weight is not None:
        known = targets.where(counted, 0).flatten(1)
        shares = weight.gather(1, known).view(shares.shape) * shares
        losses = losses * shares
    if reduction != "mean":
        return _reduced(losses, reduction)
    counts: torch.Tensor = shares.flatten(1).sum(1)
    return losses.flatten(1).sum(1) / counts


FUNCTIONS: dict[Any, Rule] = {
    **{
        getattr(F, name): _elementwise_rule(getattr(F, name))
        for name in (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "kl_div",
            "poisson_nll_loss",
        )
    },
    F.cross_entropy: _classification_rule("cross_entropy"),
    F.nll_loss: _classification_rule("nll_loss"),
}
